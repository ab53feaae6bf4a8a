"""Many drivers that want the same at once, and holders that fail, over ZeroMQ."""

from __future__ import annotations

import time
from contextlib import ExitStack

from net_nodes import TestNode, block_bytes, describe, make_anchor, wait_until, wants_of

from kvcomm_p2p.net.zmq_transport import ZmqTransport

BLOCK_BYTES = 1 << 20


def herd(pullers: int, blocks: int) -> tuple[float, float, int]:
    """Seconds until the last has everything, copies that the origin sent, blocks missed by anybody."""
    with ExitStack() as stack:
        nodes = [stack.enter_context(TestNode(f"n{index}", ZmqTransport())) for index in range(pullers + 1)]
        origin = nodes[0]
        for node in nodes[1:]:
            node.join(origin.driver.addresses.control)
        for node in nodes:
            assert wait_until(lambda node=node: node.ask(lambda driver: driver.stats().node.peers_alive) == pullers, 20)
        anchor = make_anchor(origin.store, 7, blocks=blocks, block_kv_bytes=BLOCK_BYTES)
        origin.hold(anchor)
        began = time.perf_counter()
        holder = origin.driver.node_id
        pulls = [
            node.driver.run(node.driver.fetch(holder, wants_of(anchor), 20.0, anchors=(anchor.meta,)))
            for node in nodes[1:]
        ]
        results = [pull.result(30) for pull in pulls]
        took_s = time.perf_counter() - began
        for node, result in zip(nodes[1:], results, strict=True):
            for key, handle in result.found.items():
                assert bytes(node.store.view(handle)) == block_bytes(BLOCK_BYTES, 7, key.index)
        sent = origin.ask(lambda driver: driver.stats().wire.payload_bytes_sent)
        return took_s, sent / (blocks * BLOCK_BYTES), sum(len(result.missed) for result in results)


def test_a_herd_serves_itself() -> None:
    _, copies, missed = herd(pullers=8, blocks=8)
    assert missed == 0 and copies <= 6.0


def test_a_holder_that_does_not_have_it_costs_a_question() -> None:
    with TestNode("a", ZmqTransport()) as a, TestNode("b", ZmqTransport()) as b, TestNode("c", ZmqTransport()) as c:
        for node in (b, c):
            node.join(a.driver.addresses.control)
        assert wait_until(lambda: c.ask(lambda driver: driver.stats().node.peers_alive) == 2)
        anchor = make_anchor(b.store, 7, blocks=4, block_kv_bytes=BLOCK_BYTES)
        b.hold(anchor)
        pull = c.driver.fetch(a.driver.node_id, wants_of(describe(7, 4, BLOCK_BYTES)), 5.0, others=(b.driver.node_id,))
        result = c.driver.run(pull).result(10)
        assert len(result.found) == 4 and result.wait_lost_s == 0.0
