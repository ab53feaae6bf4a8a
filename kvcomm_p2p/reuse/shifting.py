"""Which runs of a plan are corrected by their probes."""

from __future__ import annotations

from kvcomm_p2p.model.spec import RotaryGeometry
from kvcomm_p2p.planning.types import Plan


def probe_shift(plan: Plan, rotary: RotaryGeometry | None) -> None:
    """None: no run of the plan asks for it."""
    return None
