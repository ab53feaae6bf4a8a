"""A member that floods with what costs most: erasures, comparisons of erasures, offers of shared memory. Others are served."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
from msgspec.structs import replace
from net_nodes import KEYS, TestNode, make_anchor, wait_until, wants_of
from test_net_hostile import BLOCK_BYTES, Liar

from kvcomm_p2p.net.shared_memory import SharedMemory, host_tag
from kvcomm_p2p.net.zmq_transport import ZmqTransport
from kvcomm_p2p.protocol.erasing import ANSWER_PAUSE_S, MESSAGES_AT_ONCE_MAX, NEWS_PER_SENDER_MAX
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.messages import (
    ERASURE_HASHES_MAX,
    Capability,
    Erasure,
    ErasuresKnown,
    Forget,
    Pull,
    SharedBlock,
    SharedBlocks,
)


@pytest.fixture
def liar() -> Iterator[Liar]:
    peer = Liar()
    yield peer
    peer.close()


def joined(victim: TestNode, liar: Liar) -> None:
    joining = victim.driver.run(victim.driver.join([liar.addresses[0]], 5.0))
    liar.welcome(victim)
    assert joining.result(5).result == 1


def check_serves(holder: TestNode, puller: TestNode, number: int) -> None:
    anchor = make_anchor(holder.store, number)
    holder.hold(anchor)
    found = puller.driver.run(puller.driver.fetch(holder.driver.node_id, wants_of(anchor), 5.0)).result(10)
    assert len(found.found) == 4 and found.wait_lost_s < 0.2
    for handle in found.found.values():
        puller.store.drop(handle)
    assert holder.ask(lambda driver: driver.stats().wire.failures) == 0


def erasures(batch: int, author: NodeId) -> tuple[Erasure, ...]:
    """As long as they may be."""
    hashes = np.random.default_rng(batch).integers(0, 2**63, ERASURE_HASHES_MAX, dtype=np.uint64)
    text = np.sort(hashes).astype("<u8").tobytes()
    return tuple(Erasure(bytes([batch % 256, n]) * 8, author, 0.0, 8, text) for n in range(16))


def test_a_flood_of_erasures_and_of_comparisons_keeps_nobody_waiting(liar: Liar) -> None:
    with TestNode("victim", ZmqTransport()) as victim, TestNode("puller", ZmqTransport()) as puller:
        joined(victim, liar)
        puller.join(victim.driver.addresses.control)
        for batch in range(100):
            liar.answers.send(liar.seal(Forget(erasures(batch, liar.node_id))))
        check_serves(victim, puller, 1)
        for _ in range(2000):
            liar.answers.send(liar.seal(ErasuresKnown(())))
        check_serves(victim, puller, 2)
        heard = lambda: victim.ask(lambda driver: driver.stats().wire)  # noqa: E731
        assert wait_until(lambda: heard().received["ErasuresKnown"] + heard().dropped["over_limit"] > 1000, 10.0)
        known = victim.ask(lambda driver: len(driver._interpreter.node._custody.erasing))
        assert 0 < known <= 2 * NEWS_PER_SENDER_MAX
        assert victim.ask(lambda driver: driver.stats().node.violations) > 0
        # Told once to the puller, and to the liar as many answers as seconds have passed.
        assert heard().sent["Forget"] <= 20 * MESSAGES_AT_ONCE_MAX / ANSWER_PAUSE_S
        check_serves(victim, puller, 3)


@pytest.mark.parametrize("offer", ["nobody's", "everything of ours", "out of range"])
def test_a_flood_of_offers_of_shared_memory(liar: Liar, offer: str) -> None:
    """Of pulls that do not exist, of descriptors that are not there, of the victim's own files, of places beyond any end."""
    shares = {"host": host_tag(KEYS.content), "capabilities": int(Capability.SHARED_MEMORY)}
    liar.record = replace(liar.record, **shares)
    block = {
        "nobody's": lambda n: (2**31 - 1, 5000 + n, 7, 0),
        "everything of ours": lambda n: (os.getpid(), n % 64, n, 0),
        "out of range": lambda n: (os.getpid(), n % 64, n, 2**28),
    }[offer]
    with (
        TestNode("victim", ZmqTransport(), shared=SharedMemory()) as victim,
        TestNode("holder", ZmqTransport(), shared=SharedMemory()) as holder,
    ):
        joined(victim, liar)
        holder.join(victim.driver.addresses.control)
        assert wait_until(lambda: len(victim.ask(lambda driver: driver.peers())) == 2)
        elsewhere = TestNode("elsewhere", ZmqTransport())
        anchor = make_anchor(elsewhere.store, 1, blocks=1, block_kv_bytes=BLOCK_BYTES)
        pulling = victim.driver.run(victim.driver.fetch(liar.node_id, wants_of(anchor), 5.0))
        connection, pull = liar.expect(liar.bulk, Pull)
        assert isinstance(pull, Pull) and pull.shared
        for number in range(3000):
            pid, descriptor, file_id, offset = block(number)
            pull_id = pull.pull_id if number % 100 == 0 else pull.pull_id + 1 + number
            message = SharedBlocks(pull_id, pid, (SharedBlock(0, descriptor, file_id, offset, BLOCK_BYTES),))
            liar.bulk.send_multipart([connection, liar.seal(message)])
        result = pulling.result(10)
        assert not result.found and result.wait_lost_s <= 0.3
        check_serves(holder, victim, 2)
        assert wait_until(lambda: len(victim.store) == 0)
        assert victim.ask(lambda driver: driver.stats().wire.failures) == 0
        assert victim.store.shared is not None and victim.store.shared.regions == 0
