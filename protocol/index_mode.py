"""Whether this node keeps an index of everybody's anchors, or asks the owners of shards.

Each node decides for itself. What it has to know of others is whether anybody lacks a full index: then all register their
anchors with owners. That is told as an age ("somebody was sharded so many seconds ago") in every message about shards,
so it spreads like a rumour as soon as one node is sharded, and dies out REMEMBERED_S after the last one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from kvcomm_p2p.protocol.config import NodeConfig

INDEX_ROW_BYTES = 1800
"""Memory of one anchor of a peer in a full index: log entry, metadata and its places in the index (measured, see
docs/decisions/0021-directory.md)."""

LOG_ENTRY_BYTES = 300
"""What one change of one anchor costs a node of a full index, roughly: an entry of about 190 bytes, later its deletion, what
they come in, and telling who lacks them (docs/decisions/0023-scale.md)."""

SETTLE_S = 5.0
"""Seconds after which news of members, and what follows from them, has reached everybody: membership spreads within 2 s."""

REMEMBERED_S = 900.0
"""Seconds for which a sharded member is allowed for after it was last known of."""

BURST_S = 60.0
"""More news than the limit has to last so long: a newcomer that reads everything, or a start of all, is no reason to change."""

LIGHT_BELOW = 0.5
LIGHT_S = 60.0
"""A node goes back to a full index after so many seconds below this share of its limits."""

REPLICAS = 24
"""Owners that an anchor is registered with, about: 3 of each of 8 or 9 keys."""


class IndexMode:
    """`sharded`: no full index is kept from SETTLE_S after `since` on."""

    def __init__(self, config: NodeConfig, now: float) -> None:
        self._config = config
        self.sharded = config.directory == "sharded"
        self.since = -math.inf if self.sharded else now
        self._sharded_seen_at = -math.inf
        self._light_since = math.inf
        self._busy_since = math.inf

    def subscribed(self, now: float) -> bool:
        """Whether this node wants everybody's log. One that becomes sharded does until all others have had the time to
        register."""
        return not self.sharded or now < self.since + SETTLE_S

    def active(self, now: float) -> bool:
        """Whether somebody may have no full index, so that anchors have to be registered and owners asked."""
        return self.sharded or now - self._sharded_seen_at < REMEMBERED_S

    def age_s(self, now: float) -> int:
        """To be told: seconds since somebody was sharded."""
        return 0 if self.sharded else int(min(now - self._sharded_seen_at, 2**31))

    def heard(self, age_s: int, now: float) -> None:
        """A peer told its `age_s`."""
        self._sharded_seen_at = max(self._sharded_seen_at, now - age_s)

    def update(self, index_bytes: float, log_bytes_per_s: float, now: float) -> None:
        """Decide, given what a full index of everybody's anchors would take."""
        if self._config.directory != "auto":
            return
        room = index_bytes / self._config.directory_bytes_max
        news = log_bytes_per_s / self._config.directory_bytes_per_s_max
        load = max(room, news)
        self._busy_since = math.inf if news <= 1 else min(self._busy_since, now)
        if not self.sharded and (room > 1 or now - self._busy_since >= BURST_S):
            self.sharded, self.since = True, now
        self._light_since = math.inf if load >= LIGHT_BELOW else min(self._light_since, now)
        if self.sharded and now - self._light_since >= LIGHT_S:
            self._sharded_seen_at = now
            self.sharded, self.since = False, now


def everybodys(loads: Iterable[tuple[int, int]], members: int) -> tuple[float, float]:
    """Anchors and log bytes per second of all `members`, estimated from those that registered here.

    An origin with a anchors has registered here with the probability 1 - exp(-REPLICAS a / members), so what is seen is
    weighted with its inverse (Horvitz and Thompson 1952).
    """
    anchors = log_bytes_per_s = 0.0
    for own_anchors, own_bytes_per_s in loads:
        weight = 1 / -math.expm1(-REPLICAS * max(1, own_anchors) / max(1, members))
        anchors += own_anchors * weight
        log_bytes_per_s += own_bytes_per_s * weight
    return anchors, log_bytes_per_s
