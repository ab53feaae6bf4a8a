"""What is measured of a request, and the rows that are made of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import sacrebleu
from hypothesis import given
from hypothesis import strategies as st

from kvcomm_p2p.errors import ConfigError
from kvcomm_p2p.evaluation import scores
from kvcomm_p2p.evaluation.plots import draw
from kvcomm_p2p.evaluation.results import Row
from kvcomm_p2p.evaluation.scores import (
    Failure,
    Published,
    Sample,
    bleu_terms,
    common_beginning,
    copied_share,
    corpus_bleu,
    extra,
)
from kvcomm_p2p.evaluation.summary import Case, divergence_rows, estimate, rows

SHORT = st.lists(st.integers(0, 2), max_size=30)


def naive_possible(sequences: list[list[int]], prompt: list[int], width: int) -> int:
    """Position by position."""
    covered = set()
    for start in range(len(prompt) - width + 1):
        piece = prompt[start : start + width]
        if any(piece == other[at : at + width] for other in sequences for at in range(len(other) - width + 1)):
            covered |= set(range(start, start + width))
    return len(covered)


@given(st.lists(SHORT, max_size=3), SHORT)
def test_possible_counts_tokens_in_runs_that_were_published(sequences: list[list[int]], prompt: list[int]) -> None:
    published = Published(run_tokens=4)
    for sequence in sequences:
        published.add(sequence)
    assert published.possible(prompt) == naive_possible(sequences, prompt, 4)


def test_token_ids_are_compared_whole() -> None:
    published = Published(run_tokens=2)
    published.add([1, 256, 1])
    assert published.possible([256, 1]) == 2
    assert published.possible([0, 1, 0]) == 0  # the same bytes, shifted


@given(SHORT, SHORT)
def test_copied_share_is_the_share_of_pieces_in_the_prompt(answer: list[int], prompt: list[int]) -> None:
    share = copied_share(answer, prompt)
    pieces = [answer[at : at + 8] for at in range(len(answer) - 7)]
    inside = [any(piece == prompt[at : at + 8] for at in range(len(prompt) - 7)) for piece in pieces]
    assert share == (sum(inside) / len(inside) if inside else None)


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint32)


def test_common_beginning() -> None:
    assert common_beginning(ids(1, 2, 3), ids(1, 2, 4, 5)) == 2
    assert common_beginning(ids(1, 2), ids(1, 2, 3)) == 2
    assert common_beginning(ids(), ids(1)) == 0
    assert common_beginning(ids(2, 1), ids(1, 1)) == 0


TEXTS = st.text("ab ,.", max_size=24)


@given(st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=5))
def test_bleu_from_sums_is_the_bleu_of_the_corpus(pairs: list[tuple[str, str]]) -> None:
    terms = np.sum([bleu_terms(answer, reference) for answer, reference in pairs], axis=0)
    answers, references = zip(*pairs, strict=True)
    expected = sacrebleu.corpus_bleu(list(answers), [list(references)]).score
    assert corpus_bleu(terms) == pytest.approx(expected)


def test_a_missing_extra_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name="sacrebleu")

    monkeypatch.setattr(scores, "import_module", missing)
    with pytest.raises(ConfigError, match=r"needs sacrebleu.*pip install 'kvcomm-p2p\[eval\]'"):
        extra("sacrebleu.metrics")


def test_an_extra_that_is_broken_inside_is_not_called_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'lxml'", name="lxml")

    monkeypatch.setattr(scores, "import_module", broken)
    with pytest.raises(ModuleNotFoundError, match="lxml"):
        extra("sacrebleu.metrics")


def sample(number: int, task: str = "", **changes: Any) -> Sample:
    """100 prompt tokens of which 20 were recomputed; the answer is full prefill's."""
    given: dict[str, Any] = {
        "task": task or f"task {number}",
        "agent": "a",
        "number": number,
        "cold": number == 0,
        "prompt_ids": np.arange(100, dtype=np.uint32),
        "covered_tokens": 90,
        "recomputed_tokens": 20,
        "possible_tokens": 95,
        "kl": (0.0, 0.01),
        "top1": 1.0,
        "answer_ids": np.arange(50, 60, dtype=np.uint32),
        "dense_answer_ids": np.arange(50, 60, dtype=np.uint32),
        "answer": "it is a b c d",
        "dense_answer": "it is a b c d",
        "score": None,
        "dense_score": None,
        "ttft_s": 0.5,
        "dense_ttft_s": 2.0,
    }
    return Sample(**(given | changes))


def table(case: Case) -> dict[str, Row]:
    found = rows(case, 0)
    assert {row.case for row in found} == {case.name} if found else True
    metrics = [row.metric for row in found]
    assert len(set(metrics)) == len(metrics)
    return {row.metric: row for row in found}


def test_hit_rates_are_shares_of_tokens_apart_for_cold_and_steady_requests() -> None:
    cold = sample(0, covered_tokens=0, recomputed_tokens=100, possible_tokens=0)
    longer = sample(1, prompt_ids=np.arange(300, dtype=np.uint32), covered_tokens=300, recomputed_tokens=0)
    found = table(Case("rag", "balanced", samples=[cold, longer, sample(2)]))
    assert found["tokens covered by donors, cold"].value == 0.0
    assert found["tokens covered by donors, steady"].value == pytest.approx(100 * 390 / 400)
    assert found["tokens not recomputed, steady"].value == pytest.approx(100 * 380 / 400)
    assert found["tokens recomputed, steady"].value == pytest.approx(100 * 20 / 400)
    assert found["tokens possible to cover, steady"].n == 2
    assert found["prompt tokens, mean"].value == pytest.approx(500 / 3)


