"""Rows from lists of measurements."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcomm_p2p.evaluation.results import Row


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of them does not exceed: a p99 of 50 is their maximum."""
    return float(np.quantile(values, share, method="higher"))


def median_row(case: str, metric: str, values: Sequence[float], unit: str) -> Row:
    """Their median, with its 95 % interval by bootstrap."""
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(values, (2000, len(values))), axis=1)
    low, high = np.quantile(medians, (0.025, 0.975))
    return Row(case, metric, float(np.median(values)), unit, len(values), (float(low), float(high)))


def high_row(case: str, metric: str, values: Sequence[float], unit: str) -> Row:
    """Their p99 (see `quantile`)."""
    return Row(case, metric, quantile(values, 0.99), unit, len(values))
