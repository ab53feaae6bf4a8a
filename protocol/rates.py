"""Token buckets: how much of something may happen per second."""

from __future__ import annotations

import math
from collections import OrderedDict

from kvcomm_p2p.protocol.ids import NodeId

PEERS_MAX = 4096
"""Askers whose rate is remembered: those that asked last."""


class TokenBucket:
    """`rate_per_s` on average, up to `burst` at once. Something larger than what is left is let through while anything is
    left, and paid off afterwards, so that no size is impossible. A rate of 0 is no limit."""

    __slots__ = ("_at", "_burst", "_level", "_rate_per_s")

    def __init__(self, rate_per_s: float, burst: float) -> None:
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._level = burst
        self._at = -math.inf

    def ready_at(self, now: float) -> float:
        """When something may happen next: `now`, or later."""
        self._fill(now)
        if not self._rate_per_s or self._level > 0:
            return now
        return now + max(-self._level / self._rate_per_s, 1e-6)

    def take(self, amount: float, now: float) -> None:
        """It happens."""
        self._fill(now)
        if self._rate_per_s:
            self._level -= amount

    def _fill(self, now: float) -> None:
        if now > self._at:
            if self._at > -math.inf:
                self._level = min(self._burst, self._level + (now - self._at) * self._rate_per_s)
            self._at = now


class RequestLimit:
    """At most `rate_per_s` requests of each peer, with as many at once after a quiet second. `refused`: how many were more."""

    def __init__(self, rate_per_s: float) -> None:
        self._rate_per_s = rate_per_s
        self._buckets: OrderedDict[NodeId, TokenBucket] = OrderedDict()
        self.refused = 0

    def admits(self, peer: NodeId, now: float) -> bool:
        """Whether one more request of this peer is answered; it counts."""
        bucket = self._buckets.get(peer)
        if bucket is None:
            bucket = self._buckets[peer] = TokenBucket(self._rate_per_s, self._rate_per_s)
            if len(self._buckets) > PEERS_MAX:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(peer)
        if bucket.ready_at(now) > now:
            self.refused += 1
            return False
        bucket.take(1.0, now)
        return True
