"""Where an agent's KV goes and comes from: peers, one central pool, or nobody. The same questions for all.

Every answer is a promise, kept in virtual time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvcomm_p2p.planning.costs import pull_s
from kvcomm_p2p.planning.finding import FoundDonors
from kvcomm_p2p.planning.landmarks import landmarks_of
from kvcomm_p2p.planning.parts import part_of
from kvcomm_p2p.planning.segments import Segment
from kvcomm_p2p.planning.spans import blocks_needed
from kvcomm_p2p.planning.types import Costs, Plan
from kvcomm_p2p.protocol import events as ev
from kvcomm_p2p.protocol.anchors import BLOCK_TOKENS, AnchorMeta, BlockHandle, BlockKey, HeldAnchor, Miss, MissReason
from kvcomm_p2p.protocol.events import AnchorTokens
from kvcomm_p2p.protocol.ids import AnchorId, NodeId
from kvcomm_p2p.protocol.lookup import Lookup, LookupResult
from kvcomm_p2p.sim.machine import SimNode
from kvcomm_p2p.sim.process import Promise, gather, kept
from kvcomm_p2p.sim.world import CONTENT_KEY, World

GROUP_BLOCKS = 16
"""Blocks per fetch, as the engine's puller groups them."""

TOKENS_DEADLINE_S = 1.0
REPLICA_BLOCKS_MIN = 2
DEADLINE_FACTOR = 6.0
DEADLINE_MIN_S = 2.0
BUSY_SHARE = 0.5
WAIT_LOST_MAX_S = 0.24
"""All of these as the engine's puller and publisher have them."""

Wanted = dict[NodeId, dict[BlockKey, tuple[AnchorMeta, int]]]


@dataclass(slots=True)
class Fetched:
    """What came for a plan. `handles`: blocks that are ours until `Fabric.keep`; `failed`: what did not come, and why."""

    handles: dict[BlockKey, BlockHandle] = field(default_factory=dict)
    anchors: dict[AnchorId, AnchorMeta] = field(default_factory=dict)
    token_ids: dict[AnchorId, npt.NDArray[np.uint32]] = field(default_factory=dict)
    digests: dict[BlockKey, bytes] = field(default_factory=dict)
    failed: dict[BlockKey, Miss] = field(default_factory=dict)
    kv_bytes: int = 0
    wait_lost_s: float = 0.0


class Fabric(Protocol):
    """What a SimAgent needs."""

    me: NodeId

    @property
    def now(self) -> float: ...

    def sleep(self, seconds: float) -> Promise[None]: ...

    def held(self, anchor_id: AnchorId) -> HeldAnchor | None: ...

    def find(self, lookup: Lookup) -> Promise[LookupResult]: ...

    def tokens(
        self, wanted: Sequence[tuple[NodeId, AnchorMeta]]
    ) -> Promise[list[tuple[AnchorTokens | Miss, float]]]: ...

    def fetch(self, plan: Plan, found: FoundDonors, costs: Costs) -> Promise[Fetched]: ...

    def keep(self, fetched: Fetched, used: Container[BlockKey]) -> None: ...

    def publish(self, segments: Sequence[Segment]) -> None: ...

    def forget(self, anchor_ids: Sequence[AnchorId]) -> None: ...


def digest_of(anchor_id: AnchorId, index: int) -> bytes:
    """In place of a SHA-256 of bytes that nobody has."""
    return hashlib.blake2b(anchor_id + index.to_bytes(2, "big"), digest_size=32).digest()


def wanted_of(plan: Plan) -> Wanted:
    """Blocks that a plan needs from each peer, in the order of the prompt."""
    wanted: Wanted = {}
    for span in plan.spans:
        if span.donor is not None and not span.donor.local:
            mine = wanted.setdefault(span.donor.holder, {})
            mine.update((BlockKey(anchor.anchor_id, index), (anchor, index)) for anchor, index in blocks_needed(span))
    return wanted


@dataclass(frozen=True, slots=True)
class _Limits:
    """How long a fetch may take, go without progress, and be put off by busy holders."""

    deadline_s: float
    stall_s: float
    busy_s: float


