"""Where an agent's KV goes and comes from: peers, one central pool, or nobody. The same questions for all.

Every answer is a promise, kept in virtual time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvcomm_p2p.planning.fetches import (
    Limits,
    Wants,
    anchors_of,
    in_groups,
    limits_of,
    other_holders,
    own_blocks,
    peers_blocks,
    replica_pieces,
)
from kvcomm_p2p.planning.finding import FoundDonors
from kvcomm_p2p.planning.parts import replica_of
from kvcomm_p2p.planning.scouting import SCOUT_LIMITS, Look
from kvcomm_p2p.planning.segments import Segment
from kvcomm_p2p.planning.types import Costs, Donor, Int8From, Plan
from kvcomm_p2p.protocol import events as ev
from kvcomm_p2p.protocol.anchors import AnchorMeta, BlockHandle, BlockKey, HeldAnchor, Miss, MissReason
from kvcomm_p2p.protocol.events import AnchorTokens
from kvcomm_p2p.protocol.ids import AnchorId, NodeId
from kvcomm_p2p.protocol.lookup import Lookup, LookupResult
from kvcomm_p2p.sim.encoding import Int8
from kvcomm_p2p.sim.machine import SimNode
from kvcomm_p2p.sim.process import Promise, gather, kept
from kvcomm_p2p.sim.world import CONTENT_KEY, World

TOKENS_DEADLINE_S = 1.0
"""As the driver's."""


@dataclass(slots=True)
class Fetched:
    """What came for a plan. `handles`: blocks that are ours until `Fabric.keep` (what travelled as int8 is no replica, and has
    none); `failed`: what did not come, and why. `wire_bytes`: of KV as it travelled; `kv_bytes`: of the same blocks raw."""

    handles: dict[BlockKey, BlockHandle] = field(default_factory=dict)
    anchors: dict[AnchorId, AnchorMeta] = field(default_factory=dict)
    token_ids: dict[AnchorId, npt.NDArray[np.uint32]] = field(default_factory=dict)
    digests: dict[BlockKey, bytes] = field(default_factory=dict)
    failed: dict[BlockKey, Miss] = field(default_factory=dict)
    kv_bytes: int = 0
    wire_bytes: int = 0
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

    def int8(self, donors: Iterable[Donor]) -> Int8From: ...

    def fetch(self, plan: Plan, found: FoundDonors, costs: Costs) -> Promise[Fetched]: ...

    def look(self, look: Look, found: FoundDonors) -> Promise[Fetched]: ...

    def keep(self, fetched: Fetched, used: Container[BlockKey]) -> None: ...

    def publish(self, segments: Sequence[Segment]) -> None: ...

    def forget(self, anchor_ids: Sequence[AnchorId]) -> None: ...


def digest_of(anchor_id: AnchorId, index: int) -> bytes:
    """In place of a SHA-256 of bytes that nobody has."""
    return hashlib.blake2b(anchor_id + index.to_bytes(2, "big"), digest_size=32).digest()


def local_failures(plan: Plan, held: Fabric) -> dict[BlockKey, Miss]:
    """Blocks of the own pool that have gone since the plan was made."""
    gone = Miss(MissReason.EVICTED, "evicted from the own pool between planning and reading")
    return {key: gone for key in own_blocks(plan) if held.held(key.anchor_id) is None}


