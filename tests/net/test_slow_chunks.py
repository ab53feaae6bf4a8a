"""Real nodes over a link of limited rate: blocks that would take longer than the patience come in chunks that do not."""

from __future__ import annotations

import pytest
from net_nodes import TestNode, make_anchor, wait_until, wants_of

from kvcomm_p2p.net.driver import FetchResult
from kvcomm_p2p.net.lossy_transport import Faults, LossyTransport
from kvcomm_p2p.net.memory_transport import MemoryHub, MemoryTransport
from kvcomm_p2p.protocol.anchors import HeldAnchor
from kvcomm_p2p.protocol.config import NodeConfig

BLOCK_BYTES = 1_474_560
"""Of 32 tokens of 46 kB."""

FAR_S = 0.01
"""Who answers later is not in the same room, where links are taken to be fast at first."""


def fetch(node: TestNode, holder: TestNode, anchor: HeldAnchor) -> FetchResult:
    return node.driver.run(node.driver.fetch(holder.driver.node_id, wants_of(anchor), 10.0)).result(15)


def chunks(holder: TestNode) -> int:
    return holder.ask(lambda driver: driver.stats().wire.sent.get("Chunk", 0))


@pytest.mark.parametrize("bytes_per_s", [625_000.0, 3_125_000.0], ids=["5 Mbit/s", "25 Mbit/s"])
def test_blocks_that_take_longer_than_the_patience_arrive(bytes_per_s: float) -> None:
    hub = MemoryHub()
    slow = LossyTransport(MemoryTransport(hub), control=Faults(delay_s=FAR_S), reply_bytes_per_s=bytes_per_s)
    blocks = 1 if bytes_per_s < 1e6 else 3
    assert BLOCK_BYTES / bytes_per_s > 2 * NodeConfig().pull_stall_timeout_s
    with TestNode("a", slow) as a, TestNode("b", MemoryTransport(hub)) as b:
        b.join(a.driver.addresses.control)
        anchor = make_anchor(a.store, 1, blocks=blocks, block_kv_bytes=BLOCK_BYTES)
        a.hold(anchor)
        result = fetch(b, a, anchor)
        assert len(result.found) == blocks and not result.missed and result.wait_lost_s == 0.0
        assert chunks(a) >= BLOCK_BYTES // (64 * 1024) * blocks / 5


def test_a_fast_link_is_known_after_one_pull() -> None:
    hub = MemoryHub()
    with TestNode("a", MemoryTransport(hub)) as a, TestNode("b", MemoryTransport(hub)) as b:
        b.join(a.driver.addresses.control)
        anchors = [make_anchor(a.store, number, blocks=12, block_kv_bytes=BLOCK_BYTES) for number in (1, 2)]
        for anchor in anchors:
            a.hold(anchor)
        assert wait_until(lambda: b.ask(lambda driver: driver.stats().node.peer_anchors) == 2)
        before = 0
        for anchor, most in zip(anchors, (12 + 2 * 22, 12 * 2), strict=True):
            assert len(fetch(b, a, anchor).found) == 12
            assert chunks(a) - before <= most
            before = chunks(a)
