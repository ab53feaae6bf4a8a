"""Blocks as int8 for slow links: about a quarter of float32, and almost the same numbers.

A block of n tokens becomes, all little-endian and C-contiguous:

    key scales    float32 [L, H]        one unit per layer and head
    value scales  float32 [L, H]
    key steps     uint8 [L, H, Dk]      units per count, of each channel
    value steps   uint8 [L, H, n]       units per count, of each token
    keys          int8 [L, H, n, Dk]    counts, -127 to 127
    values        int8 [L, H, n, Dv]

A number is count * (scale * step). Keys have channels that are large for every token, values have tokens that are large in every
channel; with one step for all of a head these would cost the others their precision (docs/decisions/0022-int8.md).
Equal blocks become equal bytes on every machine: only operations that IEEE 754 defines to the last bit are used.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvcomm_p2p.protocol.anchors import KVLayout

STEPS = 255
COUNTS = 127
LARGEST = 1e37
"""Larger numbers are no KV, and would overflow on the way back."""

_SCALE_MAX = np.nextafter(np.float32(LARGEST) / np.float32(STEPS * COUNTS), np.float32(np.inf))
"""`encode` makes no larger scale; with one, counts could come to infinity, and infinity times no count at all to NaN."""

_LEAST = float(np.finfo(np.float32).tiny)

Floats = npt.NDArray[np.float32]


class NotEncodable(ValueError):
    """A block holds NaN, infinity, or numbers that are no KV."""


def encode(block: memoryview, layout: KVLayout) -> bytearray:
    """The block as int8, `layout.int8_bytes(n)` bytes.

    Every number comes back within half a count, and that is at most 1/254 of the largest number of its key channel or value
    token, plus 1/64,770 of the largest of its head. Raises NotEncodable, and ValueError for a size that is not that of a block
    of `layout`.
    """
    tokens, rest = divmod(block.nbytes, layout.token_bytes)
    if rest or not tokens:
        raise ValueError(f"{block.nbytes} bytes are no block of {layout.token_bytes} bytes a token")
    encoded = bytearray(layout.int8_bytes(tokens))
    parts = _Parts(memoryview(encoded), layout, tokens)
    keys, values = _split(block, layout, tokens)
    _quantize(keys, parts.keys, parts.key_scales, parts.key_steps, axis=1)
    _quantize(values, parts.values, parts.value_scales, parts.value_steps, axis=2)
    return encoded


def decode(encoded: memoryview, layout: KVLayout, tokens: int) -> memoryview:
    """The bytes of a block of `tokens` tokens in the layout's dtype, read-only. Raises ValueError for a wrong size, and
    NotEncodable where a scale is no scale; what is finite may still come to infinity in a dtype of 16 bits."""
    if encoded.nbytes != layout.int8_bytes(tokens):
        raise ValueError(f"{tokens} tokens are {layout.int8_bytes(tokens)} bytes as int8, not {encoded.nbytes}")
    parts = _Parts(encoded, layout, tokens)
    block = np.empty(layout.block_bytes(tokens), dtype=np.uint8)
    keys, values = _split(block.data, layout, tokens)
    _restore(parts.keys, keys, parts.key_scales, parts.key_steps, axis=1, dtype=layout.dtype)
    _restore(parts.values, values, parts.value_scales, parts.value_steps, axis=2, dtype=layout.dtype)
    return block.data.toreadonly()


class _Parts:
    """Views of an encoded block; heads of all layers in one dimension."""

    def __init__(self, encoded: memoryview, layout: KVLayout, tokens: int) -> None:
        heads = layout.layers * layout.kv_heads
        shapes: tuple[tuple[str, str, tuple[int, ...]], ...] = (
            ("key_scales", "<f4", (heads,)),
            ("value_scales", "<f4", (heads,)),
            ("key_steps", "u1", (heads, layout.key_dim)),
            ("value_steps", "u1", (heads, tokens)),
            ("keys", "i1", (heads, tokens, layout.key_dim)),
            ("values", "i1", (heads, tokens, layout.value_dim)),
        )
        at = 0
        for name, dtype, shape in shapes:
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            setattr(self, name, np.frombuffer(encoded[at : at + size], dtype=dtype).reshape(shape))
            at += size

    key_scales: Floats
    value_scales: Floats
    key_steps: npt.NDArray[np.uint8]
    value_steps: npt.NDArray[np.uint8]
    keys: npt.NDArray[np.int8]
    values: npt.NDArray[np.int8]


def _split(block: memoryview, layout: KVLayout, tokens: int) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.generic]]:
    """Keys [L * H, n, Dk] and values [L * H, n, Dv] of a block; bfloat16 as the uint16 that it is made of."""
    dtype = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}[layout.dtype]
    flat = np.frombuffer(block, dtype=dtype)
    heads = layout.layers * layout.kv_heads
    split = heads * tokens * layout.key_dim
    return flat[:split].reshape(heads, tokens, layout.key_dim), flat[split:].reshape(heads, tokens, layout.value_dim)


def _quantize(
    numbers: npt.NDArray[np.generic],
    counts: npt.NDArray[np.int8],
    scales: Floats,
    steps: npt.NDArray[np.uint8],
    axis: int,
) -> None:
    """[heads, n, D] to counts: one step for all numbers along `axis`."""
    x = _as_float32(numbers)
    largest = np.maximum(x.max(axis=axis), -x.min(axis=axis))
    of_head = largest.max(axis=1)
    if not (of_head <= LARGEST).all():
        raise NotEncodable("the block holds NaN, infinity, or numbers that are no KV")
    scale = of_head / np.float32(STEPS * COUNTS)
    scale[scale < _LEAST] = 0
    unit = np.where(scale > 0, scale, np.float32(1))[:, None]
    step = np.clip(np.ceil(largest / (unit * np.float32(COUNTS))), 1, STEPS)
    scales[:], steps[:] = scale, step
    per_number = np.where(scale[:, None] > 0, 1 / (unit * step), np.float32(0))
    scaled = x * np.expand_dims(per_number, axis)
    np.rint(scaled, out=scaled)
    counts[:] = scaled


def _restore(
    counts: npt.NDArray[np.int8],
    numbers: npt.NDArray[np.generic],
    scales: Floats,
    steps: npt.NDArray[np.uint8],
    axis: int,
    dtype: str,
) -> None:
    """The inverse, into `numbers`."""
    if not ((scales >= 0) & (scales <= _SCALE_MAX)).all():
        raise NotEncodable("a scale is NaN, infinite, negative or too large")
    with np.errstate(over="ignore"):
        x = counts.astype(np.float32)
        x *= np.expand_dims(scales[:, None] * steps.astype(np.float32), axis)
        numbers[:] = _as_bfloat16(x) if dtype == "bfloat16" else x


def _as_float32(numbers: npt.NDArray[np.generic]) -> Floats:
    if numbers.dtype == np.uint16:
        return (numbers.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return numbers.astype(np.float32, copy=False)


def _as_bfloat16(x: Floats) -> npt.NDArray[np.uint16]:
    """Rounded to nearest, ties to even; x is finite."""
    bits = x.view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    return (rounded >> np.uint32(16)).astype(np.uint16)
