"""Real processes that are killed, frozen, restarted, separated, or hear only some of what is said to them."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcomm_p2p.errors import KVCommError
from kvcomm_p2p.evaluation.cluster_failures import FREEZE_SHAPE
from kvcomm_p2p.evaluation.cluster_processes import Cluster, NodeProcess

CONFIG = {
    "gossip_interval_s": 0.05,
    "probe_interval_s": 0.2,
    "probe_timeout_s": 0.1,
    "recontact_s": 1.0,
    "join_retry_s": 0.05,
}
"""Five times as quick as the defaults, so that a test takes seconds."""

SHAPE = {"blocks": 4, "block_kv_bytes": 64 << 10}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Four nodes that know each other; node i holds anchors 100·i to 100·i + 9."""
    with Cluster(config=CONFIG) as four:
        four.grow(4)
        for index, node in enumerate(four.nodes):
            node.ask("publish", numbers=list(range(100 * index, 100 * index + 10)))
        four.all("wait", timeout_s=10, anchors=30)
        yield four


def holders(node: NodeProcess, *numbers: int) -> list[list[str]]:
    return [names for _, *names in node.ask("holders", numbers=list(numbers))["holders"]]


def soon(nodes: list[NodeProcess], expected: dict[int, list[str]], timeout_s: float = 10.0) -> None:
    """All of them find exactly these holders of these anchors before the time is up."""
    deadline = time.monotonic() + timeout_s
    while (found := [holders(node, *expected) for node in nodes]) != [[*expected.values()]] * len(nodes):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def check_health(cluster: Cluster) -> None:
    """No bug of ours was caught, nobody was taken for a liar."""
    for answer in cluster.all("stats"):
        assert (answer["failures"], answer["violations"], answer["fetches"]) == (0, 0, 0)


def test_a_killed_node_is_known_to_all_and_its_anchors_are_not_found(cluster: Cluster) -> None:
    victim = cluster.nodes[2]
    assert holders(cluster.nodes[0], 205) == [["node2"]]
    victim.kill()
    cluster.forget(victim)
    cluster.all("wait", timeout_s=15, gone="node2", alive=2)
    soon(cluster.nodes, {205: [], 105: ["node1"]})
    check_health(cluster)


def test_a_frozen_node_is_given_up_and_taken_back_when_it_wakes(cluster: Cluster) -> None:
    frozen, *others = cluster.nodes
    frozen.signal(signal.SIGSTOP)
    for node in others:
        node.begin("wait", timeout_s=20, gone="node0").result(25)
    frozen.signal(signal.SIGCONT)
    cluster.all("wait", timeout_s=20, alive=3)
    soon(cluster.nodes, {5: ["node0"]})
    check_health(cluster)


def test_a_node_that_restarts_with_its_state_is_the_same_without_what_it_held(cluster: Cluster, tmp_path: Path) -> None:
    (old,) = cluster.grow(1, name="kept", state_dir=str(tmp_path))
    old.ask("publish", numbers=[700])
    soon(cluster.nodes, {700: ["kept"]})
    ports = [int(address.rpartition(":")[2]) for address in old.addresses]
    old.kill()
    cluster.forget(old)
    (new,) = cluster.start(1, name="kept", state_dir=str(tmp_path), ports=ports)
    assert new.node_id == old.node_id
    new.ask("publish", numbers=[777])
    cluster.join([new])
    soon(cluster.nodes, {700: [], 777: ["kept"], 105: ["node1"]})
    for node in cluster.nodes:
        assert [peer[1] for peer in node.ask("peers")["peers"]].count(old.node_id) == (node is not new)
    check_health(cluster)


def test_a_node_that_was_killed_finds_the_others_again_without_a_seed(cluster: Cluster, tmp_path: Path) -> None:
    (old,) = cluster.grow(1, name="kept", state_dir=str(tmp_path))
    deadline = time.monotonic() + 20
    while not any('"127.0.0.1:' in path.read_text() for path in tmp_path.rglob("*.json")):
        assert time.monotonic() < deadline, "the addresses of its peers were not kept"
        time.sleep(0.1)
    old.kill()
    cluster.forget(old)
    cluster.all("wait", timeout_s=15, alive=3)
    (new,) = cluster.start(1, name="kept", state_dir=str(tmp_path))
    cluster.all("wait", timeout_s=20, alive=4)
    soon([new], {105: ["node1"], 305: ["node3"]})
    check_health(cluster)


def test_a_node_that_restarts_without_state_takes_its_place_at_once(cluster: Cluster) -> None:
    old = cluster.nodes[3]
    ports = [int(address.rpartition(":")[2]) for address in old.addresses]
    old.kill()
    cluster.forget(old)
    (new,) = cluster.start(1, name="node3", ports=ports)
    assert new.node_id != old.node_id
    cluster.join([new])
    new.ask("publish", numbers=[777])
    cluster.all("wait", timeout_s=15, alive=3)
    soon(cluster.nodes, {305: [], 777: ["node3"]})
    check_health(cluster)


