"""Which runs of a plan are corrected by their probes."""

from __future__ import annotations

import torch

from kvcomm_p2p.model.spec import RotaryGeometry
from kvcomm_p2p.planning.spans import probe_positions
from kvcomm_p2p.planning.types import Plan, SpanKind
from kvcomm_p2p.reuse.correctors import ProbeShift, ShiftRun


class PlanShift(ProbeShift):
    """The shift of all runs of a plan that ask for it; for one forward."""

    def __init__(
        self,
        numbers: list[int],
        runs: list[ShiftRun],
        rotary: RotaryGeometry | None,
        device: torch.device | str,
    ) -> None:
        super().__init__(runs, rotary, device)
        self._numbers = numbers

    def left(self) -> dict[int, float]:
        """Run number -> how far its probes were off after each was corrected by the others."""
        pairs = zip(self._numbers, self.residuals(), strict=True)
        return {number: value for number, value in pairs if value is not None}


def plan_shift(plan: Plan, rotary: RotaryGeometry | None, device: torch.device | str = "cpu") -> PlanShift | None:
    """None if no run of the plan is to be shifted. `device`: that of the slab."""
    numbers: list[int] = []
    runs: list[ShiftRun] = []
    for number in range(1, len(plan.runs) + 1):
        body = [span for span in plan.spans if span.run == number and span.kind is SpanKind.REUSE]
        if any(span.shift for span in body):
            probes = [int(row) for span in body for row in probe_positions(span)]
            numbers.append(number)
            runs.append(ShiftRun(body[0].start, body[-1].end, body[0].start, tuple(probes)))
    return PlanShift(numbers, runs, rotary, device) if runs else None
