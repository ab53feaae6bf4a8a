"""A holder in another process that is killed or frozen in the middle of a pull."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from net_nodes import TestNode, block_bytes, describe, wait_until, wants_of

from kvcomm_p2p.net.driver import FetchResult
from kvcomm_p2p.net.zmq_transport import ZmqTransport
from kvcomm_p2p.protocol.anchors import BlockHandle, MissReason
from kvcomm_p2p.protocol.ids import NodeId

BLOCKS, BLOCK_BYTES = 16, 4 << 20
"""64 MiB: four windows of credit, so the holder is needed until the end."""


@contextmanager
def holder_process(*options: str) -> Iterator[tuple[int, str]]:
    """(pid, control address) of a process that holds anchor 1."""
    script = Path(__file__).with_name("holder_process.py")
    process = subprocess.Popen(
        [sys.executable, str(script), "1", str(BLOCKS), str(BLOCK_BYTES), *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address, "the holder did not start"
        yield process.pid, address
    finally:
        process.kill()
        process.communicate()


def pull_while(puller: TestNode, holder: NodeId, on_first_block: Callable[[], None]) -> tuple[FetchResult, float]:
    """Fetch the whole anchor; `on_first_block` runs when the first one arrives. Seconds from then to the result."""
    happened: list[float] = []
    write = puller.store.write

    def watched(handle: BlockHandle, offset: int, payload: bytes | memoryview) -> None:
        write(handle, offset, payload)
        if not happened:
            on_first_block()
            happened.append(time.monotonic())

    puller.store.write = watched  # type: ignore[method-assign]
    wants = wants_of(describe(1, BLOCKS, BLOCK_BYTES))
    result = puller.driver.run(puller.driver.fetch(holder, wants, 20.0)).result(30)
    return result, time.monotonic() - happened[0]


def the_holder(puller: TestNode) -> NodeId:
    (peer,) = puller.ask(lambda driver: driver.peers())
    return peer.node_id


def check_outcome(puller: TestNode, result: FetchResult) -> None:
    """Every block is found or missed, what was found is right, and nothing stays reserved."""
    assert len(result.found) + len(result.missed) == BLOCKS
    for key, handle in result.found.items():
        assert puller.store.view(handle) == block_bytes(BLOCK_BYTES, 1, key.index)
        puller.store.drop(handle)
    assert (len(puller.store), puller.store.held_bytes, puller.store.reserved_bytes) == (0, 0, 0)


def test_whole_pull_from_another_process() -> None:
    with holder_process() as (_, address), TestNode("puller", ZmqTransport()) as puller:
        assert puller.join(address).result == 1
        result, _ = pull_while(puller, the_holder(puller), lambda: None)
        assert (len(result.found), result.wait_lost_s) == (BLOCKS, 0.0)
        check_outcome(puller, result)


def test_killed_holder_is_noticed_at_once() -> None:
    with holder_process() as (pid, address), TestNode("puller", ZmqTransport()) as puller:
        puller.join(address)
        result, seconds = pull_while(puller, the_holder(puller), lambda: os.kill(pid, signal.SIGKILL))
        # UNREACHABLE, not STALLED: the closed connection was noticed before the time without progress was up.
        assert {miss.reason for miss in result.missed.values()} == {MissReason.UNREACHABLE}
        assert result.wait_lost_s <= 0.2
        assert seconds < 1.0
        check_outcome(puller, result)


def test_frozen_holder_costs_a_quarter_second_once() -> None:
    with holder_process() as (pid, address), TestNode("puller", ZmqTransport()) as puller:
        puller.join(address)
        holder = the_holder(puller)
        result, _ = pull_while(puller, holder, lambda: os.kill(pid, signal.SIGSTOP))
        assert {miss.reason for miss in result.missed.values()} == {MissReason.STALLED}
        assert 0.15 < result.wait_lost_s <= 0.25
        check_outcome(puller, result)
        again = puller.driver.run(puller.driver.fetch(holder, wants_of(describe(1, 1, BLOCK_BYTES)), 5.0)).result(10)
        assert (again.found, again.wait_lost_s) == ({}, 0.0)


def test_killed_holder_is_suspect_without_being_asked() -> None:
    with holder_process() as (pid, address), TestNode("puller", ZmqTransport()) as puller:
        puller.join(address)
        os.kill(pid, signal.SIGKILL)
        # Next gossip to it is refused; it need not wait for a probe to fail.
        assert wait_until(lambda: puller.ask(lambda driver: driver.peers())[0].state == "suspect", 2.0)


@pytest.mark.parametrize("stopped", [False, True])
def test_stopping_beside_a_frozen_peer_does_not_hang(stopped: bool) -> None:
    with holder_process() as (pid, address):
        with TestNode("puller", ZmqTransport()) as puller:
            puller.join(address)
            if stopped:
                os.kill(pid, signal.SIGSTOP)
            began = time.monotonic()
        assert time.monotonic() - began < 2.0
