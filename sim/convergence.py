"""How long an update takes until everybody knows of it."""

from __future__ import annotations

from kvcomm_p2p.protocol.events import AnchorsPublished, Effect, Event
from kvcomm_p2p.protocol.ids import AnchorId, ModelId, NodeId
from kvcomm_p2p.sim.bare_anchors import bare_anchor
from kvcomm_p2p.sim.machine import SimNode
from kvcomm_p2p.sim.world import World

BLOCK_BYTES = 32
MODEL = ModelId(b"update followed.")


class Convergence:
    """Publishes small anchors that nobody asks for, and watches who has heard of them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._open: dict[tuple[NodeId, AnchorId], tuple[float, dict[int, None]]] = {}
        self._seconds: list[float] = []
        self._each: list[float] = []
        world.observers.append(self._observe)

    def publish(self, machine: SimNode, number: int) -> None:
        """One update, by this machine. Nothing happens while it is down."""
        if not machine.up or machine.frozen:
            return
        held = bare_anchor(self._world, machine, MODEL, f"update {number}", blocks=1, block_bytes=BLOCK_BYTES)
        unaware = {other.number: None for other in self._world.nodes if other is not machine and other.up}
        self._open[machine.node_id, held.meta.anchor_id] = (self._world.now, unaware)
        self._world.handle(machine, AnchorsPublished((held,)))

    def times_s(self) -> list[float]:
        """Seconds until everybody (who was up) knew, of each update that got that far."""
        return list(self._seconds)

    def unfinished(self) -> int:
        """Updates that somebody still does not know."""
        return len(self._open)

    def each_s(self) -> list[float]:
        """Seconds until each node knew, over all updates."""
        return list(self._each)

    def _observe(self, number: int, event: Event, now: float, effects: list[Effect]) -> None:
        if not self._open:
            return
        node = self._world.nodes[number].node
        for key, (since, unaware) in list(self._open.items()):
            if number in unaware and node.knows(*key):
                del unaware[number]
                self._each.append(now - since)
            if not unaware:
                self._seconds.append(now - since)
                del self._open[key]
