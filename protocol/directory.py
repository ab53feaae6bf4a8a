"""The index: which anchors share a prefix or fingerprints with a prompt or resemble it, and who holds them.

One row per (holder, anchor). Fingerprints of all rows lie in one sorted array with the row of each beside it, and a
small unsorted tail that is merged in when it has grown; rows that died are skipped until the next merge takes them out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from kvcomm_p2p.protocol.anchors import AnchorMeta, MissReason
from kvcomm_p2p.protocol.ids import AnchorId, ChainHash, NodeId, SequenceId
from kvcomm_p2p.protocol.lookup import AnchorHit, Lookup, LookupResult
from kvcomm_p2p.protocol.similar import VALUE_BITS, SimilarIndex

TAIL_MIN = 4096
"""Fingerprints that may wait unsorted, whatever the size of the sorted part (otherwise an eighth of it)."""

ROWS_PER_KEY_MAX = 1024
"""Rows looked at per chain hash, fingerprint or sketch: a hostile peer that claims one everywhere cannot make lookups slow."""

HOLDERS_PER_ANCHOR_MAX = 4
"""Hits per anchor, so that one that everybody holds does not crowd out the others."""

_U32 = npt.NDArray[np.uint32]
_Rows = npt.NDArray[np.int64]
_Key = TypeVar("_Key")
_Places: TypeAlias = int | dict[int, None]
"""Rows of one key. Most have one, which takes a quarter of a dictionary's memory."""


class _Row(NamedTuple):
    holder: NodeId
    meta: AnchorMeta


