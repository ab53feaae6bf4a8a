from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import Kvcomm

from kvcomm_p2p.cli.peers import remarks


def test_the_table_says_who_is_there_and_what_passed(kvcomm: Kvcomm) -> None:
    kvcomm.node("coder")
    done = kvcomm.run("peers", "coder")
    assert (done.returncode, done.stderr) == (0, "")
    for expected in ("peers of coder", "planner", "abababab", "alive", "another", "4/9", "8 of 9", "46.1 kB", "2.0 ms"):
        assert expected in done.stdout, expected
    told = "planner: missed busy 5, stalled 2; busy 3 times for us, 0 we for it; 2 penalties, not asked for another 12.00 s; "
    assert told + "1 violation" in done.stdout
    assert "metrics: http://127.0.0.1:9/metrics" in done.stdout


def test_json_holds_everything(kvcomm: Kvcomm) -> None:
    kvcomm.node("coder")
    kvcomm.node("lonely")
    told = json.loads(kvcomm.run("peers", "--json").stdout)
    assert [node["name"] for node in told["nodes"]] == ["coder", "lonely"]
    assert told["nodes"][0]["peers"][0]["misses"] == {"stalled": 2, "busy": 5}
    assert told["nodes"][1]["peers"] == []


def test_nobody_is_told_how_to_join(kvcomm: Kvcomm) -> None:
    alone = kvcomm.node("lonely")
    assert f"--join {alone.ready['address']}" in kvcomm.run("peers").stdout


def test_no_node_and_an_unknown_one(kvcomm: Kvcomm) -> None:
    nothing = kvcomm.run("peers")
    assert nothing.returncode == 0
    assert "start one: kvcomm node" in nothing.stderr
    kvcomm.node("coder")
    for command in (
        ("peers", "nobody"),
        ("metrics", "nobody"),
        ("doctor", "nobody"),
        ("record", "nobody", "--to", "/tmp/x"),
    ):
        done = kvcomm.run(*command)
        assert done.returncode == 1
        assert "no node named 'nobody' runs here (these run: coder)" in done.stderr


def test_metrics_are_printed_as_they_are(kvcomm: Kvcomm) -> None:
    kvcomm.node("coder")
    assert kvcomm.run("metrics", "coder").stdout == "kvcomm_requests_total 3.0\n"


def test_a_node_that_is_not_recorded(kvcomm: Kvcomm, tmp_path: Path) -> None:
    kvcomm.node("coder")
    done = kvcomm.run("record", "coder", "--to", str(tmp_path / "x"), "--seconds", "30")
    assert done.returncode == 1  # at once, not after 30 s
    assert "is not being recorded" in done.stderr


@pytest.mark.parametrize(("name", "content"), [("none", None), ("text", b"hello")])
def test_what_cannot_be_replayed(kvcomm: Kvcomm, tmp_path: Path, name: str, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    done = kvcomm.run("replay", str(tmp_path / name))
    assert done.returncode == 1
    assert "cannot be read" in done.stderr if content is None else "is not a recording" in done.stderr


def test_redact_needs_a_recording(kvcomm: Kvcomm) -> None:
    done = kvcomm.run("node", "--name", "x", "--redact")
    assert done.returncode == 2
    assert "--record DIR" in done.stderr


def test_of_a_peer_with_which_nothing_went_wrong_nothing_is_said() -> None:
    quiet = dict.fromkeys(("busy_told", "busy_given", "penalties", "violations"), 0)
    assert remarks({"peers": [{"name": "a", "misses": {}, "penalty_s": 0.0, **quiet}]}) == []
