"""Joining, leaving, expiry, and who must not come back."""

from __future__ import annotations

from protocol_harness import Network, digest16, joined, make_node, meta, record

from kvcomm_p2p.protocol import events as ev
from kvcomm_p2p.protocol import messages as m
from kvcomm_p2p.protocol.anchors import Miss
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.node import Node

FRIEND = record(1)


def states(node: Node) -> dict[str, str]:
    return {peer.name: peer.state for peer in node.peers()}


def hello(
    member: m.MemberRecord,
    cluster_id: bytes = bytes(16),
    oldest: int = m.PROTOCOL_VERSION,
    newest: int = m.PROTOCOL_VERSION,
) -> ev.MessageReceived:
    return ev.MessageReceived(member.node_id, m.Hello(oldest, newest, cluster_id, member))


def beat(member: m.MemberRecord, heartbeat: int) -> ev.MessageReceived:
    return ev.MessageReceived(member.node_id, m.Syn((m.DigestEntry(member.node_id, member.epoch, heartbeat, 0, 0),)))


def sent(effects: list[ev.Effect]) -> list[m.Message]:
    return [effect.message for effect in effects if isinstance(effect, ev.SendMessage)]


def changes(effects: list[ev.Effect]) -> list[str]:
    return [effect.change for effect in effects if isinstance(effect, ev.ReportPeer)]


def test_hello_is_welcomed_with_those_who_are_there() -> None:
    node = make_node(0)
    node.handle(hello(FRIEND), 0.0)
    effects = node.handle(hello(record(2)), 0.1)
    assert sent(effects) == [m.Welcome(node.me, (FRIEND,))]
    assert changes(effects) == ["joined"]


def test_join_is_retried_until_a_seed_answers() -> None:
    network = Network()
    late, early = record(0), network.add(1)
    network.handle(early, ev.JoinRequested((late.control, "10.9.9.9:1"), 1.0))
    network.run(2.0)
    (answer,) = network.take(early, ev.FinishJoin)
    assert isinstance(answer.result, Miss) and answer.refused is None
    network.add(0)
    network.run(6.0, until=lambda: bool(network.nodes[early].peers()))
    assert states(network.nodes[early]) == {"node0": "alive"}
    assert network.take(early, ev.FinishJoin) == []


def test_join_reports_how_many_are_known() -> None:
    network, ids = joined(3)
    results = [network.take(node_id, ev.FinishJoin) for node_id in ids]
    assert [len(result) for result in results] == [0, 1, 1]
    assert all(isinstance(result[0].result, int) and result[0].result >= 1 for result in results[1:])


def test_join_without_seeds_or_through_itself_is_done_at_once() -> None:
    node = make_node(0)
    assert node.handle(ev.JoinRequested((), 1.0), 0.0) == [ev.FinishJoin(0)]
    assert node.handle(ev.JoinRequested((node.me.control,), 1.0), 0.0) == [ev.FinishJoin(0)]


def test_other_cluster_version_and_taken_name_are_refused() -> None:
    node = make_node(0)
    node.handle(hello(FRIEND), 0.0)
    cases = [
        (hello(record(2), cluster_id=b"x" * 16), m.RefusedReason.WRONG_CLUSTER),
        (hello(record(2), oldest=m.PROTOCOL_VERSION + 1, newest=m.PROTOCOL_VERSION + 2), m.RefusedReason.WRONG_VERSION),
        (hello(record(2, name="node1")), m.RefusedReason.NAME_TAKEN),
        (hello(record(2, name="node0")), m.RefusedReason.NAME_TAKEN),
    ]
    for event, reason in cases:
        (answer,) = sent(node.handle(event, 0.1))
        assert isinstance(answer, m.Refused) and answer.reason is reason
    assert states(node) == {"node1": "alive"}


def test_refusal_ends_the_join() -> None:
    network = Network()
    seed, namesake = network.add(0), network.add(1, name="node0")
    network.join(namesake, seed)
    network.run(3.0)
    (answer,) = network.take(namesake, ev.FinishJoin)
    assert answer.refused is m.RefusedReason.NAME_TAKEN and isinstance(answer.result, Miss)
    assert network.nodes[seed].peers() == ()


