"""Histories of simulated nodes are recorded and replayed exactly as those of real ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvcomm_p2p.cli.app import app
from kvcomm_p2p.net.recorder import read_recording, replay

SCENARIO = """
agents = 4
duration_s = 12.0
costs = "llama-3.1-8b-h100"
fabrics = ["own", "peers"]
updates = 3
publish_per_s = 0.5

[workload]
kind = "rag"
tasks_per_s = 0.7
documents = 3

[network]
inside = "fast"
loss = 0.05

[[faults]]
kind = "restart"
at_s = 3.0
for_s = 2.0
nodes = [1]

[[faults]]
kind = "restart"
at_s = 4.0
for_s = 1.0
nodes = [2]
keeps_state = false

[[faults]]
kind = "freeze"
at_s = 6.0
for_s = 2.0
nodes = [3]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where: Path = tmp_path_factory.mktemp("recorded")
    (where / "small.toml").write_text(SCENARIO)
    told = CliRunner().invoke(app, ["sim", "run", str(where / "small.toml"), "--record", str(where / "nodes")])
    assert told.exit_code == 0, told.output
    return where / "nodes"


def test_every_life_of_every_node_is_a_recording_that_replays_exactly(folder: Path) -> None:
    names = sorted(path.name for path in folder.iterdir())
    lives = ["agent-0", "agent-1-2", "agent-1", "agent-2-2", "agent-2", "agent-3"]
    assert names == [f"{life}.kvrec" for life in lives]
    for path in folder.iterdir():
        recording = read_recording(path)
        outcome = replay(recording)
        assert (outcome.differs_at, outcome.end) == (None, "closed") and outcome.events == len(recording.steps) > 20


def test_a_life_that_is_another_one_is_noticed(folder: Path) -> None:
    from dataclasses import replace

    recording = read_recording(folder / "agent-0.kvrec")
    later = replace(recording, steps=recording.steps[:10] + recording.steps[12:])
    assert replay(later).differs_at is not None


def test_recordings_of_a_simulation_can_be_simulated_again(folder: Path) -> None:
    told = CliRunner().invoke(app, ["sim", "replay", *(str(path) for path in sorted(folder.glob("agent-?.kvrec")))])
    assert told.exit_code == 0, told.output
    assert "4 nodes" in told.output and "SynAck received" in told.output


def test_what_cannot_be_recorded_is_refused_before_anything_starts(folder: Path) -> None:
    told = CliRunner().invoke(app, ["sim", "run", "thousand", "--record", str(folder / "more")])
    assert told.exit_code == 1 and "lower agents" in told.output and not (folder / "more").exists()
    again = CliRunner().invoke(app, ["sim", "run", str(folder.parent / "small.toml"), "--record", str(folder)])
    assert again.exit_code == 1 and "agent-0.kvrec" in again.output
