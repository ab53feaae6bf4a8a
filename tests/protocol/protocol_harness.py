"""Nodes under a virtual clock: enough network and store to let the protocol run, and to hurt it."""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from msgspec.structs import replace as replace_fields

from kvcomm_p2p.protocol import events as ev
from kvcomm_p2p.protocol import wire
from kvcomm_p2p.protocol.anchors import BLOCK_TOKENS, AnchorMeta, BlockHandle, BlockKey, HeldAnchor, Visibility
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.ids import AnchorId, ChainHash, ModelId, NodeId, SequenceId
from kvcomm_p2p.protocol.messages import Chunk, Del, MemberRecord, OriginDelta, Put, pack_entry
from kvcomm_p2p.protocol.node import Node

MODEL = ModelId(b"M" * 16)
TOKEN_BYTES = 8


def digest16(*parts: object) -> bytes:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


def record(index: int, **changes: Any) -> MemberRecord:
    """The member record of node `index`."""
    fields: dict[str, Any] = {
        "node_id": NodeId(digest16("node", index)),
        "epoch": 1,
        "name": f"node{index}",
        "model_id": MODEL,
        "control": f"10.0.0.1:{1000 + index}",
        "bulk": f"10.0.0.1:{3000 + index}",
    }
    return MemberRecord(**{**fields, **changes})


def meta(label: object, *, start: int = 0, tokens: int = 64, **changes: Any) -> AnchorMeta:
    """An anchor whose ids and fingerprints follow from `label`."""
    fields = AnchorMeta(
        anchor_id=AnchorId(digest16("anchor", label, start)),
        model_id=MODEL,
        sequence_id=SequenceId(digest16("sequence", label)[:8]),
        start=start,
        end=start + tokens,
        chain_end=ChainHash(digest16("chain", label, start + tokens) if (start + tokens) % BLOCK_TOKENS == 0 else b""),
        fingerprints=np.sort(np.frombuffer(digest16("fp", label, start), "<u4")).tobytes(),
        hops=0,
        visibility=Visibility.PUBLIC,
        group=b"",
        kv_bytes=tokens * TOKEN_BYTES,
    )
    return replace(fields, **changes)


def log_news(
    origin: MemberRecord,
    to_seq: int,
    entries: Iterable[Put | Del] = (),
    *,
    from_seq: int = 0,
    gc_floor: int = 0,
    reset: bool = False,
    incarnation: int = 1,
    **changes: Any,
) -> OriginDelta:
    """News of `origin`, whom the receiver may not know."""
    raws = tuple(pack_entry(entry) for entry in entries)
    log_seq = changes.pop("log_seq", to_seq)
    fields: dict[str, Any] = {"member": origin, "incarnation": incarnation, "log_seq": log_seq, **changes}
    return OriginDelta(origin.node_id, origin.epoch, reset, from_seq, to_seq, gc_floor, raws, **fields)


_slots = itertools.count(1)
"""Handles only have to differ; nothing that is compared between runs depends on them."""


def new_handle(store: int = 0) -> BlockHandle:
    return BlockHandle(store, next(_slots), 1)


