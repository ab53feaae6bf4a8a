"""Does this scenario break an invariant, and which? What reducing, hunting and telling the story have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvcomm_p2p.planning.types import ReuseRules
from kvcomm_p2p.protocol import events as ev
from kvcomm_p2p.protocol.node import Node
from kvcomm_p2p.sim.broken import InvariantBroken
from kvcomm_p2p.sim.cost_table import load_table
from kvcomm_p2p.sim.history import History
from kvcomm_p2p.sim.invariants import EVERY, Invariants
from kvcomm_p2p.sim.scenario import Scenario
from kvcomm_p2p.sim.settled import check_settled
from kvcomm_p2p.sim.simulation import Simulation
from kvcomm_p2p.sim.story import LINES_MAX, Story, tell
from kvcomm_p2p.sim.world import NodeMaker

ASKED_EVERY = 500
"""After so many events it is asked whether to go on."""


class GivenUp(Exception):
    """Whoever asked for a run wants it no longer."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What broke, and how long after the scenario began (after joining; before that: below 0)."""

    broken: InvariantBroken
    after_s: float


def check(
    scenario: Scenario,
    rules: ReuseRules,
    *,
    every: int = EVERY,
    make_node: NodeMaker = Node,
    go_on: Callable[[], bool] = lambda: True,
) -> Failure | None:
    """Run the scenario on the fabric peers, with its ablations if it has any, and watch all invariants to the end and beyond it.

    None: nothing broke. `go_on` is asked now and then; False ends the run by GivenUp. Raises ConfigError for what the scenario
    names and is not there.
    """
    return _watch(scenario, rules, every, make_node, go_on, lines_max=0)[0]


def retell(
    scenario: Scenario,
    rules: ReuseRules,
    *,
    every: int = EVERY,
    make_node: NodeMaker = Node,
    lines_max: int = LINES_MAX,
) -> tuple[Failure, Story] | None:
    """Run it once more and keep what happened: what broke, and the story. None: nothing broke."""
    failure, story = _watch(scenario, rules, every, make_node, lambda: True, lines_max)
    return None if failure is None or story is None else (failure, story)


def _watch(
    scenario: Scenario,
    rules: ReuseRules,
    every: int,
    make_node: NodeMaker,
    go_on: Callable[[], bool],
    lines_max: int,
) -> tuple[Failure | None, Story | None]:
    table = load_table(scenario.costs)
    for _, fabric, ablation in scenario.runs():
        if fabric != "peers":
            continue
        simulation = Simulation(scenario, fabric, table, rules, ablation=ablation, make_node=make_node)
        world = simulation.world
        history = History(world) if lines_max else None
        invariants = Invariants(world, every)
        world.observers.append(_Patience(go_on).observe)
        try:
            simulation.run()
            invariants.check_all()
            check_settled(simulation, invariants)
        except InvariantBroken as broken:
            story = None if history is None else tell(world, history, broken, lines_max)
            return Failure(broken, broken.at_s - simulation.origin_s), story
    return None, None


class _Patience:
    def __init__(self, go_on: Callable[[], bool]) -> None:
        self._go_on = go_on
        self._left = ASKED_EVERY

    def observe(self, number: int, event: ev.Event, now: float, effects: list[ev.Effect]) -> None:
        """Of every event."""
        self._left -= 1
        if not self._left:
            self._left = ASKED_EVERY
            if not self._go_on():
                raise GivenUp
