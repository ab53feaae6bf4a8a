"""Publishing: what was prefilled, generated or pulled becomes anchors, in the background.

Rows that a fill or a generation has written are never changed again, so they can be copied while decoding goes on.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvcomm_p2p.model.cache import KVCache
from kvcomm_p2p.model.spec import ModelSpec
from kvcomm_p2p.net.driver import Driver
from kvcomm_p2p.planning.fetches import replica_pieces
from kvcomm_p2p.planning.lineage import VARIANT_BYTES, Lineage
from kvcomm_p2p.planning.parts import replica_of
from kvcomm_p2p.planning.segments import Segment, VisibilityMark, cut_anchors
from kvcomm_p2p.planning.spans import blocks_needed, entangled, hops_at
from kvcomm_p2p.planning.superseding import Outdated, replaced, superseded
from kvcomm_p2p.planning.types import Plan, SpanKind
from kvcomm_p2p.planning.winnow import ContentMark, content_marks
from kvcomm_p2p.protocol.anchors import BLOCK_TOKENS, AnchorMeta, BlockKey, HeldAnchor, Visibility
from kvcomm_p2p.protocol.ids import AnchorId, SequenceId
from kvcomm_p2p.protocol.pool import stricter
from kvcomm_p2p.reuse.blocks import fill_block
from kvcomm_p2p.reuse.pulling import Pulled
from kvcomm_p2p.store import BlockStore, Composition

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Published:
    """A prompt as it was published, for its answer to go on from. `contents`: names of its short contents."""

    variant: bytes
    last: AnchorMeta | None
    before_last: AnchorId | None
    contents: tuple[ContentMark, ...] = ()


class Publisher:
    """Lives on the driver's loop; copies and hashes in compute threads."""

    def __init__(
        self,
        driver: Driver,
        store: BlockStore,
        spec: ModelSpec,
        lineage: Lineage,
        content_key: bytes,
        compute: Executor,
    ) -> None:
        self._driver = driver
        self._store = store
        self._spec = spec
        self._lineage = lineage
        self._key = content_key
        self._compute = compute
        self._outdated = Outdated()

    async def prompt(
        self,
        token_ids: npt.NDArray[np.uint32],
        cache: KVCache,
        plan: Plan,
        visibility: Sequence[VisibilityMark],
        contents: tuple[ContentMark, ...] = (),
    ) -> Published:
        """Publish rows [0, T) of a filled slab, its short contents under their names; returns where an answer goes on."""
        hops = hops_at(plan)
        variant = (self._lineage.continued(plan) or os.urandom(VARIANT_BYTES)) if hops[-1][1] > 0 else b""
        segments = await self._cut(token_ids, hops, filled_marks(plan, visibility), variant, contents)
        await self._publish(cache, segments, variant, None)
        held = [segment for segment in segments if self._driver.held(segment.meta.anchor_id) is not None]
        await self._supersede(superseded(plan, [segment.meta for segment in held]))
        last = segments[-1].meta
        before = segments[-2].meta.anchor_id if len(segments) > 1 else None
        return Published(variant, last, before, contents)

    async def answer(
        self,
        token_ids: npt.NDArray[np.uint32],
        cache: KVCache,
        plan: Plan,
        visibility: Sequence[VisibilityMark],
        prompt: Published,
    ) -> None:
        """Publish what was generated behind a published prompt: `token_ids` are prompt and answer, as far as rows exist.

        The prompt's last anchor is replaced by a longer one if it ended in the middle of a block or was short. The answer
        is a content: it may fill a slot of somebody else's prompt.
        """
        last = prompt.last
        if last is None or len(token_ids) <= last.end:
            return
        contents = (*prompt.contents, *content_marks(token_ids, [(plan.tokens, len(token_ids))], self._key))
        segments = await self._cut(
            token_ids,
            hops_at(plan),
            filled_marks(plan, visibility),
            prompt.variant,
            contents,
            start=last.start,
            sequence=last.sequence_id,
        )
        await self._publish(cache, segments, prompt.variant, prompt.before_last)
        longer = [segment.meta for segment in segments]
        if replaced(last, longer) and self._driver.held(longer[0].anchor_id) is not None:
            await self._supersede([last.anchor_id])

    async def replicas(self, pulled: Pulled) -> None:
        """Keep pulled blocks as they came: we become one more holder of the donor's anchors, or of parts of them.

        Takes over the handles: those of pieces too short to keep are dropped.
        """
        try:
            for anchor, piece in replica_pieces(pulled.anchors, pulled.handles):
                await self._driver.publish([await self._run(partial(self._replica, anchor, piece, pulled))])
        finally:
            for handle in pulled.handles.values():
                self._store.drop(handle)
            pulled.handles.clear()

    # ---------------------------------------------------------------------------------------------------------- inside

    async def _cut(
        self,
        token_ids: npt.NDArray[np.uint32],
        hops: Sequence[tuple[int, int]],
        visibility: Sequence[VisibilityMark],
        variant: bytes,
        contents: Sequence[ContentMark],
        *,
        start: int = 0,
        sequence: SequenceId | None = None,
    ) -> list[Segment]:
        return await self._run(
            partial(
                cut_anchors,
                token_ids,
                hops=hops,
                visibility=visibility,
                model_id=self._spec.model_id,
                layout=self._spec.layout,
                key=self._key,
                variant=variant,
                start=start,
                sequence=sequence,
                marks=contents,
            )
        )

    async def _publish(
        self, cache: KVCache, segments: Sequence[Segment], variant: bytes, before: AnchorId | None
    ) -> None:
        """Copy, hash and publish the anchors that are not held yet, first to last."""
        self._lineage.published(segments, variant, before, self._key)
        for segment in segments:
            held = self._driver.held(segment.meta.anchor_id)
            # One that became stricter is published again: the pool keeps the strictest, and peers are told.
            if held is not None and stricter(held.meta, segment.meta) == held.meta:
                await self._driver.touch([segment.meta.anchor_id])
                continue
            blocks, digests = await self._run(partial(copy_anchor, cache, segment.meta, self._store))
            anchor = HeldAnchor(segment.meta, segment.token_ids, blocks.put(), digests, segment.landmarks)
            await self._driver.publish([anchor])

    async def _supersede(self, anchor_ids: Sequence[AnchorId]) -> None:
        """Forget, a little later, anchors whose rows now stand in longer ones: a conversation is held once, not per turn."""
        due = self._outdated.add(anchor_ids, asyncio.get_running_loop().time())
        if due:
            await self._driver.forget(due)

    def _replica(self, anchor: AnchorMeta, indexes: list[int], pulled: Pulled) -> HeldAnchor:
        """Blocks `indexes` (consecutive) of a peer's anchor as an anchor of ours; takes over their handles."""
        held = replica_of(anchor, pulled.token_ids[anchor.anchor_id], indexes, self._key)
        keys = [BlockKey(anchor.anchor_id, index) for index in indexes]
        handles = tuple(pulled.handles.pop(key) for key in keys)
        digests = tuple(pulled.remote[key].digest for key in keys)
        return HeldAnchor(held.meta, held.token_ids, handles, digests, held.landmarks)

    async def _run(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._compute, call)


