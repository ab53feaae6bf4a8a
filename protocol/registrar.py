"""An origin's side of the sharded directory: keeps the owners of its anchors' shards informed.

Changes wait REGISTER_INTERVAL_S and go together. When the view of members changes, exactly what moved is told: new
owners get rows, former ones deletions. Everything that was sent is checked by digest soon after and then every REFRESH_S,
so that a lost message or a forgetful owner costs seconds.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcomm_p2p.protocol.anchors import LANDMARKS_DEFAULT, LANDMARKS_MAX, HeldAnchor
from kvcomm_p2p.protocol.ids import AnchorId, NodeId
from kvcomm_p2p.protocol.log_bytes import entry_bytes_max
from kvcomm_p2p.protocol.messages import REGISTER_ROWS_MAX, SHARD_DIGEST_BYTES, Put, ShardRegister
from kvcomm_p2p.protocol.registry import row_digest
from kvcomm_p2p.protocol.shard_map import (
    BAND,
    CHAIN,
    LANDMARK,
    OWNERS,
    OwnerTable,
    Shards,
    band_values,
    chain_values,
    shards_of,
)

REGISTER_INTERVAL_S = 0.2
REFRESH_S = 30.0
"""Mean seconds between digests to an owner (+-20 %)."""

CHECK_S = 1.0
"""Seconds from the last change told to an owner until a digest asks whether it arrived."""

REGISTER_BYTES_MAX = 128 * 1024
RESEND_MIN_S = 1.0
"""An owner gets everything again at most this often, however often it asks."""

_Pairs = npt.NDArray[np.int64]


class Told(NamedTuple):
    """What every message says besides its rows. Fields as in ShardRegister."""

    epoch: int
    anchors: int
    bytes_per_s: int
    sharded_age_s: int


class _Row(NamedTuple):
    number: int
    put: Put
    shards: Shards


class _Owner:
    """What one owner should hold, once `pending` (None: delete) has been sent."""

    __slots__ = ("check_at", "count", "digest", "pending", "resent_at", "reset")

    def __init__(self) -> None:
        self.count = 0
        self.digest = 0
        self.pending: dict[AnchorId, Put | None] = {}
        self.reset = True
        self.check_at = math.inf
        self.resent_at = -math.inf


def anchor_shards(held: HeldAnchor) -> Shards:
    """The shards under which an anchor is registered, ascending, unique: of its chain hash, its landmarks, and the bands
    of its content."""
    meta = held.meta
    landmarks = held.landmarks[:LANDMARKS_MAX]
    if not landmarks:
        landmarks = tuple(np.frombuffer(meta.fingerprints, "<u4")[:LANDMARKS_DEFAULT].tolist())
    parts = [shards_of(LANDMARK, landmarks)]
    if meta.chain_end:
        parts.append(shards_of(CHAIN, chain_values((meta.chain_end,))))
    if meta.content:
        parts.append(shards_of(BAND, band_values(meta.content)))
    return np.unique(np.concatenate(parts))


class Registrar:
    """Own anchors and who is told of them. `table` must be given before anything else, and includes this node."""

    def __init__(self, me: NodeId, rng: random.Random, table: OwnerTable, now: float) -> None:
        self._me = me
        self._rng = rng
        self._table = table
        self._rows: dict[AnchorId, _Row] = {}
        self._by_number: dict[int, AnchorId] = {}
        self._seq = 0
        self._owners: dict[NodeId, _Owner] = {}
        self._dirty: dict[NodeId, None] = {}
        self._checks: list[tuple[float, NodeId]] = []
        self._flush_at = now

    def __len__(self) -> int:
        return len(self._rows)

    def next_deadline(self) -> float:
        if self._dirty:
            return self._flush_at
        return max(self._flush_at, self._checks[0][0]) if self._checks else math.inf

    def put(self, held: HeldAnchor) -> None:
        """An anchor that peers may know of is held, or its metadata changed."""
        self.delete(held.meta.anchor_id)
        self._seq += 1
        row = _Row(self._seq, Put.of(self._seq, held.meta), anchor_shards(held))
        self._rows[held.meta.anchor_id] = row
        self._by_number[row.number] = held.meta.anchor_id
        for owner in self._owners_of(row):
            self._tell(owner, row)

    def delete(self, anchor_id: AnchorId) -> None:
        """Ignored if unknown."""
        row = self._rows.pop(anchor_id, None)
        if row is not None:
            for owner in self._owners_of(row):
                self._untell(owner, row)
            del self._by_number[row.number]

    def view(self, table: OwnerTable, returned: Iterable[NodeId] = ()) -> None:
        """The view of members is another now. `returned`: members that are here again, or restarted, since the last
        view: they know nothing."""
        if table is self._table and not returned:
            return
        before, after = self._pairs(self._table), self._pairs(table)
        places = {member: at for at, member in enumerate(sorted({*self._table.members, *table.members}))}
        names = list(places)
        old = _renumbered(before, self._table.members, places)
        for member in returned:
            self._owners.pop(member, None)
            self._dirty.pop(member, None)
            old = old[old >> 32 != places.get(member, -1)]
        new = _renumbered(after, table.members, places)
        self._table = table
        here = set(table.members)
        for pair in np.setdiff1d(old, new, assume_unique=True).tolist():
            owner = names[pair >> 32]
            if owner in here:
                self._untell(owner, self._row(pair & 0xFFFFFFFF))
        for owner in [owner for owner in self._owners if owner not in here]:
            del self._owners[owner]
            self._dirty.pop(owner, None)
        for pair in np.setdiff1d(new, old, assume_unique=True).tolist():
            self._tell(names[pair >> 32], self._row(pair & 0xFFFFFFFF))

    def resend(self, owner: NodeId, now: float) -> None:
        """An owner does not hold what it should: everything again."""
        state = self._owners.get(owner)
        if state is None or now - state.resent_at < RESEND_MIN_S:
            return
        self._owners[owner] = fresh = _Owner()
        fresh.resent_at = now
        place = self._table.members.index(owner)
        for pair in self._pairs(self._table).tolist():
            if pair >> 32 == place:
                self._tell(owner, self._row(pair & 0xFFFFFFFF))
        self._dirty[owner] = None

    def flush(self, now: float, told: Told) -> list[tuple[NodeId, ShardRegister]]:
        """What to send now."""
        if self.next_deadline() > now:
            return []
        self._flush_at = now + REGISTER_INTERVAL_S
        messages: list[tuple[NodeId, ShardRegister]] = []
        dirty, self._dirty = sorted(self._dirty), {}
        for owner in dirty:
            messages += [(owner, message) for message in self._messages(self._owners[owner], told)]
            self._check_at(owner, now + CHECK_S)
        while self._checks and self._checks[0][0] <= now:
            due, owner = heapq.heappop(self._checks)
            state = self._owners.get(owner)
            if state is None or state.check_at != due:
                continue
            messages.append((owner, _message(state, told, {})))
            if state.count:
                self._check_at(owner, now + REFRESH_S * (0.8 + 0.4 * self._rng.random()))
            else:
                del self._owners[owner]
        return messages

    def _messages(self, state: _Owner, told: Told) -> list[ShardRegister]:
        """All that is pending, in as many messages as it takes."""
        pending, state.pending = state.pending, {}
        parts: list[dict[AnchorId, Put | None]] = [{}]
        used = 0
        for anchor_id, put in pending.items():
            size = 32 if put is None else entry_bytes_max(put)
            if used + size > REGISTER_BYTES_MAX or len(parts[-1]) == REGISTER_ROWS_MAX:
                parts.append({})
                used = 0
            parts[-1][anchor_id] = put
            used += size
        return [_message(state, told, part, last=part is parts[-1]) for part in parts]

    def _check_at(self, owner: NodeId, due: float) -> None:
        self._owners[owner].check_at = due
        heapq.heappush(self._checks, (due, owner))

    def _row(self, number: int) -> _Row:
        return self._rows[self._by_number[number]]

    def _owners_of(self, row: _Row) -> list[NodeId]:
        places = np.unique(self._table.owners[row.shards])
        members = self._table.members
        return [members[place] for place in places.tolist() if place >= 0 and members[place] != self._me]

    def _pairs(self, table: OwnerTable) -> _Pairs:
        """place of an owner in `table.members` << 32 | number of a row it owns, ascending; this node's own left out."""
        if not self._rows:
            return np.empty(0, np.int64)
        rows = list(self._rows.values())
        numbers = np.repeat([row.number for row in rows], [OWNERS * len(row.shards) for row in rows])
        places = table.owners[np.concatenate([row.shards for row in rows])].ravel().astype(np.int64)
        wanted = (places >= 0) & (places != table.members.index(self._me))
        return np.unique((places[wanted] << 32) | numbers[wanted])

    def _tell(self, owner: NodeId, row: _Row) -> None:
        state = self._owners.setdefault(owner, _Owner())
        state.count += 1
        state.digest ^= row_digest(row.put.anchor_id, row.put.seq)
        state.pending[row.put.anchor_id] = row.put
        self._dirty[owner] = None

    def _untell(self, owner: NodeId, row: _Row) -> None:
        state = self._owners.setdefault(owner, _Owner())
        state.count -= 1
        state.digest ^= row_digest(row.put.anchor_id, row.put.seq)
        state.pending[row.put.anchor_id] = None
        self._dirty[owner] = None


def _renumbered(pairs: _Pairs, members: tuple[NodeId, ...], places: dict[NodeId, int]) -> _Pairs:
    moved = np.array([places[member] for member in members], np.int64)
    return np.sort((moved[pairs >> 32] << 32) | (pairs & 0xFFFFFFFF))


def _message(state: _Owner, told: Told, rows: dict[AnchorId, Put | None], *, last: bool = True) -> ShardRegister:
    reset, state.reset = state.reset, False
    return ShardRegister(
        epoch=told.epoch,
        reset=reset,
        last=last,
        puts=tuple(put for put in rows.values() if put is not None),
        deleted=tuple(anchor_id for anchor_id, put in rows.items() if put is None),
        count=state.count,
        digest=state.digest.to_bytes(SHARD_DIGEST_BYTES, "little"),
        anchors=told.anchors,
        bytes_per_s=told.bytes_per_s,
        sharded_age_s=told.sharded_age_s,
    )
