"""Bytes of blocks <-> tensors. A block of n tokens is keys [L, H, n, Dk] then values [L, H, n, Dv], C-contiguous."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from kvcomm_p2p.model.cache import KVCache
from kvcomm_p2p.protocol.anchors import KVLayout


def block_tensors(data: memoryview, layout: KVLayout, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views keys [L, H, n, Dk] and values [L, H, n, Dv] of a block's bytes, without a copy. They must not be written.

    The tensors keep `data` alive. Raises ValueError when the size is not that of `tokens` tokens.
    """
    if data.nbytes != layout.block_bytes(tokens):
        raise ValueError(f"a block of {tokens} tokens has {layout.block_bytes(tokens)} bytes, not {data.nbytes}")
    source = np.frombuffer(data, dtype=np.uint8)
    # torch warns about read-only buffers; nobody writes through these views, so go by the address.
    raw = (ctypes.c_uint8 * data.nbytes).from_address(source.ctypes.data)
    raw.owner = source  # type: ignore[attr-defined]
    flat = torch.frombuffer(raw, dtype=getattr(torch, layout.dtype))
    split = layout.layers * layout.kv_heads * tokens * layout.key_dim
    keys = flat[:split].view(layout.layers, layout.kv_heads, tokens, layout.key_dim)
    values = flat[split:].view(layout.layers, layout.kv_heads, tokens, layout.value_dim)
    return keys, values


def copy_block(cache: KVCache, start: int, end: int) -> memoryview:
    """Bytes of rows [start, end) of a slab as one block, in a buffer of its own."""
    buffer = np.empty(cache.layout.block_bytes(end - start), dtype=np.uint8).data
    fill_block(cache, start, end, buffer)
    return buffer


def fill_block(cache: KVCache, start: int, end: int, buffer: memoryview) -> None:
    """Write rows [start, end) of a slab as one block into `buffer`, and keep no reference to it.

    Raises ValueError when the buffer has not the size of such a block.
    """
    keys, values = block_tensors(buffer, cache.layout, end - start)
    keys.copy_(cache.keys[:, 0, :, start:end])
    values.copy_(cache.values[:, 0, :, start:end])
