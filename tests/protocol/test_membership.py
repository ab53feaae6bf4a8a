"""Joining, leaving, expiry, and who must not come back."""

from __future__ import annotations

import pytest
from protocol_harness import Network, digest16, joined, log_news, make_node, meta, record

from kvcomm_p2p.protocol import events as ev
from kvcomm_p2p.protocol import messages as m
from kvcomm_p2p.protocol.anchors import Miss
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.member_table import MemberTable, Peers
from kvcomm_p2p.protocol.node import Node

FRIEND = record(1)
TELLER = record(9)
ALIVE, SUSPECT, DEAD, LEFT = m.Status


def states(node: Node) -> dict[str, str]:
    return {peer.name: peer.state for peer in node.peers()}


def hello(
    member: m.MemberRecord,
    cluster_id: bytes = bytes(16),
    oldest: int = m.PROTOCOL_VERSION,
    newest: int = m.PROTOCOL_VERSION,
) -> ev.MessageReceived:
    return ev.MessageReceived(member.node_id, m.Hello(oldest, newest, cluster_id, member))


def claim(
    member: m.MemberRecord,
    status: m.Status,
    incarnation: int = 0,
    *,
    accuser: bytes = b"",
    teller: m.MemberRecord = TELLER,
) -> ev.MessageReceived:
    """`teller` passes a rumour about `member` on."""
    rumour = m.Rumour(member.node_id, member.epoch, incarnation, status, accuser)
    return ev.MessageReceived(teller.node_id, m.Ping(1, (rumour,)))


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
    assert changes(effects) == ["dead", "joined"]


def test_who_claims_the_address_of_a_peer_of_another_key_replaces_nobody() -> None:
    node = make_node(0)
    node.handle(hello(record(1, public_key=b"1" * 32)), 0.0)
    assert changes(node.handle(hello(record(2, control=FRIEND.control, public_key=b"2" * 32)), 0.1)) == ["joined"]
    assert states(node)["node1"] == "alive"
    reborn = record(3, control=FRIEND.control, public_key=b"1" * 32)
    assert changes(node.handle(hello(reborn), 0.2)) == ["dead", "joined"]


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


def test_bye_holds_for_its_epoch_only() -> None:
    node = make_node(0)
    node.handle(hello(FRIEND), 0.0)
    node.handle(ev.MessageReceived(FRIEND.node_id, m.Bye(0)), 0.1)
    assert states(node) == {"node1": "alive"}
    assert changes(node.handle(ev.MessageReceived(FRIEND.node_id, m.Bye(1)), 0.1)) == ["left"]
    for stale in (claim(FRIEND, ALIVE, 99), claim(FRIEND, DEAD, 99), hello(FRIEND)):
        node.handle(stale, 0.2)
        assert states(node) == {"node1": "left"}
    node.handle(hello(record(1, epoch=2)), 0.3)
    assert states(node) == {"node1": "alive"}


def test_stale_evidence_does_not_resurrect() -> None:
    node = make_node(0)
    node.handle(hello(FRIEND), 0.0)
    node.handle(claim(FRIEND, ALIVE, 10), 0.1)
    assert changes(node.handle(claim(FRIEND, DEAD, 10), 9.0)) == ["dead"]
    for stale in (claim(FRIEND, ALIVE, 10), claim(FRIEND, SUSPECT, 10), claim(FRIEND, ALIVE, 2), hello(FRIEND)):
        node.handle(stale, 9.1)
        assert states(node) == {"node1": "dead"}
    assert changes(node.handle(claim(FRIEND, ALIVE, 11), 9.2)) == ["returned"]


def test_failure_evidence_raises_the_stored_incarnation() -> None:
    """Death at 10 is news about a node known at 2; an ALIVE at 5 that arrives late must not undo it."""
    node = make_node(0)
    node.handle(hello(FRIEND), 0.0)
    node.handle(claim(FRIEND, ALIVE, 2), 0.0)
    node.handle(claim(FRIEND, DEAD, 10), 9.0)
    node.handle(claim(FRIEND, ALIVE, 5), 9.1)
    assert states(node) == {"node1": "dead"}


