"""The hand-made reuse path on a tiny model: controls that must hold, budgets, memory, plans and the guard."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcomm_p2p.evaluation.cases import Case, Scenario, cases, copy_donor, prefilled
from kvcomm_p2p.evaluation.methods import Filling, Laboratory, Outcome, largest, plan_of
from kvcomm_p2p.evaluation.metrics import continue_greedily
from kvcomm_p2p.planning.candidates import find_candidates
from kvcomm_p2p.planning.divergence import DivergenceFit
from kvcomm_p2p.planning.types import Provenance, Repair, ReuseRules, SpanKind
from kvcomm_p2p.reuse.guard import Verdict

RULES = ReuseRules(approximate=True, reason="", guard_probes=6)
UNWATCHED = ReuseRules(approximate=True, reason="", hole_head_tokens=0)
NOTHING = np.empty(0, np.int64)
TOKENS = 3
FREE = {"rotation only", "control: no rotation", "control: wrong blocks"}
FROM_MEMORY = {"KVCOMM's anchors", "nearest tokens' deviations"}


@pytest.fixture(scope="module")
def role(word_runner: Any) -> Case:
    return next(cases(word_runner, Scenario.ROLE, 1, tokens=TOKENS))


@pytest.fixture(scope="module")
def bare(word_runner: Any) -> Case:
    """Three runs from three copies."""
    return next(cases(word_runner, Scenario.REORDERED_BARE, 1, tokens=TOKENS))


@pytest.fixture(scope="module")
def edited(word_runner: Any) -> Case:
    """A run with holes."""
    return next(case for case in cases(word_runner, Scenario.EDITED, 6, tokens=TOKENS) if len(case.runs[0].pieces) > 2)


@pytest.fixture
def laboratory(word_runner: Any) -> Laboratory:
    return Laboratory(word_runner)


def kl(outcome: Outcome) -> float:
    return outcome.divergence.kl_mean


def constant(predicted: float) -> DivergenceFit:
    """Predicts the same for everything."""
    return DivergenceFit(float(np.log(predicted)), 0.0, 0.0, 0.0, 0.0, 8)


def test_a_copy_of_the_same_prompt_is_exact_to_the_bit(word_runner: Any, laboratory: Laboratory, role: Case) -> None:
    ids = role.token_ids
    cache, logits = prefilled(word_runner, ids, TOKENS)
    copy = copy_donor(word_runner, ids, cache)
    runs = [run.clipped(0, len(ids) - 1) for run in find_candidates(ids, [copy.donor], 64)]
    full = continue_greedily(word_runner, cache, logits, TOKENS)
    case = Case(Scenario.ROLE, ids, (copy,), cache, full, tuple(run for run in runs if run is not None))
    assert case.reusable.sum() == len(ids) - 1
    aligned = laboratory.aligned(case)
    rows = slice(0, len(ids) - 1)
    assert torch.equal(aligned.keys[:, :, :, rows], cache.keys[:, :, :, rows])
    assert torch.equal(aligned.values[:, :, :, rows], cache.values[:, :, :, rows])
    assert laboratory.deviation(case)[:-1].max() == 0.0
    assert kl(laboratory.compare(case, Filling(NOTHING))) < 1e-9


def test_layer_0_of_a_rotated_run_is_right_and_of_an_unrotated_one_is_not(laboratory: Laboratory, role: Case) -> None:
    [run] = role.runs
    assert run.start != run.pieces[0].donor_start
    rows = slice(run.start, run.end)
    true = role.cache.keys[0, 0, :, rows]
    rotated, unrotated = (laboratory.aligned(role, rotate=rotate).keys[0, 0, :, rows] for rotate in (True, False))
    torch.testing.assert_close(rotated, true, atol=1e-4, rtol=1e-4)
    assert float((unrotated - true).norm() / true.norm()) > 0.1


@pytest.mark.parametrize("name", ["role", "bare", "edited"])
@pytest.mark.parametrize("share", [0.01, 0.1, 0.3])
def test_every_method_recomputes_its_budget_to_the_token(
    request: pytest.FixtureRequest, laboratory: Laboratory, name: str, share: float
) -> None:
    case = request.getfixturevalue(name)
    tokens = int(case.reusable.sum())
    found = laboratory.methods(case, share, seed=1)
    assert set(found) > FREE
    for method, filling in found.items():
        assert len(filling.rows) == (0 if method in FREE else round(share * tokens)), method
        assert len(np.unique(filling.rows)) == len(filling.rows) and case.reusable[filling.rows].all()
    outcome = laboratory.compare(case, found["first 32, probes and shift"])
    assert outcome.cost == round(share * tokens) / tokens


def test_without_a_budget_only_what_costs_nothing_is_compared(laboratory: Laboratory, role: Case) -> None:
    assert set(laboratory.methods(role, 0.0, seed=0)) == FREE


@pytest.mark.parametrize("name", ["role", "bare", "edited"])
def test_recomputing_everything_is_full_prefill(
    request: pytest.FixtureRequest, laboratory: Laboratory, name: str
) -> None:
    case = request.getfixturevalue(name)
    for method, filling in laboratory.methods(case, 1.0, seed=0).items():
        outcome = laboratory.compare(case, filling)
        assert outcome.cost == (0.0 if method in FREE else 1.0)
        assert (kl(outcome) < 1e-6) == (method not in FREE), method


def test_controls_come_out_worse(laboratory: Laboratory, role: Case) -> None:
    found = laboratory.methods(role, 0.5, seed=0)
    rotated, unrotated, wrong, oracle = (
        kl(laboratory.compare(role, found[name]))
        for name in (*sorted(FREE, reverse=True), "oracle: largest true deviation")
    )
    assert sorted(FREE, reverse=True)[0] == "rotation only"
    assert oracle < rotated < min(unrotated, wrong)


def test_full_prefill_in_two_halves_is_full_prefill(laboratory: Laboratory, bare: Case) -> None:
    outcome = laboratory.noise(bare)
    assert kl(outcome) < 1e-7
    assert outcome.cost == 1.0 and outcome.symptoms is None


def test_a_method_with_a_memory_appears_when_there_is_one_and_knows_what_it_saw(
    laboratory: Laboratory, bare: Case, role: Case
) -> None:
    laboratory.remember(bare)
    assert not FROM_MEMORY & set(laboratory.methods(bare, 0.1, seed=0))
    laboratory.remember(role)
    found = laboratory.methods(bare, 0.1, seed=0)
    assert set(found) > FROM_MEMORY
    rotated = kl(laboratory.compare(bare, found["rotation only"]))
    for method in sorted(FROM_MEMORY):
        outcome = laboratory.compare(bare, found[method])
        assert outcome.cost == 0.0
        assert kl(outcome) != rotated
    assert kl(laboratory.compare(bare, found["nearest tokens' deviations"])) < 0.5 * rotated


def test_only_the_latest_deviations_are_remembered(laboratory: Laboratory, bare: Case) -> None:
    for _ in range(6):
        laboratory.remember(bare)
    assert len(laboratory._memory) == Laboratory.MEMORY_MAX
    assert laboratory._memory[-1].tokens == bare.runs[-1].tokens


def test_a_plan_covers_the_prompt_and_reuses_every_run(bare: Case, edited: Case) -> None:
    for case in (bare, edited):
        plan = plan_of(case, [Repair(16, 0.1, shift=True)] * len(case.runs), RULES)
        assert [span.start for span in plan.spans] == [0, *(span.end for span in plan.spans[:-1])]
        assert plan.spans[-1].end == len(case.token_ids) and plan.spans[-1].kind is SpanKind.RECOMPUTE
        assert [(run.start, run.end) for run in plan.runs] == [(run.start, run.end) for run in case.runs]
        assert {span.run for span in plan.spans} - {0} == set(range(1, len(case.runs) + 1))


def test_carrying_out_a_plan_without_repair_is_rotation_only(laboratory: Laboratory, edited: Case) -> None:
    outcome = laboratory.carried_out(edited, plan_of(edited, [Repair(0)], UNWATCHED))
    rotated = laboratory.compare(edited, Filling(NOTHING))
    assert (outcome.cost, outcome.divergence) == (0.0, rotated.divergence)
    assert outcome.symptoms is None


def test_what_a_repair_recomputes_is_what_it_costs(laboratory: Laboratory, edited: Case) -> None:
    repair = Repair(32, 0.2, shift=True)
    outcome = laboratory.carried_out(edited, plan_of(edited, [repair], RULES))
    [run] = edited.runs
    assert outcome.cost == run.recomputed(repair, RULES) / run.tokens
    assert outcome.symptoms is not None and outcome.symptoms.head > 0 < outcome.symptoms.body


def test_wrong_blocks_show(laboratory: Laboratory, role: Case, bare: Case) -> None:
    for case in (role, bare):
        plan = plan_of(case, [Repair(32)] * len(case.runs), RULES)
        good, wrong = (laboratory.carried_out(case, plan, wrong_blocks=wrong) for wrong in (False, True))
        assert good.symptoms is not None and wrong.symptoms is not None
        assert wrong.symptoms.head > good.symptoms.head
        assert wrong.symptoms.body > 1.1 * good.symptoms.body
        assert kl(wrong) > kl(good)


def test_what_the_guard_lets_pass_is_kept(laboratory: Laboratory, role: Case) -> None:
    rules = replace(RULES, kl_max=0.05)
    kept = laboratory.planned(role, rules, constant(0.04))
    assert (kept.verdict, kept.predicted_kl) == (Verdict.KEEP, pytest.approx(0.04))
    assert kept.outcome == laboratory.carried_out(role, plan_of(role, [Repair(32)], rules))


def test_what_the_guard_doubts_gets_a_longer_head_and_then_full_prefill(laboratory: Laboratory, role: Case) -> None:
    rules = replace(RULES, kl_max=0.05, repairs=MappingProxyType({Provenance.ROLE: (Repair(8),)}))
    first, wider = (laboratory.carried_out(role, plan_of(role, [Repair(head)], rules)) for head in (8, 32))
    assert first.symptoms is not None and wider.symptoms is not None and wider.symptoms.head < first.symptoms.head
    between = float(np.log(first.symptoms.head * wider.symptoms.head) / 2)
    doubtful = DivergenceFit(float(np.log(0.05)) - between, 0.0, 1.0, 0.0, 0.0, 8)
    widened = laboratory.planned(role, rules, doubtful)
    assert (widened.verdict, widened.outcome) == (Verdict.WIDEN, wider)
    for predicted in (0.1, 1.0, float("nan")):
        dense = laboratory.planned(role, rules, constant(predicted))
        assert dense.verdict is Verdict.RECOMPUTE
        assert (dense.outcome.cost, kl(dense.outcome)) == (1.0, 0.0)


def test_runs_without_a_repair_are_recomputed(laboratory: Laboratory, bare: Case) -> None:
    never = replace(RULES, repairs=MappingProxyType({Provenance.ROLE: (Repair(8),)}))
    dense = laboratory.planned(bare, never, constant(1e-3))
    assert (dense.verdict, dense.predicted_kl, dense.outcome.cost) == (Verdict.RECOMPUTE, None, 1.0)
    tokens = [run.tokens for run in bare.runs]
    longest = replace(RULES, run_tokens_min=max(tokens), guard_probes=0)
    expected = 1 - sum(n - 32 for n in tokens if n == max(tokens)) / sum(tokens)
    some = laboratory.planned(bare, longest, constant(1e-3))
    assert some.outcome.cost == pytest.approx(expected) and some.outcome.cost < 1


@settings(deadline=None)
@given(st.lists(st.floats(-1, 1), min_size=1, max_size=30), st.data())
def test_the_largest_deviations_are_found_in_order(values: list[float], data: st.DataObject) -> None:
    count = data.draw(st.integers(0, len(values)))
    rows = largest(np.array(values), count)
    assert len(rows) == count and (np.diff(rows) > 0).all()
    left = [value for row, value in enumerate(values) if row not in rows]
    assert not count or not left or min(values[row] for row in rows) >= max(left)
