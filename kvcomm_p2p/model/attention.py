"""Attention for queries at scattered positions, without copying keys for grouped heads and without wasted masking.

Registered with transformers under `IMPLEMENTATION`. A forward without scattered queries is handed to transformers' own
function unchanged, so a model set to this implementation computes exactly what it computes under "sdpa".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

IMPLEMENTATION = "kvcomm_sdpa"

_TAG = "kvcomm_bands"
# One more attention call costs about as much as this many extra query-key products; measured on two CPU cores.
_CALL_COST_PAIRS = 2048
# Longest band of queries: later queries of a band make the earlier ones look at keys that the mask then hides.
_BAND_ROWS_MAX = 256


@dataclass(frozen=True, slots=True)
class _Band:
    """Query rows [row_start, row_end) attend to keys [key_start, key_end) through `mask` [rows, keys] (None: to
    all)."""

    row_start: int
    row_end: int
    key_start: int
    key_end: int
    mask: torch.Tensor | None


class _Bands:
    """Bands that cover all query rows, with masks repeated for `groups` query heads per key head (made once per
    forward)."""

    def __init__(self, bands: list[_Band]) -> None:
        self._bands = bands
        self._grouped: dict[int, list[_Band]] = {1: bands}

    def grouped(self, groups: int) -> list[_Band]:
        if groups not in self._grouped:
            self._grouped[groups] = [
                _Band(
                    b.row_start, b.row_end, b.key_start, b.key_end, None if b.mask is None else b.mask.repeat(groups, 1)
                )
                for b in self._bands
            ]
        return self._grouped[groups]


def register() -> None:
    """Makes `IMPLEMENTATION` known to transformers. Idempotent."""
    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _mask)


def band_rows(positions: list[int]) -> list[tuple[int, int]]:
    """Splits ascending query positions into bands [row_start, row_end) so that little masked work is done.

    A band is closed where appending the next row would make the band's rows look at more hidden keys than a further
    call costs.
    """
    bands: list[tuple[int, int]] = []
    start = 0
    for row in range(1, len(positions) + 1):
        if row == len(positions):
            bands.append((start, row))
        elif (row - start) * (
            positions[row] - positions[row - 1] - 1
        ) > _CALL_COST_PAIRS or row - start >= _BAND_ROWS_MAX:
            bands.append((start, row))
            start = row
    return bands


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    mask_function: Callable[..., Any] | None = None,
    dtype: torch.dtype = torch.float32,
    **kwargs: Any,
) -> torch.Tensor | None:
    """transformers' mask factory: an additive mask [1, 1, R, T] that carries its bands, or whatever "sdpa" would
    make."""
    arguments = {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length, **kwargs}
    if mask_function is not None:
        arguments["mask_function"] = mask_function
    scattered = isinstance(q_offset, torch.Tensor) and q_offset.ndim == 1
    if not scattered:
        return sdpa_mask(q_offset=q_offset, **arguments)
    if q_length == kv_length:
        return sdpa_mask(q_offset=0, **arguments)
    arguments["allow_is_causal_skip"] = False
    visible = sdpa_mask(q_offset=q_offset, **arguments)
    assert visible is not None
    positions = (q_offset + torch.arange(q_length, device=q_offset.device)).tolist()
    additive = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))
    setattr(additive, _TAG, _make_bands(visible[0, 0], additive[0, 0], positions))
    return additive


def _make_bands(visible: torch.Tensor, additive: torch.Tensor, positions: list[int]) -> _Bands:
    bands = []
    for row_start, row_end in band_rows(positions):
        key_end = positions[row_end - 1] + 1
        # Sliding windows hide a stretch at the front; what the band's first row cannot see, no later row can.
        key_start = int(visible[row_start, :key_end].to(torch.uint8).argmax())
        mask = additive[row_start:row_end, key_start:key_end]
        hides_nothing = row_end - row_start == 1 and bool(visible[row_start, key_start:key_end].all())
        bands.append(_Band(row_start, row_end, key_start, key_end, None if hides_nothing else mask.contiguous()))
    return _Bands(bands)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: query [1, Hq, R, D], key and value [1, H, T, D] -> [1, R, Hq, Dv]."""
    bands: _Bands | None = getattr(attention_mask, _TAG, None)
    plain = (
        bands is None
        or dropout != 0.0
        or any(kwargs.get(name) is not None for name in ("position_bias", "s_aux", "softcap"))
    )
    if plain:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    assert bands is not None
    kv_heads = key.shape[1]
    groups = query.shape[1] // kv_heads
    parts = [_attend(query, key, value, band, groups, scaling) for band in bands.grouped(groups)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)), None


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, band: _Band, groups: int, scaling: float | None
) -> torch.Tensor:
    """One band -> [1, rows, Hq, Dv]. The query heads that share a key head are laid one after another along the
    rows."""
    rows = band.row_end - band.row_start
    kv_heads = key.shape[1]
    folded = query[:, :, band.row_start : band.row_end].reshape(1, kv_heads, groups * rows, query.shape[3])
    out = scaled_dot_product_attention(
        folded,
        key[:, :, band.key_start : band.key_end],
        value[:, :, band.key_start : band.key_end],
        attn_mask=None if band.mask is None else band.mask[None, None],
        scale=scaling,
    )
    return out.reshape(1, kv_heads * groups, rows, value.shape[3]).transpose(1, 2)