def test_death_of_a_peer_that_we_hear_is_only_a_suspicion() -> None:
    node = make_node(0)
    node.handle(hello(FRIEND), 0.0)
    node.handle(ev.MessageReceived(FRIEND.node_id, m.Ping(1)), 5.0)
    assert changes(node.handle(claim(FRIEND, DEAD), 6.0)) == ["suspect"]
    node.handle(ev.MessageReceived(FRIEND.node_id, m.Ping(2)), 6.1)
    node.handle(claim(FRIEND, DEAD), 6.2)
    assert states(node) == {"node1": "suspect"}
    assert changes(node.handle(claim(FRIEND, ALIVE, 1), 6.3)) == ["returned"]


def test_an_unreachable_peer_is_suspect_at_once_and_told_so() -> None:
    node = make_node(0)
    node.handle(hello(FRIEND), 0.0)
    effects = node.handle(ev.PeerUnreachable(FRIEND.node_id), 0.1)
    assert changes(effects) == ["suspect"]
    (ping,) = sent(effects)
    assert isinstance(ping, m.Ping) and m.Rumour(FRIEND.node_id, 1, 0, SUSPECT) in ping.rumours
    assert node.handle(ev.PeerUnreachable(FRIEND.node_id), 0.2) == []
    assert changes(node.handle(ev.MessageReceived(FRIEND.node_id, m.Pong(1, FRIEND.node_id, 1, 1)), 0.3)) == [
        "returned"
    ]
    assert node.handle(ev.PeerUnreachable(NodeId(b"?" * 16)), 0.4) == []


def test_whoever_is_suspected_contradicts_with_a_higher_incarnation() -> None:
    node = make_node(0)
    node.handle(hello(FRIEND), 0.0)
    effects = node.handle(claim(node.me, SUSPECT, teller=FRIEND), 0.1)
    (pong,) = sent(effects)
    assert pong == m.Pong(1, node.me.node_id, 1, 1, (m.Rumour(node.me.node_id, 1, 1, ALIVE),))
    assert [e for e in effects if isinstance(e, ev.SaveState)] == [ev.SaveState(1, 1, ())]
    (again,) = sent(node.handle(claim(node.me, SUSPECT, teller=FRIEND), 0.2))
    assert isinstance(again, m.Pong) and again.incarnation == 1, "the old suspicion is answered already"


def test_a_node_that_was_seen_in_a_later_life_goes_on_above_it() -> None:
    """Its disk was rolled back: others know epoch 7 of it."""
    network, ids = joined(3)
    network.publish(ids[0], meta("doc"))
    network.run(2.0)
    old = network.nodes[ids[0]]
    later = record(0, epoch=7)
    for key in ids[1:]:
        network.handle(key, hello(later))
    assert old.me.epoch == 1
    network.run(5.0)
    assert old.me.epoch > 7
    for key in ids[1:]:
        assert states(network.nodes[key])["node0"] == "alive"
        assert network.nodes[key].stats().peer_anchors == 1, "what it holds is announced anew"


def test_a_node_that_is_said_to_have_left_goes_on_in_a_higher_epoch() -> None:
    network, ids = joined(3)
    network.handle(ids[1], claim(network.nodes[ids[0]].me, LEFT, teller=network.nodes[ids[2]].me))
    assert states(network.nodes[ids[1]])["node0"] == "left"
    network.run(5.0)
    assert network.nodes[ids[0]].me.epoch == 2
    assert all(states(network.nodes[key])["node0"] == "alive" for key in ids[1:])


def test_a_restart_elsewhere_under_the_same_identity_is_let_in_at_once() -> None:
    network, ids = joined(3)
    del network.nodes[ids[1]]
    network.run(0.5)
    again = network.add(1, epoch=2, control="10.0.0.1:7777", bulk="10.0.0.1:7778")
    network.join(again, ids[0])
    network.run(0.1)
    (answer,) = network.take(again, ev.FinishJoin)
    assert answer.result == 2 and answer.refused is None
    assert states(network.nodes[ids[0]])["node1"] == "alive"


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
    delta = log_news(old, 1, [m.Put.of(1, meta("doc"))], incarnation=5)
    node.handle(ev.MessageReceived(old.node_id, m.Ack((delta,))), 0.0)
    assert node.stats().peer_anchors == 1
    assert changes(node.handle(hello(new), 0.1)) == ["returned"]
    assert node.stats().peer_anchors == 0
    node.handle(ev.MessageReceived(old.node_id, m.Ack((delta,))), 0.2)
    assert node.stats().peer_anchors == 0


