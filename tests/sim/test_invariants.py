"""What invariants say of single events; and of the simulator's own parts that bugs were found in."""

from __future__ import annotations

import inspect
import pickle
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcomm_p2p.cli.sim import run as run_command
from kvcomm_p2p.planning.types import ReuseRules
from kvcomm_p2p.protocol.anchors import AnchorMeta, Visibility
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.ids import AnchorId, ChainHash, NodeId, SequenceId
from kvcomm_p2p.protocol.messages import MemberRecord
from kvcomm_p2p.protocol.origin_log import OriginLog, OwnLog
from kvcomm_p2p.sim.broken import InvariantBroken
from kvcomm_p2p.sim.cost_table import load_table
from kvcomm_p2p.sim.faults import Faults
from kvcomm_p2p.sim.invariants import EVERY, Invariants
from kvcomm_p2p.sim.links import LAN, RETRANSMIT_S, LinkProfile, Links
from kvcomm_p2p.sim.log_truth import LogTruth
from kvcomm_p2p.sim.scenario import FaultSpec, check_scenario
from kvcomm_p2p.sim.settled import differences
from kvcomm_p2p.sim.simulation import MODEL, Simulation
from kvcomm_p2p.sim.world import World

RULES = ReuseRules(approximate=True, reason="", kl_target=1.0, kl_max=2.0, guard_probes=6)
ORIGIN, READER = NodeId(b"o" * 16), NodeId(b"r" * 16)


def meta(number: int) -> AnchorMeta:
    return AnchorMeta(
        anchor_id=AnchorId(bytes([number]) * 16),
        model_id=MODEL,
        sequence_id=SequenceId(b"s" * 8),
        start=0,
        end=32,
        chain_end=ChainHash(b""),
        fingerprints=b"",
        hops=0,
        visibility=Visibility.PUBLIC,
        group=b"",
        kv_bytes=32,
    )


def copied(own: OriginLog, up_to: int | None = None) -> OriginLog:
    """As a reader has it who was there from the beginning, or (up to a number) is still receiving a snapshot."""
    log = OriginLog(own.epoch)
    for entry in own.after(0):
        if up_to is None or entry.seq <= up_to:
            log.append(entry)
    log.max_seq = own.max_seq if up_to is None else up_to
    log.whole_from = own.max_seq
    return log


Steps = st.lists(st.tuples(st.booleans(), st.integers(0, 5)), min_size=1, max_size=30)


@given(Steps, st.integers(0, 30))
def test_true_copies_and_unfinished_snapshots_are_true(steps: list[tuple[bool, int]], cut: int) -> None:
    own, truth = OwnLog(1, MODEL), LogTruth()
    for put, number in steps:
        if put:
            own.put(meta(number))
        else:
            own.delete(meta(number).anchor_id, 0.0)
        assert truth.wrote(ORIGIN, own) == ""
        assert truth.compare(READER, ORIGIN, copied(own)) == ("", None)
    assert truth.compare(READER, ORIGIN, copied(own, min(cut, own.max_seq))) == ("", None)


def written(*numbers: int) -> tuple[OwnLog, LogTruth]:
    own, truth = OwnLog(1, MODEL), LogTruth()
    for number in numbers:
        own.put(meta(number))
        truth.wrote(ORIGIN, own)
    return own, truth


def test_what_was_deleted_is_not_believed_in() -> None:
    own, truth = written(1, 2)
    stale = copied(own)
    own.delete(meta(1).anchor_id, 0.0)
    truth.wrote(ORIGIN, own)
    stale.max_seq = own.max_seq
    assert "entry 3 says that it is gone" in truth.compare(READER, ORIGIN, stale)[0]


def test_nothing_is_lost_and_nothing_invented() -> None:
    own, truth = written(1, 2, 3)
    lost = copied(own)
    del lost._entries[meta(2).anchor_id]
    assert truth.compare(READER, ORIGIN, lost) == (
        "knows entries up to 3, but not the anchor put by entry 2",
        meta(2).anchor_id,
    )
    more, _ = written(1, 2, 3, 4)
    assert "knows 4 entries of a log that has 3" in truth.compare(READER, ORIGIN, copied(more))[0]
    other, _ = written(1, 2, 5)
    assert "nothing was ever said of it" in truth.compare(READER, ORIGIN, copied(other))[0]


def test_a_log_that_goes_back_is_noticed() -> None:
    _, truth = written(1, 2, 3)
    shorter, _ = written(1)
    assert "took back entries of its own log: 3 became 1" in truth.wrote(ORIGIN, shorter)


def test_the_command_checks_as_often_as_a_study() -> None:
    assert inspect.signature(run_command).parameters["every"].default == EVERY


def test_what_broke_travels_between_processes() -> None:
    broken = InvariantBroken("logs", "is wrong", number=3, name="agent-3", at_s=1.5, about=(b"x",))
    again = pickle.loads(pickle.dumps(broken))  # noqa: S301  # our own bytes
    assert str(again) == str(broken) == "at 1.500000 s agent-3 is wrong"
    assert (again.rule, again.number, again.about) == ("logs", 3, (b"x",))


def two_nodes() -> World:
    world = World(1, Links(random.Random(1)))
    for number in range(2):
        place = f"10.0.0.{number + 1}"
        record = MemberRecord(NodeId(bytes([number]) * 16), 1, f"agent-{number}", MODEL, f"{place}:1", f"{place}:2")
        world.add(record, NodeConfig())
    return world


