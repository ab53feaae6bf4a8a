"""A process that runs out of descriptors, memory regions or disk, or forks: the node goes on, and says what it could not do."""

from __future__ import annotations

import errno
import logging
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from net_nodes import CONFIG, TestNode, block_bytes, make_anchor, wait_until, wants_of

from kvcomm_p2p.net import shared_memory
from kvcomm_p2p.net.recorded_nodes import RecordedNode
from kvcomm_p2p.net.recorder import Recorder, read_recording, replay
from kvcomm_p2p.net.shared_memory import REGION_BYTES_MIN, Draft, NotShared, SharedMemory
from kvcomm_p2p.net.zmq_transport import ZmqTransport
from kvcomm_p2p.protocol import events as ev
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.messages import MemberRecord

FOLDER = Path(__file__).parent


def script(text: str, *arguments: str) -> str:
    """Run a program of its own; returns what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(FOLDER)}
    done = subprocess.run(
        [sys.executable, "-c", text, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# ---------------------------------------------------------------------------------------------------------- descriptors

NO_DESCRIPTORS = """
import os, resource, socket, sys
from net_nodes import TestNode, make_anchor, wait_until, wants_of
from kvcomm_p2p.net.zmq_transport import ZmqTransport

def fetch(puller, holder, anchor):
    found = puller.driver.run(puller.driver.fetch(holder.driver.node_id, wants_of(anchor), 5.0)).result(10)
    for handle in found.found.values():
        puller.store.drop(handle)
    return len(found.found)

with TestNode("holder", ZmqTransport()) as holder, TestNode("puller", ZmqTransport()) as puller:
    puller.join(holder.driver.addresses.control)
    anchors = [make_anchor(holder.store, number) for number in (1, 2)]
    holder.hold(anchors[0])
    assert fetch(puller, holder, anchors[0]) == 4
    kept = []
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 8, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    try:
        while True:
            kept.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    # Connections that exist go on; what is new is refused, and nothing breaks.
    holder.hold(anchors[1])
    assert fetch(puller, holder, anchors[0]) == fetch(puller, holder, anchors[1]) == 4
    joined = puller.driver.run(puller.driver.join(["127.0.0.1:9"], 0.3)).result(5)
    assert not isinstance(joined.result, int)
    os.close(kept.pop())
    puller.driver.run(puller.driver.join(["127.0.0.1:9"], 0.3)).result(5)
    for each in kept:
        os.close(each)
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    with TestNode("late", ZmqTransport()) as late:
        assert late.join(holder.driver.addresses.control).result >= 1
        assert fetch(late, holder, anchors[0]) == 4
    failures = [node.ask(lambda driver: driver.stats().wire.failures) for node in (holder, puller)]
    print("failures", failures)
