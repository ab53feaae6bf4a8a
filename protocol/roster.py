"""The live members in one order that all who know the same of them share, with the state of each one's log, in columns.

What a digest says is read off whole columns: comparing or telling the logs of thousands of members costs no Python code
for each. `roster` hashes stand for ids and epochs; where they are equal, rows can be compared by position.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.member_table import KnownMembers
from kvcomm_p2p.protocol.messages import BUCKETS, HASH_BYTES, ROW_BYTES
from kvcomm_p2p.protocol.messages.exchanges import BUCKETS_ALL, bucket_of
from kvcomm_p2p.protocol.origin_log import blank_state

ROW_SEQ_MAX = 2**32 - 1
_ROW = np.dtype([("seq", "<u4"), ("check", "<u2")])
assert _ROW.itemsize == ROW_BYTES


class States:
    """Live members and the states of their logs. A member comes, goes or changes its epoch by `place`."""

    __slots__ = ("_borders", "_buckets", "_epochs", "_hashes", "_rosters", "_seqs", "_shared", "ids")

    def __init__(self) -> None:
        self.ids: list[NodeId] = []
        self._shared = False
        self._epochs = array("q")
        self._seqs = array("Q")
        self._hashes = array("Q")
        self._buckets = [0] * BUCKETS
        self._rosters = [0] * BUCKETS
        self._borders: list[int] | None = None

    @classmethod
    def of(cls, known: KnownMembers) -> States:
        """All of `known`, of whose logs nothing is known."""
        states = cls()
        states._shared = True
        states.ids, states._epochs = known.ids, known.epochs
        states._hashes = known.blanks[:]
        states._seqs = array("Q", bytes(8 * len(known)))
        states._buckets, states._rosters = known.blank_buckets[:], known.blank_buckets[:]
        return states

    def __len__(self) -> int:
        return len(self.ids)

    def place(self, node_id: NodeId, epoch: int | None) -> None:
        """It is a live member in this epoch, with nothing known of its log; None: it is none. Nothing if that is known."""
        at = self._at(node_id)
        if at is not None and self._epochs[at] == epoch:
            return
        if at is None and epoch is None:
            return
        self._own()
        bucket = bucket_of(node_id)
        if at is not None:
            self._buckets[bucket] ^= self._hashes[at]
            self._rosters[bucket] ^= blank_state(node_id, self._epochs[at])
            for column in (self.ids, self._epochs, self._seqs, self._hashes):
                del column[at]
        if epoch is not None:
            at, hashed = bisect_left(self.ids, node_id), blank_state(node_id, epoch)
            self.ids.insert(at, node_id)
            self._epochs.insert(at, epoch)
            self._seqs.insert(at, 0)
            self._hashes.insert(at, hashed)
            self._buckets[bucket] ^= hashed
            self._rosters[bucket] ^= hashed
        self._borders = None

    def set(self, origin: NodeId, epoch: int, seq: int, state: int) -> None:
        """The log of a member is known up to `seq`. Ignored for another epoch, and for who is no live member."""
        at = self._at(origin)
        if at is not None and self._epochs[at] == epoch:
            self._buckets[bucket_of(origin)] ^= self._hashes[at] ^ state
            self._seqs[at], self._hashes[at] = seq, state

    def unset(self, origin: NodeId) -> None:
        """Nothing is known of its log."""
        at = self._at(origin)
        if at is not None:
            self.set(origin, self._epochs[at], 0, blank_state(origin, self._epochs[at]))

    def epoch_of(self, origin: NodeId) -> int | None:
        """Of a live member, None of others."""
        at = self._at(origin)
        return None if at is None else self._epochs[at]

    def seq_of(self, origin: NodeId) -> int:
        """How much of its log is known, 0 of others."""
        at = self._at(origin)
        return 0 if at is None else self._seqs[at]

    def members(self, mask: int = BUCKETS_ALL) -> Iterator[tuple[NodeId, int]]:
        """Node ids and epochs of the live members in some buckets, ascending by id."""
        for start, end in self._ranges(mask):
            yield from zip(self.ids[start:end], self._epochs[start:end], strict=True)

    def buckets(self) -> list[int]:
        """64 bits per bucket, of the states of its logs. Not to be changed."""
        return self._buckets

    def roster(self, mask: int = BUCKETS_ALL) -> bytes:
        """Hash of ids and epochs of the live members in some buckets."""
        return _total(hashed for bucket, hashed in enumerate(self._rosters) if mask >> bucket & 1)

    def total(self) -> bytes:
        """Hash of the states of all logs. Costs nothing that grows with their number."""
        return _total(iter(self._buckets))

    def rows(self, mask: int) -> bytes:
        """ROW_BYTES for each member in some buckets, ascending by id: see `messages.Dense`."""
        return self._rows(mask).tobytes()

    def differing(self, mask: int, theirs: bytes) -> list[tuple[NodeId, int]] | None:
        """Members whose row is another one in `theirs`, with the number there. None if it has not as many rows."""
        mine = self._rows(mask)
        if len(theirs) != mine.nbytes:
            return None
        told = np.frombuffer(theirs, _ROW)
        places = np.flatnonzero(told != mine)
        if not places.size:
            return []
        origins = [node_id for start, end in self._ranges(mask) for node_id in self.ids[start:end]]
        return [(origins[at], seq) for at, seq in zip(places.tolist(), told["seq"][places].tolist(), strict=True)]

    def told_seq(self, mask: int, theirs: bytes, origin: NodeId) -> int | None:
        """The number of one member in rows that fit; None if it is not among them."""
        at, before = self._at(origin), 0
        for start, end in self._ranges(mask):
            if at is not None and start <= at < end:
                place = (before + at - start) * ROW_BYTES
                return int.from_bytes(theirs[place : place + 4], "little")
            before += end - start
        return None

    # ---------------------------------------------------------------------------------------------------------- inside

    def _at(self, node_id: NodeId) -> int | None:
        at = bisect_left(self.ids, node_id)
        return at if at < len(self.ids) and self.ids[at] == node_id else None

    def _own(self) -> None:
        if self._shared:
            self._shared = False
            self.ids, self._epochs = self.ids[:], self._epochs[:]

    def _ranges(self, mask: int) -> list[tuple[int, int]]:
        """Places of the members of some buckets, neighbours joined."""
        if mask == BUCKETS_ALL:
            return [(0, len(self.ids))]
        if self._borders is None:
            firsts = (bytes((bucket * 256 // BUCKETS,)) for bucket in range(BUCKETS))
            self._borders = [*(bisect_left(self.ids, first) for first in firsts), len(self.ids)]
        borders = self._borders
        return [(borders[bucket], borders[bucket + 1]) for bucket in range(BUCKETS) if mask >> bucket & 1]

    def _rows(self, mask: int) -> npt.NDArray[np.void]:
        rows = np.empty(len(self.ids), _ROW)
        rows["seq"] = np.minimum(np.frombuffer(self._seqs, np.uint64), ROW_SEQ_MAX)
        rows["check"] = np.frombuffer(self._hashes, np.uint64) & np.uint64(0xFFFF)
        if mask == BUCKETS_ALL:
            return rows
        pieces = [rows[start:end] for start, end in self._ranges(mask)]
        return np.concatenate(pieces) if pieces else rows[:0]


def _total(hashes: Iterator[int]) -> bytes:
    total = 0
    for hashed in hashes:
        total ^= hashed
    return total.to_bytes(HASH_BYTES, "little")
