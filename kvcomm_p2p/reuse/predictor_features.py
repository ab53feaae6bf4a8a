"""What is known of a reused run before anything is computed, as numbers that a small network can learn from.

How wrong aligned KV is depends on where the run was computed and how far into it a token stands, and on the token itself:
ends of sentences and lines carry more of their context than words do. Layer-0 values depend on the token alone, so a
projection of them tells tokens apart for any model, without its vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

CONTENT_FEATURES = 8
"""Dims that a token's layer-0 values are projected to."""

FEATURES = 14 + CONTENT_FEATURES
"""`F`: features per token."""

LOG_POSITION = 8
"""Column of ln(1 + position in the run) / LOG_SCALE."""

LOG_SCALE = 8.0
"""Logarithms of counts are divided by this: 1 is about 3,000 tokens."""

_VALUE_MAX = 4.0
_PROJECTION_SEED = 20240917


@dataclass(frozen=True, slots=True)
class RunFeatures:
    """One reused run. `moved_tokens`: how far it moves towards the prompt's end (negative: to its beginning).
    `prefix_tokens` and `donor_prefix_tokens`: what stands before it in our prompt and in the donor's. Likeness of the two, 0
    to 1, as `planning.provenance.Context`: `near` right before the run, `first` at the very beginning, `lengths`; `bare`:
    the donor had nothing before it. `run_tokens`: its length n."""

    moved_tokens: int
    prefix_tokens: int
    donor_prefix_tokens: int
    near: float
    first: float
    lengths: float
    bare: bool
    run_tokens: int


def features(run: RunFeatures, layer0_keys: torch.Tensor, layer0_values: torch.Tensor) -> torch.Tensor:
    """Features of each token of a run, float32 [n, F] on the CPU, every element finite and in [-4, 4].

    `layer0_keys` [H, n, Dk] and `layer0_values` [H, n, Dv]: layer 0 of the run as pulled, rotated or not, in any float
    dtype. Nothing is mutated. What is not finite counts as 0. Raises ValueError if the tensors do not have n = `run_tokens`
    tokens.
    """
    n = run.run_tokens
    for name, tensor in (("layer0_keys", layer0_keys), ("layer0_values", layer0_values)):
        if tensor.ndim != 3 or tensor.shape[1] != n:
            raise ValueError(f"{name} must be [H, n = {n}, D], not {tuple(tensor.shape)}")
    keys, values = (_as_floats(tensor) for tensor in (layer0_keys, layer0_values))
    key_norms, value_norms = _norms(keys), _norms(values)
    units = values / value_norms.clamp_min(1e-12)[:, None]
    likeness = torch.zeros(n)
    likeness[1:] = (units[:, 1:] * units[:, :-1]).sum(dim=(0, 2))
    heads, _, dims = units.shape
    position = torch.arange(n, dtype=torch.float32)
    columns = [
        torch.tensor(_of_run(run)).expand(n, -1),
        torch.log1p(position)[:, None] / LOG_SCALE,
        torch.log1p(n - 1 - position)[:, None] / LOG_SCALE,
        (position / max(1, n))[:, None],
        _relative(key_norms)[:, None],
        _relative(value_norms)[:, None],
        likeness[:, None],
        torch.matmul(units, _projection(heads, dims)).sum(dim=0),
    ]
    table = torch.nan_to_num(torch.cat(columns, dim=1), nan=0.0, posinf=0.0, neginf=0.0)
    return table.clamp_(-_VALUE_MAX, _VALUE_MAX)


def _as_floats(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", torch.float32)


def _norms(rows: torch.Tensor) -> torch.Tensor:
    """[n], of tensors [H, n, D]; 0 where it is not finite, so that one bad token spoils no other's features."""
    norms = rows.square().sum(dim=(0, 2)).sqrt()
    return torch.where(torch.isfinite(norms), norms, 0.0)


def _of_run(run: RunFeatures) -> list[float]:
    return [
        math.copysign(_log(abs(run.moved_tokens)), run.moved_tokens),
        _log(run.prefix_tokens),
        _log(run.donor_prefix_tokens),
        _share(run.near),
        _share(run.first),
        _share(run.lengths),
        float(run.bare),
        _log(run.run_tokens),
    ]


def _log(count: float) -> float:
    return math.log1p(max(0, count)) / LOG_SCALE


def _share(value: float) -> float:
    return min(1.0, max(0.0, value)) if math.isfinite(value) else 0.0


def _relative(norms: torch.Tensor) -> torch.Tensor:
    """ln of each norm over their mean, times 2: norms differ little from token to token."""
    if not len(norms):
        return norms
    return 2 * torch.log(norms.clamp_min(1e-12) / norms.mean().clamp_min(1e-12))


@lru_cache(maxsize=4)
def _projection(heads: int, dims: int) -> torch.Tensor:
    """Fixed random directions [H, Dv, CONTENT_FEATURES]; products with a unit vector [H, Dv] are about 1 in size."""
    generator = torch.Generator().manual_seed(_PROJECTION_SEED)
    return torch.randn(heads, dims, CONTENT_FEATURES, generator=generator)
