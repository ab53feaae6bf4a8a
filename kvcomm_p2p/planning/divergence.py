"""From what a repaired prompt shows, how far its answer will be from full prefill's.

Recomputed tokens show by how much aligned KV was wrong (their *deviation*: relative L2 difference, mean over layers >= 1 and
over keys and values). What heads showed tells how different the contexts are, what probes showed how wrong everything is
that was not recomputed; and where the model is undecided (the entropy of its next token), the same deviation changes more.
The divergence is fitted as a product of powers of these, per model, by `kvcomm calibrate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_F64 = npt.NDArray[np.float64]

DEVIATION_MIN = 1e-4
"""Smaller deviations are rounding."""

KL_MIN = 1e-5
"""Smaller divergences (nats per token) are not told apart."""


@dataclass(frozen=True, slots=True)
class RunDeviation:
    """What one reused run showed. `share`: of the prompt's tokens. `head`: mean deviation of its head before it was
    recomputed; `body`: of its probes, after any correction; `shifted`: whether there was one. None: nothing was recomputed
    there."""

    share: float
    head: float | None
    body: float | None
    shifted: bool = False


@dataclass(frozen=True, slots=True)
class Symptoms:
    """What a whole prompt shows: root mean squares over its tokens (what is not reused counts 0), the entropy of the next
    token, nats, and which share of the reused tokens was shifted (what is left of a corrected probe is not what is left between
    probes)."""

    head: float
    body: float
    entropy: float
    shifted: float = 0.0

    @classmethod
    def of(cls, runs: Sequence[RunDeviation], entropy: float) -> Symptoms:
        """NaN where a deviation is, so that nothing accepts it. A run without one of the two counts with the other."""
        heads = sum(run.share * _either(run.head, run.body) ** 2 for run in runs) ** 0.5
        bodies = sum(run.share * _either(run.body, run.head) ** 2 for run in runs) ** 0.5
        reused = sum(run.share for run in runs)
        shifted = sum(run.share for run in runs if run.shifted) / reused if reused > 0 else 0.0
        return cls(heads, bodies, entropy, shifted)


@dataclass(frozen=True, slots=True)
class DivergenceFit:
    """log KL = intercept + body * log(body deviation) + head * log(head deviation) + entropy * entropy + shifted * share
    shifted; `spread` is the standard deviation of log(measured / predicted) over `prompts` prompts."""

    intercept: float
    body: float
    head: float
    entropy: float
    spread: float
    prompts: int
    shifted: float = 0.0

    def kl(self, symptoms: Symptoms) -> float:
        """Predicted divergence, nats per token of the answer. NaN for NaN."""
        exponent = self.intercept + self.entropy * symptoms.entropy + self.shifted * symptoms.shifted
        exponent += self.body * _log(symptoms.body) + self.head * _log(symptoms.head)
        return float(np.exp(min(exponent, 50.0))) if exponent == exponent else float("nan")


def fit_divergence(symptoms: Sequence[Symptoms], kl: Sequence[float]) -> DivergenceFit:
    """Least squares over logarithms; no coefficient of a deviation below 0 (more deviation never predicts less divergence).

    `kl`: nats per token, of the same prompts. Raises ValueError for fewer than 8 prompts, and for figures that are not
    finite.
    """
    if len(symptoms) < 8:
        raise ValueError(f"{len(symptoms)} prompts do not determine a fit, 8 are needed")
    target = np.log(np.maximum(kl, KL_MIN))
    columns = np.array([[_log(each.body), _log(each.head), each.entropy, 1.0, each.shifted] for each in symptoms])
    if not (np.isfinite(target).all() and np.isfinite(columns).all()):
        raise ValueError("nothing can be fitted to figures that are not finite")
    # Of two coefficients with a bound each, the best fit has some of them at the bound: few enough to try all.
    fits = [_least_squares(columns, target, free) for free in ([0, 1, 2, 3, 4], [0, 2, 3, 4], [1, 2, 3, 4], [2, 3, 4])]
    x = min(
        (fit for fit in fits if fit[0] >= 0 and fit[1] >= 0),
        key=lambda fit: float(np.sum((target - columns @ fit) ** 2)),
    )
    spread = float(np.std(target - columns @ x))
    return DivergenceFit(float(x[3]), float(x[0]), float(x[1]), float(x[2]), spread, len(symptoms), float(x[4]))


def _least_squares(columns: _F64, target: _F64, free: list[int]) -> _F64:
    """Coefficients [5] with which columns [n, 5] come nearest to target [n]; those not in `free` are 0."""
    x = np.zeros(columns.shape[1])
    x[free] = np.linalg.lstsq(columns[:, free], target, rcond=None)[0]
    return x


def _log(deviation: float) -> float:
    return float(np.log(np.maximum(deviation, DEVIATION_MIN)))


def _either(first: float | None, second: float | None) -> float:
    value = second if first is None else first
    return 0.0 if value is None else value
