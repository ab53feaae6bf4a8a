"""Sweeps that go on where they were, where a pool loses, and their pictures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from sim_cases import RULES, TINY

from kvcomm_p2p.errors import ConfigError
from kvcomm_p2p.sim import sweeps
from kvcomm_p2p.sim.crossing import crossings, range_of


def test_a_sweep_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = sweeps.points(TINY, {"agents": [2, 3]})
    rules = replace(RULES, repairs=MappingProxyType(dict(RULES.repairs)))
    (first,) = sweeps.sweep(points[:1], rules, tmp_path)
    assert first["changes"]["agents"] == 2
    (tmp_path / f"{points[1].key}.json").write_text("{half a fi")
    ran: list[sweeps.Point] = []
    real = sweeps.run_point
    monkeypatch.setattr(sweeps, "run_point", lambda point, rules: ran.append(point) or real(point, rules))
    runs = list(sweeps.sweep(points, rules, tmp_path, executor=_Here()))
    assert [point.scenario.agents for point in ran] == [3]
    assert {run["changes"]["agents"] for run in runs} == {2, 3}
    assert runs == list(sweeps.sweep(points, rules, tmp_path, executor=_Here())) and len(ran) == 1


class _Here:
    """An executor that is this process: what an engine of somebody else's offers."""

    def submit(self, call: Any, *arguments: Any) -> Any:
        from concurrent.futures import Future

        future: Future[Any] = Future()
        try:
            future.set_result(call(*arguments))
        except ConfigError as error:
            future.set_exception(error)
        return future


def test_points_are_all_combinations_and_checked() -> None:
    made = sweeps.points(TINY, {"agents": [2, 4], "network.loss": [0.0, 0.1]}, repeats=2)
    assert len(made) == 8 and len({point.key for point in made}) == 8
    with pytest.raises(ConfigError, match="nothing to sweep"):
        sweeps.points(TINY, {})
    with pytest.raises(ConfigError, match="agents"):
        sweeps.points(TINY, {"agents": [-2]})


def test_a_run_that_cannot_be_done_is_named_and_what_was_done_is_kept(tmp_path: Path) -> None:
    """So few prompts that with this seed none comes."""
    points = sweeps.points(TINY, {"workload.tasks_per_s": [1.0, 1e-6]})
    with pytest.raises(ConfigError, match=r"workload\.tasks_per_s 1e-06.*no task"):
        list(sweeps.sweep(points, RULES, tmp_path, executor=_Here()))
    assert len(list(tmp_path.glob("*.json"))) == 1


def run(agents: int, seed: int, **p99: float) -> dict[str, Any]:
    return {
        "changes": {"agents": agents, "seed": seed},
        "summaries": [{"fabric": fabric, "requests": 9, "ttft_p99_s": value} for fabric, value in p99.items()],
        "curves": {},
    }


def test_a_pool_loses_from_where_it_is_never_better_again() -> None:
    lost = [run(4, 0, own=2.0, central=3.0), run(8, 0, own=2.0, central=1.0)]
    lost += [run(16, 0, own=2.0, central=2.0), run(32, 0, own=2.0, central=2.5)]
    always = [run(agents, 1, own=2.0, central=9.0) for agents in (4, 8, 16, 32)]
    (found,) = crossings([*always, *lost], "agents", metric="ttft_p99_s")
    assert (found.against, found.wins_to, found.loses_from) == ("own", (8.0, None), (16.0, 4.0))
    assert range_of(found.loses_from, "never") == "4 to 16" and range_of(found.wins_to, "never") == "8 or never"
    (better,) = crossings([run(4, 0, own=2.0, central=1.0)], "agents", metric="ttft_p99_s")
    assert better.loses_from == (None,) and range_of(better.loses_from, "not up to 4") == "not up to 4"
    assert crossings([run(4, 0, own=2.0)], "agents", metric="ttft_p99_s") == []


def test_pictures_of_sweeps(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from kvcomm_p2p.sim.sweep_plots import draw_sweep

    over = {"agents": [2, 3], "network.loss": [0.0, 0.1]}
    runs = json.loads(json.dumps([sweeps.run_point(point, RULES) for point in sweeps.points(TINY, over)]))
    files = draw_sweep("tiny", over, runs, tmp_path)
    assert [path.name for path in files] == [
        "tiny-news-by-agents.png",
        "tiny-ttft_p50_s-by-agents-network-loss.png",
        "tiny-ttft_p99_s-by-agents-network-loss.png",
    ]
    assert all(path.stat().st_size > 5000 for path in files)