print("ended")
"""


def test_a_full_table_of_descriptors_breaks_nothing_that_exists_and_is_over_when_there_is_room() -> None:
    assert script(NO_DESCRIPTORS).split("\n")[:2] == ["failures [0, 0]", "ended"]


# ---------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize(
    "error", [PermissionError(errno.EPERM, "not allowed"), OSError(errno.ENOSYS, "none"), OSError(24, "x")]
)
def test_memory_that_the_system_refuses_from_now_on_is_plain_and_blocks_are_sent(
    monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    with (
        TestNode("holder", ZmqTransport(), shared=SharedMemory()) as holder,
        TestNode("puller", ZmqTransport(), shared=SharedMemory()) as puller,
    ):
        puller.join(holder.driver.addresses.control)
        before = make_anchor(holder.store, 1)
        holder.hold(before)

        def refused(*_: object, **__: object) -> int:
            raise type(error)(*error.args)  # the parameter itself would keep this test's frames, and regions, for good

        shared_memory._device.cache_clear()
        with monkeypatch.context() as patched:
            patched.setattr(shared_memory.os, "memfd_create", refused)
            after = make_anchor(holder.store, 2)
            holder.hold(after)
            for anchor, number in ((before, 1), (after, 2)):
                result = puller.driver.run(puller.driver.fetch(holder.driver.node_id, wants_of(anchor), 5.0)).result(10)
                assert len(result.found) == 4 and result.wait_lost_s == 0.0
                for key, handle in result.found.items():
                    assert puller.store.view(handle) == block_bytes(1 << 16, number, key.index)
                    puller.store.drop(handle)
        shared_memory._device.cache_clear()
        for node in (holder, puller):
            assert node.ask(lambda driver: driver.stats().wire.failures) == 0


def test_regions_that_go_while_they_are_opened_are_refused_or_whole() -> None:
    """A maker closes and makes regions, and other files under the same numbers, as fast as it can; whoever opens what was
    offered gets the offered bytes or NotShared, and leaves nothing open."""
    memory, stop = SharedMemory(), threading.Event()
    offered: list[tuple[int, int]] = []

    def churn() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            draft = Draft([REGION_BYTES_MIN])
            draft.buffers[0][:8] = number.to_bytes(8, "little")
            region = draft.seal()
            draft.buffers.clear()
            offered[:] = [(region.descriptor, region.file_id)]
            others = [os.open("/dev/null", os.O_RDONLY) for _ in range(number % 3)]
            region.close()
            for other in others:
                os.close(other)

    def open_descriptors() -> int:
        return sum(1 for _ in Path("/proc/self/fd").iterdir())

    before = open_descriptors()
    maker = threading.Thread(target=churn)
    maker.start()
    opened = refused = 0
    try:
        while opened + refused < 3000:
            if not offered:
                continue
            descriptor, file_id = offered[0]
            try:
                region = memory.attach(os.getpid(), descriptor, file_id, REGION_BYTES_MIN)
            except NotShared:
                refused += 1
                continue
            opened += 1
            assert region.file_id == file_id and region.size >= REGION_BYTES_MIN and region.view.readonly
            assert int.from_bytes(region.view[:8], "little") > 0
            memory.leave(region)
    finally:
        stop.set()
        maker.join()
    assert refused > 0 and memory.regions == 0
    assert wait_until(lambda: open_descriptors() <= before)


# ------------------------------------------------------------------------------------------------------------------ disk


def test_a_disk_that_is_full_ends_the_recording_and_not_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(tmp_path / "r.kvrec")
    me = MemberRecord(NodeId(b"n" * 16), 1, "n", bytes(16), "127.0.0.1:1", "127.0.0.1:2")
    node = RecordedNode(CONFIG, me=me, rng=random.Random(1), now=0.0, recorder=recorder)
    for step in range(20):
        node.handle(ev.TimerExpired(), step / 10)
    recorder.flush()

    class Full:
        def write(self, content: bytes) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def close(self) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    whole = recorder._file
    monkeypatch.setattr(recorder, "_file", Full())
    for step in range(20, 60):
        node.handle(ev.TimerExpired(), step / 10)
    recorder.close()
    assert [entry.levelno for entry in caplog.records] == [logging.ERROR] and "No space left" in caplog.text
    assert whole is not None
    whole.close()
    recording = read_recording(tmp_path / "r.kvrec")
    assert recording.end == "" and len(recording.steps) >= 20 and replay(recording).differs_at is None


# ---------------------------------------------------------------------------------------------------------------- forks

FORK = """
import os, sys, time
from pathlib import Path
from net_nodes import CONFIG, TestNode, make_anchor, wait_until, wants_of
from kvcomm_p2p.errors import UsageError
from kvcomm_p2p.net.durable import open_life
from kvcomm_p2p.net.recorder import Recorder, read_recording
from kvcomm_p2p.net.zmq_transport import ZmqTransport
from kvcomm_p2p.net.shared_memory import SharedMemory
from kvcomm_p2p.protocol.events import SaveState

folder = Path(sys.argv[1])
life = open_life(folder, "default", "parent")
recorder = Recorder(folder / "r.kvrec")
recorder._write({"format": "test"})
with (
    TestNode("parent", ZmqTransport(), life=life, shared=SharedMemory()) as node,
    TestNode("peer", ZmqTransport(), shared=SharedMemory()) as peer,
):
    peer.join(node.driver.addresses.control)
    anchor = make_anchor(node.store, 1)
    node.hold(anchor)
    (path,) = (folder / "nodes").glob("*.json")
    assert wait_until(lambda: peer.driver.addresses.control in path.read_text(), 10.0)
    saved = path.read_bytes()
    life._mutex.acquire()  # as if a thread that does not exist in the child were writing just now
    child = os.fork()
    if not child:
        # What a library that forks does: use what it has inherited, clean up, leave in the ordinary way.
        try:
            node.driver.run(node.driver.find(None))
        except UsageError as error:
            assert "forked" in str(error)
        else:
            os._exit(7)
        life.save(SaveState(99, 99, ()))
        life.save_erasures(b"x")
        node.driver.stop()
        life.close()
        recorder.close()
        sys.exit(0)
    life._mutex.release()
    _, status = os.waitpid(child, 0)
    print("child", os.waitstatus_to_exitcode(status))
    assert path.read_bytes() == saved, "the child wrote the state of its parent"
    for _ in range(3):
        found = peer.driver.run(peer.driver.fetch(node.driver.node_id, wants_of(anchor), 5.0)).result(10)
        assert len(found.found) == 4, found.missed
        for handle in found.found.values():
            peer.store.drop(handle)
    time.sleep(2.0)
    assert [view.state for view in peer.ask(lambda driver: driver.peers())] == ["alive"]
    assert node.ask(lambda driver: driver.stats().wire.failures) == 0
recorder.close()
from kvcomm_p2p.net.recorder import _packed
print("records", len(list(_packed(folder / "r.kvrec"))))
"""


def test_a_child_that_was_forked_breaks_nothing_of_its_parents(tmp_path: Path) -> None:
    """It may not use the node; stopping it, closing its state and leaving change nothing."""
    assert script(FORK, str(tmp_path)).split("\n")[:2] == ["child 0", "records 2"]
