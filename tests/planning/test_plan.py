"""Plans: what is reused, from whom, and what never is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_cases import COSTS, EXACT_RULES, ME, PEER, RULES, TOKEN_BYTES, Tokens, donor, joined, words

from kvcomm_p2p.planning.candidates import HEAD_WHY
from kvcomm_p2p.planning.costs import PullCost
from kvcomm_p2p.planning.plan import LAST_WHY, make_plan
from kvcomm_p2p.planning.prefix import REMOTE_TOKENS_MIN
from kvcomm_p2p.planning.spans import (
    blocks_needed,
    exact_until,
    hops_at,
    lead_rows,
    pulled_bytes,
    recompute_positions,
    span_hops,
)
from kvcomm_p2p.planning.types import Costs, Donor, Mode, Plan, Provenance, Repair, ReuseRules, Span, SpanKind
from kvcomm_p2p.protocol.anchors import MissReason
from kvcomm_p2p.protocol.ids import NodeId

Shape = list[tuple[int, int, str]]


def shape(plan: Plan) -> Shape:
    return [(span.start, span.end, span.kind.value) for span in plan.spans]


def reasons(plan: Plan) -> list[tuple[int, int, str]]:
    return [(r.start, r.end, r.miss.reason.value) for r in plan.rejected]


def check(plan: Plan, prompt: Tokens) -> None:
    """What holds for every plan."""
    assert plan.tokens == len(prompt)
    assert plan.spans[0].start == 0
    assert plan.spans[-1].end == len(prompt)
    assert plan.spans[-1].kind is SpanKind.RECOMPUTE
    assert plan.planned_s <= plan.dense_s
    tainted = False
    for before, span in zip((None, *plan.spans), plan.spans, strict=False):
        assert span.start < span.end
        assert before is None or before.end == span.start
        if span.donor is None:
            assert span.kind is SpanKind.RECOMPUTE
            assert span.why
            continue
        at = span.donor_start - span.donor.start
        assert 0 <= at <= at + span.tokens <= len(span.donor.token_ids)
        assert np.array_equal(span.donor.token_ids[at : at + span.tokens], prompt[span.start : span.end])
        needed = blocks_needed(span)
        covered = [anchor.start + 32 * index for anchor, index in needed]
        assert covered[0] <= span.donor_start
        assert covered == list(range(covered[0], span.donor_start + span.tokens, 32))
        if span.kind is SpanKind.EXACT:
            assert not tainted
            assert span_hops(span) == 0
            assert span.donor_start == span.start
        elif span.kind is SpanKind.CONTINUED:
            assert span.donor.local
            assert span.donor_start == span.start
            tainted = True
        elif span.kind is SpanKind.REUSE:
            assert span_hops(span) <= 1
            assert before is not None
            assert before.why == HEAD_WHY
            assert (before.donor, before.donor_start + before.tokens) == (span.donor, span.donor_start)
            run = [each for each in plan.spans if each.run == span.run]
            total = sum(each.tokens for each in run)
            assert before.tokens == (min(32, total // 4) if before is run[0] else RULES.hole_head_tokens)
            assert total >= 64
            tainted = True
    positions = recompute_positions(plan)
    assert positions[-1] == len(prompt) - 1
    assert np.all(np.diff(positions) > 0)


def test_a_run_behind_another_prefix() -> None:
    document = words(1, 1000)
    prompt = joined(words(2, 50), document, words(3, 40))
    plan = make_plan(prompt, [donor(joined(words(4, 37), document))], Mode.BALANCED, RULES, COSTS)
    check(plan, prompt)
    assert shape(plan) == [(0, 50, "recompute"), (50, 82, "recompute"), (82, 1050, "reuse"), (1050, 1090, "recompute")]
    assert plan.spans[1].why == HEAD_WHY
    assert plan.spans[2].donor_start == 37 + 32
    assert len(recompute_positions(plan)) == 50 + 32 + 40
    assert hops_at(plan) == ((0, 0), (82, 1))
    assert exact_until(plan) == 82
    assert plan.rejected == ()
    assert pulled_bytes(plan.spans, TOKEN_BYTES) == {PEER: (1037 - 32) * TOKEN_BYTES}


def test_the_head_of_a_short_run_is_a_quarter() -> None:
    document = words(1, 66)
    prompt = joined(words(2, 5), document, words(3, 5))
    plan = make_plan(prompt, [donor(document, local=True)], Mode.BALANCED, RULES, COSTS)
    assert shape(plan)[1:3] == [(5, 21, "recompute"), (21, 71, "reuse")]


def test_exact_prefix_is_copied_to_the_token_and_the_last_token_is_recomputed() -> None:
    prompt = words(1, 1000)
    plan = make_plan(prompt, [donor(prompt[:777], local=True)], Mode.EXACT, EXACT_RULES, COSTS)
    check(plan, prompt)
    assert shape(plan) == [(0, 777, "exact"), (777, 1000, "recompute")]
    assert exact_until(plan) == 1000
    whole = make_plan(prompt, [donor(prompt, local=True)], Mode.EXACT, EXACT_RULES, COSTS)
    assert shape(whole) == [(0, 999, "exact"), (999, 1000, "recompute")]
    assert whole.spans[-1].why == LAST_WHY


def test_exact_pieces_from_several_donors_follow_each_other() -> None:
    prompt = words(1, 2000)
    donors = [
        donor(prompt[:512], local=True),
        donor(prompt[512:1536], start=512, same_prefix_until=1536, name=1),
        donor(prompt[1024:1800], start=1024, local=True, same_prefix_until=1024, name=2),
        donor(prompt[1536:], start=1536, same_prefix_until=0, name=3),
    ]
    plan = make_plan(prompt, donors, Mode.EXACT, RULES, COSTS)
    check(plan, prompt)
    assert [(s.start, s.end, s.donor.local) for s in plan.spans if s.donor] == [
        (0, 512, True),
        (512, 1024, False),
        (1024, 1800, True),
    ]
    assert reasons(plan) == [(1800, 1999, "exact_only")]


def test_a_gap_in_an_exact_prefix_is_recomputed_and_stays_exact() -> None:
    prompt = words(1, 1500)
    donors = [
        donor(prompt[:512], local=True),
        donor(prompt[640:1400], start=640, local=True, same_prefix_until=1400, name=1),
    ]
    plan = make_plan(prompt, donors, Mode.BALANCED, RULES, COSTS)
    check(plan, prompt)
    assert shape(plan) == [
        (0, 512, "exact"),
        (512, 640, "recompute"),
        (640, 1400, "exact"),
        (1400, 1500, "recompute"),
    ]
    assert exact_until(plan) == 1500


def test_a_few_shared_template_tokens_do_not_cost_a_block_from_a_peer() -> None:
    prompt = words(1, 1000)
    for tokens, used in ((REMOTE_TOKENS_MIN - 1, False), (300, True)):
        elsewhere = joined(prompt[:tokens], words(2, 500))
        remote = make_plan(prompt, [donor(elsewhere)], Mode.EXACT, EXACT_RULES, COSTS)
        assert any(span.donor is not None for span in remote.spans) == used
        own = make_plan(prompt, [donor(elsewhere, local=True)], Mode.EXACT, EXACT_RULES, COSTS)
        assert shape(own)[0] == (0, tokens, "exact")


def test_local_is_preferred_at_equal_length() -> None:
    prompt = words(1, 600)
    donors = [donor(prompt), donor(prompt, local=True, name=1)]
    plan = make_plan(prompt, donors, Mode.EXACT, RULES, COSTS)
    assert [s.donor.local for s in plan.spans if s.donor] == [True]
    behind = joined(words(2, 20), prompt)
    plan = make_plan(behind, donors, Mode.BALANCED, RULES, COSTS)
    assert {s.donor.local for s in plan.spans if s.donor} == {True}


def test_a_prefix_of_a_slow_peer_is_recomputed() -> None:
    prompt = words(1, 1000)
    slow = {PEER: PullCost(latency_s=0.5, bytes_per_s=1e6)}
    donors = [donor(prompt), donor(prompt[:320], local=True, name=1)]
    plan = make_plan(prompt, donors, Mode.EXACT, RULES, COSTS, pulls=slow)
    check(plan, prompt)
    assert shape(plan) == [(0, 320, "exact"), (320, 1000, "recompute")]
    assert reasons(plan) == [(320, 999, "cost")]
    assert len(make_plan(prompt, donors, Mode.EXACT, RULES, COSTS).spans) == 3


def test_own_earlier_turn_is_continued_in_balanced_only() -> None:
    earlier = words(1, 800)
    prompt = joined(earlier, words(2, 100))
    own = donor(earlier, local=True, hops=[0, 1], anchor_tokens=416)
    plan = make_plan(prompt, [own], Mode.BALANCED, RULES, COSTS)
    check(plan, prompt)
    assert shape(plan) == [(0, 416, "exact"), (416, 800, "continued"), (800, 900, "recompute")]
    assert hops_at(plan) == ((0, 0), (416, 1))
    exact = make_plan(prompt, [own], Mode.EXACT, RULES, COSTS)
    assert shape(exact) == [(0, 416, "exact"), (416, 900, "recompute")]
    assert reasons(exact) == [(416, 800, "exact_only")]
    judge = make_plan(prompt, [own], Mode.BALANCED, EXACT_RULES, COSTS)
    assert shape(judge) == shape(exact)
    assert judge.rejected[0].miss.detail == EXACT_RULES.reason


def test_a_peers_repaired_prefix_is_a_run_like_any_other() -> None:
    earlier = words(1, 800)
    prompt = joined(earlier, words(2, 100))
    plan = make_plan(prompt, [donor(earlier, hops=1)], Mode.BALANCED, RULES, COSTS)
    check(plan, prompt)
    assert shape(plan) == [(0, 32, "recompute"), (32, 800, "reuse"), (800, 900, "recompute")]
    assert hops_at(plan) == ((0, 0), (32, 2))


def test_own_kv_with_many_repairs_continues_but_does_not_move() -> None:
    earlier = words(1, 800)
    own = donor(earlier, local=True, hops=3)
    plan = make_plan(joined(earlier, words(2, 90)), [own], Mode.BALANCED, RULES, COSTS)
    assert shape(plan)[0] == (0, 800, "continued")
    assert hops_at(plan) == ((0, 3),)
    moved = joined(words(3, 10), earlier)
    plan = make_plan(moved, [own], Mode.BALANCED, RULES, COSTS)
    assert shape(plan) == [(0, 810, "recompute")]
    assert reasons(plan) == [(10, 809, "exact_only")]


def test_exact_copies_are_preferred_to_repaired_ones() -> None:
    document = words(1, 500)
    prompt = joined(words(2, 50), document, words(3, 20))
    repaired = donor(joined(words(4, 64), document), hops=1)
    exact = donor(joined(words(5, 64), document), name=1)
    plan = make_plan(prompt, [repaired, exact], Mode.BALANCED, RULES, COSTS)
    assert [s.donor for s in plan.spans if s.donor] == [exact, exact]


def test_one_long_run_wins_over_fragments_and_overlaps_are_cut() -> None:
    document = words(1, 1000)
    prompt = joined(words(2, 50), document, words(3, 20))
    fragments = [donor(joined(words(9 + i, 40), document[i * 250 : i * 250 + 260]), name=i + 1) for i in range(4)]
    long = donor(joined(words(4, 40), document[:900]), name=9)
    plan = make_plan(prompt, [*fragments, long], Mode.BALANCED, RULES, COSTS)
    check(plan, prompt)
    reused = [(s.start, s.end, s.donor) for s in plan.spans if s.kind is SpanKind.REUSE]
    assert [(start, end) for start, end, _ in reused] == [(82, 950), (975, 1050)]
    assert reused[0][2] is long
    assert reused[1][2] is fragments[3]


def test_short_runs_are_recomputed_with_the_reason() -> None:
    prompt = joined(words(2, 50), words(1, 60), words(3, 20))
    plan = make_plan(prompt, [donor(joined(words(4, 3), words(1, 60)))], Mode.BALANCED, RULES, COSTS)
    assert shape(plan) == [(0, 130, "recompute")]
    assert reasons(plan) == [(50, 110, "too_short")]
    assert plan.planned_s == plan.dense_s


def test_everything_is_recomputed_when_that_is_faster() -> None:
    document = words(1, 500)
    prompt = joined(words(2, 50), document, words(3, 20))
    slow = replace(COSTS, pull_bytes_per_s=1e6)
    plan = make_plan(prompt, [donor(document)], Mode.BALANCED, RULES, slow)
    check(plan, prompt)
    assert shape(plan) == [(0, 570, "recompute")]
    assert reasons(plan) == [(50, 550, "cost")]
    late = replace(COSTS, pull_latency_s=60.0)
    plan = make_plan(prompt, [donor(document)], Mode.BALANCED, RULES, late)
    assert shape(plan) == [(0, 570, "recompute")]
    assert reasons(plan) == [(50, 550, "cost")]


def test_runs_that_do_not_pay_for_their_latency_are_left_out() -> None:
    documents = [words(1 + i, 80) for i in range(3)]
    far = NodeId(b"2" * 16)
    prompt = joined(words(9, 30), documents[0], words(10, 30), documents[1], words(11, 30), words(5, 900), words(12, 9))
    donors = [donor(words(5, 900)), *(donor(documents[i], holder=far, name=i + 1) for i in range(2))]
    pulls = {far: PullCost(latency_s=1.0, bytes_per_s=1e9)}
    plan = make_plan(prompt, donors, Mode.BALANCED, RULES, COSTS, pulls=pulls)
    check(plan, prompt)
    assert {s.donor.holder for s in plan.spans if s.donor} == {PEER}
    assert reasons(plan) == [(30, 110, "cost"), (140, 220, "cost")]
    near = make_plan(prompt, donors, Mode.BALANCED, RULES, COSTS)
    assert {s.donor.holder for s in near.spans if s.donor} == {PEER, far}


def test_dense_uses_and_reports_nothing() -> None:
    prompt = words(1, 300)
    plan = make_plan(prompt, [donor(prompt, local=True)], Mode.DENSE, RULES, COSTS)
    assert shape(plan) == [(0, 300, "recompute")]
    assert plan.rejected == ()


def test_one_token_and_no_token() -> None:
    plan = make_plan(words(1, 1), [donor(words(1, 1), local=True)], Mode.BALANCED, RULES, COSTS)
    assert shape(plan) == [(0, 1, "recompute")]
    with pytest.raises(ValueError, match="empty"):
        make_plan(words(1, 0), [], Mode.BALANCED, RULES, COSTS)


def test_whole_blocks_are_counted() -> None:
    document = words(1, 100)
    span = make_plan(
        joined(words(2, 9), document, words(3, 9)),
        [donor(joined(words(4, 20), document))],
        Mode.BALANCED,
        replace(RULES, repairs={each: (Repair(0),) for each in Provenance}),
        COSTS,
    ).spans[1]
    assert [(anchor.start, index) for anchor, index in blocks_needed(span)] == [(0, i) for i in range(4)]
    assert pulled_bytes([span, span], TOKEN_BYTES) == {PEER: 120 * TOKEN_BYTES}


@st.composite
def situations(draw: st.DrawFn) -> tuple[Tokens, list[Donor]]:
    pieces = [words(100 + i, draw(st.integers(1, 300))) for i in range(4)]
    pieces.append(np.resize(words(99, draw(st.integers(1, 5))), 150))

    def text() -> Tokens:
        return joined(*(pieces[i] for i in draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))))

    prompt = text()
    donors = []
    for name in range(draw(st.integers(0, 4))):
        base = draw(st.sampled_from(["text", "prefix", "suffix"]))
        local = draw(st.booleans())
        hops = sorted(draw(st.integers(0, 2)) for _ in range(20)) if draw(st.booleans()) else [0] * 20
        start = 0
        ids = text()
        if base == "prefix":
            ids = joined(prompt, ids)[: draw(st.integers(1, len(prompt) + 50))]
        elif base == "suffix" and len(prompt) > 32:
            start = 32 * draw(st.integers(1, (len(prompt) - 1) // 32))
            ids = joined(prompt[start:], ids)
        donors.append(
            donor(
                ids,
                start=start,
                local=local,
                hops=hops,
                name=name,
                holder=ME if local else NodeId(bytes([name]) * 16),
                anchor_tokens=128,
                same_prefix_until=start if start and draw(st.booleans()) else 0,
            )
        )
    return prompt, donors


COSTS_TRIED = st.builds(
    replace,
    st.just(COSTS),
    pull_bytes_per_s=st.sampled_from([1e7, 1e9]),
    pull_latency_s=st.sampled_from([0.001, 0.2]),
    forward_s=st.sampled_from([0.0, 0.1]),
)


@settings(max_examples=200, deadline=None)
@given(situations(), COSTS_TRIED, st.sampled_from([RULES, EXACT_RULES]), st.sampled_from(list(Mode)))
def test_every_plan_keeps_the_rules(
    situation: tuple[Tokens, list[Donor]], costs: Costs, rules: ReuseRules, mode: Mode
) -> None:
    prompt, donors = situation
    plan = make_plan(prompt, donors, mode, rules, costs)
    check(plan, prompt)
    if mode is Mode.EXACT or not rules.approximate:
        assert exact_until(plan) == len(prompt)
        for span in plan.spans:
            if span.donor is not None:
                assert span.kind is SpanKind.EXACT
                assert span_hops(span) == 0
                assert span.donor.start == 0 or span.donor.same_prefix_until >= span.donor.start
    for item in plan.rejected:
        assert 0 <= item.start < item.end < len(prompt)
        assert item.miss.detail
        assert item.miss.reason in (MissReason.COST, MissReason.TOO_SHORT, MissReason.EXACT_ONLY)
    assert make_plan(prompt, donors, mode, rules, costs) == plan


def test_lead_is_the_prompts_own_beginning_while_peers_are_asked() -> None:
    """It is computed beside the pull if the pull takes much longer than a forward costs for any number of tokens."""
    document = words(2, 320)
    slow, fast = replace(COSTS, pull_bytes_per_s=1e6), replace(COSTS, pull_bytes_per_s=1e15, pull_latency_s=1e-9)

    def lead(plan: Plan, costs: Costs = slow) -> tuple[int, int]:
        return lead_rows(plan, costs, {})

    def reused(beginning: int, source: Donor) -> Plan:
        run = Span(beginning, beginning + 64, SpanKind.REUSE, source, 0)
        spans = (Span(0, beginning, SpanKind.RECOMPUTE), run, Span(run.end, run.end + 1, SpanKind.RECOMPUTE))
        return Plan(run.end + 1, Mode.BALANCED, spans, (), 1.0, 1.0)

    remote, local = donor(document), donor(document, local=True)
    assert lead(reused(8, remote)) == (0, 8)
    assert lead(reused(8, remote), fast) == (0, 0), "the blocks are here at once"
    assert lead(reused(7, remote)) == (0, 0), "too short for a forward of its own"
    assert lead(reused(8, local)) == (0, 0), "nothing to wait for"
    whole = (Span(0, 9, SpanKind.RECOMPUTE),)
    assert lead(Plan(9, Mode.BALANCED, whole, (), 1.0, 1.0)) == (0, 0)
    head, rest = Span(0, 16, SpanKind.RECOMPUTE, remote), Span(16, 64, SpanKind.REUSE, remote, 16)
    assert lead(Plan(64, Mode.BALANCED, (head, rest), (), 1.0, 1.0)) == (0, 0), "its donor is not there yet"
    known = (
        Span(0, 40, SpanKind.EXACT, local),
        Span(40, 60, SpanKind.RECOMPUTE),
        replace(head, start=60, end=76),
        replace(rest, start=76, end=124),
    )
    assert lead(Plan(124, Mode.BALANCED, known, (), 1.0, 1.0)) == (40, 60), "behind what the own pool has"
