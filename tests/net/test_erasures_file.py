"""Erasures on disk: whole or not at all, of one secret, readable by their owner alone, and never a reason not to start."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from net_nodes import CONFIG, KEYS, TestNode, make_anchor

from kvcomm_p2p.errors import ConfigError
from kvcomm_p2p.net import private_files
from kvcomm_p2p.net.durable import NodeLife, open_life
from kvcomm_p2p.net.memory_transport import MemoryHub, MemoryTransport
from kvcomm_p2p.protocol.erasure_memory import ErasureMemory, count_packed
from kvcomm_p2p.protocol.erasure_names import stretches
from kvcomm_p2p.protocol.events import SaveState
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.messages import Erasure

KEY = KEYS.erasing


def packed(count: int = 3) -> bytes:
    memory = ErasureMemory()
    for number in range(count):
        memory.add(Erasure(bytes([number]) * 16, NodeId(b"a" * 16), 0.0, 8, bytes([number]) * 8), 0.0, told=True)
    return memory.pack(0.0)


def opened(state_dir: Path, key: bytes = KEY) -> NodeLife:
    return open_life(state_dir, "default", "a", erasing_key=key)


def file_of(state_dir: Path) -> Path:
    (path,) = (state_dir / "nodes").glob("*.erased")
    return path


def test_the_next_life_begins_with_them(tmp_path: Path) -> None:
    first = opened(tmp_path)
    assert first.erasures == b""
    first.save_erasures(packed())
    assert stat.S_IMODE(file_of(tmp_path).stat().st_mode) == 0o600
    second_process = opened(tmp_path)
    assert not second_process.is_kept and second_process.erasures == packed(), (
        "it obeys, too, but leaves nothing behind"
    )
    second_process.save_erasures(packed(1))
    second_process.close()
    first.close()
    first.save_erasures(packed(1))
    again = opened(tmp_path)
    assert again.erasures == packed()
    again.close()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda raw: raw[: len(raw) // 2],
        lambda raw: b"",
        lambda raw: bytes(len(raw)),
        lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]),
        lambda raw: raw.replace(b"erasures 1", b"erasures 2"),
        lambda raw: raw + b"more",
    ],
)
def test_a_damaged_file_is_said_clearly_and_the_node_starts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil: Callable[[bytes], bytes]
) -> None:
    first = opened(tmp_path)
    first.save_erasures(packed())
    first.close()
    path = file_of(tmp_path)
    path.write_bytes(spoil(path.read_bytes()))
    second = opened(tmp_path)
    assert second.erasures == b"" and second.epoch == 2
    [message] = [entry.getMessage() for entry in caplog.records if entry.levelno == logging.ERROR]
    assert str(path) in message and "kvcomm forget" in message
    second.close()


def test_after_an_exchange_of_the_secret_it_is_said_that_they_mean_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = opened(tmp_path)
    first.save_erasures(packed())
    first.close()
    second = opened(tmp_path, b"another key 1234")
    assert second.erasures == b"" and "3 erasures" in caplog.text and "kvcomm forget" in caplog.text
    second.close()


def test_a_file_that_others_can_read_is_refused_with_the_fix(tmp_path: Path) -> None:
    first = opened(tmp_path)
    first.save_erasures(packed())
    first.close()
    file_of(tmp_path).chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        opened(tmp_path)


# ------------------------------------------------------------------------------------------------ disks and crashes


class Crash(BaseException):
    """The process is killed here."""


STEPS = ("open", "write", "fsync", "rename", "fsync folder")


def crash_at(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """The next `write_private` dies at this step, as if the process were killed: no cleaning up happens either."""

    def die(*_: object, **__: object) -> None:
        raise Crash

    monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)
    if step == "open":
        monkeypatch.setattr(private_files.os, "open", die)
    elif step == "write":
        whole = os.fdopen

        class Half:
            def __init__(self, descriptor: int, mode: str) -> None:
                self._file = whole(descriptor, mode)

            def __enter__(self) -> Half:
                return self

            def __exit__(self, *_: object) -> None:
                self._file.close()

            def write(self, content: bytes) -> None:
                self._file.write(content[: len(content) // 2])
                self._file.flush()
                raise Crash

        monkeypatch.setattr(private_files.os, "fdopen", Half)
    elif step == "fsync":
        monkeypatch.setattr(private_files.os, "fsync", die)
    elif step == "rename":
        monkeypatch.setattr(Path, "replace", die)
    else:
        monkeypatch.setattr(private_files, "_sync_folder", die)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("what", ["state", "erasures"])
def test_a_process_that_is_killed_while_it_saves_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, what: str
) -> None:
    life = opened(tmp_path)
    life.save(SaveState(5, 2, ("10.0.0.1:1",)))
    life.save_erasures(packed(2))
    with monkeypatch.context() as patched, pytest.raises(Crash):
        crash_at(patched, step)
        if what == "state":
            life.save(SaveState(9, 4, ("10.0.0.2:2",)))
        else:
            life.save_erasures(packed(3))
    life._unlock()  # type: ignore[misc]
    again = opened(tmp_path)
    done = step == "fsync folder"
    assert again.node_id == life.node_id
    assert again.epoch == (10 if done and what == "state" else 6)
    assert count_packed(again.erasures) == (3 if done and what == "erasures" else 2)
    again.close()
    assert not [path for path in (tmp_path / "nodes").iterdir() if path.name.startswith(".")], "what was left is gone"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EMFILE])
def test_a_full_disk_is_said_and_the_node_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    life = opened(tmp_path)
    life.save_erasures(packed(2))

    def full(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(private_files.os, "fsync", full)
        life.save(SaveState(9, 4, ()))
        life.save_erasures(packed(3))
    assert "could not be saved" in caplog.text and os.strerror(number) in caplog.text
    life.save(SaveState(9, 4, ()))  # there is room again
    life.save_erasures(packed(3))
    life.close()
    again = opened(tmp_path)
    assert (again.epoch, count_packed(again.erasures)) == (10, 3)
    again.close()


# ------------------------------------------------------------------------------------------------------ real drivers


def node(state_dir: Path, hub: MemoryHub) -> TestNode:
    config = replace(CONFIG, erasing_key=KEY)
    return TestNode("a", MemoryTransport(hub), config=config, life=opened(state_dir))


@pytest.mark.parametrize("killed", [False, True])
def test_it_is_on_disk_when_forgetting_returns(tmp_path: Path, killed: bool) -> None:
    hub = MemoryHub()
    with node(tmp_path, hub) as first:
        anchor = make_anchor(first.store, 1)
        first.hold(anchor)
        tokens, hashes = stretches([np.asarray(anchor.token_ids)], KEY)
        erasures = [Erasure(os.urandom(16), first.driver.node_id, 0.0, tokens, each) for each in hashes]
        assert first.driver.run(first.driver.erase(erasures, everywhere=False)).result(5) == 1
        on_disk = file_of(tmp_path).read_bytes()
    if killed:
        file_of(tmp_path).write_bytes(on_disk)
    with node(tmp_path, hub) as second:
        second.hold(make_anchor(second.store, 1))
        assert second.ask(lambda driver: driver.stats().node.pool_anchors) == 0
        second.hold(make_anchor(second.store, 2, blocks=3))  # its token ids are the beginning of the same
        assert second.ask(lambda driver: driver.stats().node.pool_anchors) == 0
        assert second.ask(lambda driver: driver.stats().store_blocks) == 0
