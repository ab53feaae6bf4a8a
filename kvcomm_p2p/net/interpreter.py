"""Carries out what a node asks for, and tells it what happened. Lives on one event loop; nothing here blocks it."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Any

from msgspec.structs import replace

from kvcomm_p2p.net.admission import Admission
from kvcomm_p2p.net.block_mover import BlockMover
from kvcomm_p2p.net.counters import WireCounters
from kvcomm_p2p.net.durable import NodeLife
from kvcomm_p2p.net.gate import Gate
from kvcomm_p2p.net.identity import Allowed
from kvcomm_p2p.net.peer_reports import PeerReports
from kvcomm_p2p.net.saving import Saving
from kvcomm_p2p.net.seal import Sealer
from kvcomm_p2p.net.transport import Addresses, Connection, Transport
from kvcomm_p2p.protocol.anchors import KVLayout
from kvcomm_p2p.protocol.events import (
    AdoptShared,
    ChunkReceived,
    DropBlock,
    Effect,
    Event,
    FinishFetch,
    FinishJoin,
    FinishLookup,
    FinishTokens,
    IdentityRenewed,
    MessageReceived,
    PeerUnreachable,
    Plane,
    RenewIdentity,
    ReportErased,
    ReportPeer,
    ResetBlock,
    RetainBlock,
    SaveErasures,
    SaveState,
    SendBlock,
    SendMessage,
    SignHead,
    StoreChunk,
    TimerExpired,
    VerifyBlock,
    VerifyHead,
)
from kvcomm_p2p.protocol.ids import AnchorId, NodeId
from kvcomm_p2p.protocol.messages import Chunk, Message
from kvcomm_p2p.protocol.node import Node
from kvcomm_p2p.protocol.wire import encode
from kvcomm_p2p.store import BlockStore

PEERS_REMEMBERED_MAX = 4096
"""Addresses and bulk connections that are remembered; the oldest are forgotten first."""

log = logging.getLogger("kvcomm_p2p.net")

MakeNode = Callable[[Addresses, float], Node]
"""Makes the node once its addresses are known; the second argument is the time now."""

Finish = FinishFetch | FinishLookup | FinishTokens | FinishJoin


class Interpreter:
    """Effects in, events out. Is the `transport.Receiver` of its transport."""

    def __init__(
        self,
        make_node: MakeNode,
        transport: Transport,
        store: BlockStore,
        sealer: Sealer,
        hashers: Executor,
        on_finish: Callable[[Finish], None],
        verify: Callable[[memoryview, bytes], bool],
        gate: Gate | None = None,
        life: NodeLife | None = None,
        layout: KVLayout | None = None,
    ) -> None:
        self._make_node = make_node
        self._transport = transport
        self._store = store
        self._sealer = sealer
        self._hashers = hashers
        self._life = life
        self._events: deque[Event] = deque()
        self._busy = False
        self._payload: memoryview | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._arming = self._stopped = False
        self._peer_at: OrderedDict[str, NodeId] = OrderedDict()
        self._connections: OrderedDict[NodeId, Connection] = OrderedDict()
        self.counters = WireCounters()
        self.gate = gate or Gate()
        self._reports = PeerReports()
        self._saving = Saving(hashers)
        self._admission = Admission(self.gate, sealer, self.counters)
        self.on_erased: Callable[[tuple[AnchorId, ...]], None] = lambda anchor_ids: None
        self._mover = BlockMover(
            store, hashers, verify, self.counters, self._send_chunk, self._send_message, self._handle_safely, layout
        )
        self._carry_out: dict[type, Callable[[Any], None]] = {
            SendMessage: self._send_message,
            SendBlock: self._mover.send,
            StoreChunk: self._store_chunk,
            ResetBlock: lambda effect: self._store.reset(effect.handle),
            VerifyBlock: self._mover.check,
            AdoptShared: self._mover.check,
            DropBlock: self._drop_block,
            RetainBlock: lambda effect: self._store.retain(effect.handle),
            FinishFetch: on_finish,
            FinishLookup: on_finish,
            FinishTokens: on_finish,
            FinishJoin: on_finish,
            ReportErased: lambda effect: self.on_erased(effect.anchor_ids),
            SaveState: self._save_state,
            SaveErasures: self._save_erasures,
            RenewIdentity: self._renew_identity,
            ReportPeer: self._report_peer,
            SignHead: lambda effect: self._admission.sign(effect, self._handle_safely),
            VerifyHead: lambda effect: self._admission.verify(effect, self._handle_safely),
        }

    def start(self) -> Addresses:
        """Bind and make the node, on the running loop. Raises TransportError, and whatever making the node raises."""
        self._loop = asyncio.get_running_loop()
        self._mover.start()
        self._admission.start()
        addresses = self._transport.start(self)
        try:
            self.node = self._make_node(addresses, self._loop.time())
        except BaseException:
            self._transport.close()
            raise
        self._arm()
        return addresses

    def stop(self, flush_s: float) -> None:
        """No more timers, frames or callbacks. Frames sent before get `flush_s` seconds to leave."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        self._admission.stop()
        self._mover.stop()
        self._saving.flush()
        self._transport.close(flush_s)

    def set_allowed(self, allowed: tuple[Allowed, ...]) -> None:
        """The allow-list has changed: who is no longer on it is cut off, from now on, on every connection."""
        for peer in self.gate.set_allowed(allowed):
            self._hang_up(peer)
            self._handle_safely(PeerUnreachable(peer))

    def handle(self, event: Event) -> None:
        """Tell the node and carry out what it asks for. Raises what the node raises for events that break its
        contract."""
        self._events.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._events:
                for effect in self.node.handle(self._events.popleft(), self._loop.time()):
                    self._apply(effect)
                self._mover.flush()
        finally:
            self._events.clear()
            self._busy = False
            self._arm_soon()

    # ----------------------------------------------------------------------------------------------- from the transport

    def on_control(self, frame: bytes, key: bytes = b"") -> None:
        opened = self._admission.open(frame, key)
        if opened is not None:
            self._admission.admit(*opened, key, partial(self._received, key or opened[0]))

    def on_bulk_request(self, connection: Connection, frame: bytes, key: bytes = b"") -> None:
        opened = self._admission.open(frame, key)
        if opened is not None:
            self._admission.admit(*opened, key, partial(self._requested, connection))

    def _received(self, payer: bytes, sender: NodeId, message: Message) -> None:
        began = time.thread_time()
        self._handle_safely(MessageReceived(sender, message))
        self._admission.charge(payer, time.thread_time() - began)

    def _requested(self, connection: Connection, sender: NodeId, message: Message) -> None:
        _remember(self._connections, sender, connection)
        self._handle_safely(MessageReceived(sender, message))

    def on_bulk_reply(self, frame: bytes, payload: memoryview | None, key: bytes = b"") -> None:
        opened = self._admission.open(frame, key)
        if opened is None or not self._admission.belongs(*opened, key):
            return
        sender, message = opened
        if not isinstance(message, Chunk):
            if payload is not None:
                self.counters.dropped["malformed"] += 1
                return
            self._handle_safely(MessageReceived(sender, message))
            return
        # What counts is what came, not what the header says came.
        length = 0 if payload is None else payload.nbytes
        self.counters.payload_bytes_received += length
        self._payload = payload
        self._handle_safely(ChunkReceived(sender, message.pull_id, message.ordinal, message.offset, length))
        if self._payload is not None:
            self._payload = None
            self.counters.dropped["unasked_payload"] += 1

    def on_unreachable(self, address: str) -> None:
        self.counters.unreachable += 1
        peer = self._peer_at.get(address)
        if peer is not None:
            self._handle_safely(PeerUnreachable(peer))

    def on_malformed(self) -> None:
        self.counters.dropped["malformed"] += 1

    def _handle_safely(self, event: Event) -> None:
        """For what comes from outside: whatever goes wrong is our bug, and must not stop the node."""
        try:
            self.handle(event)
        except Exception:
            self.counters.failures += 1
            log.exception("handling %s failed; please report this", type(event).__name__)

    # ---------------------------------------------------------------------------------------------------------- timer

    def _arm_soon(self) -> None:
        """Once for all events of this turn of the loop: finding the next deadline takes as long as handling an event."""
        if not self._arming:
            self._arming = True
            self._loop.call_soon(self._arm)

    def _arm(self) -> None:
        """Set the one timer to the node's next deadline. One that rings too early is left: it sets itself again."""
        self._arming = False
        if self._stopped:
            return
        deadline = self.node.next_deadline()
        if self._timer is not None:
            if self._timer_at <= deadline:
                return
            self._timer.cancel()
            self._timer = None
        if deadline < math.inf:
            self._timer_at = deadline
            self._timer = self._loop.call_at(deadline, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self.node.next_deadline() <= self._loop.time():
            self._handle_safely(TimerExpired())
        else:
            self._arm()

    # --------------------------------------------------------------------------------------------------------- effects

    def _apply(self, effect: Effect) -> None:
        """One effect that fails must not take the rest of its batch with it."""
        try:
            self._carry_out[type(effect)](effect)
        except Exception:
            self.counters.failures += 1
            log.exception("carrying out %s failed; please report this", type(effect).__name__)

    def _send_message(self, effect: SendMessage) -> None:
        frame = self._sealer.seal(encode(self.node.me.node_id, effect.message))
        kind = type(effect.message).__name__
        if effect.plane is Plane.BULK_REPLY:
            self._mover.flush()
            connection = None if effect.to is None else self._connections.get(effect.to)
            sent = connection is not None and self._transport.send_bulk_reply(connection, frame)
        else:
            name = self.gate.dial(effect.to, effect.address)
            if name is None:
                self._not_allowed(effect)
                return
            if effect.to is not None:
                _remember(self._peer_at, name, effect.to)
            control = effect.plane is Plane.CONTROL
            send = self._transport.send_control if control else self._transport.send_bulk_request
            sent = send(name, frame)
        (self.counters.sent if sent else self.counters.lost)[kind] += 1
        if sent:
            self.counters.sent_bytes[kind] += len(frame)

    def _not_allowed(self, effect: SendMessage) -> None:
        """Whoever should be there is not on the allow-list (any longer)."""
        self.counters.lost[type(effect.message).__name__] += 1
        if effect.to is not None:
            self._events.append(PeerUnreachable(effect.to))

    def _send_chunk(self, peer: NodeId, header: Chunk, payload: memoryview) -> bool:
        connection = self._connections.get(peer)
        if connection is None:
            return False
        frame = self._sealer.seal(encode(self.node.me.node_id, header))
        sent = self._transport.send_bulk_reply(connection, frame, payload)
        if sent:
            self.counters.sent_bytes["Chunk"] += len(frame)
        return sent

    def _store_chunk(self, effect: StoreChunk) -> None:
        payload, self._payload = self._payload, None
        if payload is None:
            raise RuntimeError("the node stored a chunk that is not being handled")
        self._mover.store(effect, payload)

    def _drop_block(self, effect: DropBlock) -> None:
        self._store.drop(effect.handle)
        self._mover.forget(effect.handle)

    def _save_state(self, effect: SaveState) -> None:
        if self._life is not None:
            keys = [self.gate.curve_key_of(holder) for holder in effect.holders]
            self._saving.keep("state", partial(self._life.save, effect, keys))

    def _save_erasures(self, effect: SaveErasures) -> None:
        if self._life is not None:
            self._saving.keep("erasures", partial(self._life.save_erasures, effect.packed))

    async def saved(self) -> None:
        """Returns when what was to be kept until now is on disk, or could not be written."""
        written = self._saving.written()
        if written is not None:
            await asyncio.wrap_future(written)

    def _renew_identity(self, effect: RenewIdentity) -> None:
        me = self.node.me
        renewed = replace(me, epoch=effect.epoch) if self._life is None else self._life.renewed(me, effect.epoch)
        log.warning("peers have seen this node in a later life than this: it goes on in epoch %d", effect.epoch)
        self._events.append(IdentityRenewed(renewed))

    def _report_peer(self, effect: ReportPeer) -> None:
        self._reports.write(effect, self._loop.time())
        if effect.change in ("left", "dead"):
            self._hang_up(effect.peer)

    def _hang_up(self, peer: NodeId) -> None:
        self._connections.pop(peer, None)
        for address in [address for address, there in self._peer_at.items() if there == peer]:
            del self._peer_at[address]
            self._transport.close_peer(address)


def is_digest(view: memoryview, digest: bytes) -> bool:
    """Whether `digest` is the SHA-256 of the bytes (about 1.5 GB/s; other threads run meanwhile)."""
    return hmac.compare_digest(hashlib.sha256(view).digest(), digest)


def _remember(table: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    table[key] = value
    table.move_to_end(key)
    if len(table) > PEERS_REMEMBERED_MAX:
        table.popitem(last=False)
