"""Plain torch: the definition that the Triton twin is tested against, and what runs on CPUs, so it is written to be
fast.

Nothing is made that is as large as the keys unless dtypes force it: both halves of the rotated dims are added to in
place, with the angles and the (often single) correction broadcast.
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
    rotated = 2 * cos.shape[-1]
    if rotated < keys.shape[3]:
        keys[..., rotated:].add_(shift_keys[..., rotated:])
    if rotated == 0:
        return
    if shift_keys.shape[2] == 1 and keys.dtype == torch.float32:
        _turn_and_add(keys, shift_keys.float(), _with_heads(cos), _with_heads(sin), interleaved)
        return
    layer_bytes = max(1, keys[0].numel() * 4)
    group = max(1, _GROUP_BYTES // layer_bytes)
    for first in range(0, keys.shape[0], group):
        target, shift = keys[first : first + group, ..., :rotated], shift_keys[first : first + group].float()
        wide = target if target.dtype == torch.float32 else target.float()
        c, s = (_with_heads(table if table.ndim == 2 else table[first : first + group]) for table in (cos, sin))
        _turn_and_add(wide, shift, c, s, interleaved)
        if wide is not target:
            target.copy_(wide)


def _turn_and_add(
    keys: torch.Tensor, shift: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> None:
    """float32 keys [L, H, T, >= R] += float32 shift [L, H, M, >= R] turned by the angles."""
    first, second = _pairs(keys, cos.shape[-1], interleaved)
    a, b = _pairs(shift, cos.shape[-1], interleaved)
    first.addcmul_(a, cos).addcmul_(b, sin, value=-1)
    second.addcmul_(b, cos).addcmul_(a, sin)


def _with_heads(table: torch.Tensor) -> torch.Tensor:
    """Angles [T, R/2] or [L, T, R/2], to be broadcast over heads."""
    return table if table.ndim == 2 else table[:, None]


def _pairs(tensor: torch.Tensor, half: int, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the first and of the second dims of all pairs."""
    if interleaved:
        return tensor[..., 0 : 2 * half : 2], tensor[..., 1 : 2 * half : 2]
    return tensor[..., :half], tensor[..., half : 2 * half]
