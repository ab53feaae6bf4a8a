"""Plans after the fact and what is told of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from reuse_cases import RULES, donor, meta, plan_of, plans

from kvcomm_p2p.planning.candidates import Candidate
from kvcomm_p2p.planning.finding import FoundDonors
from kvcomm_p2p.planning.replan import dense_plan, only_exact, widened, without_blocks, without_runs
from kvcomm_p2p.planning.spans import blocks_needed, exact_until, hops_at, recompute_positions
from kvcomm_p2p.planning.types import Mode, Plan, Provenance, Rejected, Repair, Run, RunChoice, Span, SpanKind
from kvcomm_p2p.prompts import PreparedPrompt
from kvcomm_p2p.protocol.anchors import BLOCK_TOKENS, BlockKey, Miss, MissReason
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.report import Timings
from kvcomm_p2p.reuse.pulling import Pulled
from kvcomm_p2p.reuse.reporting import ReportBuilder

STALLED = Miss(MissReason.STALLED)


def keys_of(plan: Plan) -> list[BlockKey]:
    return [BlockKey(anchor.anchor_id, index) for span in plan.spans for anchor, index in blocks_needed(span)]


def covers(plan: Plan) -> bool:
    at = 0
    for span in plan.spans:
        if span.start != at or span.end <= at:
            return False
        at = span.end
    return at == plan.tokens


@settings(max_examples=300, deadline=None)
@given(plans(), st.data())
def test_without_blocks_recomputes_their_tokens_and_leaves_nothing_unguarded(plan: Plan, data: st.DataObject) -> None:
    keys = sorted(set(keys_of(plan)))
    failed = dict.fromkeys(data.draw(st.sets(st.sampled_from(keys))) if keys else (), STALLED)
    smaller = without_blocks(plan, failed, RULES)
    assert covers(smaller)
    assert not set(keys_of(smaller)) & set(failed)
    # Token by token: what came stays where it was and comes from where it came, what did not is recomputed.
    before, after = by_position(plan), by_position(smaller)
    for position, (kind, source) in before.items():
        if source is not None and block_of(source) in failed:
            assert after[position] == (SpanKind.RECOMPUTE, None)
        elif kind in (SpanKind.REUSE, SpanKind.RECOMPUTE):
            # A head that is not in the way any more may be reused: a run keeps as long a head as its tokens allow.
            assert after[position] in (
                (SpanKind.REUSE, source),
                (SpanKind.RECOMPUTE, source),
                (SpanKind.RECOMPUTE, None),
            )
        else:
            assert after[position] == (kind, source)
    assert guarded(smaller)
    assert (smaller.tokens, smaller.mode, smaller.rejected) == (plan.tokens, plan.mode, plan.rejected)
    assert recompute_positions(smaller)[-1] == plan.tokens - 1
    assert np.all(np.diff(recompute_positions(smaller)) > 0)


def guarded(plan: Plan) -> bool:
    """Every run has tokens enough, and some that are recomputed and compared."""
    for number, run in enumerate(plan.runs, start=1):
        spans = [span for span in plan.spans if span.run == number]
        compared = sum(s.tokens if s.kind is SpanKind.RECOMPUTE else s.probes for s in spans)
        if any(s.donor is not run.donor for s in spans) or sum(s.tokens for s in spans) < RULES.run_tokens_min:
            return False
        if compared < min(RULES.guard_probes, 4):
            return False
    return {span.run for span in plan.spans} <= {0, *range(1, len(plan.runs) + 1)}


@settings(max_examples=200, deadline=None)
@given(plans(), st.integers(1, 8))
def test_wider_plans_recompute_more_of_the_same(plan: Plan, factor: int) -> None:
    wider = widened(plan, factor, RULES)
    assert covers(wider) and guarded(wider)
    assert len(wider.runs) == len(plan.runs)
    before, after = by_position(plan), by_position(wider)
    for position, (kind, source) in before.items():
        if kind is SpanKind.REUSE:
            assert after[position] in ((kind, source), (SpanKind.RECOMPUTE, source))
        else:
            assert after[position] == (kind, source)
    for number, run in enumerate(wider.runs, start=1):
        assert run.repair.head_tokens == factor * plan.runs[number - 1].repair.head_tokens


@settings(max_examples=200, deadline=None)
@given(plans(), st.data())
def test_runs_that_are_dropped_are_recomputed_and_can_be_aligned_later(plan: Plan, data: st.DataObject) -> None:
    numbers = data.draw(st.sets(st.sampled_from(range(1, len(plan.runs) + 1)))) if plan.runs else set()
    smaller = without_runs(plan, dict.fromkeys(numbers, STALLED))
    assert covers(smaller) and guarded(smaller)
    assert smaller.runs == tuple(run for number, run in enumerate(plan.runs, start=1) if number not in numbers)
    lost = {at for span in plan.spans if span.run in numbers for at in range(span.start, span.end)}
    before, after = by_position(plan), by_position(smaller)
    for position, here in before.items():
        dropped = any(item.start <= position < item.end for item in smaller.rejected)
        assert after[position] == ((SpanKind.RECOMPUTE, None) if dropped else here)
        assert dropped or position not in lost
    told = {
        piece.prompt_start + i: (item.run.donor, piece.donor_start + i)
        for item in smaller.rejected
        if item.run is not None
        for piece in item.run.pieces
        for i in range(piece.length)
    }
    assert told == {at: before[at][1] for at in lost if before[at][1] is not None}


def test_widening_recomputes_what_was_corrected_from_memory() -> None:
    """It has no head to lengthen; tried again as it was, it would be compared with what was just computed."""
    source = donor([meta(1, 0, 256)])
    memory, repaired = Candidate(source, (Run(0, 10, 40),)), Candidate(source, (Run(64, 60, 100),))
    spans = [
        Span(0, 10, SpanKind.RECOMPUTE),
        *memory.spans(Repair(0, memory=True), RULES, 1),
        Span(50, 60, SpanKind.RECOMPUTE),
        *repaired.spans(Repair(8), RULES, 2),
        Span(160, 161, SpanKind.RECOMPUTE),
    ]
    choices = [
        RunChoice(run.start, run.end, source, Provenance.ROLE, 0.5, repair, 0.01, 1.0)
        for run, repair in ((memory, Repair(0, memory=True)), (repaired, Repair(8)))
    ]
    wider = widened(replace(plan_of(spans), runs=tuple(choices)), 4, RULES)
    assert [run.repair for run in wider.runs] == [Repair(32)]
    assert [(s.start, s.end, s.kind.value, s.run) for s in wider.spans if s.end > 10][:4] == [
        (10, 50, "recompute", 0),
        (50, 60, "recompute", 0),
        (60, 85, "recompute", 1),
        (85, 160, "reuse", 1),
    ]
    assert [(item.start, item.end) for item in wider.rejected] == [(10, 50)]


def test_a_short_run_survives_a_missing_block_if_enough_is_left() -> None:
    source = donor([meta(1, 0, 256)])
    repair = Repair(0, memory=True)
    run = Candidate(source, (Run(16, 10, 48),))
    spans = [Span(0, 10, SpanKind.RECOMPUTE), *run.spans(repair, RULES, 1), Span(58, 59, SpanKind.RECOMPUTE)]
    choice = RunChoice(10, 58, source, Provenance.ROLE, 0.5, repair, 0.01, 1.0)
    plan = replace(plan_of(spans), runs=(choice,))
    block = BlockKey(source.anchors[0].anchor_id, 0)
    left = without_blocks(plan, {block: STALLED}, RULES)
    assert [(s.start, s.end, s.kind.value) for s in left.spans[1:-1]] == [(10, 26, "recompute"), (26, 58, "reuse")]
    gone = without_blocks(plan, {block._replace(index=1): STALLED}, replace(RULES, short_tokens_min=17))
    assert {s.kind for s in gone.spans} == {SpanKind.RECOMPUTE}


def by_position(plan: Plan) -> dict[int, tuple[SpanKind, Any]]:
    """Position -> (kind, (donor, donor position) or None)."""
    table: dict[int, tuple[SpanKind, Any]] = {}
    for span in plan.spans:
        for position in range(span.start, span.end):
            source = None if span.donor is None else (span.donor, span.donor_start + position - span.start)
            table[position] = (span.kind, source)
    return table


def block_of(source: Any) -> BlockKey:
    at = source[1]
    (anchor,) = [anchor for anchor in source[0].anchors if anchor.start <= at < anchor.end]
    return BlockKey(anchor.anchor_id, (at - anchor.start) // BLOCK_TOKENS)


def test_a_run_with_a_hole_goes_on_behind_it_and_one_that_lost_its_head_gets_another() -> None:
    source = donor([meta(1, 0, 256)])
    candidate = Candidate(source, (Run(0, 10, 256),))
    spans = [
        Span(0, 10, SpanKind.RECOMPUTE),
        *candidate.spans(Repair(32), RULES, 1),
        Span(266, 267, SpanKind.RECOMPUTE),
    ]
    choice = RunChoice(10, 266, source, Provenance.OTHER, 0.5, Repair(32), 0.01, 1.0)
    plan = replace(plan_of(spans), runs=(choice,))
    block = BlockKey(source.anchors[0].anchor_id, 0)

    def shape(lost: Sequence[int]) -> list[tuple[int, int, str]]:
        smaller = without_blocks(plan, {block._replace(index=index): STALLED for index in lost}, RULES)
        return [(span.start, span.end, span.kind.value) for span in smaller.spans[1:-1]]

    assert shape([0]) == [(10, 42, "recompute"), (42, 74, "recompute"), (74, 266, "reuse")]
    assert shape([3]) == [
        (10, 42, "recompute"),
        (42, 106, "reuse"),
        (106, 138, "recompute"),
        (138, 142, "recompute"),
        (142, 266, "reuse"),
    ]
    assert shape([7]) == [(10, 42, "recompute"), (42, 234, "reuse"), (234, 266, "recompute")]
    assert shape([0, 1, 2, 3, 4, 5, 7]) == [(10, 266, "recompute")], "32 tokens are too few"


@settings(max_examples=50, deadline=None)
@given(plans())
def test_without_any_block_everything_is_recomputed(plan: Plan) -> None:
    nothing = without_blocks(plan, dict.fromkeys(keys_of(plan), STALLED), RULES)
    assert covers(nothing)
    assert recompute_positions(nothing).tolist() == list(range(plan.tokens))
    assert hops_at(nothing) == ((0, 0),)
    assert without_blocks(plan, {}, RULES) is plan


@settings(max_examples=100, deadline=None)
@given(plans())
def test_a_fallback_keeps_the_exact_beginning_alone(plan: Plan) -> None:
    kept, exact = only_exact(plan, "why")
    assert covers(kept)
    assert kept.spans[:-1] == plan.spans[: len(kept.spans) - 1]
    assert {span.kind for span in kept.spans[:-1]} <= {SpanKind.EXACT, SpanKind.RECOMPUTE}
    assert (kept.spans[-1].start, kept.spans[-1].kind, kept.spans[-1].why) == (exact, SpanKind.RECOMPUTE, "why")
    assert exact <= exact_until(plan), "no tainted row is kept"
    assert hops_at(kept)[-1][1] == 0
    assert [item.run.donor if item.run else None for item in kept.rejected] == [run.donor for run in plan.runs]


def test_dense_plan() -> None:
    plan = dense_plan(7, Mode.DENSE)
    assert covers(plan) and recompute_positions(plan).tolist() == list(range(7))
    assert "asked" in plan.spans[0].why and dense_plan(7, Mode.EXACT, "no").spans[0].why == "no"


# ---------------------------------------------------------------------------------------------------------------- report


def builder(tokens: int = 100) -> ReportBuilder:
    prompt = PreparedPrompt(np.arange(tokens, dtype=np.uint32), slots={"a": ((1, 2),)})
    return ReportBuilder(prompt, Mode.BALANCED, lambda node_id: node_id[:3].decode())


def test_report_joins_what_belongs_together() -> None:
    ann, bob = donor([meta(1, 0, 128)], holder=b"ann" + bytes(13)), donor([meta(2, 0, 128)], holder=b"bob" + bytes(13))
    spans = [
        Span(0, 10, SpanKind.RECOMPUTE, why="no donor"),
        Span(10, 20, SpanKind.REUSE, ann, 32),
        Span(20, 30, SpanKind.REUSE, ann, 42),  # goes on: joined
        Span(30, 40, SpanKind.REUSE, ann, 60),  # skips: not joined
        Span(40, 50, SpanKind.REUSE, bob, 70),  # another donor
        Span(50, 60, SpanKind.RECOMPUTE, why="x"),
        Span(60, 70, SpanKind.RECOMPUTE, why="x"),
        Span(70, 80, SpanKind.RECOMPUTE, why="y"),
        Span(80, 90, SpanKind.EXACT, bob, 80),
        Span(90, 100, SpanKind.CONTINUED, bob, 90),
    ]
    report = builder().finish(plan_of(spans), Timings(pull_s=1.0))
    assert [(s.start, s.end, s.kind, s.source, s.donor_start) for s in report.spans] == [
        (0, 10, "recompute", "", 0),
        (10, 30, "reuse", "ann", 32),
        (30, 40, "reuse", "ann", 60),
        (40, 50, "reuse", "bob", 70),
        (50, 70, "recompute", "", 0),
        (70, 80, "recompute", "", 0),
        (80, 90, "exact", "bob", 80),
        (90, 100, "continued", "bob", 90),
    ]
    assert report.sources == {"ann": 30, "bob": 30}
    assert (report.exact_tokens, report.continued_tokens, report.reused_tokens, report.recomputed_tokens) == (
        10,
        10,
        40,
        40,
    )
    assert report.slots == {"a": ((1, 2),)}
    assert report.timings.pull_s == 1.0
    assert report.as_dict()["spans"][1]["source"] == "ann"


@settings(max_examples=100, deadline=None)
@given(plans())
def test_report_counts_add_up(plan: Plan) -> None:
    report = builder(plan.tokens).finish(plan, Timings())
    told = (report.exact_tokens, report.continued_tokens, report.reused_tokens, report.recomputed_tokens)
    assert sum(told) == report.prompt_tokens == plan.tokens
    assert [span.start for span in report.spans[1:]] == [span.end for span in report.spans[:-1]]
    by_kind = {kind.value: 0 for kind in SpanKind}
    for span in report.spans:
        by_kind[span.kind] += span.end - span.start - span.probes
        by_kind["recompute"] += span.probes
    assert (by_kind["exact"], by_kind["continued"], by_kind["reuse"], by_kind["recompute"]) == told


def test_report_tells_every_miss_once() -> None:
    report = builder()
    started = time.perf_counter()
    ann = NodeId(b"ann" + bytes(13))
    dropped = ((ann, STALLED), (None, Miss(MissReason.NOT_FOUND)))
    report.found(FoundDonors((), {}, dropped, wait_lost_s=0.1))
    rejected = Rejected(5, 40, ann, Miss(MissReason.COST, "recomputing is faster"))
    plan = Plan(100, Mode.BALANCED, (Span(0, 100, SpanKind.RECOMPUTE),), (rejected,), 1.0, 1.0)
    report.planned(plan, 0.5)
    failed = {
        BlockKey(meta(1, 0, 64).anchor_id, 0): STALLED,
        BlockKey(meta(1, 0, 64).anchor_id, 1): STALLED,
        BlockKey(meta(2, 0, 64).anchor_id, 0): Miss(MissReason.NOT_FINITE, "the block holds NaN or infinity"),
    }
    report.pulled(Pulled(wait_lost_s=0.2, kv_bytes=7), failed)
    report.guarded(0.5, {}, "too far off")
    done = report.finish(plan, Timings())
    assert [(miss.what, miss.reason) for miss in done.misses] == [
        ("token ids from ann", "stalled"),
        ("prompt", "not_found"),
        ("tokens 5-40 from ann", "cost"),
        ("2 blocks of anchor 00000000", "stalled"),
        ("1 block of anchor 00000000", "not_finite"),
        ("reused runs", "residual"),
    ]
    assert abs(done.wait_lost_s - 0.3) < 1e-9
    assert (done.predicted_kl, done.fallback, done.pulled_bytes) == (0.5, "too far off", 7)
    assert done.timings.plan_s == 0.5
    assert 0 <= done.timings.total_s <= time.perf_counter() - started + 1e-3
