"""Which runs of a plan are corrected by their probes, and that nothing else is touched."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from reuse_cases import donor, meta

from kvcomm_p2p.planning.candidates import Candidate
from kvcomm_p2p.planning.spans import probe_positions, recompute_positions
from kvcomm_p2p.planning.types import Mode, Plan, Provenance, Repair, ReuseRules, Run, RunChoice, Span, SpanKind
from kvcomm_p2p.reuse.shifting import plan_shift

RULES = ReuseRules(approximate=True, reason="", guard_probes=6)
SHIFTED, HEAD_ONLY = Repair(16, 0.1, shift=True), Repair(16)


def plan_with(*runs: tuple[Candidate, Repair]) -> Plan:
    spans: list[Span] = []
    choices, at = [], 0
    for number, (run, repair) in enumerate(runs, start=1):
        spans += [Span(at, run.start, SpanKind.RECOMPUTE), *run.spans(repair, RULES, number)]
        choices.append(RunChoice(run.start, run.end, run.donor, Provenance.BARE, 0.0, repair, kl=0.0, saved_s=0.0))
        at = run.end
    spans.append(Span(at, at + 5, SpanKind.RECOMPUTE))
    return Plan(at + 5, Mode.BALANCED, tuple(spans), (), 0.0, 0.0, tuple(choices))


SOURCE = donor([meta(1, 0, 500)])
FIRST = Candidate(SOURCE, (Run(0, 10, 100),))
HOLED = Candidate(SOURCE, (Run(150, 120, 80), Run(240, 210, 120)))
LAST = Candidate(SOURCE, (Run(380, 340, 100),))


def test_a_plan_that_asks_for_nothing_is_not_shifted() -> None:
    assert plan_shift(plan_with((FIRST, HEAD_ONLY), (HOLED, replace(SHIFTED, shift=False))), None) is None
    assert plan_shift(plan_with(), None) is None


def slabs(plan: Plan, *off: tuple[Candidate, float]) -> tuple[torch.Tensor, torch.Tensor]:
    """True KV [H, T, D], and the same off by a constant in each run."""
    generator = torch.Generator().manual_seed(1)
    true = torch.randn(2, plan.tokens, 4, generator=generator)
    aligned = true.clone()
    for run, value in off:
        for piece in run.pieces:
            aligned[:, piece.prompt_start : piece.prompt_end] -= value
    return true, aligned


def test_runs_that_ask_for_it_move_by_what_their_probes_were_off_by() -> None:
    plan = plan_with((FIRST, HEAD_ONLY), (HOLED, SHIFTED), (LAST, SHIFTED))
    shift = plan_shift(plan, None)
    assert shift is not None and shift.left() == {}
    true, aligned = slabs(plan, (FIRST, 0.5), (HOLED, 0.25), (LAST, -1.0))
    positions = torch.from_numpy(recompute_positions(plan))
    keys, values = aligned.clone(), aligned.clone()
    shift.layer(0, keys, values, positions, true[:, positions], true[:, positions])
    assert torch.equal(keys, aligned), "layer 0 depends on no context"
    shift.layer(1, keys, values, positions, true[:, positions], true[:, positions])
    kept = np.setdiff1d(np.arange(plan.tokens), positions)
    for run, right in ((FIRST, False), (HOLED, True), (LAST, True)):
        rows = kept[(run.start <= kept) & (kept < run.end)]
        for slab in (keys, values):
            assert torch.allclose(slab[:, rows], true[:, rows], atol=1e-5) == right
            assert torch.equal(slab[:, rows], aligned[:, rows]) != right
    outside = np.array([row for row in range(plan.tokens) if not any(r.start <= row < r.end for r in (HOLED, LAST))])
    assert torch.equal(keys[:, outside], aligned[:, outside])


def test_what_is_left_is_told_by_run_number() -> None:
    plan = plan_with((FIRST, HEAD_ONLY), (HOLED, SHIFTED), (LAST, SHIFTED))
    shift = plan_shift(plan, None)
    assert shift is not None
    true, aligned = slabs(plan, (FIRST, 0.5), (HOLED, 0.25), (LAST, -1.0))
    noise = torch.randn(true.shape, generator=torch.Generator().manual_seed(2))
    aligned[:, LAST.start : LAST.end] += noise[:, LAST.start : LAST.end]
    positions = torch.from_numpy(recompute_positions(plan))
    shift.layer(1, aligned.clone(), aligned.clone(), positions, true[:, positions], true[:, positions])
    left = shift.left()
    assert set(left) == {2, 3}
    assert left[2] == pytest.approx(0.0, abs=1e-3) and left[3] > 0.3


def test_heads_are_no_probes() -> None:
    plan = plan_with((HOLED, SHIFTED))
    shift = plan_shift(plan, None)
    assert shift is not None
    [run] = shift._runs
    body = [span for span in plan.spans if span.run and span.kind is SpanKind.REUSE]
    assert (run.start, run.head_end, run.end) == (HOLED.start + 16, HOLED.start + 16, HOLED.end)
    assert run.probes == tuple(int(row) for span in body for row in probe_positions(span))
