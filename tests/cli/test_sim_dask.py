"""A sweep on a Dask scheduler of somebody else's, here on loopback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvcomm_p2p.cli.app import app

distributed = pytest.importorskip("distributed", reason="needs kvcomm-p2p[dask]")


@pytest.fixture
def scheduler() -> Iterator[str]:
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, processes=True, dashboard_address=None, scheduler_port=0
    ) as cluster:
        yield cluster.scheduler_address.removeprefix("tcp://")


def test_a_sweep_runs_there_and_comes_to_the_same(scheduler: str, tmp_path: Path) -> None:
    words = ["sim", "sweep", "five-agents", "--over", "agents=2,3", "--fabric", "none", "--set", "duration_s=70"]
    for name, more in (("here", ["--jobs", "1"]), ("there", ["--engine", f"dask://{scheduler}"])):
        done = CliRunner().invoke(
            app, [*words, *more, "--into", str(tmp_path / name), "--save", str(tmp_path / f"{name}.json")]
        )
        assert done.exit_code == 0, done.output
    here, there = (json.loads((tmp_path / f"{name}.json").read_text())["runs"] for name in ("here", "there"))
    assert here == there and len(here) == 2


def test_a_scheduler_that_is_not_there_is_said(tmp_path: Path) -> None:
    words = ["sim", "sweep", "five-agents", "--over", "agents=2", "--engine", "dask://127.0.0.1:9"]
    done = CliRunner().invoke(app, [*words, "--into", str(tmp_path)])
    assert done.exit_code == 1 and "no engine answers at dask://127.0.0.1:9" in done.output
    assert "Traceback" not in done.output
