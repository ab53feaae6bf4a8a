"""What a node counts of each peer agrees with what happened between them."""

from __future__ import annotations

from protocol_harness import TOKEN_BYTES, Network, joined, make_node, meta, new_handle, record, wants

from kvcomm_p2p.protocol import events as ev
from kvcomm_p2p.protocol import messages as m
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.peer_stats import PEERS_COUNTED_MAX, SYNC_BOUNDS_S, PeerStats
from kvcomm_p2p.protocol.views import PeerView


def view(network: Network, of: NodeId, peer: NodeId) -> PeerView:
    return next(each for each in network.nodes[of].peers() if each.node_id == peer)


def test_bytes_are_counted_at_both_ends_for_the_right_peer() -> None:
    network, (a, b, c) = joined(3)
    network.publish(a, meta("x"))
    network.run(1.0)
    network.fetch(b, 1, a, meta("x"))
    network.run(1.0)
    size = meta("x").kv_bytes
    assert size == 64 * TOKEN_BYTES
    assert (view(network, b, a).pulled_bytes, view(network, a, b).uploaded_bytes) == (size, size)
    assert (view(network, c, a).pulled_bytes, view(network, a, c).uploaded_bytes) == (0, 0)
    assert (view(network, a, b).pulled_bytes, view(network, b, a).uploaded_bytes) == (0, 0)


def test_misses_are_counted_by_reason_for_the_holder() -> None:
    network, (a, b, c) = joined(3)
    network.fetch(b, 1, a, meta("never held"))
    network.run(1.0)
    assert view(network, b, a).misses == {"not_found": 2}
    assert view(network, b, c).misses == {}


def test_misses_of_a_fetch_from_several_holders_count_where_they_happened() -> None:
    network, (a, b, c, d) = joined(4)
    network.publish(d, meta("x"))
    network.run(1.0)
    network.fetch(b, 1, a, meta("x"), others=(c,))  # neither has it
    network.fetch(b, 2, a, meta("y"), others=(d,))
    network.frozen.add(d)
    network.run(1.0)
    assert view(network, b, a).misses == {"not_found": 4} and not view(network, b, d).misses
    network.frozen.add(c)
    network.fetch(b, 3, d, meta("x"), others=(c,))
    network.run(1.0)
    assert view(network, b, d).misses == {"stalled": 2}


def test_a_frozen_holder_is_seen_in_misses_and_penalties() -> None:
    network, (a, b) = joined(2)
    network.publish(a, meta("x"))
    network.run(1.0)
    network.frozen.add(a)
    network.fetch(b, 1, a, meta("x"))
    network.run(0.5)
    seen = view(network, b, a)
    assert seen.misses == {"stalled": 2}
    assert seen.penalties == 1
    network.fetch(b, 2, a, meta("x"))  # refused at once: no second penalty
    network.run(0.1)
    again = view(network, b, a)
    assert again.misses == {"stalled": 4}
    assert again.penalties == 1


def test_round_trips_are_those_of_the_network() -> None:
    network, (a, b) = joined(2)
    network.fault = lambda source, target, message: [0.03]
    network.run(20.0)
    round_trip_s = view(network, a, b).round_trip_s
    assert round_trip_s is not None
    assert abs(round_trip_s - 0.06) < 0.01


def test_busy_is_counted_at_both_ends() -> None:
    holder, puller = record(0), record(1)
    node = make_node(0)
    hello = m.Hello(m.PROTOCOL_VERSION, m.PROTOCOL_VERSION, bytes(16), puller)
    node.handle(ev.MessageReceived(puller.node_id, hello), 0.0)
    node.handle(ev.MessageReceived(puller.node_id, m.Bye(0)), 0.0)
    node.handle(ev.MessageReceived(puller.node_id, m.PullFailed(1, None, m.PullFailedReason.BUSY, 0.1)), 0.1)
    [seen] = node.peers()
    assert (seen.busy_told, seen.busy_given) == (1, 0)
    refused = ev.SendMessage(puller.node_id, "", m.PullFailed(2, None, m.PullFailedReason.BUSY, 0.1))
    node._counted.observe(ev.TimerExpired(), [refused], 0.2)
    [seen] = node.peers()
    assert (seen.busy_told, seen.busy_given) == (1, 1)
    assert holder.node_id not in {each.node_id for each in node.peers()}


def test_blocks_in_shared_memory_count_once_they_are_taken() -> None:
    stats = PeerStats(lambda peer: True, lambda peer, now: 0.0, lambda: 0)
    blocks = tuple(m.SharedBlock(index, 3, 4, 0, 256) for index in range(2))
    handles = [new_handle(), new_handle()]
    offered = [ev.AdoptShared(handle, 256, bytes(32), 7, block) for handle, block in zip(handles, blocks, strict=True)]
    peer = record(1).node_id
    stats.observe(ev.MessageReceived(peer, m.SharedBlocks(1, 7, blocks)), offered, 0.0)
    assert stats.get(peer).pulled_bytes == 0
    stats.observe(ev.BlockVerified(handles[0], True), [], 0.1)
    stats.observe(ev.BlockVerified(handles[1], False), [], 0.1)
    stats.observe(ev.BlockVerified(handles[0], True), [], 0.1)
    assert stats.get(peer).pulled_bytes == 256


def test_violations_are_counted_for_the_peer_that_committed_them() -> None:
    network, (a, b, c) = joined(3)
    network.handle(a, ev.MessageReceived(b, m.Chunk(1, 0, 0, 1)))
    assert view(network, a, b).violations == 1
    assert view(network, a, c).violations == 0
    assert network.nodes[a].stats().violations == 1


def test_how_much_of_a_log_is_known_and_told() -> None:
    network, (a, b) = joined(2)
    network.publish(a, meta("x"), meta("y"))
    network.run(3.0)
    seen = view(network, b, a)
    assert (seen.log_seq, seen.told_seq) == (2, 2)
    assert view(network, a, b).known_seq == 2


def test_times_until_peers_know_are_measured_by_one_clock() -> None:
    network, ids = joined(4)
    network.publish(ids[0], meta("x"))
    network.run(5.0)
    stats = network.nodes[ids[0]].stats()
    assert sum(stats.sync_counts) == 3  # one publication, three peers
    assert 0 < stats.sync_sum_s < 3 * 2.0
    assert len(stats.sync_counts) == len(SYNC_BOUNDS_S) + 1


def test_strangers_are_not_counted_and_the_table_is_bounded() -> None:
    known: set[NodeId] = set()
    stats = PeerStats(known.__contains__, lambda peer, now: 0.0, lambda: 0)
    for index in range(1, 2 * PEERS_COUNTED_MAX):
        peer = record(index).node_id
        stats.violated(peer)
        assert len(stats) == 0 or peer not in known
    assert len(stats) == 0
    for index in range(1, 2 * PEERS_COUNTED_MAX):
        known.add(record(index).node_id)
        stats.violated(record(index).node_id)
    assert len(stats) == PEERS_COUNTED_MAX
    assert stats.get(record(1).node_id).violations == 0
    assert stats.get(record(2 * PEERS_COUNTED_MAX - 1).node_id).violations == 1
    for fetch_id in range(10_000):  # questions that are never answered
        stats.observe(ev.FetchRequested(fetch_id, (record(1).node_id,), wants(meta("x")), 1.0), [], 0.0)
    assert len(stats._holders) <= 4096


def test_who_is_forgotten_is_no_longer_counted() -> None:
    stats = PeerStats(lambda peer: True, lambda peer, now: 0.0, lambda: 0)
    stats.violated(record(1).node_id)
    stats.forget(record(1).node_id)
    assert len(stats) == 0
