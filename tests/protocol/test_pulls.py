"""Stories of pulls: who serves, who waits, who gives up when, and what becomes of every handle."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from protocol_harness import Network, block_bytes, held, joined, make_node, meta, new_handle, record, wait, wants

from kvcomm_p2p.protocol import events as ev
from kvcomm_p2p.protocol import messages as m
from kvcomm_p2p.protocol.anchors import AnchorMeta, BlockKey, Miss, MissReason, Visibility
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.ids import AnchorId, NodeId
from kvcomm_p2p.protocol.node import Node
from kvcomm_p2p.protocol.uploads import RETRY_MIN_S

PEER, OTHER = record(1), record(2)
DOC = meta("doc")
BLOCK = 32 * 8


def hello(peer: m.MemberRecord) -> ev.MessageReceived:
    return ev.MessageReceived(peer.node_id, m.Hello(m.PROTOCOL_VERSION, m.PROTOCOL_VERSION, bytes(16), peer))


def puller(config: NodeConfig | None = None) -> Node:
    """A node that knows PEER and OTHER, at time 0."""
    node = make_node(0, config=config)
    for peer in (PEER, OTHER):
        node.handle(hello(peer), 0.0)
    return node


def request(
    fetch_id: int = 1,
    *,
    holder: NodeId = PEER.node_id,
    others: tuple[NodeId, ...] = (),
    deadline: float = 5.0,
    anchor: AnchorMeta = DOC,
) -> ev.FetchRequested:
    return ev.FetchRequested(fetch_id, (holder, *others), wants(anchor), deadline)


def pull_ids(effects: list[ev.Effect]) -> list[int]:
    return [e.message.pull_id for e in effects if isinstance(e, ev.SendMessage) and isinstance(e.message, m.Pull)]


def of(effects: list[ev.Effect], kind: type) -> list[Any]:
    return [effect for effect in effects if isinstance(effect, kind)]


def sent(effects: list[ev.Effect], kind: type) -> list[Any]:
    return [effect.message for effect in of(effects, ev.SendMessage) if isinstance(effect.message, kind)]


def chunk(
    pull_id: int, ordinal: int, offset: int = 0, length: int = BLOCK, sender: NodeId = PEER.node_id
) -> ev.ChunkReceived:
    return ev.ChunkReceived(sender, pull_id, ordinal, offset, length)


def reasons(finish: ev.FinishFetch) -> list[MissReason]:
    return [missed.miss.reason for missed in finish.missed]


def test_a_whole_pull_step_by_step() -> None:
    node, fetch = puller(), request()
    first, second = fetch.wants
    (ask,) = node.handle(fetch, 1.0)
    blocks = (m.PullBlock(DOC.anchor_id, 0, BLOCK), m.PullBlock(DOC.anchor_id, 1, BLOCK))
    asked = m.Pull(1, blocks, NodeConfig().credit_bytes, chunk_bytes=m.CHUNK_BYTES_MIN)
    assert ask == ev.SendMessage(PEER.node_id, PEER.bulk, asked, ev.Plane.BULK_REQUEST)
    assert node.handle(chunk(1, 0, 0, 100), 1.01) == [ev.StoreChunk(first.handle, 0, 100, BLOCK)]
    effects = node.handle(chunk(1, 0, 100, BLOCK - 100), 1.02)
    assert effects == [ev.StoreChunk(first.handle, 100, BLOCK - 100, BLOCK), ev.VerifyBlock(first.handle, first.digest)]
    effects = node.handle(chunk(1, 1), 1.03)
    assert of(effects, ev.VerifyBlock) == [ev.VerifyBlock(second.handle, second.digest)]
    assert sent(effects, m.Credit) == [m.Credit(1, 2 * BLOCK)]
    assert node.handle(ev.BlockVerified(second.handle, True), 1.04) == []
    found = tuple(ev.FoundBlock(want.key, want.handle) for want in fetch.wants)
    assert node.handle(ev.BlockVerified(first.handle, True), 1.05) == [ev.FinishFetch(1, found, (), 0.0)]
    assert node.stats().pulls == node.stats().fetches == 0 and node.stats().received_bytes == 2 * BLOCK


def test_frozen_holder_costs_no_more_than_the_stall_timeout_and_is_not_asked_again_soon() -> None:
    node, fetch = puller(), request()
    node.handle(fetch, 1.0)
    node.handle(chunk(1, 0), 1.1)
    node.handle(ev.BlockVerified(fetch.wants[0].handle, True), 1.1)
    wake_at = 1.1 + NodeConfig().pull_stall_timeout_s
    assert not of(wait(node, wake_at - 0.001), ev.FinishFetch)
    effects = wait(node, wake_at)
    (finish,) = of(effects, ev.FinishFetch)
    assert reasons(finish) == [MissReason.STALLED] and len(finish.found) == 1
    assert finish.wait_lost_s == pytest.approx(0.2, abs=1e-9)
    assert of(effects, ev.DropBlock) == [ev.DropBlock(fetch.wants[1].handle)]
    assert sent(effects, m.CancelPull) == [m.CancelPull(1)]
    (again,) = of(node.handle(request(2), wake_at + 0.01), ev.FinishFetch)
    assert reasons(again) == [MissReason.STALLED] * 2 and again.wait_lost_s == 0.0
    assert pull_ids(node.handle(request(3), wake_at + 1.01)) == [2]


def test_a_request_that_has_lost_time_already_waits_less() -> None:
    node = puller()
    node.handle(replace(request(), stall_s=0.05), 1.0)
    assert node.next_deadline() <= 1.05
    (finish,) = of(wait(node, 1.05), ev.FinishFetch)
    assert reasons(finish) == [MissReason.STALLED] * 2 and finish.wait_lost_s == pytest.approx(0.05)


def test_penalties_double_and_end_with_a_delivery() -> None:
    node = puller()
    now = 1.0
    for fetch_id, penalty_s in ((1, 1.0), (2, 2.0), (3, 4.0)):
        node.handle(request(fetch_id, deadline=now + 9), now)
        now += 0.2
        wait(node, now)
        assert {peer.name: peer.penalty_s for peer in node.peers()}["node1"] == pytest.approx(penalty_s)
        now += penalty_s + 0.01
        node.handle(hello(PEER), now)
    fetch = request(4, deadline=now + 9)
    (pull_id,) = pull_ids(node.handle(fetch, now))
    node.handle(chunk(pull_id, 0), now)
    node.handle(ev.BlockVerified(fetch.wants[0].handle, True), now)
    wait(node, now + 0.2)
    assert {peer.name: peer.penalty_s for peer in node.peers()}["node1"] == pytest.approx(1.0)


@pytest.mark.parametrize("event", [ev.PeerUnreachable(PEER.node_id), ev.MessageReceived(PEER.node_id, m.Bye(1))])
def test_a_holder_that_goes_ends_everything_at_once(event: ev.Event) -> None:
    node, fetch = puller(), request()
    node.handle(fetch, 1.0)
    node.handle(ev.TokensRequested(9, PEER.node_id, DOC, 5.0), 1.0)
    wait(node, 1.05)
    effects = node.handle(event, 1.05)
    (finish,) = of(effects, ev.FinishFetch)
    assert reasons(finish) == [MissReason.UNREACHABLE] * 2 and finish.wait_lost_s == pytest.approx(0.05)
    (tokens,) = of(effects, ev.FinishTokens)
    assert isinstance(tokens.result, Miss) and tokens.result.reason is MissReason.UNREACHABLE
    (later,) = of(node.handle(request(2), 1.06), ev.FinishFetch)
    assert reasons(later) == [MissReason.UNREACHABLE] * 2 and later.wait_lost_s == 0.0


def test_unknown_holder_is_a_miss_at_once() -> None:
    node, fetch = puller(), request(holder=NodeId(b"?" * 16))
    effects = node.handle(fetch, 1.0)
    assert of(effects, ev.DropBlock) == [ev.DropBlock(want.handle) for want in fetch.wants]
    assert reasons(of(effects, ev.FinishFetch)[0]) == [MissReason.UNREACHABLE] * 2


def test_deadline_is_kept_and_the_loss_is_the_time_since_progress() -> None:
    node, fetch = puller(), request(deadline=1.15)
    node.handle(fetch, 1.0)
    node.handle(chunk(1, 0, 0, 8), 1.12)
    assert node.next_deadline() <= 1.15
    (finish,) = of(wait(node, 1.15), ev.FinishFetch)
    assert reasons(finish) == [MissReason.DEADLINE] * 2 and finish.wait_lost_s == pytest.approx(0.03)


def penalty_s(node: Node, peer: m.MemberRecord) -> float:
    return next(view.penalty_s for view in node.peers() if view.node_id == peer.node_id)


@pytest.mark.parametrize(("deadline", "punished"), [(2.0, True), (0.6, False)])
def test_a_holder_that_sends_just_enough_not_to_stall_is_not_asked_again_soon(deadline: float, punished: bool) -> None:
    node = puller()
    node.handle(request(deadline=deadline), 0.0)
    now, answers = 0.0, []
    for offset in range(20):
        node.handle(chunk(1, 0, offset, 1), now)
        now += 0.15
        at = min(now, deadline)
        answers += of(wait(node, at), ev.FinishFetch)
        if answers:
            break
    assert reasons(answers[0]) == [MissReason.DEADLINE] * 2 and at == deadline
    assert (penalty_s(node, PEER) > 0) is punished


def test_waiting_for_digests_is_not_time_lost_to_a_peer() -> None:
    node = puller()
    node.handle(request(1, deadline=1.5), 1.0)
    node.handle(request(2, deadline=1.5), 1.0)
    for ordinal in (0, 1):
        node.handle(chunk(1, ordinal), 1.01)
    answers = of(wait(node, 1.5), ev.FinishFetch)
    assert [reasons(answer) for answer in answers] == [[MissReason.DEADLINE] * 2] * 2
    assert [answer.wait_lost_s for answer in answers] == [0.0, 0.0]


def test_cancel_is_answered_and_told() -> None:
    node = puller()
    node.handle(request(), 1.0)
    effects = node.handle(ev.FetchCancelled(1), 1.1)
    assert sent(effects, m.CancelPull) == [m.CancelPull(1)]
    (finish,) = of(effects, ev.FinishFetch)
    assert reasons(finish) == [MissReason.CANCELLED] * 2 and finish.wait_lost_s == 0.0
    assert node.handle(ev.FetchCancelled(1), 1.1) == []
    assert node.handle(chunk(1, 0), 1.2) == [] and node.stats().unasked_chunks == 1


def test_busy_is_asked_again_while_there_is_time() -> None:
    node = puller()
    node.handle(request(), 1.0)
    busy = ev.MessageReceived(PEER.node_id, m.PullFailed(1, None, m.PullFailedReason.BUSY, 0.05))
    assert node.handle(busy, 1.01) == []
    (again,) = pull_ids(wait(node, 1.06))
    assert (
        node.handle(ev.MessageReceived(PEER.node_id, m.PullFailed(again, None, m.PullFailedReason.BUSY, 0.05)), 1.07)
        == []
    )
    assert len(pull_ids(wait(node, 1.12))) == 1


def test_a_busy_holder_is_given_up_when_waiting_costs_more_than_it_brings() -> None:
    node = puller()
    node.handle(replace(request(), busy_s=0.5), 1.0)
    now, pull_id = 1.0, 1
    while True:
        busy = ev.MessageReceived(PEER.node_id, m.PullFailed(pull_id, None, m.PullFailedReason.BUSY, 0.04))
        node.handle(busy, now + 0.001)
        now = node.next_deadline()
        effects = wait(node, now)
        if of(effects, ev.FinishFetch):
            break
        (pull_id,) = pull_ids(effects) or [pull_id]
    (finish,) = of(effects, ev.FinishFetch)
    assert reasons(finish) == [MissReason.BUSY] * 2 and now == pytest.approx(1.5, abs=0.05)
    assert finish.wait_lost_s == pytest.approx(now - 1.0)
    assert {peer.penalty_s for peer in node.peers()} == {0.0}


@pytest.mark.parametrize(
    "bad",
    [
        chunk(1, 0, 100, 8),
        chunk(1, 0, 0, BLOCK + 1),
        chunk(1, 2),
        chunk(1, 1, 8, 8),
        chunk(1, 0, 0, 0),
    ],
)
def test_misplaced_or_surplus_bytes_end_the_pull(bad: ev.ChunkReceived) -> None:
    node = puller()
    node.handle(request(), 1.0)
    effects = node.handle(bad, 1.1)
    (finish,) = of(effects, ev.FinishFetch)
    assert reasons(finish) == [MissReason.LENGTH_MISMATCH] * 2
    assert [report.change for report in of(effects, ev.ReportPeer)] == ["violation"]
    assert not of(effects, ev.StoreChunk)


def test_a_block_begun_must_be_finished_before_the_next() -> None:
    node = puller()
    node.handle(request(), 1.0)
    node.handle(chunk(1, 0, 0, 8), 1.1)
    (finish,) = of(node.handle(chunk(1, 1), 1.1), ev.FinishFetch)
    assert reasons(finish) == [MissReason.LENGTH_MISMATCH] * 2


def test_somebody_elses_chunk_changes_nothing() -> None:
    node = puller()
    node.handle(request(), 1.0)
    effects = node.handle(chunk(1, 0, sender=OTHER.node_id), 1.1)
    assert [report.name for report in of(effects, ev.ReportPeer)] == ["node2"]
    assert node.stats().fetches == 1


def test_wrong_bytes_are_dropped_and_end_the_pull() -> None:
    node, fetch = puller(), request()
    node.handle(fetch, 1.0)
    node.handle(chunk(1, 0), 1.1)
    effects = node.handle(ev.BlockVerified(fetch.wants[0].handle, False), 1.1)
    (finish,) = of(effects, ev.FinishFetch)
    assert reasons(finish) == [MissReason.DIGEST_MISMATCH] * 2
    assert sorted(drop.handle for drop in of(effects, ev.DropBlock)) == sorted(want.handle for want in fetch.wants)


def test_a_block_that_is_gone_fails_alone() -> None:
    node, fetch = puller(), request()
    node.handle(fetch, 1.0)
    gone = ev.MessageReceived(PEER.node_id, m.PullFailed(1, 0, m.PullFailedReason.EVICTED))
    assert node.handle(gone, 1.05) == [ev.DropBlock(fetch.wants[0].handle)]
    node.handle(chunk(1, 1), 1.1)
    (finish,) = of(node.handle(ev.BlockVerified(fetch.wants[1].handle, True), 1.1), ev.FinishFetch)
    assert reasons(finish) == [MissReason.EVICTED] and len(finish.found) == 1


def test_a_block_in_flight_is_pulled_once_and_both_callers_own_it() -> None:
    node, first, second = puller(), request(1), request(2)
    node.handle(first, 1.0)
    assert node.handle(second, 1.01) == []
    node.handle(chunk(1, 0), 1.02)
    shared = first.wants[0].handle
    effects = node.handle(ev.BlockVerified(shared, True), 1.03)
    assert effects == [ev.RetainBlock(shared), ev.DropBlock(second.wants[0].handle)]
    node.handle(chunk(1, 1), 1.04)
    effects = node.handle(ev.BlockVerified(first.wants[1].handle, True), 1.05)
    answers = of(effects, ev.FinishFetch)
    assert [answer.fetch_id for answer in answers] == [1, 2]
    assert [block.handle for block in answers[0].found] == [block.handle for block in answers[1].found]
    assert effects.index(of(effects, ev.RetainBlock)[0]) < effects.index(answers[0])


def test_blocks_with_different_digests_are_not_shared() -> None:
    node, fetch = puller(), request(1)
    node.handle(fetch, 1.0)
    forged = tuple(ev.Want(w.key, w.kv_bytes, b"x" * 32, new_handle()) for w in fetch.wants)
    assert len(pull_ids(node.handle(ev.FetchRequested(2, (OTHER.node_id,), forged, 5.0), 1.0))) == 1


def test_when_the_leader_cancels_its_pull_goes_on_for_the_follower() -> None:
    node = puller()
    node.handle(request(1), 1.0)
    node.handle(request(2, holder=OTHER.node_id), 1.01)
    effects = node.handle(ev.FetchCancelled(1), 1.05)
    assert [answer.fetch_id for answer in of(effects, ev.FinishFetch)] == [1]
    assert not of(effects, ev.SendMessage) and len(of(effects, ev.DropBlock)) == 2
    (stored,) = of(node.handle(chunk(1, 0), 1.06), ev.StoreChunk)
    assert stored.handle not in {drop.handle for drop in of(effects, ev.DropBlock)}


def test_what_is_no_longer_wanted_ends_its_pull_and_followers_pull_the_rest_from_where_it_stopped() -> None:
    node, two = puller(), meta("two")
    both = (*wants(DOC), *wants(two))
    node.handle(ev.FetchRequested(1, (PEER.node_id,), both, 5.0), 1.0)
    node.handle(request(2), 1.01)
    node.handle(chunk(1, 0, 0, 100), 1.02)
    effects = node.handle(ev.FetchCancelled(1), 1.03)
    assert sent(effects, m.CancelPull) == [m.CancelPull(1)]
    (again,) = sent(effects, m.Pull)
    assert again.blocks == (m.PullBlock(DOC.anchor_id, 0, BLOCK, 100), m.PullBlock(DOC.anchor_id, 1, BLOCK))
    assert node.stats().pull_counts["resumed"] == 1


def test_a_follower_loses_no_more_than_one_stall() -> None:
    node = puller()
    node.handle(request(1, deadline=1.15), 1.0)
    node.handle(request(2), 1.0)
    (first,) = of(wait(node, 1.15), ev.FinishFetch)
    assert first.wait_lost_s == pytest.approx(0.15)
    (finish,) = of(wait(node, 1.2), ev.FinishFetch)
    assert reasons(finish) == [MissReason.STALLED] * 2 and finish.wait_lost_s == pytest.approx(0.2)


def test_a_follower_has_its_own_patience_and_its_own_holder() -> None:
    node = puller()
    node.handle(request(1), 1.0)
    wait(node, 1.1)
    node.handle(request(2, holder=OTHER.node_id), 1.1)
    effects = wait(node, 1.2)
    assert [answer.wait_lost_s for answer in of(effects, ev.FinishFetch)] == [pytest.approx(0.2)]
    assert [e.to for e in of(effects, ev.SendMessage) if isinstance(e.message, m.Pull)] == [OTHER.node_id]
    (finish,) = of(wait(node, 1.3), ev.FinishFetch)
    assert finish.fetch_id == 2 and finish.wait_lost_s == pytest.approx(0.2)


def test_pulls_of_one_holder_wait_their_turn_and_stall_together() -> None:
    node = puller()
    for fetch_id in (1, 2, 3):
        node.handle(request(fetch_id, anchor=meta(fetch_id)), 1.0)
    assert node.stats().pulls == 3
    effects = wait(node, 1.2)
    assert sorted(answer.fetch_id for answer in of(effects, ev.FinishFetch)) == [1, 2, 3]
    assert not pull_ids(effects)


def test_a_queued_pull_starts_when_another_has_all_its_bytes() -> None:
    node = puller(NodeConfig(pulls_per_peer_max=1))
    node.handle(request(1), 1.0)
    assert pull_ids(node.handle(request(2, anchor=meta("b")), 1.0)) == []
    node.handle(chunk(1, 0), 1.19)
    assert pull_ids(node.handle(chunk(1, 1), 1.3)) == [2]
    assert not of(wait(node, 1.45), ev.FinishFetch)


def test_empty_fetch_and_reused_id() -> None:
    node = puller()
    assert node.handle(ev.FetchRequested(1, (PEER.node_id,), (), 5.0), 1.0) == [ev.FinishFetch(1, (), (), 0.0)]
    node.handle(request(1), 1.0)
    with pytest.raises(KeyError):
        node.handle(request(1), 1.0)


def test_leaving_finishes_everything_and_later_requests_too() -> None:
    node = puller()
    node.handle(request(1), 1.0)
    node.handle(request(2, holder=OTHER.node_id), 1.0)
    node.handle(ev.TokensRequested(3, PEER.node_id, DOC, 5.0), 1.0)
    effects = node.handle(ev.LeaveRequested(), 1.1)
    assert sorted(answer.fetch_id for answer in of(effects, ev.FinishFetch)) == [1, 2]
    assert len(of(effects, ev.FinishTokens)) == 1 and len(sent(effects, m.Bye)) == 2
    assert len(of(effects, ev.DropBlock)) == 4 and not pull_ids(effects)
    (after,) = of(node.handle(request(4), 1.2), ev.FinishFetch)
    assert reasons(after) == [MissReason.SHUTDOWN] * 2
    assert node.next_deadline() == math.inf
    assert node.handle(pull(), 1.3) == []


# Holder's side


def holder(config: NodeConfig | None = None, *anchors: AnchorMeta) -> Node:
    node = puller(config)
    node.handle(ev.AnchorsPublished(tuple(held(anchor) for anchor in anchors or (DOC,))), 0.0)
    return node


def pull(
    pull_id: int = 1,
    anchor: AnchorMeta = DOC,
    credit_bytes: int = 10**6,
    sender: NodeId = PEER.node_id,
    size: int = BLOCK,
) -> ev.MessageReceived:
    blocks = tuple(m.PullBlock(anchor.anchor_id, index, size) for index in range(anchor.blocks))
    return ev.MessageReceived(sender, m.Pull(pull_id, blocks, credit_bytes))


def test_blocks_are_sent_within_the_credit() -> None:
    long = meta("long", tokens=512)
    node = holder(None, long)
    assert len(node.handle(pull(anchor=long, credit_bytes=3 * BLOCK), 1.0)) == 3
    assert len(node.handle(ev.MessageReceived(PEER.node_id, m.Credit(1, 2 * BLOCK)), 1.1)) == 2
    assert node.handle(ev.MessageReceived(PEER.node_id, m.Credit(1, 2 * BLOCK)), 1.1) == []
    assert len(node.handle(ev.MessageReceived(PEER.node_id, m.Credit(1, 5 * BLOCK)), 1.1)) == 3
    assert node.stats().uploads == 1


def test_credit_for_everything_ends_the_upload() -> None:
    node = holder()
    assert [effect.ordinal for effect in of(node.handle(pull(), 1.0), ev.SendBlock)] == [0, 1]
    assert node.stats().uploads == 1
    node.handle(ev.MessageReceived(PEER.node_id, m.Credit(1, 2 * BLOCK)), 1.1)
    assert node.stats().uploads == 0


def test_credit_for_bytes_that_were_not_sent_is_a_violation() -> None:
    node = holder()
    node.handle(pull(), 1.0)
    effects = node.handle(ev.MessageReceived(PEER.node_id, m.Credit(1, 9 * BLOCK)), 1.1)
    assert [report.change for report in of(effects, ev.ReportPeer)] == ["violation"]
    assert node.stats().uploads == 0


def test_more_uploads_than_allowed_are_told_busy() -> None:
    node = holder(NodeConfig(uploads_max=2))
    node.handle(pull(1), 1.0)
    (busy,) = sent(node.handle(pull(2), 1.0), m.PullFailed)
    assert busy == m.PullFailed(2, None, m.PullFailedReason.BUSY, RETRY_MIN_S), "one peer takes half at most"
    node.handle(pull(1, sender=OTHER.node_id), 1.0)
    (busy,) = sent(node.handle(pull(1, sender=record(3).node_id), 1.0), m.PullFailed)
    assert busy.reason is m.PullFailedReason.BUSY and node.stats().busy == 2
    node.handle(ev.MessageReceived(PEER.node_id, m.CancelPull(1)), 1.1)
    assert len(of(node.handle(pull(3), 1.2), ev.SendBlock)) == 2


def test_a_busy_holder_advises_half_of_what_uploads_take_these_days() -> None:
    node = holder(NodeConfig(uploads_max=1))

    def advice(pull_id: int, now: float) -> float:
        (busy,) = sent(node.handle(pull(pull_id, sender=OTHER.node_id), now), m.PullFailed)
        return float(busy.retry_after_s)

    node.handle(pull(1), 1.0)
    assert [advice(number, 1.0 + 0.02 * number) for number in (0, 1, 2)] == pytest.approx([RETRY_MIN_S, 0.01, 0.02])
    node.handle(ev.MessageReceived(PEER.node_id, m.Credit(1, 2 * BLOCK)), 1.06)
    node.handle(pull(2), 1.06)
    assert advice(3, 1.07) == pytest.approx(0.03), "the last one took 60 ms"
    node.handle(ev.MessageReceived(PEER.node_id, m.Credit(2, 2 * BLOCK)), 1.08)
    node.handle(pull(3), 1.08)
    assert advice(4, 1.09) == pytest.approx(0.025), "the mean moves"
    assert advice(5, 2.5) == NodeConfig().busy_retry_s, "that is long ago; this one has taken very long"


def test_silent_pullers_lose_their_upload_and_gone_ones_at_once() -> None:
    node = holder()
    node.handle(pull(1), 1.0)
    node.handle(pull(1, sender=OTHER.node_id), 1.0)
    node.handle(ev.PeerUnreachable(OTHER.node_id), 1.1)
    assert node.stats().uploads == 1
    wait(node, 1.0 + NodeConfig().upload_lease_s)
    assert node.stats().uploads == 0


def test_what_is_being_uploaded_is_not_evicted() -> None:
    node = holder(NodeConfig(pool_anchors_max=1))
    node.handle(pull(), 1.0)
    newcomer = held(meta("new"))
    assert node.handle(ev.AnchorsPublished((newcomer,)), 1.1) == [ev.DropBlock(handle) for handle in newcomer.handles]
    assert node.held(DOC.anchor_id) is not None and node.stats().rejected_anchors == 1


def test_forgotten_during_an_upload() -> None:
    node = holder()
    assert len(node.handle(pull(credit_bytes=1), 1.0)) == 1
    node.handle(ev.AnchorsForgotten((DOC.anchor_id,)), 1.1)
    effects = node.handle(ev.MessageReceived(PEER.node_id, m.Credit(1, BLOCK)), 1.2)
    assert sent(effects, m.PullFailed) == [m.PullFailed(1, 1, m.PullFailedReason.EVICTED)]
    assert node.stats().uploads == 0


def test_a_block_that_cannot_be_read_fails_alone() -> None:
    node = holder()
    node.handle(pull(), 1.0)
    effects = node.handle(ev.BlockUnavailable(PEER.node_id, 1, 0), 1.1)
    assert sent(effects, m.PullFailed) == [m.PullFailed(1, 0, m.PullFailedReason.EVICTED)]
    node.handle(ev.MessageReceived(PEER.node_id, m.Credit(1, BLOCK)), 1.2)
    assert node.stats().uploads == 0


def test_unknown_forbidden_and_missized_blocks_look_the_same() -> None:
    tag = b"g" * 8
    secret = meta("secret", visibility=Visibility.GROUP, group=tag)
    private = meta("private", visibility=Visibility.PRIVATE)
    node = holder(None, secret, private, DOC)
    member = record(7, groups=(tag,))
    node.handle(
        ev.MessageReceived(member.node_id, m.Hello(m.PROTOCOL_VERSION, m.PROTOCOL_VERSION, bytes(16), member)), 0.5
    )
    answers = {
        name: [(failed.ordinal, failed.reason) for failed in sent(node.handle(event, 1.0), m.PullFailed)]
        for name, event in {
            "unknown": pull(1, meta("nowhere")),
            "group": pull(2, secret),
            "private": pull(3, private),
            "size": pull(4, DOC, size=BLOCK - 8),
        }.items()
    }
    assert set(map(tuple, answers.values())) == {((0, m.PullFailedReason.NOT_FOUND), (1, m.PullFailedReason.NOT_FOUND))}
    assert len(of(node.handle(pull(1, secret, sender=member.node_id), 1.0), ev.SendBlock)) == 2
    for anchor in (secret, private, meta("nowhere")):
        question = ev.MessageReceived(PEER.node_id, m.GetTokens(1, anchor.anchor_id, 0, 64))
        assert sent(node.handle(question, 1.0), m.NoTokens) == [m.NoTokens(1)]


# Token ids


def test_own_tokens_are_answered_at_once() -> None:
    node = holder()
    (finish,) = node.handle(ev.TokensRequested(1, node.me.node_id, DOC, 5.0), 1.0)
    assert isinstance(finish, ev.FinishTokens) and isinstance(finish.result, ev.AnchorTokens)
    assert finish.result.token_ids.tolist() == list(range(64)) and finish.result.holder == node.me.node_id
    (gone,) = node.handle(ev.TokensRequested(2, node.me.node_id, meta("gone"), 5.0), 1.0)
    assert isinstance(gone, ev.FinishTokens) and gone.result == Miss(MissReason.EVICTED)


def test_tokens_of_a_peer_travel_and_are_checked() -> None:
    network, ids = joined(2)
    network.publish(ids[1], DOC)
    network.handle(ids[0], ev.TokensRequested(1, ids[1], DOC, network.now + 1.0))
    network.run(0.05)
    (finish,) = network.take(ids[0], ev.FinishTokens)
    assert isinstance(finish.result, ev.AnchorTokens)
    assert finish.result.token_ids.tolist() == list(range(64)) and not finish.result.token_ids.flags.writeable
    assert finish.result.digests == tuple(hashlib.sha256(block_bytes(DOC, index)).digest() for index in range(2))


def test_tokens_of_a_stranger_are_introduced_first() -> None:
    node = puller()
    first, second = node.handle(ev.TokensRequested(1, PEER.node_id, DOC, 5.0), 1.0)
    assert isinstance(first, ev.SendMessage) and isinstance(first.message, m.Hello)
    assert isinstance(second, ev.SendMessage) and isinstance(second.message, m.GetTokens)


def test_tokens_stall_deadline_and_nonsense() -> None:
    node = puller()
    node.handle(ev.TokensRequested(1, PEER.node_id, DOC, 5.0), 1.0)
    node.handle(ev.TokensRequested(2, OTHER.node_id, DOC, 1.05), 1.0)
    (deadline,) = of(wait(node, 1.05), ev.FinishTokens)
    assert deadline.result.reason is MissReason.DEADLINE and deadline.wait_lost_s == pytest.approx(0.05)
    (stalled,) = of(wait(node, 1.1), ev.FinishTokens)
    assert stalled.result.reason is MissReason.STALLED and stalled.wait_lost_s == pytest.approx(0.1)
    (boxed,) = node.handle(ev.TokensRequested(3, PEER.node_id, DOC, 5.0), 1.2)
    assert isinstance(boxed, ev.FinishTokens) and isinstance(boxed.result, Miss)
    asked = sent(node.handle(ev.TokensRequested(4, OTHER.node_id, DOC, 5.0), 1.2), m.GetTokens)[0].request_id
    answer = m.Tokens(asked, bytes(8), (bytes(32),))
    (stranger,) = node.handle(ev.MessageReceived(PEER.node_id, answer), 1.21)
    assert isinstance(stranger, ev.ReportPeer) and stranger.change == "violation"
    (wrong,) = node.handle(ev.MessageReceived(OTHER.node_id, answer), 1.22)
    assert isinstance(wrong, ev.FinishTokens) and isinstance(wrong.result, Miss)
    assert wrong.result.reason is MissReason.TOKENS_MISMATCH
    assert node.handle(ev.MessageReceived(OTHER.node_id, answer), 1.23) == []


# The same, between nodes


def owned(network: Network, node_id: NodeId) -> int:
    return sum(network.references[node_id].values())


def test_a_pull_between_nodes_brings_the_right_bytes() -> None:
    network, ids = joined(3)
    network.publish(ids[0], DOC)
    network.fetch(ids[1], 1, ids[0], DOC)
    network.run(1.0)
    (finish,) = network.take(ids[1], ev.FinishFetch)
    assert not finish.missed and finish.wait_lost_s == 0.0
    for block in finish.found:
        assert bytes(network.stores[ids[1]][block.handle]) == block_bytes(DOC, block.key.index)
        assert network.references[ids[1]][block.handle] == 1
    assert all(node.stats().uploads == node.stats().pulls == 0 for node in network.nodes.values())


def test_spoiled_bytes_between_nodes() -> None:
    network, ids = joined(2)
    network.publish(ids[0], DOC)
    for fetch_id, (spoil, reason) in enumerate(
        [
            (lambda holder, payload: payload[:-1] + b"?", MissReason.DIGEST_MISMATCH),
            (lambda holder, payload: payload + b"?", MissReason.LENGTH_MISMATCH),
            (lambda holder, payload: payload[:-8], MissReason.LENGTH_MISMATCH),
        ]
    ):
        network.spoil = spoil
        network.fetch(ids[1], fetch_id, ids[0], DOC)
        network.run(40.0)
        (finish,) = network.take(ids[1], ev.FinishFetch)
        assert not finish.found and set(reasons(finish)) == {reason}
        assert owned(network, ids[1]) == 0


def test_a_holder_frozen_in_the_middle_costs_one_stall() -> None:
    network, ids = joined(2)
    long = meta("long", tokens=512)
    network.publish(ids[0], long)
    network.fault = lambda source, target, message: (
        [0.01] if not isinstance(message, m.Chunk) else [0.01 + 0.002 * message.ordinal]
    )
    network.fetch(ids[1], 1, ids[0], long)
    network.run(0.03)
    network.fault = lambda source, target, message: []
    network._queue = [item for item in network._queue if not isinstance(item[3], partial)]  # chunks on their way
    network.frozen.add(ids[0])
    network.run(1.0)
    (finish,) = network.take(ids[1], ev.FinishFetch)
    assert finish.missed and set(reasons(finish)) <= {MissReason.STALLED}
    assert 0.19 <= finish.wait_lost_s <= 0.25
    assert owned(network, ids[1]) == len(finish.found)


def test_five_pullers_at_one_holder_all_get_their_blocks() -> None:
    network, ids = joined(6)
    network.publish(ids[0], DOC)
    for node_id in ids[1:]:
        network.fetch(node_id, 1, ids[0], DOC)
    network.run(1.0)
    answers = [network.take(node_id, ev.FinishFetch)[0] for node_id in ids[1:]]
    assert all(len(answer.found) == 2 for answer in answers)
    assert network.nodes[ids[0]].stats().busy > 0


def test_duplicate_wants_in_one_fetch() -> None:
    network, ids = joined(2)
    network.publish(ids[0], DOC)
    twice = (*wants(DOC), *wants(DOC))
    for want in twice:
        network.references[ids[1]][want.handle] = 1
    network.handle(ids[1], ev.FetchRequested(1, (ids[0],), twice, network.now + 1.0))
    network.run(1.0)
    (finish,) = network.take(ids[1], ev.FinishFetch)
    assert [block.key for block in finish.found] == [want.key for want in twice]
    assert owned(network, ids[1]) == 4 and finish.found[0].handle == finish.found[2].handle


def test_block_names_are_what_they_say() -> None:
    assert BlockKey(AnchorId(b"a" * 16), 3).index == 3
