"""KV as int8 in plans: where it pays and may be, what it costs of the budget, and what stays raw."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_cases import COSTS, ME, PEER, RULES, donor, joined, words
from test_plan import COSTS_TRIED, situations

from kvcomm_p2p.planning.plan import make_plan
from kvcomm_p2p.planning.replan import widened, without_blocks
from kvcomm_p2p.planning.spans import encoded_blocks, exact_until, hops_at, pull_wait_s, pulled_bytes, wire_bytes
from kvcomm_p2p.planning.travel import INT8_MARGIN
from kvcomm_p2p.planning.types import Costs, Int8From, Mode, Plan, Provenance, Repair, ReuseRules, Span, SpanKind
from kvcomm_p2p.protocol.anchors import BlockKey, Miss, MissReason

DOCUMENT, BEFORE, AFTER = words(1, 512), words(2, 100), words(3, 20)
PROMPT = joined(BEFORE, DOCUMENT, AFTER)
SHARE = 0.26
SLOW = replace(COSTS, pull_bytes_per_s=3e7, int8_share=SHARE)
FAST = replace(SLOW, pull_bytes_per_s=1e9)
INT8 = replace(RULES, int8_kl=1e-4)
FROM_PEER = Int8From(frozenset({PEER}))


def plan_of(costs: Costs = SLOW, rules: ReuseRules = INT8, int8: Int8From = FROM_PEER, **more: object) -> Plan:
    return make_plan(PROMPT, [donor(DOCUMENT, **more)], Mode.BALANCED, rules, costs, int8=int8)  # type: ignore[arg-type]


def encoded(plan: Plan) -> bool:
    return any(span.encoded for span in plan.spans)


def test_on_a_slow_link_it_saves_what_would_not_be_worth_pulling() -> None:
    raw, int8 = plan_of(int8=Int8From()), plan_of()
    assert not encoded(raw) and encoded(int8)
    assert int8.planned_s <= (1 - INT8_MARGIN) * raw.planned_s
    ruinous = replace(SLOW, pull_bytes_per_s=1.2e7)
    assert {span.kind for span in plan_of(ruinous, int8=Int8From()).spans} == {SpanKind.RECOMPUTE}
    assert encoded(plan_of(ruinous))


def test_on_a_fast_link_it_travels_raw_unless_it_always_shall() -> None:
    assert not encoded(plan_of(FAST))
    assert encoded(plan_of(FAST, int8=replace(FROM_PEER, always=True)))


@pytest.mark.parametrize(
    "plan",
    [
        plan_of(rules=RULES),
        plan_of(replace(SLOW, int8_share=0.0)),
        plan_of(int8=Int8From(frozenset({ME}))),
        plan_of(hops=1),
        plan_of(local=True),
        plan_of(rules=replace(INT8, approximate=False)),
        make_plan(PROMPT, [donor(DOCUMENT)], Mode.EXACT, INT8, SLOW, int8=replace(FROM_PEER, always=True)),
        make_plan(DOCUMENT, [donor(DOCUMENT)], Mode.BALANCED, INT8, FAST, int8=replace(FROM_PEER, always=True)),
    ],
    ids=["not measured", "no share", "another peer", "repaired", "local", "exact rules", "exact mode", "exact prefix"],
)
def test_raw_it_is(plan: Plan) -> None:
    assert not encoded(plan)


def test_what_it_adds_to_the_divergence_is_in_the_budget() -> None:
    measured = {each: (Repair(32, kl=0.003), Repair(96, kl=0.001)) for each in Provenance}
    rules = replace(INT8, repairs=measured, kl_target=0.003, kl_max=0.02)
    costs = replace(SLOW, pull_bytes_per_s=6e7)
    raw, int8 = plan_of(costs, rules, Int8From()), plan_of(costs, replace(rules, int8_kl=0.001))
    share = 512 / len(PROMPT)
    assert raw.kl == pytest.approx(0.003 * share) and encoded(int8)
    assert int8.runs[0].kl == pytest.approx((int8.runs[0].repair.kl + 0.001) * share)
    assert int8.runs[0].repair.head_tokens == 96, "a longer head makes up for it"
    assert not encoded(plan_of(rules=replace(rules, int8_kl=0.1))), "more than the request may have"


def test_it_counts_as_one_more_repair() -> None:
    plan = plan_of()
    assert max(hops for _, hops in hops_at(plan)) == 2
    assert exact_until(plan) == next(span.start for span in plan.spans if span.kind is SpanKind.REUSE)


def test_holes_and_longer_heads_do_not_change_how_a_run_travels() -> None:
    plan = plan_of()
    meta = plan.runs[0].donor.anchors[0]
    holed = without_blocks(plan, {BlockKey(meta.anchor_id, 7): Miss(MissReason.STALLED)}, INT8)
    for changed in (holed, widened(plan, 3, INT8)):
        assert all(span.encoded for span in changed.spans if span.run and span.donor is not None)
        assert max(hops for _, hops in hops_at(changed)) == 2


def test_a_block_that_an_exact_span_needs_too_travels_raw() -> None:
    source = donor(DOCUMENT)
    exact = Span(0, 100, SpanKind.EXACT, source, 0)
    reused = Span(120, 220, SpanKind.REUSE, source, 100, run=1, encoded=True)
    names = {index for _, (_, index) in encoded_blocks([exact, reused])}
    assert names == {4, 5, 6}
    kv_bytes = pulled_bytes([exact, reused], SLOW.token_bytes)[PEER]
    block = 32 * SLOW.token_bytes
    (wire,) = wire_bytes([exact, reused], SLOW).values()
    assert wire.int8_bytes == 3 * block and wire.wire_bytes == kv_bytes - 3 * block + round(SHARE * 3 * block)
    expected = SLOW.pull_latency_s + wire.wire_bytes / SLOW.pull_bytes_per_s + wire.int8_bytes / SLOW.int8_bytes_per_s
    assert pull_wait_s([exact, reused], SLOW, {}) == pytest.approx(expected)


@settings(max_examples=100, deadline=None)
@given(situations(), COSTS_TRIED, st.booleans())
def test_it_never_makes_a_plan_slower_and_never_touches_what_is_exact(
    situation: tuple[object, list[object]], costs: Costs, always: bool
) -> None:
    prompt, donors = situation
    costs = replace(costs, int8_share=SHARE)
    holders = frozenset(each.holder for each in donors)  # type: ignore[attr-defined]
    plan = make_plan(prompt, donors, Mode.BALANCED, INT8, costs, int8=Int8From(holders, always))  # type: ignore[arg-type]
    raw = make_plan(prompt, donors, Mode.BALANCED, INT8, costs)  # type: ignore[arg-type]
    assert plan.planned_s <= (plan.dense_s if always else raw.planned_s)
    for span in plan.spans:
        if span.encoded:
            assert span.run and span.donor is not None and not span.donor.local
            assert all(anchor.hops == 0 for anchor in span.donor.anchors if _drawn(span, anchor))


def _drawn(span: Span, anchor: object) -> bool:
    start, end = span.donor_start, span.donor_start + span.tokens
    return anchor.start < end and start < anchor.end  # type: ignore[attr-defined, no-any-return]
