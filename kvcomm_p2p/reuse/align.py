"""Put donor KV where the prompt needs it: gather from blocks, rotate keys once, write into the slab."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from functools import lru_cache

import torch

from kvcomm_p2p.kernels.rope_shift import rope_shift
from kvcomm_p2p.model.cache import KVCache
from kvcomm_p2p.model.spec import RotaryGeometry
from kvcomm_p2p.planning.spans import blocks_needed
from kvcomm_p2p.planning.types import Plan, Span, SpanKind
from kvcomm_p2p.protocol.anchors import BLOCK_TOKENS, AnchorMeta, BlockKey
from kvcomm_p2p.reuse.blocks import block_tensors


class Aligner:
    """Aligns blocks in whatever order they come, each as soon as it is here, so that the work hides behind the pull.

    Thread safe: blocks fill different rows. The slab must have room for the whole prompt and must not grow meanwhile.
    """

    def __init__(self, cache: KVCache, spans: Iterable[Span], rotary: RotaryGeometry | None) -> None:
        """`spans`: those with a donor; others are ignored. `rotary` None: spans must not move (`exact`)."""
        self._cache = cache
        self._rotary = rotary
        self._uses: dict[BlockKey, list[tuple[Span, AnchorMeta, int]]] = {}
        for span in spans:
            for anchor, index in blocks_needed(span):
                self._uses.setdefault(BlockKey(anchor.anchor_id, index), []).append((span, anchor, index))
        self._lock = threading.Lock()
        self.seconds = 0.0
        self.kv_bytes = 0

    def put(self, blocks: Mapping[BlockKey, memoryview]) -> None:
        """Write the rows of these blocks. Raises ValueError for a block of a wrong size."""
        started = time.perf_counter()
        for key, data in blocks.items():
            for span, anchor, index in self._uses.get(key, ()):
                _align_block(self._cache, span, anchor, index, data, self._rotary)
        with self._lock:
            self.seconds += time.perf_counter() - started
            self.kv_bytes += sum(data.nbytes for data in blocks.values())


def align_span(
    cache: KVCache,
    span: Span,
    blocks: Mapping[BlockKey, memoryview],
    rotary: RotaryGeometry | None,
    first_position: int = 0,
) -> None:
    """Fill the rows of positions [span.start, span.end) from the blocks of the span's donor (all of which must be in
    `blocks`). Row 0 of the slab is that of `first_position`.

    Keys are rotated by the distance between their position here and where they were computed; distance 0 copies the bits.
    """
    for anchor, index in blocks_needed(span):
        _align_block(cache, span, anchor, index, blocks[BlockKey(anchor.anchor_id, index)], rotary, first_position)


def interpolate(cache: KVCache, plan: Plan, rotary: RotaryGeometry | None) -> None:
    """Fill the holes that the plan interpolates from the aligned rows on both sides, linearly; what turns, turned to each
    row's position."""
    for span in plan.spans:
        if span.kind is SpanKind.REUSE and span.donor is None:
            for row in range(span.start, span.end):
                weight = (row - span.start + 1) / (span.tokens + 1)
                parts = [_turned(cache, source, row, rotary) for source in (span.start - 1, span.end)]
                for slab, left, right in zip((cache.keys, cache.values), *parts, strict=True):
                    slab[:, 0, :, row : row + 1] = torch.lerp(left, right, weight)


def _turned(cache: KVCache, source: int, row: int, rotary: RotaryGeometry | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [L, H, 1, D] of row `source` as if they had been computed at `row`."""
    parts = [slab[:, 0, :, source : source + 1] for slab in (cache.keys, cache.values)]
    out = [torch.empty_like(part) for part in parts]
    turned, kept = (1, 0) if rotary and rotary.in_values else (0, 1)
    interleaved = rotary.interleaved if rotary else False
    rope_shift(
        parts[turned], parts[kept], None, row - source, _frequencies(rotary), interleaved, out[turned], out[kept]
    )
    return out[0], out[1]


def _align_block(
    cache: KVCache,
    span: Span,
    anchor: AnchorMeta,
    index: int,
    data: memoryview,
    rotary: RotaryGeometry | None,
    first_position: int = 0,
) -> None:
    """The rows of `span` that one block of its donor holds."""
    shift = span.start - span.donor_start
    first = anchor.start + index * BLOCK_TOKENS
    tokens = anchor.block_tokens(index)
    keys, values = block_tensors(data, cache.layout, tokens)
    low = max(span.donor_start, first)
    high = min(span.donor_start + span.tokens, first + tokens)
    source = [part[:, :, low - first : high - first] for part in (keys, values)]
    rows = slice(low + shift - first_position, high + shift - first_position)
    target = [part[:, 0, :, rows] for part in (cache.keys, cache.values)]
    turned, kept = (1, 0) if rotary and rotary.in_values else (0, 1)
    rope_shift(
        source[turned],
        source[kept],
        None,
        shift,
        _frequencies(rotary),
        rotary.interleaved if rotary else False,
        out_keys=target[turned],
        out_values=target[kept],
    )


@lru_cache(maxsize=8)
def _frequencies(rotary: RotaryGeometry | None) -> torch.Tensor:
    """float64 [R/2], or [L, R/2] where layers differ."""
    return torch.tensor((rotary.layers or rotary.inv_freq) if rotary else (), dtype=torch.float64)
