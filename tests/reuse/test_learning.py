"""What a filled prompt can teach, to whom it may flow, and how memory is used within one plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from deviation_cases import MODEL, PLAIN
from hypothesis import given, settings
from hypothesis import strategies as st
from reuse_cases import LAYOUT, candidates, donor, meta, plan_of, plans

from kvcomm_p2p.model.cache import KVCache
from kvcomm_p2p.model.spec import ModelSpec, Profile
from kvcomm_p2p.planning.divergence import DivergenceFit
from kvcomm_p2p.planning.segments import VisibilityMark
from kvcomm_p2p.planning.spans import exact_until, span_hops
from kvcomm_p2p.planning.types import (
    Plan,
    Provenance,
    Rejected,
    Repair,
    Run,
    RunChoice,
    Span,
    SpanKind,
    UnusedRun,
)
from kvcomm_p2p.protocol.anchors import BlockKey, Miss, MissReason, Visibility
from kvcomm_p2p.reuse.align import align_span
from kvcomm_p2p.reuse.blocks import copy_block
from kvcomm_p2p.reuse.deviations import DeviationMemory, observe, strictest
from kvcomm_p2p.reuse.learning import LEARNED_TOKENS_MAX, lessons, relative_deviation
from kvcomm_p2p.reuse.recall import MEMORY_TOKENS_MIN, Recall, access_at

EDGE = b"templates"
PUBLIC, GROUP, PRIVATE = Visibility.PUBLIC, Visibility.GROUP, Visibility.PRIVATE
FIT = DivergenceFit(1.0, 1.0, 0.0, 0.0, 0.0, 10)
SPEC = ModelSpec("noise", MODEL, LAYOUT, 4096, PLAIN, "", "", Profile(64, {}, FIT, "tests", {Provenance.ROLE: 0.006}))


def rejected(
    start: int, *lengths: int, donor_start: int = 32, hops: int = 0, kind: Provenance = Provenance.ROLE
) -> Rejected:
    """A run of pieces three tokens apart."""
    pieces, at = [], start
    for length in lengths:
        pieces.append(Run(donor_start + at - start, at, length))
        at += length + 3
    source = donor([meta(1, 0, donor_start + at - start, hops=hops)], local=True)
    run = UnusedRun(source, tuple(pieces), kind, EDGE)
    return Rejected(start, pieces[-1].prompt_end, source.holder, Miss(MissReason.TOO_SHORT), run)


def dense(tokens: int, *items: Rejected) -> Plan:
    return replace(plan_of([Span(0, tokens, SpanKind.RECOMPUTE)]), rejected=items)


def learned(plan: Plan) -> list[tuple[int, int]]:
    return [(each.span.start, each.span.end) for each in lessons(plan, {Provenance.ROLE}, 64)]


# --------------------------------------------------------------------------------------------------------------- lessons


def test_every_piece_is_a_lesson_and_short_runs_come_first() -> None:
    long, short = rejected(10, 300), rejected(400, 20, 30)
    assert learned(dense(500, long, short)) == [(400, 420), (423, 453), (10, 10 + LEARNED_TOKENS_MAX - 50)]


@pytest.mark.parametrize(
    "item",
    [
        rejected(0, 40),  # position 0 is like no other
        rejected(10, 40, hops=1),  # a repaired copy
        rejected(10, 40, kind=Provenance.BARE),
        rejected(10, 7),
        Rejected(10, 50, rejected(10, 40).holder, Miss(MissReason.COST)),
    ],
)
def test_what_teaches_nothing(item: Rejected) -> None:
    assert learned(dense(200, item)) == []


def test_no_position_is_learned_twice() -> None:
    assert learned(dense(200, rejected(10, 40), rejected(12, 30), rejected(60, 20))) == [(10, 50), (60, 80)]


@settings(max_examples=200, deadline=None)
@given(plans(), st.data())
def test_only_wholly_exact_rows_are_truth(plan: Plan, data: st.DataObject) -> None:
    items = []
    for number in range(data.draw(st.integers(0, 4))):
        run = data.draw(candidates(data.draw(st.integers(0, plan.tokens)), 1000 + 10 * number))
        items.append(
            Rejected(
                run.start,
                run.end,
                run.donor.holder,
                Miss(MissReason.COST),
                UnusedRun(run.donor, run.pieces, Provenance.ROLE, EDGE),
            )
        )
    found = lessons(replace(plan, rejected=tuple(items)), {Provenance.ROLE}, 64)
    assert sum(each.span.tokens for each in found) <= LEARNED_TOKENS_MAX
    taken: set[int] = set()
    for each in found:
        rows = set(range(each.span.start, each.span.end))
        assert max(rows) < exact_until(plan) and not rows & taken
        taken |= rows
        assert span_hops(each.span) == 0
        (source,) = [item for item in items if item.run is not None and item.run.donor is each.span.donor]
        assert source.run is not None
        assert any(
            piece.prompt_start <= each.span.start
            and each.span.end <= piece.prompt_end
            and piece.donor_start - piece.prompt_start == each.span.donor_start - each.span.start
            for piece in source.run.pieces
        )


def noise(tokens: int, seed: int) -> KVCache:
    """Values all point about the same way: every token is like every other."""
    cache = KVCache(LAYOUT, tokens)
    generator = torch.Generator().manual_seed(seed)
    cache.keys.copy_(torch.randn(cache.keys.shape, generator=generator))
    cache.values.copy_(3 + torch.randn(cache.values.shape, generator=generator))
    cache.length = tokens
    return cache


def test_a_scratch_slab_holds_what_the_whole_one_would() -> None:
    source = donor([meta(1, 0, 96)], local=True)
    copy = noise(96, 0)
    blocks = {BlockKey(source.anchors[0].anchor_id, i): copy_block(copy, 32 * i, 32 * i + 32) for i in range(3)}
    span = Span(70, 110, SpanKind.REUSE, source, 25)
    whole, scratch = KVCache(LAYOUT, 120), KVCache(LAYOUT, 40)
    align_span(whole, span, blocks, PLAIN)
    align_span(scratch, span, blocks, PLAIN, first_position=70)
    assert torch.equal(scratch.keys, whole.keys[:, :, :, 70:110])
    assert torch.equal(scratch.values, whole.values[:, :, :, 70:110])


def test_deviations_are_measured_against_the_truth_without_layer_0() -> None:
    true = torch.ones(2, 1, 3, 4), torch.ones(2, 1, 3, 4)
    aligned = true[0] * torch.tensor([9.0, 1.5])[:, None, None, None], true[1].clone()
    assert relative_deviation(aligned, true) == pytest.approx(0.5)
    aligned[1][1, 0, 0, 0] = torch.nan
    assert not relative_deviation(aligned, true) <= 1.0


# ------------------------------------------------------------------------------------------------------------ visibility


@pytest.mark.parametrize(
    ("accesses", "expected"),
    [
        ([], (PUBLIC, b"")),
        ([(PUBLIC, b""), (GROUP, b"red")], (GROUP, b"red")),
        ([(GROUP, b"red"), (GROUP, b"red")], (GROUP, b"red")),
        ([(GROUP, b"red"), (GROUP, b"blue")], (PRIVATE, b"")),
        ([(PRIVATE, b""), (GROUP, b"red")], (PRIVATE, b"red")),
        ([(PRIVATE, b""), (PUBLIC, b"")], (PRIVATE, b"")),
    ],
)
def test_the_strictest_of_all(accesses: list[tuple[Visibility, bytes]], expected: tuple[Visibility, bytes]) -> None:
    assert strictest(accesses) == expected
    assert strictest(reversed(accesses)) == expected


def test_a_token_is_as_strict_as_what_stands_up_to_it() -> None:
    marks = [VisibilityMark(10, GROUP, b"red"), VisibilityMark(20, PRIVATE)]
    assert [access_at(marks, at) for at in (9, 10, 19, 20)] == [
        (PUBLIC, b""),
        (GROUP, b"red"),
        (GROUP, b"red"),
        (PRIVATE, b"red"),
    ]


# ----------------------------------------------------------------------------------------------------------------- recall


def remembered(
    tokens: int, visibility: Visibility = PUBLIC, group: bytes = b"", edge: bytes = EDGE, start: int = 50
) -> DeviationMemory:
    """Noise, moved to `start`, is off by one everywhere."""
    memory = DeviationMemory(1 << 24)
    aligned = noise(tokens, 7)
    kv = aligned.keys[:, 0], aligned.values[:, 0]
    seen = observe(
        kv, (kv[0] + 1, kv[1] + 1), start, PLAIN, model_id=MODEL, edge=edge, visibility=visibility, group=group
    )
    assert memory.add(seen)
    return memory


def test_what_may_be_corrected_depends_on_what_is_remembered_and_may_be_seen() -> None:
    marks = (VisibilityMark(10, GROUP, b"red"), VisibilityMark(20, PRIVATE))
    enough = MEMORY_TOKENS_MIN
    for memory, expected in (
        (DeviationMemory(0), {}),
        (remembered(enough - 1), {}),
        (remembered(enough), {EDGE: 0}),
        (remembered(enough, GROUP, b"red"), {EDGE: 10}),
        (remembered(enough, GROUP, b"blue"), {}),
        (remembered(enough, PRIVATE), {EDGE: 20}),
    ):
        repairs, since = Recall(memory, SPEC).short(marks)
        assert since == expected
        assert repairs == ({Provenance.ROLE: Repair(0, kl=0.006, memory=True)} if expected else {})
    assert Recall(remembered(enough), replace(SPEC, profile=None)).short(()) == ({}, {})
    assert Recall(remembered(enough, PRIVATE), SPEC).short(()) == ({}, {})


def memory_plan(edge: bytes = EDGE) -> Plan:
    source = donor([meta(1, 0, 200)], local=True)
    repair = Repair(0, kl=0.006, memory=True)
    choice = RunChoice(50, 90, source, Provenance.ROLE, 0.5, repair, 0.001, 0.1, edge=edge)
    spans = [
        Span(0, 50, SpanKind.RECOMPUTE),
        Span(50, 90, SpanKind.REUSE, source, 100, probes=5, run=1),
        Span(90, 100, SpanKind.RECOMPUTE),
    ]
    return replace(plan_of(spans), runs=(choice,))


def aligned_slab() -> KVCache:
    """Rows [50, 90) are those that `remembered` has seen."""
    cache, seen = noise(100, 1), noise(MEMORY_TOKENS_MIN, 7)
    cache.keys[:, :, :, 50:90] = seen.keys[:, :, :, :40]
    cache.values[:, :, :, 50:90] = seen.values[:, :, :, :40]
    return cache


def test_aligned_rows_are_moved_towards_the_truth_before_the_forward() -> None:
    memory, plan = remembered(MEMORY_TOKENS_MIN), memory_plan()
    cache, before = aligned_slab(), aligned_slab()
    done = Recall(memory, SPEC).correct(cache, plan, ())
    assert done.plan is plan and len(done.used) == 1
    moved = cache.values - before.values
    assert torch.allclose(moved[1:, :, :, 50:90], torch.ones(1), atol=0.01)
    assert not moved[0].any() and not moved[:, :, :, :50].any() and not moved[:, :, :, 90:].any()
    Recall(memory, SPEC).blame(done.used)
    assert (len(memory), memory.kv_bytes) == (0, 0)


@pytest.mark.parametrize("visibility", [GROUP, PRIVATE])
def test_a_correction_never_crosses_to_those_who_may_not_see_it(visibility: Visibility) -> None:
    memory = remembered(MEMORY_TOKENS_MIN, visibility, b"red" if visibility is GROUP else b"")
    cache, before = aligned_slab(), aligned_slab()
    behind = (VisibilityMark(51, visibility, b"red" if visibility is GROUP else b""),)
    done = Recall(memory, SPEC).correct(cache, memory_plan(), behind)
    assert torch.equal(cache.values, before.values) and torch.equal(cache.keys, before.keys)
    assert {span.kind for span in done.plan.spans} == {SpanKind.RECOMPUTE} and done.used == ()
    allowed = Recall(memory, SPEC).correct(cache, memory_plan(), (behind[0]._replace(start=50),))
    assert allowed.used and allowed.plan.runs


@pytest.mark.parametrize("edge", [b"another", b""])
def test_other_kinds_of_change_correct_nothing(edge: bytes) -> None:
    cache, before = aligned_slab(), aligned_slab()
    done = Recall(remembered(MEMORY_TOKENS_MIN), SPEC).correct(cache, memory_plan(edge), ())
    assert torch.equal(cache.values, before.values) and not done.plan.runs


@pytest.mark.parametrize(("strange", "kept"), [(4, True), (5, False)])
def test_a_run_with_too_many_strange_tokens_is_recomputed(strange: int, kept: bool) -> None:
    """Of 40, one in ten may be like nothing that is remembered."""
    cache = aligned_slab()
    cache.values[:, :, :, 50 : 50 + strange] *= -1
    done = Recall(remembered(MEMORY_TOKENS_MIN), SPEC).correct(cache, memory_plan(), ())
    assert bool(done.plan.runs) == kept
    if not kept:
        (item,) = done.plan.rejected
        assert (item.start, item.end, item.miss.reason) == (50, 90, MissReason.DIVERGENCE)
        assert item.miss.detail == "35 of 40 tokens are like any that are remembered"
        assert item.run is not None and (item.run.pieces, item.run.edge) == ((Run(100, 50, 40),), EDGE)
