"""Bugs planted in nodes: the invariants find them, the scenario becomes small, and the story is short and to the point."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import planted
import pytest

from kvcomm_p2p.planning.types import ReuseRules
from kvcomm_p2p.protocol import events as ev
from kvcomm_p2p.sim.failing import Failure, GivenUp, check, retell
from kvcomm_p2p.sim.invariants import RULES as RULE_NAMES
from kvcomm_p2p.sim.links import Links
from kvcomm_p2p.sim.reducing import reductions
from kvcomm_p2p.sim.scenario import Scenario, check_scenario, load_scenario
from kvcomm_p2p.sim.scenario_text import scenario_toml

RULES = ReuseRules(approximate=True, reason="", kl_target=1.0, kl_max=2.0, guard_probes=6)
EVERY = 10
BASE: dict[str, Any] = {
    "name": "planted",
    "agents": 5,
    "duration_s": 20.0,
    "costs": "llama-3.1-8b-h100",
    "updates": 5,
    "publish_per_s": 0.3,
    "publish_kept": 2,
    "fabrics": ["own", "peers"],
    "workload": {"kind": "rag", "tasks_per_s": 1.0, "documents": 4, "per_question": 1},
    "network": {"inside": "fast", "duplication": 0.05},
    "protocol": {"uploads_max": 2},
    "faults": [
        {"kind": "slow", "at_s": 2.0, "for_s": 3.0, "nodes": [3]},
        {"kind": "crash", "at_s": 4.0, "for_s": 8.0, "nodes": [1]},
        {"kind": "partition", "at_s": 14.0, "for_s": 1.0, "nodes": [0, 2]},
    ],
}


def scenario(**changes: Any) -> Scenario:
    return check_scenario({**BASE, **changes})


def test_nothing_is_found_where_nothing_is_planted() -> None:
    assert check(scenario(), RULES, every=EVERY) is None


@pytest.mark.parametrize(
    ("bug", "rule", "changes"),
    [
        (planted.Resurrecting, "resurrection", {}),
        (planted.FinishingTwice, "answers once", {}),
        (planted.NeverFinishing, "answers once", {}),
        (planted.Hoarding, "budgets", {"pool_bytes": 100 << 20}),
        (planted.Forgetful, "knowledge", {}),
        (planted.Undeleting, "logs", {}),
        (planted.Dropping, "logs", {}),
        (planted.Mixing, "other model", {"models": 2}),
        (planted.Leaking, "leftovers", {}),
        (planted.Raising, "raises", {}),
        (planted.Deaf, "agreement", {}),
    ],
)
def test_a_planted_bug_is_found(bug: planted.Planted, rule: str, changes: dict[str, Any]) -> None:
    failure = check(scenario(**changes), RULES, every=EVERY, make_node=bug)
    assert failure is not None
    assert failure.broken.rule == rule in RULE_NAMES
    assert failure.broken.name in str(failure.broken) and f"{failure.broken.at_s:.6f} s" in str(failure.broken)


def smallest(bug: planted.Planted, first: Scenario, runs_max: int) -> tuple[Scenario, Failure, int]:
    def breaks(candidate: Scenario) -> Failure | None:
        return check(candidate, RULES, every=EVERY, make_node=bug)

    failure = breaks(first)
    assert failure is not None
    best, runs = (first, failure), 0
    for reduction in reductions(first, failure, breaks, runs_max):
        best, runs = (reduction.scenario, reduction.failure), reduction.runs
    return *best, runs


def test_what_the_dead_need_to_return_is_a_crash_and_little_else(tmp_path: Path) -> None:
    small, failure, runs = smallest(planted.Resurrecting, scenario(), 60)
    assert failure.broken.rule == "resurrection" and runs <= 60
    assert small.agents <= 3 and small.duration_s <= 10 and small.workload == {} and small.updates == 0
    assert [fault.kind for fault in small.faults] == ["crash"]
    assert small.network.duplication == 0 and not small.protocol
    path = tmp_path / "small.toml"
    path.write_text(scenario_toml(small, "what it is"))
    again = retell(load_scenario(str(path)), RULES, every=EVERY, make_node=planted.Resurrecting)
    assert again is not None
    failure_again, story = again
    assert str(failure_again.broken) == str(failure.broken)
    assert 0 < len(story.lines) <= 40 < story.past
    assert any("crashes" in line for line in story.lines)
    assert failure.broken.name in story.concerned and len(story.concerned) == 2
    assert any("reports" in line and "dead" in line for line in story.lines)


def test_a_fetch_that_ends_twice_needs_few_prompts_and_no_fault() -> None:
    small, failure, _ = smallest(planted.FinishingTwice, scenario(), 60)
    assert failure.broken.rule == "answers once"
    assert small.faults == () and small.agents <= 3
    assert 1 <= len(small.only_tasks) <= 4
    again = retell(small, RULES, every=EVERY, make_node=planted.FinishingTwice)
    assert again is not None
    told = "\n".join(again[1].lines)
    assert "FetchRequested" in told and "finishes fetch" in told
    assert "none missed  (× 2)" in told


def test_reducing_can_be_stopped_at_any_time() -> None:
    runs = 0

    def breaks(candidate: Scenario) -> Failure | None:
        nonlocal runs
        runs += 1
        if runs == 3:
            raise GivenUp
        return failure

    failure = check(scenario(), RULES, every=EVERY, make_node=planted.Raising)
    assert failure is not None
    seen = []
    with pytest.raises(GivenUp):
        for reduction in reductions(scenario(), failure, breaks):
            seen.append(reduction.scenario)
    assert len(seen) == 2 and seen[-1].fabrics == ("peers",) and seen[-1].workload == {}


def test_only_the_same_rule_counts() -> None:
    failure = check(scenario(), RULES, every=EVERY, make_node=planted.Raising)
    assert failure is not None
    other = Failure(type(failure.broken)("logs", "is another", number=0, name="agent-0", at_s=1.0), 1.0)
    reduced = list(reductions(scenario(), failure, lambda candidate: other, 12))
    assert len(reduced) == 12 and not any(each.better for each in reduced)
    assert reduced[-1].scenario == check_scenario({**BASE, "fabrics": ["peers"]})


def test_a_run_that_nobody_waits_for_ends() -> None:
    with pytest.raises(GivenUp):
        check(scenario(), RULES, go_on=lambda: False)


@pytest.mark.parametrize("changes", [{}, {"network": {}}, {"faults": []}, {"models": 2, "only_tasks": [1, 3]}])
def test_scenarios_are_read_as_they_were_written(changes: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "again.toml"
    path.write_text(scenario_toml(scenario(**changes), "two\nlines"))
    assert load_scenario(str(path)) == scenario(**changes)


def test_the_story_knows_what_made_a_difference_and_what_did_not() -> None:
    """Of three nodes the third talks to nobody: nothing of it is in the past of the others."""
    import random

    from kvcomm_p2p.protocol.config import NodeConfig
    from kvcomm_p2p.protocol.ids import NodeId
    from kvcomm_p2p.protocol.messages import MemberRecord
    from kvcomm_p2p.sim.history import History
    from kvcomm_p2p.sim.simulation import MODEL
    from kvcomm_p2p.sim.world import World

    world = World(1, Links(random.Random(1)))
    history = History(world)
    for number in range(3):
        address = f"10.0.0.{number + 1}"
        record = MemberRecord(NodeId(bytes([number]) * 16), 1, f"agent-{number}", MODEL, f"{address}:1", f"{address}:2")
        world.add(record, NodeConfig())
    world.join(world.nodes[1], world.nodes[0].node.me.control)
    world.run(1.0)
    end = history.end(1)
    assert end is not None and end.machine == 1
    past = history.past(end)
    assert past[-1] is end and {moment.machine for moment in past} == {0, 1}
    assert [moment.number for moment in past] == sorted(moment.number for moment in past)
    received = [moment for moment in past if isinstance(moment.event, ev.MessageReceived)]
    numbers = {moment.number for moment in past}
    assert received and all(moment.cause in numbers and moment.cause < moment.number for moment in received)
    alone = history.end(2)
    assert alone is not None and {moment.machine for moment in history.past(alone)} == {2}
