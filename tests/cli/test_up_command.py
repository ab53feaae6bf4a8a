from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from harness import Kvcomm, Process, eventually, is_alive

from kvcomm_p2p.local_names import running_nodes


def pids(kvcomm: Kvcomm) -> list[int]:
    return [node.pid for node in running_nodes(kvcomm.runtime_dir)]


def test_nodes_find_each_other_and_ctrl_c_ends_all(kvcomm: Kvcomm) -> None:
    up = kvcomm.start("up", "-n", "3", "--json")
    assert up.wait_for("all_ready")[0]["names"] == ["agent-1", "agent-2", "agent-3"]
    seed = next(json.loads(line)["address"] for line in up.lines if '"ready"' in line and '"agent-1"' in line)
    peers = [json.loads(line) for line in up.lines if '"event": "peer"' in line]
    while len(peers) < 2:
        peers += up.wait_for("peer")
    assert {(event["name"], event["address"]) for event in peers} == {("agent-2", seed), ("agent-3", seed)}
    children = pids(kvcomm)
    assert len(children) == 3
    assert up.interrupt() == 0
    assert not any(is_alive(pid) for pid in children)
    assert sum('"left"' in line for line in up.lines) == 3


def test_a_file_gives_names_and_roles(kvcomm: Kvcomm, tmp_path: Path) -> None:
    path = tmp_path / "agents.toml"
    path.write_text('[[agent]]\nname = "规划"\nrole = "planner"\n[[agent]]\nname = "coder"\n', encoding="utf-8")
    up = kvcomm.start("up", str(path))
    read_until(up, "all 2 nodes are ready")
    text = "".join(up.lines)
    assert "规划" in text
    assert "(smollm2-135m, planner; loaded in" in text
    assert "coder │ ready at" in text
    assert up.interrupt(signal.SIGTERM) == 0


@pytest.mark.parametrize("phase", ["at once", "while starting", "when ready"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_phase_leaves_orphans(kvcomm: Kvcomm, phase: str, number: signal.Signals) -> None:
    up = kvcomm.start("up", "-n", "2", "--json", FAKE_START_S="60" if phase == "while starting" else "0")
    if phase != "at once":
        up.wait_for("starting" if phase == "while starting" else "ready", 2)
    children = pids(kvcomm)
    assert phase == "at once" or len(children) == 2
    code = up.interrupt(number)
    # "At once" may be before Python has read our code: then the signal ends it in Python's own way.
    assert code in ((-number,) if number == signal.SIGKILL else (0, 130, -number))
    assert eventually(lambda: not any(is_alive(pid) for pid in children))
    assert eventually(lambda: pids(kvcomm) == [])


def test_a_second_ctrl_c_kills_what_does_not_leave(kvcomm: Kvcomm) -> None:
    up = kvcomm.start("up", "-n", "2", "--json", FAKE_CLOSE_S="60")
    up.wait_for("all_ready")
    children = pids(kvcomm)
    up.popen.send_signal(signal.SIGINT)
    up.wait_for("leaving", 2)
    up.interrupt()
    assert not any(is_alive(pid) for pid in children)


def test_a_killed_node_is_reported_and_the_others_go_on(kvcomm: Kvcomm) -> None:
    up = kvcomm.start("up", "-n", "2", "--json")
    up.wait_for("all_ready")
    nodes = {node.name: node.pid for node in running_nodes(kvcomm.runtime_dir)}
    os.kill(nodes["agent-2"], signal.SIGKILL)
    died = up.wait_for("died")[0]
    assert (died["name"], died["how"]) == ("agent-2", "signal SIGKILL")
    assert is_alive(nodes["agent-1"])
    assert up.interrupt() == 3


def test_nodes_that_cannot_start_say_why(kvcomm: Kvcomm) -> None:
    done = kvcomm.run("up", "-n", "2", "--model", "missing")
    assert done.returncode == 1
    assert done.stdout.count("error: the model missing is not here yet") == 2
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize("arguments", [(), ("-n", "2", "agents.toml"), ("-n", "0"), ("-n", "65"), ("-n", "x")])
def test_usage(kvcomm: Kvcomm, arguments: tuple[str, ...]) -> None:
    assert kvcomm.run("up", *arguments).returncode == 2


def test_a_bad_file_is_a_user_error(kvcomm: Kvcomm, tmp_path: Path) -> None:
    path = tmp_path / "agents.toml"
    path.write_text("modle = 'x'\n")
    done = kvcomm.run("up", str(path))
    assert done.returncode == 1
    assert "modle is not a known key" in done.stderr
    assert "0 agents" in done.stderr
    assert "Traceback" not in done.stderr


def read_until(process: Process, text: str) -> None:
    assert process.popen.stdout is not None
    for line in process.popen.stdout:
        process.lines.append(line)
        if text in line:
            return
    raise AssertionError(f"ended before {text!r}: {''.join(process.lines)}")
