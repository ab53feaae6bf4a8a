"""Rolling upgrade: nodes of this version beside nodes of a later one, pretended by frames with more fields."""

from __future__ import annotations

from typing import Any

import msgpack
from protocol_harness import Network, make_node, meta, record
from test_membership import hello, sent, states

from kvcomm_p2p.protocol import events as ev
from kvcomm_p2p.protocol import messages as m
from kvcomm_p2p.protocol import wire
from kvcomm_p2p.protocol.anchors import Miss
from kvcomm_p2p.protocol.ids import NodeId

NEWER = m.PROTOCOL_VERSION + 1
HELLO, WELCOME, SYN, SYN_ACK, ACK = 1, 2, 5, 6, 7
MORE = ["a field of a later version", 7]


def of_later_version(frame: bytes) -> bytes:
    """What a node would send that speaks this version and the next: every message and record has more fields at its
    end."""
    header, fields = frame[: wire.HEADER_BYTES], msgpack.unpackb(frame[wire.HEADER_BYTES :], max_array_len=8192)
    tag = fields[0]
    if tag == HELLO:
        fields[2] = NEWER
        fields[4] = fields[4] + MORE
    elif tag == WELCOME:
        fields[1] = fields[1] + MORE
        fields[2] = [member + MORE for member in fields[2]]
    elif tag in (SYN, SYN_ACK, ACK):
        fields = [_longer(field) for field in fields]
    packed: bytes = msgpack.packb(fields + MORE, use_bin_type=True)
    return header + packed


def _longer(field: Any) -> Any:
    """Lists of records (digest entries, deltas) get longer records."""
    if isinstance(field, list) and field and all(isinstance(item, list) for item in field):
        return [item + MORE for item in field]
    return field


class Mixed(Network):
    """A network in which some nodes pretend to be of a later version."""

    def __init__(self) -> None:
        super().__init__()
        self.newer: set[NodeId] = set()
        self.rewritten = 0

    def _send(self, me: NodeId, effect: ev.SendMessage) -> None:
        if me not in self.newer:
            super()._send(me, effect)
            return
        plain = wire.encode
        try:
            wire.encode = lambda sender, message: of_later_version(plain(sender, message))  # type: ignore[assignment]
            self.rewritten += 1
            super()._send(me, effect)
        finally:
            wire.encode = plain


def test_nodes_of_this_and_the_next_version_work_together() -> None:
    network = Mixed()
    ids = [network.add(index) for index in range(6)]
    network.newer = set(ids[:3])
    for node_id in ids[1:]:
        network.join(node_id, ids[0])
    for index, node_id in enumerate(ids):
        network.publish(node_id, meta(("doc", index)))
    network.run(10.0)
    for node in network.nodes.values():
        assert set(states(node).values()) == {"alive"} and len(node.peers()) == 5
        assert node.stats().peer_anchors == 5 and node.stats().violations == 0
    for fetch_id, (puller, holder) in enumerate(((ids[5], ids[0]), (ids[0], ids[5])), 1):
        network.fetch(puller, fetch_id, holder, meta(("doc", ids.index(holder))))
    network.run(2.0)
    for puller in (ids[5], ids[0]):
        (finish,) = network.take(puller, ev.FinishFetch)
        assert finish.found and not finish.missed
    assert network.rewritten > 100


def test_an_incompatible_node_is_told_which_versions_there_are() -> None:
    node = make_node(0)
    (answer,) = sent(node.handle(hello(record(2), oldest=NEWER, newest=NEWER + 1), 0.1))
    assert isinstance(answer, m.Refused) and answer.reason is m.RefusedReason.WRONG_VERSION
    assert str(m.PROTOCOL_VERSION) in answer.detail and f"{NEWER} to {NEWER + 1}" in answer.detail
    assert states(node) == {}
    joining = make_node(1)
    joining.handle(ev.JoinRequested(("10.0.0.1:1000",), 5.0), 0.0)
    effects = joining.handle(ev.MessageReceived(node.me.node_id, answer), 0.2)
    (finish,) = [effect for effect in effects if isinstance(effect, ev.FinishJoin)]
    assert finish.refused is m.RefusedReason.WRONG_VERSION
    assert isinstance(finish.result, Miss) and str(NEWER) in finish.result.detail
