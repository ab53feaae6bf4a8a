"""What a simulation observed, and what is read from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvcomm_p2p.sim.agents import Outcome
from kvcomm_p2p.sim.herd import HerdSeen


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """What was asked of the central pool's server, in seconds of work per second: of its lock, of its interface in each
    direction (1: all that it can do). `evicted`: anchors that had to make room."""

    lock: float
    sends: float
    receives: float
    evicted: int


@dataclass(frozen=True, slots=True)
class Outage:
    """An agent was down from `from_s` to `until_s` (infinite: to the end)."""

    agent: int
    from_s: float
    until_s: float


@dataclass(slots=True)
class Observed:
    """Everything that one run of one fabric left behind. Times count from the end of joining.

    `traffic`: bytes of control frames by message type, all nodes; `index_rows`: rows of the directory per node at the end;
    `served_bytes`: KV bytes sent per node; `convergence_s`: seconds until everybody knew of an update, one per update
    followed; `heard_s`: the same for each node and update; `updates_unfinished`: updates that somebody did not know of when
    time was over; `steps`: events handled; `unanswered`: prompts that were asked but not answered when time was over, or
    whose agent was down; `outages`: who was down when; `pool`: of the fabric central alone; `busy_told`: pulls that were put
    off because their holder served as many as it may.
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
    heard_s: list[float] = field(default_factory=list)
    updates_unfinished: int = 0
    outages: list[Outage] = field(default_factory=list)
    pool: PoolLoad | None = None
    busy_told: int = 0
    herds: list[HerdSeen] = field(default_factory=list)
    violations: int = 0
    false_deaths: int = 0
    unanswered: int = 0
    steps: int = 0
    wall_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Summary:
    """Medians and shares of one run. Shares are of prompt tokens; times in seconds; bytes per node and second.

    `update_median_s`, `update_p99_s`: until everybody knew, over `updates` updates (0 where none was followed). `pool_lock`,
    `pool_sends`, `pool_receives`, `pool_evicted`: see PoolLoad; 0 without a pool.
    """

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
    queued_p99_s: float
    updates: int
    update_median_s: float
    update_p99_s: float
    pool_lock: float
    pool_sends: float
    pool_receives: float
    pool_evicted: int


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
    queued = [outcome.queued_s for outcome in counted]
    pool = observed.pool or PoolLoad(0.0, 0.0, 0.0, 0)
    return Summary(
        fabric=observed.fabric,
        requests=len(counted),
        unanswered=observed.unanswered,
        ttft_p50_s=percentile(ttft, 50),
        ttft_p90_s=percentile(ttft, 90),
        ttft_p99_s=percentile(ttft, 99),
        queued_p50_s=percentile(queued, 50),
        covered=sum(outcome.covered for outcome in counted) / tokens,
        reused=reused / tokens,
        exact=sum(outcome.exact for outcome in counted) / tokens,
        recomputed=1 - reused / tokens,
        pulled_bytes=sum(outcome.pulled_bytes for outcome in counted),
        control_bytes_per_node_s=sum(observed.control_bytes) / nodes / observed.duration_s,
        served_max_share=max(observed.served_bytes, default=0) / served if served else 0.0,
        wait_lost_p99_s=percentile([outcome.wait_lost_s for outcome in counted], 99),
        index_rows_max=max(observed.index_rows, default=0),
        queued_p99_s=percentile(queued, 99),
        updates=len(observed.convergence_s),
        update_median_s=percentile(observed.convergence_s, 50),
        update_p99_s=percentile(observed.convergence_s, 99),
        pool_lock=pool.lock,
        pool_sends=pool.sends,
        pool_receives=pool.receives,
        pool_evicted=pool.evicted,
    )


def reused_by(
    at: Sequence[float], outcomes: Sequence[Outcome], edges: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Reused share of the prompt tokens in each bin between `edges`; NaN where nothing falls. `at`: what each of `outcomes` is
    binned by."""
    tokens = np.array([outcome.tokens for outcome in outcomes], dtype=np.float64)
    reused = np.array([outcome.reused for outcome in outcomes], dtype=np.float64)
    asked, _ = np.histogram(np.asarray(at, dtype=np.float64), edges, weights=tokens)
    found, _ = np.histogram(np.asarray(at, dtype=np.float64), edges, weights=reused)
    shares = np.full(len(edges) - 1, np.nan)
    np.divide(found, asked, out=shares, where=asked > 0)
    return shares


def seconds_since_return(outcome: Outcome, outages: Sequence[Outage]) -> float | None:
    """How long the agent had been back when it was asked; None if it had never been down."""
    ended = [each.until_s for each in outages if each.agent == outcome.agent and each.until_s <= outcome.started_at]
    return outcome.started_at - max(ended) if ended else None


def misses(observed: Observed) -> Counter[str]:
    """Why something was not reused, over all prompts."""
    total: Counter[str] = Counter()
    for outcome in observed.outcomes:
        total.update(outcome.misses)
    return total
