"""Triton twin of `reference.residual_shift`: keys and values in one launch.

Grid: (blocks of rows, L * H). A program adds to BLOCK_T rows of one layer and head. Angles come in as float32 tables
made in float64 on the host, one per layer where layers rotate differently. All addresses are int64: L * H * T * D
passes 2^31 for long prompts of large models.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_ROWS = 32


def residual_shift(
    keys: torch.Tensor,
    values: torch.Tensor,
    shift_keys: torch.Tensor,
    shift_values: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    skip: torch.Tensor | None,
) -> None:
    """See the contract in `kvcomm_p2p.kernels.residual_shift`; arguments are already checked and not empty."""
    layers, heads, rows, key_dim = keys.shape
    half = cos.shape[-1] // 2
    grid = (triton.cdiv(rows, BLOCK_ROWS), layers * heads)
    residual_shift_kernel[grid](
        keys, values, shift_keys, shift_values, cos, sin,
        skip.contiguous() if skip is not None else cos,
        rows, heads,
        2 * rows * half if cos.ndim == 3 else 0,
        *keys.stride(), *values.stride(), *shift_keys.stride(), *shift_values.stride(),
        HALF=half,
        KEY_DIM=key_dim,
        VALUE_DIM=values.shape[3],
        BLOCK_T=BLOCK_ROWS,
        BLOCK_HALF=triton.next_power_of_2(max(1, half)),
        BLOCK_REST=triton.next_power_of_2(max(1, key_dim - 2 * half)),
        BLOCK_VALUE=triton.next_power_of_2(max(1, values.shape[3])),
        INTERLEAVED=interleaved,
        PER_ROW=shift_keys.shape[2] != 1,
        SKIPPING=skip is not None,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def residual_shift_kernel(  # type: ignore[no-untyped-def]
    keys, values, shift_keys, shift_values, cos, sin, skip,
    rows, heads,
    angle_l,
    k_l, k_h, k_t, k_d, v_l, v_h, v_t, v_d,
    sk_l, sk_h, sk_t, sk_d, sv_l, sv_h, sv_t, sv_d,
    HALF: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    INTERLEAVED: tl.constexpr, PER_ROW: tl.constexpr, SKIPPING: tl.constexpr,
):  # fmt: skip
    layer = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T).to(tl.int64)
    chosen = row < rows
    if SKIPPING:
        chosen = chosen & (tl.load(skip + row, mask=chosen, other=1).to(tl.int32) == 0)
    if PER_ROW:
        source = row
    else:
        source = row * 0
    key_row = keys + layer * k_l + head * k_h + row[:, None] * k_t
    shift_row = shift_keys + layer * sk_l + head * sk_h + source[:, None] * sk_t

    if HALF > 0:
        pair = tl.arange(0, BLOCK_HALF).to(tl.int64)
        if INTERLEAVED:
            first, second = pair * 2, pair * 2 + 1
        else:
            first, second = pair, pair + HALF
        mask = chosen[:, None] & (pair < HALF)[None, :]
        # Both dims of a pair have one angle; sin has its sign at the second.
        angle = layer * angle_l + row[:, None] * (2 * HALF) + second[None, :]
        c = tl.load(cos + angle, mask=mask, other=1.0)
        s = tl.load(sin + angle, mask=mask, other=0.0)
        a = tl.load(shift_row + first[None, :] * sk_d, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(shift_row + second[None, :] * sk_d, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(key_row + first[None, :] * k_d, mask=mask, other=0.0)
        y = tl.load(key_row + second[None, :] * k_d, mask=mask, other=0.0)
        tl.store(key_row + first[None, :] * k_d, (x.to(tl.float32) + (a * c - b * s)).to(x.dtype), mask=mask)
        tl.store(key_row + second[None, :] * k_d, (y.to(tl.float32) + (b * c + a * s)).to(y.dtype), mask=mask)

    if KEY_DIM > 2 * HALF:
        rest = 2 * HALF + tl.arange(0, BLOCK_REST).to(tl.int64)
        mask = chosen[:, None] & (rest < KEY_DIM)[None, :]
        x = tl.load(key_row + rest[None, :] * k_d, mask=mask, other=0.0)
        a = tl.load(shift_row + rest[None, :] * sk_d, mask=mask, other=0.0).to(tl.float32)
        tl.store(key_row + rest[None, :] * k_d, (x.to(tl.float32) + a).to(x.dtype), mask=mask)

    dim = tl.arange(0, BLOCK_VALUE).to(tl.int64)
    mask = chosen[:, None] & (dim < VALUE_DIM)[None, :]
    value_row = values + layer * v_l + head * v_h + row[:, None] * v_t
    value_shift_row = shift_values + layer * sv_l + head * sv_h + source[:, None] * sv_t
    x = tl.load(value_row + dim[None, :] * v_d, mask=mask, other=0.0)
    a = tl.load(value_shift_row + dim[None, :] * sv_d, mask=mask, other=0.0).to(tl.float32)
    tl.store(value_row + dim[None, :] * v_d, (x.to(tl.float32) + a).to(x.dtype), mask=mask)
