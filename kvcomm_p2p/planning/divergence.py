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

DEVIATION_MIN = 1e-4
"""Smaller deviations are rounding."""

KL_MIN = 1e-5
"""Smaller divergences (nats per token) are not told apart."""


@dataclass(frozen=True, slots=True)
class RunDeviation:
    """What one reused run showed. `share`: of the prompt's tokens. `head`: mean deviation of its head before it was
    recomputed; `body`: of its probes, after any correction. None: nothing was recomputed there."""

    share: float
    head: float | None
    body: float | None


@dataclass(frozen=True, slots=True)
class Symptoms:
    """What a whole prompt shows: root mean squares over its tokens (what is not reused counts 0), and the entropy of the
    next token, nats."""

    head: float
    body: float
    entropy: float

    @classmethod
    def of(cls, runs: Sequence[RunDeviation], entropy: float) -> Symptoms:
        """NaN where a deviation is, so that nothing accepts it. A run without one of the two counts with the other."""
        heads = sum(run.share * _either(run.head, run.body) ** 2 for run in runs) ** 0.5
        bodies = sum(run.share * _either(run.body, run.head) ** 2 for run in runs) ** 0.5
        return cls(heads, bodies, entropy)


@dataclass(frozen=True, slots=True)
class DivergenceFit:
    """log KL = intercept + body * log(body deviation) + head * log(head deviation) + entropy * entropy; `spread` is the
    standard deviation of log(measured / predicted) over `prompts` prompts."""

    intercept: float
    body: float
    head: float
    entropy: float
    spread: float
    prompts: int

    def kl(self, symptoms: Symptoms) -> float:
        """Predicted divergence, nats per token of the answer. NaN for NaN."""
        exponent = self.intercept + self.entropy * symptoms.entropy
        exponent += self.body * float(np.log(np.maximum(symptoms.body, DEVIATION_MIN)))
        exponent += self.head * float(np.log(np.maximum(symptoms.head, DEVIATION_MIN)))
        return float(np.exp(min(exponent, 50.0))) if exponent == exponent else float("nan")


def fit_divergence(symptoms: Sequence[Symptoms], kl: Sequence[float]) -> DivergenceFit:
    """Least squares over logarithms; no coefficient of a deviation below 0 (more deviation never predicts less divergence).

    Raises ValueError for fewer than 8 prompts.
    """
    if len(symptoms) < 8:
        raise ValueError(f"{len(symptoms)} prompts do not determine a fit, 8 are needed")
    target = np.log(np.maximum(kl, KL_MIN))
    columns = np.array(
        [
            [
                np.log(max(each.body, DEVIATION_MIN)),
                np.log(max(each.head, DEVIATION_MIN)),
                each.entropy,
                1.0,
            ]
            for each in symptoms
        ]
    )
    free = [0, 1, 2, 3]
    x = np.zeros(4)
    while True:
        x[:] = 0.0
        x[free] = np.linalg.lstsq(columns[:, free], target, rcond=None)[0]
        negative = [index for index in free if index < 2 and x[index] < 0]
        if not negative:
            break
        free.remove(min(negative, key=lambda index: float(x[index])))
    spread = float(np.std(target - columns @ x))
    return DivergenceFit(float(x[3]), float(x[0]), float(x[1]), float(x[2]), spread, len(symptoms))


def _either(first: float | None, second: float | None) -> float:
    value = second if first is None else first
    return 0.0 if value is None else value
