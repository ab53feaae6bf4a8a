"""What a driver answers."""

from __future__ import annotations

from dataclasses import dataclass

from kvcomm_p2p.net.counters import WireCounters
from kvcomm_p2p.protocol.anchors import BlockHandle, BlockKey, Miss
from kvcomm_p2p.protocol.events import AnchorTokens
from kvcomm_p2p.protocol.views import NodeStats


@dataclass(frozen=True, slots=True)
class FetchResult:
    """Every wanted block is in exactly one of `found` and `missed`. The caller owns one reference to each found handle.

    `wait_lost_s`: seconds without progress before a peer was given up.
    """

    found: dict[BlockKey, BlockHandle]
    missed: dict[BlockKey, Miss]
    wait_lost_s: float


@dataclass(frozen=True, slots=True)
class TokensResult:
    """Token ids and digests as the holder states them, or why there are none."""

    result: AnchorTokens | Miss
    wait_lost_s: float


@dataclass(frozen=True, slots=True)
class DriverStats:
    """The node's view, the wire's counters and the store's bytes at one moment."""

    node: NodeStats
    wire: WireCounters
    store_blocks: int
    store_held_bytes: int
    store_reserved_bytes: int
