"""Blocks as int8: what comes back is as near as promised, lengths are known, and nonsense is refused with a reason."""

from __future__ import annotations

import struct
from contextlib import suppress

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcomm_p2p.net.encoding import COUNTS, LARGEST, STEPS, NotEncodable, decode, encode
from kvcomm_p2p.protocol.anchors import KVLayout

LAYOUT = KVLayout(layers=2, kv_heads=3, key_dim=8, value_dim=4, dtype="float32")
TINY = float(np.finfo(np.float32).tiny)


def split(block: bytes | memoryview, layout: KVLayout, tokens: int) -> tuple[npt.NDArray[np.float64], ...]:
    """Keys [L * H, n, Dk] and values [L * H, n, Dv] of a block."""
    if layout.dtype == "bfloat16":
        flat = (np.frombuffer(block, "<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    else:
        flat = np.frombuffer(block, {"float32": "<f4", "float16": "<f2"}[layout.dtype]).astype(np.float64)
    heads = layout.layers * layout.kv_heads
    cut = heads * tokens * layout.key_dim
    return flat[:cut].reshape(heads, tokens, -1), flat[cut:].reshape(heads, tokens, -1)


def block_of(numbers: npt.NDArray[np.float64], dtype: str) -> memoryview:
    if dtype == "bfloat16":
        return memoryview((numbers.astype("<f4").view(np.uint32) >> 16).astype("<u2").tobytes())
    return memoryview(numbers.astype({"float32": "<f4", "float16": "<f2"}[dtype]).tobytes())


@st.composite
def blocks(draw: st.DrawFn) -> tuple[KVLayout, int, memoryview]:
    """Numbers of very different sizes, with channels and tokens that stand out, and zeros."""
    dtype = draw(st.sampled_from(["float32", "float16", "bfloat16"]))
    layout = KVLayout(
        draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 9)), draw(st.integers(1, 9)), dtype
    )
    tokens = draw(st.integers(1, 32))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    numbers = rng.standard_normal(tokens * layout.token_bytes // {"float32": 4}.get(dtype, 2))
    heads = layout.layers * layout.kv_heads
    keys = numbers[: heads * tokens * layout.key_dim].reshape(heads, tokens, -1)
    keys *= 10.0 ** rng.integers(-6, 3, (heads, 1, layout.key_dim))
    numbers *= draw(
        st.sampled_from([0.0, 1e-44, 1e-38, 1e-3, 1.0, 30.0, 1e30])
        if dtype == "float32"
        else st.sampled_from([0.0, 1e-6, 1.0, 30.0])
    )
    numbers[rng.random(len(numbers)) < draw(st.sampled_from([0.0, 0.3, 1.0]))] = 0.0
    return layout, tokens, block_of(numbers, dtype)


def allowed(x: npt.NDArray[np.float64], axis: int, rounding: float) -> npt.NDArray[np.float64]:
    """Half a count, as `encode` promises it, and what the dtype rounds."""
    channel = np.abs(x).max(axis=axis, keepdims=True)
    head = np.abs(x).max(axis=(1, 2), keepdims=True)
    half = channel / (2 * COUNTS) + head / (2 * STEPS * COUNTS)
    return half * (1 + 1e-5) + np.abs(x) * rounding + STEPS * COUNTS * TINY + rounding * half


@settings(max_examples=300, deadline=None)
@given(blocks())
def test_numbers_come_back_within_half_a_count(case: tuple[KVLayout, int, memoryview]) -> None:
    layout, tokens, block = case
    encoded = encode(block, layout)
    assert len(encoded) == layout.int8_bytes(tokens)
    decoded = decode(memoryview(encoded), layout, tokens)
    assert decoded.nbytes == block.nbytes and decoded.readonly
    rounding = {"float32": 1e-6, "float16": 2**-10, "bfloat16": 2**-7}[layout.dtype]
    smallest = 2**-24 if layout.dtype == "float16" else 0.0
    for true, got, axis in zip(split(block, layout, tokens), split(decoded, layout, tokens), (1, 2), strict=True):
        assert (np.abs(true - got) <= allowed(true, axis, rounding) + smallest).all()


@settings(max_examples=50, deadline=None)
@given(blocks())
def test_equal_blocks_become_equal_bytes(case: tuple[KVLayout, int, memoryview]) -> None:
    layout, _, block = case
    assert encode(block, layout) == encode(memoryview(bytes(block)), layout)


def test_a_quarter_of_float32() -> None:
    default = KVLayout(layers=30, kv_heads=3, key_dim=64, value_dim=64, dtype="float32")
    assert default.block_bytes(32) / default.int8_bytes(32) > 3.9
    half = KVLayout(layers=30, kv_heads=3, key_dim=64, value_dim=64, dtype="bfloat16")
    assert half.block_bytes(32) / half.int8_bytes(32) > 1.9


def test_channels_of_keys_and_tokens_of_values_that_stand_out_cost_the_others_nothing() -> None:
    layout = KVLayout(layers=1, kv_heads=1, key_dim=64, value_dim=64, dtype="float32")
    rng = np.random.default_rng(0)
    keys, values = rng.standard_normal((2, 32, 64))
    keys[:, 5] *= 100
    values[7] *= 100
    block = block_of(np.concatenate([keys.ravel(), values.ravel()]), "float32")
    k, v = split(decode(memoryview(encode(block, layout)), layout, 32), layout, 32)
    others = np.arange(64) != 5
    assert np.linalg.norm((k[0] - keys)[:, others]) < 0.02 * np.linalg.norm(keys[:, others])
    others = np.arange(32) != 7
    assert np.linalg.norm((v[0] - values)[others]) < 0.02 * np.linalg.norm(values[others])


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, 2 * LARGEST])
@pytest.mark.parametrize("at", [0, -1])
def test_what_is_not_finite_is_not_encoded(wrong: float, at: int) -> None:
    numbers = np.ones(LAYOUT.block_bytes(3) // 4)
    numbers[at] = wrong
    with pytest.raises(NotEncodable):
        encode(block_of(numbers, "float32"), LAYOUT)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_that_is_not_finite_is_not_encoded(dtype: str) -> None:
    layout = KVLayout(1, 1, 2, 2, dtype)
    with pytest.raises(NotEncodable):
        encode(block_of(np.array([1, 2, np.inf, 3.0]), dtype), layout)


@pytest.mark.parametrize("size", [0, 1, LAYOUT.token_bytes - 1, LAYOUT.token_bytes + 4])
def test_what_is_no_block_is_not_encoded(size: int) -> None:
    with pytest.raises(ValueError, match="no block"):
        encode(memoryview(bytes(size)), LAYOUT)


@pytest.mark.parametrize("more", [-1, 1])
def test_a_wrong_length_is_not_decoded(more: int) -> None:
    with pytest.raises(ValueError, match="tokens are"):
        decode(memoryview(bytes(LAYOUT.int8_bytes(3) + more)), LAYOUT, 3)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0, 1e38])
