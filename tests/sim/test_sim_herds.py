"""Herds in the simulator: what the origin sends and what pullers miss is what happened."""

from __future__ import annotations

import pytest

from kvcomm_p2p.planning.types import ReuseRules
from kvcomm_p2p.sim.cost_table import load_table
from kvcomm_p2p.sim.herd import HerdSeen
from kvcomm_p2p.sim.scenario import load_scenario
from kvcomm_p2p.sim.simulation import Simulation
from kvcomm_p2p.sim.study import Study, figures

RULES = ReuseRules(approximate=False, reason="test")


def seen(**changes: object) -> list[HerdSeen]:
    scenario = load_scenario("herd", {"duration_s": 20.0, "herd.times": 2, **changes})
    return Simulation(scenario, "peers", load_table(scenario.costs), RULES).run().herds


def test_a_herd_of_two_is_one_copy_in_one_transfer() -> None:
    for herd in seen(agents=2):
        assert herd.copies == 1.0 and herd.pullers == 1 and herd.missing == 0
        assert 1.0 <= herd.last_s / herd.alone_s <= 1.6


@pytest.mark.parametrize("inside", ["lan", "wan"])
def test_a_herd_serves_itself_over_links(inside: str) -> None:
    for herd in seen(**{"network.inside": inside}):
        assert herd.missing == 0 and herd.pullers == 15
        assert 1.0 <= herd.copies <= 6.0 and herd.last_s <= 6.0 * herd.alone_s


def test_without_passing_on_every_puller_costs_the_origin_a_copy() -> None:
    for herd in seen(agents=6, **{"protocol.passing_on_bytes_max": 1}):
        assert herd.copies == 5.0


def test_a_frozen_origin_is_missed_by_everybody_and_said_so() -> None:
    frozen = [{"kind": "freeze", "at_s": 0.001, "for_s": 5.0, "nodes": [0]}]
    first = seen(faults=frozen, **{"herd.spread_s": 0.0005, "network.bytes_per_s": 1e7})[0]
    assert first.missing == first.pullers == 15 and set(first.missed) == {"stalled"}
    assert 0.0 < first.wait_lost_s <= 0.25


def test_figures_name_the_worst_herd() -> None:
    scenario = load_scenario("herd", {"duration_s": 20.0, "herd.times": 2, "agents": 4})
    observed = Simulation(scenario, "peers", load_table(scenario.costs), RULES).run()
    rows = {row.metric: row.value for row in figures(Study(scenario, (observed,)))}
    assert rows["copies that the origin of a herd sent, most"] == max(herd.copies for herd in observed.herds)
    assert rows["agents of a herd that missed blocks"] == 0


def test_nobody_else_is_no_herd() -> None:
    scenario = load_scenario("herd", {"duration_s": 5.0, "agents": 1})
    assert Simulation(scenario, "peers", load_table(scenario.costs), RULES).run().herds == []
