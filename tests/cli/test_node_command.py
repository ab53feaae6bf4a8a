from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys

import pytest
from harness import PATIENCE_S, Kvcomm, eventually, is_alive

from kvcomm_p2p.local_names import running_nodes


def test_a_node_says_where_it_is_and_leaves_on_ctrl_c(kvcomm: Kvcomm) -> None:
    node = kvcomm.start("node", "--name", "planner", "--role", "planner")
    assert eventually(lambda: bool(running_nodes(kvcomm.runtime_dir)))
    assert eventually(lambda: kvcomm.run("status").stdout.count("planner") >= 2)
    assert node.interrupt() == 0
    text = "".join(node.lines)
    assert "planner: ready at 127.0.0.1:" in text
    assert "kvcomm node --name NAME --join 127.0.0.1:" in text
    assert 'kvcomm ask --node planner "…"' in text
    assert text.endswith("planner: leaving\nplanner: left\n")
    assert "Traceback" not in text


def test_json_events_one_per_line(kvcomm: Kvcomm) -> None:
    node = kvcomm.node("planner", "--model", "tiny")
    assert node.interrupt(signal.SIGTERM) == 0
    events = [json.loads(line) for line in node.lines]
    assert [event["event"] for event in events] == ["starting", "ready", "leaving", "left"]
    assert all(event["name"] == "planner" for event in events)
    assert events[0]["pid"] == node.popen.pid
    assert events[1]["model"] == "tiny"
    assert events[1]["address"].startswith("127.0.0.1:")


def test_a_seed_may_come_later(kvcomm: Kvcomm) -> None:
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        port = str(reserved.getsockname()[1])
        late = kvcomm.node("coder", "--join", f"127.0.0.1:{port}")
        assert late.wait_for("lonely")[0]["join"] == [f"127.0.0.1:{port}"]
        kvcomm.node("planner", "--port", port)
        assert late.wait_for("peer")[0]["address"] == f"127.0.0.1:{port}"


def test_the_name_is_free_again_after_a_kill(kvcomm: Kvcomm) -> None:
    first = kvcomm.node("planner")
    refused = kvcomm.run("node", "--name", "planner")
    assert refused.returncode == 1
    assert refused.stderr.count("\n") == 1
    assert f"process {first.popen.pid}" in refused.stderr
    first.interrupt(signal.SIGKILL)
    assert kvcomm.node("planner").ready["name"] == "planner"


def test_a_port_in_use_and_a_missing_model_are_said_in_one_sentence(kvcomm: Kvcomm) -> None:
    node = kvcomm.node("planner")
    port = node.ready["address"].rpartition(":")[2]
    taken = kvcomm.run("node", "--name", "coder", "--port", port)
    assert (taken.returncode, taken.stderr) == (1, f"error: port {port} is in use: take another --port\n")
    missing = kvcomm.run("node", "--name", "coder", "--model", "missing")
    assert missing.returncode == 1
    assert missing.stderr == "error: the model missing is not here yet: run `kvcomm model pull missing`\n"
    assert missing.stdout == "coder: loading missing …\n", "what never was there does not leave"
    assert [each.name for each in running_nodes(kvcomm.runtime_dir)] == ["planner"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_while_starting(kvcomm: Kvcomm, number: signal.Signals) -> None:
    node = kvcomm.start("node", "--name", "planner", "--json", FAKE_START_S="60")
    node.wait_for("starting")
    code = node.interrupt(number)
    # A signal that comes before our handler may end the process itself, which a shell shows as 128 + number.
    assert code in (130, -number)
    assert running_nodes(kvcomm.runtime_dir) == []
    assert "Traceback" not in "".join(node.lines)


def test_the_second_ctrl_c_ends_a_node_that_does_not_leave(kvcomm: Kvcomm) -> None:
    node = kvcomm.node("planner", FAKE_CLOSE_S="60")
    node.popen.send_signal(signal.SIGINT)
    node.wait_for("leaving")
    assert node.interrupt() == 130


def test_stop_on_the_socket(kvcomm: Kvcomm) -> None:
    from kvcomm_p2p.local_api import request

    node = kvcomm.node("planner")
    assert list(request(kvcomm.runtime_dir, "planner", {"op": "stop"})) == [{"event": "done"}]
    assert node.finish() == 0


def test_a_watched_parent_that_is_killed_takes_the_node_with_it(kvcomm: Kvcomm) -> None:
    source = (
        "import subprocess, sys, signal\n"
        "child = subprocess.Popen([sys.executable, '-m', 'kvcomm_p2p.cli', 'node', '--name', 'planner', '--json',"
        " '--watch-parent'], stdin=subprocess.PIPE)\n"
        "signal.pause()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", source], stdout=subprocess.PIPE, text=True, env=kvcomm.environment
    ) as parent:
        assert parent.stdout is not None
        child = json.loads(parent.stdout.readline())["pid"]
        assert json.loads(parent.stdout.readline())["event"] == "ready"
        os.kill(parent.pid, signal.SIGKILL)
        assert eventually(lambda: not is_alive(child))
        assert [json.loads(line)["event"] for line in parent.stdout] == ["leaving", "left"]
        parent.wait(PATIENCE_S)