class PeerFabric:
    """The protocol itself: the agent's node in the World."""

    def __init__(self, world: World, machine: SimNode, int8: Int8 | None = None) -> None:
        """`int8`: None: nothing is asked for so."""
        self._world = world
        self._machine = machine
        self._int8 = int8
        self.me = machine.node_id

    @property
    def now(self) -> float:
        return self._world.now

    def sleep(self, seconds: float) -> Promise[None]:
        promise: Promise[None] = Promise()
        # Not in another life of the process, and, as long as it is frozen, not yet.
        wake = self._world.delivery(self._machine, lambda: promise.resolve(None))
        self._world.at(self._world.now + seconds, wake)
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
        used = sorted({key.anchor_id for key in own_blocks(plan)})
        if used:
            self._world.handle(self._machine, ev.AnchorsUsed(tuple(used)))
        pulls = []
        for (holder, encoded), wants in peers_blocks(plan).items():
            limits, int8 = limits_of(wants, found.wait_lost_s, costs), self._int8 if encoded else None
            pulls += [self._fetch_group(holder, group, found, fetched, limits, int8) for group in in_groups(wants)]
        gather(pulls).then(lambda _: finished.resolve(fetched))
        return finished

    def look(self, look: Look, found: FoundDonors) -> Promise[Fetched]:
        fetched = Fetched()
        finished: Promise[Fetched] = Promise()
        pull = self._fetch_group(look.donor.holder, look.wants, found, fetched, SCOUT_LIMITS, None)
        pull.then(lambda _: finished.resolve(fetched))
        return finished

    def int8(self, donors: Iterable[Donor]) -> Int8From:
        """Which of their holders send KV as int8."""
        if self._int8 is None:
            return Int8From()
        holders = dict.fromkeys(donor.holder for donor in donors if not donor.local)
        return Int8From(frozenset(filter(self._machine.node.encodes, holders)), self._int8.always)

    def _fetch_group(
        self,
        holder: NodeId,
        group: Wants,
        found: FoundDonors,
        fetched: Fetched,
        limits: Limits,
        int8: Int8 | None,
    ) -> Promise[None]:
        """`int8`: they travel so."""
        done: Promise[None] = Promise()
        wants = []
        for key, (anchor, index) in group.items():
            detail = found.details[holder, anchor.anchor_id]
            fetched.anchors[anchor.anchor_id] = anchor
            fetched.token_ids[anchor.anchor_id] = detail.token_ids
            fetched.digests[key] = detail.digests[index]
            handle = self._world.new_handle(self._machine)
            raw_bytes = anchor.block_bytes(index)
            if int8 is None:
                wants.append(ev.Want(key, raw_bytes, detail.digests[index], handle))
            else:
                wire_bytes = int8.layout.int8_bytes(anchor.block_tokens(index))
                wants.append(ev.Want(key, wire_bytes, detail.digests[index], handle, raw_bytes))

        def finish(answer: ev.FinishFetch) -> None:
            came_bytes = sum(group[block.key][0].block_bytes(group[block.key][1]) for block in answer.found)
            fetched.kv_bytes += came_bytes
            fetched.wire_bytes += sum(sizes[block.key] for block in answer.found)
            fetched.failed.update((block.key, block.miss) for block in answer.missed)
            fetched.wait_lost_s = max(fetched.wait_lost_s, answer.wait_lost_s)
            if int8 is None:
                fetched.handles.update((block.key, block.handle) for block in answer.found)
                done.resolve(None)
                return
            for block in answer.found:
                self._world.release(self._machine, block.handle)
            self.sleep(came_bytes / int8.decode_bytes_per_s).then(done.resolve)

        sizes = {want.key: want.kv_bytes for want in wants}

        self._world.fetch(
            self._machine,
            (holder, *other_holders(group, found, holder)),
            tuple(wants),
            finish,
            anchors=tuple(anchors_of(group).values()),
            deadline_s=limits.deadline_s,
            stall_s=limits.stall_s,
            busy_s=limits.busy_s,
        )
        return done

    def keep(self, fetched: Fetched, used: Container[BlockKey]) -> None:
        """Pulled blocks that were used become replicas, in pieces of consecutive blocks; the rest is let go."""
        for key in [key for key in fetched.handles if key not in used]:
            self._world.release(self._machine, fetched.handles.pop(key))
        for anchor, piece in replica_pieces(fetched.anchors, fetched.handles):
            self._world.publish(self._machine, (self._replica(anchor, piece, fetched),))
        for handle in fetched.handles.values():
            self._world.release(self._machine, handle)
        fetched.handles.clear()

    def _replica(self, anchor: AnchorMeta, indexes: list[int], fetched: Fetched) -> HeldAnchor:
        held = replica_of(anchor, fetched.token_ids[anchor.anchor_id], indexes, CONTENT_KEY)
        keys = [BlockKey(anchor.anchor_id, index) for index in indexes]
        handles = tuple(fetched.handles.pop(key) for key in keys)
        return HeldAnchor(
            held.meta, held.token_ids, handles, tuple(fetched.digests[key] for key in keys), held.landmarks
        )

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

    def look(self, look: Look, found: FoundDonors) -> Promise[Fetched]:
        return kept(Fetched())

    def int8(self, donors: Iterable[Donor]) -> Int8From:
        return Int8From()

    def keep(self, fetched: Fetched, used: Container[BlockKey]) -> None:
        """Nothing came from anybody."""

    def publish(self, segments: Sequence[Segment]) -> None:
        if self._keeps:
            self._peers.publish(segments)

    def forget(self, anchor_ids: Sequence[AnchorId]) -> None:
        self._peers.forget(anchor_ids)