def test_the_gone_are_forgotten_but_old_news_does_not_bring_them_back() -> None:
    config = NodeConfig(forget_after_s=20.0)
    for end in (LEFT, DEAD):
        node = make_node(0, config=config)
        node.handle(hello(FRIEND), 0.0)
        node.handle(claim(FRIEND, end, 4), 9.0)
        assert states(node) == {"node1": end.word}
        node.handle(ev.TimerExpired(), 30.0)
        assert node.peers() == ()
        delta = log_news(FRIEND, 1, [m.Put.of(1, meta("doc"))], incarnation=4)
        for stale in (ev.MessageReceived(TELLER.node_id, m.Ack((delta,))), hello(FRIEND), claim(FRIEND, ALIVE, 9)):
            node.handle(stale, 31.0)
            assert node.peers() == () and node.stats().peer_anchors == 0
        assert sent(node.handle(hello(FRIEND), 31.0))[0].rumours, "it is told why it does not get in"  # type: ignore
        higher = record(1, epoch=2) if end is LEFT else FRIEND
        member = m.Hello(m.PROTOCOL_VERSION, m.PROTOCOL_VERSION, bytes(16), higher, 0 if end is LEFT else 5)
        node.handle(ev.MessageReceived(FRIEND.node_id, member), 32.0)
        assert states(node) == {"node1": "alive"}


def test_the_end_of_a_life_that_we_never_saw_is_remembered() -> None:
    node = make_node(0)
    node.handle(hello(FRIEND), 0.0)
    later = record(1, epoch=3)
    node.handle(claim(later, DEAD, 2), 9.1)
    assert states(node) == {"node1": "dead"}
    delta = log_news(later, 0, incarnation=2)
    node.handle(ev.MessageReceived(TELLER.node_id, m.Ack((delta,))), 9.2)
    assert states(node) == {"node1": "dead"}
    node.handle(ev.MessageReceived(TELLER.node_id, m.Ack((log_news(later, 0, incarnation=3),))), 9.3)
    assert states(node) == {"node1": "alive"}


def test_the_end_of_a_later_life_of_a_peer_that_we_hear_is_only_a_suspicion() -> None:
    node = make_node(0)
    node.handle(hello(FRIEND), 0.0)
    assert changes(node.handle(claim(record(1, epoch=3), DEAD), 0.1)) == ["suspect"]
    (answer,) = sent(node.handle(hello(FRIEND), 0.2))
    assert isinstance(answer, m.Welcome)
    assert answer.rumours == (m.Rumour(FRIEND.node_id, 3, 0, DEAD),), "it has to hear of it, to go above it"
    assert changes(node.handle(hello(record(1, epoch=4)), 0.3)) == ["returned"]


def test_departures_reach_those_whom_the_leaver_could_not_reach() -> None:
    network, ids = joined(8)
    network.fault = lambda source, target, message: [0.001] if source != ids[1] or target == ids[0] else []
    network.handle(ids[1], ev.LeaveRequested())
    del network.nodes[ids[1]]
    network.run(3.0)
    assert all(states(node)["node1"] == "left" for node in network.nodes.values())


def test_claims_that_leap_are_not_believed() -> None:
    node = make_node(0)
    node.handle(hello(FRIEND), 0.0)
    for leap in (claim(FRIEND, DEAD, 2**40), claim(record(1, epoch=2**40), LEFT)):
        node.handle(leap, 9.0)
        assert states(node) == {"node1": "alive"}
    node.handle(claim(node.me, DEAD, 2**62), 9.0)
    (pong,) = sent(node.handle(claim(node.me, ALIVE), 9.1)) or [m.Pong(1, node.me.node_id, 1, 0)]
    assert isinstance(pong, m.Pong) and pong.incarnation == 0


