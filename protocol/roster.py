"""The live members in one order that all who know the same of them share, dealt into buckets."""

from __future__ import annotations

from collections.abc import Iterable

from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.messages import BUCKETS, HASH_BYTES
from kvcomm_p2p.protocol.origin_log import state_hash


def bucket_of(node_id: NodeId) -> int:
    """The first six bits."""
    return node_id[0] * BUCKETS >> 8


class Roster:
    """Who is counted, with epochs. Immutable; made anew when somebody comes or goes.

    `hash` is equal for equal members and epochs. `blank`: what a member adds to the hash of states while nothing is
    known of its log.
    """

    __slots__ = ("blank", "buckets", "epochs", "hash")

    def __init__(self, members: Iterable[tuple[NodeId, int]]) -> None:
        """`members`: node id and epoch, in any order."""
        self.epochs = dict(sorted(members))
        self.buckets: list[list[NodeId]] = [[] for _ in range(BUCKETS)]
        self.blank: dict[NodeId, int] = {}
        total = 0
        for node_id, epoch in self.epochs.items():
            self.buckets[bucket_of(node_id)].append(node_id)
            self.blank[node_id] = state_hash(node_id, epoch)
            total ^= self.blank[node_id]
        self.hash = total.to_bytes(HASH_BYTES, "little")

    def __len__(self) -> int:
        return len(self.epochs)

    def in_buckets(self, mask: int) -> list[NodeId]:
        """Members of the buckets whose bit is set, ascending by id."""
        if mask == (1 << BUCKETS) - 1:
            return list(self.epochs)
        return [node_id for bucket in range(BUCKETS) if mask >> bucket & 1 for node_id in self.buckets[bucket]]


class States:
    """Hashes of the state of each member's log, and of all of them by bucket: each change costs the same."""

    __slots__ = ("_buckets", "_hashes", "roster")

    def __init__(self, roster: Roster) -> None:
        self.roster = roster
        self._hashes = dict(roster.blank)
        self._buckets = [0] * BUCKETS
        for origin, blank in roster.blank.items():
            self._buckets[bucket_of(origin)] ^= blank

    def set(self, origin: NodeId, state: int | None) -> None:
        """The state of a log changed; None: nothing is known of it. Ignored for who is not counted."""
        before = self._hashes.get(origin)
        if before is not None:
            after = self.roster.blank[origin] if state is None else state
            self._hashes[origin] = after
            self._buckets[bucket_of(origin)] ^= before ^ after

    def get(self, origin: NodeId) -> int:
        """The hash of a member's log. Raises KeyError for others."""
        return self._hashes[origin]

    def buckets(self) -> list[int]:
        """64 bits per bucket. Not to be changed."""
        return self._buckets

    def total(self) -> bytes:
        """Hash of all. Costs nothing that grows with their number."""
        total = 0
        for bucket in self._buckets:
            total ^= bucket
        return total.to_bytes(HASH_BYTES, "little")
