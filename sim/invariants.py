"""What must always hold, checked while a world runs.

Cheap ones after every event of the node that it concerns; those that look at all peers of a node every `every` of its events, and
at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcomm_p2p.errors import InternalError
from kvcomm_p2p.protocol import events as ev
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.sim.machine import SimNode
from kvcomm_p2p.sim.world import World

EVERY = 50

WATCHED_MAX = 64
"""Of more nodes than that, each has what it knows of so many others checked: those that follow it."""


class InvariantBroken(InternalError):
    """What broke, at which node, when: the story to tell."""


@dataclass(slots=True)
class Invariants:
    """Watches a world from now on. Raises InvariantBroken out of `World.run`.

    Held: what a node knows of an origin's epoch, and within one epoch of its log and its incarnation, never goes back
    (unless it forgot the origin); a pool keeps to its bytes and anchors; nobody is counted as a violator, since nobody is;
    a fetch ends once (the World sees to it), with every block found or missed, and no later than its deadline.
    """

    world: World
    every: int = EVERY
    _versions: dict[int, tuple[int, dict[NodeId, tuple[int, int, int]]]] = field(default_factory=dict)
    _deadlines: dict[tuple[int, int, int], tuple[float, int]] = field(default_factory=dict)
    _events: dict[int, int] = field(default_factory=dict)
    checks: int = 0

    def __post_init__(self) -> None:
        self.world.observers.append(self._observe)

    def _observe(self, number: int, event: ev.Event, now: float, effects: list[ev.Effect]) -> None:
        machine = self.world.nodes[number]
        if isinstance(event, ev.FetchRequested):
            key = (number, machine.generation, event.fetch_id)
            self._deadlines[key] = (event.deadline, len(event.wants))
        for effect in effects:
            if isinstance(effect, ev.FinishFetch):
                self._finished(machine, effect, now)
            elif isinstance(effect, ev.ReportPeer) and effect.change == "violation":
                self._broken(machine, f"took {effect.name} for a violator: {effect.detail}")
        count = self._events[number] = self._events.get(number, 0) + 1
        if count % self.every == 0:
            self.check(machine)

    def _finished(self, machine: SimNode, finish: ev.FinishFetch, now: float) -> None:
        deadline, wants = self._deadlines.pop((machine.number, machine.generation, finish.fetch_id))
        if now > deadline + 1e-6:
            self._broken(machine, f"finished fetch {finish.fetch_id} {now - deadline:.6f} s after its deadline")
        if len(finish.found) + len(finish.missed) != wants:
            self._broken(machine, f"finished fetch {finish.fetch_id} without a word on some of its blocks")

    def check(self, machine: SimNode) -> None:
        """Everything that holds of one node now."""
        self.checks += 1
        node = machine.node
        stats = node.stats()
        config = machine.config
        if stats.pool_bytes > config.pool_bytes_max or stats.pool_anchors > config.pool_anchors_max:
            self._broken(machine, f"holds {stats.pool_bytes} bytes in {stats.pool_anchors} anchors, more than it may")
        if stats.uploads > config.uploads_max:
            self._broken(machine, f"serves {stats.uploads} uploads, more than it may")
        generation, versions = self._versions.get(machine.number, (machine.generation, {}))
        known = {}
        for peer in node.peers(self._watched(machine)):
            version = (peer.epoch, peer.incarnation, peer.log_seq)
            before = versions.get(peer.node_id, version) if generation == machine.generation else version
            if version[0] < before[0] or (version[0] == before[0] and version[1] < before[1]):
                self._broken(machine, f"took back what it knew of {peer.name}: {before} became {version}")
            known[peer.node_id] = version
        self._versions[machine.number] = (machine.generation, known)

    def _watched(self, machine: SimNode) -> list[NodeId] | None:
        nodes = self.world.nodes
        if len(nodes) <= WATCHED_MAX:
            return None
        return [nodes[(machine.number + step) % len(nodes)].node_id for step in range(1, WATCHED_MAX)]

    def check_all(self) -> None:
        """Every node that is up, and no fetch that is overdue."""
        for machine in self.world.nodes:
            if machine.up and not machine.frozen:
                self.check(machine)
        for (number, generation, fetch_id), (deadline, _) in self._deadlines.items():
            machine = self.world.nodes[number]
            if machine.up and machine.generation == generation and not machine.frozen and deadline < self.world.now - 1:
                self._broken(machine, f"never finished fetch {fetch_id}")

    def _broken(self, machine: SimNode, what: str) -> None:
        raise InvariantBroken(f"at {self.world.now:.6f} s {machine.name} {what}")


def differences(world: World) -> list[str]:
    """What nodes that are up believe wrongly of each other's shared anchors, in words; empty when all agree."""
    up = [machine for machine in world.nodes if machine.up and not machine.frozen]
    truth = {machine.node_id: machine.node.known_of(machine.node_id) for machine in up}
    wrong: list[str] = []
    for machine in up:
        for other in up:
            if other is machine:
                continue
            known = machine.node.known_of(other.node_id)
            missing, stale = truth[other.node_id] - known, known - truth[other.node_id]
            if missing:
                wrong.append(f"{machine.name} does not know {len(missing)} anchors of {other.name}")
            if stale:
                wrong.append(f"{machine.name} believes in {len(stale)} anchors that {other.name} no longer has")
    return wrong
