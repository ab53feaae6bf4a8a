"""Whole evaluations on real agents with a tiny model."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcomm_p2p.errors import ConfigError, UsageError
from kvcomm_p2p.evaluation import eval as evaluation
from kvcomm_p2p.evaluation.eval import measure, run
from kvcomm_p2p.evaluation.results import Row
from kvcomm_p2p.evaluation.summary import Case
from kvcomm_p2p.evaluation.workloads.catalogue import Data
from kvcomm_p2p.evaluation.workloads.types import Ask, Conversation, Task, Workload, chat_messages
from kvcomm_p2p.settings import Settings

ROLES = {"one": "You are the first agent of two, and brief. " * 3, "two": "Somebody else spoke before you did. " * 4}
TEXT = "The quick brown fox jumps over the lazy dog while nobody looks. " * 6


def settings(folder: Path) -> Settings:
    return Settings(
        state_dir=folder, cache_dir=folder, runtime_dir=folder, gossip_interval_s=0.03, pool_bytes_max=64 << 20
    )


def ask(agent: str, question: str, score: Callable[[str], float] | None = None, **slots: str) -> Ask:
    return Ask(agent, chat_messages(ROLES[agent], f"{{text}}\n\n{question}"), {"text": TEXT, **slots}, score)


def workload(*conversations: Callable[[], Conversation]) -> Workload:
    return Workload("tiny", ROLES, tuple(Task(f"task {n}", 2, each) for n, each in enumerate(conversations)), "is long")


def talk() -> Conversation:
    answer = yield ask("one", "What does it jump over?")
    yield ask("two", f"Somebody said: {answer}. Is that right?", score=lambda text: float(len(text) > 0))


def measured(runner: Any, folder: Path, work: Workload, mode: str) -> Case:
    case = Case(work.name, mode, work.score_name)
    measure(runner, work, case, tokens=6, settings=settings(folder))
    return case


@pytest.mark.parametrize("mode", ["exact", "dense"])
def test_exact_answers_are_full_prefills_and_donors_are_counted(chat_runner: Any, tmp_path: Path, mode: str) -> None:
    case = measured(chat_runner, tmp_path, workload(talk, talk), mode)
    assert case.failures == []
    assert [(s.task, s.agent, s.number, s.cold) for s in case.samples] == [
        ("task 0", "one", 0, True),
        ("task 0", "two", 1, True),
        ("task 1", "one", 2, False),
        ("task 1", "two", 3, False),
    ]
    for sample in case.samples:
        assert sample.same_answer and sample.top1 == 1.0 and max(sample.kl) < 1e-6
        assert min(sample.ttft_s, sample.dense_ttft_s) > 0
        assert max(sample.covered_tokens, sample.possible_tokens) <= sample.prompt_tokens
    first, second, again, _ = case.samples
    assert first.possible_tokens == 0 and second.possible_tokens > len(TEXT) - 32
    assert again.possible_tokens == again.prompt_tokens  # the whole prompt, once more
    if mode == "exact":
        assert first.covered_tokens == 0
        assert second.covered_tokens > 0.6 * second.prompt_tokens
        assert again.covered_tokens >= again.prompt_tokens - 1
    else:
        assert {s.covered_tokens for s in case.samples} == {0}
    assert [s.score for s in case.samples] == [None, 1.0, None, 1.0]


def test_answers_go_into_the_next_prompt(chat_runner: Any, tmp_path: Path) -> None:
    case = measured(chat_runner, tmp_path, workload(talk), "exact")
    first, second = case.samples
    prompt = chat_runner.tokenizer.decode(second.prompt_ids)
    assert f"Somebody said: {first.answer}. Is that right?" in prompt


def test_a_request_that_fails_is_a_failure_and_the_others_go_on(chat_runner: Any, tmp_path: Path) -> None:
    heard = []

    def broken() -> Conversation:
        heard.append((yield ask("one", "No marker for what follows.", unused="x")))

        def fail(text: str) -> float:
            raise KeyError("score")

        heard.append((yield ask("two", "Scored by something that fails.", score=fail)))

    case = measured(chat_runner, tmp_path, workload(broken, talk), "exact")
    assert heard == ["", ""]
    assert len(case.samples) == 2
    assert "unused" in case.failures[0].reason
    assert case.failures[1].reason == "KeyError: 'score'"
    assert not any(sample.cold for sample in case.samples)


def test_an_interrupt_keeps_what_was_measured(
    chat_runner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(text: str) -> float:
        signal.raise_signal(signal.SIGINT)
        return 0.0

    def ends() -> Conversation:
        yield ask("one", "What?")
        yield ask("two", "And?", score=interrupted)
        raise AssertionError("asked after an interrupt")

    monkeypatch.setattr(evaluation, "build", lambda *_: workload(talk, ends))
    found = run(workload="creative", model=chat_runner, tokens=4, settings=settings(tmp_path), modes=["exact", "dense"])
    assert found.interrupted
    assert [case.name for case in found.cases] == ["tiny, exact"]
    assert len(found.cases[0].samples) == 3
    assert {row.case for row in found.result.rows} == {"tiny, exact"}
    assert len(found.tables()) == 1


def test_what_breaks_one_case_spares_the_others(
    chat_runner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks() -> Conversation:
        yield ask("one", "What?")
        raise RuntimeError("a conversation's own mistake")

    works = iter([workload(breaks), workload(talk)])
    monkeypatch.setattr(evaluation, "build", lambda *_: next(works))
    found = run(workload="all", model=chat_runner, tokens=4, settings=settings(tmp_path), data=Data())
    broken, fine = found.cases
    assert len(broken.samples) == 1 and "conversation's own mistake" in broken.failures[0].reason
    assert len(fine.samples) == 2 and not fine.failures
    assert set(found.skipped) == {"mathematics", "code"}


def test_a_whole_run_with_pictures_and_controls(chat_runner: Any, tmp_path: Path) -> None:
    def controls(runner: Any, case: Case) -> list[Row]:
        assert runner is chat_runner and len(case.samples) == 2
        return [Row(f"{case.name}, control", "KL from full prefill, mean", 1.0, "nats/token", 2)]

    found = run(
        workload="creative",
        modes=["exact", "balanced", "exact"],
        model=chat_runner,
        requests=2,
        tokens=4,
        settings=settings(tmp_path),
        plots=tmp_path / "plots",
        controls=controls,
    )
    assert not found.interrupted and not found.skipped
    names = list(dict.fromkeys(row.case for row in found.result.rows))
    assert names == [
        "creative, exact",
        "creative, exact, control",
        "creative, balanced",
        "creative, balanced, control",
    ]
    tables = found.tables()
    assert [table.title for table in tables] == ["kvcomm eval: creative, exact", "kvcomm eval: creative, balanced"]
    assert sum(table.row_count for table in tables) == len(found.result.rows)
    assert len(list((tmp_path / "plots").iterdir())) == 3
    assert found.result.command == "eval creative"


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"workload": "chess"}, UsageError, "rag, mathematics"),
        ({"workload": "rag", "modes": ["quick"]}, UsageError, "quick"),
        ({"workload": "mathematics"}, ConfigError, "--gsm8k"),
        ({"workload": "code", "data": Data(humaneval=Path("none.jsonl"))}, ConfigError, "none.jsonl"),
        ({"workload": "creative", "requests": 0}, UsageError, "at least 1"),
    ],
)
def test_mistakes_are_told_before_anything_is_measured(
    chat_runner: Any, tmp_path: Path, options: dict[str, Any], error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        run(model=chat_runner, settings=settings(tmp_path), **options)
