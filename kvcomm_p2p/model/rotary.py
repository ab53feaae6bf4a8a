"""Whether and how this model's keys can be moved: read from its config, then proven on the model itself.

The proof: the same tokens at positions 0.. and s.. must give keys, in every layer, that differ by exactly the rotation
by s, and equal values. It covers what a config does not tell (layers without positions, other pairings, scaled
frequencies).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvcomm_p2p.kernels.rope_shift import rope_shift
from kvcomm_p2p.model.spec import RotaryGeometry

LayerKV = list[tuple[torch.Tensor, torch.Tensor]]
"""Per layer: keys [H, n, Dk] and values [H, n, Dv]."""

_PROBE_SHIFT = 37
_GPTJ_THETA = 10_000.0  # fixed in those architectures, not configurable; the probe confirms it
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}

_LENGTH_DEPENDENT = {
    "dynamic": "dynamic NTK rotary embedding changes its frequencies with the length of the prompt",
    "longrope": "LongRoPE changes its frequencies with the length of the prompt",
}


def find_rotary(
    model: Any, probe: Callable[[int], LayerKV], context_tokens_max: int
) -> tuple[RotaryGeometry | None, str]:
    """The geometry of this model's keys, or None and the reason why they cannot be moved.

    `probe(offset)` runs a few fixed tokens at positions offset, offset + 1, ... with nothing before them.
    """
    config = model.config.get_text_config(decoder=True)
    reason = _refusal_by_config(config)
    if reason:
        return None, reason
    frequencies = _frequencies(model)
    if isinstance(frequencies, str):
        return None, frequencies
    shift = min(_PROBE_SHIFT, context_tokens_max // 2)
    at_zero, at_shift = probe(0), probe(shift)
    for interleaved in (False, True):
        if _explains(at_zero, at_shift, frequencies, shift, interleaved):
            return RotaryGeometry(inv_freq=tuple(frequencies.tolist()), interleaved=interleaved), ""
    return None, "keys at a later position are not a rotation of keys at an earlier one in every layer"


def _refusal_by_config(config: Any) -> str:
    if getattr(config, "kv_lora_rank", None):
        return "multi-head latent attention caches rotated and unrotated parts together"
    parameters = getattr(config, "rope_parameters", None)
    if not parameters and getattr(config, "rotary_dim", None):
        return ""  # GPT-J and its kin say no more than how many dims they rotate
    if not parameters:
        return "no rotary embedding (learned, absolute or no positions, or ALiBi)"
    per_kind = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    for one in per_kind:
        kind = str(one.get("rope_type", "default"))
        if kind in _LENGTH_DEPENDENT:
            return _LENGTH_DEPENDENT[kind]
    if any(one != per_kind[0] for one in per_kind):
        return "rotary frequencies differ between layers"
    without = getattr(config, "no_rope_layers", None)
    if without and len(set(without)) > 1:
        return "some layers have no positions"
    return ""


def _frequencies(model: Any) -> torch.Tensor | str:
    """float64 [R/2] as the model holds them, or why there is no one answer."""
    found: list[torch.Tensor] = [
        buffer.detach().to("cpu", torch.float64)
        for name, buffer in model.named_buffers()
        if name.endswith("inv_freq") and not name.endswith("original_inv_freq")
    ]
    rotary_dim = getattr(model.config, "rotary_dim", None)
    if not found and rotary_dim:
        exponents: torch.Tensor = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
        return torch.pow(_GPTJ_THETA, -exponents)
    if not found:
        return "no rotary frequencies found in the model"
    if any(one.shape != found[0].shape or not torch.equal(one, found[0]) for one in found):
        return "rotary frequencies differ between layers"
    return found[0]


def _explains(at_zero: LayerKV, at_shift: LayerKV, frequencies: torch.Tensor, shift: int, interleaved: bool) -> bool:
    for (keys, values), (moved_keys, moved_values) in zip(at_zero, at_shift, strict=True):
        if 2 * frequencies.shape[0] > keys.shape[-1]:
            return False
        expected_keys, expected_values = torch.empty_like(keys[None]), torch.empty_like(values[None])
        rope_shift(
            keys[None], values[None], None, shift, frequencies, interleaved, expected_keys, expected_values, "reference"
        )
        tolerance = _TOLERANCE[keys.dtype]
        if not _close(expected_keys[0], moved_keys, tolerance) or not _close(
            expected_values[0], moved_values, tolerance
        ):
            return False
    return True


def _close(expected: torch.Tensor, actual: torch.Tensor, tolerance: float) -> bool:
    difference = torch.linalg.vector_norm((expected - actual).float())
    return bool(difference <= tolerance * torch.linalg.vector_norm(actual.float()) + 1e-9)
