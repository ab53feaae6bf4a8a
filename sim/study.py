"""Scenarios run: one on several fabrics, or one many times with something changed."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from kvcomm_p2p.errors import ConfigError
from kvcomm_p2p.planning.types import ReuseRules
from kvcomm_p2p.sim.cost_table import load_table
from kvcomm_p2p.sim.invariants import Invariants
from kvcomm_p2p.sim.metrics import Observed, Summary, hit_rate_over_time, misses, percentile, summarize
from kvcomm_p2p.sim.scenario import Scenario, check_scenario, put_key
from kvcomm_p2p.sim.simulation import Simulation

RulesOf = Callable[[Scenario], ReuseRules]
"""What the scenario's model profile allows in its mode: reading profiles is not the simulator's."""

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
) -> Study:
    """Run the scenario on each of its fabrics. `check`: watch the invariants. `clock`: wall time, for `Observed.wall_s` alone.
    Raises ConfigError for what the scenario names and is not there, InvariantBroken."""
    table = load_table(scenario.costs)
    done: list[Observed] = []
    for fabric in scenario.fabrics:
        started = clock()
        simulation = Simulation(scenario, fabric, table, rules)
        invariants = Invariants(simulation.world) if check and fabric == "peers" else None
        observed = simulation.run(lambda share, fabric=fabric: progress(fabric, share))  # type: ignore[misc]
        if invariants is not None:
            invariants.check_all()
        observed.wall_s = clock() - started
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


def figures(study: Study) -> list[Figure]:
    """What a study says, fabric by fabric; times against no sharing where that was simulated too."""
    rows: list[Figure] = []
    summaries = study.summaries()
    plain = next((each for each in summaries if each.fabric == "none"), None)
    for observed, summary in zip(study.observed, summaries, strict=True):
        case = f"{study.scenario.name}: {NAMES[summary.fabric]}"
        rows += _requests(case, summary, plain)
        if summary.fabric == "peers":
            rows += _protocol(case, observed, summary)
    return rows


def _requests(case: str, summary: Summary, plain: Summary | None) -> list[Figure]:
    n = summary.requests
    if not n:
        return []
    rows = []
    for name, value in (("p50", summary.ttft_p50_s), ("p90", summary.ttft_p90_s), ("p99", summary.ttft_p99_s)):
        base = getattr(plain, f"ttft_{name}_s") if plain is not None and plain is not summary else None
        ratio = base / value if base is not None and value > 0 else None
        rows.append(Figure(case, f"first token, {name}", value, "s", n, base, ratio))
    rows.append(Figure(case, "waiting for the model, p50", summary.queued_p50_s, "s", n))
    if summary.fabric != "none":
        rows.append(Figure(case, "covered by donors", 100 * summary.covered, "%", n))
        rows.append(Figure(case, "not recomputed", 100 * summary.reused, "%", n))
        rows.append(Figure(case, "of these behind the same exact prefix", 100 * summary.exact, "%", n))
        rows.append(Figure(case, "pulled", summary.pulled_bytes / 1e6, "MB", n))
        rows.append(Figure(case, "largest share of bytes from one holder", 100 * summary.served_max_share, "%", n))
    if summary.unanswered:
        rows.append(Figure(case, "not answered in time", float(summary.unanswered), "prompts", n + summary.unanswered))
    return rows


def _protocol(case: str, observed: Observed, summary: Summary) -> list[Figure]:
    nodes = len(observed.control_bytes)
    rows = [
        Figure(case, "control traffic per node", summary.control_bytes_per_node_s / 1000, "kB/s", nodes),
        Figure(case, "rows of the index per node, most", float(summary.index_rows_max), "rows", nodes),
        Figure(case, "peers taken for dead that were not", float(observed.false_deaths), "times", nodes),
        Figure(case, "simulated events", float(observed.steps), "events", 1),
    ]
    if observed.convergence_s:
        times, n = observed.convergence_s, len(observed.convergence_s)
        rows.append(Figure(case, "an update known to all, median", percentile(times, 50), "s", n))
        rows.append(Figure(case, "an update known to all, p99", percentile(times, 99), "s", n))
    if summary.requests:
        rows.append(Figure(case, "time lost waiting, p99", summary.wait_lost_p99_s, "s", summary.requests))
    for name, size in sorted(observed.traffic.items()):
        per_node = size / max(1, nodes) / observed.duration_s
        rows.append(Figure(case, f"of it {name}", per_node / 1000, "kB/s", observed.frames[name]))
    return rows


def series(study: Study) -> dict[str, Any]:
    """Curves for plots: per fabric hit rate over time, sorted first-token times, load per holder, misses, convergence."""
    curves: dict[str, Any] = {}
    for observed in study.observed:
        at, share = hit_rate_over_time(observed)
        counted = [each for each in observed.outcomes if each.started_at >= study.scenario.warmup_s]
        curves[observed.fabric] = {
            "time_s": at.tolist(),
            "reused": [None if value != value else value for value in share.tolist()],
            "ttft_s": sorted(each.ttft_s for each in counted),
            "served_bytes": sorted(observed.served_bytes, reverse=True),
            "misses": dict(sorted(misses(observed).items())),
            "traffic": dict(sorted(observed.traffic.items())),
            "convergence_s": sorted(observed.convergence_s),
        }
    return curves


# ---------------------------------------------------------------------------------------------------------------- sweeps


@dataclass(frozen=True, slots=True)
class Point:
    """One run of a sweep: what was changed, and the scenario that results."""

    changes: tuple[tuple[str, Any], ...]
    scenario: Scenario

    @property
    def key(self) -> str:
        """Names the run: equal scenarios are the same run, whatever the order of keys."""
        told = json.dumps(msgspec.to_builtins(self.scenario), sort_keys=True, default=str)
        return hashlib.blake2b(told.encode(), digest_size=8).hexdigest()


def points(written: Mapping[str, Any], over: Mapping[str, Sequence[Any]], repeats: int = 1) -> list[Point]:
    """All combinations of the values in `over` ("agents": [4, 8, 16], …), each with `repeats` seeds. Raises ConfigError for
    an empty sweep or a combination that is no scenario."""
    if not over or not all(over.values()):
        raise ConfigError("nothing to sweep over: give at least one key with values, as --over agents=4,8,16")
    made = []
    for combination in itertools.product(*over.values()):
        for repeat in range(repeats):
            changes = dict(zip(over, combination, strict=True))
            base = json.loads(json.dumps(written, default=str))
            for key, value in changes.items():
                put_key(base, key, value)
            base["seed"] = int(base.get("seed", 0)) + repeat
            made.append(Point((*changes.items(), ("seed", base["seed"])), check_scenario(base)))
    return made


def run_point(point: Point, rules: ReuseRules) -> dict[str, Any]:
    """One run, as what a sweep keeps of it."""
    study = run_study(point.scenario, rules)
    return {
        "key": point.key,
        "changes": dict(point.changes),
        "figures": [asdict(figure) for figure in figures(study)],
        "summaries": [asdict(summary) for summary in study.summaries()],
    }


def sweep(
    chosen: Sequence[Point], rules: ReuseRules, folder: Path, *, executor: Executor | None = None, jobs: int = 1
) -> Iterator[dict[str, Any]]:
    """Run what is not in `folder` yet and yield every run as it is there: first those that were, then as they finish. A run is
    written whole or not at all, so an interrupted sweep goes on where it was. `executor`: where to run (a Dask client's or
    Ray's own executor works as well); by default `jobs` processes of this machine."""
    folder.mkdir(parents=True, exist_ok=True)
    left = []
    for point in chosen:
        kept = _kept(folder / f"{point.key}.json")
        if kept is None:
            left.append(point)
        else:
            yield kept
    if not left:
        return
    # What is read-only does not travel to other processes.
    rules = replace(rules, repairs=dict(rules.repairs), short=dict(rules.short), short_from=dict(rules.short_from))
    own = ProcessPoolExecutor(max_workers=jobs) if executor is None else None
    try:
        futures = {(executor or own).submit(run_point, point, rules): point for point in left}  # type: ignore[union-attr]
        for future in as_completed(futures):
            run = future.result()
            path = folder / f"{futures[future].key}.json"
            partial = path.with_suffix(".part")
            partial.write_text(json.dumps(run))
            partial.replace(path)
            yield run
    finally:
        if own is not None:
            own.shutdown(wait=False, cancel_futures=True)


def _kept(path: Path) -> dict[str, Any] | None:
    try:
        run: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return run if {"key", "changes", "figures", "summaries"} <= run.keys() else None
