"""Plain torch: the definition that the Triton twin is tested against, and what runs on CPUs, so it is written to be
fast.

Nothing is made that is as large as the keys unless dtypes force it or rows are corrected one by one: angles and a single
correction are broadcast into two fused additions over whole rows.
"""

from __future__ import annotations

import torch

_GROUP_BYTES = 1 << 20


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
    """See the contract in `kvcomm_p2p.kernels.residual_shift`; arguments are already checked."""
    if skip is None:
        _add(keys, values, shift_keys, shift_values, cos, sin, interleaved)
        return
    rows = torch.nonzero(~skip).squeeze(1)
    kept_keys, kept_values = keys.index_select(2, rows), values.index_select(2, rows)
    if shift_keys.shape[2] != 1:
        shift_keys, shift_values = shift_keys.index_select(2, rows), shift_values.index_select(2, rows)
    _add(kept_keys, kept_values, shift_keys, shift_values, cos[..., rows, :], sin[..., rows, :], interleaved)
    keys.index_copy_(2, rows, kept_keys)
    values.index_copy_(2, rows, kept_values)


def _add(
    keys: torch.Tensor,
    values: torch.Tensor,
    shift_keys: torch.Tensor,
    shift_values: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
) -> None:
    # Mixed and half dtypes are added in float32 and rounded once.
    values.add_(shift_values)
    rotated = cos.shape[-1]
    if rotated < keys.shape[3]:
        keys[..., rotated:].add_(shift_keys[..., rotated:])
        keys, shift_keys = keys[..., :rotated], shift_keys[..., :rotated]
    if rotated == 0:
        return
    if cos.ndim == 3:
        cos, sin = cos[:, None], sin[:, None]
    if shift_keys.shape[2] == 1 and keys.dtype == torch.float32:
        shift = shift_keys.float()
        keys.addcmul_(shift, cos).addcmul_(_swap_pairs(shift, interleaved), sin)
        return
    layer_bytes = max(1, keys[0].numel() * 4)
    group = max(1, _GROUP_BYTES // layer_bytes)
    for first in range(0, keys.shape[0], group):
        target, shift = keys[first : first + group], shift_keys[first : first + group].float()
        c, s = (cos, sin) if cos.ndim == 2 else (cos[first : first + group], sin[first : first + group])
        turned = torch.mul(shift, c).addcmul_(_swap_pairs(shift, interleaved), s)
        target.add_(turned)


def _swap_pairs(shift: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """A copy in which every dim holds its partner's value."""
    half = shift.shape[-1] // 2
    if interleaved:
        return shift.reshape(*shift.shape[:-1], half, 2).flip(-1).flatten(-2)
    return torch.cat((shift[..., half:], shift[..., :half]), -1)
