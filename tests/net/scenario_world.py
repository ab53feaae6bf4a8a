"""Plays scenarios in the simulator: the same nodes under a virtual clock, on simulated links."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from kvcomm_p2p.evaluation.cluster_anchors import MODEL, Shape, describe, lookup, number_of, token_ids
from kvcomm_p2p.protocol import events as ev
from kvcomm_p2p.protocol.anchors import BlockKey, HeldAnchor
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.ids import AnchorId, NodeId
from kvcomm_p2p.protocol.messages import MemberRecord
from kvcomm_p2p.sim.machine import SimNode
from kvcomm_p2p.sim.world import World

SETTLE_S = 60.0


class WorldPlayer:
    """See `scenario.Player`. Seconds pass only while something is waited for."""

    def __init__(self, config: NodeConfig, shape: Shape) -> None:
        self.world = World(seed=1)
        self._config = config
        self._shape = shape
        self._machines: dict[str, SimNode] = {}

    def join(self, name: str, seed: str) -> None:
        for each in (seed, name):
            if each not in self._machines:
                number = len(self._machines)
                record = MemberRecord(
                    node_id=NodeId(hashlib.sha256(each.encode()).digest()[:16]),
                    epoch=1,
                    name=each,
                    model_id=MODEL,
                    control=f"10.0.0.{number + 1}:1",
                    bulk=f"10.0.0.{number + 1}:2",
                )
                self._machines[each] = self.world.add(record, self._config)
        machine = self._machines[name]
        self.world.join(machine, self._machines[seed].node.me.control)
        assert self.world.run(5.0, until=lambda: machine.node.stats().peers_alive > 0)

    def publish(self, name: str, numbers: Sequence[int]) -> None:
        machine = self._machines[name]
        handles = [tuple(self.world.new_handle(machine) for _ in range(self._shape.blocks)) for _ in numbers]
        self.world.publish(
            machine,
            tuple(
                HeldAnchor(describe(number, self._shape), token_ids(self._shape), own, self._digests(number))
                for number, own in zip(numbers, handles, strict=True)
            ),
        )

    def forget(self, name: str, numbers: Sequence[int]) -> None:
        gone = tuple(AnchorId(number.to_bytes(16, "big")) for number in numbers)
        self.world.handle(self._machines[name], ev.AnchorsForgotten(gone))

    def fetch(self, name: str, holder: str, number: int) -> str:
        machine = self._machines[name]
        size = self._shape.block_kv_bytes
        anchor_id = AnchorId(number.to_bytes(16, "big"))
        wants = tuple(
            ev.Want(BlockKey(anchor_id, index), size, digest, self.world.new_handle(machine))
            for index, digest in enumerate(self._digests(number))
        )
        finished: list[ev.FinishFetch] = []
        self.world.fetch(machine, (self._machines[holder].node_id,), wants, finished.append, deadline_s=5.0)
        assert self.world.run(10.0, until=lambda: bool(finished))
        for block in finished[0].found:
            self.world.release(machine, block.handle)
        if finished[0].missed:
            (reason,) = {block.miss.reason.value for block in finished[0].missed}
            return str(reason)
        self.publish(name, [number])
        return "found"

    def leave(self, name: str) -> None:
        self.world.stop(self._machines[name])

    def die(self, name: str) -> None:
        self.world.freeze(self._machines[name])

    def states(self, name: str) -> dict[str, str]:
        return {peer.name: peer.state for peer in self._machines[name].node.peers()}

    def holders(self, name: str, numbers: Sequence[int]) -> dict[int, tuple[str, ...]]:
        found: dict[int, tuple[str, ...]] = {}
        for number in numbers:
            promise = self.world.look_up(self._machines[name], lookup(number))
            assert self.world.run(5.0, until=lambda p=promise: p.done)  # type: ignore[misc]
            hits = [hit for hit in promise.value.hits if number_of(hit.meta.anchor_id) == number]
            found[number] = tuple(sorted(self.world.node_of(hit.holder).name for hit in hits))
        return found

    def settle(self, done: Callable[[], bool]) -> bool:
        end = self.world.now + SETTLE_S
        while not done():
            if self.world.now > end:
                return False
            self.world.run(0.1)
        return True

    def _digests(self, number: int) -> tuple[bytes, ...]:
        """The world moves no bytes: any digests do that are the same everywhere."""
        return tuple(
            hashlib.sha256(bytes([index]) + number.to_bytes(16, "big")).digest() for index in range(self._shape.blocks)
        )
