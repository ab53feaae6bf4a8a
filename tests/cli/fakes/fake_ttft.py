"""A measurement that takes no time."""

from __future__ import annotations

from typing import Any

from kvcomm_p2p.errors import ModelError
from kvcomm_p2p.evaluation.results import Result, Row


def run(console: Any, *, model: str = "smollm2-135m") -> Result:
    if model == "missing":
        raise ModelError("the model missing is not here yet: run `kvcomm model pull missing`")
    console.print("measuring")
    return Result("bench ttft", [Row(model, "ttft_median", 0.25, "s", 3, baseline=2.5, ratio=10.0)], seed=0)
