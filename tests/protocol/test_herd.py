"""Many want the same at once: blocks spread from puller to puller, so the origin sends few copies and nobody waits long."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any

import pytest
from protocol_harness import Network, meta

from kvcomm_p2p.protocol import events as ev
from kvcomm_p2p.protocol import messages as m
from kvcomm_p2p.protocol.config import MIB, NodeConfig
from kvcomm_p2p.protocol.ids import NodeId

SHRUNK = 4096
"""Sizes here are those of a 16 MiB anchor divided by this, and so are bandwidths."""


class Links(Network):
    """Every node has one link of `bytes_per_s` each way. What it sends is shared fairly between the pulls it serves; what
    it receives queues. Latency is 1 ms. Messages are small and cost no bandwidth."""

    def __init__(self, bytes_per_s: float, seed: int = 0) -> None:
        super().__init__(seed)
        self.bytes_per_s = bytes_per_s
        self.uploaded: dict[NodeId, int] = {}
        self._out: dict[NodeId, dict[tuple[NodeId, int], deque[Any]]] = {}
        self._sending: set[NodeId] = set()
        self._free_at: dict[NodeId, float] = {}

    def _send_block(self, me: NodeId, effect: ev.SendBlock) -> None:
        block = self.stores[me].get(effect.handle)
        if block is None:
            self._post(0.0, me, lambda: ev.BlockUnavailable(effect.to, effect.pull_id, effect.ordinal))
            return
        payload = bytes(block)
        for offset in range(effect.offset, len(payload), self.chunk_bytes):
            piece = payload[offset : offset + self.chunk_bytes]
            header = m.Chunk(effect.pull_id, effect.ordinal, offset, len(piece))
            queue = self._out.setdefault(me, {}).setdefault((effect.to, effect.pull_id), deque())
            queue.append((header, piece))
        if me not in self._sending:
            self._sending.add(me)
            self._next(me)

    def _next(self, me: NodeId) -> None:
        queues = self._out[me]
        if not queues:
            self._sending.discard(me)
            return
        key = next(iter(queues))
        queue = queues.pop(key)
        header, piece = queue.popleft()
        if queue:
            queues[key] = queue
        to = key[0]
        took_s = len(piece) / self.bytes_per_s
        self.uploaded[me] = self.uploaded.get(me, 0) + len(piece)
        arrives_at = max(self.now + took_s + 0.001, self._free_at.get(to, 0.0) + took_s)
        self._free_at[to] = arrives_at
        self._post(arrives_at - self.now, to, partial(self._arrive, me, header, piece))
        self._post(took_s, me, lambda: self._next(me))


def herd(pullers: int, seed: int, config: NodeConfig, transfer_s: float = 0.134) -> tuple[float, float, int]:
    """Everybody fetches one anchor of 16 blocks from one origin at once. Returns how long the last took, in times of one
    transfer, how many copies the origin sent, and how many blocks were missed."""
    anchor = meta(("herd", seed), tokens=512)
    network = Links(anchor.kv_bytes / transfer_s, seed)
    network.chunk_bytes = anchor.kv_bytes // 64
    ids = [network.add(index, config) for index in range(pullers + 1)]
    for node_id in ids[1:]:
        network.join(node_id, ids[0])
    network.run(30.0, until=lambda: all(node.stats().peers_alive == pullers for node in network.nodes.values()))
    network.publish(ids[0], anchor)
    began = network.now
    for index, node_id in enumerate(ids[1:]):
        network.now = began + 1e-5 * index
        network.fetch(node_id, 1, ids[0], anchor, deadline_s=20.0, anchors=(anchor,))
    ended = network.run(
        25.0,
        until=lambda: all(
            any(isinstance(effect, ev.FinishFetch) for effect in network.answers[node_id]) for node_id in ids[1:]
        ),
    )
    answers = [network.take(node_id, ev.FinishFetch) for node_id in ids[1:]]
    missed = sum(len(answer.missed) for (answer,) in answers)
    return (ended - began) / transfer_s, network.uploaded[ids[0]] / anchor.kv_bytes, missed


@pytest.mark.parametrize("transfer_s", [0.02, 0.134, 0.5])
def test_sixteen_that_want_the_same_at_once_all_get_it_soon_and_the_origin_sends_few_copies(transfer_s: float) -> None:
    times, copies, missed = herd(16, 0, NodeConfig(pull_piece_bytes=2 * MIB // SHRUNK), transfer_s)
    assert missed == 0 and copies <= 6.0 and times <= 6.0


def test_without_passing_on_the_origin_sends_every_copy() -> None:
    """The comparison that makes the figures above mean something."""
    config = NodeConfig(pull_piece_bytes=2 * MIB // SHRUNK, passing_on_bytes_max=1, pull_busy_wait_s=10.0)
    times, copies, missed = herd(8, 0, config, 0.02)
    assert missed == 0 and copies == 8.0 and times >= 8.0