def block_bytes(anchor: AnchorMeta, index: int) -> bytes:
    """The true content of a block, the same wherever it is held."""
    seed = hashlib.sha256(anchor.anchor_id + bytes([index])).digest()
    size = anchor.block_tokens(index) * TOKEN_BYTES
    return (seed * (size // 32 + 1))[:size]


def held(anchor: AnchorMeta, store: int = 0) -> HeldAnchor:
    token_ids = np.arange(anchor.start, anchor.end, dtype=np.uint32)
    token_ids.flags.writeable = False
    digests = tuple(hashlib.sha256(block_bytes(anchor, index)).digest() for index in range(anchor.blocks))
    return HeldAnchor(anchor, token_ids, tuple(new_handle(store) for _ in digests), digests)


def wants(anchor: AnchorMeta, store: int = 0) -> tuple[ev.Want, ...]:
    return tuple(
        ev.Want(
            BlockKey(anchor.anchor_id, index),
            anchor.block_tokens(index) * TOKEN_BYTES,
            hashlib.sha256(block_bytes(anchor, index)).digest(),
            new_handle(store),
        )
        for index in range(anchor.blocks)
    )


def make_node(index: int, *, now: float = 0.0, config: NodeConfig | None = None, **changes: Any) -> Node:
    return Node(config or NodeConfig(), me=record(index, **changes), rng=random.Random(index), now=now)


def wait(node: Node, until: float) -> list[ev.Effect]:
    """Time passes until then, and the node is woken whenever it wants to be."""
    effects: list[ev.Effect] = []
    for _ in range(1000):
        due = node.next_deadline()
        if due >= until:
            return effects + node.handle(ev.TimerExpired(), until)
        effects += node.handle(ev.TimerExpired(), due)
    raise AssertionError("the node wants to be woken again and again at the same time")


class Network:
    """Nodes, a clock and a queue. Every message goes through the wire codec.

    `fault(source, target, message)` returns the delays (seconds) after which the message arrives: none, one or several.
    Stores are dicts from handle to bytes with reference counts; `answers` collects effects that are not carried out here.
    """

    def __init__(self, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.nodes: dict[NodeId, Node] = {}
        self.frozen: set[NodeId] = set()
        self.answers: dict[NodeId, list[ev.Effect]] = {}
        self.stores: dict[NodeId, dict[BlockHandle, bytearray]] = {}
        self.references: dict[NodeId, dict[BlockHandle, int]] = {}
        self.fault: Callable[[NodeId, NodeId, Any], list[float]] = lambda source, target, message: [0.001]
        self.spoil: Callable[[NodeId, bytes], bytes] = lambda holder, payload: payload
        self.chunk_bytes = 96
        self.frames_bytes = 0
        self._payload = b""
        self._deadlines: dict[NodeId, tuple[Node, float]] = {}
        self._order = itertools.count()
        self._queue: list[tuple[float, int, NodeId, Callable[[], ev.Event | None]]] = []

    def add(self, index: int, config: NodeConfig | None = None, **changes: Any) -> NodeId:
        node = make_node(index, now=self.now, config=config, **changes)
        self.nodes[node.me.node_id] = node
        self.answers[node.me.node_id] = []
        self.stores[node.me.node_id] = {}
        self.references[node.me.node_id] = {}
        return node.me.node_id

    def join(self, node_id: NodeId, *seeds: NodeId) -> None:
        addresses = tuple(self.nodes[seed].me.control for seed in seeds)
        self.handle(node_id, ev.JoinRequested(addresses, self.now + 5.0))

    def publish(self, node_id: NodeId, *anchors: AnchorMeta) -> None:
        whole = tuple(held(anchor) for anchor in anchors)
        for anchor in whole:
            for index, handle in enumerate(anchor.handles):
                self.stores[node_id][handle] = bytearray(block_bytes(anchor.meta, index))
                self.references[node_id][handle] = 1
        self.handle(node_id, ev.AnchorsPublished(whole))

    def fetch(
        self, node_id: NodeId, fetch_id: int, holder: NodeId, anchor: AnchorMeta, deadline_s: float = 5.0, **more: Any
    ) -> None:
        """`more`: `others` (holders) and further fields of FetchRequested."""
        holders = (holder, *more.pop("others", ()))
        event = ev.FetchRequested(fetch_id, holders, wants(anchor), self.now + deadline_s, **more)
        for want in event.wants:
            self.references[node_id][want.handle] = 1
        self.handle(node_id, event)

    def take(self, node_id: NodeId, kind: type) -> list[Any]:
        """Answers of a kind since the last call."""
        mine = self.answers[node_id]
        taken = [effect for effect in mine if isinstance(effect, kind)]
        self.answers[node_id] = [effect for effect in mine if not isinstance(effect, kind)]
        return taken

    def run(self, seconds: float, until: Callable[[], bool] | None = None) -> float:
        """Let time pass; returns when `until` held, or the end. Frozen nodes neither receive nor wake."""
        end = self.now + seconds
        while until is None or not until():
            wakes = [(max(self._deadline(key, node), self.now), key) for key, node in self.nodes.items()]
            wake_at, waking = min((wake for wake in wakes if wake[1] not in self.frozen), default=(end, b""))
            queued_at = self._queue[0][0] if self._queue else end + 1
            if min(wake_at, queued_at) > end:
                self.now = end
                break
            if queued_at <= wake_at:
                self.now, _, target, make = heapq.heappop(self._queue)
                if target not in self.frozen and target in self.nodes:
                    event = make()
                    if event is not None:
                        self.handle(target, event)
            else:
                self.now = wake_at
                self.handle(NodeId(waking), ev.TimerExpired())
        return self.now

    def _deadline(self, key: NodeId, node: Node) -> float:
        """The node's deadline, which changes only when it handles something."""
        known = self._deadlines.get(key)
        if known is None or known[0] is not node:
            known = self._deadlines[key] = (node, node.next_deadline())
        return known[1]

    def handle(self, node_id: NodeId, event: ev.Event) -> None:
        self._deadlines.pop(node_id, None)
        for effect in self.nodes[node_id].handle(event, self.now):
            self._carry_out(node_id, effect, event)

    def _carry_out(self, me: NodeId, effect: ev.Effect, cause: ev.Event) -> None:
        if isinstance(effect, ev.SendMessage):
            self._send(me, effect)
        elif isinstance(effect, ev.SendBlock):
            self._send_block(me, effect)
        elif isinstance(effect, ev.StoreChunk):
            block = self.stores[me].setdefault(effect.handle, bytearray(effect.kv_bytes))
            block[effect.offset : effect.offset + effect.length] = self._payload
        elif isinstance(effect, ev.ResetBlock):
            del self.stores[me][effect.handle]
        elif isinstance(effect, ev.VerifyBlock):
            ok = hashlib.sha256(self.stores[me][effect.handle]).digest() == effect.digest
            self._post(0.0001, me, lambda: ev.BlockVerified(effect.handle, ok))
        elif isinstance(effect, ev.DropBlock):
            self.references[me][effect.handle] -= 1
            assert self.references[me][effect.handle] >= 0, "dropped more often than owned"
        elif isinstance(effect, ev.RetainBlock):
            self.references[me][effect.handle] += 1
        elif isinstance(effect, ev.RenewIdentity):
            self._post(0.0, me, lambda: ev.IdentityRenewed(replace_fields(self.nodes[me].me, epoch=effect.epoch)))
        else:
            self.answers[me].append(effect)

    def _send(self, me: NodeId, effect: ev.SendMessage) -> None:
        target = effect.to
        if target is None:
            target = next((key for key, node in self.nodes.items() if node.me.control == effect.address), None)
        if target is None or target not in self.nodes:
            return
        frame = wire.encode(me, effect.message)
        self.frames_bytes += len(frame)
        for delay_s in self.fault(me, target, effect.message):
            self._post(delay_s, target, lambda: ev.MessageReceived(*wire.decode(frame)))

    def _send_block(self, me: NodeId, effect: ev.SendBlock) -> None:
        block = self.stores[me].get(effect.handle)
        if block is None:
            self._post(0.0, me, lambda: ev.BlockUnavailable(effect.to, effect.pull_id, effect.ordinal))
            return
        payload = self.spoil(me, bytes(block))
        for offset in range(effect.offset, len(payload), self.chunk_bytes):
            piece = payload[offset : offset + self.chunk_bytes]
            header = Chunk(effect.pull_id, effect.ordinal, offset, len(piece))
            for delay_s in self.fault(me, effect.to, header):
                self._post(delay_s, effect.to, partial(self._arrive, me, header, piece))

    def _arrive(self, sender: NodeId, header: Chunk, payload: bytes) -> ev.Event:
        self._payload = payload
        return ev.ChunkReceived(sender, header.pull_id, header.ordinal, header.offset, header.length)

    def _post(self, delay_s: float, target: NodeId, make: Callable[[], ev.Event | None]) -> None:
        heapq.heappush(self._queue, (self.now + delay_s, next(self._order), target, make))


def joined(count: int, seed: int = 0, config: NodeConfig | None = None) -> tuple[Network, list[NodeId]]:
    """A network of `count` nodes that all know each other."""
    network = Network(seed)
    ids = [network.add(index, config) for index in range(count)]
    for node_id in ids[1:]:
        network.join(node_id, ids[0])
    network.run(20.0, until=lambda: all(node.stats().peers_alive == count - 1 for node in network.nodes.values()))
    assert all(node.stats().peers_alive == count - 1 for node in network.nodes.values())
    return network, ids
