"""Similar fingerprints: every 64-bit value within a Hamming distance of the one asked for, exactly, among a million.

New values lie in an unsorted tail that is searched by scanning; when it is full it is merged into the main part, which
has four tables of the values by 16 of their bits each. Values at most r bits apart that differ by more than f_i bits in
every piece i would differ by at least sum(f_i + 1) bits; so with sum(f_i + 1) = r + 1, some piece differs by f_i bits or
fewer, and the buckets of all keys within f_i flips hold every answer (multi-index hashing: Norouzi, Punjani, Fleet 2012,
with uneven flips). For 9 bits that is (2, 2, 1, 1): 308 buckets, 0.5 % of a million random values. Where the buckets hold
too much, because the radius is wide or the bits are skewed, the main part is scanned too.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

VALUE_BITS = 64
ENTRY_MAX = 2**56 - 1

TAIL_MIN = 65_536
"""Values that may wait in the tail, whatever the size of the main part (otherwise a sixteenth of it). A scan of so many
takes about 0.05 ms.
"""

_PIECES = 4
_PIECE_BITS = VALUE_BITS // _PIECES
_FLIPS_MAX = 3
_SCAN_VALUES = 65_536
"""Values per step of a scan: temporaries of 0.6 MB stay in the cache (measured fastest of 4k to 64k)."""

_SCANNED_PER_CANDIDATE = 16
"""A value in a bucket, or a bucket, costs as much as scanning about this many values."""

_U64 = npt.NDArray[np.uint64]
_Numbers = npt.NDArray[np.int64]


class _Main(NamedTuple):
    """Values [N] by ascending entry, which of them are still held, and the tables one after the other.

    Table i holds all N values and their slots (places in `values`), ordered by piece i of the value: those with piece p
    from `starts[i << 16 | p]` up to the next start.
    """

    entries: _Numbers
    values: _U64
    alive: npt.NDArray[np.bool_]
    starts: npt.NDArray[np.int64]
    table_values: _U64
    table_slots: npt.NDArray[np.uint32]


class SimilarIndex:
    """Pairs (value, entry): `value` an unsigned 64-bit fingerprint, `entry` whatever number the caller knows it by.

    Memory: 67 bytes per pair of the main part (briefly twice that while merging), about 150 per pair of the tail, and 3 MB
    for starts and temporaries once there is a main part. Removed pairs keep theirs until a quarter of the main part (at
    least TAIL_MIN) has gone. One addition in TAIL_MIN (or in a sixteenth of a larger index) merges, which takes about 0.15
    s at a million pairs; every other takes microseconds.
    """

    def __init__(self) -> None:
        self._tail_of: dict[int, int] = {}
        self._tail_values: _U64 = np.empty(16, np.uint64)
        self._tail_entries: _Numbers = np.empty(16, np.int64)
        self._main = _main(np.empty(0, np.int64), np.empty(0, np.uint64))
        self._dead = 0
        self._differing: _U64 = np.empty(0, np.uint64)
        self._distances: npt.NDArray[np.uint8] = np.empty(0, np.uint8)

    def __len__(self) -> int:
        return len(self._tail_of) + len(self._main.entries) - self._dead

    def add(self, value: int, entry: int) -> None:
        """Hold `value` (0 <= value < 2**64) as `entry` (0 <= entry <= ENTRY_MAX).

        Raises ValueError for numbers out of range and for an entry that is held already.
        """
        if not 0 <= value < 1 << VALUE_BITS or not 0 <= entry <= ENTRY_MAX:
            raise ValueError(f"value {value} or entry {entry} is out of range")
        if entry in self._tail_of or self._slot(entry) is not None:
            raise ValueError(f"entry {entry} is held already")
        size = len(self._tail_of)
        if size == len(self._tail_values):
            self._tail_values = np.resize(self._tail_values, 2 * size)
            self._tail_entries = np.resize(self._tail_entries, 2 * size)
        self._tail_values[size] = value
        self._tail_entries[size] = entry
        self._tail_of[entry] = size
        if size + 1 > max(TAIL_MIN, len(self._main.entries) // 16):
            self._merge()

    def remove(self, entry: int) -> None:
        """Ignored if it is not held."""
        at = self._tail_of.pop(entry, None)
        if at is not None:
            last = len(self._tail_of)
            if at != last:
                moved = int(self._tail_entries[last])
                self._tail_values[at], self._tail_entries[at] = self._tail_values[last], moved
                self._tail_of[moved] = at
            return
        slot = self._slot(entry)
        if slot is not None:
            self._main.alive[slot] = False
            self._dead += 1
            if self._dead > max(TAIL_MIN, len(self._main.entries) // 4):
                self._merge()

    def search(self, value: int, bits_max: int, limit: int | None = None) -> list[tuple[int, int]]:
        """(entry, Hamming distance) of every held value at most `bits_max` (0 to 64) bits from `value`: the nearest
        first, then by entry; the first `limit` of them.

        Raises ValueError for a value or distance out of range.
        """
        if not 0 <= value < 1 << VALUE_BITS or not 0 <= bits_max <= VALUE_BITS:
            raise ValueError(f"value {value} or distance {bits_max} is out of range")
        wanted = np.uint64(value)
        size = len(self._tail_of)
        places = self._scan(self._tail_values[:size], wanted, bits_max)
        ranked = _ranked(self._tail_values[places] ^ wanted, self._tail_entries[places])
        main = self._main
        if len(main.entries):
            found = _from_tables(main, value, bits_max)
            slots = self._scan(main.values, wanted, bits_max) if found is None else found
            slots = slots[main.alive[slots]]
            ranked = np.concatenate((ranked, _ranked(main.values[slots] ^ wanted, main.entries[slots])))
        if limit is not None and 0 < limit < len(ranked):
            ranked = np.partition(ranked, limit - 1)
        ranked = np.sort(ranked[:limit] if limit is None else ranked[: max(limit, 0)])
        return [(each & ENTRY_MAX, each >> ENTRY_MAX.bit_length()) for each in ranked.tolist()]

    def _scan(self, values: _U64, wanted: np.uint64, bits_max: int) -> npt.NDArray[np.intp]:
        """Places in `values` within `bits_max` of `wanted`, ascending."""
        step = min(len(values), _SCAN_VALUES)
        if step > len(self._differing):
            self._differing, self._distances = np.empty(step, np.uint64), np.empty(step, np.uint8)
        found = [np.empty(0, np.intp)]
        for at in range(0, len(values), _SCAN_VALUES):
            part = values[at : at + _SCAN_VALUES]
            differing, distances = self._differing[: len(part)], self._distances[: len(part)]
            np.bitwise_xor(part, wanted, out=differing)
            np.bitwise_count(differing, out=distances)
            near = np.flatnonzero(distances <= bits_max)
            if near.size:
                found.append(near + at)
        return np.concatenate(found)

    def _slot(self, entry: int) -> int | None:
        """Where the main part holds `entry`."""
        entries = self._main.entries
        if not len(entries) or entry > entries[-1]:
            return None
        slot = int(np.searchsorted(entries, entry))
        return slot if slot < len(entries) and entries[slot] == entry and self._main.alive[slot] else None

    def _merge(self) -> None:
        """Move the tail into the main part and drop what was removed."""
        main, size = self._main, len(self._tail_of)
        entries = np.concatenate((main.entries[main.alive], self._tail_entries[:size]))
        values = np.concatenate((main.values[main.alive], self._tail_values[:size]))
        order = np.argsort(entries, kind="stable")
        self._main, self._dead = _main(entries[order], values[order]), 0
        self._tail_of = {}
        self._tail_values, self._tail_entries = np.empty(16, np.uint64), np.empty(16, np.int64)


def _main(entries: _Numbers, values: _U64) -> _Main:
    """The main part of these pairs; `entries` ascending."""
    count = len(entries)
    table_values = np.empty(_PIECES * count, np.uint64)
    table_slots = np.empty(_PIECES * count, np.uint32)
    sizes = np.zeros((_PIECES, 1 << _PIECE_BITS) if count else (0, 0), np.int64)
    for table in range(len(sizes)):
        pieces = (values >> np.uint64(_PIECE_BITS * table)).astype(np.uint16)
        order = np.argsort(pieces, kind="stable")
        table_slots[table * count : (table + 1) * count] = order
        table_values[table * count : (table + 1) * count] = values[order]
        sizes[table] = np.bincount(pieces, minlength=1 << _PIECE_BITS)
    starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes)))
    return _Main(entries, values, np.ones(count, np.bool_), starts, table_values, table_slots)


def _from_tables(main: _Main, value: int, bits_max: int) -> npt.NDArray[np.intp] | None:
    """Slots of all values within `bits_max` of `value`, removed ones among them, ascending; None where a scan is
    cheaper.
    """
    probes = _probes(bits_max)
    affordable = len(main.entries) // _SCANNED_PER_CANDIDATE
    if probes is None or len(probes.keys) > affordable:
        return None
    pieces = [value >> (_PIECE_BITS * table) & ((1 << _PIECE_BITS) - 1) for table in range(_PIECES)]
    buckets = probes.keys ^ np.repeat(np.array(pieces, np.intp), probes.per_table)
    firsts = main.starts[buckets]
    sizes = main.starts[buckets + 1] - firsts
    ends = np.cumsum(sizes)
    if len(probes.keys) + int(ends[-1]) > affordable:
        return None
    places = np.arange(ends[-1]) + np.repeat(firsts - ends + sizes, sizes)
    near = np.bitwise_count(main.table_values[places] ^ np.uint64(value)) <= bits_max
    return np.unique(main.table_slots[places[near]]).astype(np.intp)


class _Probes(NamedTuple):
    """Bucket numbers (`table << 16 | piece`) to look into for a value of zeros, by table, and how many per table."""

    keys: npt.NDArray[np.intp]
    per_table: npt.NDArray[np.intp]


@lru_cache(maxsize=VALUE_BITS + 1)
def _probes(bits_max: int) -> _Probes | None:
    """None if more than _FLIPS_MAX flips would be needed."""
    keys: list[int] = []
    per_table: list[int] = []
    for table in range(_PIECES):
        # flips + 1 is an equal share of bits_max + 1; a table whose share is 0 is not needed
        flips = (bits_max + 1 + _PIECES - 1 - table) // _PIECES - 1
        if flips > _FLIPS_MAX:
            return None
        masks = [
            sum(1 << bit for bit in bits) for n in range(flips + 1) for bits in combinations(range(_PIECE_BITS), n)
        ]
        keys += [table << _PIECE_BITS | mask for mask in masks]
        per_table.append(len(masks))
    return _Probes(np.array(keys, np.intp), np.array(per_table, np.intp))


def _ranked(differing: _U64, entries: _Numbers) -> npt.NDArray[np.int64]:
    """Distance and entry in one number, in the order in which they are told."""
    return np.bitwise_count(differing).astype(np.int64) << ENTRY_MAX.bit_length() | entries
