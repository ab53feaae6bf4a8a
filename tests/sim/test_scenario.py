"""Scenarios: what ships can run, and what cannot is said with the key and the fix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcomm_p2p.errors import ConfigError
from kvcomm_p2p.sim.cost_table import load_table, save_table, shipped
from kvcomm_p2p.sim.scenario import check_scenario, load_scenario, presets
from kvcomm_p2p.sim.simulation import check_fits

GOOD: dict[str, Any] = {
    "name": "x",
    "agents": 4,
    "duration_s": 10.0,
    "workload": {"kind": "rag", "tasks_per_s": 1.0},
}


@pytest.mark.parametrize("name", presets())
def test_presets_are_sound(name: str) -> None:
    scenario = load_scenario(name)
    assert scenario.name == name and scenario.about
    load_table(scenario.costs)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"agents": -1}, "^scenario: agents must be a whole number from 1 to [0-9,]+, not -1$"),
        ({"agents": "many"}, "agents must be a whole number from 1 to [0-9,]+, not 'many'"),
        ({"agent": 4}, "^scenario: agent is unknown: did you mean agents[?]$"),
        ({"loss": 0.1}, "loss is unknown: did you mean network.loss[?]"),
        ({"colour": 1}, "colour is unknown: known: .*agents, .*fabrics, "),
        ({"network": {"los": 0.1}}, "network.los is unknown: did you mean loss[?]"),
        ({"duration_s": 0.0}, "duration_s must be a number above 0, not 0.0"),
        ({"mode": "quick"}, "mode must be one of balanced, dense, exact, fast, not 'quick'$"),
        ({"fabrics": ["own", "peer"]}, "each of fabrics must be one of central, .*, not 'peer': did you mean peers[?]"),
        ({"fabrics": "peers"}, "fabrics must be a list, each of it one of central, none, own, peers, not 'peers'"),
        ({"network": "lan"}, "network must be a table with the keys inside, .*, not 'lan'"),
        ({"network": {"bytes_per_s": -1}}, "network.bytes_per_s must be a number above 0, not -1"),
        ({"network": {"same_host": "yes"}}, "network.same_host must be true or false, not 'yes'"),
        ({"only_tasks": [1, -2]}, "each of only_tasks must be a whole number from 0, not -2"),
        ({"protocol": 3}, "protocol must be a table, not 3"),
        ({"name": ""}, "name must be a text of at least one character"),
        ({"faults": [{"kind": "crash"}]}, r"faults\[0\].at_s is missing: it must be a number from 0"),
        ({"faults": [{"kind": "crsh", "at_s": 1}]}, r"faults\[0\].kind must be .*did you mean crash[?]"),
        ({"workload": {"kind": "cooking"}}, "workload kind 'cooking' is unknown"),
        ({"workload": {"kind": "rag", "task_per_s": 1.0}}, "did you mean tasks_per_s"),
        ({"workload": {"kind": "rag", "tasks_per_s": -1.0}}, "tasks_per_s must be above 0"),
        ({"workload": {"kind": "rag", "tasks_per_s": "often"}}, "must be a number"),
        ({"workload": {"kind": "rag", "tasks_per_s": 1.0, "documents": 2.5}}, "whole number"),
        ({"workload": {"kind": "graph", "tasks_per_s": 1.0, "graph": "torus"}}, "neither a kind"),
        ({"network": {"inside": "carrier pigeon"}}, "profile 'carrier pigeon'"),
        ({"network": {"loss": 2.0}}, "network.loss must be a number from 0 to 1, not 2.0"),
        ({"protocol": {"gosip_interval_s": 1.0}}, "did you mean gossip_interval_s"),
        ({"protocol": {"gossip_interval_s": -1.0}}, "gossip_interval_s"),
        ({"faults": [{"kind": "crash", "at_s": 1.0, "nodes": [9]}]}, "does not exist"),
        ({"faults": [{"kind": "crash", "at_s": 1.0}]}, "hits nobody"),
        ({"fabrics": []}, "nothing would be simulated"),
        ({"warmup_s": 20.0}, "warmup_s"),
    ],
)
def test_bad_scenarios_name_the_key(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check_scenario({**GOOD, **change})


def test_a_name_that_is_nothing_suggests_what_is_near(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean sixteen"):
        load_scenario("sixten")
    broken = tmp_path / "broken.toml"
    broken.write_text("agents = = 3")
    with pytest.raises(ConfigError, match="TOML"):
        load_scenario(str(broken))


def test_keys_can_be_changed_from_outside() -> None:
    scenario = load_scenario("five-agents", {"network.loss": 0.1, "agents": 3})
    assert scenario.agents == 3 and scenario.network.loss == 0.1
    with pytest.raises(ConfigError, match="no table"):
        load_scenario("five-agents", {"agents.many": 1})


def test_more_than_memory_is_refused_before_it_starts() -> None:
    scenario = load_scenario("four-thousand")
    check_fits(scenario, 64 << 30)
    with pytest.raises(ConfigError, match="lower agents"):
        check_fits(scenario, 1 << 30)


@pytest.mark.parametrize("name", shipped())
def test_tables_survive_a_round_trip(name: str, tmp_path: Path) -> None:
    table = load_table(name)
    save_table(table, tmp_path / "t.json")
    assert load_table(str(tmp_path / "t.json")) == table


@pytest.mark.parametrize("change", [{"forward_s": 0}, {"forward_s": "quick"}, {"origin": "guessed"}, {"colour": 1}])
def test_tables_that_cannot_be_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    save_table(load_table(shipped()[0]), path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConfigError, match="table of costs"):
        load_table(str(path))
