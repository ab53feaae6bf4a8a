"""What must hold once nothing is wrong and nothing is asked any more: everybody agrees, and nothing is left over."""

from __future__ import annotations

from collections.abc import Iterable

import networkx as nx

from kvcomm_p2p.sim.invariants import Invariants
from kvcomm_p2p.sim.machine import SimNode
from kvcomm_p2p.sim.simulation import Simulation
from kvcomm_p2p.sim.world import World

SETTLED_MAX = 256
"""Larger worlds are not checked for it: there it costs more than the run."""

LOSS_MAX = 0.3
"""Where more is lost than that, nothing is promised about how soon anybody agrees."""

AGREE_S = 30.0
RECONTACTS = 4
"""Within so many seconds, and so many times the mean between attempts to reach who is lost, all must agree (divided by the share
of frames that arrive there and back)."""

STEP_S = 0.5
MARGIN_S = 1.0


def differences(world: World) -> list[str]:
    """What nodes that are up believe wrongly of each other and of each other's shared anchors, in words; empty when all
    agree."""
    up = [machine for machine in world.nodes if machine.up and not machine.frozen]
    truth = {machine.node_id: machine.node.known_of(machine.node_id) for machine in up}
    wrong: list[str] = []
    for machine in up:
        alive = {view.node_id for view in machine.node.peers() if view.state == "alive"}
        for other in up:
            if other is machine:
                continue
            if other.node_id not in alive:
                wrong.append(f"{machine.name} does not take {other.name} for alive")
            known = machine.node.known_of(other.node_id)
            missing, stale = truth[other.node_id] - known, known - truth[other.node_id]
            if missing:
                wrong.append(f"{machine.name} does not know {len(missing)} anchors of {other.name}")
            if stale:
                wrong.append(f"{machine.name} believes in {len(stale)} anchors that {other.name} no longer has")
    return wrong


def check_settled(simulation: Simulation, invariants: Invariants) -> None:
    """At the end of a run: lets time pass until all agree and what was passed on is let go, or raises InvariantBroken.

    Does nothing where no agreement is promised: faults that go on, heavy loss, owners of shards in place of full indexes, logs
    over the limits, or more than SETTLED_MAX nodes.
    """
    world = simulation.world
    bound_s = _bound_s(simulation)
    if bound_s is None:
        return
    simulation.quiet()
    end_s = world.now + bound_s
    while wrong := differences(world):
        if _refuses(world):
            return
        if world.now >= end_s:
            name = wrong[0].partition(" ")[0]
            first = next(machine for machine in world.nodes if machine.name == name)
            raise world.broken("agreement", first, f"disagrees after {bound_s:.0f} s of quiet: {'; '.join(wrong[:3])}")
        world.run(STEP_S)
    config = world.nodes[0].config
    world.run(max(config.passing_on_s, config.upload_lease_s, config.pull_busy_wait_s) + MARGIN_S)
    for machine in world.nodes:
        if machine.up and not machine.frozen:
            for what in invariants.leftovers(machine):
                raise world.broken("leftovers", machine, what)
    invariants.check_all()


def _bound_s(simulation: Simulation) -> float | None:
    """Seconds until all must agree; None where that is not promised."""
    world, scenario, config = simulation.world, simulation.scenario, simulation.world.nodes[0].config
    if len(world.nodes) > SETTLED_MAX or world.links.cuts or any(machine.frozen for machine in world.nodes):
        return None
    if _cut_off(world):
        return None
    loss = scenario.network.loss
    for fault in scenario.faults:
        until_s = simulation.origin_s + fault.at_s + fault.for_s + (fault.every_s if fault.kind == "churn" else 0.0)
        if until_s > world.now:
            return None
        if fault.kind == "loss" and not fault.for_s:
            loss = max(loss, fault.loss)
    if loss > LOSS_MAX or any(machine.node.stats().sharded for machine in world.nodes if machine.up):
        return None
    return (AGREE_S + RECONTACTS * config.recontact_s) / (1 - loss) ** 2


def _cut_off(world: World) -> bool:
    """Whether some that came back find no others, or only each other: their seed (see `Simulation`: the first other agent) and
    those whose addresses they had kept are gone. Who was never away knows where everybody is."""
    up = {machine.node.me.control: machine for machine in world.nodes if machine.up}
    if len(up) < 2:
        return False
    returned = {number for _, number, on in world.switched if on}
    asks = nx.Graph()
    asks.add_nodes_from(up)
    for address, machine in up.items():
        known: Iterable[str] = up
        if machine.number in returned:
            known = [address for address in _asked_by(world, machine) if address in up]
            if not known:
                return True
        asks.add_edges_from((address, other) for other in known)
    return not nx.is_connected(asks)


def _asked_by(world: World, machine: SimNode) -> list[str]:
    """Whom it asks for the others, of those who are not itself."""
    kept = machine.found.state
    seeds = [world.nodes[0 if machine.number else 1].node.me.control]
    addresses = seeds if kept is None else [*seeds, *kept.addresses]
    return [address for address in addresses if address != machine.node.me.control]


def _refuses(world: World) -> bool:
    return any(machine.node.stats().refused_deltas for machine in world.nodes if machine.up)
