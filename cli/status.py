"""`kvcomm status`: what the local nodes hold, whom they know, and how much they reused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from kvcomm_p2p.cli.outcome import PartialError
from kvcomm_p2p.cli.output import counted, duration, emit, size, stderr, stdout
from kvcomm_p2p.errors import KVCommError
from kvcomm_p2p.local_api import find_socket, request
from kvcomm_p2p.local_names import running_nodes

STATUS_TIMEOUT_S = 5.0


def run_status(directory: Path, name: str | None, *, as_json: bool) -> None:
    """Asks the node `name`, or all local ones. Raises PartialError after printing if some did not answer."""
    statuses: list[dict[str, Any]] = []
    silent: dict[str, str] = {}
    if name is not None:
        find_socket(directory, name)
    for each in [name] if name is not None else [node.name for node in running_nodes(directory)]:
        try:
            [event] = request(directory, each, {"op": "status"}, timeout_s=STATUS_TIMEOUT_S)
            statuses.append(event["status"])
        except KVCommError as error:
            silent[each] = str(error)
    if as_json:
        emit({"nodes": statuses, "unreachable": silent}, indent=2)
    else:
        _render(statuses, silent)
    if silent:
        raise PartialError("; ".join(silent.values()))


def _render(statuses: list[dict[str, Any]], silent: Mapping[str, str]) -> None:
    if not statuses and not silent:
        stderr().print("no node of yours runs on this machine; start one: kvcomm node --name a", markup=False)
        return
    if statuses:
        stdout().print(nodes_table(statuses))
    for status in statuses:
        if status["peers"]:
            stdout().print(peers_table(status))
        for line in _remarks(status):
            stdout().print(line, markup=False)


def nodes_table(statuses: list[dict[str, Any]]) -> Table:
    """One row per node."""
    table = Table(title="nodes", title_justify="left")
    for heading in ("name", "role", "address", "model"):
        table.add_column(heading)
    for heading in ("up", "peers", "anchors", "pool", "requests", "prompt tokens", "not computed", "pulled"):
        table.add_column(heading, justify="right")
    for status in statuses:
        prompt_tokens = status["prompt_tokens"]
        table.add_row(
            status["name"],
            status["role"],
            status["address"],
            status["model"],
            duration(status["uptime_s"]),
            str(len(status["peers"])),
            f"{status['anchors']:,}",
            f"{size(status['pool_bytes'])} of {size(status['pool_bytes_max'])}",
            f"{status['requests']:,}",
            f"{prompt_tokens:,}",
            f"{hit_rate(status):.0%}" if prompt_tokens else "–",
            size(status["pulled_bytes"]),
        )
    return table


def peers_table(status: Mapping[str, Any]) -> Table:
    """Whom a node knows."""
    table = Table(title=f"peers of {status['name']}", title_justify="left")
    for heading in ("name", "address", "state"):
        table.add_column(heading)
    table.add_column("anchors", justify="right")
    table.add_column("last heard", justify="right")
    table.add_column("model")
    for peer in sorted(status["peers"], key=lambda peer: (peer["name"], peer["node_id"])):
        same = peer["model_id"] == status["model_id"]
        heard = peer["last_heard_s"]
        table.add_row(
            peer["name"],
            peer["address"],
            peer["state"],
            f"{peer['anchors']:,}",
            "–" if heard is None else f"{duration(heard)} ago",
            "same" if same else "another",
        )
    return table


def hit_rate(status: Mapping[str, Any]) -> float:
    """Share of the prompt tokens that were not computed, 0 to 1."""
    reused = status["exact_tokens"] + status["continued_tokens"] + status["reused_tokens"]
    return float(reused / status["prompt_tokens"]) if status["prompt_tokens"] else 0.0


def _remarks(status: Mapping[str, Any]) -> list[str]:
    lines = []
    if status["exact_only_reason"]:
        lines.append(f"{status['name']} reuses exact prefixes only: {status['exact_only_reason']}")
    if status.get("deviations"):
        kept = f"{counted(status['deviations'], 'deviation')} ({size(status['deviation_bytes'])})"
        lines.append(f"{status['name']} remembers {kept} to correct short runs by")
    if status["misses"]:
        reasons = sorted(status["misses"].items(), key=lambda item: (-item[1], item[0]))
        lines.append(f"{status['name']} missed: " + ", ".join(f"{reason} {count:,}" for reason, count in reasons))
    return lines
