"""What short runs cost that are corrected from memory: measured, judged, told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvcomm_p2p.evaluation.calibrate_short import (
    KL_SHORT_MAX,
    SAMPLES_MIN,
    ShortSample,
    judge_short,
    measure_short,
    rows_short,
    short_runs,
)
from kvcomm_p2p.evaluation.cases import LENGTH_MIN, Scenario, cases
from kvcomm_p2p.evaluation.documents import Problem
from kvcomm_p2p.model.runner import ModelRunner
from kvcomm_p2p.planning.types import Provenance

ROLE, NEAR = Provenance.ROLE, Provenance.NEAR


def samples(kl: float, moved: float, count: int = SAMPLES_MIN, provenance: Provenance = ROLE) -> list[ShortSample]:
    """Of prompts a quarter of which is short runs."""
    return [ShortSample(provenance, 0.25, kl, moved) for _ in range(count)]


def test_what_is_kept_is_the_divergence_of_a_wholly_reused_prompt() -> None:
    assert judge_short([*samples(0.002, 0.003), *samples(0.001, 0.004, provenance=NEAR)]) == {NEAR: 0.004, ROLE: 0.008}


@pytest.mark.parametrize(
    "measured",
    [
        [],
        samples(0.001, 0.002, SAMPLES_MIN - 1),
        samples(1.01 * KL_SHORT_MAX / 4, 1.0),
        samples(0.002, 0.002),
        samples(float("nan"), 0.002),
    ],
)
def test_what_memory_does_not_help_enough_is_recomputed(measured: list[ShortSample]) -> None:
    assert judge_short(measured) == {}


def test_rows_tell_what_memory_is_worth() -> None:
    table = rows_short(samples(0.001, 0.002))
    assert [(row.case, row.value) for row in table] == [
        ("short runs, role: corrected from memory", 0.004),
        ("short runs, role: moved only", 0.008),
    ]


def test_short_pieces_alone_are_reused(word_runner: Any) -> None:
    for case in cases(word_runner, Scenario.SHORT, 2, tokens=2):
        short = short_runs(case)
        assert short is not None
        assert [len(run.pieces) for run in short.runs] == [1] * len(short.runs)
        assert all(16 <= run.tokens < LENGTH_MIN for run in short.runs)
        inside = [piece for run in case.runs for piece in run.pieces if piece.length < LENGTH_MIN]
        assert int(short.reusable.sum()) == sum(piece.length for piece in inside)


def test_memory_is_that_of_earlier_prompts_of_the_same_templates(
    word_runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert measure_short(word_runner, prompts=2, tokens=3) == [], "random words are like nothing that is remembered"
    monkeypatch.setattr("kvcomm_p2p.evaluation.methods.CORRECTED_SHARE_MIN", 0.1)
    found = measure_short(word_runner, prompts=2, tokens=3)
    assert len(found) == 2
    few = [Problem("How many boats are there?", "Two boats, and two more, are four boats.")] * 3
    assert measure_short(word_runner, prompts=2, tokens=3, problems=few) == [], "too few to remember enough"
    for sample in found:
        assert 0 < sample.share < 0.5 and np.isfinite([sample.kl, sample.kl_moved]).all()
    alike = list(cases(word_runner, Scenario.SHORT, 3, tokens=1, one_template=True))
    assert len({case.token_ids[:30].tobytes() for case in alike}) == 1
    assert len({case.token_ids.tobytes() for case in alike}) == 3
