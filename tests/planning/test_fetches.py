"""From a plan to fetches and replicas: the decisions that engine and simulator share."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import COSTS, KEY, ME, PEER, donor, joined, words

from kvcomm_p2p.planning.fetches import (
    DEADLINE_FACTOR,
    DEADLINE_MIN_S,
    GROUP_BLOCKS,
    REPLICA_BLOCKS_MIN,
    WAIT_LOST_MAX_S,
    Wants,
    anchors_of,
    blocks_used,
    consecutive,
    in_groups,
    limits_of,
    other_holders,
    own_blocks,
    peers_blocks,
    pulled_from_one,
    replica_pieces,
)
from kvcomm_p2p.planning.finding import FoundDonors
from kvcomm_p2p.planning.parts import part_of, replica_of
from kvcomm_p2p.planning.types import Donor, Mode, Plan, Span, SpanKind
from kvcomm_p2p.protocol.anchors import BLOCK_TOKENS, BlockKey
from kvcomm_p2p.protocol.ids import NodeId

FAR, THIRD = NodeId(b"2" * 16), NodeId(b"3" * 16)
LONG = donor(words(1, 700))


def plan_of(*spans: Span) -> Plan:
    return Plan(spans[-1].end, Mode.BALANCED, spans, (), 1.0, 0.5)


def reused(start: int, end: int, source: Donor, at: int, *, encoded: bool = False) -> Span:
    return Span(start, end, SpanKind.REUSE, source, at, run=1, encoded=encoded)


def wants_of(source: Donor) -> Wants:
    return {BlockKey(a.anchor_id, index): (a, index) for a in source.anchors for index in range(a.blocks)}


def test_a_plan_says_which_blocks_come_from_where() -> None:
    mine, far = donor(words(2, 64), local=True, holder=ME, name=1), donor(words(3, 96), holder=FAR, name=2)
    plan = plan_of(
        Span(0, 64, SpanKind.EXACT, mine, 0),
        reused(64, 104, LONG, 20),
        Span(104, 110, SpanKind.RECOMPUTE),
        reused(110, 142, far, 40, encoded=True),
        reused(142, 150, far, 90),
    )
    assert [key.index for key in own_blocks(plan)] == [0, 1]
    raw, int8 = peers_blocks(plan)[FAR, False], peers_blocks(plan)[FAR, True]
    assert [index for _, index in int8.values()] == [1] and [index for _, index in raw.values()] == [2, 3][: len(raw)]
    assert [index for _, index in peers_blocks(plan)[PEER, False].values()] == [0, 1]
    every = {key for wants in peers_blocks(plan).values() for key in wants} | own_blocks(plan).keys()
    assert blocks_used(plan) == every
    assert pulled_from_one(plan) is None
    assert pulled_from_one(plan_of(Span(0, 64, SpanKind.EXACT, mine, 0), reused(64, 104, LONG, 20))) == PEER
    assert pulled_from_one(plan_of(Span(0, 64, SpanKind.EXACT, mine, 0))) is None


def test_limits_follow_what_is_wanted_and_what_was_lost_already() -> None:
    wants = wants_of(LONG)
    few = dict(itertools.islice(wants.items(), 1))
    slow = limits_of(wants, 0.0, COSTS)
    assert limits_of(few, 0.0, COSTS).deadline_s == DEADLINE_MIN_S
    crawling = limits_of(wants, 0.0, type(COSTS)(**{**_fields(COSTS), "pull_bytes_per_s": 1e6}))
    assert crawling.deadline_s > 100 > slow.deadline_s and DEADLINE_FACTOR > 1
    assert 0 < limits_of(few, 0.0, COSTS).busy_s < slow.busy_s < COSTS.forward_s + 700 * COSTS.token_s
    assert slow.stall_s == WAIT_LOST_MAX_S
    assert limits_of(wants, 0.1, COSTS).stall_s == pytest.approx(WAIT_LOST_MAX_S - 0.1)
    assert limits_of(wants, 9.0, COSTS).stall_s == 0.0


def _fields(value: object) -> dict[str, float]:
    return {name: getattr(value, name) for name in value.__slots__}  # type: ignore[attr-defined]


def test_groups_are_all_of_it_in_order() -> None:
    wants = wants_of(LONG)
    groups = in_groups(wants)
    assert [key for group in groups for key in group] == list(wants)
    assert all(len(group) == GROUP_BLOCKS for group in groups[:-1]) and 0 < len(groups[-1]) <= GROUP_BLOCKS


def test_others_are_holders_of_the_same_anchors_once_each() -> None:
    wants = wants_of(LONG)
    first, second, *_ = anchors_of(wants)
    found = FoundDonors((), {}, (), 0.0, {first: (THIRD, PEER, FAR), second: (FAR, ME)})
    assert other_holders(wants, found, PEER) == (THIRD, FAR, ME)
    assert other_holders(wants_of(donor(words(9, 64), name=9)), found, PEER) == ()


@given(st.sets(st.integers(0, 40)))
def test_consecutive_numbers_are_cut_where_they_skip(numbers: set[int]) -> None:
    stretches = consecutive(sorted(numbers))
    assert [number for stretch in stretches for number in stretch] == sorted(numbers)
    assert all(stretch == list(range(stretch[0], stretch[-1] + 1)) for stretch in stretches)
    assert all(a[-1] + 1 < b[0] for a, b in itertools.pairwise(stretches))


@given(st.data())
def test_replicas_are_pieces_of_what_came_and_not_too_short(data: st.DataObject) -> None:
    wants = wants_of(LONG)
    came = data.draw(st.sets(st.sampled_from(list(wants))))
    pieces = replica_pieces(anchors_of(wants), came)
    kept = {BlockKey(anchor.anchor_id, index) for anchor, piece in pieces for index in piece}
    assert kept <= came
    assert all(len(piece) >= min(REPLICA_BLOCKS_MIN, anchor.blocks) for anchor, piece in pieces)
    alone = {
        key
        for key in came - kept
        if BlockKey(key.anchor_id, key.index - 1) in came or BlockKey(key.anchor_id, key.index + 1) in came
    }
    assert not alone, "what has a neighbour is kept"


def test_a_replica_says_what_the_part_is() -> None:
    anchor = LONG.anchors[-1]
    ids = LONG.token_ids[anchor.start : anchor.end]
    whole = replica_of(anchor, ids, range(anchor.blocks), KEY)
    assert whole.meta is anchor and np.array_equal(whole.token_ids, ids)
    last = anchor.blocks - 1
    tail = replica_of(anchor, ids, [last - 1, last], KEY)
    start = anchor.start + (last - 1) * BLOCK_TOKENS
    assert tail.meta == part_of(anchor, ids, start, anchor.end, KEY) != anchor
    assert np.array_equal(tail.token_ids, LONG.token_ids[start : anchor.end]) and not tail.token_ids.flags.writeable
    with pytest.raises(ValueError, match="assignment destination"):
        tail.token_ids[0] = 1
    assert joined(tail.token_ids) is not tail.token_ids
