"""What could have been reused and was recomputed shows by how much it would have been wrong: that is remembered.

Runs behind a published prompt, never before its answer. Rows of a filled slab are not changed any more, so they can be read
while decoding goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Container, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

import torch

from kvcomm_p2p.model.cache import KVCache
from kvcomm_p2p.model.spec import ModelSpec
from kvcomm_p2p.net.driver import Driver
from kvcomm_p2p.planning.segments import VisibilityMark
from kvcomm_p2p.planning.spans import blocks_needed, exact_until, span_hops
from kvcomm_p2p.planning.types import Plan, Provenance, Rejected, Run, Span, SpanKind
from kvcomm_p2p.protocol.anchors import BlockKey, Visibility
from kvcomm_p2p.reuse.align import align_span
from kvcomm_p2p.reuse.deviations import DeviationMemory, observe, strictest
from kvcomm_p2p.reuse.publish import filled_marks
from kvcomm_p2p.store import BlockStore, StaleHandle

LEARNED_TOKENS_MAX = 256
"""Per prompt; short runs, which nothing else repairs, come first."""

LESSON_TOKENS_MIN = 8
"""Shorter pieces teach too little."""

DEVIATION_MAX = 1.0
"""Aligned KV that is further from the true one than this part of its length is not off by another prefix, but wrong."""

log = logging.getLogger("kvcomm_p2p.agent")


@dataclass(frozen=True, slots=True)
class Lesson:
    """Positions of a filled prompt whose rows are exact, and which a donor holds as well: `span` says where. `edge`: the kind
    of prefix change."""

    span: Span
    edge: bytes


class Learner:
    """Fills one agent's memory. Lives on the driver's loop; aligns and compares in compute threads."""

    def __init__(
        self, memory: DeviationMemory, driver: Driver, store: BlockStore, spec: ModelSpec, compute: Executor
    ) -> None:
        self._memory = memory
        self._driver = driver
        self._store = store
        self._spec = spec
        self._compute = compute

    async def learn(self, cache: KVCache, plan: Plan, visibility: Sequence[VisibilityMark]) -> int:
        """Remember the deviations of what the plan left unused, as far as its donors' blocks are in the own pool. Returns how
        many tokens were learned. `cache`: filled by `plan`; `visibility`: the prompt's marks."""
        profile = self._spec.profile
        if profile is None or not profile.short or not self._memory.bytes_max:
            return 0
        marks = filled_marks(plan, visibility)
        learned = 0
        for lesson in lessons(plan, profile.short, profile.run_tokens_min):
            held = self._held(lesson.span)
            if held is None:
                continue
            blocks, accesses = held
            accesses += [(mark.visibility, mark.group) for mark in marks if mark.start < lesson.span.end]
            call = partial(self._remember, cache, lesson, blocks, strictest(accesses))
            learned += await asyncio.get_running_loop().run_in_executor(self._compute, call)
        return learned

    def _held(self, span: Span) -> tuple[dict[BlockKey, memoryview], list[tuple[Visibility, bytes]]] | None:
        """The span's blocks, and who may see them; None unless the own pool holds them all."""
        blocks: dict[BlockKey, memoryview] = {}
        accesses: list[tuple[Visibility, bytes]] = []
        for anchor, index in blocks_needed(span):
            held = self._driver.held(anchor.anchor_id)
            if held is None:
                return None
            try:
                blocks[BlockKey(anchor.anchor_id, index)] = self._store.view(held.handles[index])
            except StaleHandle:
                return None
            # What it was when it was found may have become stricter.
            accesses += [(anchor.visibility, anchor.group), (held.meta.visibility, held.meta.group)]
        return blocks, accesses

    def _remember(
        self,
        cache: KVCache,
        lesson: Lesson,
        blocks: Mapping[BlockKey, memoryview],
        seen_by: tuple[Visibility, bytes],
    ) -> int:
        """In a compute thread."""
        span = lesson.span
        scratch = KVCache(cache.layout, span.tokens, device=cache.keys.device)
        align_span(scratch, span, blocks, self._spec.rotary, first_position=span.start)
        aligned = scratch.keys[:, 0], scratch.values[:, 0]
        rows = slice(span.start, span.end)
        true = cache.keys[:, 0, :, rows], cache.values[:, 0, :, rows]
        if not relative_deviation(aligned, true) <= DEVIATION_MAX:
            log.debug("nothing learned from %d tokens that are no copy of these", span.tokens)
            return 0
        visibility, group = seen_by
        deviation = observe(
            aligned,
            true,
            span.start,
            self._spec.rotary,
            model_id=self._spec.model_id,
            edge=lesson.edge,
            visibility=visibility,
            group=group if visibility is Visibility.GROUP else b"",
        )
        return span.tokens if self._memory.add(deviation) else 0


def lessons(plan: Plan, kinds: Container[Provenance], run_tokens_min: int) -> list[Lesson]:
    """What the plan's unused runs of these kinds can teach, at most LEARNED_TOKENS_MAX tokens, each position once.

    Only rows whose prefix is wholly exact are what full prefill would have given, and only from exact copies is learned:
    what a repaired one teaches would be one more repair behind whatever it corrects. Runs shorter than `run_tokens_min`
    come first.
    """
    until = exact_until(plan)
    taken: list[Span] = []
    found: list[Lesson] = []
    left = LEARNED_TOKENS_MAX
    for rejected, piece in _pieces(plan.rejected, run_tokens_min):
        assert rejected.run is not None
        tokens = min(piece.length, until - piece.prompt_start, left)
        span = Span(
            piece.prompt_start, piece.prompt_start + tokens, SpanKind.REUSE, rejected.run.donor, piece.donor_start
        )
        repeated = any(span.start < other.end and other.start < span.end for other in taken)
        if (
            tokens >= LESSON_TOKENS_MIN
            and piece.prompt_start > 0
            and rejected.run.provenance in kinds
            and not repeated
            and span_hops(span) == 0
        ):
            taken.append(span)
            found.append(Lesson(span, rejected.run.edge))
            left -= tokens
    return found


def relative_deviation(aligned: tuple[torch.Tensor, torch.Tensor], true: tuple[torch.Tensor, torch.Tensor]) -> float:
    """L2 length of the difference of keys [L, H, n, Dk] and values [L, H, n, Dv] from the true ones, in parts of theirs; the
    larger of both, layer 0 left out. NaN for KV that is not finite."""
    ratios = [
        (one[1:].float() - other[1:].float()).norm() / other[1:].float().norm().clamp_min(1e-6)
        for one, other in zip(aligned, true, strict=True)
    ]
    return float(torch.stack(ratios).max())


def _pieces(rejected: Sequence[Rejected], run_tokens_min: int) -> list[tuple[Rejected, Run]]:
    """Equal pieces of what was rejected: of short runs first, then by position."""
    pieces = [(item, piece) for item in rejected if item.run is not None for piece in item.run.pieces]

    def order(pair: tuple[Rejected, Run]) -> tuple[bool, int]:
        item, piece = pair
        assert item.run is not None
        return sum(each.length for each in item.run.pieces) >= run_tokens_min, piece.prompt_start

    return sorted(pieces, key=order)
