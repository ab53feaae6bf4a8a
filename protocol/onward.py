"""Passing on: blocks that this node pulled a moment ago are served to others before anybody has published them.

When many want the same anchor at once, a puller that could serve only after its whole request is of no use to the others.
So every verified block of an anchor whose metadata the fetch stated is kept for a while, with a reference of its own, under
the anchor's own name: the bytes are the holder's, so are digest, repairs and visibility. An anchor that the pool holds is
served from there alone.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvcomm_p2p.protocol.anchors import AnchorMeta, BlockHandle, BlockKey
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.events import DropBlock, Effect, RetainBlock
from kvcomm_p2p.protocol.ids import AnchorId
from kvcomm_p2p.protocol.pool import is_shared, stricter


@dataclass(slots=True)
class _Kept:
    handle: BlockHandle
    kv_bytes: int
    expires_at: float


class Onward:
    """Blocks kept for others, within `passing_on_bytes_max`, each for `passing_on_s` after it came; the oldest go first."""

    def __init__(self, config: NodeConfig) -> None:
        self._config = config
        self._kept: OrderedDict[BlockKey, _Kept] = OrderedDict()
        self._metas: dict[AnchorId, AnchorMeta] = {}
        self._count: dict[AnchorId, int] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, meta: AnchorMeta, index: int, handle: BlockHandle, kv_bytes: int, now: float) -> list[Effect]:
        """A block of an anchor came and is what its holder announced. Not kept: what no peer may have, what contradicts
        the metadata, what is kept already (the visibility becomes the strictest that was stated)."""
        key = BlockKey(meta.anchor_id, index)
        known = self._metas.get(meta.anchor_id)
        if known is not None:
            self._metas[meta.anchor_id] = stricter(known, meta)
        fits = index < meta.blocks and meta.block_bytes(index) == kv_bytes <= self._config.passing_on_bytes_max
        if key in self._kept or not is_shared(meta) or not fits or not self._config.passing_on_s:
            return []
        effects: list[Effect] = [RetainBlock(handle)]
        self._metas.setdefault(meta.anchor_id, meta)
        self._count[meta.anchor_id] = self._count.get(meta.anchor_id, 0) + 1
        self._kept[key] = _Kept(handle, kv_bytes, now + self._config.passing_on_s)
        self.bytes += kv_bytes
        while self.bytes > self._config.passing_on_bytes_max:
            effects += self._let_go(next(iter(self._kept)))
        return effects

    def get(self, anchor_id: AnchorId) -> AnchorMeta | None:
        """Metadata of an anchor of which blocks are kept."""
        return self._metas.get(anchor_id)

    def handle(self, key: BlockKey) -> BlockHandle | None:
        kept = self._kept.get(key)
        return None if kept is None else kept.handle

    def forget(self, anchor_ids: Iterable[AnchorId]) -> list[Effect]:
        """These anchors are passed on no longer."""
        gone = set(anchor_ids)
        return self._let_all_go([key for key in self._kept if key.anchor_id in gone])

    def tick(self, now: float) -> list[Effect]:
        """Let go of what is due."""
        due: list[BlockKey] = []
        for key, kept in self._kept.items():  # in order of expiry
            if kept.expires_at > now:
                break
            due.append(key)
        return self._let_all_go(due)

    def next_deadline(self) -> float:
        return next((kept.expires_at for kept in self._kept.values()), math.inf)

    def shutdown(self) -> list[Effect]:
        return self._let_all_go(tuple(self._kept))

    def _let_all_go(self, keys: Sequence[BlockKey]) -> list[Effect]:
        return [effect for key in keys for effect in self._let_go(key)]

    def _let_go(self, key: BlockKey) -> list[Effect]:
        kept = self._kept.pop(key)
        self.bytes -= kept.kv_bytes
        self._count[key.anchor_id] -= 1
        if not self._count[key.anchor_id]:
            del self._count[key.anchor_id], self._metas[key.anchor_id]
        return [DropBlock(kept.handle)]
