"""What a simulation observed, and what is read from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvcomm_p2p.sim.agents import Outcome


@dataclass(slots=True)
class Observed:
    """Everything that one run of one fabric left behind.

    `traffic`: bytes of control frames by message type, all nodes; `index_rows`: rows of the directory per node at the end;
    `served_bytes`: KV bytes sent per node; `convergence_s`: seconds until everybody knew of an update, one per update
    followed; `steps`: events handled; `unanswered`: prompts that were asked but not answered when time was over.
    """

    fabric: str
    duration_s: float
    outcomes: list[Outcome] = field(default_factory=list)
    traffic: Counter[str] = field(default_factory=Counter)
    frames: Counter[str] = field(default_factory=Counter)
    control_bytes: list[int] = field(default_factory=list)
    served_bytes: list[int] = field(default_factory=list)
    index_rows: list[int] = field(default_factory=list)
    convergence_s: list[float] = field(default_factory=list)
    violations: int = 0
    false_deaths: int = 0
    unanswered: int = 0
    steps: int = 0
    wall_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Summary:
    """Medians and shares of one run. Shares are of prompt tokens; times in seconds; bytes per node and second."""

    fabric: str
    requests: int
    unanswered: int
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    queued_p50_s: float
    covered: float
    reused: float
    exact: float
    recomputed: float
    pulled_bytes: int
    control_bytes_per_node_s: float
    served_max_share: float
    wait_lost_p99_s: float
    index_rows_max: int


def percentile(values: Sequence[float], q: float) -> float:
    """Linear interpolation between order statistics; 0 for none."""
    return float(np.percentile(np.asarray(values), q)) if len(values) else 0.0


def summarize(observed: Observed, *, skip_s: float = 0.0) -> Summary:
    """Of prompts asked from `skip_s` on (before that, nobody has anything yet)."""
    counted = [outcome for outcome in observed.outcomes if outcome.started_at >= skip_s]
    ttft = [outcome.ttft_s for outcome in counted]
    tokens = max(1, sum(outcome.tokens for outcome in counted))
    reused = sum(outcome.reused for outcome in counted)
    served = sum(observed.served_bytes)
    nodes = max(1, len(observed.control_bytes))
    return Summary(
        fabric=observed.fabric,
        requests=len(counted),
        unanswered=observed.unanswered,
        ttft_p50_s=percentile(ttft, 50),
        ttft_p90_s=percentile(ttft, 90),
        ttft_p99_s=percentile(ttft, 99),
        queued_p50_s=percentile([outcome.queued_s for outcome in counted], 50),
        covered=sum(outcome.covered for outcome in counted) / tokens,
        reused=reused / tokens,
        exact=sum(outcome.exact for outcome in counted) / tokens,
        recomputed=1 - reused / tokens,
        pulled_bytes=sum(outcome.pulled_bytes for outcome in counted),
        control_bytes_per_node_s=sum(observed.control_bytes) / nodes / observed.duration_s,
        served_max_share=max(observed.served_bytes, default=0) / served if served else 0.0,
        wait_lost_p99_s=percentile([outcome.wait_lost_s for outcome in counted], 99),
        index_rows_max=max(observed.index_rows, default=0),
    )


def hit_rate_over_time(observed: Observed, bins: int = 30) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """(seconds, reused share of the prompt tokens asked in each bin; NaN where nothing was asked)."""
    edges = np.linspace(0, observed.duration_s, bins + 1)
    at = np.array([outcome.started_at for outcome in observed.outcomes])
    tokens = np.array([outcome.tokens for outcome in observed.outcomes], dtype=np.float64)
    reused = np.array([outcome.reused for outcome in observed.outcomes], dtype=np.float64)
    asked, _ = np.histogram(at, edges, weights=tokens)
    found, _ = np.histogram(at, edges, weights=reused)
    share = np.divide(found, asked, out=np.full(bins, np.nan), where=asked > 0)
    return (edges[:-1] + edges[1:]) / 2, share


def misses(observed: Observed) -> Counter[str]:
    """Why something was not reused, over all prompts."""
    total: Counter[str] = Counter()
    for outcome in observed.outcomes:
        total.update(outcome.misses)
    return total
