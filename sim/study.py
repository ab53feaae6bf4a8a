"""One scenario run on several fabrics, and the figures that come of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcomm_p2p.planning.types import ReuseRules
from kvcomm_p2p.protocol.node import Node
from kvcomm_p2p.sim.cost_table import load_table
from kvcomm_p2p.sim.herd import HerdSeen
from kvcomm_p2p.sim.invariants import EVERY, Invariants
from kvcomm_p2p.sim.metrics import Observed, PoolLoad, Summary, summarize
from kvcomm_p2p.sim.scenario import Scenario
from kvcomm_p2p.sim.settled import check_settled
from kvcomm_p2p.sim.simulation import Simulation
from kvcomm_p2p.sim.world import NodeMaker

Progress = Callable[[str, float], None]
"""(what is running, 0 to 1)."""


@dataclass(frozen=True, slots=True)
class Study:
    """One scenario on several fabrics."""

    scenario: Scenario
    observed: tuple[Observed, ...]

    def summaries(self) -> list[Summary]:
        return [summarize(each, skip_s=self.scenario.warmup_s) for each in self.observed]


def run_study(
    scenario: Scenario,
    rules: ReuseRules,
    *,
    progress: Progress = lambda what, share: None,
    check: bool = True,
    clock: Callable[[], float] = lambda: 0.0,
    every: int = EVERY,
    make_node: NodeMaker = Node,
) -> Study:
    """Run the scenario on each of its fabrics, and on peers without each of its ablations.

    `check`: watch the invariants, what a node knows of all others after `every` of its events. `clock`: wall time, for
    `Observed.wall_s` alone. `make_node`: what stands in for `Node` on the fabric peers.
    Raises ConfigError for what the scenario names and is not there, InvariantBroken."""
    table = load_table(scenario.costs)
    done: list[Observed] = []
    for name, fabric, ablation in scenario.runs():
        started = clock()
        maker = make_node if fabric == "peers" and ablation is None else Node
        simulation = Simulation(scenario, fabric, table, rules, ablation=ablation, make_node=maker)
        invariants = Invariants(simulation.world, every) if check and fabric == "peers" else None
        observed = simulation.run(lambda share, name=name: progress(name, share))  # type: ignore[misc]
        observed.wall_s = clock() - started
        if invariants is not None:
            invariants.check_all()
            check_settled(simulation, invariants)
        done.append(observed)
    return Study(scenario, tuple(done))


# --------------------------------------------------------------------------------------------------------------- figures


@dataclass(frozen=True, slots=True)
class Figure:
    """One row of a table. `baseline` is the same metric without sharing; `ratio` says how much better (larger is better)."""

    case: str
    metric: str
    value: float
    unit: str
    n: int
    baseline: float | None = None
    ratio: float | None = None


NAMES = {
    "none": "no sharing",
    "own": "own prefix cache",
    "central": "one central pool",
    "peers": "peers (this protocol)",
}


BASELINES = frozenset({"none", "own", "central"})
"""Everything else is the protocol, or the protocol without something."""


def named(run: str) -> str:
    """What people call a run of a study: a fabric, or what `ablations` says of it already."""
    return NAMES.get(run, run)


def figures(study: Study) -> list[Figure]:
    """What a study says, fabric by fabric; times against no sharing where that was simulated too."""
    rows: list[Figure] = []
    summaries = study.summaries()
    plain = next((each for each in summaries if each.fabric == "none"), None)
    for observed, summary in zip(study.observed, summaries, strict=True):
        case = f"{study.scenario.name}: {named(summary.fabric)}"
        rows += _requests(case, summary, plain)
        if observed.pool is not None:
            rows += _pool(case, observed.pool)
        if summary.fabric not in BASELINES:
            rows += _protocol(case, observed, summary)
    return rows


def _requests(case: str, summary: Summary, plain: Summary | None) -> list[Figure]:
    n = summary.requests
    rows = []
    if summary.unanswered:
        rows.append(Figure(case, "not answered", float(summary.unanswered), "prompts", n + summary.unanswered))
    if not n:
        return rows
    for name, value in (("p50", summary.ttft_p50_s), ("p90", summary.ttft_p90_s), ("p99", summary.ttft_p99_s)):
        base = getattr(plain, f"ttft_{name}_s") if plain is not None and plain is not summary else None
        ratio = base / value if base is not None and value > 0 else None
        rows.append(Figure(case, f"first token, {name}", value, "s", n, base, ratio))
    rows.append(Figure(case, "waiting for the model, p50", summary.queued_p50_s, "s", n))
    rows.append(Figure(case, "waiting for the model, p99", summary.queued_p99_s, "s", n))
    if summary.fabric != "none":
        rows.append(Figure(case, "covered by donors", 100 * summary.covered, "%", n))
        rows.append(Figure(case, "not recomputed", 100 * summary.reused, "%", n))
        rows.append(Figure(case, "of these behind the same exact prefix", 100 * summary.exact, "%", n))
        rows.append(Figure(case, "pulled", summary.pulled_bytes / 1e6, "MB", n))
        rows.append(Figure(case, "largest share of bytes from one holder", 100 * summary.served_max_share, "%", n))
    return rows


def _pool(case: str, pool: PoolLoad) -> list[Figure]:
    return [
        Figure(case, "work for the pool's lock", 100 * pool.lock, "% of the time", 1),
        Figure(case, "work for the pool's interface, sending", 100 * pool.sends, "% of the time", 1),
        Figure(case, "work for the pool's interface, receiving", 100 * pool.receives, "% of the time", 1),
        Figure(case, "anchors that the pool evicted", float(pool.evicted), "anchors", 1),
    ]


def _protocol(case: str, observed: Observed, summary: Summary) -> list[Figure]:
    nodes = len(observed.control_bytes)
    rows = [
        Figure(case, "control traffic per node", summary.control_bytes_per_node_s / 1000, "kB/s", nodes),
        Figure(case, "rows of the index per node, most", float(summary.index_rows_max), "rows", nodes),
        Figure(case, "peers taken for dead that were not", float(observed.false_deaths), "times", nodes),
        Figure(case, "simulated events", float(observed.steps), "events", 1),
    ]
    if observed.convergence_s:
        rows.append(Figure(case, "an update known to all, median", summary.update_median_s, "s", summary.updates))
        rows.append(Figure(case, "an update known to all, p99", summary.update_p99_s, "s", summary.updates))
    if observed.updates_unfinished:
        followed = summary.updates + observed.updates_unfinished
        rows.append(Figure(case, "updates not known to all", float(observed.updates_unfinished), "updates", followed))
    rows += _herds(case, observed.herds)
    if summary.requests:
        rows.append(Figure(case, "time lost waiting, p99", summary.wait_lost_p99_s, "s", summary.requests))
    for name, size in sorted(observed.traffic.items()):
        per_node = size / max(1, nodes) / observed.duration_s
        rows.append(Figure(case, f"of it {name}", per_node / 1000, "kB/s", observed.frames[name]))
    return rows


def _herds(case: str, herds: Sequence[HerdSeen]) -> list[Figure]:
    """Worst of all herds; a transfer is what one anchor takes on an idle link."""
    if not herds:
        return []
    n = len(herds)
    reasons: Counter[str] = sum((each.missed for each in herds), Counter())
    return [
        Figure(case, "copies that the origin of a herd sent, most", max(each.copies for each in herds), "", n),
        Figure(case, "copies that the origin of a herd sent, mean", sum(each.copies for each in herds) / n, "", n),
        Figure(case, "everybody has it after, most", max(each.last_s / each.alone_s for each in herds), "transfers", n),
        Figure(case, "everybody has it after, most", max(each.last_s for each in herds), "s", n),
        Figure(case, "agents of a herd that missed blocks", float(sum(each.missing for each in herds)), "agents", n),
        Figure(case, "time lost by one agent of a herd, most", max(each.wait_lost_s for each in herds), "s", n),
        *(Figure(case, f"blocks that herds missed: {name}", float(reasons[name]), "", n) for name in sorted(reasons)),
    ]
