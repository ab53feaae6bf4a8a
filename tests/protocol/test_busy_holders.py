"""Holders that are always busy cost little; holders that are busy and serve in turn cost nothing more than their queue."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from protocol_harness import Network, joined, meta, wait
from test_pulls import PEER, pull_ids, puller, request

from kvcomm_p2p.protocol import events as ev
from kvcomm_p2p.protocol import messages as m
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.vain_waits import HOLDERS_PRUNED_AT, VAIN_WAITS, VainWaits

BUSY_WAIT_S = NodeConfig().pull_busy_wait_s


def busy_for_ever(node: Any, fetch_id: int, at: float, busy_s: float) -> tuple[ev.FinishFetch, float]:
    """One request to a holder that answers everything with BUSY: how it ends, and when."""
    event = replace(request(), fetch_id=fetch_id, busy_s=busy_s, deadline=at + 30.0)
    effects, now = node.handle(event, at), at
    while not any(isinstance(effect, ev.FinishFetch) for effect in effects):
        for pull_id in pull_ids(effects):
            answer = m.PullFailed(pull_id, None, m.PullFailedReason.BUSY, 0.04)
            node.handle(ev.MessageReceived(PEER.node_id, answer), now + 0.001)
        now = max(node.next_deadline(), now + 0.001)
        effects = wait(node, now)
    return next(effect for effect in effects if isinstance(effect, ev.FinishFetch)), now


@pytest.mark.parametrize("busy_s", [0.3, 1.0, 30.0])
def test_a_holder_that_is_always_busy_and_never_serves_is_asked_less_and_less(busy_s: float) -> None:
    """Whatever the engine's patience: 6 s in vain altogether, then a request every 1, 2, 4 … 30 s waits once more."""
    node = puller()
    now, lost = 1.0, []
    for number in range(400):
        finish, now = busy_for_ever(node, number, now, busy_s)
        lost.append(finish.wait_lost_s)
        assert finish.wait_lost_s <= min(busy_s, BUSY_WAIT_S) + 0.1
        now += 0.5
    free = next(index for index, each in enumerate(lost) if each == 0.0)
    first_s = sum(lost[:free])
    assert VAIN_WAITS * BUSY_WAIT_S - 0.1 <= first_s <= (VAIN_WAITS + 1) * BUSY_WAIT_S
    # From then on the share of time that waiting takes falls to one wait in half a minute.
    asked_again = [index for index in range(free, 400) if lost[index] > 0]
    assert len(asked_again) <= 12


def test_a_holder_that_serves_in_turn_is_never_punished() -> None:
    """Twelve want the same of one holder with one place, again and again: everybody waits, nobody is blamed."""
    config = NodeConfig(uploads_max=1, pull_piece_bytes=512, passing_on_s=0.001)
    network, ids = joined(13, config=config)
    holder, pullers = ids[0], ids[1:]
    for round_ in range(12):
        anchor = meta(("doc", round_), tokens=512)
        network.publish(holder, anchor)
        for node_id in pullers:
            network.fetch(node_id, round_, holder, anchor, deadline_s=10.0, busy_s=0.3)
        network.run(2.5)
        for node_id in pullers:
            assert penalty_s(network, node_id, holder) == 0.0
    assert network.nodes[holder].stats().busy > 50, "it was busy indeed"


def penalty_s(network: Network, node_id: NodeId, of: NodeId) -> float:
    return next(view.penalty_s for view in network.nodes[node_id].peers() if view.node_id == of)


WAITS = st.lists(st.tuples(st.floats(0, 5), st.floats(0, 3), st.booleans()), max_size=40)


@given(WAITS)
def test_time_counts_once_and_a_delivery_ends_it(steps: list[tuple[float, float, bool]]) -> None:
    """Against a plain union of intervals."""
    vain = VainWaits(6.0, lambda holder: True)
    holder, now, intervals = NodeId(b"h" * 16), 10.0, []
    for pause_s, waited_s, serves in steps:
        now += pause_s
        vain.told_busy(holder, now)
        if serves:
            vain.served(holder)
            vain.told_busy(holder, now)
            intervals = []
        since = now - waited_s
        too_long = vain.gave_up(holder, since, now)
        begun = max(since, max((end for _, end in intervals), default=0.0))
        intervals.append((begun, now))
        total = sum(max(0.0, end - begin) for begin, end in intervals)
        if abs(total - 6.0) > 1e-6:
            assert too_long == (total >= 6.0)


def test_who_said_nothing_meanwhile_is_not_blamed_and_strangers_are_forgotten() -> None:
    vain = VainWaits(1.0, lambda holder: holder[0] < 5)
    vain.told_busy(NodeId(b"\1" * 16), 1.0)
    assert not vain.gave_up(NodeId(b"\1" * 16), 2.0, 9.0), "it was busy before, not now"
    assert not vain.gave_up(NodeId(b"\2" * 16), 2.0, 9.0)
    for number in range(2 * HOLDERS_PRUNED_AT):
        vain.told_busy(NodeId(number.to_bytes(2, "big") * 8), 3.0)
    assert len(vain) <= HOLDERS_PRUNED_AT + 5 * 256
