"""Herds: at one moment all agents but one want the same anchor of the one that has it. What it costs that one, and them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from kvcomm_p2p.protocol.anchors import BlockKey, HeldAnchor
from kvcomm_p2p.protocol.events import FinishFetch, Want
from kvcomm_p2p.protocol.ids import ModelId
from kvcomm_p2p.sim.bare_anchors import bare_anchor
from kvcomm_p2p.sim.machine import SimNode
from kvcomm_p2p.sim.world import World

MODEL = ModelId(b"wanted by a herd")
DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class HerdSeen:
    """One herd that is over. `copies`: bytes that the origin sent, in anchors; `alone_s`: what one transfer takes on an idle
    link; `last_s`: until everybody was answered; `missed`: blocks that did not come, by reason, of all pullers; `missing`:
    pullers that missed any; `wait_lost_s`: the most that one of them lost."""

    copies: float
    alone_s: float
    last_s: float
    missed: Counter[str]
    missing: int
    pullers: int
    wait_lost_s: float


@dataclass(slots=True)
class _Running:
    origin: SimNode
    began_s: float
    sent_before: int
    kv_bytes: int
    pullers: int = 0
    open: int = 0
    missed: Counter[str] = field(default_factory=Counter)
    missing: int = 0
    wait_lost_s: float = 0.0


class Herds:
    """Lets herds of a world happen. `over`: what was seen of them."""

    def __init__(self, world: World, rng: random.Random, blocks: int, block_bytes: int, spread_s: float) -> None:
        """Each anchor has `blocks` blocks of `block_bytes` bytes; everybody asks within `spread_s` seconds."""
        self._world = world
        self._rng = rng
        self._blocks = blocks
        self._block_bytes = block_bytes
        self._spread_s = spread_s
        self.over: list[HerdSeen] = []

    def begin(self, number: int) -> None:
        """Herd `number` happens now; its origin is one of those that are up. Nothing happens if nobody else is."""
        up = [machine for machine in self._world.nodes if machine.up and not machine.frozen]
        if len(up) < 2:
            return
        origin = up[number % len(up)]
        held = bare_anchor(
            self._world, origin, MODEL, f"herd {number}", blocks=self._blocks, block_bytes=self._block_bytes
        )
        sent = self._world.payload_bytes_of[origin.number]
        running = _Running(origin, self._world.now, sent, held.meta.kv_bytes)
        self._world.publish(origin, (held,))
        for machine in up:
            if machine is not origin:
                running.open += 1
                running.pullers += 1
                at_s = self._world.now + self._rng.random() * self._spread_s
                self._world.at(at_s, partial(self._fetch, machine, held, running))

    def _fetch(self, machine: SimNode, held: HeldAnchor, running: _Running) -> None:
        world, meta = self._world, held.meta
        if not machine.up:
            self._answered(machine, running, None)
            return
        wants = tuple(
            Want(BlockKey(meta.anchor_id, index), meta.block_bytes(index), digest, world.new_handle(machine))
            for index, digest in enumerate(held.digests)
        )
        finish: Callable[[FinishFetch], None] = partial(self._answered, machine, running)
        world.fetch(machine, (running.origin.node_id,), wants, finish, anchors=(meta,), deadline_s=DEADLINE_S)

    def _answered(self, machine: SimNode, running: _Running, answer: FinishFetch | None) -> None:
        running.open -= 1
        if answer is not None:
            running.missed.update(block.miss.reason.value for block in answer.missed)
            running.missing += bool(answer.missed)
            running.wait_lost_s = max(running.wait_lost_s, answer.wait_lost_s)
            for block in answer.found:
                self._world.release(machine, block.handle)
        if not running.open:
            self.over.append(self._seen(running))

    def _seen(self, running: _Running) -> HerdSeen:
        world, number = self._world, running.origin.number
        link = world.links.profile(number, (number + 1) % len(world.nodes))
        sent = world.payload_bytes_of[number] - running.sent_before
        return HerdSeen(
            copies=sent / running.kv_bytes,
            alone_s=2 * link.latency_s + running.kv_bytes / link.bulk_bytes_per_s,
            last_s=world.now - running.began_s,
            missed=running.missed,
            missing=running.missing,
            pullers=running.pullers,
            wait_lost_s=running.wait_lost_s,
        )