def filled_marks(plan: Plan, visibility: Sequence[VisibilityMark]) -> list[VisibilityMark]:
    """The prompt's marks and those of the donors: what was computed behind somebody's private or group text carries that.

    What stands at the beginning of an entangled run depends on all of it, prompt and donors alike.
    """
    whole = entangled(plan)
    donated = [
        VisibilityMark(span.start, anchor.visibility, anchor.group)
        for span in plan.spans
        if span.kind is not SpanKind.RECOMPUTE
        for source in whole.get(span.run, (span,))
        for anchor, _ in blocks_needed(source)
        if anchor.visibility is not Visibility.PUBLIC
    ]
    bodies = [[span for span in spans if span.kind is SpanKind.REUSE] for spans in whole.values()]
    ranges = [(body[0].start, body[-1].end) for body in bodies]
    told = [
        mark._replace(start=min([mark.start, *(first for first, end in ranges if first < mark.start < end)]))
        for mark in visibility
    ]
    return sorted([*told, *donated], key=lambda mark: mark.start)


def copy_anchor(cache: KVCache, meta: AnchorMeta, store: BlockStore) -> tuple[Composition, tuple[bytes, ...]]:
    """The finished blocks of an anchor and the SHA-256 of each, from the slab that holds its rows."""
    sizes = [meta.block_bytes(index) for index in range(meta.blocks)]
    blocks = store.compose(sizes, shared=meta.visibility is not Visibility.PRIVATE)
    digests = []
    for index, buffer in enumerate(blocks.buffers):
        start = meta.start + index * BLOCK_TOKENS
        fill_block(cache, start, start + meta.block_tokens(index), buffer)
        digests.append(hashlib.sha256(buffer).digest())
    blocks.finish()
    return blocks, tuple(digests)
