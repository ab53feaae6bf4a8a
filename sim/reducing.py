"""A scenario that breaks an invariant, made smaller while it still breaks the same: fewer agents, faults, tasks, less time.

Delta debugging over the scenario's own keys (Zeller and Hildebrandt 2002, "Simplifying and isolating failure-inducing input"):
whatever can be left out, halved or taken back to its default is tried; what still breaks the same invariant is gone on with. A
run is a function of its scenario, so every answer is final.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from kvcomm_p2p.errors import ConfigError
from kvcomm_p2p.sim.failing import Failure
from kvcomm_p2p.sim.scenario import NetworkSpec, Scenario, check_scenario

RUNS_MAX = 300
SEEDS_TRIED = 3
"""Fewer agents draw other numbers: the same may need another seed to show."""

TASKS_MAX = 512
"""Of more tasks than this single ones are not left out: first time has to become shorter."""

NAMED_MAX = 4
"""In place of a share of all agents, one of so many is tried."""

Written = dict[str, Any]
Breaks = Callable[[Scenario], Failure | None]


@dataclass(frozen=True, slots=True)
class Reduction:
    """After `runs` attempts: the smallest scenario so far, and how it fails. `better`: the last attempt made it smaller."""

    scenario: Scenario
    failure: Failure
    runs: int
    better: bool


def reductions(scenario: Scenario, failure: Failure, breaks: Breaks, runs_max: int = RUNS_MAX) -> Iterator[Reduction]:
    """Yields after every attempt, so that whoever asks may stop at any time with the best so far; ends when nothing helps or
    after `runs_max` attempts. `breaks` runs a scenario. Only failures of the same rule count."""
    best = Reduction(_only_peers(scenario), failure, 0, False)
    tried = {_key(best.scenario)}
    improved = True
    while improved:
        improved = False
        for step in _STEPS:
            again = True
            while again:
                again = False
                for candidate in _checked(step(_written(best.scenario), best.failure)):
                    if best.runs >= runs_max:
                        return
                    if _key(candidate) in tried:
                        continue
                    tried.add(_key(candidate))
                    found = _tried(candidate, breaks)
                    if found is not None and found.broken.rule == failure.broken.rule:
                        best = Reduction(candidate, found, best.runs + 1, True)
                        yield best
                        improved = again = True
                        break
                    best = Reduction(best.scenario, best.failure, best.runs + 1, False)
                    yield best


def _tried(candidate: Scenario, breaks: Breaks) -> Failure | None:
    try:
        return breaks(candidate)
    except ConfigError:
        return None  # what cannot be run breaks nothing


def told_size(scenario: Scenario) -> str:
    """For people: what makes a scenario large."""
    tasks = f"tasks of it {len(scenario.only_tasks)}" if scenario.only_tasks else "all of its tasks"
    kind = scenario.workload.get("kind", "none")
    workload = "no workload" if kind == "none" else f"workload {kind}, {tasks}"
    return f"agents {scenario.agents}, seconds {scenario.duration_s:g}, faults {len(scenario.faults)}, {workload}"


def _only_peers(scenario: Scenario) -> Scenario:
    return msgspec.structs.replace(scenario, fabrics=("peers",))


def _written(scenario: Scenario) -> Written:
    written: Written = msgspec.to_builtins(scenario)
    return written


def _key(scenario: Scenario) -> str:
    return json.dumps(_written(scenario), sort_keys=True)


def _checked(candidates: Iterator[Written]) -> Iterator[Scenario]:
    for candidate in candidates:
        try:
            scenario = check_scenario(candidate)
        except ConfigError:
            continue
        yield scenario


def _defaults(written: Written, failure: Failure) -> Iterator[Written]:
    """Whole keys as if they had not been set."""
    plain = {"workload": {}, "publish_per_s": 0.0, "updates": 0, "faults": [], "protocol": {}, "ablations": []}
    plain |= {"models": 1, "up_s": [], "beliefs": "link", "warmup_s": 0.0, "pool_bytes": 1 << 30}
    for key, value in plain.items():
        if written[key] != value:
            yield {**written, key: value}
    network = {**written["network"], "loss": 0.0, "duplication": 0.0, "reordering": 0.0}
    if network != written["network"]:
        yield {**written, "network": network}


def _until(written: Written, failure: Failure) -> Iterator[Written]:
    """Not much longer than until it shows: shorter still it is made when there are fewer who could show it."""
    yield from _lasting(written, math.ceil(failure.after_s + 1))


def _time(written: Written, failure: Failure) -> Iterator[Written]:
    """No longer than until it shows, then shorter."""
    duration_s = written["duration_s"]
    until_s = max(0.1, math.ceil(10 * failure.after_s + 1) / 10)
    yield from _lasting(written, until_s, duration_s / 2, duration_s * 0.75, duration_s - 1)


def _lasting(written: Written, *durations_s: float) -> Iterator[Written]:
    duration_s = written["duration_s"]
    for shorter in durations_s:
        shorter = round(float(shorter), 2)
        if 0.1 <= shorter < duration_s:
            yield {**written, "duration_s": shorter, "warmup_s": min(written["warmup_s"], shorter / 2)}


def _faults(written: Written, failure: Failure) -> Iterator[Written]:
    """Fewer of them."""
    for kept in _without_some(written["faults"]):
        yield {**written, "faults": kept}


def _tasks(written: Written, failure: Failure) -> Iterator[Written]:
    """Fewer prompts: a part of those that there are, then single ones."""
    if written["workload"].get("kind", "none") == "none":
        return
    chosen = written["only_tasks"]
    if not chosen:
        count = _task_count(written)
        if count is None or count > TASKS_MAX:
            return
        yield {**written, "only_tasks": list(range((count + 1) // 2))}
        chosen = list(range(count))
    for kept in _without_some(chosen):
        if kept:
            yield {**written, "only_tasks": kept}


def _task_count(written: Written) -> int | None:
    rate = written["workload"].get("tasks_per_s")
    if rate is None and "tasks_per_agent_s" in written["workload"]:
        rate = written["agents"] * written["workload"]["tasks_per_agent_s"]
    return None if rate is None else math.ceil(2 * rate * written["duration_s"]) + 5


def _agents(written: Written, failure: Failure) -> Iterator[Written]:
    """Fewer of them; faults of those who are gone go, too."""
    agents = written["agents"]
    for fewer in dict.fromkeys((2, agents // 2, agents * 3 // 4, agents - 1)):
        if not 1 <= fewer < agents:
            continue
        faults = []
        for fault in written["faults"]:
            nodes = [number for number in fault["nodes"] if number < fewer]
            if nodes or not fault["nodes"]:
                faults.append({**fault, "nodes": nodes})
        for seed in range(written["seed"], written["seed"] + SEEDS_TRIED):
            yield {**written, "agents": fewer, "faults": faults, "up_s": written["up_s"][:fewer], "seed": seed}


def _details(written: Written, failure: Failure) -> Iterator[Written]:
    """Of faults: fewer machines, sooner over; of the network: nothing lost, doubled or out of order, one site."""
    for place, fault in enumerate(written["faults"]):
        for change in _milder(fault, written["agents"]):
            faults = [*written["faults"]]
            faults[place] = {**fault, **change}
            yield {**written, "faults": faults}
    network, plain = written["network"], msgspec.to_builtins(NetworkSpec())
    for key, value in plain.items():
        if network[key] != value:
            yield {**written, "network": {**network, key: value}}
    for key in ("loss", "duplication", "reordering"):
        if network[key] > 0.01:
            yield {**written, "network": {**network, key: round(network[key] / 2, 3)}}


def _milder(fault: Written, agents: int) -> Iterator[Written]:
    if fault["share"] and not fault["nodes"]:
        for number in range(min(agents, NAMED_MAX)):
            yield {"nodes": [number], "share": 0.0}
    for kept in _without_some(fault["nodes"]):
        if kept:
            yield {"nodes": kept}
    for first in (1, 0):  # the lowest numbers, so that there may be fewer agents
        lowest = list(range(first, first + len(fault["nodes"])))
        if lowest < list(fault["nodes"]) and lowest[-1] < agents:
            yield {"nodes": lowest}
    if fault["share"] and not fault["nodes"]:
        yield {"share": round(fault["share"] / 2, 3)}
    for key in ("for_s", "at_s"):
        if fault[key] >= 0.2:
            yield {key: round(fault[key] / 2, 1)}
    if fault["kind"] == "loss" and fault["loss"] > 0.02:
        yield {"loss": round(fault["loss"] / 2, 2)}


def _settings(written: Written, failure: Failure) -> Iterator[Written]:
    """Settings of nodes and of the workload that do not matter."""
    for table in ("protocol", "workload"):
        for key in written[table]:
            if key not in ("kind", "path", "graph", "tasks_per_s", "tasks_per_agent_s"):
                yield {**written, table: {other: value for other, value in written[table].items() if other != key}}
    for key in (
        "documents",
        "per_question",
        "readers",
        "question_tokens",
        "answer_tokens",
        "debaters",
        "rounds",
        "stages",
    ):
        value = written["workload"].get(key)
        if isinstance(value, int) and value > 1:
            yield {**written, "workload": {**written["workload"], key: value // 2}}
    if written["updates"] > 1:
        yield {**written, "updates": written["updates"] // 2}
    if written["publish_per_s"] > 0.1:
        yield {**written, "publish_per_s": round(written["publish_per_s"] / 2, 3)}


def _without_some(items: list[Any]) -> Iterator[list[Any]]:
    """Without one half, one quarter, ... one of them."""
    size = math.ceil(len(items) / 2)
    while items and size:
        for at in range(0, len(items), size):
            yield items[:at] + items[at + size :]
        size = 0 if size == 1 else math.ceil(size / 2)


_STEPS = (_defaults, _until, _faults, _agents, _tasks, _time, _settings, _details)
