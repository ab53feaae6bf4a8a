"""Which shards an anchor belongs to, and who owns a shard: rendezvous hashing, the same on every node with the same view.

Every member has a score in every shard; the OWNERS members with the highest own it (highest random weight: Thaler and
Ravishankar 1998). When one of n members comes or goes, about OWNERS * SHARDS / n of the OWNERS * SHARDS replicas
move, and no others. Scores are blake2b-64 of the node id mixed with the shard's number: hashing every pair with blake2b
would take seconds for a view of 1,000 members.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcomm_p2p.protocol.ids import NodeId

SHARDS = 16_384
"""The same number at every size: were it to grow with the cluster, all shards would move when it does, and nodes that
count members differently would look in different places. So many keep the busiest owner within 1.7 times the mean at
1,000 members.
"""

OWNERS = 3
BANDS = 4
BAND_BITS = 16

CHAIN, LANDMARK, BAND = 1, 2, 3
"""Kinds of keys."""

_TABLES_MAX = 32
_CHANGES_MAX = 0.25
"""A view of which more than this share is new is computed from nothing."""

_SHARD_SHIFT = np.uint64(64 - (SHARDS - 1).bit_length())
_U64 = npt.NDArray[np.uint64]
Shards = npt.NDArray[np.uint16]


def shards_of(kind: int, values: npt.ArrayLike) -> Shards:
    """Shards of keys of one kind (CHAIN: the first 8 bytes of the hash as little-endian u64; LANDMARK: the fingerprint;
    BAND: `band_values`). uint16, in the order given. Values are mixed: minima are small numbers, bands are skewed.
    """
    mixed = _mix(np.asarray(values, np.uint64) ^ (np.uint64(kind) << np.uint64(56)))
    return (_mix(mixed) >> _SHARD_SHIFT).astype(np.uint16)


def chain_values(chains: tuple[bytes, ...]) -> _U64:
    return np.array([int.from_bytes(chain[:8], "little") for chain in chains], np.uint64)


def band_values(content: int, *, flipped: bool = False) -> list[int]:
    """The four bands of a SimHash (band number << 16 | 16 bits). Two that differ in 3 bits or fewer agree in one.

    `flipped`: and all that differ from them in one bit, 68 in all: those of a SimHash at most 7 bits away are among them,
    since four bands cannot hold two differences each.
    """
    bands = [(band << BAND_BITS) | (content >> (BAND_BITS * band)) & ((1 << BAND_BITS) - 1) for band in range(BANDS)]
    return bands + [band ^ (1 << bit) for band in bands for bit in range(BAND_BITS)] if flipped else bands


class OwnerTable(NamedTuple):
    """A view's owners: `owners` int16 [SHARDS, OWNERS], places in `members` (ascending), the highest score first; -1 where
    there are fewer members. `scores` belong to them. Immutable, shared.
    """

    members: tuple[NodeId, ...]
    owners: npt.NDArray[np.int16]
    scores: _U64

    def owned_by(self, member: NodeId) -> npt.NDArray[np.bool_]:
        """Which shards a member owns: bool [SHARDS]."""
        place = self.members.index(member)
        owned: npt.NDArray[np.bool_] = (self.owners == place).any(axis=1)
        return owned


_tables: OrderedDict[tuple[NodeId, ...], OwnerTable] = OrderedDict()


def owner_table(members: tuple[NodeId, ...], near: OwnerTable | None = None) -> OwnerTable:
    """The owners among `members` (ascending, unique). The result depends on them alone; `near`, the table of a similar
    view, makes it cheap: about 0.2 ms per member that came or went.
    """
    known = _tables.get(members)
    if known is not None:
        _tables.move_to_end(members)
        return known
    table = _EMPTY if near is None or _differ(near.members, members) > _CHANGES_MAX * len(members) else near
    gone = set(table.members).difference(members)
    if gone:
        table = _without(table, gone)
    came = sorted(set(members).difference(table.members))
    if came:
        table = _with(table, members, came)
    _tables[members] = table
    while len(_tables) > _TABLES_MAX:
        _tables.popitem(last=False)
    return table


def _differ(a: tuple[NodeId, ...], b: tuple[NodeId, ...]) -> int:
    return len(set(a).symmetric_difference(b))


def _with(table: OwnerTable, members: tuple[NodeId, ...], came: list[NodeId]) -> OwnerTable:
    place = {member: index for index, member in enumerate(members)}
    moved = np.array([*(place[member] for member in table.members), -1], np.int16)
    owners, scores = [*moved[table.owners].T], [*table.scores.T.copy()]
    for member in came:
        score = _score(member, _shard_words())
        higher = [score > each for each in scores]
        for rank in reversed(range(OWNERS)):
            above = higher[rank - 1] if rank else None
            for column, mine in ((scores, score), (owners, np.int16(place[member]))):
                here = np.where(higher[rank], mine, column[rank])
                column[rank] = here if above is None else np.where(above, column[rank - 1], here)
    return OwnerTable(members, np.stack(owners, axis=1), np.stack(scores, axis=1))


def _without(table: OwnerTable, gone: set[NodeId]) -> OwnerTable:
    members = tuple(member for member in table.members if member not in gone)
    place = {member: index for index, member in enumerate(members)}
    moved = np.array([*(place.get(member, -2) for member in table.members), -1], np.int16)
    owners, scores = moved[table.owners], table.scores.copy()
    bereft = np.flatnonzero((owners == -2).any(axis=1))
    owners[bereft], scores[bereft] = -1, 0
    if members and bereft.size:
        words = _shard_words()[bereft]
        every = np.stack([_score(member, words) for member in members], axis=1)
        best = np.argsort(every, axis=1)[:, ::-1][:, :OWNERS]
        owners[bereft, : best.shape[1]] = best
        scores[bereft, : best.shape[1]] = np.take_along_axis(every, best, axis=1)
    return OwnerTable(members, owners, scores)


def _score(member: NodeId, words: _U64) -> _U64:
    return _mix(words ^ _seed(member)) | np.uint64(1)


@lru_cache(maxsize=8192)
def _seed(member: NodeId) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.blake2b(member, digest_size=8, person=b"kvcomm shard").digest(), "little"))


@lru_cache(maxsize=1)
def _shard_words() -> _U64:
    words = _mix(np.arange(1, SHARDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    words.flags.writeable = False
    return words


def _mix(values: _U64) -> _U64:
    """A bijection that spreads every input bit over all output bits (murmur3's finalizer). New array."""
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return values ^ (values >> np.uint64(33))


_EMPTY = OwnerTable((), np.full((SHARDS, OWNERS), -1, np.int16), np.zeros((SHARDS, OWNERS), np.uint64))
