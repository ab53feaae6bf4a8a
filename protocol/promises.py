"""Who announces anchors and does not have them when asked."""

from __future__ import annotations

from collections.abc import Sequence

from kvcomm_p2p.protocol.anchors import Miss, MissReason
from kvcomm_p2p.protocol.events import (
    AnchorTokens,
    Effect,
    Event,
    FetchRequested,
    FinishFetch,
    FinishTokens,
    TokensRequested,
)
from kvcomm_p2p.protocol.ids import AnchorId, NodeId

ASKS_MIN = 10
"""Asks before a holder is judged."""

BROKEN_SHARE_MAX = 0.2
"""Share of asks that may be in vain: news of evictions take their time."""

ASKS_REMEMBERED = 100
"""Asks after which what was before counts half."""

GONE = (MissReason.NOT_FOUND, MissReason.EVICTED)


class Promises:
    """Asks by holder, and how many of them were in vain. Bounded by peers (see `forget`) and by open requests."""

    def __init__(self) -> None:
        self._asks: dict[NodeId, tuple[float, float]] = {}
        self._tokens: dict[int, tuple[NodeId, AnchorId]] = {}
        self._fetches: dict[int, NodeId] = {}

    def __len__(self) -> int:
        return len(self._asks)

    def observe(self, event: Event, effects: Sequence[Effect]) -> list[tuple[NodeId, AnchorId]]:
        """What went into the node and came out of it: (holder, anchor) that turned out not to be there."""
        if isinstance(event, TokensRequested):
            self._tokens[event.request_id] = (event.holder, event.anchor.anchor_id)
        elif isinstance(event, FetchRequested) and event.holders:
            # A miss tells the first holder's reason; what others brought instead is not known here.
            self._fetches[event.fetch_id] = event.holders[0]
        gone: dict[tuple[NodeId, AnchorId], None] = {}
        for effect in effects:
            if isinstance(effect, FinishTokens):
                asked = self._tokens.pop(effect.request_id, None)
                if asked is not None and isinstance(effect.result, AnchorTokens):
                    self.kept(asked[0])
                elif asked is not None and isinstance(effect.result, Miss) and effect.result.reason in GONE:
                    gone[asked] = None
            elif isinstance(effect, FinishFetch):
                holder = self._fetches.pop(effect.fetch_id, None)
                if holder is not None:
                    self._fetched(holder, effect, gone)
        return list(gone)

    def _fetched(self, holder: NodeId, effect: FinishFetch, gone: dict[tuple[NodeId, AnchorId], None]) -> None:
        if effect.found:
            self.kept(holder)
        for missed in effect.missed:
            if missed.miss.reason in GONE:
                gone[holder, missed.key.anchor_id] = None

    def kept(self, holder: NodeId) -> None:
        """It had what it announces."""
        self._count(holder, 0.0)

    def broken(self, holder: NodeId) -> bool:
        """It did not have what it announces. True if that happens so often that it should not be asked for a while;
        counting begins anew then."""
        asks, gone = self._count(holder, 1.0)
        if asks < ASKS_MIN or gone <= BROKEN_SHARE_MAX * asks:
            return False
        del self._asks[holder]
        return True

    def _count(self, holder: NodeId, gone: float) -> tuple[float, float]:
        asks, before = self._asks.get(holder, (0.0, 0.0))
        if asks >= ASKS_REMEMBERED:
            asks, before = asks / 2, before / 2
        self._asks[holder] = counted = (asks + 1, before + gone)
        return counted

    def forget(self, holder: NodeId) -> None:
        """It is remembered no longer."""
        self._asks.pop(holder, None)
