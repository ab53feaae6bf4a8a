"""Whole simulations: real nodes, real planning, virtual time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcomm_p2p.planning.types import ReuseRules
from kvcomm_p2p.sim.cost_table import load_table
from kvcomm_p2p.sim.invariants import InvariantBroken, Invariants
from kvcomm_p2p.sim.metrics import Observed, summarize
from kvcomm_p2p.sim.scenario import Scenario, check_scenario
from kvcomm_p2p.sim.settled import differences
from kvcomm_p2p.sim.simulation import Simulation

RULES = ReuseRules(approximate=True, reason="", kl_target=1.0, kl_max=2.0, guard_probes=6)
BASE: dict[str, Any] = {
    "name": "small",
    "agents": 4,
    "duration_s": 30.0,
    "costs": "llama-3.1-8b-h100",
    "updates": 4,
    "workload": {"kind": "rag", "tasks_per_s": 1.0, "documents": 6},
    "network": {"inside": "fast"},
    "central": {"bytes_per_s": 1.25e10},
}


def scenario(**changes: Any) -> Scenario:
    return check_scenario({**BASE, **changes})


def simulate(chosen: Scenario, fabric: str = "peers") -> tuple[Simulation, Observed]:
    simulation = Simulation(chosen, fabric, load_table(chosen.costs), RULES)
    invariants = Invariants(simulation.world, every=20)
    observed = simulation.run()
    invariants.check_all()
    assert invariants.checks > 0
    return simulation, observed


def test_every_fabric_answers_every_prompt_and_sharing_pays() -> None:
    chosen = scenario()
    summaries = {}
    for fabric in ("none", "own", "central", "peers"):
        _, observed = simulate(chosen, fabric) if fabric == "peers" else run_alone(chosen, fabric)
        assert observed.unanswered == 0
        summaries[fabric] = summarize(observed, skip_s=5.0)
    assert summaries["none"].reused == 0
    assert summaries["own"].exact == summaries["own"].reused > 0
    assert summaries["peers"].reused > summaries["own"].reused + 0.2
    assert abs(summaries["central"].reused - summaries["peers"].reused) < 0.1
    assert summaries["peers"].ttft_p50_s < summaries["none"].ttft_p50_s
    assert summaries["peers"].pulled_bytes > 0 and summaries["peers"].served_max_share < 1


def run_alone(chosen: Scenario, fabric: str) -> tuple[Simulation, Observed]:
    simulation = Simulation(chosen, fabric, load_table(chosen.costs), RULES)
    return simulation, simulation.run()


def fingerprint(chosen: Scenario) -> str:
    _, observed = simulate(chosen)
    return repr([(o.agent, o.ttft_s, o.reused, o.pulled_bytes) for o in observed.outcomes]) + repr(
        (observed.steps, sorted(observed.traffic.items()), observed.convergence_s)
    )


FROM_OUTSIDE = """
import sys
sys.path.insert(0, {folder!r})
import hashlib, test_simulation as t
print(hashlib.sha256(t.fingerprint(t.scenario(duration_s=10.0)).encode()).hexdigest())
"""


def test_a_run_is_a_function_of_its_seed_in_every_process() -> None:
    seen = set()
    for hash_seed in ("0", "42"):
        told = subprocess.run(
            [sys.executable, "-c", FROM_OUTSIDE.format(folder=str(Path(__file__).parent))],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
        )
        seen.add(told.stdout)
    assert len(seen) == 1
    assert fingerprint(scenario(duration_s=10.0)) != fingerprint(scenario(duration_s=10.0, seed=1))


def test_updates_are_known_to_all_soon() -> None:
    _, observed = simulate(scenario(agents=16, workload={"kind": "none"}, duration_s=10.0, updates=20))
    assert len(observed.convergence_s) == 20
    assert max(observed.convergence_s) <= 1.0


def test_a_partition_heals_and_everybody_agrees() -> None:
    simulation, observed = simulate(
        scenario(
            agents=8,
            duration_s=60.0,
            updates=0,
            faults=[{"kind": "partition", "at_s": 5.0, "for_s": 40.0, "nodes": [0, 1, 2]}],
        )
    )
    simulation.world.run(30.0)
    assert observed.unanswered == 0
    assert differences(simulation.world) == []
    assert observed.false_deaths == 0


def test_crashes_freezes_and_returns_cost_no_answer_of_others() -> None:
    simulation, observed = simulate(
        scenario(
            agents=6,
            duration_s=60.0,
            workload={"kind": "rag", "tasks_per_s": 1.0, "documents": 6, "agent_exponent": 0.0},
            faults=[
                {"kind": "crash", "at_s": 10.0, "for_s": 20.0, "nodes": [2]},
                {"kind": "freeze", "at_s": 15.0, "for_s": 10.0, "nodes": [3]},
                {"kind": "restart", "at_s": 20.0, "for_s": 5.0, "nodes": [4], "keeps_state": False},
                {"kind": "slow", "at_s": 5.0, "for_s": 20.0, "nodes": [1]},
            ],
        )
    )
    answered = {outcome.agent for outcome in observed.outcomes}
    assert {0, 1, 5} <= answered
    others = [outcome for outcome in observed.outcomes if outcome.agent != 3]  # who is frozen itself loses that time
    assert max(outcome.wait_lost_s for outcome in others) <= 0.25
    simulation.world.run(30.0)
    assert differences(simulation.world) == []


def test_a_spoiler_is_noticed_and_costs_only_misses() -> None:
    chosen = scenario()
    simulation = Simulation(chosen, "peers", load_table(chosen.costs), RULES)
    simulation.world.at(8.0, lambda: setattr(simulation.world.nodes[0], "spoils", True))
    observed = simulation.run()
    assert observed.unanswered == 0 and observed.violations > 0
    assert any("digest_mismatch" in outcome.misses for outcome in observed.outcomes)


def test_invariants_notice_what_breaks_them() -> None:
    simulation = Simulation(scenario(), "peers", load_table("llama-3.1-8b-h100"), RULES)
    Invariants(simulation.world, every=1)
    simulation.world.at(10.0, lambda: setattr(simulation.world.nodes[1], "config", tight(simulation)))
    with pytest.raises(InvariantBroken, match=r"agent-1 has .* bytes in its pool, more than 1"):
        simulation.run()


def tight(simulation: Simulation) -> Any:
    from dataclasses import replace

    return replace(simulation.world.nodes[1].config, pool_bytes_max=1)


def test_tasks_keep_their_order() -> None:
    _, observed = simulate(scenario(workload={"kind": "code", "tasks_per_s": 0.5}, duration_s=20.0, updates=0))
    assert observed.unanswered == 0
    assert summarize(observed).covered > 0.3