@pytest.mark.parametrize("which", range(12))
def test_a_scale_that_is_none_is_not_decoded(scale: float, which: int) -> None:
    encoded = bytearray(LAYOUT.int8_bytes(2))
    struct.pack_into("<f", encoded, 4 * which, scale)
    with pytest.raises(NotEncodable):
        decode(memoryview(encoded), LAYOUT, 2)


@settings(max_examples=200, deadline=None)
@given(st.binary(min_size=LAYOUT.int8_bytes(2), max_size=LAYOUT.int8_bytes(2)))
def test_any_bytes_are_decoded_or_refused(encoded: bytes) -> None:
    with suppress(NotEncodable):
        block = decode(memoryview(encoded), LAYOUT, 2)
        assert block.nbytes == LAYOUT.block_bytes(2)
        assert np.isfinite(np.frombuffer(block, "<f4")).all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("scale", [1e30, 3.08e32, 3.2e32, 1e35, 1e37])
def test_the_largest_counts_of_the_largest_scale_that_passes_are_numbers(dtype: str, scale: float) -> None:
    """No block could have been encoded with a larger one; with it, infinity times no count at all would be NaN."""
    layout = KVLayout(1, 1, 4, 4, dtype)
    encoded = bytearray(layout.int8_bytes(1))
    struct.pack_into("<2f", encoded, 0, scale, scale)
    encoded[8:] = bytes([255] * 5 + [127, 0, 129, 128] * 2)
    honest = LARGEST / (STEPS * COUNTS)
    if scale > honest * 1.001:
        with pytest.raises(NotEncodable):
            decode(memoryview(encoded), layout, 1)
        return
    keys, values = split(decode(memoryview(encoded), layout, 1), layout, 1)
    assert not np.isnan(keys).any() and not np.isnan(values).any()
    assert dtype == "float16" or np.isfinite(keys).all()