class Directory:
    """Anchors of this node (`me`) and of its peers. `added` counts additions since the beginning."""

    def __init__(self, me: NodeId) -> None:
        self._me = me
        self._rows: dict[int, _Row] = {}
        self._next_row = 0
        self._of_holder: dict[NodeId, dict[AnchorId, int]] = {}
        self._of_chain: dict[ChainHash, _Places] = {}
        self._of_sequence: dict[tuple[NodeId, SequenceId], _Places] = {}
        self._contents = _Contents()
        self._values: _U32 = np.empty(0, np.uint32)
        self._value_rows: _Rows = np.empty(0, np.int64)
        self._unread: list[tuple[int, bytes]] = []
        """Row and fingerprints of what was added since anybody looked for fingerprints."""
        self._tail: list[tuple[_U32, _Rows]] = []
        self._tail_size = 0
        self._joined_tail: tuple[_U32, _Rows] | None = None
        self._dead_size = 0
        self.added = 0

    def __len__(self) -> int:
        return len(self._rows)

    def count(self, holder: NodeId) -> int:
        return len(self._of_holder.get(holder, ()))

    def add(self, holder: NodeId, meta: AnchorMeta) -> None:
        """`holder` has this anchor; replaces what was known of it there."""
        self.add_all(holder, (meta,))

    def add_all(self, holder: NodeId, metas: Sequence[AnchorMeta]) -> None:
        """`holder` has these anchors; replaces what was known of them there."""
        for meta in metas:
            self.remove(holder, meta.anchor_id)
            row, self._next_row = self._next_row, self._next_row + 1
            self._rows[row] = _Row(holder, meta)
            self._of_holder.setdefault(holder, {})[meta.anchor_id] = row
            _insert(self._of_sequence, (holder, meta.sequence_id), row)
            if meta.chain_end:
                _insert(self._of_chain, meta.chain_end, row)
            if meta.content:
                self._contents.add(row, meta)
            if meta.fingerprints:
                self._unread.append((row, meta.fingerprints))
                self._tail_size += len(meta.fingerprints) // 4
        self.added += len(metas)
        if self._tail_size > max(TAIL_MIN, self._values.size // 8):
            self._merge()

    def remove(self, holder: NodeId, anchor_id: AnchorId) -> None:
        """Ignored if unknown."""
        rows = self._of_holder.get(holder)
        row = rows.pop(anchor_id, None) if rows is not None else None
        if row is None:
            return
        if not rows:
            del self._of_holder[holder]
        meta = self._rows.pop(row).meta
        _discard(self._of_sequence, (holder, meta.sequence_id), row)
        if meta.chain_end:
            _discard(self._of_chain, meta.chain_end, row)
        if meta.content:
            self._contents.remove(row, meta)
        self._dead_size += len(meta.fingerprints) // 4
        if self._dead_size > max(TAIL_MIN, self._values.size // 2):
            self._merge()

    def remove_holder(self, holder: NodeId) -> None:
        for anchor_id in tuple(self._of_holder.get(holder, ())):
            self.remove(holder, anchor_id)

    def find(
        self,
        lookup: Lookup,
        usable: Callable[[NodeId, AnchorMeta], bool],
        also: Sequence[Directory] = (),
        near: NodeId | None = None,
    ) -> LookupResult:
        """Hits as `LookupResult` describes them, of rows for which `usable(holder, meta)` holds, here and in `also`; what
        several know of one holder's anchor is taken from the first.

        At most `anchors_max` different anchors, at most HOLDERS_PER_ANCHOR_MAX holders of each (our own copy, then
        those whose id is nearest to ours, or to `near`, by exclusive or, so that different nodes prefer different holders).
        """
        hits: dict[tuple[NodeId, AnchorId], AnchorHit] = {}
        foreign = False
        for directory in (self, *also):
            found, others = directory._hits(lookup, usable)
            foreign = foreign or others
            for hit in found:
                hits.setdefault((hit.holder, hit.meta.anchor_id), hit)
        chosen = self._choose(list(hits.values()), lookup.anchors_max, self._me if near is None else near)
        taken = {(hit.holder, hit.meta.anchor_id) for hit in chosen}
        chosen += [hit for each in (self, *also) for hit in each._neighbours(tuple(chosen), taken, lookup, usable)]
        chosen.sort(key=self._rank)
        miss = None if chosen else MissReason.MODEL_MISMATCH if foreign else MissReason.NOT_FOUND
        return LookupResult(tuple(chosen), miss)

    def _hits(self, lookup: Lookup, usable: Callable[[NodeId, AnchorMeta], bool]) -> tuple[list[AnchorHit], bool]:
        """All hits here, and whether anchors of other models would have been hit."""
        prefix: dict[int, int] = {}
        for chain in lookup.chains:
            for row in _first(_rows_of(self._of_chain, chain), ROWS_PER_KEY_MAX):
                prefix[row] = self._rows[row].meta.end
        matches = self._count_matches(lookup.fingerprints)
        similar = self._contents.near(lookup.sketches, lookup.sketch_bits_max)
        hits: list[AnchorHit] = []
        foreign = False
        for row in {**prefix, **matches, **similar}:
            holder, meta = self._rows[row]
            if meta.model_id != lookup.model_id:
                foreign = foreign or usable(holder, meta)
            elif usable(holder, meta):
                hits.append(AnchorHit(meta, holder, matches.get(row, 0), prefix.get(row, 0), similar.get(row)))
        return hits, foreign

    def _count_matches(self, fingerprints: _U32) -> dict[int, int]:
        """Row -> number of `fingerprints` in it, for live rows, ascending by row."""
        wanted = np.unique(np.asarray(fingerprints, np.uint32))
        first = np.searchsorted(self._values, wanted, "left")
        counts = np.minimum(np.searchsorted(self._values, wanted, "right") - first, ROWS_PER_KEY_MAX)
        offsets = np.repeat(first - (np.cumsum(counts) - counts), counts)
        tail_values, tail_rows = self._join_tail()
        found = (self._value_rows[offsets + np.arange(offsets.size)], tail_rows[np.isin(tail_values, wanted)])
        rows, sizes = np.unique(np.concatenate(found), return_counts=True)
        return {row: size for row, size in zip(rows.tolist(), sizes.tolist(), strict=True) if row in self._rows}

    def _rank(self, hit: AnchorHit) -> tuple[int, int, int, bool, bytes, bytes]:
        bits = VALUE_BITS + 1 if hit.similar_bits is None else hit.similar_bits
        return -hit.prefix_tokens, -hit.matches, bits, hit.holder != self._me, hit.meta.anchor_id, hit.holder

    def _choose(self, hits: list[AnchorHit], anchors_max: int, near: NodeId) -> list[AnchorHit]:
        hits.sort(key=self._rank)
        by_anchor: dict[AnchorId, list[AnchorHit]] = {}
        for hit in hits:
            if hit.meta.anchor_id in by_anchor:
                by_anchor[hit.meta.anchor_id].append(hit)
            elif len(by_anchor) < anchors_max:
                by_anchor[hit.meta.anchor_id] = [hit]
        chosen: list[AnchorHit] = []
        for copies in by_anchor.values():
            copies.sort(key=lambda hit: _distance(near, hit.holder))
            chosen += copies[:HOLDERS_PER_ANCHOR_MAX]
        return chosen

    def _neighbours(
        self,
        hits: Sequence[AnchorHit],
        taken: set[tuple[NodeId, AnchorId]],
        lookup: Lookup,
        usable: Callable[[NodeId, AnchorMeta], bool],
    ) -> list[AnchorHit]:
        """Anchors that touch a hit in its sequence at its holder and are not `taken`; they are from now on."""
        found: list[AnchorHit] = []
        for hit in hits:
            rows = _rows_of(self._of_sequence, (hit.holder, hit.meta.sequence_id))
            for row in _first(rows, ROWS_PER_KEY_MAX):
                holder, meta = self._rows[row]
                touches = meta.end == hit.meta.start or meta.start == hit.meta.end
                if not touches or meta.model_id != lookup.model_id or (holder, meta.anchor_id) in taken:
                    continue
                if usable(holder, meta):
                    taken.add((holder, meta.anchor_id))
                    found.append(AnchorHit(meta, holder, 0, 0))
        return found

    def _read(self) -> None:
        """What is unread becomes one more piece of the tail: many rows at once cost little more than one."""
        unread, self._unread = self._unread, []
        first = unread[0][0]
        values = np.frombuffer(b"".join([fingerprints for _, fingerprints in unread]), "<u4")
        rows = np.repeat([row - first for row, _ in unread], [len(fingerprints) // 4 for _, fingerprints in unread])
        both = rows.astype(np.uint64) << np.uint64(32) | values
        if not (both[1:] > both[:-1]).all():  # peers are asked for ascending ones, and need not comply
            both = np.unique(both)
        self._tail.append((both.astype(np.uint32), (both >> np.uint64(32)).astype(np.int64) + first))
        self._joined_tail = None

    def _join_tail(self) -> tuple[_U32, _Rows]:
        if self._unread:
            self._read()
        if self._joined_tail is None:
            values = [self._values[:0], *(values for values, _ in self._tail)]
            rows = [self._value_rows[:0], *(rows for _, rows in self._tail)]
            self._joined_tail = np.concatenate(values), np.concatenate(rows)
        return self._joined_tail

    def _merge(self) -> None:
        """Sort the tail into the array and drop dead rows."""
        tail_values, tail_rows = self._join_tail()
        values, rows = self._values, self._value_rows
        if self._dead_size:
            (values, rows), (tail_values, tail_rows) = self._alive(values, rows), self._alive(tail_values, tail_rows)
        order = np.argsort(tail_values, kind="stable")
        tail_values, tail_rows = tail_values[order], tail_rows[order]
        places = np.searchsorted(values, tail_values, "right")  # rows of the tail are higher: behind equal values
        self._values, self._value_rows = np.insert(values, places, tail_values), np.insert(rows, places, tail_rows)
        self._tail, self._tail_size, self._dead_size, self._joined_tail = [], 0, 0, None

    def _alive(self, values: _U32, rows: _Rows) -> tuple[_U32, _Rows]:
        alive = np.isin(rows, np.fromiter(self._rows, np.int64, len(self._rows)))
        return values[alive], rows[alive]


class _Contents:
    """Rows by similar content. An anchor is searched once, however many peers hold it; one whose content a peer tells
    differently counts as another, so that a false claim hides no true one.
    """

    def __init__(self) -> None:
        self._index = SimilarIndex()
        self._entry_of: dict[tuple[AnchorId, int], int] = {}
        self._shared: dict[int, dict[int, None]] = {}
        """Rows of an entry that is, or was, held by several; each other entry is its own only row."""

    def add(self, row: int, meta: AnchorMeta) -> None:
        """`row` is higher than all before it."""
        # The first row of a content names it in the index, also when that row has gone.
        entry = self._entry_of.setdefault((meta.anchor_id, meta.content), row)
        if entry == row:
            self._index.add(meta.content, entry)
        else:
            self._shared.setdefault(entry, {entry: None})[row] = None

    def remove(self, row: int, meta: AnchorMeta) -> None:
        entry = self._entry_of[meta.anchor_id, meta.content]
        rows = self._shared.get(entry)
        if rows is not None:
            del rows[row]
        if not rows:
            self._shared.pop(entry, None)
            del self._entry_of[meta.anchor_id, meta.content]
            self._index.remove(entry)

    def near(self, sketches: Iterable[int], bits_max: int) -> dict[int, int]:
        """Row -> bits to the nearest of `sketches`, for rows at most `bits_max` from one."""
        found: dict[int, int] = {}
        for sketch in sketches:
            contents = self._index.search(sketch, bits_max, limit=ROWS_PER_KEY_MAX)
            rows = ((row, bits) for entry, bits in contents for row in self._shared.get(entry, (entry,)))
            for row, bits in islice(rows, ROWS_PER_KEY_MAX):
                found[row] = min(bits, found.get(row, bits))
        return found


def _distance(a: NodeId, b: NodeId) -> int:
    return int.from_bytes(a, "big") ^ int.from_bytes(b, "big")


def _first(rows: Iterable[int], count: int) -> list[int]:
    return [row for row, _ in zip(rows, range(count), strict=False)]


def _insert(index: dict[_Key, _Places], key: _Key, row: int) -> None:
    known = index.get(key)
    if known is None:
        index[key] = row
    elif isinstance(known, int):
        index[key] = {known: None, row: None}
    else:
        known[row] = None


def _rows_of(index: Mapping[_Key, _Places], key: _Key) -> Iterable[int]:
    known = index.get(key)
    return () if known is None else (known,) if isinstance(known, int) else known


def _discard(index: dict[_Key, _Places], key: _Key, row: int) -> None:
    known = index[key]
    if not isinstance(known, int):
        del known[row]
    if isinstance(known, int) or not known:
        del index[key]
