"""Put donor KV where the prompt needs it: gather from blocks, rotate keys once, write into the slab."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvcomm_p2p.kernels.rope_shift import rope_shift
from kvcomm_p2p.model.cache import KVCache
from kvcomm_p2p.model.spec import RotaryGeometry
from kvcomm_p2p.planning.spans import blocks_needed
from kvcomm_p2p.planning.types import Span
from kvcomm_p2p.protocol.anchors import BLOCK_TOKENS, BlockKey
from kvcomm_p2p.reuse.blocks import block_tensors


def align_span(
    cache: KVCache, span: Span, blocks: Mapping[BlockKey, memoryview], rotary: RotaryGeometry | None
) -> None:
    """Fill rows [span.start, span.end) of the slab from the blocks of the span's donor (all of which must be in `blocks`).

    Keys are rotated by the distance between their position here and where they were computed; distance 0 copies the bits.
    """
    shift = span.start - span.donor_start
    inv_freq = torch.tensor(rotary.inv_freq if rotary else (), dtype=torch.float64)
    interleaved = rotary.interleaved if rotary else False
    for anchor, index in blocks_needed(span):
        first = anchor.start + index * BLOCK_TOKENS
        tokens = anchor.block_tokens(index)
        keys, values = block_tensors(blocks[BlockKey(anchor.anchor_id, index)], cache.layout, tokens)
        low = max(span.donor_start, first)
        high = min(span.donor_start + span.tokens, first + tokens)
        rope_shift(
            keys[:, :, low - first : high - first],
            values[:, :, low - first : high - first],
            None,
            shift,
            inv_freq,
            interleaved,
            out_keys=cache.keys[:, 0, :, low + shift : high + shift],
            out_values=cache.values[:, 0, :, low + shift : high + shift],
        )
