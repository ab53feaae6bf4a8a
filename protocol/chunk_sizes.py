"""How large the chunks are that a holder is asked for: on slow links small ones, so that what comes is seen coming.

Progress of a pull is seen by the chunk. One that takes longer than `pull_stall_timeout_s` looks like silence, however steadily
its bytes flow; many small ones cost time on fast links. So a chunk is to take a small share of that time, at the rate that the
holder has shown. Rates are of whole pulls, from the request to the last byte: between two chunks a node that was busy reads
several at once, and would take any link to be fast.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.messages import CHUNK_BYTES_MAX, CHUNK_BYTES_MIN
from kvcomm_p2p.protocol.peer_stats import PeerCounts

CHUNK_SHARE = 1 / 16
"""Of the stall timeout, that a chunk may take. Others may come and share the link before the next is asked for: four uploads at
a holder, and as many that one of their pullers has of others."""

NEAR_S = 0.005
"""A peer that answers sooner is in the same room, where links are fast; for others a few chunks more are nothing beside the
round trip."""

FIRST_NEAR_BYTES = 288 * 1024
"""Chunks of a near peer whose rate is not known: four at once take half of the stall timeout at 100 Mbit/s, and a block of 32
tokens of 46 kB is five."""

PIECE_CHUNKS = 16
"""A piece is no more chunks than this where the rate is known: over a slow link a large one would hold its place at the holder
for so long that others who wait for a turn give up."""

PIECE_BYTES_MAX = PIECE_CHUNKS * CHUNK_BYTES_MAX

SHOWS_BYTES = 256 * 1024
"""Pulls of less do not show how slow a link is."""

HOLDERS_MAX = 1024
"""Holders whose rate is remembered: those that were measured last."""


class ChunkSizes:
    """By holder. `counted` says what is known of a peer otherwise.

    What the holder measured last has shown counts for those not known yet, too: the slow link may be our own.
    """

    def __init__(self, stall_timeout_s: float, counted: Callable[[NodeId], PeerCounts]) -> None:
        self._chunk_s = CHUNK_SHARE * stall_timeout_s
        self._counted = counted
        self._shown: OrderedDict[NodeId, int] = OrderedDict()
        self._latest = CHUNK_BYTES_MAX

    def __len__(self) -> int:
        return len(self._shown)

    def of(self, holder: NodeId) -> int:
        """Bytes of the largest chunk that it is asked for now, CHUNK_BYTES_MIN to CHUNK_BYTES_MAX."""
        shown = self._shown.get(holder)
        if shown is not None:
            return shown
        round_trip_s = self._counted(holder).round_trip_s
        if round_trip_s is None or round_trip_s > NEAR_S:
            return CHUNK_BYTES_MIN
        return min(FIRST_NEAR_BYTES, self._latest)

    def piece_bytes_max(self, holder: NodeId) -> int:
        """Bytes of blocks that one pull should not exceed, if that is more than one block."""
        shown = self._shown.get(holder)
        return PIECE_BYTES_MAX if shown is None else PIECE_CHUNKS * shown

    def brought(self, holder: NodeId, kv_bytes: int, seconds: float) -> None:
        """A pull of `kv_bytes` took so long, the round trip included. One of less than SHOWS_BYTES was mostly that: it shows
        that the link is no slower, not that it is no faster."""
        seconds -= min(self._counted(holder).round_trip_s or 0.0, seconds / 2)
        size = int(min(CHUNK_BYTES_MAX, self._chunk_s * kv_bytes / max(seconds, 1e-9)))
        size = max(CHUNK_BYTES_MIN, size // CHUNK_BYTES_MIN * CHUNK_BYTES_MIN)
        if kv_bytes < SHOWS_BYTES:
            size = max(size, self.of(holder))
        self._remember(holder, size)

    def stalled(self, holder: NodeId) -> None:
        """It was given up for silence: if it was only slow, the smallest chunks will show."""
        self._remember(holder, CHUNK_BYTES_MIN)

    def forget(self, holder: NodeId) -> None:
        """It is gone."""
        self._shown.pop(holder, None)

    def _remember(self, holder: NodeId, size: int) -> None:
        self._shown[holder] = self._latest = size
        self._shown.move_to_end(holder)
        if len(self._shown) > HOLDERS_MAX:
            self._shown.popitem(last=False)
