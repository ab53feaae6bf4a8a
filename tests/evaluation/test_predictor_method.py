"""The prefix predictor among the methods that are compared: the same budget, and nothing but earlier cases taught it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvcomm_p2p.evaluation.cases import Case, Scenario, cases
from kvcomm_p2p.evaluation.methods import Laboratory

NAME, BASELINE = "LSTM predictor", "first tokens"


@pytest.fixture(scope="module")
def several(word_runner: Any) -> list[Case]:
    """With one run each, three runs, and runs with holes."""
    kinds = (Scenario.ROLE, Scenario.REORDERED_BARE, Scenario.EDITED)
    return [case for kind in kinds for case in cases(word_runner, kind, 2, tokens=2)]


def rows(laboratory: Laboratory, case: Case, name: str = NAME, share: float = 0.1) -> list[int]:
    chosen: list[int] = laboratory.methods(case, share, seed=0)[name].rows.tolist()
    return chosen


@pytest.mark.parametrize("share", [0.02, 0.1, 0.3, 1.0])
def test_it_spends_what_the_others_spend_inside_the_runs(word_runner: Any, several: list[Case], share: float) -> None:
    laboratory = Laboratory(word_runner)
    for case in several:
        chosen = rows(laboratory, case, share=share)
        assert chosen == sorted(set(chosen)) and case.reusable[chosen].all()
        assert len(chosen) == len(rows(laboratory, case, BASELINE, share))
        laboratory.remember(case)


def test_before_it_has_seen_anything_it_takes_the_first_tokens(word_runner: Any, several: list[Case]) -> None:
    laboratory = Laboratory(word_runner)
    for case in several:
        assert rows(laboratory, case) == rows(laboratory, case, BASELINE)
        assert rows(laboratory, case) == rows(laboratory, case)  # asking teaches nothing


def test_every_run_of_a_case_teaches_it_once_and_only_afterwards(word_runner: Any, several: list[Case]) -> None:
    laboratory = Laboratory(word_runner)
    runs = 0
    for case in several:
        rows(laboratory, case)
        assert laboratory._predictor.observations == runs
        laboratory.remember(case)
        runs += len(case.runs)
    assert laboratory._predictor.observations == runs > len(several)
    assert laboratory._predictor.refused == 0


def test_the_same_cases_teach_the_same(word_runner: Any, several: list[Case]) -> None:
    chosen = []
    for _ in range(2):
        laboratory = Laboratory(word_runner)
        for case in several[:-1]:
            laboratory.remember(case)
        chosen.append(rows(laboratory, several[-1], share=0.2))
    assert chosen[0] == chosen[1]


def test_it_is_shown_heads_and_evenly_spaced_tokens(
    word_runner: Any, several: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    laboratory = Laboratory(word_runner)
    [case] = [case for case in several if case.scenario is Scenario.ROLE][:1]
    told: list[Any] = []
    monkeypatch.setattr(laboratory._predictor, "observe", lambda x, at, seen, **limits: told.append((x, at, seen)))
    laboratory.remember(case)
    [(x, at, seen)], [run] = told, case.runs
    assert len(x) == run.tokens
    assert len(at) == round(laboratory.LEARNED_SHARE * run.tokens)
    assert at[:16].tolist() == list(range(16))
    gaps = np.diff(at.numpy()[16:])
    assert len(gaps) > 4 and gaps.max() - gaps.min() <= 1
    true = laboratory.deviation(case)[run.start + at.numpy()]
    assert seen.tolist() == true.tolist() and (true >= 0).all()


def test_cases_without_a_context_are_predicted_too(word_runner: Any, several: list[Case]) -> None:
    case = replace(several[0], runs=tuple(replace(run, context=None) for run in several[0].runs))
    laboratory = Laboratory(word_runner)
    laboratory.remember(case)
    assert len(rows(laboratory, case)) == len(rows(laboratory, case, BASELINE))