def test_a_new_node_at_the_address_of_an_old_one_replaces_it() -> None:
    node = make_node(0)
    node.handle(hello(FRIEND), 0.0)
    reborn = record(2, name=FRIEND.name, control=FRIEND.control)
    effects = node.handle(hello(reborn), 0.1)
    assert changes(effects) == ["expired", "joined"]


def test_two_live_nodes_with_one_name_are_reported_once() -> None:
    network, ids = joined(2)
    other = network.add(5)
    namesake = network.add(6, name="node1")
    network.join(namesake, other)
    network.join(other, ids[0])
    network.run(5.0)
    conflicts = [r for r in network.take(ids[0], ev.ReportPeer) if r.change == "name_conflict"]
    assert len(conflicts) == 1 and conflicts[0].name == "node1"


def test_hello_in_the_name_of_somebody_else_is_a_violation() -> None:
    node = make_node(0)
    node.handle(hello(FRIEND), 0.0)
    effects = node.handle(
        ev.MessageReceived(FRIEND.node_id, m.Hello(m.PROTOCOL_VERSION, m.PROTOCOL_VERSION, bytes(16), record(2))), 0.1
    )
    assert changes(effects) == ["violation"]
    assert node.stats().violations == 1 and len(node.peers()) == 1


def test_silent_peers_expire_and_beating_ones_do_not() -> None:
    network, ids = joined(4)
    network.frozen.add(ids[3])
    frozen_at = network.now
    network.run(60.0, until=lambda: states(network.nodes[ids[0]])["node3"] == "expired")
    assert 5.0 < network.now - frozen_at < 8.0
    network.run(30.0)
    assert all(
        states(network.nodes[key])[name] == "alive"
        for key in ids[:3]
        for name in ("node1", "node2")
        if f"node{ids.index(key)}" != name
    )
    network.frozen.clear()
    network.run(90.0, until=lambda: all(states(network.nodes[key])["node3"] == "alive" for key in ids[:3]))
    assert all(states(network.nodes[key])["node3"] == "alive" for key in ids[:3])


def test_stale_evidence_does_not_resurrect() -> None:
    node = make_node(0)
    node.handle(hello(FRIEND), 0.0)
    node.handle(beat(FRIEND, 10), 0.1)
    node.handle(ev.TimerExpired(), 7.0)
    assert states(node) == {"node1": "expired"}
    for stale in (beat(FRIEND, 10), beat(FRIEND, 9), hello(FRIEND)):
        node.handle(stale, 7.1)
        assert states(node) == {"node1": "expired"}
    assert "returned" in changes(node.handle(beat(FRIEND, 11), 7.2))


def test_bye_holds_for_its_epoch_only() -> None:
    node = make_node(0)
    node.handle(hello(FRIEND), 0.0)
    node.handle(ev.MessageReceived(FRIEND.node_id, m.Bye(0)), 0.1)
    assert states(node) == {"node1": "alive"}
    assert changes(node.handle(ev.MessageReceived(FRIEND.node_id, m.Bye(1)), 0.1)) == ["left"]
    for stale in (beat(FRIEND, 99), hello(FRIEND)):
        node.handle(stale, 0.2)
        assert states(node) == {"node1": "left"}
    node.handle(hello(record(1, epoch=2)), 0.3)
    assert states(node) == {"node1": "alive"}


def test_leaving_is_known_to_all_at_once() -> None:
    network, ids = joined(5)
    network.publish(ids[1], meta("doc"))
    network.run(2.0)
    network.handle(ids[1], ev.LeaveRequested())
    del network.nodes[ids[1]]
    network.run(0.01)
    assert all(states(node)["node1"] == "left" for node in network.nodes.values())
    network.run(20.0)
    assert all(states(node)["node1"] == "left" and not node.stats().peer_anchors for node in network.nodes.values())


