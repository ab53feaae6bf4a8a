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
from kvcomm_p2p.protocol.anchors import AnchorMeta, BlockHandle, HeldAnchor, Miss
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.lookup import Lookup, LookupResult
from kvcomm_p2p.protocol.messages import MemberRecord, Message
from kvcomm_p2p.protocol.node import Node
from kvcomm_p2p.sim.block_moves import BlockMoves
from kvcomm_p2p.sim.broken import InvariantBroken
from kvcomm_p2p.sim.frames import Encoder, Frame
from kvcomm_p2p.sim.links import Links
from kvcomm_p2p.sim.machine import Hardware, Kept, SimNode
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

NodeMaker = Callable[..., Node]
"""Makes a node of the arguments that `Node` takes."""


class World:
    """Nodes, links, time. All times are seconds since the world began.

    `frames` and `frame_bytes` count what was sent, by message type; `frame_bytes_of` by node. `disturbed`: nodes that were
    down or frozen at some time: it is no error to take them for dead. `switched`: (when, number, whether on) of machines that
    stopped, crashed or were started again. `moment` numbers the event that is being handled (0: none is), `cause` is the one
    during which it was sent or asked for (0: nothing that a node did); `notes`: what was done to a machine (its number, -1: to
    several), in words. `numbers`: the machine of every node that ever ran, by its id. `rolled_back`:
    nodes that began twice in this epoch.
    """

    def __init__(
        self,
        seed: int = 0,
        links: Links | None = None,
        hardware: Hardware | None = None,
        make_node: NodeMaker = Node,
    ) -> None:
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
        self.rolled_back: set[tuple[NodeId, int]] = set()
        self.switched: list[tuple[float, int, bool]] = []
        self.steps = 0
        self.moment = 0
        self.cause = 0
        self.handling: tuple[int, ev.Event] | None = None
        self.notes: list[tuple[float, int, str]] = []
        self._make_node = make_node
        self._moments = 0
        self._encoder = Encoder()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._slots = itertools.count(1)
        self.numbers: dict[NodeId, int] = {}
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
            ev.FinishTokens: lambda machine, effect: self._asked(machine, machine.tokens, effect.request_id)(effect),
            ev.FinishLookup: lambda machine, effect: self._asked(machine, machine.lookups, effect.request_id)(effect),
            ev.FinishJoin: lambda machine, effect: None,
            ev.ReportErased: lambda machine, effect: None,
            ev.SaveState: SimNode.save,
            ev.SaveErasures: SimNode.save,
            ev.RenewIdentity: self._renew,
            ev.ReportPeer: lambda machine, effect: self.reports.append((self.now, machine.number, effect)),
        }

    def add(self, record: MemberRecord, config: NodeConfig, *, site: int = 0) -> SimNode:
        """One more machine with a node on it, switched on now."""
        number = self.links.add(site)
        node = self._make_node(config, me=record, rng=random.Random(self.rng.getrandbits(64)), now=self.now)
        machine = SimNode(number, record.name, node, config)
        self.nodes.append(machine)
        self.frame_bytes_of.append(0)
        self.payload_bytes_of.append(0)
        self._register(machine)
        self._arm(machine)
        return machine

    def restart(self, machine: SimNode, record: MemberRecord, kept: Kept) -> None:
        """A node starts on a machine that was crashed or stopped, with an empty pool. `record`: who it is now; `kept`: what it
        finds on its disk."""
        if machine.up:
            raise InternalError(f"{machine.name} is running")
        rng = random.Random(self.rng.getrandbits(64))
        machine.node = self._make_node(machine.config, me=record, rng=rng, now=self.now, **kept.before)
        machine.kept = machine.found = kept
        machine.up, machine.frozen, machine.wake_at = True, False, math.inf
        self.switched.append((self.now, machine.number, True))
        machine.references.clear()
        machine.spoiled.clear()
        machine.computed_by.clear()
        self.note(machine, f"starts again in epoch {record.epoch}")
        self._register(machine)
        self._arm(machine)

    def crash(self, machine: SimNode) -> None:
        """The process is gone: nobody answers, its callers hear nothing more, connections to it are refused."""
        self._switch_off(machine)
        self.note(machine, "crashes")
        for number in sorted(machine.contacts):
            other = self.nodes[number]
            if other.up:
                self.post(REFUSED_S, self.delivery(other, lambda: ev.PeerUnreachable(machine.node_id)))

    def stop(self, machine: SimNode) -> None:
        """It says goodbye and is gone."""
        self.note(machine, "leaves")
        self.handle(machine, ev.LeaveRequested())
        self._switch_off(machine)

    def freeze(self, machine: SimNode) -> None:
        """As SIGSTOP: connections stay, frames wait, nothing is done."""
        machine.frozen = True
        self.note(machine, "is frozen")
        self.disturbed.add(machine.node_id)

    def thaw(self, machine: SimNode) -> None:
        """It goes on, first with what has waited."""
        machine.frozen, machine.thawed_at = False, self.now
        self.note(machine, "goes on")
        waiting, machine.waiting = machine.waiting, []
        for make, cause in waiting:
            self._take_in(machine, make, cause)
        self._arm(machine)

    def note(self, machine: SimNode | None, what: str) -> None:
        """Something was done to a machine (None: to several), for whoever tells the story."""
        self.notes.append((self.now, -1 if machine is None else machine.number, what))

    def node_of(self, node_id: NodeId) -> SimNode:
        """The machine on which this node runs or ran last."""
        return self.nodes[self.numbers[node_id]]

    def _register(self, machine: SimNode) -> None:
        me = machine.node.me
        self.numbers[me.node_id] = machine.number
        self._by_address[me.control] = machine.number
        self._by_address[me.bulk] = machine.number

    def _switch_off(self, machine: SimNode) -> None:
        self.disturbed.add(machine.node_id)
        machine.up = False
        self.switched.append((self.now, machine.number, False))
        machine.generation += 1
        machine.waiting.clear()
        self.links.drop_flows(machine.number)
        for waiting in (machine.fetches, machine.tokens, machine.lookups):
            waiting.clear()

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

    def join(self, machine: SimNode, *seeds: str, timeout_s: float = 5.0) -> None:
        self.handle(machine, ev.JoinRequested(tuple(seeds), self.now + timeout_s))

    def publish(self, machine: SimNode, anchors: tuple[HeldAnchor, ...]) -> None:
        """The pool takes over one reference to each handle (from `new_handle`, or of a block that was fetched)."""
        for anchor in anchors:
            for handle in anchor.handles:
                machine.computed_by.setdefault(handle, machine.node.me.model_id)
        self.handle(machine, ev.AnchorsPublished(anchors))

    def new_handle(self, machine: SimNode) -> BlockHandle:
        """A block of this machine; the caller owns the first reference."""
        handle = BlockHandle(machine.number, next(self._slots), 1)
        machine.references[handle] = 1
        return handle

    def release(self, machine: SimNode, handle: BlockHandle) -> None:
        """One reference less."""
        if not machine.let_go(handle):
            raise self.broken("references", machine, f"dropped block {handle.slot}, which it does not have")

    def broken(self, rule: str, machine: SimNode, what: str, about: tuple[bytes, ...] = ()) -> InvariantBroken:
        """To be raised: something that must always hold does not, of this machine, now."""
        return InvariantBroken(rule, what, number=machine.number, name=machine.name, at_s=self.now, about=about)

    def handle(self, machine: SimNode, event: ev.Event, cause: int = 0) -> None:
        """Tell a node and carry out what it asks for. Raises InvariantBroken if the node raises."""
        outer = self.moment
        self._moments += 1
        self.moment, self.cause, self.handling = self._moments, cause, (machine.number, event)
        try:
            effects = machine.node.handle(event, self.now)
        except Exception as error:
            what = f"raised {type(error).__name__} when it was told {type(event).__name__}: {error}"
            other = getattr(event, "sender", None) or getattr(event, "peer", None)
            raise self.broken("raises", machine, what, (other,) if isinstance(other, bytes) else ()) from error
        for observer in self.observers:
            observer(machine.number, event, self.now, effects)
        for effect in effects:
            self._carry_out(machine, effect)
        self._moves.flush(machine)
        self._arm(machine)
        self.moment = outer

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
        generation, cause = machine.generation, self.moment

        def deliver() -> None:
            if machine.generation != generation:
                return
            if machine.frozen:
                machine.waiting.append((make, cause))
            else:
                self._take_in(machine, make, cause)

        return deliver

    def _take_in(self, machine: SimNode, make: Callable[[], ev.Event | None], cause: int) -> None:
        event = make()
        if event is not None:
            self.handle(machine, event, cause)

    def _carry_out(self, machine: SimNode, effect: ev.Effect) -> None:
        carry_out = self._effects.get(type(effect))
        if carry_out is None:
            raise InternalError(f"the simulator cannot carry out {type(effect).__name__}")
        carry_out(machine, effect)

    def _renew(self, machine: SimNode, effect: ev.RenewIdentity) -> None:
        """What the driver does when peers know a later epoch than the disk did."""
        record = msgspec.structs.replace(machine.node.me, epoch=effect.epoch)
        self.post(0.0, self.delivery(machine, lambda: ev.IdentityRenewed(record)))

    def _retain(self, machine: SimNode, effect: ev.RetainBlock) -> None:
        if effect.handle not in machine.references:
            raise self.broken("references", machine, f"keeps block {effect.handle.slot}, which it does not have")
        machine.references[effect.handle] += 1

    def send(self, machine: SimNode, effect: ev.SendMessage) -> None:
        """Encode a message, charge for it, and let it arrive."""
        if effect.plane is ev.Plane.BULK_REPLY and machine.offers:
            self._moves.flush(machine)
        number = self.numbers.get(effect.to) if effect.to is not None else self._by_address.get(effect.address)
        if number is None:
            return
        target = self.nodes[number]
        frame, size = self.charged(machine, effect.message)
        if not target.up:
            if effect.to is not None:
                self.post(REFUSED_S, self.delivery(machine, lambda: ev.PeerUnreachable(target.node_id)))
            return
        target.contacts[machine.number] = self.now
        bulk = effect.plane is not ev.Plane.CONTROL
        for delay_s in self.links.delays_s(machine.number, number, size, self.now if bulk else None):
            # Frames of one node wait for each other: it has one loop.
            target.free_at = max(target.free_at, self.now + delay_s) + self.hardware.frame_s
            self.at(target.free_at, self.delivery(target, frame.event))

    def charged(self, machine: SimNode, message: Message) -> tuple[Frame, int]:
        """The message as it travels, and its bytes, counted as sent by this machine."""
        frame = self._encoder.frame(machine, message)
        name, size = type(message).__name__, len(frame.bytes) + SEAL_BYTES
        self.frames[name] += 1
        self.frame_bytes[name] += size
        self.frame_bytes_of[machine.number] += size
        return frame, size

    def _finish_fetch(self, machine: SimNode, effect: ev.FinishFetch) -> None:
        self._asked(machine, machine.fetches, effect.fetch_id)(effect)

    def _asked(
        self, machine: SimNode, waiting: dict[int, Callable[[Any], None]], asked_id: int
    ) -> Callable[[Any], None]:
        then = waiting.pop(asked_id, None)
        if then is None:
            raise self.broken("answers once", machine, f"answered {asked_id} twice, or what nobody asked")
        return then

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
