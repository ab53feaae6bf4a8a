"""The baseline that people start with: one server keeps everybody's KV.

It has one network interface in each direction, and one lock that every operation on its index takes in turn. Agents decide as
they do with peers; only where blocks come from differs. Its index is the protocol's own directory, its pool evicts the
least recently used. Whoever is behind a slow link gets blocks as int8 as from a peer; the pool has encoded them when they
came, at no cost.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence

from kvcomm_p2p.planning.fetches import Wants, peers_blocks
from kvcomm_p2p.planning.finding import FoundDonors
from kvcomm_p2p.planning.scouting import Look
from kvcomm_p2p.planning.segments import Segment
from kvcomm_p2p.planning.types import Costs, Donor, Int8From, Plan
from kvcomm_p2p.protocol.anchors import AnchorMeta, BlockKey, HeldAnchor, Miss, MissReason
from kvcomm_p2p.protocol.directory import Directory
from kvcomm_p2p.protocol.events import AnchorTokens
from kvcomm_p2p.protocol.ids import AnchorId, NodeId
from kvcomm_p2p.protocol.lookup import Lookup, LookupResult
from kvcomm_p2p.sim.encoding import Int8
from kvcomm_p2p.sim.fabrics import Fetched, digest_of
from kvcomm_p2p.sim.links import LinkProfile
from kvcomm_p2p.sim.machine import SimNode
from kvcomm_p2p.sim.process import Promise
from kvcomm_p2p.sim.scenario import CentralSpec
from kvcomm_p2p.sim.world import World

POOL = NodeId(b"central pool....")
LOOKUP_BYTES = 400
ANSWER_BYTES_PER_HIT = 220


SMALL_BYTES = 256 << 10
"""Questions, answers and token ids are smaller, a block of KV is larger."""


class Line:
    """Something that serves one after the other: a lock. Counts how long it was busy."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._free_at = 0.0
        self.busy_s = 0.0

    def serve(self, seconds: float, then: Callable[[], None]) -> None:
        """Call `then` when whoever came before, and this one, are done."""
        begins = max(self._world.now, self._free_at)
        self._free_at = begins + seconds
        self.busy_s += seconds
        self._world.at(self._free_at, then)


class Interface(Line):
    """One direction of a network interface. Large transfers come one after the other, which is no slower on average than all at
    once; what is small passes between their packets."""

    def transfer(self, size: int, byte_s: float, then: Callable[[], None]) -> None:
        """Call `then` when so many bytes, each of which takes so long, have passed."""
        seconds = size * byte_s
        if size > SMALL_BYTES:
            self.serve(seconds, then)
            return
        self.busy_s += seconds
        self._free_at = max(self._world.now, self._free_at) + seconds
        self._world.at(self._world.now + seconds, then)


class Route:
    """From one agent to the server and back: latency, and what the agent's own link takes longer than the server's interface."""

    def __init__(self, world: World, link: LinkProfile, server_bytes_per_s: float) -> None:
        self._world = world
        self._latency_s = link.latency_s
        self._byte_s = max(0.0, 1 / link.bulk_bytes_per_s - 1 / server_bytes_per_s)
        self._up, self._down = Interface(world), Interface(world)

    def up(self, size: int, then: Callable[[], None]) -> None:
        """Call `then` when so many bytes are at the server's door."""
        self._travel(self._up, size, then)

    def down(self, size: int, then: Callable[[], None]) -> None:
        """Call `then` when so many bytes that left the server are here."""
        self._travel(self._down, size, then)

    def _travel(self, line: Interface, size: int, then: Callable[[], None]) -> None:
        line.transfer(size, self._byte_s, lambda: self._world.at(self._world.now + self._latency_s, then))


class CentralPool:
    """The server."""

    def __init__(self, world: World, spec: CentralSpec, link: LinkProfile) -> None:
        self._world = world
        self._spec = spec
        self._bytes_per_s = (spec.bytes_per_s or link.bytes_per_s) * spec.interfaces
        self._byte_s = 1 / self._bytes_per_s
        self._directory = Directory(POOL)
        self._held: OrderedDict[AnchorId, HeldAnchor] = OrderedDict()
        self._bytes = 0
        self.lock = Line(world)
        self.sends = Interface(world)
        self.receives = Interface(world)
        self.served_bytes = 0
        self.received_bytes = 0
        self.evicted = 0

    @property
    def anchors(self) -> int:
        return len(self._held)

    def route(self, link: LinkProfile) -> Route:
        """The way of an agent with this link."""
        return Route(self._world, link, self._bytes_per_s)

    def call(self, route: Route, request_bytes: int, work: Callable[[], int], then: Callable[[], None]) -> None:
        """A request arrives, takes the lock, is worked on (`work` returns the bytes of its answer), and the answer leaves."""

        def locked() -> None:
            answer_bytes = work()
            self.sends.transfer(answer_bytes, self._byte_s, lambda: route.down(answer_bytes, then))

        def received() -> None:
            self.lock.serve(self._spec.lock_s, locked)

        route.up(request_bytes, lambda: self.receives.transfer(request_bytes, self._byte_s, received))

    def find(self, lookup: Lookup) -> LookupResult:
        return self._directory.find(lookup, lambda holder, meta: True)

    def get(self, anchor_id: AnchorId) -> HeldAnchor | None:
        held = self._held.get(anchor_id)
        if held is not None:
            self._held.move_to_end(anchor_id)
        return held

    def put(self, segment: Segment) -> None:
        """Keep it, dropping what was not used for longest."""
        meta = segment.meta
        if meta.anchor_id in self._held:
            self._held.move_to_end(meta.anchor_id)
            return
        digests = tuple(digest_of(meta.anchor_id, index) for index in range(meta.blocks))
        self._held[meta.anchor_id] = HeldAnchor(meta, segment.token_ids, (), digests)
        self._directory.add(POOL, meta)
        self._bytes += meta.kv_bytes
        while self._bytes > self._spec.pool_bytes:
            gone, held = self._held.popitem(last=False)
            self._directory.remove(POOL, gone)
            self._bytes -= held.meta.kv_bytes
            self.evicted += 1


