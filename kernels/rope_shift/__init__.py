"""Gather cached keys and values by a position map, and rotate the keys by the distance they move.

A key cached at position p is R(p) k, with R the rotary embedding; at position p + s it would be R(s) R(p) k. Rotating
by the distance is therefore exact, up to rounding of the stored key. Angles are computed in float64 and products in
float32, whatever the dtype of the keys: angles in half precision destroy keys. Rotate once per use, from the original,
never hop by hop.

Dims: `L` layers, `H` kv-heads, `S` source tokens, `T` output tokens, `D` head dim, `R` rotated dims (R <= Dk, even).
"""

from __future__ import annotations

import importlib.util
from typing import Literal

import torch

from kvcomm_p2p.kernels.rope_shift import reference

Backend = Literal["auto", "reference", "triton"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rope_shift(
    keys: torch.Tensor,
    values: torch.Tensor,
    position_map: torch.Tensor | None,
    shift: torch.Tensor | int,
    inv_freq: torch.Tensor,
    interleaved: bool,
    out_keys: torch.Tensor,
    out_values: torch.Tensor,
    backend: Backend = "auto",
) -> None:
    """out_keys[..., t, :] = rotate(keys[..., m, :], shift[t]) and out_values[..., t, :] = values[..., m, :], m =
    position_map[t].

    `keys` [L, H, S, Dk], `values` [L, H, S, Dv], `out_keys` [L, H, T, Dk], `out_values` [L, H, T, Dv]: any strides, one
    dtype (float32, bfloat16 or float16), one device. `position_map` int64 [T] with entries in [-1, S): where it is -1
    the outputs are left untouched; None means the first T source tokens in order (T <= S), which is faster. `shift` is
    one int for all tokens (fastest) or int64 [T]; negative shifts rotate back. `inv_freq` float64 [R/2], or [L, R/2]
    where layers rotate differently (zeros: that layer is copied); dims at and beyond R are copied. `interleaved` False
    pairs dims (i, i + R/2), True pairs (2i, 2i + 1). A shift of 0 copies bit for bit. Writes only to the outputs, which
    must not overlap the inputs. Raises ValueError naming the argument and the dim. `backend` "auto": Triton for CUDA
    tensors when triton can be imported, otherwise the plain torch reference.
    """
    _check(keys, values, position_map, shift, inv_freq, out_keys, out_values)
    if backend not in ("auto", "reference", "triton"):
        raise ValueError(f"backend must be auto, reference or triton, not {backend!r}")
    if backend == "auto":
        backend = "triton" if keys.is_cuda and importlib.util.find_spec("triton") is not None else "reference"
    if out_keys.shape[2] == 0 or out_keys.shape[0] == 0 or out_keys.shape[1] == 0:
        return
    if backend == "triton":
        from kvcomm_p2p.kernels.rope_shift import triton_kernel

        triton_kernel.rope_shift(keys, values, position_map, shift, inv_freq, interleaved, out_keys, out_values)
    else:
        reference.rope_shift(keys, values, position_map, shift, inv_freq, interleaved, out_keys, out_values)


def _check(
    keys: torch.Tensor,
    values: torch.Tensor,
    position_map: torch.Tensor | None,
    shift: torch.Tensor | int,
    inv_freq: torch.Tensor,
    out_keys: torch.Tensor,
    out_values: torch.Tensor,
) -> None:
    tensors = {"keys": keys, "values": values, "out_keys": out_keys, "out_values": out_values}
    for name, tensor in tensors.items():
        if tensor.ndim != 4:
            raise ValueError(f"{name} must have 4 dims [L, H, T, D], not {tensor.ndim}")
        if tensor.dtype != keys.dtype or tensor.dtype not in _DTYPES:
            raise ValueError(f"{name} is {tensor.dtype}; all must be one of float32, bfloat16, float16 and the same")
        if tensor.device != keys.device:
            raise ValueError(f"{name} is on {tensor.device}, keys on {keys.device}")
        if tensor.shape[:2] != keys.shape[:2]:
            raise ValueError(f"{name} dims L, H are {tuple(tensor.shape[:2])}, those of keys {tuple(keys.shape[:2])}")
    if values.shape[2] != keys.shape[2]:
        raise ValueError(f"values dim S is {values.shape[2]}, that of keys {keys.shape[2]}")
    if out_values.shape[2] != out_keys.shape[2]:
        raise ValueError(f"out_values dim T is {out_values.shape[2]}, that of out_keys {out_keys.shape[2]}")
    if out_keys.shape[3] != keys.shape[3]:
        raise ValueError(f"out_keys dim Dk is {out_keys.shape[3]}, that of keys {keys.shape[3]}")
    if out_values.shape[3] != values.shape[3]:
        raise ValueError(f"out_values dim Dv is {out_values.shape[3]}, that of values {values.shape[3]}")
    _check_frequencies(keys, inv_freq)
    _check_positions(keys.shape[2], out_keys.shape[2], position_map, shift)


def _check_frequencies(keys: torch.Tensor, inv_freq: torch.Tensor) -> None:
    if inv_freq.ndim not in (1, 2) or inv_freq.dtype != torch.float64:
        raise ValueError(f"inv_freq must be float64 [R/2] or [L, R/2], not {inv_freq.dtype} {tuple(inv_freq.shape)}")
    if inv_freq.ndim == 2 and inv_freq.shape[0] != keys.shape[0]:
        raise ValueError(f"inv_freq dim L is {inv_freq.shape[0]}, that of keys {keys.shape[0]}")
    if 2 * inv_freq.shape[-1] > keys.shape[3]:
        raise ValueError(f"inv_freq rotates R = {2 * inv_freq.shape[-1]} dims, but dim Dk is {keys.shape[3]}")


def _check_positions(source: int, target: int, position_map: torch.Tensor | None, shift: torch.Tensor | int) -> None:
    if isinstance(shift, torch.Tensor) and (shift.dtype != torch.int64 or tuple(shift.shape) != (target,)):
        raise ValueError(f"shift must be an int or int64 [T = {target}], not {shift.dtype} {tuple(shift.shape)}")
    if position_map is None:
        if target > source:
            raise ValueError(
                f"out_keys dim T is {target}, more than dim S of keys ({source}), and there is no position_map"
            )
        return
    if position_map.dtype != torch.int64 or tuple(position_map.shape) != (target,):
        raise ValueError(
            f"position_map must be int64 [T = {target}], not {position_map.dtype} {tuple(position_map.shape)}"
        )
    if target and (int(position_map.min()) < -1 or int(position_map.max()) >= source):
        raise ValueError(f"position_map has entries outside [-1, S = {source})")
