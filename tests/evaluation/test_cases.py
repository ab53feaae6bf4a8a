"""Prompts with copies computed elsewhere: what each scenario means, that they repeat, and what held out means."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvcomm_p2p.errors import UsageError
from kvcomm_p2p.evaluation.calibrate import KINDS, SEVERAL
from kvcomm_p2p.evaluation.cases import LENGTH_MIN, Case, Scenario, _roles, _texts, cases, copy_donor, prefilled
from kvcomm_p2p.evaluation.documents import Problem
from kvcomm_p2p.model.cache import OpaqueCache
from kvcomm_p2p.protocol.anchors import BLOCK_TOKENS
from kvcomm_p2p.reuse.blocks import block_tensors

TOKENS = 2
SHINGLE_TOKENS = 24
"""Longer stretches of different documents are not equal by chance."""

Make = Callable[..., list[Case]]


@pytest.fixture(scope="module")
def make(word_runner: Any) -> Make:
    """`make(scenario, count, **options of cases)`, each asked for once."""
    made: dict[tuple[Any, ...], list[Case]] = {}

    def of(scenario: Scenario, count: int, **options: Any) -> list[Case]:
        key = (scenario, count, *sorted(options.items()))
        if key not in made:
            made[key] = list(cases(word_runner, scenario, count, tokens=TOKENS, **options))
        return made[key]

    return of


@pytest.mark.parametrize("scenario", list(Scenario))
def test_cases_are_the_same_every_time_and_the_first_ones_whatever_their_number(
    word_runner: Any, make: Make, scenario: Scenario
) -> None:
    again = list(cases(word_runner, scenario, 1, tokens=TOKENS)) + make(scenario, 3)[1:]
    for one, other in zip(make(scenario, 3), again, strict=True):
        assert np.array_equal(one.token_ids, other.token_ids)
        assert [run.pieces for run in one.runs] == [run.pieces for run in other.runs]
        assert one.full.token_ids == other.full.token_ids


@pytest.mark.parametrize("scenario", list(Scenario))
def test_runs_hold_the_tokens_of_their_copies_and_never_the_last_of_the_prompt(make: Make, scenario: Scenario) -> None:
    for case in make(scenario, 3):
        assert case.runs
        assert [run.start for run in case.runs] == sorted(run.start for run in case.runs)
        inside = np.zeros(len(case.token_ids), dtype=int)
        for run in case.runs:
            for piece in run.pieces:
                theirs = run.donor.token_ids[piece.donor_start : piece.donor_start + piece.length]
                assert np.array_equal(case.token_ids[piece.prompt_start : piece.prompt_end], theirs)
                inside[piece.prompt_start : piece.prompt_end] += 1
        assert inside.max() == 1 and not inside[-1]
        assert np.array_equal(case.reusable, inside.astype(bool))
        assert 0.3 < case.reusable.mean() < 1


@pytest.mark.parametrize("scenario", list(KINDS))
def test_planning_sees_in_a_copy_what_its_scenario_stands_for(make: Make, scenario: Scenario) -> None:
    for case in make(scenario, 6):
        [run] = case.runs
        assert run.provenance in KINDS[scenario]


@pytest.mark.model
@pytest.mark.parametrize("scenario", list(KINDS))
def test_planning_sees_the_same_with_the_default_models_tokenizer(
    tiny_llama: Callable[..., Any], scenario: Scenario
) -> None:
    from transformers import AutoTokenizer

    from kvcomm_p2p.model.registry import DEFAULT_MODEL, find_folder
    from kvcomm_p2p.model.runner import ModelRunner
    from kvcomm_p2p.settings import Settings

    tokenizer = AutoTokenizer.from_pretrained(find_folder(DEFAULT_MODEL, Settings.from_env().cache_dir))
    shape = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    model = tiny_llama(vocab_size=len(tokenizer), max_position_embeddings=4096, **shape)
    runner = ModelRunner.from_model(model, tokenizer, "tiny")
    for held_out in (False, True):
        for case in cases(runner, scenario, 12, tokens=1, held_out=held_out):
            [run] = case.runs
            assert run.provenance in KINDS[scenario]


def test_a_bare_copy_has_nothing_before_the_document(make: Make) -> None:
    for case in make(Scenario.BARE, 3):
        [run] = case.runs
        assert run.pieces[0].donor_start <= 1 and run.donor.end - run.pieces[-1].donor_start - run.tokens <= 1


def test_reordered_documents_come_from_one_copy_in_another_order(make: Make) -> None:
    for case in make(Scenario.REORDERED, 3):
        first, second = case.runs
        assert first.donor is second.donor
        assert first.pieces[0].donor_start > second.pieces[-1].donor_start
        assert second.tokens > 1.5 * first.tokens


def test_documents_computed_bare_come_from_three_copies(make: Make) -> None:
    for case in make(Scenario.REORDERED_BARE, 3):
        assert len({id(run.donor) for run in case.runs}) == len(case.runs) == len(case.copies) == 3


def test_an_edited_document_has_holes(make: Make) -> None:
    made = make(Scenario.EDITED, 6)
    whole = make(Scenario.ROLE, 6)
    assert sum(len(case.runs[0].pieces) > 1 for case in made) >= 4
    kept = sum(int(case.reusable.sum()) for case in made) / sum(int(case.reusable.sum()) for case in whole)
    assert 0.75 < kept < 0.98


def test_short_blocks_are_short(make: Make) -> None:
    lengths = [piece.length for case in make(Scenario.SHORT, 4) for run in case.runs for piece in run.pieces]
    assert min(lengths) < LENGTH_MIN
    assert max(lengths) < 140


def test_short_blocks_can_be_given_problems(word_runner: Any) -> None:
    problems = [
        Problem(f"How many apples has Ann, who had {n} and ate one? ", f"She has {n - 1} left. " * 4) for n in (5, 9)
    ]
    made = list(cases(word_runner, Scenario.SHORT, 2, tokens=TOKENS, problems=problems))
    for case, problem in zip(made, problems, strict=True):
        text = word_runner.tokenizer.decode(case.token_ids)
        assert problem.question in text and problem.answer in text
    with pytest.raises(UsageError, match="3 problems are needed, 2 were given"):
        cases(word_runner, Scenario.SHORT, 3, problems=problems)


def test_held_out_prompts_share_no_document_with_those_that_are_calibrated_on(make: Make) -> None:
    calibrated = shingles(case for scenario in (*KINDS, *SEVERAL) for case in make(scenario, 6))
    for scenario in Scenario:
        held_out = shingles(make(scenario, 3, held_out=True))
        assert not calibrated & held_out
        assert held_out & shingles(make(scenario, 3, held_out=True))
    assert calibrated & shingles(make(Scenario.EDITED, 3)), "what is not held out would be seen"


def shingles(made: Iterable[Case]) -> set[bytes]:
    """Stretches of the copies' documents; system prompts and questions are the same everywhere and do not count."""
    found: set[bytes] = set()
    for case in made:
        longest = max((piece for run in case.runs for piece in run.pieces), key=lambda piece: piece.length)
        ids = case.token_ids[longest.prompt_start : longest.prompt_end]
        found |= {ids[at : at + SHINGLE_TOKENS].tobytes() for at in range(len(ids) - SHINGLE_TOKENS + 1)}
    return found


