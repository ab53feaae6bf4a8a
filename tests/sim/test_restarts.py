"""Nodes that return begin with what real ones keep on disk: their number, where their peers were, what they are to erase."""

from __future__ import annotations

from typing import Any

import pytest
from sim_cases import RULES, TINY

from kvcomm_p2p.protocol import events as ev
from kvcomm_p2p.protocol.messages import Erasure
from kvcomm_p2p.protocol.node import Node
from kvcomm_p2p.sim.cost_table import load_table
from kvcomm_p2p.sim.invariants import Invariants
from kvcomm_p2p.sim.scenario import check_scenario
from kvcomm_p2p.sim.settled import check_settled, differences
from kvcomm_p2p.sim.simulation import Simulation

NOTHING: dict[str, Any] = {"incarnation": 0, "addresses": (), "erasures": b""}
FIRST_GOES = {"kind": "crash", "at_s": 10.0, "nodes": [0]}


class Lives:
    """A run of five nodes. `began`: what each life of each node was given of those before, by name; `kept`: what each asked to
    be kept last, by the same names."""

    def __init__(self, *faults: dict[str, Any]) -> None:
        self.began: dict[str, list[dict[str, Any]]] = {}
        self.kept: dict[str, dict[str, Any]] = {}
        changes = {"agents": 5, "duration_s": 25.0, "updates": 4, "workload": {"kind": "none"}, "faults": list(faults)}
        scenario = check_scenario({**TINY, **changes})
        self.simulation = Simulation(scenario, "peers", load_table(scenario.costs), RULES, make_node=self._make)
        self.world = self.simulation.world
        self.invariants = Invariants(self.world)
        self.world.observers.append(self._observe)

    def _make(self, *given: Any, **more: Any) -> Node:
        before = {key: more.get(key, nothing) for key, nothing in NOTHING.items()}
        self.began.setdefault(more["me"].name, []).append(before)
        return Node(*given, **more)

    def _observe(self, number: int, event: ev.Event, now: float, effects: list[ev.Effect]) -> None:
        machine = self.world.nodes[number]
        if len(self.began[machine.name]) > 1:
            return
        kept = self.kept.setdefault(machine.name, {})
        for effect in effects:
            if isinstance(effect, ev.SaveState):
                kept.update(incarnation=effect.incarnation, addresses=effect.addresses)
            elif isinstance(effect, ev.SaveErasures):
                kept.update(erasures=effect.packed)

    def erase(self, number: int) -> None:
        """This node is told to erase something."""
        machine = self.world.nodes[number]
        what = Erasure(bytes(16), machine.node_id, 0.0, 8, bytes(8))
        self.world.handle(machine, ev.EraseRequested((what,), everywhere=False))


@pytest.mark.parametrize("how", [{}, {"rolled_back": True}, {"keeps_state": False}])
def test_what_was_kept_is_there_when_a_node_returns(how: dict[str, Any]) -> None:
    """Frozen it is suspected, and afterwards has to say in a higher incarnation that it lives: that it keeps, and where its
    peers are, and an erasure."""
    freeze = {"kind": "freeze", "at_s": 1.0, "for_s": 4.0, "nodes": [2]}
    lives = Lives(freeze, {"kind": "restart", "at_s": 12.0, "for_s": 1.0, "nodes": [2], **how})
    lives.world.at(10.0, lambda: lives.erase(2))
    lives.simulation.run()
    first, second = lives.began["agent-2"]
    kept = lives.kept["agent-2"]
    assert kept["incarnation"] > 0 and kept["erasures"]
    assert set(kept["addresses"]) == {lives.world.nodes[number].node.me.control for number in (0, 1, 3, 4)}
    assert first == NOTHING and second == (kept if how == {} else NOTHING)
    assert len(lives.world.nodes[2].node._custody.erasing) == (how == {})


@pytest.mark.parametrize("keeps_state", [True, False])
def test_where_peers_were_is_enough_to_find_them_when_who_lets_in_is_gone(keeps_state: bool) -> None:
    returning = {"kind": "restart", "at_s": 11.0, "for_s": 1.0, "nodes": [1, 2, 3, 4], "keeps_state": keeps_state}
    lives = Lives(FIRST_GOES, returning)
    lives.simulation.run()
    assert (differences(lives.world) == []) == keeps_state
    check_settled(lives.simulation, lives.invariants)  # who kept nothing was promised nothing


def test_two_groups_that_kept_only_their_own_addresses_are_promised_nothing() -> None:
    """They took each other for lost when they last kept addresses; then all crashed, and who lets in is gone."""
    cut = {"kind": "partition", "at_s": 1.0, "for_s": 18.0, "nodes": [0, 1, 2]}
    returning = {"kind": "restart", "at_s": 17.0, "for_s": 0.5, "nodes": [1, 2, 3, 4]}
    lives = Lives(cut, {**FIRST_GOES, "at_s": 17.0}, returning)
    lives.simulation.run()
    assert differences(lives.world) != []
    check_settled(lives.simulation, lives.invariants)
