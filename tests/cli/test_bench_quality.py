"""`kvcomm bench quality` hands over what was asked for; the measurement itself is faked here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcomm_p2p.cli.app import app
from kvcomm_p2p.cli.bench import ScenarioName
from kvcomm_p2p.evaluation import quality
from kvcomm_p2p.evaluation.cases import Scenario
from kvcomm_p2p.evaluation.results import Result, Row


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the last run was asked for."""
    options: dict[str, Any] = {}

    def run(console: Any, **given: Any) -> Result:
        options.clear()
        options.update(given)
        return Result("bench quality", [Row("near: rotation only", "KL", 0.01, "nats/token", 2)], 0)

    monkeypatch.setattr(quality, "run", run)
    return options


def kvcomm(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "quality", *arguments], catch_exceptions=False)


def test_without_options_the_defaults_are_the_measurements_own(asked: dict[str, Any]) -> None:
    done = kvcomm()
    assert done.exit_code == 0 and "near: rotation only" in done.stdout
    assert asked == {}


def test_options_are_handed_over(asked: dict[str, Any]) -> None:
    kvcomm("--model", "m", "--prompts", "3", "--tokens", "4", "--gsm8k", "g.jsonl")
    assert asked == {"model": "m", "prompts": 3, "tokens": 4, "gsm8k": Path("g.jsonl")}


def test_scenarios_have_short_names_and_one_order(asked: dict[str, Any]) -> None:
    kvcomm("--scenario", "short", "--scenario", "reordered-bare", "--scenario", "near", "--scenario", "near")
    assert asked == {"scenarios": [Scenario.NEAR, Scenario.REORDERED_BARE, Scenario.SHORT]}
    assert {name.value for name in ScenarioName} == {scenario.flag for scenario in Scenario}


def test_a_scenario_that_does_not_exist_is_told_with_those_that_do(asked: dict[str, Any]) -> None:
    done = kvcomm("--scenario", "bear")
    assert done.exit_code == 2
    assert "bear" in done.stderr and "reordered-bare" in done.stderr
