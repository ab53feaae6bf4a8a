"""What things cost here: predictions from `Costs`, and a tracker that keeps `Costs` true to what was measured.

Pure: whoever owns a clock measures and tells.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcomm_p2p.planning.types import Costs
from kvcomm_p2p.protocol.anchors import BLOCK_TOKENS, Miss, MissReason
from kvcomm_p2p.protocol.ids import NodeId

CORRECTION_TOKENS = 16
"""Correcting one token from memory reads the deviations of so many others."""


def attended(tokens: int, cached: int) -> float:
    """Query-key pairs when `tokens` consecutive tokens behind `cached` ones are computed: tokens * cached + tokens^2 /
    2.
    """
    return tokens * cached + tokens * tokens / 2


def recompute_s(costs: Costs, tokens: int, cached: int) -> float:
    """Seconds for one forward of `tokens` consecutive tokens against `cached` earlier positions; 0 for no tokens."""
    return forward_s(costs, tokens, attended(tokens, cached))


def forward_s(costs: Costs, tokens: int, pairs: float) -> float:
    """Seconds for one forward of `tokens` tokens that attend to `pairs` query-key pairs in all; 0 for no tokens."""
    if tokens <= 0:
        return 0.0
    return costs.forward_s + tokens * costs.token_s + pairs * costs.attention_s


def pull_s(costs: Costs, kv_bytes: int) -> float:
    """Seconds for pulling `kv_bytes` from one peer; 0 for nothing."""
    return costs.pull_latency_s + kv_bytes / costs.pull_bytes_per_s if kv_bytes > 0 else 0.0


def align_s(costs: Costs, kv_bytes: int) -> float:
    """Seconds for gathering and rotating `kv_bytes` into place."""
    return kv_bytes / costs.align_bytes_per_s


def correction_s(costs: Costs, tokens: int) -> float:
    """Seconds for correcting `tokens` tokens from memory."""
    return align_s(costs, CORRECTION_TOKENS * tokens * costs.token_bytes)


def first_costs(forward_s: float, token_s: float, token_bytes: int) -> Costs:
    """What an agent believes that has timed a few short forwards and nothing else: it begins on the side of slow transfers."""
    return Costs(
        forward_s=forward_s,
        token_s=token_s,
        attention_s=token_s / 5000,
        pull_latency_s=0.01,
        pull_bytes_per_s=4e8,
        align_bytes_per_s=1.5e9,
        token_bytes=token_bytes,
    )


@dataclass(frozen=True, slots=True)
class PullCost:
    """What pulling from one peer costs: latency_s + bytes / bytes_per_s."""

    latency_s: float
    bytes_per_s: float


class CostTracker:
    """`Costs` refreshed online from observations.

    Every cost is linear in known quantities, so each kind of observation is fitted by least squares over the latest
    OBSERVATIONS_MAX: errors are relative, observations far off count little (Cauchy weights), coefficients stay > 0, and a
    weak prior keeps the starting proportions where the observations determine nothing. A stalled forward or a lucky pull
    moves little; a lasting change (a busier machine, a slower link) wins as soon as it is the larger part of the window.
    """

    OBSERVATIONS_MAX = 32
    PEERS_MAX = 1024

    def __init__(self, costs: Costs) -> None:
        """`costs`: starting values, all > 0, measured at load or guessed on the side of slow transfers."""
        self._fixed = costs
        self._prefill = _RobustFit((costs.forward_s, costs.token_s, costs.attention_s), self.OBSERVATIONS_MAX)
        self._align = _RobustFit((1 / costs.align_bytes_per_s,), self.OBSERVATIONS_MAX)
        self._pull = _RobustFit((costs.pull_latency_s, 1 / costs.pull_bytes_per_s), self.OBSERVATIONS_MAX)
        self._peers: dict[NodeId, _RobustFit] = {}

    @classmethod
    def measured(
        cls,
        costs: Costs,
        prefills: Iterable[tuple[int, int, float]] = (),
        aligns: Iterable[tuple[int, float]] = (),
    ) -> CostTracker:
        """A tracker that starts from samples taken at load: prefills (tokens, cached, seconds) and aligns (bytes,
        seconds).

        `costs` fills in what the samples do not determine.
        """
        tracker = cls(costs)
        for tokens, cached, seconds in prefills:
            tracker.saw_prefill(tokens, cached, seconds)
        for kv_bytes, seconds in aligns:
            tracker.saw_align(kv_bytes, seconds)
        return cls(tracker.costs)

    @property
    def costs(self) -> Costs:
        """The current estimate."""
        forward, token, attention = self._prefill.coefficients
        latency, byte = self._pull.coefficients
        return Costs(
            forward_s=forward,
            token_s=token,
            attention_s=attention,
            pull_latency_s=latency,
            pull_bytes_per_s=_rate(byte),
            align_bytes_per_s=_rate(self._align.coefficients[0]),
            token_bytes=self._fixed.token_bytes,
            int8_share=self._fixed.int8_share,
            int8_bytes_per_s=self._fixed.int8_bytes_per_s,
        )

    @property
    def pulls(self) -> Mapping[NodeId, PullCost]:
        """Cost of pulling from each peer that was pulled from; for any other peer, `costs` holds."""
        fits = {peer: fit.coefficients for peer, fit in self._peers.items()}
        return {peer: PullCost(latency, _rate(byte)) for peer, (latency, byte) in fits.items()}

    def saw_prefill(self, tokens: int, cached: int, seconds: float) -> None:
        """One forward of `tokens` consecutive tokens against `cached` positions took `seconds`."""
        self.saw_forward(tokens, attended(tokens, cached), seconds)

    def saw_forward(self, tokens: int, pairs: float, seconds: float) -> None:
        """One forward of any `tokens` tokens that attended to `pairs` query-key pairs took `seconds`."""
        if tokens > 0:
            self._prefill.observe((1.0, float(tokens), pairs), seconds)

    def saw_pull(self, peer: NodeId, kv_bytes: int, seconds: float) -> None:
        """Pulling `kv_bytes` (as they travelled) from `peer` took `seconds`, from the request to the last verified block."""
        if kv_bytes > 0:
            if peer not in self._peers:
                self._peers[peer] = _RobustFit(self._pull.coefficients, self.OBSERVATIONS_MAX)
                if len(self._peers) > self.PEERS_MAX:  # the one known longest; if it is still there, it is learned anew
                    del self._peers[next(iter(self._peers))]
            self._pull.observe((1.0, float(kv_bytes)), seconds)
            self._peers[peer].observe((1.0, float(kv_bytes)), seconds)

    def saw_cut(self, peer: NodeId, kv_bytes: int, seconds: float, misses: Iterable[Miss]) -> None:
        """A pull of which `misses` did not come brought whole blocks of `kv_bytes` from `peer` in `seconds`.

        Where time ran out, at most a block more was on its way: that is how fast the link can have been, and is learned if it
        was believed to be faster. Nothing at all and silence is how a frozen peer looks: that says nothing of its link.
        """
        reasons = {miss.reason for miss in misses}
        if MissReason.DEADLINE not in reasons and not (MissReason.STALLED in reasons and kv_bytes > 0):
            return
        came = kv_bytes + BLOCK_TOKENS * self._fixed.token_bytes
        latency, byte = self._peers.get(peer, self._pull).coefficients
        if seconds > latency + came * byte:
            self.saw_pull(peer, came, seconds)

    def saw_align(self, kv_bytes: int, seconds: float) -> None:
        """Gathering and rotating `kv_bytes` took `seconds`."""
        if kv_bytes > 0:
            self._align.observe((float(kv_bytes),), seconds)


_PRIOR_WEIGHT = 0.05
_TOLERANCES = (1.0, 0.5, 0.3, 0.2, 0.15, 0.15)
"""Log ratio of predicted to observed at which an observation counts half; tightened as the fit gets better."""

_COEFFICIENT_MIN = 1e-3
"""Of the level: no cost ever becomes zero, nor a rate infinite."""


class _RobustFit:
    """seconds ~ features . coefficients, fitted in units of the starting coefficients."""

    def __init__(self, start: tuple[float, ...], window: int) -> None:
        if not all(0 < value < float("inf") for value in start):
            raise ValueError("costs must be positive and finite")
        self._start = np.array(start)
        self._rows: deque[tuple[npt.NDArray[np.float64], float]] = deque(maxlen=window)
        self._scaled = np.ones(len(start))

    @property
    def coefficients(self) -> tuple[float, ...]:
        return tuple((self._scaled * self._start).tolist())

    def observe(self, features: tuple[float, ...], seconds: float) -> None:
        """Take one observation; seconds that are not positive and finite (a clock's mistake) are left out."""
        if 0 < seconds < float("inf"):
            self._rows.append((np.array(features) * self._start, seconds))
            self._fit()

    def _fit(self) -> None:
        rows = np.stack([row for row, _ in self._rows])
        seconds = np.array([seconds for _, seconds in self._rows])
        # The typical ratio to what the starting values predict; the fit then only moves coefficients against each other.
        level = float(np.median(seconds / rows.sum(axis=1)))
        x = np.full(len(self._start), level)
        prior = _PRIOR_WEIGHT * np.eye(len(x)) / level
        for tolerance in _TOLERANCES:
            predicted = rows @ x
            error = np.log(predicted / seconds)
            weight = 1 / np.sqrt(1 + (error / tolerance) ** 2) / np.maximum(predicted, seconds)
            left = np.vstack((rows * weight[:, None], prior))
            right = np.concatenate((seconds * weight, np.full(len(x), _PRIOR_WEIGHT)))
            x = _least_squares_from(left, right, _COEFFICIENT_MIN * level)
        self._scaled = x


def _least_squares_from(
    left: npt.NDArray[np.float64], right: npt.NDArray[np.float64], lowest: float
) -> npt.NDArray[np.float64]:
    """argmin |left x - right| with every x >= lowest; the coefficients that would fall below are held there."""
    free = np.ones(left.shape[1], dtype=bool)
    x = np.full(left.shape[1], lowest)
    while free.any():
        target = right - left[:, ~free] @ x[~free]
        x[free] = np.linalg.lstsq(left[:, free], target, rcond=None)[0]
        low = free & (x < lowest)
        if not low.any():
            break
        x[low] = lowest
        free &= ~low
    return x


def _rate(seconds_per_byte: float) -> float:
    return 1 / seconds_per_byte
