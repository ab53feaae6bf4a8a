"""Results in the repository are those of the presets as they are now: found out without running anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvcomm_p2p.sim.cost_table import load_table
from kvcomm_p2p.sim.scenario import check_scenario, load_scenario, presets

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
KEPT_BYTES_MAX = 150_000
"""Small enough to be read, and to be in a repository."""


def kept(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return result


def table_of(result: dict[str, Any]) -> dict[str, Any]:
    """What the table that a result was made with says now of what it said then."""
    now: dict[str, Any] = msgspec.to_builtins(load_table(result["scenario"]["costs"]))
    return {key: now.get(key) for key in result["costs"]}


@pytest.mark.parametrize("name", sorted(presets()))
def test_every_preset_has_its_result(name: str) -> None:
    path = RESULTS / f"sim-{name}.json"
    assert path.is_file(), f"make it: kvcomm sim run {name} --save benchmarks/results/sim-{name}.json"
    result = kept(path)
    now = load_scenario(name)
    assert check_scenario(result["scenario"]) == now, f"{name} was changed since: run it again"
    assert table_of(result) == result["costs"], f"the table {now.costs} was changed since: run {name} again"
    assert [summary["fabric"] for summary in result["summaries"]] == [run for run, _, _ in now.runs()]
    assert result["command"] == f"sim run {name}"
    assert path.stat().st_size < KEPT_BYTES_MAX


@pytest.mark.parametrize("path", sorted(RESULTS.glob("sim-sweep-*.json")), ids=lambda path: path.stem)
def test_every_sweep_is_of_a_preset_as_it_is(path: Path) -> None:
    result = kept(path)
    _, _, preset, *words = result["command"].split()
    changes = {}
    fabrics = [words[at + 1] for at, word in enumerate(words) if word == "--fabric"]
    for at, word in enumerate(words):
        if word == "--set":
            key, _, value = words[at + 1].partition("=")
            try:
                changes[key] = json.loads(value)
            except ValueError:
                changes[key] = value
    if fabrics:
        changes["fabrics"] = fabrics
    assert check_scenario(result["scenario"]) == load_scenario(preset, changes), f"{path.name}: run it again"
    assert table_of(result) == result["costs"], f"{path.name}: the table of costs was changed since, run it again"
    runs = 1
    for values in result["over"].values():
        runs *= len(values)
    seeds = {run["changes"]["seed"] for run in result["runs"]}
    assert len(result["runs"]) == runs * len(seeds)
    assert path.stat().st_size < KEPT_BYTES_MAX


def test_a_result_of_another_scenario_is_noticed() -> None:
    """What the tests above compare does tell scenarios apart."""
    one = load_scenario("sixteen")
    assert one == load_scenario("sixteen") != load_scenario("sixteen", {"workload.tasks_per_s": 0.51})
