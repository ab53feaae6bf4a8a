"""What outlives a node's process, and what a lost, damaged or rolled back file does not break."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from net_nodes import TestNode, wait_until

from kvcomm_p2p.errors import ConfigError, NameTakenError
from kvcomm_p2p.net.durable import ADDRESSES_MAX, NodeLife, open_life
from kvcomm_p2p.net.zmq_transport import ZmqTransport
from kvcomm_p2p.protocol.events import SaveState
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.views import PeerView


def state_file(state_dir: Path) -> Path:
    (path,) = (state_dir / "nodes").glob("*.json")
    return path


def test_each_life_is_the_same_node_in_a_higher_epoch(tmp_path: Path) -> None:
    first = open_life(tmp_path, "default", "planner")
    first.save(SaveState(first.epoch, 3, ("10.0.0.1:1", "10.0.0.2:2")))
    expected = first.node_id, first.epoch + 1, 3
    del first  # not closed: as a killed process leaves it
    gc.collect()
    second = open_life(tmp_path, "default", "planner")
    assert (second.node_id, second.epoch, second.incarnation) == expected
    assert second.addresses == ("10.0.0.1:1", "10.0.0.2:2")
    second.close()
    third = open_life(tmp_path, "default", "planner")
    assert (third.node_id, third.epoch) == (second.node_id, second.epoch + 1)
    assert third.addresses == (), "who left on purpose does not come back by itself"
    third.close()
    third.close()
    others = [open_life(tmp_path, *names) for names in (("default", "coder"), ("other", "planner"))]
    assert len({third.node_id, *(other.node_id for other in others)}) == 3


def test_counters_never_fall_and_addresses_are_few(tmp_path: Path) -> None:
    life = open_life(tmp_path, "default", "a")
    life.save(SaveState(9, 4, ()))
    life.save(SaveState(9, 2, tuple(f"10.0.0.1:{port}" for port in range(1, 200))))
    life.save(SaveState(8, 7, ()))
    saved = json.loads(state_file(tmp_path).read_text())
    assert (saved["epoch"], saved["incarnation"]) == (9, 4)
    life.save(SaveState(9, 4, tuple(f"10.0.0.1:{port}" for port in range(1, 200))))
    assert len(json.loads(state_file(tmp_path).read_text())["addresses"]) == ADDRESSES_MAX
    life.close()


def test_two_processes_of_one_name_are_not_one_node(tmp_path: Path) -> None:
    first = open_life(tmp_path, "default", "a")
    second = open_life(tmp_path, "default", "a")
    assert second.node_id != first.node_id and not second.is_kept
    second.save(SaveState(99, 99, ("10.0.0.1:1",)))
    second.close()
    first.close()
    again = open_life(tmp_path, "default", "a")
    assert (again.node_id, again.epoch) == (first.node_id, 2)
    again.close()
    mine = NodeId(b"n" * 16)
    keyed = open_life(tmp_path, "default", "b", mine)
    with pytest.raises(NameTakenError, match="'b'"):
        open_life(tmp_path, "default", "b", mine)
    keyed.close()


def test_an_id_that_follows_from_keys_wins_over_the_file(tmp_path: Path) -> None:
    open_life(tmp_path, "default", "a").close()
    keyed = open_life(tmp_path, "default", "a", NodeId(b"n" * 16))
    assert (keyed.node_id, keyed.epoch) == (b"n" * 16, 1)
    keyed.close()
    again = open_life(tmp_path, "default", "a", NodeId(b"n" * 16))
    assert again.epoch == 2
    again.close()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "\0" * len(text),
        lambda text: text.replace('"epoch":1', '"epoch":-1'),
        lambda text: text.replace('"version":1', '"version":99'),
        lambda text: text.replace('"epoch":1', '"epoch":9223372036854775807'),
    ],
)
def test_a_damaged_file_makes_a_new_node(tmp_path: Path, spoil: Callable[[str], str]) -> None:
    first = open_life(tmp_path, "default", "a")
    first.close()
    path = state_file(tmp_path)
    path.write_text(spoil(path.read_text()))
    second = open_life(tmp_path, "default", "a")
    assert second.node_id != first.node_id and second.epoch == 1
    second.close()
    third = open_life(tmp_path, "default", "a")
    assert (third.node_id, third.epoch) == (second.node_id, 2)
    third.close()


def test_a_folder_that_cannot_be_used_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("in the way")
    with pytest.raises(ConfigError, match="KVCOMM_STATE_DIR"):
        open_life(tmp_path, "default", "a")


# ------------------------------------------------------------------------------------------------------ real processes


@contextmanager
def living(state_dir: Path, name: str, *seeds: str) -> Iterator[tuple[int, str]]:
    """(pid, control address) of a node in a process of its own that keeps its state."""
    script = Path(__file__).with_name("living_process.py")
    process = subprocess.Popen(
        [sys.executable, str(script), str(state_dir), name, *seeds],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address, "the node did not start"
        yield process.pid, address
    finally:
        process.kill()
        process.communicate()


def address_of(node: TestNode) -> str:
    return node.driver.addresses.control


def peer_at(node: TestNode, address: str) -> PeerView | None:
    return next((peer for peer in node.ask(lambda driver: driver.peers()) if peer.control == address), None)


def is_alive_at(node: TestNode, address: str) -> bool:
    peer = peer_at(node, address)
    return peer is not None and peer.state == "alive"


def test_a_killed_node_is_let_in_at_once_under_its_name_on_another_port(tmp_path: Path) -> None:
    with TestNode("watcher", ZmqTransport()) as watcher:
        seed = address_of(watcher)
        with living(tmp_path, "agent", seed) as (pid, before):
            assert wait_until(lambda: is_alive_at(watcher, before), 5.0)
            os.kill(pid, signal.SIGKILL)
        with living(tmp_path, "agent", seed) as (_, after):
            # The address is printed when the join was answered.
            assert after != before and is_alive_at(watcher, after)
            (peer,) = watcher.ask(lambda driver: driver.peers())
            assert peer.name == "agent"


def test_a_killed_seed_finds_its_cluster_again_by_itself(tmp_path: Path) -> None:
    """Nobody knows its new port, and nobody told it to join; it remembers where its peers were."""
    with living(tmp_path, "seed") as (pid, before), TestNode("member", ZmqTransport()) as member:
        member.join(before)
        saved = lambda: json.loads(state_file(tmp_path).read_text())["addresses"]  # noqa: E731
        assert wait_until(lambda: saved() == [address_of(member)], 10.0)
        os.kill(pid, signal.SIGKILL)
        with living(tmp_path, "seed") as (_, after):
            assert wait_until(lambda: is_alive_at(member, after), 5.0)


def test_a_node_whose_disk_was_rolled_back_goes_on(tmp_path: Path) -> None:
    with TestNode("watcher", ZmqTransport()) as watcher:
        seed = address_of(watcher)
        life = open_life(tmp_path, "default", "agent")
        old = state_file(tmp_path).read_bytes()
        life.close()
        for _ in range(3):
            with living(tmp_path, "agent", seed) as (_, address):
                assert is_alive_at(watcher, address)
        state_file(tmp_path).write_bytes(old)
        with TestNode("agent", ZmqTransport(), life=rolled_back(tmp_path)) as node:
            node.join(seed)
            assert wait_until(lambda: is_alive_at(watcher, address_of(node)), 5.0)
            assert wait_until(lambda: json.loads(state_file(tmp_path).read_text())["epoch"] > 4, 5.0)


def rolled_back(state_dir: Path) -> NodeLife:
    life = open_life(state_dir, "default", "agent")
    assert life.epoch == 2, "others have seen 4"
    return life


def test_a_frozen_node_returns_and_takes_nobody_for_dead(tmp_path: Path) -> None:
    with (
        TestNode("watcher", ZmqTransport()) as watcher,
        living(tmp_path, "agent", address_of(watcher)) as (pid, address),
    ):
        assert wait_until(lambda: is_alive_at(watcher, address), 5.0)
        os.kill(pid, signal.SIGSTOP)
        assert wait_until(lambda: not is_alive_at(watcher, address), 8.0), "it is suspected"
        time.sleep(0.5)
        os.kill(pid, signal.SIGCONT)
        assert wait_until(lambda: is_alive_at(watcher, address), 5.0)
