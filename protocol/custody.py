"""What this node holds: publishing, forgetting, time to live and erasing, over one pool."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace

from kvcomm_p2p.protocol.anchors import Miss, MissReason
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.erasing import Erasing
from kvcomm_p2p.protocol.events import (
    AnchorsForgotten,
    AnchorsPublished,
    AnchorsUsed,
    AnchorTokens,
    DropBlock,
    Effect,
    EraseRequested,
    FetchRequested,
    FinishTokens,
)
from kvcomm_p2p.protocol.ids import AnchorId, NodeId
from kvcomm_p2p.protocol.lifetimes import Lifetimes
from kvcomm_p2p.protocol.membership import Membership
from kvcomm_p2p.protocol.messages import Forget
from kvcomm_p2p.protocol.onward import Onward
from kvcomm_p2p.protocol.pool import Pool, PoolChange

_ERASED = Miss(MissReason.NOT_FOUND, "erased")


class Custody:
    """`changed` is told of every change of the pool before its effects are returned."""

    def __init__(
        self,
        config: NodeConfig,
        me: NodeId,
        rng: random.Random,
        members: Membership,
        pool: Pool,
        onward: Onward,
        changed: Callable[[PoolChange, float], None],
    ) -> None:
        self._pool = pool
        self._onward = onward
        self._changed = changed
        self._lifetimes = Lifetimes(config.anchor_ttl_s)
        self.erasing = Erasing(config.erasing_key, me, rng, members, pool, self._forget)
        self.rejected = 0
        self.invalidated = 0

    def publish(self, event: AnchorsPublished, now: float) -> list[Effect]:
        """Hold these, except for what was erased. Raises ValueError, and takes nothing, if one contradicts itself."""
        erased = self.erasing.refused(event.anchors)
        kept = tuple(anchor for anchor in event.anchors if anchor.meta.anchor_id not in erased)
        refused = [anchor for anchor in event.anchors if anchor.meta.anchor_id in erased]
        effects = self._on_change(self._pool.publish(kept, now), now)
        effects += self._onward.forget(anchor.meta.anchor_id for anchor in event.anchors)
        held = [a.meta.anchor_id for a in kept if self._pool.get(a.meta.anchor_id) is not None]
        self._lifetimes.published(held, now)
        return [*effects, *(DropBlock(handle) for anchor in refused for handle in anchor.handles)]

    def forget(self, event: AnchorsForgotten, now: float) -> list[Effect]:
        return self._forget(event.anchor_ids, now)

    def erase(self, event: EraseRequested, now: float) -> list[Effect]:
        """Erase, and pass nothing on any more: what was pulled a moment ago may be what is meant."""
        return self.erasing.requested(event, now) + self._onward.shutdown()

    def erase_told(self, sender: NodeId, message: Forget, now: float) -> list[Effect]:
        """The same, because a member said so."""
        return self.erasing.told(sender, message, now) + self._onward.shutdown()

    def use(self, event: AnchorsUsed, now: float) -> list[Effect]:
        self._pool.use(event.anchor_ids, now)
        return []

    def screened(self, effects: list[Effect]) -> list[Effect]:
        """Token ids that hold erased content do not reach the caller."""
        return [
            replace(effect, result=_ERASED)
            if isinstance(effect, FinishTokens)
            and isinstance(effect.result, AnchorTokens)
            and self.erasing.holds_erased(effect.result.token_ids)
            else effect
            for effect in effects
        ]

    def refusal(self, event: FetchRequested) -> Miss | None:
        """Why nothing is pulled: some of it was erased."""
        return _ERASED if any(self.erasing.is_erased_id(want.key.anchor_id) for want in event.wants) else None

    def next_deadline(self) -> float:
        return min(self._lifetimes.next_deadline(), self.erasing.next_deadline(), self._onward.next_deadline())

    def tick(self, now: float) -> list[Effect]:
        expired = self._forget(self._lifetimes.expired(now), now)
        return [*expired, *self.erasing.tick(now), *self._onward.tick(now)]

    def _forget(self, anchor_ids: Iterable[AnchorId], now: float) -> list[Effect]:
        forgotten = tuple(anchor_ids)
        return self._on_change(self._pool.forget(forgotten), now) + self._onward.forget(forgotten)

    def _on_change(self, change: PoolChange, now: float) -> list[Effect]:
        self._changed(change, now)
        self.rejected += change.rejected
        self.invalidated += len(change.removed)
        self._lifetimes.removed(meta.anchor_id for meta in change.removed)
        return [DropBlock(handle) for handle in change.dropped]
