"""What a measured profile allows in a mode: one answer for the engine and for whoever measures it."""

from __future__ import annotations

from kvcomm_p2p.model.spec import Profile
from kvcomm_p2p.planning.plan import KL_MAX, KL_TARGET
from kvcomm_p2p.planning.types import Mode, ReuseRules

GUARD_PROBES = 6
"""Tokens recomputed inside every reused run, besides its head, for the guard: what they show is what is left of the error."""

INTERPOLATED_TOKENS = 3
"""In fast mode, holes of up to so many tokens inside a run are interpolated."""


def profile_rules(profile: Profile | None, mode: Mode) -> ReuseRules | None:
    """For BALANCED or FAST; None without a profile. Nothing about short runs: what corrects them is an agent's own memory."""
    if profile is None:
        return None
    return ReuseRules(
        approximate=True,
        reason="",
        run_tokens_min=profile.run_tokens_min,
        repairs=profile.repairs,
        kl_target=KL_TARGET[mode],
        kl_max=KL_MAX[mode],
        int8_kl=profile.int8,
        guard_probes=GUARD_PROBES,
        interpolated_tokens=INTERPOLATED_TOKENS if mode is Mode.FAST else 0,
    )
