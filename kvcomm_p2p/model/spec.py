"""What the rest of the project knows about a loaded model. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from kvcomm_p2p.planning.divergence import DivergenceFit
from kvcomm_p2p.planning.types import Provenance, Repair
from kvcomm_p2p.protocol.anchors import KVLayout
from kvcomm_p2p.protocol.ids import ModelId


@dataclass(frozen=True, slots=True)
class RotaryGeometry:
    """What moving KV by s positions does to it: the first R = 2 * len(inv_freq) of the D key dims turn by the angles
    s * inv_freq[i]. Empty frequencies: nothing turns (ALiBi).

    `interleaved` False: pairs (i, i + R/2) ("half", NeoX); True: pairs (2i, 2i + 1) (GPT-J). `layers`: the frequencies of
    every layer [L][R/2] where they differ between layers (zeros: a layer without positions), None where `inv_freq` is
    that of all; `inv_freq` is always that of layer 0. `in_values`: what turns is in the part that the model caches as
    values, and its keys stay as they are (latent attention).
    """

    inv_freq: tuple[float, ...]
    interleaved: bool
    layers: tuple[tuple[float, ...], ...] | None = None
    in_values: bool = False


@dataclass(frozen=True, slots=True)
class Profile:
    """Measured by `kvcomm calibrate` for one ModelId; ships as JSON or is absent (then: exact only).

    `repairs`: per provenance of a copy, the ways to repair a run with the divergence that was measured, cheapest first; a
    provenance that cannot be repaired is missing. `divergence`: from what a repaired prompt shows to how far it is from full
    prefill. `measured` says on what, when and with which result, for people. `short`: per provenance the divergence of runs
    shorter than `run_tokens_min` that are corrected from memory, nats per token of a prompt that is wholly reused; what is
    missing is recomputed. `selection`: which tokens of a run its head's budget goes to, the first ones ("head") or those that
    the prefix predictor expects to be most wrong ("predictor"). `int8`: the divergence of KV that travelled as int8, nats per
    token of a prompt that is wholly such; None: unknown, and none does.
    """

    run_tokens_min: int
    repairs: Mapping[Provenance, tuple[Repair, ...]]
    divergence: DivergenceFit
    measured: str
    short: Mapping[Provenance, float] = field(default_factory=dict)
    selection: Literal["head", "predictor"] = "head"
    int8: float | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Identity and shape. `share_refusal` non-empty: this model's KV cannot be exchanged at all, and why (dense only).
    `rotary` None: exact prefix reuse only, `exact_only_reason` says why. `profile` None: exact only until measured.
    `identity_parts`: of what `model_id` is a digest, to see which part of two models differs."""

    name: str
    model_id: ModelId
    layout: KVLayout
    context_tokens_max: int
    rotary: RotaryGeometry | None
    exact_only_reason: str
    share_refusal: str
    profile: Profile | None
    identity_parts: Mapping[str, str] = field(default_factory=dict)
