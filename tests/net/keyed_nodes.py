"""Nodes with identities, whose connections are encrypted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from net_nodes import CONFIG, KEYS, MODEL, TestNode

from kvcomm_p2p.net.driver import Driver
from kvcomm_p2p.net.durable import NodeLife
from kvcomm_p2p.net.gate import Gate, curve_keys
from kvcomm_p2p.net.identity import Allowed, Identity, allow, load_allowed
from kvcomm_p2p.net.keys import ClusterKeys
from kvcomm_p2p.net.signatures import signed_record
from kvcomm_p2p.net.transport import Addresses
from kvcomm_p2p.net.zmq_transport import ZmqTransport
from kvcomm_p2p.protocol.messages import MemberRecord
from kvcomm_p2p.protocol.node import Node
from kvcomm_p2p.store import BlockStore


class KeyedNode(TestNode):
    """Listens on `host`, lets in `allowed` (or whoever the allow-list in `state_dir` names)."""

    def __init__(
        self,
        name: str,
        identity: Identity,
        allowed: Sequence[Allowed] = (),
        *,
        host: str = "127.0.0.1",
        state_dir: Path | None = None,
        keys: ClusterKeys = KEYS,
        epoch: int = 1,
        life: NodeLife | None = None,
    ) -> None:
        self.identity = identity
        self.gate = Gate(identity, load_allowed(state_dir) if state_dir else allowed, required=True)

        lived = {}
        if life is not None:
            epoch, lived = life.epoch, {"incarnation": life.incarnation, "addresses": life.addresses}
            life.sign = partial(signed_record, identity)
            self.gate.remember(life.addresses, life.keys)

        def make(addresses: Addresses, now: float) -> Node:
            me = MemberRecord(identity.public.node_id(name), epoch, name, MODEL, addresses.control, addresses.bulk)
            return Node(CONFIG, me=signed_record(identity, me), rng=random.Random(name), now=now, **lived)

        self.store = BlockStore()
        transport = ZmqTransport(bind_host=host, curve=curve_keys(self.gate))
        self.driver = Driver(make, transport, self.store, keys, gate=self.gate, state_dir=state_dir, life=life)

    def alive(self) -> list[str]:
        return sorted(peer.name for peer in self.ask(lambda driver: driver.peers()) if peer.state == "alive")

    def dropped(self, reason: str) -> int:
        return self.ask(lambda driver: driver.stats().wire.dropped[reason])


def allowed(identity: Identity, label: str) -> Allowed:
    return Allowed(label, identity.public)


def allow_all(state_dir: Path, *peers: Allowed) -> Path:
    """An allow-list on disk; returns its folder."""
    for peer in peers:
        allow(state_dir, peer.public.line(peer.label))
    return state_dir
