"""Random KV of a small shape, and every way in which moving it can turn it."""

from __future__ import annotations

import torch

from kvcomm_p2p.kernels.rope_shift import rope_shift
from kvcomm_p2p.model.spec import RotaryGeometry
from kvcomm_p2p.protocol.ids import ModelId

LAYERS, HEADS, KEY_DIM, VALUE_DIM = 4, 2, 8, 6
MODEL = ModelId(b"m" * 16)
FREQUENCIES = (1.0, 0.1, 0.01)
PLAIN = RotaryGeometry(FREQUENCIES, False)
GEOMETRIES = {
    "halves": PLAIN,
    "interleaved": RotaryGeometry(FREQUENCIES, True),
    "per layer": RotaryGeometry(FREQUENCIES, False, layers=(FREQUENCIES, (0.0,) * 3, (0.5, 0.2, 0.1), FREQUENCIES)),
    "in values": RotaryGeometry(FREQUENCIES, False, in_values=True),
    "none": None,
}

KV = tuple[torch.Tensor, torch.Tensor]


def random_kv(seed: int, tokens: int) -> KV:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(LAYERS, HEADS, tokens, dim, generator=generator) for dim in (KEY_DIM, VALUE_DIM))  # type: ignore[return-value]


def turned(kv: KV, positions: torch.Tensor, rotary: RotaryGeometry | None) -> KV:
    """KV of position 0 where it would be at these positions."""
    order = (1, 0) if rotary and rotary.in_values else (0, 1)
    frequencies = torch.tensor((rotary.layers or rotary.inv_freq) if rotary else (), dtype=torch.float64)
    out = [torch.empty_like(part) for part in kv]
    source, target = [kv[i] for i in order], [out[i] for i in order]
    rope_shift(*source, None, positions, frequencies, bool(rotary and rotary.interleaved), *target)
    return out[0], out[1]