def test_used_up_texts_come_again_behind_other_roles(word_runner: Any) -> None:
    made = list(_texts(word_runner, Scenario.REORDERED, 70, held_out=True))
    first = {texts[0]: roles for roles, texts in reversed(made)}
    repeated = [(roles, first[texts[0]]) for number, (roles, texts) in enumerate(made) if first[texts[0]] < number]
    assert len(made) == 70 and repeated
    for roles, earlier in repeated:
        assert _roles(roles) != _roles(earlier)


def test_a_copy_holds_the_rows_of_its_prefill(word_runner: Any) -> None:
    ids = np.arange(10, 110, dtype=np.uint32)
    cache, _ = prefilled(word_runner, ids)
    copy = copy_donor(word_runner, ids, cache)
    [anchor] = copy.donor.anchors
    assert (anchor.start, anchor.end, len(copy.blocks)) == (0, 100, 4)
    for key, data in copy.blocks.items():
        first = key.index * BLOCK_TOKENS
        rows = slice(first, first + anchor.block_tokens(key.index))
        keys, values = block_tensors(data, word_runner.spec.layout, anchor.block_tokens(key.index))
        assert torch.equal(keys, cache.keys[:, 0, :, rows]) and torch.equal(values, cache.values[:, 0, :, rows])


def test_a_cache_shorter_than_the_prompt_is_no_copy(word_runner: Any) -> None:
    with pytest.raises(UsageError, match="holds 0 of the donor's 100"):
        copy_donor(word_runner, np.arange(100, dtype=np.uint32), word_runner.new_cache(200))


def test_models_whose_kv_stays_at_home_are_refused(word_runner: Any) -> None:
    spec = SimpleNamespace(name="odd", share_refusal="it keeps running states")
    runner: Any = SimpleNamespace(spec=spec, new_cache=lambda tokens: OpaqueCache(word_runner.model.config))
    with pytest.raises(UsageError, match="KV of odd cannot be exchanged: it keeps running states"):
        prefilled(runner, np.arange(9, dtype=np.uint32))
