"""Real protocol nodes under a virtual clock: the second interpreter of effects, beside the driver.

One heap of (time, number, action): what is due at the same time happens in the order in which it was asked for, so a run is
a function of its seed. Every message is encoded, charged for and decoded; a block is moved as chunks whose bytes nobody
looks at, and whose digests are right unless their holder was told to spoil them.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from kvcomm_p2p.errors import InternalError
from kvcomm_p2p.protocol import events as ev
from kvcomm_p2p.protocol import wire
from kvcomm_p2p.protocol.anchors import AnchorMeta, BlockHandle, HeldAnchor, Miss
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.lookup import Lookup, LookupResult
from kvcomm_p2p.protocol.messages import MemberRecord, Message
from kvcomm_p2p.protocol.node import Node
from kvcomm_p2p.sim.block_moves import BlockMoves
from kvcomm_p2p.sim.links import Links
from kvcomm_p2p.sim.machine import Hardware, SimNode
from kvcomm_p2p.sim.process import Promise

SEAL_BYTES = 16
"""What the driver adds to every frame."""

CONTENT_KEY = b"simulated content key".ljust(32, b".")
"""Under which all agents of a world name their content."""

LOOKUP_DEADLINE_S = 1.0
REFUSED_S = 0.0002
"""After so long a connection to nobody is refused."""

Observer = Callable[[int, ev.Event, float, list[ev.Effect]], None]
"""Told of every event that a node handled: its number, the event, the time and what it asked for."""


class Frame:
    """An encoded message on its way. Whoever receives it reads the same values, made of the bytes once."""

    __slots__ = ("_event", "bytes")

    def __init__(self, frame: bytes) -> None:
        self.bytes = frame
        self._event: ev.MessageReceived | None = None

    def event(self) -> ev.MessageReceived:
        """What it says, decoded."""
        if self._event is None:
            self._event = ev.MessageReceived(*wire.decode(self.bytes))
        return self._event


class World:
    """Nodes, links, time. All times are seconds since the world began.

    `frames` and `frame_bytes` count what was sent, by message type; `frame_bytes_of` by node. `disturbed`: nodes that were
    down or frozen at some time: it is no error to take them for dead.
    """

    def __init__(self, seed: int = 0, links: Links | None = None, hardware: Hardware | None = None) -> None:
        self.rng = random.Random(seed)
        self.links = links or Links(random.Random(self.rng.random()))
        self.hardware = hardware or Hardware()
        self.now = 0.0
        self.nodes: list[SimNode] = []
        self.observers: list[Observer] = []
        self.frames: Counter[str] = Counter()
        self.frame_bytes: Counter[str] = Counter()
        self.frame_bytes_of: list[int] = []
        self.payload_bytes_of: list[int] = []
        self.reports: list[tuple[float, int, ev.ReportPeer]] = []
        self.disturbed: set[NodeId] = set()
        self.steps = 0
        self._last_frame: tuple[int, Message | None, Frame | None] = (-1, None, None)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._slots = itertools.count(1)
        self._by_id: dict[NodeId, int] = {}
        self._by_address: dict[str, int] = {}
        self._moves = BlockMoves(self)
        self._effects: dict[type, Callable[[SimNode, Any], None]] = {
            ev.SendMessage: self.send,
            ev.SendBlock: self._moves.send,
            ev.StoreChunk: self._moves.store,
            ev.ResetBlock: lambda machine, effect: None,
            ev.VerifyBlock: self._moves.verify,
            ev.AdoptShared: self._moves.adopt,
            ev.DropBlock: lambda machine, effect: self.release(machine, effect.handle),
            ev.RetainBlock: self._retain,
            ev.FinishFetch: self._finish_fetch,
            ev.FinishTokens: lambda machine, effect: machine.tokens.pop(effect.request_id)(effect),
            ev.FinishLookup: lambda machine, effect: machine.lookups.pop(effect.request_id)(effect),
            ev.FinishJoin: lambda machine, effect: None,
            ev.ReportErased: lambda machine, effect: None,
            ev.SaveState: self._save,
            ev.RenewIdentity: self._renew,
            ev.ReportPeer: lambda machine, effect: self.reports.append((self.now, machine.number, effect)),
        }

    # ----------------------------------------------------------------------------------------------------------- nodes

    def add(self, record: MemberRecord, config: NodeConfig, *, site: int = 0) -> SimNode:
        """One more machine with a node on it, switched on now."""
        number = self.links.add(site)
        node = Node(config, me=record, rng=random.Random(self.rng.getrandbits(64)), now=self.now)
        machine = SimNode(number, record.name, node, config)
        self.nodes.append(machine)
        self.frame_bytes_of.append(0)
        self.payload_bytes_of.append(0)
        self._register(machine)
        self._arm(machine)
        return machine

    def restart(self, machine: SimNode, record: MemberRecord) -> None:
        """A node starts on a machine that was crashed or stopped, with an empty pool. `record`: who it is now."""
        if machine.up:
            raise InternalError(f"{machine.name} is running")
        machine.node = Node(machine.config, me=record, rng=random.Random(self.rng.getrandbits(64)), now=self.now)
        machine.up, machine.frozen, machine.wake_at = True, False, math.inf
        machine.references.clear()
        machine.spoiled.clear()
        self._register(machine)
        self._arm(machine)

    def crash(self, machine: SimNode) -> None:
        """The process is gone: nobody answers, its callers hear nothing more, connections to it are refused."""
        self._switch_off(machine)
        for number in sorted(machine.contacts):
            other = self.nodes[number]
            if other.up:
                self.post(REFUSED_S, self.delivery(other, lambda: ev.PeerUnreachable(machine.node_id)))

    def stop(self, machine: SimNode) -> None:
        """It says goodbye and is gone."""
        self.handle(machine, ev.LeaveRequested())
        self._switch_off(machine)

    def freeze(self, machine: SimNode) -> None:
        """As SIGSTOP: connections stay, frames wait, nothing is done."""
        machine.frozen = True
        self.disturbed.add(machine.node_id)

    def thaw(self, machine: SimNode) -> None:
        """It goes on, first with what has waited."""
        machine.frozen = False
        waiting, machine.waiting = machine.waiting, []
        for make in waiting:
            self._take_in(machine, make)
        self._arm(machine)

    def node_of(self, node_id: NodeId) -> SimNode:
        """The machine on which this node runs or ran last."""
        return self.nodes[self._by_id[node_id]]

    def _register(self, machine: SimNode) -> None:
        me = machine.node.me
        self._by_id[me.node_id] = machine.number
        self._by_address[me.control] = machine.number
        self._by_address[me.bulk] = machine.number

    def _switch_off(self, machine: SimNode) -> None:
        self.disturbed.add(machine.node_id)
        machine.up = False
        machine.generation += 1
        machine.waiting.clear()
        self.links.drop_flows(machine.number)
        for waiting in (machine.fetches, machine.tokens, machine.lookups):
            waiting.clear()

    # ------------------------------------------------------------------------------------------------------------ time

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Do `action` at `when`, at once if that has passed."""
        heapq.heappush(self._heap, (max(when, self.now), next(self._order), action))

    def post(self, delay_s: float, action: Callable[[], None]) -> None:
        """Do `action` after so many seconds."""
        heapq.heappush(self._heap, (self.now + delay_s, next(self._order), action))

    def run(self, seconds: float, until: Callable[[], bool] | None = None) -> bool:
        """Let time pass. With `until`, stops as soon as it holds (asked after every step) and returns whether it did."""
        end = self.now + seconds
        while True:
            if until is not None and until():
                return True
            if not self._heap or self._heap[0][0] > end:
                self.now = end
                return False
            self.now, _, action = heapq.heappop(self._heap)
            self.steps += 1
            action()

    # ----------------------------------------------------------------------------------------------------- what one asks

    def join(self, machine: SimNode, *seeds: str, timeout_s: float = 5.0) -> None:
        self.handle(machine, ev.JoinRequested(tuple(seeds), self.now + timeout_s))

    def publish(self, machine: SimNode, anchors: tuple[HeldAnchor, ...]) -> None:
        """The pool takes over one reference to each handle (from `handle_of`)."""
        self.handle(machine, ev.AnchorsPublished(anchors))

    def new_handle(self, machine: SimNode) -> BlockHandle:
        """A block of this machine; the caller owns the first reference."""
        handle = BlockHandle(machine.number, next(self._slots), 1)
        machine.references[handle] = 1
        return handle

    def release(self, machine: SimNode, handle: BlockHandle) -> None:
        """One reference less."""
        if handle not in machine.references:
            raise InternalError(f"{machine.name} dropped a block that it does not have")
        machine.references[handle] -= 1
        if not machine.references[handle]:
            del machine.references[handle]
            machine.spoiled.pop(handle, None)
            machine.filled.pop(handle, None)

    def handle(self, machine: SimNode, event: ev.Event) -> None:
        """Tell a node and carry out what it asks for."""
        effects = machine.node.handle(event, self.now)
        for observer in self.observers:
            observer(machine.number, event, self.now, effects)
        for effect in effects:
            self._carry_out(machine, effect)
        self._moves.flush(machine)
        self._arm(machine)

    # -------------------------------------------------------------------------------------------------------- inside

    def _arm(self, machine: SimNode) -> None:
        if not machine.up or machine.frozen or machine.alone:
            return
        deadline = max(machine.node.next_deadline(), self.now)
        if deadline < machine.wake_at:
            machine.wake_at = deadline
            generation = machine.generation
            self.at(deadline, lambda: self._wake(machine, deadline, generation))

    def _wake(self, machine: SimNode, wake_at: float, generation: int) -> None:
        if machine.generation != generation or machine.wake_at != wake_at:
            return
        machine.wake_at = math.inf
        if machine.frozen:
            return
        if machine.node.next_deadline() <= self.now:
            self.handle(machine, ev.TimerExpired())
        else:
            self._arm(machine)

    def delivery(self, machine: SimNode, make: Callable[[], ev.Event | None]) -> Callable[[], None]:
        """An action that tells a machine of what `make` gives, unless it was restarted in between; later if it is frozen."""
        generation = machine.generation

        def deliver() -> None:
            if machine.generation != generation:
                return
            if machine.frozen:
                machine.waiting.append(make)
            else:
                self._take_in(machine, make)

        return deliver

    def _take_in(self, machine: SimNode, make: Callable[[], ev.Event | None]) -> None:
        event = make()
        if event is not None:
            self.handle(machine, event)

    def _carry_out(self, machine: SimNode, effect: ev.Effect) -> None:
        carry_out = self._effects.get(type(effect))
        if carry_out is None:
            raise InternalError(f"the simulator cannot carry out {type(effect).__name__}")
        carry_out(machine, effect)

    def _save(self, machine: SimNode, effect: ev.SaveState) -> None:
        machine.saved = effect

    def _renew(self, machine: SimNode, effect: ev.RenewIdentity) -> None:
        """What the driver does when peers know a later epoch than the disk did."""
        record = msgspec.structs.replace(machine.node.me, epoch=effect.epoch)
        self.post(0.0, self.delivery(machine, lambda: ev.IdentityRenewed(record)))

    def _retain(self, machine: SimNode, effect: ev.RetainBlock) -> None:
        machine.references[effect.handle] += 1

    def send(self, machine: SimNode, effect: ev.SendMessage) -> None:
        """Encode a message, charge for it, and let it arrive."""
        if effect.plane is ev.Plane.BULK_REPLY and machine.offers:
            self._moves.flush(machine)
        number = self._by_id.get(effect.to) if effect.to is not None else self._by_address.get(effect.address)
        if number is None:
            return
        target = self.nodes[number]
        frame = self._frame(machine, effect.message)
        name = type(effect.message).__name__
        size = len(frame.bytes) + SEAL_BYTES
        self.frames[name] += 1
        self.frame_bytes[name] += size
        self.frame_bytes_of[machine.number] += size
        if not target.up:
            if effect.to is not None:
                self.post(REFUSED_S, self.delivery(machine, lambda: ev.PeerUnreachable(target.node_id)))
            return
        target.contacts[machine.number] = self.now
        for delay_s in self.links.delays_s(machine.number, number, size):
            # Frames of one node wait for each other: it has one loop.
            target.free_at = max(target.free_at, self.now + delay_s) + self.hardware.frame_s
            self.at(target.free_at, self.delivery(target, frame.event))

    def _frame(self, machine: SimNode, message: Message) -> Frame:
        """What goes to several peers is encoded once, as a driver may do."""
        sender, last, frame = self._last_frame
        if frame is None or last is not message or sender != machine.number:
            frame = Frame(wire.encode(machine.node_id, message))
            self._last_frame = machine.number, message, frame
        return frame

    def _finish_fetch(self, machine: SimNode, effect: ev.FinishFetch) -> None:
        then = machine.fetches.pop(effect.fetch_id, None)
        if then is None:
            raise InternalError(f"{machine.name} finished fetch {effect.fetch_id} twice, or one that nobody asked for")
        then(effect)

    # ------------------------------------------------------------------------------------------------------- questions

    def fetch(
        self,
        machine: SimNode,
        holders: tuple[NodeId, ...],
        wants: tuple[ev.Want, ...],
        then: Callable[[ev.FinishFetch], None],
        *,
        anchors: tuple[AnchorMeta, ...] = (),
        deadline_s: float = 10.0,
        stall_s: float = math.inf,
        busy_s: float = math.inf,
    ) -> int:
        """Ask for blocks; `then` is called once. Returns the fetch's id."""
        fetch_id, machine.next_id = machine.next_id, machine.next_id + 1
        machine.fetches[fetch_id] = then
        asked = ev.FetchRequested(fetch_id, holders, wants, self.now + deadline_s, stall_s, busy_s, anchors)
        self.handle(machine, asked)
        return fetch_id

    def ask_tokens(
        self, machine: SimNode, holder: NodeId, anchor: AnchorMeta, deadline_s: float
    ) -> Promise[tuple[ev.AnchorTokens | Miss, float]]:
        """Token ids of an anchor, and the seconds lost waiting for them."""
        promise: Promise[tuple[ev.AnchorTokens | Miss, float]] = Promise()
        request_id, machine.next_id = machine.next_id, machine.next_id + 1
        machine.tokens[request_id] = lambda finish: promise.resolve((finish.result, finish.wait_lost_s))
        self.handle(machine, ev.TokensRequested(request_id, holder, anchor, self.now + deadline_s))
        return promise

    def look_up(self, machine: SimNode, lookup: Lookup, deadline_s: float = LOOKUP_DEADLINE_S) -> Promise[LookupResult]:
        """What the cluster has for a prompt, as far as this node can find out."""
        promise: Promise[LookupResult] = Promise()
        request_id, machine.next_id = machine.next_id, machine.next_id + 1
        machine.lookups[request_id] = lambda finish: promise.resolve(finish.result)
        self.handle(machine, ev.LookupRequested(request_id, lookup, self.now + deadline_s))
        return promise
