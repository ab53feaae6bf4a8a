"""The baseline that people start with: one server keeps everybody's KV.

It has one network interface in each direction, and one lock that every operation on its index takes in turn. Agents decide as
they do with peers; only where blocks come from differs. Its index is the protocol's own directory, its pool evicts the
least recently used.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Sequence

from kvcomm_p2p.planning.finding import FoundDonors
from kvcomm_p2p.planning.segments import Segment
from kvcomm_p2p.planning.types import Costs, Plan
from kvcomm_p2p.protocol.anchors import AnchorMeta, BlockKey, HeldAnchor, Miss, MissReason
from kvcomm_p2p.protocol.directory import Directory
from kvcomm_p2p.protocol.events import AnchorTokens
from kvcomm_p2p.protocol.ids import AnchorId, NodeId
from kvcomm_p2p.protocol.lookup import Lookup, LookupResult
from kvcomm_p2p.sim.fabrics import Fetched, digest_of, wanted_of
from kvcomm_p2p.sim.links import LinkProfile
from kvcomm_p2p.sim.machine import SimNode
from kvcomm_p2p.sim.process import Promise
from kvcomm_p2p.sim.scenario import CentralSpec
from kvcomm_p2p.sim.world import World

POOL = NodeId(b"central pool....")
LOOKUP_BYTES = 400
ANSWER_BYTES_PER_HIT = 220


class Line:
    """Something that serves one after the other: a lock, a direction of an interface. Counts how long it was busy."""

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


class CentralPool:
    """The server."""

    def __init__(self, world: World, spec: CentralSpec, link: LinkProfile) -> None:
        self._world = world
        self._spec = spec
        self._link = link
        self._directory = Directory(POOL)
        self._held: OrderedDict[AnchorId, HeldAnchor] = OrderedDict()
        self._bytes = 0
        self.lock = Line(world)
        self.sends = Line(world)
        self.receives = Line(world)
        self.served_bytes = 0
        self.received_bytes = 0

    @property
    def anchors(self) -> int:
        return len(self._held)

    def call(self, request_bytes: int, work: Callable[[], int], then: Callable[[], None]) -> None:
        """A request arrives, takes the lock, is worked on (`work` returns the bytes of its answer), and the answer leaves."""

        def locked() -> None:
            answer_bytes = work()
            self.sends.serve(answer_bytes / self._spec.bytes_per_s, lambda: self._after_link(then))

        def received() -> None:
            self.lock.serve(self._spec.lock_s, locked)

        self._world.at(
            self._world.now + self._link.latency_s,
            lambda: self.receives.serve(request_bytes / self._spec.bytes_per_s, received),
        )

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

    def _after_link(self, then: Callable[[], None]) -> None:
        self._world.at(self._world.now + self._link.latency_s, then)


class CentralFabric:
    """An agent's connection to the pool. It keeps nothing itself."""

    def __init__(self, world: World, machine: SimNode, pool: CentralPool) -> None:
        self._world = world
        self._machine = machine
        self._pool = pool
        self.me = machine.node_id

    @property
    def now(self) -> float:
        return self._world.now

    def sleep(self, seconds: float) -> Promise[None]:
        promise: Promise[None] = Promise()
        self._world.at(self._world.now + seconds, lambda: promise.resolve(None))
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
        self._pool.call(request_bytes, work, lambda: promise.resolve(answers[0]))
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

        self._pool.call(32 * len(wanted), work, lambda: promise.resolve(answers))
        return promise

    def fetch(self, plan: Plan, found: FoundDonors, costs: Costs) -> Promise[Fetched]:
        promise: Promise[Fetched] = Promise()
        wanted = wanted_of(plan).get(POOL, {})
        fetched = Fetched()
        if not wanted:
            promise.resolve(fetched)
            return promise

        def work() -> int:
            for key, (anchor, index) in wanted.items():
                if self._pool.get(anchor.anchor_id) is None:
                    fetched.failed[key] = Miss(MissReason.EVICTED)
                else:
                    fetched.kv_bytes += anchor.block_bytes(index)
            self._pool.served_bytes += fetched.kv_bytes
            return fetched.kv_bytes

        self._pool.call(24 * len(wanted), work, lambda: promise.resolve(fetched))
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
                self._pool.call(segment.meta.kv_bytes, put, lambda: None)

        for segment in segments:
            self._pool.call(64, lambda: 16, lambda segment=segment: upload(segment))  # type: ignore[misc]

    def forget(self, anchor_ids: Sequence[AnchorId]) -> None:
        """The pool lets go of what was not used for longest."""
