"""What is fresh here and told to a few peers at once, before rounds of gossip bring it to the rest."""

from __future__ import annotations

import math

from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.gossip import Have, Replicas
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.messages import OriginDelta

NEWS_FANOUT = 3
"""Peers that fresh news are told to."""

NEWS_DELAY_S = 0.01
"""News within this time are told together."""

NEWS_BYTES_MAX = 8 * 1024
"""What is more than that is left to the rounds, which bring nothing twice."""

RELAYED_PER_S_MAX = 100.0
"""While more news than that come in per second, only own news are told: of what is told on, each peer gets about three
copies, and where much is new the rounds find something everywhere they look."""

RATE_S = 1.0
"""News are counted over about this time."""


class FreshNews:
    """Logs that have grown lately, each with the number after which it is fresh. Whoever learns something by being told
    tells it on, once; so news reach nearly everybody in a few round trips."""

    def __init__(self, config: NodeConfig, replicas: Replicas) -> None:
        self._interval_s = config.gossip_interval_s
        self._replicas = replicas
        self._fresh: dict[NodeId, int] = {}
        self._due_at = math.inf
        self._told_at = -math.inf
        self._per_s = 0.0
        self._counted_at = 0.0

    @property
    def due_at(self) -> float:
        """When `take` has something to tell."""
        return self._due_at

    def came(self, now: float) -> None:
        """Something new was learned, in whatever way."""
        self._per_s = self._per_s * math.exp((self._counted_at - now) / RATE_S) + 1 / RATE_S
        self._counted_at = now

    def relay(self, origin: NodeId, after_seq: int, now: float) -> None:
        """Tell on what a peer told, if there is not too much of it."""
        if self._per_s <= RELAYED_PER_S_MAX:
            self.add(origin, after_seq, now)

    def add(self, origin: NodeId, after_seq: int, now: float) -> None:
        """This log has entries above `after_seq` that peers may not know."""
        self._fresh.setdefault(origin, after_seq)
        if math.isinf(self._due_at):
            self._due_at = max(now + NEWS_DELAY_S, self._told_at + self._interval_s / 2)

    def take(self, now: float) -> tuple[tuple[OriginDelta, ...], int]:
        """What to tell to each of NEWS_FANOUT peers, and its bytes at most."""
        fresh, self._fresh = self._fresh, {}
        self._due_at = math.inf
        self._told_at = now
        deltas: list[OriginDelta] = []
        used = 0
        for origin, after_seq in fresh.items():
            log = self._replicas.log(origin)
            if log is None or log.gc_floor > after_seq:
                continue
            cut = self._replicas.cut(origin, Have(log.epoch, after_seq, log.gc_floor), NEWS_BYTES_MAX - used, None, 0)
            if cut is not None and cut.whole:
                deltas.append(cut.delta)
                used += cut.bytes
        return tuple(deltas), used
