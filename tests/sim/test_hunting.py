"""Small scenarios drawn at random, with everything that can go wrong: nothing breaks."""

from __future__ import annotations

from pathlib import Path

import planted
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import kvcomm_p2p.sim.simulation
from kvcomm_p2p.cli.app import app
from kvcomm_p2p.planning.types import ReuseRules
from kvcomm_p2p.sim.failing import check
from kvcomm_p2p.sim.hunting import EVERY, draw
from kvcomm_p2p.sim.scenario import load_scenario

RULES = ReuseRules(approximate=True, reason="", kl_target=1.0, kl_max=2.0, guard_probes=6)


@settings(max_examples=8, deadline=None, derandomize=True, phases=[Phase.generate])  # a seed has no smaller one
@given(seed=st.integers(0, 10_000))
def test_nothing_breaks(seed: int) -> None:
    failure = check(draw(seed), RULES, every=EVERY)
    assert failure is None, f"kvcomm sim hunt --runs 1 --seed {seed}: {failure.broken if failure else ''}"


@pytest.mark.parametrize("seed", [1032, 1126, 1198, 1409, 3409, 3852])
def test_what_was_found_once_is_not_found_again(seed: int) -> None:
    """Two lives in one epoch, agents at work while their process is frozen, agents that return when nobody is left to ask."""
    assert check(draw(seed), RULES, every=EVERY) is None


def test_what_is_drawn_is_the_same_for_the_same_seed_and_of_all_kinds() -> None:
    drawn = [draw(seed) for seed in range(200)]
    assert drawn == [draw(seed) for seed in range(200)]
    kinds = {fault.kind for scenario in drawn for fault in scenario.faults}
    assert kinds == {"crash", "restart", "freeze", "partition", "slow", "leave", "churn", "loss"}
    assert 40 <= sum(not scenario.faults for scenario in drawn) <= 100
    assert {scenario.models for scenario in drawn} == {1, 2}
    assert {scenario.network.same_host for scenario in drawn} == {True, False}
    assert len({key for scenario in drawn for key in scenario.protocol}) > 25


def test_the_command_stops_at_what_it_finds_and_leaves_a_small_scenario(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = kvcomm_p2p.sim.simulation.World
    with monkeypatch.context() as hurt:
        hurt.setattr(
            kvcomm_p2p.sim.simulation,
            "World",
            lambda seed, links, hardware, _: world(seed, links, hardware, planted.Raising),
        )
        hurt.chdir(tmp_path)
        command = ["sim", "hunt", "--runs", "20", "--into", str(tmp_path)]
        told = CliRunner().invoke(app, command)
        assert told.exit_code == 70, told.output
        (path,) = tmp_path.glob("hunt-*-broken.toml")
        small = load_scenario(str(path))
        assert small.agents <= 3 and len(small.faults) <= 1 and small.workload == {}
        assert "rule: raises" in told.output and "what led there" in told.output
        assert f"kvcomm sim run {path} --every 20 --no-shrink" in told.output
        again = CliRunner().invoke(app, ["sim", "run", str(path), "--every", "20", "--no-shrink"])
        assert list(tmp_path.glob("*.toml")) == [path]
        assert again.exit_code == 70 and "PeerUnreachable" in again.output
    assert CliRunner().invoke(app, ["sim", "run", str(path)]).exit_code == 0
    fine = CliRunner().invoke(app, ["sim", "hunt", "--runs", "2", "--seed", "0"])
    assert fine.exit_code == 0 and "2 scenarios (seeds 0 to 1) broke nothing" in fine.output
