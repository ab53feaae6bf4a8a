"""The guard: recomputed heads show how wrong the aligned KV of a reused run is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvcomm_p2p.model.cache import KVCache


@dataclass(frozen=True, slots=True)
class AlignedHead:
    """Aligned KV of a reused run's head, rows [start, end), copied before they are recomputed.

    keys [L, H, n, Dk], values [L, H, n, Dv].
    """

    start: int
    end: int
    keys: torch.Tensor
    values: torch.Tensor


def keep_head(cache: KVCache, start: int, end: int) -> AlignedHead:
    """Copy rows [start, end) of a slab."""
    return AlignedHead(start, end, cache.keys[:, 0, :, start:end].clone(), cache.values[:, 0, :, start:end].clone())


def residual(cache: KVCache, heads: Sequence[AlignedHead]) -> float | None:
    """Largest residual of any head: relative L2 difference between aligned and recomputed KV, averaged over layers >= 1 and
    over keys and values. None without heads. Layer 0 is left out: it depends on no context and has been checked. NaN if the
    KV holds NaN, which no bound admits.
    """
    if not heads:
        return None
    return max((_head_residual(cache, head) for head in heads), key=lambda value: (value != value, value))


def _head_residual(cache: KVCache, head: AlignedHead) -> float:
    first = 1 if cache.layout.layers > 1 else 0
    relative = []
    for aligned, slab in ((head.keys, cache.keys), (head.values, cache.values)):
        true = slab[first:, 0, :, head.start : head.end].float()
        difference = (aligned[first:].float() - true).pow(2).sum(dim=(1, 2, 3)).sqrt()
        relative.append(difference / true.pow(2).sum(dim=(1, 2, 3)).sqrt().clamp_min(1e-6))
    return float(torch.stack(relative).mean())
