"""Many agents, and agents that publish all the time."""

from __future__ import annotations

from typing import Any

import pytest

from kvcomm_p2p.planning.types import ReuseRules
from kvcomm_p2p.sim.cost_table import load_table
from kvcomm_p2p.sim.metrics import Observed
from kvcomm_p2p.sim.scenario import check_scenario
from kvcomm_p2p.sim.simulation import JOINING_MAX, Simulation

QUIET: dict[str, Any] = {"name": "quiet", "duration_s": 1.5, "workload": {"kind": "none"}}


def simulate(**changes: Any) -> tuple[Simulation, Observed]:
    chosen = check_scenario({**QUIET, **changes})
    simulation = Simulation(chosen, "peers", load_table(chosen.costs), ReuseRules(approximate=False, reason=""))
    return simulation, simulation.run()


def test_many_agents_begin_as_members_of_each_other_and_one_update_reaches_all() -> None:
    simulation, observed = simulate(agents=JOINING_MAX + 44, updates=2)
    assert all(machine.node.stats().peers_alive == JOINING_MAX + 43 for machine in simulation.world.nodes)
    assert observed.frames["Hello"] == 0 and observed.violations == observed.false_deaths == 0
    assert len(observed.convergence_s) == 2 and max(observed.convergence_s) <= 1.2


@pytest.mark.parametrize("directory", ["full", "sharded"])
def test_agents_that_publish_all_the_time_hold_only_their_latest(directory: str) -> None:
    simulation, observed = simulate(
        agents=8, updates=0, duration_s=4.0, publish_per_s=4.0, publish_kept=3, protocol={"directory": directory}
    )
    assert all(machine.node.stats().pool_anchors == 3 for machine in simulation.world.nodes)
    rows = 7 * 3 if directory == "full" else 0
    assert all(abs(count - rows) <= (14 if rows else 0) for count in observed.index_rows)
    assert observed.violations == 0
