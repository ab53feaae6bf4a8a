"""The command line on real agents with a tiny random model: what the fakes cannot show."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from harness import Kvcomm, eventually, is_alive

from kvcomm_p2p.local_names import running_nodes

TEXT = "The quick brown fox jumps over the lazy dog. " * 4


def test_two_nodes_answer_share_and_leave(real_kvcomm: Kvcomm, tiny_model: Path) -> None:
    up = real_kvcomm.start("up", "-n", "2", "--json", "--model", str(tiny_model))
    up.wait_for("all_ready")
    nodes = {node.name: node.pid for node in running_nodes(real_kvcomm.runtime_dir)}
    assert set(nodes) == {"agent-1", "agent-2"}

    def status(name: str) -> Any:
        return json.loads(real_kvcomm.run("status", "--node", name, "--json").stdout)["nodes"][0]

    assert eventually(lambda: [peer["name"] for peer in status("agent-2")["peers"]] == ["agent-1"])
    replies = [
        json.loads(real_kvcomm.run("ask", "--node", name, "--json", "--max-new-tokens", "4", TEXT).stdout)
        for name in ("agent-1", "agent-2", "agent-1")
    ]
    assert replies[0]["text"] == replies[1]["text"] == replies[2]["text"]
    for reply in replies:
        report = reply["report"]
        kinds = ("exact", "continued", "reused", "recomputed")
        assert report["prompt_tokens"] == sum(report[f"{kind}_tokens"] for kind in kinds) == len(TEXT)
    first = status("agent-1")
    assert first["requests"] == 2
    assert first["anchors"] > 0
    assert "no measured profile" in first["exact_only_reason"]

    os.kill(nodes["agent-2"], signal.SIGKILL)
    assert up.wait_for("died")[0]["name"] == "agent-2"
    assert real_kvcomm.run("ask", "--node", "agent-1", "--max-new-tokens", "2", TEXT).returncode == 0
    assert up.interrupt() == 3
    assert not any(is_alive(pid) for pid in nodes.values())
    assert "Traceback" not in "".join(up.lines)
