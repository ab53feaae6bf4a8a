"""Columns of members that nodes share, and what stays apart."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from protocol_harness import digest16, make_node, record

from kvcomm_p2p.protocol import events as ev
from kvcomm_p2p.protocol import messages as m
from kvcomm_p2p.protocol.config import PEERS_MAX_MAX, NodeConfig
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.member_table import KnownMembers
from kvcomm_p2p.protocol.membership import Membership
from kvcomm_p2p.protocol.messages.exchanges import BUCKETS_ALL, bucket_of
from kvcomm_p2p.protocol.node import Node
from kvcomm_p2p.protocol.roster import States
from kvcomm_p2p.protocol.wire import CONTROL_FRAME_BYTES_MAX, encode


def known_of(count: int) -> KnownMembers:
    return KnownMembers((record(index), 0) for index in range(count))


def test_a_node_that_begins_with_members_believes_what_one_that_heard_of_them_does() -> None:
    begun, heard = make_node(0), make_node(0)
    begun.handle(ev.MembersKnown(known_of(40)), 0.0)
    for index in range(1, 40):
        heard.handle(ev.MessageReceived(record(index).node_id, m.Hello(2, 2, bytes(16), record(index))), 0.0)
    assert begun._members.view_hash() == heard._members.view_hash()
    assert begun._members.view_hashes() == heard._members.view_hashes()
    assert [p.node_id for p in begun._members.reachable()] == [p.node_id for p in heard._members.reachable()]
    assert begun._members.get(begun.me.node_id) is None and len(begun._members) == 39


def test_nodes_that_begin_with_the_same_members_change_apart() -> None:
    known = known_of(20)
    first, second = (make_node(index) for index in (0, 1))
    for node in (first, second):
        node.handle(ev.MembersKnown(known, introduced=True), 0.0)
    first.handle(ev.MessageReceived(record(5).node_id, m.Bye(1)), 0.1)
    first.handle(ev.MessageReceived(record(30).node_id, m.Hello(2, 2, bytes(16), record(30))), 0.1)
    assert not first._members.is_alive(record(5).node_id) and second._members.is_alive(record(5).node_id)
    assert first._members.is_alive(record(30).node_id) and second._members.get(record(30).node_id) is None
    assert known.ids == sorted(record(index).node_id for index in range(20))


def test_members_known_come_too_late_for_who_knows_somebody() -> None:
    node = make_node(0)
    node.handle(ev.MessageReceived(record(1).node_id, m.Hello(2, 2, bytes(16), record(1))), 0.0)
    node.handle(ev.MembersKnown(known_of(20)), 0.1)
    assert node.stats().peers_known == 1


def test_an_exchange_between_who_begin_alike_is_two_hashes() -> None:
    known = known_of(200)
    nodes = {record(index).node_id: make_node(index) for index in (0, 1)}
    for node in nodes.values():
        node.handle(ev.MembersKnown(known, introduced=True), 0.0)
    first, second = nodes.values()
    community = first._community
    syn = community.exchange.begin(community.members.get(second.me.node_id), 0.1).message  # type: ignore[arg-type]
    answers = second.handle(ev.MessageReceived(first.me.node_id, syn), 0.1)
    assert not [effect for effect in answers if isinstance(effect, ev.SendMessage)]


steps = st.lists(st.tuples(st.integers(0, 11), st.sampled_from(["come", "go", "log"]), st.integers(1, 9)), max_size=40)


@given(steps)
@settings(max_examples=200, deadline=None)
def test_states_are_the_same_whatever_way_they_came_about(steps: list[tuple[int, str, int]]) -> None:
    """Against a plain dictionary: hashes, rows and differences follow from who is there and how far each log is."""
    states = States()
    plain: dict[NodeId, tuple[int, int, int | None]] = {}
    for index, what, number in steps:
        node_id = NodeId(digest16(index))
        if what == "come":
            states.place(node_id, number)
            if plain.get(node_id, (0,))[0] != number:
                plain[node_id] = (number, 0, None)
        elif what == "go":
            states.place(node_id, None)
            plain.pop(node_id, None)
        elif node_id in plain:
            states.set(node_id, plain[node_id][0], number, 1000 + number)
            plain[node_id] = (plain[node_id][0], number, 1000 + number)
    again = States()
    for node_id in sorted(plain, reverse=True):
        again.place(node_id, plain[node_id][0])
        epoch, seq, state = plain[node_id]
        if state is not None:
            again.set(node_id, epoch, seq, state)
    assert states.total() == again.total() and states.roster() == again.roster()
    assert states.rows(BUCKETS_ALL) == again.rows(BUCKETS_ALL) and states.buckets() == again.buckets()
    for node_id, (epoch, seq, state) in plain.items():
        mask = 1 << bucket_of(node_id)
        assert states.epoch_of(node_id) == epoch and states.seq_of(node_id) == seq
        assert (
            states.differing(mask, states.rows(mask)) == [] and states.told_seq(mask, states.rows(mask), node_id) == seq
        )
        again.set(node_id, epoch, seq + 1, 5)
        assert states.differing(mask, again.rows(mask)) == [(node_id, seq + 1)]
        if state is None:
            again.unset(node_id)
        else:
            again.set(node_id, epoch, seq, state)


def test_rows_are_never_used_for_another_peer_and_unused_ones_go() -> None:
    members = Membership(NodeConfig(forget_after_s=10.0), record(0))
    first = members.learn(record(1), 0, 0.0)[0].peer
    for index in range(2, 300):
        members.learn(record(index), 0, 0.0)
        members.bury(record(index).node_id, 0.0, "")
    members.tick(11.0)
    members.tick(12.0)
    assert len(members) == 1 and members.get(record(1).node_id) == first
    assert [peer.node_id for peer in members.reachable()] == [record(1).node_id]
    assert len(members._table.records) < 100


def test_digests_of_as_many_peers_as_a_node_may_know_fit_into_frames() -> None:
    rng = random.Random(0)
    records = [
        m.MemberRecord(NodeId(rng.randbytes(16)), 2**40, "n", record(0).model_id, "h:1", "h:2")
        for _ in range(PEERS_MAX_MAX)
    ]
    node = Node(NodeConfig(peers_max=PEERS_MAX_MAX), me=record(0), rng=rng, now=0.0)
    node.handle(ev.MembersKnown(KnownMembers((each, 2**40) for each in records), introduced=True), 0.0)
    digests = node._community.exchange.digests
    digests.refresh()
    told: dict[NodeId, None] = {}
    for _ in range(8):
        full = digests.full(BUCKETS_ALL, False, 1.0)
        assert len(encode(node.me.node_id, full)) <= CONTROL_FRAME_BYTES_MAX
        told.update(dict.fromkeys(entry.node_id for entry in full.digest))
    assert len(told) == PEERS_MAX_MAX + 1
    assert len(encode(node.me.node_id, digests.dense(BUCKETS_ALL, False))) <= CONTROL_FRAME_BYTES_MAX