def _limits(wants: Mapping[BlockKey, tuple[AnchorMeta, int]], found: FoundDonors, costs: Costs) -> _Limits:
    """For everything that is wanted of one holder, as the engine's puller sets them."""
    kv_bytes = sum(anchor.block_bytes(index) for anchor, index in wants.values())
    tokens = sum(anchor.block_tokens(index) for anchor, index in wants.values())
    return _Limits(
        deadline_s=max(DEADLINE_MIN_S, DEADLINE_FACTOR * pull_s(costs, kv_bytes)),
        stall_s=max(WAIT_LOST_MAX_S - found.wait_lost_s, 0.0),
        busy_s=BUSY_SHARE * (costs.forward_s + tokens * costs.token_s),
    )


def local_anchors(plan: Plan) -> tuple[AnchorId, ...]:
    """Anchors of the own pool that a plan reads, sorted."""
    read = (span for span in plan.spans if span.donor is not None and span.donor.local)
    return tuple(sorted({anchor.anchor_id for span in read for anchor, _ in blocks_needed(span)}))


def local_failures(plan: Plan, held: Fabric) -> dict[BlockKey, Miss]:
    """Blocks of the own pool that have gone since the plan was made."""
    gone = Miss(MissReason.EVICTED, "evicted from the own pool between planning and reading")
    return {
        BlockKey(anchor.anchor_id, index): gone
        for span in plan.spans
        if span.donor is not None and span.donor.local
        for anchor, index in blocks_needed(span)
        if held.held(anchor.anchor_id) is None
    }


class PeerFabric:
    """The protocol itself: the agent's node in the World."""

    def __init__(self, world: World, machine: SimNode) -> None:
        self._world = world
        self._machine = machine
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
        return self._machine.node.held(anchor_id)

    def find(self, lookup: Lookup) -> Promise[LookupResult]:
        return self._world.look_up(self._machine, lookup)

    def tokens(self, wanted: Sequence[tuple[NodeId, AnchorMeta]]) -> Promise[list[tuple[AnchorTokens | Miss, float]]]:
        return gather(
            [self._world.ask_tokens(self._machine, holder, anchor, TOKENS_DEADLINE_S) for holder, anchor in wanted]
        )

    def fetch(self, plan: Plan, found: FoundDonors, costs: Costs) -> Promise[Fetched]:
        fetched = Fetched(failed=local_failures(plan, self))
        finished: Promise[Fetched] = Promise()
        used = local_anchors(plan)
        if used:
            self._world.handle(self._machine, ev.AnchorsUsed(used))
        pulls = []
        for holder, wants in wanted_of(plan).items():
            limits = _limits(wants, found, costs)
            items = list(wants.items())
            pulls += [
                self._fetch_group(holder, dict(items[at : at + GROUP_BLOCKS]), found, fetched, limits)
                for at in range(0, len(items), GROUP_BLOCKS)
            ]
        gather(pulls).then(lambda _: finished.resolve(fetched))
        return finished

    def _fetch_group(
        self,
        holder: NodeId,
        group: dict[BlockKey, tuple[AnchorMeta, int]],
        found: FoundDonors,
        fetched: Fetched,
        limits: _Limits,
    ) -> Promise[None]:
        done: Promise[None] = Promise()
        wants = []
        for key, (anchor, index) in group.items():
            detail = found.details[holder, anchor.anchor_id]
            fetched.anchors[anchor.anchor_id] = anchor
            fetched.token_ids[anchor.anchor_id] = detail.token_ids
            fetched.digests[key] = detail.digests[index]
            handle = self._world.new_handle(self._machine)
            wants.append(ev.Want(key, anchor.block_bytes(index), detail.digests[index], handle))

        def finish(answer: ev.FinishFetch) -> None:
            for block in answer.found:
                anchor, index = group[block.key]
                fetched.handles[block.key] = block.handle
                fetched.kv_bytes += anchor.block_bytes(index)
            fetched.failed.update((block.key, block.miss) for block in answer.missed)
            fetched.wait_lost_s = max(fetched.wait_lost_s, answer.wait_lost_s)
            done.resolve(None)

        anchors = {anchor.anchor_id: anchor for anchor, _ in group.values()}
        others = dict.fromkeys(peer for key in anchors for peer in found.holders.get(key, ()) if peer != holder)
        self._world.fetch(
            self._machine,
            (holder, *others),
            tuple(wants),
            finish,
            anchors=tuple(anchors.values()),
            deadline_s=limits.deadline_s,
            stall_s=limits.stall_s,
            busy_s=limits.busy_s,
        )
        return done

    def keep(self, fetched: Fetched, used: Container[BlockKey]) -> None:
        """Pulled blocks that were used become replicas, in pieces of consecutive blocks; the rest is let go."""
        for key in [key for key in fetched.handles if key not in used]:
            self._world.release(self._machine, fetched.handles.pop(key))
        for anchor in fetched.anchors.values():
            came = [index for index in range(anchor.blocks) if BlockKey(anchor.anchor_id, index) in fetched.handles]
            pieces = [
                [index for _, index in run] for _, run in groupby(enumerate(came), lambda pair: pair[1] - pair[0])
            ]
            for piece in pieces:
                if len(piece) >= min(REPLICA_BLOCKS_MIN, anchor.blocks):
                    self._world.publish(self._machine, (self._replica(anchor, piece, fetched),))
        for handle in fetched.handles.values():
            self._world.release(self._machine, handle)
        fetched.handles.clear()

    def _replica(self, anchor: AnchorMeta, indexes: list[int], fetched: Fetched) -> HeldAnchor:
        keys = [BlockKey(anchor.anchor_id, index) for index in indexes]
        token_ids = fetched.token_ids[anchor.anchor_id]
        start = anchor.start + indexes[0] * BLOCK_TOKENS
        end = min(anchor.start + (indexes[-1] + 1) * BLOCK_TOKENS, anchor.end)
        meta = part_of(anchor, token_ids, start, end, CONTENT_KEY)
        mine = token_ids[start - anchor.start : end - anchor.start]
        handles = tuple(fetched.handles.pop(key) for key in keys)
        landmarks = landmarks_of(mine, CONTENT_KEY, meta.fingerprints)
        return HeldAnchor(meta, mine, handles, tuple(fetched.digests[key] for key in keys), landmarks)

    def publish(self, segments: Sequence[Segment]) -> None:
        for segment in segments:
            meta = segment.meta
            if self.held(meta.anchor_id) is not None:
                self._world.handle(self._machine, ev.AnchorsUsed((meta.anchor_id,)))
                continue
            handles = tuple(self._world.new_handle(self._machine) for _ in range(meta.blocks))
            digests = tuple(digest_of(meta.anchor_id, index) for index in range(meta.blocks))
            self._world.publish(
                self._machine, (HeldAnchor(meta, segment.token_ids, handles, digests, segment.landmarks),)
            )

    def forget(self, anchor_ids: Sequence[AnchorId]) -> None:
        self._world.handle(self._machine, ev.AnchorsForgotten(tuple(anchor_ids)))


