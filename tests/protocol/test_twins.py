"""Two processes with one identity: both find out, one stays, epochs come to rest; a life that is over is told from a twin."""

from __future__ import annotations

import random
from typing import Any

import pytest
from protocol_harness import Network, record, replace_fields

from kvcomm_p2p.protocol import events as ev
from kvcomm_p2p.protocol import twins
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.messages import PROTOCOL_VERSION, Hello, MemberRecord
from kvcomm_p2p.protocol.node import Node


class Machines(Network):
    """Nodes are told apart by where they listen, so that two can have one id."""

    def __init__(self) -> None:
        super().__init__()
        self.at: dict[str, NodeId] = {}

    def put(self, me: MemberRecord) -> NodeId:
        """A node on a machine of its own; its handle in this network is its address."""
        place = NodeId(me.control.encode())
        self.nodes[place] = Node(NodeConfig(), me=me, rng=random.Random(me.control), now=self.now)
        self.answers[place], self.stores[place], self.references[place] = [], {}, {}
        return place

    def _send(self, me: NodeId, effect: ev.SendMessage) -> None:
        target = NodeId(effect.address.encode())
        sender = self.nodes[me].me.node_id
        if target not in self.nodes:
            if effect.to is not None and effect.to != sender:
                self._post(0.001, me, lambda: ev.PeerUnreachable(effect.to))
            return
        for delay_s in self.fault(me, target, effect.message):
            self._post(delay_s, target, lambda: ev.MessageReceived(sender, effect.message))

    def enter(self, place: NodeId, *seeds: NodeId) -> None:
        self.handle(place, ev.JoinRequested(tuple(seed.decode() for seed in seeds), self.now + 5.0))

    def reports(self, place: NodeId) -> list[str]:
        return [
            report.detail
            for report in self.answers[place]
            if isinstance(report, ev.ReportPeer)
            if report.change == "twin"
        ]


def elsewhere(number: int, epoch: int) -> MemberRecord:
    """The node number 5 at the address of machine `number`."""
    place = record(number)
    return replace_fields(record(5, epoch=epoch), control=place.control, bulk=place.bulk)


def twin_cluster(epochs: tuple[int, int]) -> tuple[Machines, list[NodeId], NodeId, NodeId]:
    network = Machines()
    others = [network.put(record(index)) for index in range(3)]
    first = network.put(elsewhere(20, epochs[0]))
    for place in (*others[1:], first):
        network.enter(place, others[0])
    network.run(2.0)
    second = network.put(elsewhere(30, epochs[1]))
    network.enter(second, others[1])
    return network, others, first, second


def followed_at(network: Machines, others: list[NodeId], node_id: NodeId) -> set[str]:
    return {view.control for other in others for view in network.nodes[other].peers() if view.node_id == node_id}


@pytest.mark.parametrize("epochs", [(5, 6), (5, 5), (6, 5), (5, 9)])
def test_both_say_so_one_is_followed_and_epochs_come_to_rest(epochs: tuple[int, int]) -> None:
    network, others, first, second = twin_cluster(epochs)
    network.run(5.0)
    nodes = [network.nodes[place] for place in (first, second)]
    assert all(network.reports(place) for place in (first, second)), "both users are told"
    assert first.decode() in network.reports(second)[-1] and second.decode() in network.reports(first)[-1]
    assert sorted(node.stats().twin[1] for node in nodes) == [False, True]
    assert {node.stats().twin[0] for node in nodes} == {first.decode(), second.decode()}
    network.run(30.0)
    rested = [node.me.epoch for node in nodes]
    network.run(300.0)
    assert [node.me.epoch for node in nodes] == rested, "no ping-pong"
    assert max(rested) <= max(epochs) + 2
    stays = max(nodes, key=lambda node: (node.me.epoch, node.me.control))
    assert followed_at(network, others, stays.me.node_id) == {stays.me.control}
    assert len(network.reports(first)) + len(network.reports(second)) <= 6


def test_who_yielded_takes_over_when_its_twin_has_gone() -> None:
    network, others, first, second = twin_cluster((5, 6))
    network.run(10.0)
    assert network.nodes[first].stats().twin[1]
    del network.nodes[second]
    network.run(twins.GONE_S + 40.0)
    assert network.nodes[first].stats().twin == ("", False)
    assert network.nodes[first].me.epoch == 7
    assert followed_at(network, others, network.nodes[first].me.node_id) == {first.decode()}


@pytest.mark.parametrize(("before", "after"), [(5, 6), (5, 5), (7, 5)])
def test_a_life_that_is_over_is_no_twin(before: int, after: int) -> None:
    """Killed and started again on another port, also with a disk that went back in time."""
    network = Machines()
    others = [network.put(record(index)) for index in range(3)]
    first = network.put(elsewhere(20, before))
    for place in (*others[1:], first):
        network.enter(place, others[0])
    network.run(2.0)
    del network.nodes[first]
    second = network.put(elsewhere(30, after))
    network.enter(second, others[1])
    network.run(twins.ANSWER_S + 4.0)
    assert not network.reports(second) and network.nodes[second].stats().twin == ("", False)
    assert network.nodes[second].me.epoch == (after if after > before else before + 1)
    assert followed_at(network, others, network.nodes[second].me.node_id) == {second.decode()}


def hello_of(me: MemberRecord) -> ev.MessageReceived:
    return ev.MessageReceived(me.node_id, Hello(PROTOCOL_VERSION, PROTOCOL_VERSION, bytes(16), me))


def test_hellos_in_our_name_are_answered_every_ten_seconds_at_most_and_leaps_are_lies() -> None:
    node = Node(NodeConfig(), me=elsewhere(20, 5), rng=random.Random(1), now=0.0)
    answers: list[Any] = []
    for step in range(1000):
        answers += node.handle(hello_of(elsewhere(30 + step % 7, 6)), step / 100)
    sent = [effect for effect in answers if isinstance(effect, ev.SendMessage)]
    assert len(sent) <= 4
    leaping = Node(NodeConfig(), me=elsewhere(20, 5), rng=random.Random(1), now=0.0)
    leaping.handle(hello_of(elsewhere(30, 2**40)), 0.0)
    assert leaping.stats().twin == ("", False)
    assert leaping.handle(hello_of(elsewhere(20, 9)), 0.0) == [], "our own Hello, from before"
