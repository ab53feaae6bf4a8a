"""One scenario many times with something changed: the runs, kept one by one, and where to run them."""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from kvcomm_p2p.errors import ConfigError
from kvcomm_p2p.planning.types import ReuseRules
from kvcomm_p2p.sim.curves import series
from kvcomm_p2p.sim.scenario import Scenario, check_scenario, put_key
from kvcomm_p2p.sim.study import figures, run_study

CURVES_KEPT = ("ttft_s", "heard_s")


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

    @property
    def told(self) -> str:
        """What was changed, for people."""
        return ", ".join(f"{key} {value}" for key, value in self.changes)


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
            try:
                scenario = check_scenario(base)
            except ConfigError as error:
                told = ", ".join(f"{key}={value}" for key, value in changes.items())
                raise ConfigError(f"with {told}: {error}") from error
            made.append(Point((*changes.items(), ("seed", base["seed"])), scenario))
    return made


def run_point(point: Point, rules: ReuseRules) -> dict[str, Any]:
    """One run, as what a sweep keeps of it."""
    study = run_study(point.scenario, rules)
    return {
        "key": point.key,
        "changes": dict(point.changes),
        "figures": [asdict(figure) for figure in figures(study)],
        "summaries": [asdict(summary) for summary in study.summaries()],
        "curves": {
            fabric: {name: curves[name] for name in CURVES_KEPT if curves[name]}
            for fabric, curves in series(study).items()
        },
    }


def sweep(
    chosen: Sequence[Point], rules: ReuseRules, folder: Path, *, executor: Executor | None = None, jobs: int = 1
) -> Iterator[dict[str, Any]]:
    """Run what is not in `folder` yet and yield every run as it is there: first those that were, then as they finish. A run is
    written whole or not at all, so an interrupted sweep goes on where it was. `executor`: where to run (a Dask client's or
    Ray's own executor works as well); by default `jobs` processes of this machine, which end with the sweep.

    Raises ConfigError for a run that cannot be done (it says which) or a process that died; OSError where nothing can be kept.
    """
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
    if executor is not None:
        yield from _runs(left, rules, folder, executor)
        return
    others = set(multiprocessing.active_children())
    own = ProcessPoolExecutor(max_workers=min(jobs, len(left)))
    try:
        yield from _runs(left, rules, folder, own)
        own.shutdown()
    except BaseException as error:
        own.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()  # who interrupts a sweep does not wait for its runs
        own.shutdown()  # an interpreter that ends while the executor still closes its pipes prints a traceback
        if isinstance(error, BrokenProcessPool):
            raise ConfigError(
                f"a process of the sweep died, out of memory perhaps: lower --jobs; what was done is kept in {folder}"
            ) from error
        raise


def _runs(left: Sequence[Point], rules: ReuseRules, folder: Path, executor: Executor) -> Iterator[dict[str, Any]]:
    """Those that can be done, as they finish. Raises ConfigError for the first that cannot when all others are kept."""
    futures = {executor.submit(run_point, point, rules): point for point in left}
    refused: dict[str, ConfigError] = {}
    for future in as_completed(futures):
        point = futures[future]
        try:
            run = future.result()
        except ConfigError as error:
            refused[point.key] = error
            continue
        path = folder / f"{point.key}.json"
        partial = path.with_suffix(".part")
        partial.write_text(json.dumps(run))
        partial.replace(path)
        yield run
    for point in left:
        if point.key in refused:
            raise ConfigError(f"the run with {point.told}: {refused[point.key]}") from refused[point.key]


def _kept(path: Path) -> dict[str, Any] | None:
    try:
        run: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return run if {"key", "changes", "figures", "summaries", "curves"} <= run.keys() else None