def test_divergence_is_told_of_requests_that_took_something_over() -> None:
    nothing = sample(0, recomputed_tokens=100, kl=(5.0,))
    found = table(Case("rag", "balanced", samples=[nothing, sample(1, kl=(0.0, 0.1)), sample(2, kl=(0.2, 0.4))]))
    assert found["KL from full prefill, mean"].value == pytest.approx(0.175)
    assert found["KL from full prefill, worst request"].value == pytest.approx(0.3)
    assert (found["KL from full prefill, largest of tokens"].value, found["same most likely token"].n) == (0.4, 2)
    alone = table(Case("rag", "dense", samples=[nothing]))
    assert alone["KL from full prefill, mean"].value == 5.0


def test_the_guards_prediction_is_compared_with_what_was_measured() -> None:
    predicted = {1: (0.03, 0.012), 2: (0.03, 0.009), 3: (0.03, 0.091), 4: (1e-6, 1e-5), 5: (None, 0.06)}
    samples = [sample(n, kl=(measured,), predicted_kl=guess) for n, (guess, measured) in predicted.items()]
    dense_after_all = sample(6, fallback="0.2 predicted", predicted_kl=0.2)
    found = table(Case("rag", "balanced", samples=[*samples, dense_after_all]))
    within = found["guard: predicted KL within a factor of 3"]
    assert (within.value, within.n) == (50.0, 4)
    assert found["guard: passed above 0.05 nats/token"].value == 25.0
    assert found["guard: predicted over measured KL, median"].value == pytest.approx((1.0 + 2.5) / 2)
    assert not any(metric.startswith("guard: ") for metric in table(Case("rag", "exact", samples=[sample(0)])))


def test_answers_are_compared_as_they_were_generated() -> None:
    other = sample(1, answer_ids=ids(50, 51, 1, 2), answer="it is x", kl=(0.0,))
    found = table(Case("code", "balanced", samples=[sample(0), other]))
    same = found["greedy answer: identical tokens, mean"]
    assert (same.value, same.baseline) == (6.0, 10.0)
    assert found["greedy answer: wholly identical"].value == 50.0
    assert 0 < found["BLEU against full prefill's answer"].value < 100
    assert found["answer copied from the prompt"].baseline == 100.0
    assert "answer copied from the prompt: change" in found


def test_task_scores_stand_beside_full_prefills_with_the_interval_of_the_pairs() -> None:
    scored = [sample(n, score=float(n % 2), dense_score=1.0) for n in range(8)]
    found = table(Case("mathematics", "balanced", "right final number", samples=[*scored, sample(9)]))
    assert (found["right final number"].value, found["right final number"].baseline) == (50.0, 100.0)
    assert found["right final number"].n == 8
    change = found["right final number: change"]
    assert change.value == -50.0
    assert change.ci95 is not None and change.ci95[0] < -50.0 < change.ci95[1] <= 0.0


def test_times_have_percentiles_of_full_prefill_as_baseline() -> None:
    found = table(Case("rag", "balanced", samples=[sample(n, ttft_s=0.1 * (n + 1)) for n in range(10)]))
    first = found["first token, p50, all"]
    assert (first.value, first.baseline, first.n) == (pytest.approx(0.55), 2.0, 10)
    assert first.ratio == pytest.approx(2.0 / 0.55)
    assert found["first token, p99, steady"].n == 9


def test_failures_and_fallbacks_are_rows() -> None:
    failures = [Failure("t", "a", 1, "too long"), Failure("t", "a", 2, "too long"), Failure("t", "a", 3, "KeyError: 1")]
    found = table(Case("rag", "fast", samples=[sample(0, fallback="the heads differ")], failures=failures))
    assert (found["failed: too long"].value, found["failed: too long"].n) == (2, 4)
    assert found["failed: KeyError: 1"].value == 1
    assert found["full prefill after all (guard)"].value == 1
    assert set(table(Case("rag", "fast", failures=failures))) == {"failed: too long", "failed: KeyError: 1"}
    assert rows(Case("rag", "fast"), 0) == []


def test_whole_tasks_are_drawn_for_intervals() -> None:
    def mean(sums: Any) -> float:
        return float(sums[0] / sums[1])

    values = [(float(n), 1) for n in (0, 10) for _ in range(20)]
    apart = estimate([str(n) for n in range(40)], values, mean, 0)
    together = estimate([str(n % 10 if n < 20 else n % 10 + 10) for n in range(40)], values, mean, 0)
    assert apart is not None and apart.ci95 is not None and together is not None and together.ci95 is not None
    assert apart.value == together.value == 5.0
    assert apart.ci95[1] - apart.ci95[0] < together.ci95[1] - together.ci95[0]
    few = estimate(["a", "b", "a", "b"], values[:4], mean, 0)
    assert few is not None and few.ci95 is None
    assert estimate(["a"], [None], mean, 0) is None


def test_controls_get_the_same_metrics() -> None:
    control = divergence_rows("rag, control: no rotation", [(1.0, 2.0)], [0.5], 0)
    case = table(Case("rag", "balanced", samples=[sample(0)]))
    assert {row.metric for row in control} <= set(case)


def test_pictures(tmp_path: Any) -> None:
    cases = [Case("rag", mode, samples=[sample(n) for n in range(3)]) for mode in ("balanced", "exact")]
    written = draw(tmp_path / "new", [*cases, Case("code", "balanced")])
    assert [path.name for path in written] == ["rag-ttft.png", "rag-kl.png", "rag-coverage.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