def test_who_does_not_know_the_other_disagrees() -> None:
    world = two_nodes()
    assert differences(world) == ["agent-0 does not take agent-1 for alive", "agent-1 does not take agent-0 for alive"]
    world.join(world.nodes[1], world.nodes[0].node.me.control)
    world.run(3.0)
    assert differences(world) == []


def test_blocks_that_are_not_there_cannot_be_dropped() -> None:
    world = two_nodes()
    invariants, machine = Invariants(world), world.nodes[0]
    handle = world.new_handle(machine)
    assert invariants.leftovers(machine) == [f"has 1 references to block {handle.slot}, its pool has 0"]
    world.release(machine, handle)
    assert invariants.leftovers(machine) == []
    with pytest.raises(InvariantBroken, match="agent-0 dropped block") as told:
        world.release(machine, handle)
    assert told.value.rule == "references"


def test_frames_of_a_connection_are_late_but_neither_doubled_nor_overtaken() -> None:
    bad = LinkProfile(latency_s=0.01, jitter_s=0.01, loss=0.3, duplication=0.9, reordering=0.9)
    links = Links(random.Random(7), bad, bad)
    links.add()
    links.add()
    arrivals, late = [], 0
    for number in range(300):
        now = number * 0.001
        (delay_s,) = links.delays_s(0, 1, 100, now)
        arrivals.append(now + delay_s)
        late += delay_s >= RETRANSMIT_S
    assert arrivals == sorted(arrivals) and late > 50
    links.worsen(loss=1.0)
    assert links.delays_s(0, 1, 100, 1.0) == []


def test_a_time_of_loss_ends_with_the_loss_that_there_was_at_first() -> None:
    links = Links(random.Random(1), LinkProfile(loss=0.02), LAN)
    world = World(1, links)
    world.add(two_nodes().nodes[0].node.me, NodeConfig())
    Faults(world, random.Random(1), lambda machine: []).begin(FaultSpec("loss", 0.0, 2.0, loss=0.5))
    assert links.profile(0, 0).loss == 0.5
    world.run(3.0)
    assert links.profile(0, 0).loss == 0.02
    assert [what for _, _, what in world.notes] == [
        "from now on 50 % of all frames are lost",
        "as many frames are lost as at first",
    ]


def simulate(**changes: Any) -> Simulation:
    base: dict[str, Any] = {
        "name": "small",
        "agents": 4,
        "duration_s": 12.0,
        "costs": "llama-3.1-8b-h100",
        "updates": 0,
        "workload": {"kind": "rag", "tasks_per_s": 1.0, "documents": 3, "per_question": 1},
        "network": {"inside": "fast"},
    }
    chosen = check_scenario({**base, **changes})
    simulation = Simulation(chosen, "peers", load_table(chosen.costs), RULES)
    Invariants(simulation.world)
    simulation.run()
    return simulation


def test_two_models_share_nothing_with_each_other_and_something_among_themselves() -> None:
    simulation = simulate(models=2)
    models = [machine.node.me.model_id for machine in simulation.world.nodes]
    assert models[0] == models[2] != models[1] == models[3]
    for machine in simulation.world.nodes:
        assert set(machine.computed_by.values()) <= {machine.node.me.model_id}
    pulled = [outcome.pulled_bytes for outcome in simulation.observed.outcomes]
    one = [outcome.pulled_bytes for outcome in simulate().observed.outcomes]
    assert 0 < sum(pulled) < sum(one)


def test_only_the_tasks_that_are_chosen_are_asked() -> None:
    every = simulate()
    some = simulate(only_tasks=[3, 5, 900])
    assert [outcome.started_at for outcome in some.observed.outcomes] == sorted(
        outcome.started_at for outcome in every.observed.outcomes
    )[3:6:2]


@pytest.mark.parametrize("keeps_state", [True, False])
def test_an_agent_that_crashed_while_it_computed_answers_again_when_it_is_back(keeps_state: bool) -> None:
    fault = {"kind": "restart", "at_s": 8.0, "for_s": 1.0, "nodes": [1], "keeps_state": keeps_state}
    simulation = simulate(
        costs="smollm2-135m-2-cores", workload={"kind": "creative", "tasks_per_s": 3.0}, faults=[fault], duration_s=20.0
    )
    crashed = simulation.world.switched[0][0] - simulation.origin_s
    assert any(outcome.agent == 1 and outcome.started_at > crashed + 1 for outcome in simulation.observed.outcomes)
    assert simulation.agents[1]._fabric.me == simulation.world.nodes[1].node_id


def test_an_agent_that_is_frozen_does_nothing_and_goes_on_when_it_thaws() -> None:
    freeze = {"kind": "freeze", "at_s": 4.0, "for_s": 5.0, "nodes": [1]}
    leave = {"kind": "leave", "at_s": 6.0, "nodes": [1]}
    chosen = check_scenario(
        {
            "name": "frozen",
            "agents": 2,
            "duration_s": 12.0,
            "costs": "llama-3.1-8b-h100",
            "workload": {"kind": "creative", "tasks_per_s": 4.0},
            "faults": [freeze, leave],
        }
    )
    simulation = Simulation(chosen, "peers", load_table(chosen.costs), RULES)
    told: list[float] = []
    simulation.world.observers.append(lambda number, event, now, effects: told.append(now) if number == 1 else None)
    observed = simulation.run()
    since, until = simulation.origin_s + 4.0, simulation.origin_s + 9.0
    assert any(now < since for now in told) and any(now >= until for now in told)
    assert not [now for now in told if since < now < until]
    assert any(outcome.agent == 1 and outcome.started_at + outcome.ttft_s >= 9.0 for outcome in observed.outcomes)
    assert observed.unanswered == 0
