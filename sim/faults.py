"""What goes wrong, and when: a scenario's faults carried out in a World."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from kvcomm_p2p.protocol.ids import NODE_ID_BYTES, NodeId
from kvcomm_p2p.protocol.messages import MemberRecord
from kvcomm_p2p.sim.links import Cut
from kvcomm_p2p.sim.machine import Kept, SimNode
from kvcomm_p2p.sim.scenario import FaultSpec
from kvcomm_p2p.sim.world import World


@dataclass(slots=True)
class Faults:
    """Carries out faults. `seeds`: where who comes back joins, if anywhere. `returned` is told of nodes that came back."""

    world: World
    rng: random.Random
    seeds: Callable[[SimNode], list[str]]
    returned: Callable[[SimNode], None] = lambda machine: None

    def begin(self, fault: FaultSpec) -> None:
        """It goes wrong now."""
        world, hit = self.world, self._hit(fault)
        end_s = world.now + fault.for_s
        if fault.kind == "loss":
            world.links.worsen(loss=fault.loss)
            world.note(None, f"from now on {100 * fault.loss:g} % of all frames are lost")
            if fault.for_s:
                world.at(end_s, self._lose_no_more)
        elif fault.kind == "partition":
            self._cut(hit, end_s, fault.one_way)
        elif fault.kind == "churn":
            self._churn(fault, hit, end_s)
        else:
            for machine in hit:
                self._hurt(machine, fault, end_s)

    def _lose_no_more(self) -> None:
        self.world.links.worsen(loss=None)
        self.world.note(None, "as many frames are lost as at first")

    def _hit(self, fault: FaultSpec) -> list[SimNode]:
        nodes = self.world.nodes
        if fault.nodes:
            return [nodes[number] for number in fault.nodes]
        count = round(fault.share * len(nodes))
        return [nodes[number] for number in sorted(self.rng.sample(range(len(nodes)), count))]

    def _hurt(self, machine: SimNode, fault: FaultSpec, end_s: float) -> None:
        world = self.world
        if not machine.up:
            return
        if fault.kind in ("crash", "restart"):
            world.crash(machine)
            if fault.kind == "restart" or fault.for_s:
                world.at(end_s, lambda: self.bring_back(machine, fault))
        elif fault.kind == "leave":
            if not machine.frozen:  # a process that stands still cannot say goodbye
                world.stop(machine)
        elif fault.kind == "freeze":
            world.freeze(machine)
            world.at(end_s, lambda: world.thaw(machine) if machine.up and machine.frozen else None)
        elif fault.kind == "slow":
            world.links.slow_down(machine.number, fault.factor)
            world.note(machine, f"has 1/{fault.factor:g} of its bandwidth")
            world.at(end_s, lambda: self._speed_up(machine))

    def _speed_up(self, machine: SimNode) -> None:
        self.world.links.slow_down(machine.number, 1.0)
        self.world.note(machine, "has its bandwidth again")

    def _cut(self, hit: list[SimNode], end_s: float, one_way: bool) -> None:
        links = self.world.links
        inside = frozenset(machine.number for machine in hit)
        outside = frozenset(range(len(self.world.nodes))) - inside
        cuts = [Cut(inside, outside)] if one_way else [Cut(inside, outside), Cut(outside, inside)]
        self.world.disturbed |= {machine.node_id for machine in self.world.nodes}
        links.cuts += cuts
        how = "do not reach the others" if one_way else "are cut off from the others"
        self.world.note(None, f"{', '.join(machine.name for machine in hit)} {how}")

        def heal() -> None:
            links.cuts = [cut for cut in links.cuts if not any(cut is mine for mine in cuts)]
            self.world.note(None, "the cut is healed")

        self.world.at(end_s, heal)

    def _churn(self, fault: FaultSpec, hit: list[SimNode], end_s: float) -> None:
        if self.world.now >= end_s or not hit:
            return
        machine = self.rng.choice(hit)
        if machine.up:
            self.world.crash(machine)
            self.world.at(self.world.now + fault.every_s, lambda: self.bring_back(machine, fault))
        self.world.at(self.world.now + fault.every_s, lambda: self._churn(fault, hit, end_s))

    def bring_back(self, machine: SimNode, fault: FaultSpec) -> None:
        """Start a crashed node again and let it join. With state it is who it was, in its next epoch, with what it kept; rolled
        back, in the same epoch again, with what it found when that began. Without, it is a new node at the same address."""
        if machine.up:
            return
        me: MemberRecord = machine.node.me
        if fault.keeps_state and fault.rolled_back:
            record, kept = me, machine.found
            self.world.rolled_back.add((me.node_id, me.epoch))
        elif fault.keeps_state:
            record, kept = msgspec.structs.replace(me, epoch=me.epoch + 1), machine.kept
        else:
            node_id = NodeId(self.rng.randbytes(NODE_ID_BYTES))
            record, kept = msgspec.structs.replace(me, node_id=node_id, epoch=1), Kept()
        self.world.restart(machine, record, kept)
        seeds = [] if machine.alone else self.seeds(machine)
        if seeds:
            self.world.join(machine, *seeds)
        self.returned(machine)
