"""Add a correction to rows of keys and values in place; that of keys is turned to each row's position first.

A correction of keys is only comparable between rows in one frame, that of position 0: a key at position p is off by
R(p) d, with R the rotary embedding and d the correction there. Angles are computed in float64 and sums in float32,
whatever the dtype of the keys, and every row is rounded once.

Dims: `L` layers, `H` kv-heads, `T` rows, `M` rows of the correction (1: the same for all rows, or T), `D` head dim, `R`
rotated dims (R <= Dk, even).
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Literal

import torch

from kvcomm_p2p.kernels.residual_shift import reference

Backend = Literal["auto", "reference", "triton"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def row_angles(positions: torch.Tensor, inv_freq: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, float32 [T, R], on the device of `positions`, of rows at `positions` (int64 [T]; negative ones turn
    back): a vector x turns into x * cos + partner(x) * sin, sin being negative where a pair begins.

    `inv_freq` float64 [R/2], or [L, R/2] where layers rotate differently: the tables are [L, T, R] then. `interleaved`
    False pairs dims (i, i + R/2), True pairs (2i, 2i + 1). Angles are products in float64. Made once for the many calls
    that a forward makes. Raises ValueError for other dtypes or dims.
    """
    if positions.ndim != 1 or positions.dtype != torch.int64:
        raise ValueError(f"positions must be int64 [T], not {positions.dtype} {tuple(positions.shape)}")
    if inv_freq.ndim not in (1, 2) or inv_freq.dtype != torch.float64:
        raise ValueError(f"inv_freq must be float64 [R/2] or [L, R/2], not {inv_freq.dtype} {tuple(inv_freq.shape)}")
    angle = positions.to(torch.float64)[:, None] * inv_freq.to(positions.device).unsqueeze(-2)
    cos, sin = angle.cos().float(), angle.sin().float()
    if interleaved:
        return torch.stack((cos, cos), -1).flatten(-2), torch.stack((-sin, sin), -1).flatten(-2)
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def residual_shift(
    keys: torch.Tensor,
    values: torch.Tensor,
    shift_keys: torch.Tensor,
    shift_values: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    skip: torch.Tensor | None = None,
    backend: Backend = "auto",
) -> None:
    """keys[..., t, :] += rotate(shift_keys[..., m, :], angle[t]) and values[..., t, :] += shift_values[..., m, :], m = t
    or 0.

    `keys` [L, H, T, Dk] and `values` [L, H, T, Dv]: any strides, one dtype (float32, bfloat16 or float16); mutated.
    `shift_keys` [L, H, M, Dk] and `shift_values` [L, H, M, Dv]: any strides, each any of these dtypes; M is 1 or T. A
    coefficient belongs into them. `cos` and `sin` float32 [T, R] or [L, T, R] from `row_angles`, contiguous, for the same
    `interleaved`: dims at and beyond R are shifted without being turned. `skip` bool [T]: rows
    that are left as they are, bit for bit; None skips nothing, which is faster. All on one device; the shifts must not
    overlap keys or values. Raises ValueError naming the argument and the dim. `backend` "auto": Triton for CUDA tensors
    when triton can be imported, otherwise the plain torch reference.
    """
    _check(keys, values, shift_keys, shift_values)
    _check_rows(keys, cos, sin, skip)
    if backend not in ("auto", "reference", "triton"):
        raise ValueError(f"backend must be auto, reference or triton, not {backend!r}")
    if backend == "auto":
        backend = "triton" if keys.is_cuda and _has_triton() else "reference"
    if keys.shape[2] == 0 or keys.shape[0] == 0 or keys.shape[1] == 0:
        return
    if backend == "triton":
        from kvcomm_p2p.kernels.residual_shift import triton_kernel

        triton_kernel.residual_shift(keys, values, shift_keys, shift_values, cos, sin, interleaved, skip)
    else:
        reference.residual_shift(keys, values, shift_keys, shift_values, cos, sin, interleaved, skip)


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _check(keys: torch.Tensor, values: torch.Tensor, shift_keys: torch.Tensor, shift_values: torch.Tensor) -> None:
    shape, device = keys.shape, keys.device
    tensors = {"keys": keys, "values": values, "shift_keys": shift_keys, "shift_values": shift_values}
    for name, tensor in tensors.items():
        if tensor.ndim != 4:
            raise ValueError(f"{name} must have 4 dims [L, H, T, D], not {tensor.ndim}")
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"{name} is {tensor.dtype}; it must be one of float32, bfloat16, float16")
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, keys on {device}")
        if tensor.shape[:2] != shape[:2]:
            raise ValueError(f"{name} dims L, H are {tuple(tensor.shape[:2])}, those of keys {tuple(shape[:2])}")
    if values.dtype != keys.dtype:
        raise ValueError(f"values is {values.dtype}, keys {keys.dtype}")
    if values.shape[2] != shape[2]:
        raise ValueError(f"values dim T is {values.shape[2]}, that of keys {shape[2]}")
    for name, shift, dim in (("shift_keys", shift_keys, shape[3]), ("shift_values", shift_values, values.shape[3])):
        if shift.shape[2] not in (1, shape[2]):
            raise ValueError(f"{name} dim M is {shift.shape[2]}, neither 1 nor T = {shape[2]}")
        if shift.shape[3] != dim:
            raise ValueError(f"{name} dim D is {shift.shape[3]}, not {dim}")
    if shift_keys.shape[2] != shift_values.shape[2]:
        raise ValueError(f"shift_values dim M is {shift_values.shape[2]}, that of shift_keys {shift_keys.shape[2]}")


def _check_rows(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, skip: torch.Tensor | None) -> None:
    layers, _, rows, dim = keys.shape
    for name, table in (("cos", cos), ("sin", sin)):
        wanted = (rows,) if table.ndim == 2 else (layers, rows)
        if table.dtype != torch.float32 or table.shape[:-1] != wanted or table.shape != cos.shape:
            shape = tuple(table.shape)
            raise ValueError(f"{name} must be float32 [T = {rows}, R] or [L, T, R], not {table.dtype} {shape}")
        if table.device != keys.device or not table.is_contiguous():
            raise ValueError(f"{name} must be contiguous on {keys.device}, not on {table.device}")
    if cos.shape[-1] > dim or cos.shape[-1] % 2:
        raise ValueError(f"cos rotates R = {cos.shape[-1]} dims, which must be even and at most dim Dk = {dim}")
    if skip is not None and (skip.dtype != torch.bool or tuple(skip.shape) != (rows,) or skip.device != keys.device):
        raise ValueError(f"skip must be bool [T = {rows}] on {keys.device}, not {skip.dtype} {tuple(skip.shape)}")