def test_two_halves_that_changed_apart_agree_again(cluster: Cluster) -> None:
    left, right = cluster.nodes[:2], cluster.nodes[2:]
    for here, there in ((left, right), (right, left)):
        for node in here:
            node.ask("cut", addresses=[address for other in there for address in other.addresses])
    left[0].ask("forget", numbers=[0, 1, 2])
    left[0].ask("publish", numbers=[50])
    right[1].ask("forget", numbers=[300])
    for node in cluster.nodes:
        node.begin("wait", timeout_s=20, alive=1).result(25)
    assert holders(left[1], 0, 50, 205) == [[], ["node0"], []]
    assert holders(right[0], 50, 300) == [[], []]
    cluster.all("cut", addresses=[])
    cluster.all("wait", timeout_s=20, alive=3)
    soon(cluster.nodes, {0: [], 1: [], 2: [], 50: ["node0"], 300: [], 205: ["node2"], 5: ["node0"]})
    check_health(cluster)


def test_one_way_links_kill_nobody(cluster: Cluster) -> None:
    """A cannot reach B, everybody else can: others vouch for both."""
    first, second, *_ = cluster.nodes
    first.ask("cut", addresses=second.addresses)
    cluster.all("watch", on=True)
    time.sleep(4.0)  # twenty probe intervals
    for answer in cluster.all("history"):
        assert [change for change in answer["changes"] if change[2] in ("dead", "left")] == []
    first.ask("cut", addresses=[])
    check_health(cluster)


def test_with_a_tenth_of_all_frames_lost_everything_still_works(cluster: Cluster) -> None:
    spoiled = {"loss": 0.1, "repeat": 0.05, "reorder": 0.1, "reorder_s": 0.02}
    cluster.all("faults", control=spoiled, requests={"loss": 0.1})
    cluster.all("watch", on=True)
    for index, node in enumerate(cluster.nodes):
        node.ask("publish", numbers=[1000 + index], shape=SHAPE)
        node.ask("forget", numbers=[100 * index])
    for count in range(40):
        cluster.nodes[count % 4].ask("publish", numbers=[2000 + count])
        time.sleep(0.1)
    cluster.all("wait", timeout_s=15, anchors=60)
    for index, node in enumerate(cluster.nodes):
        holder = cluster.nodes[index - 1]
        for _ in range(5):
            answer = _fetch(node, holder, 1000 + cluster.nodes.index(holder))
            assert answer["found"] + sum(answer["missed"].values()) == 4
            assert answer["right"]
            assert answer["wait_lost_s"] <= 0.3
    # Whose request got lost has its holder in the penalty box, where lookups do not see it, for some seconds.
    soon(cluster.nodes, {0: [], 100: [], 200: [], 300: [], 5: ["node0"]}, timeout_s=30.0)
    for answer in cluster.all("history"):
        assert [change for change in answer["changes"] if change[2] in ("dead", "left")] == []
    assert sum(answer["lost"] for answer in cluster.all("stats")) > 20
    check_health(cluster)


def test_bulk_frames_that_get_lost_end_in_a_miss_not_in_a_wait(cluster: Cluster) -> None:
    holder, puller, *_ = cluster.nodes
    holder.ask("publish", numbers=[1000], shape=SHAPE)
    holder.ask("faults", replies={"loss": 0.5})
    for _ in range(4):
        answer = _fetch(puller, holder, 1000)
        assert answer["found"] + sum(answer["missed"].values()) == 4
        assert answer["right"]
    holder.ask("faults")
    assert all(answer["failures"] == 0 for answer in cluster.all("stats"))


def test_a_holder_frozen_in_the_middle_of_a_pull_costs_a_quarter_second(cluster: Cluster) -> None:
    holder, puller, *_ = cluster.nodes
    holder.ask("publish", numbers=[1000], shape=FREEZE_SHAPE)
    strike = {"pid": holder.pid, "name": "SIGSTOP", "after_bytes": 4 << 20}
    answer = puller.ask("fetch", holder=holder.node_id, number=1000, shape=FREEZE_SHAPE, strike=strike)
    assert answer["struck_at"] and answer["missed"] and answer["right"]
    assert 0.1 < answer["wait_lost_s"] <= 0.25


def test_processes_end_with_who_started_them() -> None:
    with Cluster() as cluster:
        (node,) = cluster.start()
        node.signal(signal.SIGSTOP)
    assert node._process.poll() is not None
    with pytest.raises(KVCommError, match="has ended"):
        node.ask("stats")


def _fetch(puller: NodeProcess, holder: NodeProcess, number: int) -> dict[str, Any]:
    return puller.ask("fetch", holder=holder.node_id, number=number, shape=SHAPE, deadline_s=5.0)