def test_records_and_ends_that_leap_keep_nobody_out() -> None:
    node = make_node(0)
    node.handle(claim(record(1, epoch=m.COUNTER_MAX), LEFT), 0.0)
    assert changes(node.handle(hello(FRIEND), 0.1)) == ["joined"], "who lied first must not win"
    taken_over = record(1, epoch=m.COUNTER_MAX, control="10.6.6.6:1")
    for message in (m.Welcome(TELLER, (taken_over,)), m.Ack((log_news(taken_over, 0),))):
        node.handle(ev.MessageReceived(TELLER.node_id, message), 9.0)
        (known,) = [peer for peer in node.peers() if peer.node_id == FRIEND.node_id]
        assert (known.epoch, known.control, known.state) == (1, FRIEND.control, "alive")
    node.handle(hello(record(1, epoch=2)), 9.1)
    assert [peer.epoch for peer in node.peers() if peer.node_id == FRIEND.node_id] == [2]


def test_a_node_that_is_told_lies_about_itself_begins_a_new_epoch_every_ten_seconds_at_most() -> None:
    """Each costs a write to the disk, a word to everybody, and all of its log once more."""
    network, ids = joined(3)
    renewals = []
    for _ in range(100):
        before = network.nodes[ids[0]].me.epoch
        lie = m.Rumour(ids[0], before, 0, LEFT)
        network.handle(ids[0], ev.MessageReceived(ids[1], m.Ping(1, (lie,))))
        network.run(0.21)
        if network.nodes[ids[0]].me.epoch > before:
            renewals.append(network.now)
    assert 2 <= len(renewals) <= 3
    network.run(15.0)
    assert all(states(network.nodes[key])["node0"] == "alive" for key in ids[1:])


def test_what_is_said_of_everybody_costs_no_more_for_each_because_they_are_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All that are known turn suspect and back in one frame, as after a partition."""
    node = make_node(0)
    members = [record(index) for index in range(1, 300)]
    for index, member in enumerate(members):
        node.handle(hello(member), 0.001 * index)
    visits = [0]

    select = MemberTable.select

    def visited(table: MemberTable, status_max: m.Status) -> Peers:
        visits[0] += len(table)
        return select(table, status_max)

    monkeypatch.setattr(MemberTable, "select", visited)
    for incarnation, status in enumerate((SUSPECT, ALIVE, SUSPECT, ALIVE)):
        entries = [m.DigestEntry(member.node_id, 1, incarnation, 0, 0, status) for member in members]
        digest = m.SynAck(tuple(sorted(entries, key=lambda entry: entry.node_id)), answer=True)
        assert len(changes(node.handle(ev.MessageReceived(FRIEND.node_id, digest), 1.0))) == len(members)
        assert visits[0] <= 4 * len(members)
        visits[0] = 0


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
        deltas = (log_news(member, 40, puts),)
        node.handle(ev.MessageReceived(FRIEND.node_id, m.Ack(deltas)), 0.001 * fake)
        node.handle(
            ev.MessageReceived(FRIEND.node_id, m.SynAck((m.DigestEntry(NodeId(digest16(fake)), 1, fake, 0, 0),))), 0.1
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
        delta = log_news(FRIEND, first + 20, puts, from_seq=first)
        node.handle(ev.MessageReceived(FRIEND.node_id, m.Ack((delta,))), 0.0)
    assert node.stats().peer_anchors == 100


def test_claims_about_ourselves_are_outbid_not_believed() -> None:
    node = make_node(0)
    node.handle(hello(FRIEND), 0.0)
    claim = m.DigestEntry(node.me.node_id, node.me.epoch, 1000, 5, 0)
    answers = sent(node.handle(ev.MessageReceived(FRIEND.node_id, m.SynAck((claim,))), 0.1))
    answer = next(message for message in answers if isinstance(message, m.SynAck))
    mine = next(entry for entry in answer.digest if entry.node_id == node.me.node_id)
    assert mine.incarnation > 1000 and mine.max_seq == 0
