"""Nodes that share KV whose rows say themselves what they were made of (`taint_rows`).

Donors are found, planned, pulled, replanned, cut, published, pooled and replicated by the real code; only the model and
the network are played.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from planning_cases import COSTS, KEY, Tokens, joined
from taint_rows import EVERYBODY, LAYOUT, NODES, UNFILLED, Leak, Rows, Slab

from kvcomm_p2p.model.spec import ModelSpec
from kvcomm_p2p.net.driver import FetchResult, TokensResult
from kvcomm_p2p.planning import plan as planning
from kvcomm_p2p.planning import replan
from kvcomm_p2p.planning.chains import chain_hashes, group_tag
from kvcomm_p2p.planning.lineage import Lineage
from kvcomm_p2p.planning.segments import VisibilityMark
from kvcomm_p2p.planning.spans import blocks_needed
from kvcomm_p2p.planning.types import Mode, Plan, Provenance, Repair, ReuseRules, SpanKind
from kvcomm_p2p.protocol.anchors import (
    BLOCK_TOKENS,
    AnchorMeta,
    BlockHandle,
    BlockKey,
    HeldAnchor,
    KVLayout,
    Miss,
    MissReason,
    Visibility,
)
from kvcomm_p2p.protocol.directory import Directory
from kvcomm_p2p.protocol.events import AnchorTokens
from kvcomm_p2p.protocol.ids import AnchorId, ModelId, NodeId
from kvcomm_p2p.protocol.lookup import Lookup, LookupResult
from kvcomm_p2p.protocol.pool import Pool, PoolChange, may_see
from kvcomm_p2p.reuse import publish
from kvcomm_p2p.reuse.donors import DonorFinder
from kvcomm_p2p.reuse.pulling import Puller
from kvcomm_p2p.store import BlockStore

GROUPS = (("red",), ("red", "blue"), ("blue",))
"""Of each node."""

SPEC = ModelSpec("truth", ModelId(b"m" * 16), LAYOUT, 4096, None, "", "", None)
POOL_BYTES = LAYOUT.token_bytes * 2500
"""Little enough that anchors are evicted."""


class Everywhere(dict[Any, int]):
    """Enough is remembered of every kind, from the first position on."""

    def get(self, key: Any, default: Any = None) -> Any:
        return 0


RULES = {
    Mode.BALANCED: ReuseRules(True, "", repairs={each: (Repair(16, 0.15, shift=True),) for each in Provenance}),
    Mode.FAST: ReuseRules(
        True,
        "",
        repairs={each: (Repair(10),) for each in Provenance},
        interpolated_tokens=3,
        guard_probes=6,
        short={each: Repair(0, memory=True) for each in Provenance},
        short_from=Everywhere(),
    ),
}
RULES = {mode: replace(rules, int8_kl=0.0) for mode, rules in RULES.items()}
RULES[Mode.EXACT] = RULES[Mode.FAST]
INT8_COSTS = replace(COSTS, int8_share=0.3)

T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """Tokens of a prompt, and who may see them."""

    token_ids: Tokens
    visibility: Visibility = Visibility.PUBLIC
    group: str = ""


@dataclass(frozen=True)
class Fill:
    """One prompt at one node. `broken`: of the blocks it needs, so many in ten do not come. `strange`: memory knows nothing
    like its short runs. `widen`, `fall_back`: what the guard says. `answer`: tokens that are generated behind it. `int8`:
    peers send KV so."""

    node: int
    mode: Mode
    parts: tuple[Part, ...]
    broken: int = 0
    strange: bool = False
    widen: bool = False
    fall_back: bool = False
    answer: int = 0
    seed: int = 0
    int8: bool = False

    @property
    def token_ids(self) -> Tokens:
        return joined(*(part.token_ids for part in self.parts))


class Node:
    """One agent: pool, store and directory, and in place of `net.driver.Driver`."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.id = NodeId(bytes([number + 1]) * 16)
        self.groups = tuple(group_tag(name, KEY) for name in GROUPS[number])
        self.pool = Pool(POOL_BYTES, 200)
        self.store = BlockStore()
        self.directory = Directory(self.id)
        self.filling: tuple[Tokens, Rows] | None = None
        driver: Any = self
        lineage = Lineage()
        self.finder = DonorFinder(
            driver,
            lineage,
            me=self.id,
            spec=SPEC,
            vocabulary_size=50_000,
            content_key=KEY,
            clock=lambda: world.now_s,
        )
        self.puller = Puller(driver, self.store, LAYOUT, always_int8=True)
        self.publisher = publish.Publisher(driver, self.store, SPEC, lineage, KEY, Executor())

    async def find(self, lookup: Lookup) -> LookupResult:
        return self.directory.find(lookup, lambda *_: True)

    def held(self, anchor_id: AnchorId) -> HeldAnchor | None:
        return self.pool.get(anchor_id)

    def shown(self, anchor_id: AnchorId, asker: Node) -> HeldAnchor | None:
        """What this node gives another one."""
        held = self.pool.get(anchor_id)
        return held if held is not None and may_see(held.meta, asker.groups) else None

    async def tokens(self, holder: NodeId, anchor: AnchorMeta) -> TokensResult:
        held = self.world.by_id[holder].shown(anchor.anchor_id, self)
        if held is None:
            return TokensResult(Miss(MissReason.NOT_FOUND), 0.0)
        return TokensResult(AnchorTokens(anchor, holder, held.token_ids, held.digests), 0.0)

    async def fetch(
        self, holder: NodeId, blocks: Sequence[Any], deadline_s: float, stall_s: float, **more: Any
    ) -> FetchResult:
        found: dict[BlockKey, BlockHandle] = {}
        missed: dict[BlockKey, Miss] = {}
        peer = self.world.by_id[holder]
        for key, _, digest in blocks:
            held = peer.shown(key.anchor_id, self)
            self.world.note("int8", key in more.get("raw_bytes", ()))
            if held is None or held.digests[key.index] != digest or self.world.breaks():
                missed[key] = Miss(MissReason.STALLED)
            else:
                found[key] = self.store.put(memoryview(bytes(peer.store.view(held.handles[key.index]))))
        return FetchResult(found, missed, 0.0)

    def encodes(self, holder: NodeId) -> bool:
        return self.world.int8

    async def publish(self, anchors: Sequence[HeldAnchor]) -> None:
        for held in anchors:
            self._check_chains(held.meta)
        self._changed(self.pool.publish(anchors, self.world.now_s))

    async def touch(self, anchor_ids: Sequence[AnchorId]) -> None:
        self.pool.use(anchor_ids, self.world.now_s)

    async def forget(self, anchor_ids: Sequence[AnchorId]) -> None:
        self._changed(self.pool.forget(anchor_ids))

    def _changed(self, change: PoolChange) -> None:
        for node in self.world.nodes:
            for meta in change.removed:
                node.directory.remove(self.id, meta.anchor_id)
            for meta in change.added:
                if node is self or may_see(meta, node.groups):
                    node.directory.add(self.id, meta)
        for handle in change.dropped:
            self.store.drop(handle)

    def _check_chains(self, meta: AnchorMeta) -> None:
        """Of what was just filled, chain hashes name wholly exact prefixes only."""
        if self.filling is None:
            return
        token_ids, rows = self.filling
        hashes = chain_hashes(token_ids, KEY, SPEC.model_id)
        for at, chain in ((meta.start, meta.chain_start), (meta.end, meta.chain_end)):
            if chain and (at % BLOCK_TOKENS or chain != hashes[at // BLOCK_TOKENS - 1] or rows.hops[:at].any()):
                raise Leak(f"a chain hash at {at} of {meta}")


@dataclass
class World:
    """`nodes` that share what they may; `sequences` (node, token ids) that were filled, answers included; `plans` as they
    were carried out; `seen`: how often what happened."""

    nodes: list[Node] = field(default_factory=list)
    sequences: list[tuple[int, Tokens]] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    seen: dict[str, int] = field(default_factory=dict)
    now_s: float = 0.0
    _chances: np.random.Generator = field(default_factory=np.random.default_rng)
    _broken: int = 0
    int8: bool = False

    def __post_init__(self) -> None:
        self.nodes = [Node(self, number) for number in range(NODES)]
        self.by_id = {node.id: node for node in self.nodes}
        self._loop = _Loop()

    def close(self) -> None:
        self._loop.close()

    def breaks(self) -> bool:
        """Whether the next block does not come."""
        return bool(self._chances.integers(10) < self._broken)

    def do(self, fill: Fill) -> None:
        """Fill, answer and publish; then nobody may see more than they should. Raises Leak."""
        self.now_s += 50.0
        self._chances, self._broken = np.random.default_rng(fill.seed), fill.broken
        self.int8 = fill.int8
        self._loop.run_until_complete(self._fill(self.nodes[fill.node], fill))
        self.check()

    async def _fill(self, node: Node, fill: Fill) -> None:
        token_ids, marks, text = fill.token_ids, _marks(fill), _readers(fill)
        rules = RULES[fill.mode]
        found = await node.finder.find(token_ids)
        int8 = node.puller.int8(found.donors)
        plan = planning.make_plan(token_ids, found.donors, fill.mode, rules, INT8_COSTS, key=KEY, int8=int8)
        slab = Slab(fill.node, token_ids, text)
        local = node.puller.local(plan)
        for key in [key for key in local.blocks if self.breaks()]:
            local.failed[key] = Miss(MissReason.EVICTED)
            del local.blocks[key]
        pulled = await node.puller.pull(plan, found, COSTS, local, _nothing)
        slab.align(plan.spans, pulled.blocks)
        usable = replan.without_blocks(plan, pulled.failed, rules)
        done = _carry_out(slab, usable, pulled.blocks, fill, rules)
        if fill.fall_back and usable.runs:
            for run in usable.runs:
                for anchor in run.donor.anchors:
                    node.finder.distrust(run.donor.holder, anchor.anchor_id)
        rows = slab.end()
        self._check_filled(fill.mode, done, rows)
        used = {BlockKey(anchor.anchor_id, i) for span in done.spans for anchor, i in blocks_needed(span)}
        node.puller.release(pulled, [key for key in pulled.handles if key not in used])
        await node.publisher.replicas(pulled)
        await self._publish(node, fill, done, rows, marks)
        self._note(done, rows, replicas=bool(pulled.remote))

    async def _publish(self, node: Node, fill: Fill, plan: Plan, rows: Rows, marks: list[VisibilityMark]) -> None:
        node.filling = fill.token_ids, rows
        published = await node.publisher.prompt(fill.token_ids, rows.slab(), plan, marks)
        whole = joined(fill.token_ids, np.random.default_rng(fill.seed).integers(0, 50_000, fill.answer))
        self.sequences.append((fill.node, whole))
        if fill.answer:
            longer = Slab(fill.node, whole, np.pad(_readers(fill), (0, fill.answer), constant_values=EVERYBODY))
            for name in ("hops", "readers", "prefix"):
                getattr(longer.rows, name)[: plan.tokens] = getattr(rows, name)
            longer.compute(plan.tokens)
            node.filling = whole, longer.end()
            await node.publisher.answer(whole, longer.rows.slab(), plan, marks, published)
        node.filling = None

    def _check_filled(self, mode: Mode, plan: Plan, rows: Rows) -> None:
        if (rows.hops == UNFILLED).any():
            raise Leak("rows that nobody filled")
        if rows.hops.max() > 2:
            raise Leak(f"what was repaired {rows.hops.max() - 1} times was moved once more")
        kinds = {span.kind for span in plan.spans}
        if mode is Mode.EXACT and (rows.hops.any() or kinds - {SpanKind.EXACT, SpanKind.RECOMPUTE}):
            raise Leak(f"exact mode used {sorted(kinds)}, {rows.hops.max()} repairs")

    def check(self) -> None:
        """Everything that anybody holds claims at least its taint, and is shown to those only who may see all of it."""
        for node in self.nodes:
            for meta in node.pool.metas():
                self._check_held(node, meta)

    def _check_held(self, node: Node, meta: AnchorMeta) -> None:
        held = node.pool.get(meta.anchor_id)
        assert held is not None
        blocks = [Rows.of_block(node.store.view(handle), meta.block_tokens(i)) for i, handle in enumerate(held.handles)]
        hops = max(int(rows.hops.max()) for rows in blocks)
        readers = int(np.bitwise_and.reduce([rows.join(slice(None))[1] for rows in blocks]))
        if meta.hops < hops:
            raise Leak(f"{meta.hops} repairs claimed, {hops} done: {meta}")
        for peer in self.nodes:
            if peer is not node and may_see(meta, peer.groups):
                if hops > 1:
                    raise Leak(f"a chain of {hops} repairs is shown: {meta}")
                if not readers >> peer.number & 1:
                    raise Leak(f"node {peer.number} is shown what depends on what it may not see: {meta}")

    def _note(self, plan: Plan, rows: Rows, *, replicas: bool) -> None:
        """So that a test can see that histories are not dull."""
        notes = [f"hops {rows.hops.max()}", *(f"{span.kind.value}" for span in plan.spans), *["replicas"] * replicas]
        notes += ["interpolated" for span in plan.spans if span.kind is SpanKind.REUSE and span.donor is None]
        notes += ["shifted" for span in plan.spans if span.shift]
        notes += ["corrected" for run in plan.runs if run.repair.memory]
        self.plans.append(plan)
        for each in notes:
            self.note(each)

    def note(self, what: str, happened: bool = True) -> None:
        """Count it."""
        if happened:
            self.seen[what] = self.seen.get(what, 0) + 1


def worn(data: memoryview, layout: KVLayout, tokens: int) -> memoryview:
    """In place of `net.encoding.decode`: what travelled as int8 has one more repair behind it."""
    numbers = np.frombuffer(data, "<f4").copy()
    numbers[:tokens] += 1
    return memoryview(numbers.tobytes())


def _carry_out(slab: Slab, plan: Plan, blocks: Mapping[BlockKey, memoryview], fill: Fill, rules: ReuseRules) -> Plan:
    """Repair, and what the guard says of it; the plan that came of it."""
    if fill.strange:
        miss = Miss(MissReason.DIVERGENCE)
        plan = replan.without_runs(plan, {n: miss for n, run in enumerate(plan.runs, 1) if run.repair.memory})
    slab.repair(plan, 0)
    if fill.widen and plan.runs:
        since = min(span.start for span in plan.spans if span.run)
        plan = replan.widened(plan, 4, rules)
        slab.align([span for span in plan.spans if span.kind is SpanKind.REUSE], blocks)
        slab.repair(plan, since)
    if fill.fall_back and plan.runs:
        plan, exact = replan.only_exact(plan, "the guard said so")
        slab.compute(exact)
    return plan


def _marks(fill: Fill) -> list[VisibilityMark]:
    marks, at = [], 0
    for part in fill.parts:
        if part.visibility is not Visibility.PUBLIC:
            marks.append(VisibilityMark(at, part.visibility, group_tag(part.group, KEY) if part.group else b""))
        at += len(part.token_ids)
    return marks


def _readers(fill: Fill) -> npt.NDArray[np.int64]:
    """Bit set per token of those who may read it as a word."""
    readers = []
    for part in fill.parts:
        members = sum(1 << number for number, groups in enumerate(GROUPS) if part.group in groups)
        who = {Visibility.PUBLIC: EVERYBODY, Visibility.GROUP: members, Visibility.PRIVATE: 1 << fill.node}
        readers.append(np.full(len(part.token_ids), who[part.visibility]))
    return np.concatenate(readers)


async def _nothing(_: object) -> None:
    pass


class _Loop(asyncio.SelectorEventLoop):
    """Everything in one thread."""

    def run_in_executor(self, executor: Any, call: Callable[..., T], *args: Any) -> Any:
        future = self.create_future()
        future.set_result(call(*args))
        return future
