"""Blocks that move between nodes of one machine in shared memory, and every way in which that can fail."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from net_nodes import TestNode, block_bytes, describe, make_anchor, wait_until, wants_of
from test_net_processes import BLOCK_BYTES, BLOCKS, check_outcome, holder_process, the_holder

from kvcomm_p2p.net import block_mover
from kvcomm_p2p.net.counters import WireCounters
from kvcomm_p2p.net.driver import FetchResult
from kvcomm_p2p.net.memory_transport import MemoryHub, MemoryTransport
from kvcomm_p2p.net.shared_memory import SharedMemory
from kvcomm_p2p.net.zmq_transport import ZmqTransport
from kvcomm_p2p.protocol.anchors import BlockHandle, HeldAnchor, MissReason
from kvcomm_p2p.store import Place

SMALL = 1 << 16


def descriptors() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def mappings() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("/memfd:kvcomm")


def wire(node: TestNode) -> WireCounters:
    return node.ask(lambda driver: driver.stats().wire)


def fetch(puller: TestNode, holder: TestNode, anchor: HeldAnchor, deadline_s: float = 5.0) -> FetchResult:
    wanted = puller.driver.fetch(holder.driver.node_id, wants_of(anchor), deadline_s)
    return puller.driver.run(wanted).result(deadline_s + 5)


def check_whole(puller: TestNode, result: FetchResult, blocks: int, *, drop: bool = True) -> None:
    """Everything came, and is what anchor 1 holds."""
    assert len(result.found) == blocks, result.missed
    for key, handle in result.found.items():
        assert puller.store.view(handle) == block_bytes(SMALL, 1, key.index)
        if drop:
            puller.store.drop(handle)


class Pair:
    """A holder of anchor 1 and a puller that has joined it, both sharing memory, in this process."""

    def __init__(self, holder: TestNode, puller: TestNode) -> None:
        self.holder, self.puller = holder, puller
        puller.join(holder.driver.addresses.control)
        self.anchor = make_anchor(holder.store, 1, blocks=4, block_kv_bytes=SMALL)
        holder.hold(self.anchor)

    def point_to(self, place: Place | None) -> None:
        """From now on the holder says that its blocks stand there."""
        self.holder.store.place = lambda handle: place  # type: ignore[method-assign]


@pytest.fixture
def pair() -> Iterator[Pair]:
    with (
        TestNode("holder", ZmqTransport(), shared=SharedMemory()) as holder,
        TestNode("puller", ZmqTransport(), shared=SharedMemory()) as puller,
    ):
        yield Pair(holder, puller)


# ------------------------------------------------------------------------------------------------- it works, in processes


def test_blocks_of_another_process_are_mapped_not_sent() -> None:
    before = descriptors(), mappings()
    with (
        holder_process("shared") as (_, address),
        TestNode("puller", ZmqTransport(), shared=SharedMemory()) as puller,
    ):
        puller.join(address)
        wanted = puller.driver.fetch(the_holder(puller), wants_of(describe(1, BLOCKS, BLOCK_BYTES)), 20.0)
        result = puller.driver.run(wanted).result(30)
        counted = wire(puller)
        assert (counted.shared_bytes_adopted, counted.payload_bytes_received) == (BLOCKS * BLOCK_BYTES, 0)
        assert puller.store.held_bytes == BLOCKS * BLOCK_BYTES
        assert puller.store.shared is not None and puller.store.shared.descriptors == 1
        assert len(result.found) == BLOCKS
        check_outcome(puller, result)
    assert (descriptors(), mappings()) == before


def test_what_was_mapped_survives_a_holder_that_is_killed() -> None:
    """In the middle of a pull: the rest is missed at once, nothing stays in any file system, no descriptor stays open."""
    before, files = (descriptors(), mappings()), sorted(Path("/dev/shm").iterdir())
    with (
        holder_process("shared") as (pid, address),
        TestNode("puller", ZmqTransport(), shared=SharedMemory()) as puller,
    ):
        puller.join(address)
        adopt = puller.store.adopt_shared
        killed = []

        def kill_after_the_first(handle: BlockHandle, *arguments: object) -> bool:
            ok = adopt(handle, *arguments)  # type: ignore[arg-type]
            if not killed:
                killed.append(time.monotonic())
                os.kill(pid, signal.SIGKILL)
                assert wait_until(lambda: not Path(f"/proc/{pid}/fd/0").exists())
            return ok

        puller.store.adopt_shared = kill_after_the_first  # type: ignore[method-assign]
        wanted = puller.driver.fetch(the_holder(puller), wants_of(describe(1, BLOCKS, BLOCK_BYTES)), 20.0)
        result = puller.driver.run(wanted).result(30)
        assert time.monotonic() - killed[0] < 2.0
        assert result.found and result.wait_lost_s <= 0.25
        assert {miss.reason for miss in result.missed.values()} <= {MissReason.UNREACHABLE, MissReason.STALLED}
        check_outcome(puller, result)
        assert sorted(Path("/dev/shm").iterdir()) == files
    assert (descriptors(), mappings()) == before


def test_a_frozen_holder_costs_no_more_than_with_chunks() -> None:
    with (
        holder_process("shared") as (pid, address),
        TestNode("puller", ZmqTransport(), shared=SharedMemory()) as puller,
    ):
        puller.join(address)
        holder = the_holder(puller)
        os.kill(pid, signal.SIGSTOP)
        wanted = puller.driver.fetch(holder, wants_of(describe(1, BLOCKS, BLOCK_BYTES)), 20.0)
        result = puller.driver.run(wanted).result(30)
        assert {miss.reason for miss in result.missed.values()} == {MissReason.STALLED}
        assert 0.15 < result.wait_lost_s <= 0.25


def test_memory_outlives_its_maker_and_goes_on_to_a_third_node() -> None:
    """A pulled block is handed on by the node that pulled it, from the same memory, also when its maker is dead."""
    before = descriptors(), mappings()
    with (
        TestNode("second", ZmqTransport(), shared=SharedMemory()) as second,
        TestNode("third", ZmqTransport(), shared=SharedMemory()) as third,
    ):
        anchor = describe(1, BLOCKS, BLOCK_BYTES)
        with holder_process("shared") as (_, address):
            second.join(address)
            wanted = second.driver.fetch(the_holder(second), wants_of(anchor), 20.0)
            result = second.driver.run(wanted).result(30)
        handles = tuple(result.found[key] for key, _, _ in wants_of(anchor))
        second.hold(HeldAnchor(anchor.meta, anchor.token_ids, handles, anchor.digests))
        third.join(second.driver.addresses.control)
        passed_on = fetch(third, second, anchor, 20.0)
        assert wire(third).shared_bytes_adopted == BLOCKS * BLOCK_BYTES
        for key, handle in passed_on.found.items():
            assert third.store.view(handle) == block_bytes(BLOCK_BYTES, 1, key.index)
            made, there = second.store.place(result.found[key]), third.store.place(handle)
            assert made is not None and there is not None and made.file_id == there.file_id
            third.store.drop(handle)
        second.driver.run(second.driver.forget([anchor.meta.anchor_id])).result(5)
        assert (len(second.store), len(third.store)) == (0, 0)
    del made, there
    assert (descriptors(), mappings()) == before


# --------------------------------------------------------------------------------------------------------- it falls back


def check_fallback(pair: Pair) -> None:
    """The same fetch brings everything in chunks, within its deadline and without loss; the next one does not ask again."""
    result = fetch(pair.puller, pair.holder, pair.anchor)
    check_whole(pair.puller, result, 4)
    counted = wire(pair.puller)
    assert (counted.shared_blocks_refused, counted.shared_bytes_adopted) == (4, 0)
    assert counted.payload_bytes_received == 4 * SMALL
    assert result.wait_lost_s == 0.0
    check_whole(pair.puller, fetch(pair.puller, pair.holder, pair.anchor), 4)
    assert wire(pair.puller).received["SharedBlocks"] == 1
    assert pair.holder.ask(lambda driver: driver.stats().node.violations) == 0
    assert pair.puller.ask(lambda driver: driver.stats().node.violations) == 0
    assert (len(pair.puller.store), pair.puller.store.held_bytes, pair.puller.store.reserved_bytes) == (0, 0, 0)
    assert pair.puller.store.shared is not None and pair.puller.store.shared.regions == 0
    assert wire(pair.puller).failures == wire(pair.holder).failures == 0


def test_memory_is_shared_between_two_nodes_of_one_process(pair: Pair) -> None:
    check_whole(pair.puller, fetch(pair.puller, pair.holder, pair.anchor), 4)
    assert wire(pair.puller).shared_bytes_adopted == 4 * SMALL
    assert pair.puller.store.shared is not None and pair.puller.store.shared.regions == 0


def test_a_descriptor_that_cannot_be_reached(pair: Pair) -> None:
    pair.point_to(Place(2**31 - 1, 1, 0))
    check_fallback(pair)


def test_a_process_that_cannot_be_reached(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """As from another process namespace: the number means nothing here, or somebody else."""
    child = os.fork()
    if not child:
        signal.pause()
    try:
        monkeypatch.setattr(block_mover, "os", SimpleNamespace(getpid=lambda: child))
        place = pair.holder.store.place(pair.anchor.handles[0])
        assert place is not None
        pair.point_to(place._replace(file_id=place.file_id + 1))
        check_fallback(pair)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_pipe_a_folder_and_a_device(pair: Pair, tmp_path: Path) -> None:
    reads, writes = os.pipe()
    folder = os.open(tmp_path, os.O_RDONLY)
    device = os.open("/dev/zero", os.O_RDONLY)
    places = [Place(each, os.fstat(each).st_ino, 0) for each in (reads, folder, device)]
    named = iter([*places, places[0]])
    pair.holder.store.place = lambda handle: next(named)  # type: ignore[method-assign]
    check_fallback(pair)
    for each in (reads, writes, folder, device):
        os.close(each)


def test_memory_that_holds_something_else(pair: Pair) -> None:
    """A wrong digest in shared memory is tried once more in chunks: whose fault it was cannot be told."""
    other = make_anchor(pair.holder.store, 2, blocks=4, block_kv_bytes=SMALL)
    place = pair.holder.store.place(other.handles[0])
    pair.point_to(place)
    check_fallback(pair)


@pytest.mark.parametrize("offset", [4 * SMALL, 2**31])
def test_an_offset_behind_the_end(pair: Pair, offset: int) -> None:
    place = pair.holder.store.place(pair.anchor.handles[0])
    assert place is not None
    pair.point_to(place._replace(offset=offset))
    check_fallback(pair)


def test_a_wrong_block_in_chunks_as_well_is_a_violation(pair: Pair) -> None:
    pair.point_to(Place(2**31 - 1, 1, 0))
    other = make_anchor(pair.holder.store, 2, blocks=4, block_kv_bytes=SMALL)
    view, wrong = pair.holder.store.view, pair.holder.store.view(other.handles[0])
    pair.holder.store.view = lambda handle: wrong if handle in pair.anchor.handles else view(handle)  # type: ignore[method-assign]
    result = fetch(pair.puller, pair.holder, pair.anchor)
    assert {miss.reason for miss in result.missed.values()} == {MissReason.DIGEST_MISMATCH}
    assert len(result.missed) == 4


def test_a_block_in_plain_memory_is_sent_to_who_asks_for_sharing(pair: Pair) -> None:
    """Anchors beyond the bound of descriptors, small ones, and what came over the network."""
    pair.point_to(None)
    check_whole(pair.puller, fetch(pair.puller, pair.holder, pair.anchor), 4)
    counted = wire(pair.puller)
    assert (counted.payload_bytes_received, counted.shared_blocks_refused) == (4 * SMALL, 0)


def test_shared_and_plain_blocks_in_one_pull(pair: Pair) -> None:
    place = pair.holder.store.place
    plain = pair.anchor.handles[1::2]
    pair.holder.store.place = lambda handle: None if handle in plain else place(handle)  # type: ignore[method-assign]
    check_whole(pair.puller, fetch(pair.puller, pair.holder, pair.anchor), 4)
    counted = wire(pair.puller)
    assert (counted.payload_bytes_received, counted.shared_bytes_adopted) == (2 * SMALL, 2 * SMALL)


@pytest.mark.parametrize("sharing", ["holder", "puller", "neither"])
def test_only_where_both_offer_it(sharing: str) -> None:
    def memory(name: str) -> SharedMemory | None:
        return SharedMemory() if name == sharing else None

    with (
        TestNode("holder", ZmqTransport(), shared=memory("holder")) as holder,
        TestNode("puller", ZmqTransport(), shared=memory("puller")) as puller,
    ):
        pair = Pair(holder, puller)
        check_whole(puller, fetch(puller, holder, pair.anchor), 4)
        assert wire(puller).payload_bytes_received == 4 * SMALL
        assert wire(puller).received["SharedBlocks"] == 0


def test_a_holder_that_shares_sends_to_who_does_not() -> None:
    hub = MemoryHub()
    with (
        TestNode("holder", MemoryTransport(hub), shared=SharedMemory()) as holder,
        TestNode("puller", MemoryTransport(hub)) as puller,
    ):
        pair = Pair(holder, puller)
        check_whole(puller, fetch(puller, holder, pair.anchor), 4)
        assert wire(puller).payload_bytes_received == 4 * SMALL
