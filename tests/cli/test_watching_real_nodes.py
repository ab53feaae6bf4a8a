"""kvcomm peers, doctor, metrics, record and replay on real agents with a tiny random model."""

from __future__ import annotations

import json
import stat
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Kvcomm, Process, eventually

from kvcomm_p2p.local_api import request
from kvcomm_p2p.net.recorder import read_recording, replay

pytestmark = pytest.mark.timeout(300)  # processes that load torch, on machines that do other things meanwhile

TEXT = "The quick brown fox jumps over the lazy dog. " * 6


@pytest.fixture
def cluster(real_kvcomm: Kvcomm, tiny_model: Path, tmp_path: Path) -> Iterator[tuple[Kvcomm, Process]]:
    """agent-1 has read TEXT, agent-2 has taken it from there."""
    environment = {"KVCOMM_METRICS_PORT": "any", "KVCOMM_LOG": "json", "KVCOMM_LOG_LEVEL": "debug"}
    arguments = ("up", "-n", "2", "--json", "--model", str(tiny_model), "--record", str(tmp_path / "recordings"))
    up = real_kvcomm.start(*arguments, **environment)
    up.wait_for("all_ready")
    for name in ("agent-1", "agent-2"):
        assert eventually(lambda name=name: len(peers(real_kvcomm, name)["peers"]) == 1)
    ask(real_kvcomm, "agent-1")
    assert eventually(lambda: peers(real_kvcomm, "agent-2")["peers"][0]["anchors"] > 0)
    ask(real_kvcomm, "agent-2")
    yield real_kvcomm, up


def tell(kvcomm: Kvcomm, name: str, **body: Any) -> dict[str, Any]:
    """The node's last answer, without a process in between."""
    *_, last = request(kvcomm.runtime_dir, name, body, timeout_s=60)
    return last


def peers(kvcomm: Kvcomm, name: str) -> Any:
    return tell(kvcomm, name, op="peers")["peers"]


def ask(kvcomm: Kvcomm, name: str) -> None:
    tell(kvcomm, name, op="ask", prompt=TEXT, slots={}, mode="balanced", sampling={"max_new_tokens": 2})


def test_what_nodes_tell_of_themselves(cluster: tuple[Kvcomm, Process], tmp_path: Path) -> None:
    kvcomm, up = cluster
    one, two = peers(kvcomm, "agent-1"), peers(kvcomm, "agent-2")
    [of_two], [of_one] = one["peers"], two["peers"]
    assert (of_two["node_id"], of_one["node_id"]) == (two["node_id"], one["node_id"])
    assert of_one["pulled_bytes"] == of_two["uploaded_bytes"]
    assert of_one["state"] == "alive" and of_one["model_id"] == one["model_id"]
    assert eventually(lambda: peers(kvcomm, "agent-1")["peers"][0]["round_trip_s"] is not None)
    text = kvcomm.run("peers", "agent-2").stdout
    assert "peers of agent-2" in text and "agent-1" in text and one["metrics_address"] not in text

    printed = kvcomm.run("metrics", "agent-2").stdout
    assert "kvcomm_requests_total 1.0" in printed
    with urllib.request.urlopen(f"http://{two['metrics_address']}/metrics", timeout=10) as answer:
        assert "kvcomm_requests_total 1.0" in answer.read().decode()

    doctor = kvcomm.run("doctor", "agent-2", "--prompt", TEXT, "--json")
    assert doctor.returncode == 1  # a tiny random model has no measured profile
    [found] = json.loads(doctor.stdout)["nodes"]
    problems = [each["check"] for each in found["findings"] if each["level"] == "problem"]
    assert problems == ["approximation"], found
    told = [each["text"] for each in found["findings"] if each["check"] == "this prompt"]
    # Which of the two depends on the machine: a tiny model computes as fast as it reads.
    assert any("would come from" in text or text.startswith("cost: ") for text in told), told

    copy = tmp_path / "copy.kvrec"
    done = kvcomm.run("record", "agent-2", "--to", str(copy), "--json")
    assert done.returncode == 0, done.stderr
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    replayed = kvcomm.run("replay", str(copy), "--json")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert json.loads(replayed.stdout)["events"] == json.loads(done.stdout)["events"] > 10

    assert up.interrupt() == 0
    recordings = sorted((tmp_path / "recordings").iterdir())
    assert len(recordings) == 2
    for path in recordings:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        outcome = replay(read_recording(path))
        assert (outcome.differs_at, outcome.end) == (None, "closed")
    for line in up.lines:
        assert "quick brown" not in line and "104, 101" not in line


def test_a_node_that_is_not_recorded_and_another_cluster_key(
    real_kvcomm: Kvcomm, tiny_model: Path, tmp_path: Path
) -> None:
    first = real_kvcomm.node("one", "--model", str(tiny_model))
    real_kvcomm.node(
        "two",
        *("--model", str(tiny_model), "--join", first.ready["address"]),
        KVCOMM_STATE_DIR=str(tmp_path / "other"),
    )
    done = real_kvcomm.run("record", "one", "--to", str(tmp_path / "x"))
    assert done.returncode == 1 and "start it with kvcomm node --record DIR" in done.stderr
    doctor = real_kvcomm.run("doctor", "one")
    assert doctor.returncode == 1
    assert "problem cluster key [two]: two has another cluster key" in doctor.stdout
    assert "problem peers: it knows no other node" in doctor.stdout
    assert "cluster.key" in doctor.stdout and "--join" in doctor.stdout
