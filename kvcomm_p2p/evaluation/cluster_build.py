"""Puts together a node of a cluster of processes, as an agent's stack does, but without a model. Loads no torch."""

from __future__ import annotations

import os
import random
from functools import partial
from pathlib import Path
from typing import Any

from kvcomm_p2p.evaluation.cluster_anchors import MODEL
from kvcomm_p2p.net.driver import Driver
from kvcomm_p2p.net.durable import NodeLife, open_life
from kvcomm_p2p.net.gate import Gate, curve_keys, open_gate
from kvcomm_p2p.net.keys import ClusterKeys
from kvcomm_p2p.net.lossy_transport import LossyTransport
from kvcomm_p2p.net.shared_memory import SharedMemory, host_tag
from kvcomm_p2p.net.signatures import signed_record
from kvcomm_p2p.net.transport import Addresses
from kvcomm_p2p.net.zmq_transport import ZmqTransport
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.ids import NODE_ID_BYTES, NodeId
from kvcomm_p2p.protocol.messages import Capability, MemberRecord
from kvcomm_p2p.protocol.node import Node
from kvcomm_p2p.store import BlockStore


def build(options: dict[str, Any]) -> tuple[LossyTransport, BlockStore, Driver]:
    """`options`: name, secret (hex), and optionally seed, config (fields of NodeConfig), ports (control, bulk), host,
    advertise_host, shared (offer blocks in shared memory), and who it is: node_id (hex) and epoch, or state_dir (what
    survives a restart) and encrypted (by the identity that lies there). Raises ConfigError, NameTakenError.
    """
    name, seed = options["name"], options.get("seed", 0)
    keys = ClusterKeys.derive(bytes.fromhex(options["secret"]))
    host = options.get("host", "127.0.0.1")
    config = NodeConfig(**options.get("config", {}))
    state_dir = Path(options["state_dir"]) if options.get("state_dir") else None
    gate = Gate()
    life: NodeLife | None = None
    node_id = NodeId(bytes.fromhex(options.get("node_id") or os.urandom(NODE_ID_BYTES).hex()))
    epoch = options.get("epoch", 1)
    before: dict[str, Any] = {}
    if state_dir is not None:
        gate = open_gate(state_dir, host, encrypted=options.get("encrypted", False))
        identity = gate.identity
        life = open_life(state_dir, "cluster", name, None if identity is None else identity.public.node_id(name))
        if identity is not None:
            life.sign = partial(signed_record, identity)
        node_id, epoch = life.node_id, life.epoch
        before = {"incarnation": life.incarnation, "addresses": life.addresses}
    tag = host_tag(keys.content) if options.get("shared") else b""

    def make_node(addresses: Addresses, now: float) -> Node:
        me = MemberRecord(
            node_id,
            epoch,
            name,
            MODEL,
            control=addresses.control,
            bulk=addresses.bulk,
            host=tag,
            capabilities=Capability.SHARED_MEMORY if tag else 0,
        )
        me = me if life is None else life.sign(me)
        return Node(config, me=me, rng=random.Random(f"{name}{seed}"), now=now, **before)

    control_port, bulk_port = options.get("ports", (0, 0))
    transport = LossyTransport(
        ZmqTransport(
            bind_host=host,
            advertise_host=options.get("advertise_host", host),
            control_port=control_port,
            bulk_port=bulk_port,
            curve=curve_keys(gate),
        ),
        seed=seed,
    )
    store = BlockStore(SharedMemory() if tag else None)
    return transport, store, Driver(make_node, transport, store, keys, gate=gate, state_dir=state_dir, life=life)
