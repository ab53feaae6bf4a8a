"""Stories of pulls from several holders: failing over, racing, resuming, and bytes that do not fit together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs
from protocol_harness import block_bytes, joined, meta, record, wait, wants
from test_pulls import BLOCK, DOC, OTHER, PEER, chunk, hello, of, pull_ids, puller, reasons, request, sent

from kvcomm_p2p.protocol import events as ev
from kvcomm_p2p.protocol import messages as m
from kvcomm_p2p.protocol.anchors import MissReason
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.lateness import LATE_S, PULSE_S

THIRD = record(3)
STALL_S = NodeConfig().pull_stall_timeout_s


def asked(effects: list[ev.Effect]) -> list[tuple[NodeId | None, m.Pull]]:
    return [(e.to, e.message) for e in of(effects, ev.SendMessage) if isinstance(e.message, m.Pull)]


def failed(pull_id: int, reason: m.PullFailedReason, ordinal: int | None = None, **more: Any) -> m.PullFailed:
    return m.PullFailed(pull_id, ordinal, reason, **more)


def penalised(node: Any) -> list[str]:
    return sorted(peer.name for peer in node.peers() if peer.penalty_s > 0)


@pytest.mark.parametrize(
    "event",
    [
        ev.PeerUnreachable(PEER.node_id),
        ev.MessageReceived(PEER.node_id, m.Bye(1)),
        ev.MessageReceived(PEER.node_id, failed(1, m.PullFailedReason.NOT_FOUND)),
        ev.MessageReceived(PEER.node_id, failed(1, m.PullFailedReason.BUSY)),
        chunk(1, 1, 8, 8),
    ],
)
def test_what_a_holder_does_not_deliver_is_asked_of_the_next(event: ev.Event) -> None:
    node, fetch = puller(), request(others=(OTHER.node_id,))
    node.handle(fetch, 1.0)
    ((to, pull),) = asked(node.handle(event, 1.01))
    assert to == OTHER.node_id and [block.index for block in pull.blocks] == [0, 1]
    for ordinal in (0, 1):
        node.handle(chunk(pull.pull_id, ordinal, sender=OTHER.node_id), 1.02)
    effects = [e for want in fetch.wants for e in node.handle(ev.BlockVerified(want.handle, True), 1.03)]
    (finish,) = of(effects, ev.FinishFetch)
    assert len(finish.found) == 2 and finish.wait_lost_s <= 0.01 + 1e-9


def test_the_last_holder_that_fails_leaves_the_first_ones_reason() -> None:
    node = puller()
    node.handle(request(others=(OTHER.node_id,)), 1.0)
    ((_, second),) = asked(node.handle(ev.PeerUnreachable(PEER.node_id), 1.01))
    gone = ev.MessageReceived(OTHER.node_id, failed(second.pull_id, m.PullFailedReason.NOT_FOUND))
    (finish,) = of(node.handle(gone, 1.02), ev.FinishFetch)
    assert reasons(finish) == [MissReason.UNREACHABLE] * 2 and finish.wait_lost_s == pytest.approx(0.01)


def test_a_pull_that_was_cut_goes_on_at_another_holder_where_it_stopped() -> None:
    node, fetch = puller(), request(others=(OTHER.node_id,))
    node.handle(fetch, 1.0)
    node.handle(chunk(1, 0, 0, 100), 1.01)
    ((to, pull),) = asked(node.handle(ev.PeerUnreachable(PEER.node_id), 1.02))
    assert to == OTHER.node_id
    assert pull.blocks == (m.PullBlock(DOC.anchor_id, 0, BLOCK, 100), m.PullBlock(DOC.anchor_id, 1, BLOCK))
    effects = node.handle(chunk(2, 0, 100, BLOCK - 100, sender=OTHER.node_id), 1.03)
    first = fetch.wants[0]
    assert of(effects, ev.StoreChunk) == [ev.StoreChunk(first.handle, 100, BLOCK - 100, BLOCK)]
    assert of(effects, ev.VerifyBlock) == [ev.VerifyBlock(first.handle, first.digest)]


def test_silence_for_half_of_the_patience_brings_in_another_holder_and_the_first_byte_wins() -> None:
    node = puller()
    node.handle(request(others=(OTHER.node_id,)), 1.0)
    assert node.next_deadline() <= 1.0 + STALL_S / 2
    assert not asked(wait(node, 1.0 + STALL_S / 2 - 0.001))
    ((to, later),) = asked(wait(node, 1.0 + STALL_S / 2))
    assert to == OTHER.node_id and later.blocks == (
        m.PullBlock(DOC.anchor_id, 0, BLOCK),
        m.PullBlock(DOC.anchor_id, 1, BLOCK),
    )
    effects = node.handle(chunk(later.pull_id, 0, sender=OTHER.node_id), 1.12)
    assert next((e.to, e.message) for e in of(effects, ev.SendMessage)) == (PEER.node_id, m.CancelPull(1))
    assert node.handle(chunk(1, 0), 1.13) == [] and node.stats().unasked_chunks == 1
    assert penalised(node) == ["node1"] and node.stats().pull_counts["hedge_won"] == 1


def test_the_first_holder_wins_with_any_sign_of_life() -> None:
    node = puller()
    node.handle(request(others=(OTHER.node_id,)), 1.0)
    ((_, later),) = asked(wait(node, 1.0 + STALL_S / 2))
    effects = node.handle(chunk(1, 0, 0, 8), 1.11)
    assert (OTHER.node_id, m.CancelPull(later.pull_id)) in [(e.to, e.message) for e in of(effects, ev.SendMessage)]
    assert node.handle(chunk(later.pull_id, 0, sender=OTHER.node_id), 1.12) == []
    assert penalised(node) == [] and node.stats().pulls == 1


def test_a_race_is_lost_by_both_in_the_time_of_one_stall() -> None:
    node, fetch = puller(), request(others=(OTHER.node_id,))
    node.handle(fetch, 1.0)
    wait(node, 1.0 + STALL_S / 2)
    effects = wait(node, 1.0 + STALL_S)
    (finish,) = of(effects, ev.FinishFetch)
    assert reasons(finish) == [MissReason.STALLED] * 2 and finish.wait_lost_s == pytest.approx(STALL_S)
    assert len(sent(effects, m.CancelPull)) == 2 and penalised(node) == ["node1"]


@pytest.mark.parametrize("winner_fails", [True, False])
def test_when_one_of_a_race_refuses_the_other_goes_on(winner_fails: bool) -> None:
    node = puller()
    node.handle(request(others=(OTHER.node_id,)), 1.0)
    ((_, later),) = asked(wait(node, 1.0 + STALL_S / 2))
    refusing, pull_id = (PEER, 1) if winner_fails else (OTHER, later.pull_id)
    other, other_id = (OTHER, later.pull_id) if winner_fails else (PEER, 1)
    gone = failed(pull_id, m.PullFailedReason.NOT_FOUND)
    assert node.handle(ev.MessageReceived(refusing.node_id, gone), 1.11) == []
    (stored,) = of(node.handle(chunk(other_id, 0, 0, 8, sender=other.node_id), 1.12), ev.StoreChunk)
    assert stored.offset == 0


def test_a_frozen_holder_costs_its_patience_once_whoever_comes_next() -> None:
    network, ids = joined(4)
    network.publish(ids[0], DOC)
    network.publish(ids[2], DOC)
    network.frozen.add(ids[0])
    network.fetch(ids[1], 1, ids[0], DOC, others=(ids[3], ids[2]))  # the second does not have it
    network.run(1.0)
    (finish,) = network.take(ids[1], ev.FinishFetch)
    assert len(finish.found) == 2 and finish.wait_lost_s <= 0.25
    for block in finish.found:
        assert bytes(network.stores[ids[1]][block.handle]) == block_bytes(DOC, block.key.index)


def test_another_copy_with_other_bytes_is_a_miss_there_and_no_fault() -> None:
    node, fetch = puller(), request(others=(OTHER.node_id,))
    node.handle(fetch, 1.0)
    ((_, second),) = asked(node.handle(ev.PeerUnreachable(PEER.node_id), 1.01))
    node.handle(chunk(second.pull_id, 0, sender=OTHER.node_id), 1.02)
    effects = node.handle(ev.BlockVerified(fetch.wants[0].handle, False), 1.03)
    (finish,) = of(effects, ev.FinishFetch)
    assert len(finish.missed) == 2 and not of(effects, ev.ReportPeer) and penalised(node) == []


def test_bytes_of_two_holders_that_do_not_fit_are_fetched_anew_from_one_once() -> None:
    node, fetch = puller(), request(others=(OTHER.node_id, THIRD.node_id))
    node.handle(hello(THIRD), 0.0)
    handle = fetch.wants[0].handle
    node.handle(fetch, 1.0)
    node.handle(chunk(1, 0, 0, 100), 1.01)
    node.handle(ev.PeerUnreachable(PEER.node_id), 1.02)
    node.handle(chunk(2, 0, 100, BLOCK - 100, sender=OTHER.node_id), 1.03)
    effects = node.handle(ev.BlockVerified(handle, False), 1.04)
    assert of(effects, ev.ResetBlock) == [ev.ResetBlock(handle)] and not of(effects, ev.DropBlock)
    ((to, anew),) = asked(effects)
    assert to == OTHER.node_id and anew.blocks == (m.PullBlock(DOC.anchor_id, 0, BLOCK),)
    node.handle(chunk(anew.pull_id, 0, 0, 100, sender=OTHER.node_id), 1.05)
    effects = node.handle(ev.PeerUnreachable(OTHER.node_id), 1.06)
    assert of(effects, ev.DropBlock)[0].handle == handle, "a second mixture is not tried"
    assert [block.index for _, pull in asked(effects) for block in pull.blocks] == [1]


def test_a_busy_holder_names_peers_and_the_living_are_asked_at_once() -> None:
    node = puller()
    node.handle(request(), 1.0)
    busy = failed(1, m.PullFailedReason.BUSY, retry_after_s=0.04, referrals=(THIRD.node_id, OTHER.node_id))
    ((to, pull),) = asked(node.handle(ev.MessageReceived(PEER.node_id, busy), 1.01))
    assert to == OTHER.node_id, "the third is not known to live"
    gone = ev.MessageReceived(OTHER.node_id, failed(pull.pull_id, m.PullFailedReason.NOT_FOUND))
    assert not asked(node.handle(gone, 1.02)), "the holder is not asked again before it wants to be"
    assert [to for to, _ in asked(wait(node, 1.051))] == [PEER.node_id]


def test_a_large_fetch_is_asked_for_in_pieces_and_each_block_once() -> None:
    long = meta("long", tokens=512)
    node = puller(NodeConfig(pull_piece_bytes=4 * BLOCK))
    fetch = ev.FetchRequested(1, (PEER.node_id,), wants(long), 5.0)
    pulls = sent(node.handle(fetch, 1.0), m.Pull)
    assert [len(pull.blocks) for pull in pulls] == [4, 4], "two at a time"
    seen = []
    while pulls:
        pull = pulls.pop(0)
        for ordinal, block in enumerate(pull.blocks):
            seen.append(block.index)
            pulls += sent(node.handle(chunk(pull.pull_id, ordinal), 1.01), m.Pull)
    assert sorted(seen) == list(range(16)) and seen != sorted(seen), "pieces come in random order"


def test_pulls_per_peer_hold_for_hedges_too() -> None:
    node = puller(NodeConfig(pulls_per_peer_max=1))
    node.handle(request(1, holder=OTHER.node_id, anchor=meta("x")), 1.0)
    node.handle(request(2, others=(OTHER.node_id,)), 1.0)
    assert pull_ids(wait(node, 1.0 + STALL_S / 2)) == []


def test_time_in_a_queue_that_moved_is_not_lost() -> None:
    """Asked for at 1.15, the pull that a block waits behind is silent from then on; the block was asked for at 1.0."""
    node, fetch = puller(NodeConfig(pulls_per_peer_max=1)), request(others=(OTHER.node_id,))
    node.handle(fetch, 1.0)
    for ordinal in (0, 1):
        node.handle(chunk(1, ordinal), 1.0)
    node.handle(request(2, holder=OTHER.node_id, anchor=meta("x")), 1.15)
    for want in fetch.wants:  # what came is wrong, and the other holder is taken
        assert asked(node.handle(ev.BlockVerified(want.handle, False), 1.16)) == []
    finished = of(wait(node, 1.15 + STALL_S), ev.FinishFetch)
    assert {finish.fetch_id: finish.wait_lost_s for finish in finished} == pytest.approx({1: STALL_S, 2: STALL_S})


@pytest.mark.parametrize(("same_place", "violations"), [(True, 0), (False, 3)])
def test_who_took_the_place_of_the_one_that_was_asked_is_no_violator(same_place: bool, violations: int) -> None:
    """A node that crashed without its state returns as another at its old address, and answers what its old self is asked."""
    node = puller()
    successor = structs.replace(record(7), control=PEER.control) if same_place else record(7)
    node.handle(hello(successor), 0.1)
    node.handle(hello(structs.replace(PEER, epoch=PEER.epoch + 1)), 0.2)  # somebody still tells of the old one
    node.handle(request(), 1.0)
    node.handle(ev.TokensRequested(5, PEER.node_id, meta("x"), 2.0), 1.0)
    answers = (m.NoTokens(1), failed(1, m.PullFailedReason.NOT_FOUND))
    effects = [e for a in answers for e in node.handle(ev.MessageReceived(successor.node_id, a), 1.01)]
    effects += node.handle(chunk(1, 0, sender=successor.node_id), 1.01)
    assert node.stats().violations == violations and len(of(effects, ev.ReportPeer)) == min(2, violations)
    assert node.stats().fetches == 1 and not of(effects, ev.FinishTokens), "nor is its word taken for the other's"


def rung_late(node: Any, by_s: float, until: float) -> tuple[list[ev.Effect], float]:
    """Every timer rings so late, until a fetch is finished or it is `until`. Returns all effects, and when that was."""
    effects: list[ev.Effect] = []
    now = 0.0
    while now < until and not of(effects, ev.FinishFetch):
        now = max(now, node.next_deadline()) + by_s
        effects += node.handle(ev.TimerExpired(), now)
    return effects, now


def test_a_timer_that_rings_late_is_nobodys_silence() -> None:
    node = puller()
    node.handle(request(), 1.0)
    late = 1.0 + STALL_S + 0.3
    assert not of(node.handle(ev.TimerExpired(), late), ev.FinishFetch), "bytes may be waiting to be read"
    patient_until = late + STALL_S - PULSE_S
    assert not of(wait(node, patient_until - 0.001), ev.FinishFetch), "of that silence a pulse was the holder's"
    (finish,) = of(wait(node, patient_until), ev.FinishFetch)
    assert reasons(finish) == [MissReason.STALLED] * 2 and finish.wait_lost_s == pytest.approx(STALL_S)
    assert node.stats().pull_counts["late"] == 1


@pytest.mark.parametrize("by_s", [0.03, 0.1])
def test_a_node_that_always_comes_late_still_gives_up_a_frozen_holder(by_s: float) -> None:
    node = puller()
    node.handle(request(deadline=90.0), 1.0)
    effects, ended = rung_late(node, by_s, 60.0)
    (finish,) = of(effects, ev.FinishFetch)
    assert reasons(finish) == [MissReason.STALLED] * 2
    assert finish.wait_lost_s <= STALL_S + 1e-9, "what was ours is not charged to the holder"
    turns = STALL_S / PULSE_S + 3
    assert STALL_S <= ended - 1.0 <= turns * (PULSE_S + by_s)


def test_a_node_that_is_busy_reads_what_came_before_it_gives_up_anybody() -> None:
    """It runs all the time, on other messages, and its timer has to wait; a timer that rings a little late after that counts."""
    node = puller()
    node.handle(request(), 1.0)
    now = 1.0
    while now < 1.0 + 2 * STALL_S:
        now += 0.01
        node.handle(hello(OTHER), now)
    assert not of(node.handle(ev.TimerExpired(), now), ev.FinishFetch)
    (finish,) = of(node.handle(ev.TimerExpired(), now + LATE_S + 0.001), ev.FinishFetch)
    assert reasons(finish) == [MissReason.STALLED] * 2 and finish.wait_lost_s <= STALL_S + LATE_S + 0.001


def test_a_holder_that_fell_silent_is_asked_again_at_its_first_word_while_there_is_patience() -> None:
    node = puller(NodeConfig(pull_piece_bytes=BLOCK, pulls_per_peer_max=1))
    fetch = request()
    (first,) = sent(node.handle(fetch, 1.0), m.Pull)
    busy = failed(first.pull_id, m.PullFailedReason.BUSY, retry_after_s=0.01, referrals=(OTHER.node_id,))
    ((_, at_other),) = asked(node.handle(ev.MessageReceived(PEER.node_id, busy), 1.0))
    ((to, at_first),) = asked(wait(node, 1.011))
    assert to == PEER.node_id
    index = at_other.blocks[0].index
    wait(node, 1.15)
    node.handle(chunk(at_other.pull_id, 0, 0, 8, sender=OTHER.node_id), 1.15)
    effects = node.handle(chunk(at_other.pull_id, 0, 8, BLOCK - 8, sender=OTHER.node_id), 1.16)
    effects += node.handle(ev.BlockVerified(fetch.wants[index].handle, True), 1.16)
    effects += wait(node, 1.25)
    assert (PEER.node_id, m.CancelPull(at_first.pull_id)) in [(e.to, e.message) for e in of(effects, ev.SendMessage)]
    assert penalised(node) == ["node1"] and not of(effects, ev.FinishFetch), "there is patience left"
    node.handle(hello(PEER), 1.26)
    ((to, again),) = asked(wait(node, 1.28))
    assert to == PEER.node_id and again.blocks[0].index == at_first.blocks[0].index
    node.handle(chunk(again.pull_id, 0), 1.29)
    (finish,) = of(node.handle(ev.BlockVerified(fetch.wants[1 - index].handle, True), 1.3), ev.FinishFetch)
    assert len(finish.found) == 2 and 0.05 <= finish.wait_lost_s <= STALL_S


@pytest.mark.parametrize(("busy_s", "speaks", "waited_s"), [(0.0, True, 0.2), (0.5, True, 0.6), (0.5, False, 0.2)])
def test_a_holder_that_speaks_but_does_not_send_is_waited_for_as_a_busy_one(
    busy_s: float, speaks: bool, waited_s: float
) -> None:
    """One that says nothing costs one patience, as ever."""
    node = puller(NodeConfig(pull_piece_bytes=BLOCK, pulls_per_peer_max=1))
    fetch = replace(request(), busy_s=busy_s)
    (first,) = sent(node.handle(fetch, 1.0), m.Pull)
    now = 1.19
    wait(node, now)
    node.handle(chunk(first.pull_id, 0), now)
    node.handle(ev.BlockVerified(fetch.wants[first.blocks[0].index].handle, True), now)
    effects: list[ev.Effect] = []
    while not of(effects, ev.FinishFetch) and now < 3.0:
        now += 0.03
        effects = wait(node, now)
        effects += node.handle(hello(PEER), now) if speaks else []
    (finish,) = of(effects, ev.FinishFetch)
    assert len(finish.missed) == 1 and finish.wait_lost_s <= STALL_S + 1e-9
    assert now - 1.19 == pytest.approx(waited_s, abs=0.11)
    assert penalised(node) == ["node1"]


@pytest.mark.parametrize(("crowded", "came"), [(True, 2), (False, 1)])
def test_in_a_crowd_what_comes_makes_good_for_silence_before(crowded: bool, came: int) -> None:
    """Twice 0.15 s of silence, each ended by another holder: more than one patience."""
    node = puller(NodeConfig(pull_piece_bytes=BLOCK, pulls_per_peer_max=1))
    node.handle(hello(THIRD), 0.0)
    fetch = request(others=(OTHER.node_id, THIRD.node_id))
    ((_, pull),) = asked(node.handle(fetch, 1.0))
    now = 1.0
    if crowded:
        busy = failed(pull.pull_id, m.PullFailedReason.BUSY, retry_after_s=0.001)
        ((_, pull), *_) = asked(node.handle(ev.MessageReceived(PEER.node_id, busy), now))
    found: list[Any] = []
    for _ in range(2):
        effects = wait(node, now + 0.15)
        now += 0.15
        rivals = [(to, later) for to, later in asked(effects) if to is not None]
        for to, later in rivals[-1:]:
            effects += node.handle(chunk(later.pull_id, 0, sender=to), now)
        for check in of(effects, ev.VerifyBlock):
            effects += node.handle(ev.BlockVerified(check.handle, True), now)
        found += [each for finish in of(effects, ev.FinishFetch) for each in finish.found]
    found += [each for finish in of(wait(node, now + 1.0), ev.FinishFetch) for each in finish.found]
    assert len(found) == came


@pytest.mark.parametrize("late", [False, True])
def test_a_holder_that_never_answered_a_pull_is_not_waited_for_because_it_speaks(late: bool) -> None:
    """Its bulk connection may be dead; unless this node came late itself a moment ago, and may be behind with reading."""
    node = puller()
    node.handle(replace(request(), busy_s=0.5), 1.0)
    now, until = 1.0, 1.0 + STALL_S
    if late:
        now = 1.1
        until = 1.0 + 0.5
    effects: list[ev.Effect] = node.handle(ev.TimerExpired(), now)
    while not of(effects, ev.FinishFetch) and now < 3.0:
        now += 0.03
        effects = wait(node, now) + node.handle(hello(PEER), now)
    assert until - 0.01 <= now <= until + STALL_S


def test_a_holder_silent_for_half_of_the_patience_is_asked_whether_it_lives() -> None:
    node = puller()
    node.handle(request(), 1.0)
    pings = [
        (e.to, e.plane) for e in of(wait(node, 1.0 + STALL_S / 2), ev.SendMessage) if isinstance(e.message, m.Ping)
    ]
    assert (PEER.node_id, ev.Plane.CONTROL) in pings


@pytest.mark.parametrize(("busy_s", "ended"), [(10.0, 1.35), (0.0, 1.2)])
def test_in_a_crowd_one_silent_holder_does_not_end_what_others_were_just_asked_for(busy_s: float, ended: float) -> None:
    node = puller(NodeConfig(pull_piece_bytes=BLOCK, pulls_per_peer_max=1))
    event = ev.FetchRequested(1, (PEER.node_id,), wants(DOC), 9.0, busy_s=busy_s)
    (first,) = sent(node.handle(event, 1.0), m.Pull)
    busy = failed(first.pull_id, m.PullFailedReason.BUSY, retry_after_s=0.15, referrals=(OTHER.node_id,))
    ((_, at_other),) = asked(node.handle(ev.MessageReceived(PEER.node_id, busy), 1.0))
    ((to, again),) = asked(wait(node, 1.15))
    assert to == PEER.node_id
    again_busy = failed(again.pull_id, m.PullFailedReason.BUSY, retry_after_s=0.001)
    node.handle(ev.MessageReceived(PEER.node_id, again_busy), 1.15)
    ((to, last),) = asked(wait(node, 1.17))
    assert to == PEER.node_id
    effects = wait(node, ended - 0.01)
    assert not of(effects, ev.FinishFetch)
    assert at_other.pull_id in node._pulls._table.pulls or ended > 1.2
    (finish,) = of(wait(node, ended + 0.05), ev.FinishFetch)
    assert len(finish.missed) == 2 and finish.wait_lost_s <= STALL_S + 1e-9
    assert last.pull_id not in node._pulls._table.pulls


def test_who_loses_a_race_but_speaks_is_not_punished() -> None:
    node = puller()
    node.handle(request(others=(OTHER.node_id,)), 1.0)
    ((_, later),) = asked(wait(node, 1.0 + STALL_S / 2))
    node.handle(hello(PEER), 1.11)
    node.handle(chunk(later.pull_id, 0, sender=OTHER.node_id), 1.12)
    assert penalised(node) == [] and node.stats().pull_counts["hedge_won"] == 1


def test_pieces_grow_while_nobody_else_wants_the_holder() -> None:
    long = meta("long", tokens=512)
    node = puller(NodeConfig(pull_piece_bytes=BLOCK))
    pulls = sent(node.handle(ev.FetchRequested(1, (PEER.node_id,), wants(long), 5.0), 1.0), m.Pull)
    sizes = []
    while pulls:
        pull = pulls.pop(0)
        sizes.append(len(pull.blocks))
        for ordinal in range(len(pull.blocks)):
            pulls += sent(node.handle(chunk(pull.pull_id, ordinal), 1.01), m.Pull)
    assert sizes == [1, 1, 2, 4, 8]


def test_pieces_stay_small_at_a_holder_that_others_want() -> None:
    long = meta("long", tokens=512)
    node = puller(NodeConfig(pull_piece_bytes=BLOCK))
    first, *pulls = sent(node.handle(ev.FetchRequested(1, (PEER.node_id,), wants(long), 5.0), 1.0), m.Pull)
    busy = failed(first.pull_id, m.PullFailedReason.BUSY, retry_after_s=0.005)
    node.handle(ev.MessageReceived(PEER.node_id, busy), 1.0)
    now, sizes = 1.0, []
    while pulls:
        pull = pulls.pop(0)
        sizes.append(len(pull.blocks))
        now += 0.01
        for ordinal in range(len(pull.blocks)):
            pulls += sent(node.handle(chunk(pull.pull_id, ordinal), now), m.Pull)
        pulls += sent(wait(node, now + 0.006), m.Pull)
    assert sum(sizes) == 16 and set(sizes) == {1}


def test_what_comes_from_elsewhere_meanwhile_is_progress_of_the_request() -> None:
    node = puller(NodeConfig(pull_piece_bytes=BLOCK, pulls_per_peer_max=1))
    fetch = request(others=(OTHER.node_id,))
    (first,) = sent(node.handle(fetch, 1.0), m.Pull)
    busy = failed(first.pull_id, m.PullFailedReason.BUSY, retry_after_s=0.01, referrals=(OTHER.node_id,))
    ((_, at_other),) = asked(node.handle(ev.MessageReceived(PEER.node_id, busy), 1.0))
    ((to, at_first),) = asked(wait(node, 1.011))
    assert to == PEER.node_id and at_first.blocks[0].index != at_other.blocks[0].index
    wait(node, 1.15)
    node.handle(chunk(at_first.pull_id, 0, 0, 8), 1.15)
    effects = wait(node, 1.0 + STALL_S)
    assert (OTHER.node_id, m.CancelPull(at_other.pull_id)) in [
        (e.to, e.message) for e in of(effects, ev.SendMessage)
    ], "a silent holder is left, whatever others send"
    for want in fetch.wants:
        assert node.stats().fetches == 1, want


def test_what_a_holder_sends_for_one_pull_is_life_for_its_others() -> None:
    node = puller(NodeConfig(pull_piece_bytes=BLOCK))
    first, second = sent(node.handle(request(), 1.0), m.Pull)
    node.handle(chunk(first.pull_id, 0, 0, 8), 1.19)
    node.handle(chunk(first.pull_id, 0, 8, 8), 1.38)
    assert not of(wait(node, 1.5), ev.FinishFetch) and node.stats().pulls == 2
    assert second.pull_id in node._pulls._table.pulls
