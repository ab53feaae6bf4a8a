"""Triton twin of `reference.rope_shift`: gather, rotation and copy of values in one launch.

Grid: (blocks of tokens, L * H). A program moves BLOCK_T tokens of one layer and head. Angles come in as float32 tables
made in float64 on the host (one row when all tokens move equally far), so that the kernel does no trigonometry in
float32; where layers rotate differently, one such table per layer. All addresses are int64: L * H * T * D passes 2^31
for long prompts of large models.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_TOKENS = 32


def rope_shift(
    keys: torch.Tensor,
    values: torch.Tensor,
    position_map: torch.Tensor | None,
    shift: torch.Tensor | int,
    inv_freq: torch.Tensor,
    interleaved: bool,
    out_keys: torch.Tensor,
    out_values: torch.Tensor,
) -> None:
    """See the contract in `kvcomm_p2p.kernels.rope_shift`; arguments are already checked and not empty."""
    layers, heads, tokens, key_dim = out_keys.shape
    cos, sin = _tables(shift, inv_freq, keys.device)
    mapped = position_map is not None
    grid = (triton.cdiv(tokens, BLOCK_TOKENS), layers * heads)
    rope_shift_kernel[grid](
        keys, values, out_keys, out_values,
        position_map if position_map is not None else keys, cos, sin,
        tokens, heads,
        cos.stride(0) if inv_freq.ndim == 2 else 0,
        *keys.stride(), *values.stride(), *out_keys.stride(), *out_values.stride(),
        HALF=inv_freq.shape[-1],
        KEY_DIM=key_dim,
        VALUE_DIM=values.shape[3],
        BLOCK_T=BLOCK_TOKENS,
        BLOCK_HALF=triton.next_power_of_2(max(1, inv_freq.shape[-1])),
        BLOCK_REST=triton.next_power_of_2(max(1, key_dim - 2 * inv_freq.shape[-1])),
        BLOCK_VALUE=triton.next_power_of_2(max(1, values.shape[3])),
        INTERLEAVED=interleaved,
        MAPPED=mapped,
        PER_TOKEN=isinstance(shift, torch.Tensor),
    )  # fmt: skip


def _tables(
    shift: torch.Tensor | int, inv_freq: torch.Tensor, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, float32 [1 or T, R/2] or, for inv_freq [L, R/2], [L, 1 or T, R/2]; contiguous."""
    moved = shift if isinstance(shift, torch.Tensor) else torch.tensor([shift], dtype=torch.int64, device=device)
    angle = moved.to(device, torch.float64)[:, None] * inv_freq.to(device).unsqueeze(-2)
    return angle.cos().float().contiguous(), angle.sin().float().contiguous()


@triton.jit  # type: ignore[untyped-decorator]
def rope_shift_kernel(  # type: ignore[no-untyped-def]
    keys, values, out_keys, out_values, position_map, cos, sin,
    tokens, heads,
    angle_l,
    k_l, k_h, k_t, k_d, v_l, v_h, v_t, v_d,
    ok_l, ok_h, ok_t, ok_d, ov_l, ov_h, ov_t, ov_d,
    HALF: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    INTERLEAVED: tl.constexpr, MAPPED: tl.constexpr, PER_TOKEN: tl.constexpr,
):  # fmt: skip
    layer = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    target = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T).to(tl.int64)
    inside = target < tokens
    if MAPPED:
        source = tl.load(position_map + target, mask=inside, other=-1).to(tl.int64)
        inside = inside & (source >= 0)
    else:
        source = target
    key_row = keys + layer * k_l + head * k_h + source[:, None] * k_t
    out_row = out_keys + layer * ok_l + head * ok_h + target[:, None] * ok_t

    if HALF > 0:
        pair = tl.arange(0, BLOCK_HALF).to(tl.int64)
        if INTERLEAVED:
            first, second = pair * 2, pair * 2 + 1
        else:
            first, second = pair, pair + HALF
        chosen = inside[:, None] & (pair < HALF)[None, :]
        if PER_TOKEN:
            angle_row, angle_mask = layer * angle_l + target[:, None] * HALF + pair[None, :], chosen
        else:
            angle_row, angle_mask = layer * angle_l + pair[None, :], (pair < HALF)[None, :]
        c = tl.load(cos + angle_row, mask=angle_mask, other=1.0)
        s = tl.load(sin + angle_row, mask=angle_mask, other=0.0)
        a = tl.load(key_row + first[None, :] * k_d, mask=chosen, other=0.0)
        b = tl.load(key_row + second[None, :] * k_d, mask=chosen, other=0.0)
        a32, b32 = a.to(tl.float32), b.to(tl.float32)
        tl.store(out_row + first[None, :] * ok_d, (a32 * c - b32 * s).to(a.dtype), mask=chosen)
        tl.store(out_row + second[None, :] * ok_d, (b32 * c + a32 * s).to(a.dtype), mask=chosen)

    if KEY_DIM > 2 * HALF:
        rest = 2 * HALF + tl.arange(0, BLOCK_REST).to(tl.int64)
        kept = inside[:, None] & (rest < KEY_DIM)[None, :]
        tl.store(
            out_row + rest[None, :] * ok_d, tl.load(key_row + rest[None, :] * k_d, mask=kept, other=0.0), mask=kept
        )

    dim = tl.arange(0, BLOCK_VALUE).to(tl.int64)
    copied = inside[:, None] & (dim < VALUE_DIM)[None, :]
    value_row = values + layer * v_l + head * v_h + source[:, None] * v_t
    out_value_row = out_values + layer * ov_l + head * ov_h + target[:, None] * ov_t
    value = tl.load(value_row + dim[None, :] * v_d, mask=copied, other=0.0)
    tl.store(out_value_row + dim[None, :] * ov_d, value, mask=copied)
