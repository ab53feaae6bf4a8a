"""Bookkeeping of the anchors that this node holds: budgets, eviction, leases, and who may see what.

Bytes are elsewhere: dropping an anchor here returns its handles, and the caller asks the driver to drop them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from kvcomm_p2p.protocol.anchors import HOPS_PUBLISHED_MAX, AnchorMeta, BlockHandle, HeldAnchor, Visibility
from kvcomm_p2p.protocol.ids import AnchorId
from kvcomm_p2p.protocol.messages import Put

FREQUENCY_BONUS_S = 60.0
"""Each doubling of the number of uses keeps an anchor as if it had been used this much later."""


@dataclass(slots=True)
class _Entry:
    held: HeldAnchor
    used_at: float
    uses: int = 1
    leases: int = 0

    @property
    def worth(self) -> float:
        return self.used_at + FREQUENCY_BONUS_S * math.log2(self.uses)


class Lease:
    """Protection of one held anchor from eviction. Harmless if the anchor is forgotten meanwhile."""

    __slots__ = ("_entry",)

    def __init__(self, entry: _Entry) -> None:
        self._entry: _Entry | None = entry

    def release(self) -> None:
        if self._entry is not None:
            self._entry.leases -= 1
            self._entry = None


@dataclass(frozen=True, slots=True)
class PoolChange:
    """What a change of the pool asks of others: handles to drop, anchors that are new, changed or gone.

    `added` and `removed` are in order of happening; a changed anchor is in both (removed first).
    """

    dropped: tuple[BlockHandle, ...] = ()
    added: tuple[AnchorMeta, ...] = ()
    removed: tuple[AnchorMeta, ...] = ()
    rejected: int = 0


def is_shared(meta: AnchorMeta) -> bool:
    """Whether peers may learn of it at all: not private, and not repaired too often."""
    return meta.visibility is not Visibility.PRIVATE and meta.hops <= HOPS_PUBLISHED_MAX


def may_see(meta: AnchorMeta, groups: Iterable[bytes]) -> bool:
    """Whether a peer whose record claims `groups` may learn of it and pull it."""
    return is_shared(meta) and (meta.visibility is Visibility.PUBLIC or meta.group in tuple(groups))


def stricter(old: AnchorMeta, new: AnchorMeta) -> AnchorMeta:
    """`old` with the visibility that satisfies both: two different groups have only "private" in common."""
    if old.visibility is Visibility.GROUP and new.visibility is Visibility.GROUP and old.group != new.group:
        return replace(old, visibility=Visibility.PRIVATE, group=b"")
    strictest = old if old.visibility >= new.visibility else new
    return replace(old, visibility=strictest.visibility, group=strictest.group)


def problem_of(anchor: HeldAnchor) -> str:
    """Why a held anchor contradicts itself, "" if it does not. Private and repaired anchors obey the same shape
    rules."""
    meta = anchor.meta
    public = replace(meta, visibility=Visibility.PUBLIC, group=b"") if meta.visibility is Visibility.PRIVATE else meta
    try:
        Put.of(1, public)
    except ValueError as error:
        return str(error)
    if len(anchor.token_ids) != meta.tokens:
        return "token_ids do not match start and end"
    if not len(anchor.handles) == len(anchor.digests) == meta.blocks:
        return "not one handle and one digest per block"
    return ""


class Pool:
    """Anchors held, within `bytes_max` and `anchors_max`. What is leased is never evicted (it may be forgotten)."""

    def __init__(self, bytes_max: int, anchors_max: int) -> None:
        self._bytes_max = bytes_max
        self._anchors_max = anchors_max
        self._entries: dict[AnchorId, _Entry] = {}
        self._heap: list[tuple[float, AnchorId]] = []
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, anchor_id: AnchorId) -> HeldAnchor | None:
        entry = self._entries.get(anchor_id)
        return None if entry is None else entry.held

    def metas(self) -> tuple[AnchorMeta, ...]:
        return tuple(entry.held.meta for entry in self._entries.values())

    def publish(self, anchors: Iterable[HeldAnchor], now: float) -> PoolChange:
        """Take anchors in, with one reference to each handle, evicting others to make room.

        Raises ValueError, and takes in nothing, if an anchor contradicts itself (our bug). An anchor that is held
        already: the old handles stay and the new ones are dropped, unless the new KV has fewer repairs behind it and the
        old is not leased; visibility becomes the strictest of both. One that finds no room, because all the rest is
        leased or it exceeds the budget by itself, is rejected.
        """
        dropped: list[BlockHandle] = []
        added: dict[AnchorId, AnchorMeta] = {}
        removed: list[AnchorMeta] = []
        rejected = 0
        anchors = tuple(anchors)
        for anchor in anchors:
            problem = problem_of(anchor)
            if problem:
                raise ValueError(f"published anchor {anchor.meta.anchor_id.hex()}: {problem}")
        for anchor in anchors:
            if anchor.meta.anchor_id in self._entries:
                self._merge(anchor, now, dropped, added, removed)
            elif self._make_room(anchor.meta.kv_bytes, dropped, added, removed):
                self._insert(_Entry(anchor, used_at=now))
                added[anchor.meta.anchor_id] = anchor.meta
            else:
                dropped += anchor.handles
                rejected += 1
        return PoolChange(tuple(dropped), tuple(added.values()), tuple(removed), rejected)

    def forget(self, anchor_ids: Iterable[AnchorId]) -> PoolChange:
        """Remove at once, leased or not. Unknown ids are ignored."""
        dropped: list[BlockHandle] = []
        removed: list[AnchorMeta] = []
        for anchor_id in anchor_ids:
            if anchor_id in self._entries:
                held = self._remove(anchor_id)
                dropped += held.handles
                removed.append(held.meta)
        return PoolChange(tuple(dropped), (), tuple(removed))

    def use(self, anchor_ids: Iterable[AnchorId], now: float) -> None:
        for anchor_id in anchor_ids:
            entry = self._entries.get(anchor_id)
            if entry is not None:
                entry.used_at = max(entry.used_at, now)
                entry.uses += 1

    def lease(self, anchor_id: AnchorId) -> Lease | None:
        """Protect a held anchor from eviction until the lease is released. None if it is not held. Leases count."""
        entry = self._entries.get(anchor_id)
        if entry is None:
            return None
        entry.leases += 1
        return Lease(entry)

    def _insert(self, entry: _Entry) -> None:
        meta = entry.held.meta
        self._entries[meta.anchor_id] = entry
        self.bytes += meta.kv_bytes
        heapq.heappush(self._heap, (entry.worth, meta.anchor_id))
        if len(self._heap) > 2 * len(self._entries) + 64:  # outdated items of anchors that were forgotten
            self._heap = [(entry.worth, anchor_id) for anchor_id, entry in self._entries.items()]
            heapq.heapify(self._heap)

    def _remove(self, anchor_id: AnchorId) -> HeldAnchor:
        held = self._entries.pop(anchor_id).held
        self.bytes -= held.meta.kv_bytes
        return held

    def _merge(
        self,
        new: HeldAnchor,
        now: float,
        dropped: list[BlockHandle],
        added: dict[AnchorId, AnchorMeta],
        removed: list[AnchorMeta],
    ) -> None:
        entry = self._entries[new.meta.anchor_id]
        old = entry.held
        better = new.meta.hops < old.meta.hops and not entry.leases and new.meta.kv_bytes == old.meta.kv_bytes
        kept, other = (new, old) if better else (old, new)
        dropped += other.handles
        entry.held = replace(kept, meta=stricter(kept.meta, other.meta))
        entry.used_at = max(entry.used_at, now)
        if entry.held.meta != old.meta:
            if added.pop(old.meta.anchor_id, None) is None:
                removed.append(old.meta)
            added[old.meta.anchor_id] = entry.held.meta

    def _make_room(
        self,
        kv_bytes: int,
        dropped: list[BlockHandle],
        added: dict[AnchorId, AnchorMeta],
        removed: list[AnchorMeta],
    ) -> bool:
        if kv_bytes > self._bytes_max:
            return False
        leased: list[tuple[float, AnchorId]] = []
        while self.bytes + kv_bytes > self._bytes_max or len(self._entries) >= self._anchors_max:
            victim = self._least_worthy(leased)
            if victim is None:
                break
            held = self._remove(victim)
            dropped += held.handles
            if added.pop(victim, None) is None:
                removed.append(held.meta)
        for item in leased:
            heapq.heappush(self._heap, item)
        return self.bytes + kv_bytes <= self._bytes_max and len(self._entries) < self._anchors_max

    def _least_worthy(self, leased: list[tuple[float, AnchorId]]) -> AnchorId | None:
        """The unleased anchor of least worth. The heap is lazy: worth only grows, so an outdated item is pushed
        again."""
        while self._heap:
            worth, anchor_id = heapq.heappop(self._heap)
            entry = self._entries.get(anchor_id)
            if entry is None:
                continue
            if entry.worth > worth:
                heapq.heappush(self._heap, (entry.worth, anchor_id))
            elif entry.leases:
                leased.append((worth, anchor_id))
            else:
                return anchor_id
        return None
