"""Nodes that publish without anybody asking for it: what news cost, whatever they are good for."""

from __future__ import annotations

import math
import random
from collections import deque

import numpy as np

from kvcomm_p2p.protocol.anchors import AnchorMeta, HeldAnchor, Visibility
from kvcomm_p2p.protocol.events import AnchorsForgotten
from kvcomm_p2p.protocol.ids import (
    ANCHOR_ID_BYTES,
    CHAIN_HASH_BYTES,
    SEQUENCE_ID_BYTES,
    AnchorId,
    ChainHash,
    ModelId,
    SequenceId,
)
from kvcomm_p2p.sim.machine import SimNode
from kvcomm_p2p.sim.world import World

TOKENS = 64
FINGERPRINTS = 3
"""Of so many tokens, about: 2 in 49."""


class Publishing:
    """Each node publishes `per_s` anchors a second, all different and TOKENS long, and forgets all but its latest `kept`."""

    def __init__(self, world: World, rng: random.Random, per_s: float, kept: int) -> None:
        self._world = world
        self._rng = rng
        self._interval_s = 1 / per_s
        self._kept = kept
        self._held: dict[int, deque[AnchorId]] = {}
        self._token_ids = np.zeros(TOKENS, np.uint32)
        self.published = 0
        self.ends_at = math.inf

    def begin(self) -> None:
        """From now on, each node at times of its own."""
        for machine in self._world.nodes:
            self._held[machine.number] = deque()
            at_s = self._world.now + self._rng.random() * self._interval_s
            self._world.at(at_s, lambda machine=machine: self._publish(machine))  # type: ignore[misc]

    def _publish(self, machine: SimNode) -> None:
        world = self._world
        if world.now >= self.ends_at:
            return
        world.at(world.now + self._interval_s, lambda: self._publish(machine))
        if not machine.up or machine.frozen:
            return
        meta, held = self._anchor(machine.node.me.model_id), self._held[machine.number]
        self.published += 1
        held.append(meta.anchor_id)
        anchor = HeldAnchor(
            meta, self._token_ids, (world.new_handle(machine), world.new_handle(machine)), (bytes(32),) * 2
        )
        world.publish(machine, (anchor,))
        if len(held) > self._kept:
            world.handle(machine, AnchorsForgotten((held.popleft(),)))

    def _anchor(self, model_id: ModelId) -> AnchorMeta:
        values = sorted(self._rng.sample(range(2**32), FINGERPRINTS))
        return AnchorMeta(
            anchor_id=AnchorId(self._rng.randbytes(ANCHOR_ID_BYTES)),
            model_id=model_id,
            sequence_id=SequenceId(self._rng.randbytes(SEQUENCE_ID_BYTES)),
            start=0,
            end=TOKENS,
            chain_end=ChainHash(self._rng.randbytes(CHAIN_HASH_BYTES)),
            fingerprints=np.array(values, "<u4").tobytes(),
            hops=0,
            visibility=Visibility.PUBLIC,
            group=b"",
            kv_bytes=TOKENS,
            content=self._rng.getrandbits(64),
        )