def test_higher_epoch_wipes_what_was_known() -> None:
    node = make_node(0)
    old, new = record(1), record(1, epoch=2)
    delta = m.OriginDelta(old, 5, False, 0, 1, 0, (m.Put.of(1, meta("doc")),))
    node.handle(ev.MessageReceived(old.node_id, m.Ack((delta,))), 0.0)
    assert node.stats().peer_anchors == 1
    assert changes(node.handle(hello(new), 0.1)) == ["returned"]
    assert node.stats().peer_anchors == 0
    node.handle(ev.MessageReceived(old.node_id, m.Ack((delta,))), 0.2)
    assert node.stats().peer_anchors == 0


def test_the_gone_are_forgotten_in_the_end() -> None:
    config = NodeConfig(forget_after_s=20.0)
    node = make_node(0, config=config)
    node.handle(hello(FRIEND), 0.0)
    node.handle(ev.TimerExpired(), 7.0)
    node.handle(ev.TimerExpired(), 28.0)
    assert node.peers() == ()


def test_unreachable_peer_expires_and_heartbeats_bring_it_back() -> None:
    node = make_node(0)
    node.handle(hello(FRIEND), 0.0)
    assert changes(node.handle(ev.PeerUnreachable(FRIEND.node_id), 0.1)) == ["expired"]
    assert changes(node.handle(beat(FRIEND, 1), 0.2)) == ["returned"]
    assert node.handle(ev.PeerUnreachable(NodeId(b"?" * 16)), 0.3) == []


def test_partitions_merge() -> None:
    network, ids = joined(6)
    left = set(ids[:3])
    network.fault = lambda source, target, message: [0.001] if (source in left) == (target in left) else []
    network.run(20.0)
    assert all(node.stats().peers_alive == 2 for node in network.nodes.values())
    network.fault = lambda source, target, message: [0.001]
    network.run(120.0, until=lambda: all(node.stats().peers_alive == 5 for node in network.nodes.values()))
    assert all(node.stats().peers_alive == 5 for node in network.nodes.values())


def test_tables_stay_bounded_under_a_hostile_peer() -> None:
    config = NodeConfig(peers_max=20, anchors_per_peer_max=50, pool_anchors_max=50, directory_anchors_max=100)
    node = make_node(0, config=config)
    node.handle(hello(FRIEND), 0.0)
    for fake in range(400):
        member = record(1000 + fake)
        puts = tuple(m.Put.of(seq, meta((fake, seq))) for seq in range(1, 40))
        deltas = (m.OriginDelta(member, 1, False, 0, 40, 0, puts),)
        node.handle(ev.MessageReceived(FRIEND.node_id, m.Ack(deltas)), 0.001 * fake)
        node.handle(
            ev.MessageReceived(FRIEND.node_id, m.Syn((m.DigestEntry(NodeId(digest16(fake)), 1, fake, 0, 0),))), 0.1
        )
    stats = node.stats()
    assert stats.peers_known <= 20
    assert stats.peer_anchors <= 2 * 100
    assert stats.refused_deltas > 0
    (answer,) = sent(node.handle(hello(record(9000)), 1.0))
    assert isinstance(answer, m.Refused) and answer.reason is m.RefusedReason.FULL


def test_one_peer_cannot_announce_without_end() -> None:
    config = NodeConfig(anchors_per_peer_max=50, pool_anchors_max=50)
    node = make_node(0, config=config)
    for first in range(0, 1000, 20):
        puts = tuple(m.Put.of(seq, meta(seq)) for seq in range(first + 1, first + 21))
        delta = m.OriginDelta(FRIEND, 1, False, first, first + 20, 0, puts)
        node.handle(ev.MessageReceived(FRIEND.node_id, m.Ack((delta,))), 0.0)
    assert node.stats().peer_anchors == 100


def test_claims_about_ourselves_are_outbid_not_believed() -> None:
    node = make_node(0)
    node.handle(hello(FRIEND), 0.0)
    claim = m.DigestEntry(node.me.node_id, node.me.epoch, 1000, 5, 0)
    (answer,) = sent(node.handle(ev.MessageReceived(FRIEND.node_id, m.Syn((claim,))), 0.1))
    assert isinstance(answer, m.SynAck)
    mine = next(entry for entry in answer.digest if entry.node_id == node.me.node_id)
    assert mine.incarnation > 1000 and mine.max_seq == 0
