"""How this model's keys move: found by moving a few tokens through the model itself, never by its name.

The proof: the same tokens at positions 0.. and s.. must give keys, in every layer, that differ by exactly the rotation
by s, and equal values. Each layer may rotate by any of the frequencies that the model holds, or not at all, so layers
with another theta and layers without positions are found like everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from kvcomm_p2p.kernels.rope_shift import rope_shift
from kvcomm_p2p.model.spec import RotaryGeometry

LayerKV = list[tuple[torch.Tensor, torch.Tensor]]
"""Per layer: keys [H, n, Dk] and values [H, n, Dv]."""

_NEAR = 37
_REPEATS = 24
_GPTJ_THETA = 10_000.0  # fixed in those architectures, not configurable; the probe confirms it
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}
# Models compute angles in float32, with an error that grows with the position: 8e-9 per position in SmolLM2-135M.
_TOLERANCE_PER_POSITION = 1e-7

NO_ROTATION = "its keys hold their positions in a way that cannot be moved (learned or absolute positions, for example)"
NOT_EXPLAINED = "keys at a later position are not a rotation of keys at an earlier one in every layer"
WIDTHS_DIFFER = "its layers rotate different numbers of dims"


@dataclass(frozen=True, slots=True)
class _Move:
    """KV of the same tokens, with nothing before them, at positions `shift` apart."""

    shift: int
    before: LayerKV
    after: LayerKV


def find_rotary(
    model: Any, probe: Callable[[list[int], int], LayerKV], token_ids: list[int], context_tokens_max: int
) -> tuple[RotaryGeometry | None, str]:
    """The geometry of this model's keys, or None and the reason why they cannot be moved.

    `probe(ids, offset)` runs tokens at positions offset, offset + 1, ... with nothing before them. The tokens
    `token_ids` are moved by a little and to the end of the context: frequencies that change with the length show there.
    """
    last = context_tokens_max - len(token_ids)
    try:
        start = probe(token_ids, 0)
        moves = [_Move(s, start, probe(token_ids, s)) for s in sorted({min(_NEAR, last), last}) if s > 0]
    except (RuntimeError, ValueError, IndexError) as error:
        return None, f"its forward does not accept every position ({type(error).__name__})"
    frequencies = _frequencies(model)
    zeros = torch.zeros(frequencies[0].shape if frequencies else 0, dtype=torch.float64)
    for in_values in (False, True):
        for interleaved in (False, True):
            chosen = _per_layer(moves, (*frequencies, zeros), interleaved, in_values)
            if chosen is None:
                continue
            if not any(bool(one.any()) for one in chosen):
                return _positionless(probe, token_ids[0])
            return _geometry(chosen, interleaved, in_values)
    return None, NOT_EXPLAINED if frequencies else NO_ROTATION


def _frequencies(model: Any) -> list[torch.Tensor]:
    """All different frequencies that the model holds, float64 [R/2] each."""
    found: list[torch.Tensor] = [
        buffer.detach().to("cpu", torch.float64)
        for name, buffer in model.named_buffers()
        if name.endswith("inv_freq") and not name.endswith("original_inv_freq")
    ]
    rotary_dim = getattr(model.config, "rotary_dim", None)
    if not found and rotary_dim:
        exponents: torch.Tensor = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
        found = [torch.pow(_GPTJ_THETA, -exponents)]
    return [one for i, one in enumerate(found) if not any(torch.equal(one, other) for other in found[:i])]


def _per_layer(
    moves: list[_Move], candidates: Iterable[torch.Tensor], interleaved: bool, in_values: bool
) -> list[torch.Tensor] | None:
    """For every layer the candidate that explains all moves best, or None if some layer has none."""
    chosen = []
    for layer in range(len(moves[0].before)):
        errors = [
            (max(_error(move, layer, one, interleaved, in_values) for move in moves), index, one)
            for index, one in enumerate(candidates)
        ]
        error, _, best = min(errors, key=lambda found: found[:2])
        if not error <= 1.0:
            return None
        chosen.append(best)
    return chosen


def _error(move: _Move, layer: int, frequencies: torch.Tensor, interleaved: bool, in_values: bool) -> float:
    """What a rotation leaves unexplained in one layer, relative to the tolerance: at most 1 is explained."""
    turned, kept = (1, 0) if in_values else (0, 1)
    before, after = move.before[layer], move.after[layer]
    if 2 * frequencies.shape[0] > before[turned].shape[-1]:
        return float("inf")
    expected = [torch.empty_like(part[None]) for part in before]
    rope_shift(
        before[turned][None],
        before[kept][None],
        None,
        move.shift,
        frequencies,
        interleaved,
        out_keys=expected[turned],
        out_values=expected[kept],
        backend="reference",
    )
    tolerance = _TOLERANCE[before[0].dtype] + _TOLERANCE_PER_POSITION * move.shift
    return max(_difference(e[0], a) for e, a in zip(expected, after, strict=True)) / tolerance


def _difference(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """Largest relative L2 difference of any token of [H, n, D]; infinite where something is not finite.

    In half precision that of three quarters of the tokens: rounding makes a few tokens of a mixture of experts choose
    another expert.
    """
    difference = torch.linalg.vector_norm((expected - actual).float(), dim=(0, 2))
    relative = difference / torch.linalg.vector_norm(actual.float(), dim=(0, 2)).clamp_min(1e-9)
    share = 1.0 if actual.dtype == torch.float32 else 0.75
    return float(relative.nan_to_num(float("inf")).sort().values[round(share * (len(relative) - 1))])


def _geometry(chosen: list[torch.Tensor], interleaved: bool, in_values: bool) -> tuple[RotaryGeometry | None, str]:
    if any(one.shape != chosen[0].shape for one in chosen):
        return None, WIDTHS_DIFFER
    layers = tuple(tuple(one.tolist()) for one in chosen)
    differ = any(one != layers[0] for one in layers)
    return RotaryGeometry(layers[0], interleaved, layers if differ else None, in_values), ""


def _positionless(probe: Callable[[list[int], int], LayerKV], token_id: int) -> tuple[RotaryGeometry | None, str]:
    """For models whose keys and values did not change with the positions that they were given: is there no position in
    them, or did the forward ignore what it was given?

    In a prompt of one token, repeated, attention averages equal values, whatever its weights are. So keys and values of
    all its positions are equal in all layers if, and only if, positions enter through the weights alone (ALiBi).
    """
    for keys, values in probe([token_id] * _REPEATS, 0):
        for part in (keys, values):
            if not _difference(part[:, :1].expand_as(part), part) <= _TOLERANCE[part.dtype]:
                return None, NO_ROTATION
    return RotaryGeometry((), False), ""