class CentralFabric:
    """An agent's connection to the pool over its `link`. It keeps nothing itself. `int8`: None: nothing is asked for so."""

    def __init__(
        self, world: World, machine: SimNode, pool: CentralPool, link: LinkProfile, int8: Int8 | None = None
    ) -> None:
        self._world = world
        self._machine = machine
        self._pool = pool
        self._route = pool.route(link)
        self._int8 = int8
        self.me = machine.node_id

    @property
    def now(self) -> float:
        return self._world.now

    def sleep(self, seconds: float) -> Promise[None]:
        promise: Promise[None] = Promise()
        generation = self._machine.generation
        self._world.at(
            self._world.now + seconds,
            lambda: promise.resolve(None) if self._machine.generation == generation else None,
        )
        return promise

    def held(self, anchor_id: AnchorId) -> HeldAnchor | None:
        return None

    def find(self, lookup: Lookup) -> Promise[LookupResult]:
        promise: Promise[LookupResult] = Promise()
        answers: list[LookupResult] = []

        def work() -> int:
            answers.append(self._pool.find(lookup))
            return ANSWER_BYTES_PER_HIT * len(answers[0].hits)

        request_bytes = LOOKUP_BYTES + 16 * len(lookup.chains) + 4 * len(lookup.fingerprints)
        self._pool.call(self._route, request_bytes, work, lambda: promise.resolve(answers[0]))
        return promise

    def tokens(self, wanted: Sequence[tuple[NodeId, AnchorMeta]]) -> Promise[list[tuple[AnchorTokens | Miss, float]]]:
        promise: Promise[list[tuple[AnchorTokens | Miss, float]]] = Promise()
        answers: list[tuple[AnchorTokens | Miss, float]] = []

        def work() -> int:
            for _, anchor in wanted:
                held = self._pool.get(anchor.anchor_id)
                if held is None:
                    answers.append((Miss(MissReason.EVICTED), 0.0))
                else:
                    answers.append((AnchorTokens(held.meta, POOL, held.token_ids, held.digests), 0.0))
            return 4 * sum(anchor.tokens for _, anchor in wanted)

        self._pool.call(self._route, 32 * len(wanted), work, lambda: promise.resolve(answers))
        return promise

    def fetch(self, plan: Plan, found: FoundDonors, costs: Costs) -> Promise[Fetched]:
        wanted = peers_blocks(plan)
        return self._fetch(wanted.get((POOL, False), {}), wanted.get((POOL, True), {}))

    def look(self, look: Look, found: FoundDonors) -> Promise[Fetched]:
        return self._fetch(look.wants, {})

    def int8(self, donors: Iterable[Donor]) -> Int8From:
        return Int8From() if self._int8 is None else Int8From(frozenset({POOL}), self._int8.always)

    def _fetch(self, raw: Wants, encoded: Wants) -> Promise[Fetched]:
        """Blocks that travel raw, and as int8."""
        promise: Promise[Fetched] = Promise()
        fetched = Fetched()
        wanted = len(raw) + len(encoded)
        decode_s = 0.0
        if not wanted:
            promise.resolve(fetched)
            return promise

        def work() -> int:
            nonlocal decode_s
            for wants, int8 in ((raw, None), (encoded, self._int8)):
                for key, (anchor, index) in wants.items():
                    if self._pool.get(anchor.anchor_id) is None:
                        fetched.failed[key] = Miss(MissReason.EVICTED)
                        continue
                    kv_bytes = anchor.block_bytes(index)
                    fetched.kv_bytes += kv_bytes
                    if int8 is not None:
                        decode_s += kv_bytes / int8.decode_bytes_per_s
                        kv_bytes = int8.layout.int8_bytes(anchor.block_tokens(index))
                    fetched.wire_bytes += kv_bytes
            self._pool.served_bytes += fetched.wire_bytes
            return fetched.wire_bytes

        def came() -> None:
            self.sleep(decode_s).then(lambda _: promise.resolve(fetched))

        self._pool.call(self._route, 24 * wanted, work, came)
        return promise

    def keep(self, fetched: Fetched, used: Container[BlockKey]) -> None:
        """The pool has it."""

    def publish(self, segments: Sequence[Segment]) -> None:
        """Upload what the pool does not have: asked under the lock, then sent, then visible."""

        def upload(segment: Segment) -> None:
            def put() -> int:
                self._pool.put(segment)
                return 16

            if self._pool.get(segment.meta.anchor_id) is None:
                self._pool.received_bytes += segment.meta.kv_bytes
                self._pool.call(self._route, segment.meta.kv_bytes, put, lambda: None)

        for segment in segments:
            self._pool.call(self._route, 64, lambda: 16, lambda segment=segment: upload(segment))  # type: ignore[misc]

    def forget(self, anchor_ids: Sequence[AnchorId]) -> None:
        """The pool lets go of what was not used for longest."""