class OwnFabric:
    """Nobody else: what an agent has computed itself, within a budget of bytes. With `exact_only` rules this is the prefix
    cache that every serving engine has; with `keeps` False not even that."""

    def __init__(self, world: World, machine: SimNode, *, keeps: bool = True) -> None:
        self._peers = PeerFabric(world, machine)
        self._keeps = keeps
        self.me = machine.node_id

    @property
    def now(self) -> float:
        return self._peers.now

    def sleep(self, seconds: float) -> Promise[None]:
        return self._peers.sleep(seconds)

    def held(self, anchor_id: AnchorId) -> HeldAnchor | None:
        return self._peers.held(anchor_id)

    def find(self, lookup: Lookup) -> Promise[LookupResult]:
        return self._peers.find(lookup)

    def tokens(self, wanted: Sequence[tuple[NodeId, AnchorMeta]]) -> Promise[list[tuple[AnchorTokens | Miss, float]]]:
        return kept([(Miss(MissReason.NOT_FOUND), 0.0) for _ in wanted])

    def fetch(self, plan: Plan, found: FoundDonors, costs: Costs) -> Promise[Fetched]:
        return kept(Fetched(failed=local_failures(plan, self)))

    def keep(self, fetched: Fetched, used: Container[BlockKey]) -> None:
        """Nothing came from anybody."""

    def publish(self, segments: Sequence[Segment]) -> None:
        if self._keeps:
            self._peers.publish(segments)

    def forget(self, anchor_ids: Sequence[AnchorId]) -> None:
        self._peers.forget(anchor_ids)
