"""`kvcomm peers` and `kvcomm metrics`: what a running node tells of its peers, and its metrics."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from kvcomm_p2p.cli.outcome import PartialError, guarded
from kvcomm_p2p.cli.output import counted, duration, emit, size, stderr, stdout, write_text
from kvcomm_p2p.cli.setup import load_settings
from kvcomm_p2p.errors import KVCommError

ANSWER_TIMEOUT_S = 10.0

NodeName = Annotated[str | None, typer.Argument(metavar="NAME", help="Only this node [default: all of yours].")]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output on stdout.")]


def ask(directory: Path, name: str, op: str) -> Any:
    """The answer of a running node to an `op` without parameters. Raises what `local_api.request` raises."""
    from kvcomm_p2p.local_api import request

    [event] = request(directory, name, {"op": op}, timeout_s=ANSWER_TIMEOUT_S)
    return event[op]


def ask_all(directory: Path, name: str | None, op: str) -> tuple[list[Any], dict[str, str]]:
    """Answers of the node `name`, or of all local ones, and why the others gave none. Raises UsageError for a name that does
    not run."""
    from kvcomm_p2p.local_api import find_socket
    from kvcomm_p2p.local_names import running_nodes

    if name is not None:
        find_socket(directory, name)
    answers, silent = [], {}
    for each in [name] if name is not None else [node.name for node in running_nodes(directory)]:
        try:
            answers.append(ask(directory, each, op))
        except KVCommError as error:
            silent[each] = str(error)
    return answers, silent


@guarded
def peers(name: NodeName = None, as_json: AsJson = False) -> None:
    """Show whom a running node knows, what passed between them, and what went wrong."""
    nodes, silent = ask_all(load_settings().runtime_dir, name, "peers")
    if as_json:
        emit({"nodes": nodes, "unreachable": silent}, indent=2)
    else:
        _render(nodes, silent)
    if silent:
        raise PartialError("; ".join(silent.values()))


@guarded
def metrics(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of a running node.")],
) -> None:
    """Print a running node's metrics in Prometheus' text format."""
    write_text(ask(load_settings().runtime_dir, name, "metrics"))


def _render(nodes: list[dict[str, Any]], silent: Mapping[str, str]) -> None:
    if not nodes and not silent:
        stderr().print("no node of yours runs on this machine; start one: kvcomm node --name a", markup=False)
    for node in nodes:
        if node["peers"]:
            stdout().print(table(node))
            for line in remarks(node):
                stdout().print(line, markup=False, soft_wrap=True)
        else:
            stdout().print(f"{node['name']} knows no other node (others: --join {node['address']})", markup=False)
        if node["metrics_address"]:
            stdout().print(f"metrics: http://{node['metrics_address']}/metrics", markup=False)


def table(node: Mapping[str, Any]) -> Table:
    """One row per peer."""
    drawn = Table(title=f"peers of {node['name']}", title_justify="left")
    for heading in ("name", "id", "status", "address", "model"):
        drawn.add_column(heading, no_wrap=heading in ("id", "status"))
    for heading in ("epoch", "anchors", "log", "heard", "trip", "pulled", "uploaded"):
        drawn.add_column(heading, justify="right", no_wrap=True)
    for peer in node["peers"]:
        trip = peer["round_trip_s"]
        drawn.add_row(
            Text(peer["name"]),
            peer["node_id"][:8],
            peer["state"],
            peer["address"] if "address" in peer else peer["control"],
            "same" if peer["model_id"] == node["model_id"] else "another",
            f"{peer['epoch']}/{peer['incarnation']}",
            f"{peer['anchors']:,}",
            f"{peer['log_seq']:,} of {max(peer['told_seq'], peer['log_seq']):,}",
            duration(peer["heard_age_s"]),
            "–" if trip is None else f"{1000 * trip:.1f} ms",
            size(peer["pulled_bytes"]),
            size(peer["uploaded_bytes"]),
        )
    return drawn


def remarks(node: Mapping[str, Any]) -> list[str]:
    """What went wrong with each peer, in words; nothing for those with whom nothing did."""
    lines = []
    for peer in node["peers"]:
        parts = []
        if peer["misses"]:
            reasons = sorted(peer["misses"].items(), key=lambda item: (-item[1], item[0]))
            parts.append("missed " + ", ".join(f"{reason} {count:,}" for reason, count in reasons))
        if peer["busy_told"] or peer["busy_given"]:
            parts.append(f"busy {counted(peer['busy_told'], 'time')} for us, {peer['busy_given']:,} we for it")
        if peer["penalties"]:
            left = f", not asked for another {duration(peer['penalty_s'])}" if peer["penalty_s"] > 0 else ""
            parts.append(f"{counted(peer['penalties'], 'penalty', 'penalties')}{left}")
        if peer["violations"]:
            parts.append(counted(peer["violations"], "violation"))
        if parts:
            lines.append(f"{peer['name']}: " + "; ".join(parts))
    return lines
