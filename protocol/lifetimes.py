"""How long anchors are held at most, where a time to live is set."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable

from kvcomm_p2p.protocol.ids import AnchorId


class Lifetimes:
    """Anchors by when they were last published here. `ttl_s` 0: for ever, and nothing is remembered."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._published_at: OrderedDict[AnchorId, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._published_at)

    def next_deadline(self) -> float:
        """When the oldest has had its time."""
        oldest = next(iter(self._published_at.values()), math.inf)
        return oldest + self._ttl_s

    def published(self, anchor_ids: Iterable[AnchorId], now: float) -> None:
        """These are held from now on, or were published once more."""
        if self._ttl_s > 0:
            for anchor_id in anchor_ids:
                self._published_at[anchor_id] = now
                self._published_at.move_to_end(anchor_id)

    def removed(self, anchor_ids: Iterable[AnchorId]) -> None:
        """These are held no longer."""
        for anchor_id in anchor_ids:
            self._published_at.pop(anchor_id, None)

    def expired(self, now: float) -> tuple[AnchorId, ...]:
        """Those whose time is over, oldest first; they are not told again."""
        over: list[AnchorId] = []
        while self._published_at and self.next_deadline() <= now:
            over.append(self._published_at.popitem(last=False)[0])
        return tuple(over)
