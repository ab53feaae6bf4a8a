"""Nodes in network namespaces of their own, over links with delay and loss that are cut and mended: `make netns`.

Each namespace is a machine: own identity, an allow-list of the others, encrypted connections. Delay and loss are those of
`tc netem` where the kernel has it; elsewhere the nodes' own transports delay and lose frames, and the result says so. Needs
root and `ip netns`; says so and ends with status 0 where they are missing. `python benchmarks/netns.py [--write PATH]`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from kvcomm_p2p.evaluation.cluster_processes import Cluster, NodeProcess
from kvcomm_p2p.evaluation.cluster_views import GONE_STATES, changes, false_deaths, first_seen
from kvcomm_p2p.evaluation.results import Result, Row
from kvcomm_p2p.evaluation.samples import high_row, median_row
from kvcomm_p2p.net.identity import allow, make_identity

MACHINES = 6
DELAY_MS, LOSS_PERCENT = 50, 1
CUT_S = 30.0
QUIET_S = 60.0
UPDATES = 20
TIMEOUT_S = 120.0
PULL = {"blocks": 16, "block_kv_bytes": 1 << 20}
BRIDGE = "kvbr0"
NETEM = ("netem", "delay", f"{DELAY_MS}ms", "loss", f"{LOSS_PERCENT}%", "limit", "20000")
CASE = f"{MACHINES} namespaces, {DELAY_MS} ms delay and {LOSS_PERCENT} % loss each way"


def sh(*command: str, check: bool = True) -> None:
    subprocess.run(command, check=check, capture_output=True, text=True)


def why_not() -> str:
    """What is missing here, or ""."""
    if os.geteuid() != 0:
        return "needs root"
    if shutil.which("ip") is None:
        return "needs ip (iproute2)"
    try:
        sh("ip", "netns", "add", "kvprobe")
        sh("ip", "netns", "delete", "kvprobe")
    except subprocess.CalledProcessError as error:
        return f"network namespaces do not work here: {error.stderr.strip()}"
    return ""


def has_netem() -> bool:
    """Whether the kernel can delay and lose packets."""
    if shutil.which("tc") is None:
        return False
    sh("ip", "netns", "add", "kvprobe")
    try:
        sh("ip", "netns", "exec", "kvprobe", "tc", "qdisc", "add", "dev", "lo", "root", *NETEM)
    except subprocess.CalledProcessError:
        return False
    finally:
        sh("ip", "netns", "delete", "kvprobe", check=False)
    return True


def namespace(number: int) -> str:
    return f"kvns{number}"


def address(number: int) -> str:
    return f"10.77.0.{number + 1}"


@contextlib.contextmanager
def network(netem: bool) -> Iterator[None]:
    """A bridge, and a namespace per machine on it. With `netem`, what a machine sends is delayed and may get lost."""
    clean()
    try:
        sh("ip", "link", "add", BRIDGE, "type", "bridge")
        sh("ip", "link", "set", BRIDGE, "up")
        for number in range(MACHINES):
            name, outside = namespace(number), f"kvve{number}"
            sh("ip", "netns", "add", name)
            sh("ip", "link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", name)
            sh("ip", "link", "set", outside, "master", BRIDGE, "up")
            inside = ("ip", "-n", name)
            sh(*inside, "addr", "add", f"{address(number)}/24", "dev", "eth0")
            sh(*inside, "link", "set", "eth0", "up")
            sh(*inside, "link", "set", "lo", "up")
            if netem:
                sh("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "eth0", "root", *NETEM)
        yield
    finally:
        clean()


def clean() -> None:
    for number in range(MACHINES):
        sh("ip", "netns", "delete", namespace(number), check=False)
        sh("ip", "link", "delete", f"kvve{number}", check=False)
    sh("ip", "link", "delete", BRIDGE, check=False)


def cut(machines: list[int], state: str) -> float:
    """Takes the links of these machines "down" (cables pulled: nobody is told) or "up"; returns when."""
    for number in machines:
        sh("ip", "link", "set", f"kvve{number}", state)
    return time.monotonic()


def start(cluster: Cluster, folder: Path, netem: bool) -> list[NodeProcess]:
    """A node per machine, all of which allow each other, joined through the first."""
    folders = [folder / f"machine{number}" for number in range(MACHINES)]
    identities = []
    for each in folders:
        each.mkdir(mode=0o700)
        identities.append(make_identity(each))
    nodes = []
    for number, each in enumerate(folders):
        for other, identity in enumerate(identities):
            if other != number:
                allow(each, identity.public.line(), f"machine{other}")
        prefix = ("ip", "netns", "exec", namespace(number))
        nodes += cluster.start(1, prefix=prefix, host=address(number), state_dir=str(each), encrypted=True)
    if not netem:
        delay = {"delay_s": DELAY_MS / 1e3}
        lossy = {**delay, "loss": LOSS_PERCENT / 100}
        cluster.all("faults", control=lossy, requests=lossy, replies=delay)
    for node in nodes[1:]:
        node.ask("join", seeds=[f"{nodes[0].control}#machine0"], timeout_s=30.0, within_s=35)
    return nodes


def measure(console: Console) -> list[Row]:
    netem = has_netem()
    with network(netem), tempfile.TemporaryDirectory() as folder, Cluster() as cluster:
        console.print("joining")
        began = time.monotonic()
        nodes = start(cluster, Path(folder), netem)
        cluster.all("wait", timeout_s=TIMEOUT_S, alive=MACHINES - 1, within_s=TIMEOUT_S + 5)
        rows = [
            Row(CASE, "delay and loss by the kernel (1) or by the nodes' transports (0)", int(netem), "", 1),
            Row(CASE, "all know all after the first join", time.monotonic() - began, "s", 1),
        ]
        cluster.all("watch", on=True)
        console.print("updates")
        seconds = updates(cluster)
        rows += [
            median_row(CASE, "update known to all others, median", seconds, "s"),
            high_row(CASE, "update known to all others, p99", seconds, "s"),
        ]
        console.print("a pull")
        nodes[0].ask("publish", numbers=[1], shape=PULL)
        got = nodes[1].ask("fetch", holder=nodes[0].node_id, number=1, shape=PULL, within_s=60)
        found = got["found"] / PULL["blocks"]
        rows += [
            Row(CASE, "16 MiB pulled: blocks that came", found, "of 1", 1),
            Row(CASE, "16 MiB pulled: seconds", got["seconds"], "s", 1),
        ]
        console.print(f"{QUIET_S:g} s of quiet")
        time.sleep(QUIET_S)
        names = [node.name for node in nodes]
        rows.append(Row(CASE, "false deaths so far (goal 0)", false_deaths(changes(cluster), names), "", MACHINES))
        return rows + separated(cluster, console)


def updates(cluster: Cluster) -> list[float]:
    seconds = []
    for count in range(UPDATES):
        origin = cluster.nodes[count % MACHINES]
        held = count // MACHINES + 1
        at = origin.ask("publish", numbers=[1000 + count])["at"]
        time.sleep(1.5)
        seen = first_seen(changes(cluster), at, lambda c, o=origin, h=held: c.peer == o.name and c.anchors >= h)  # type: ignore[misc]
        seconds.append(max(seen.values()) if len(seen) == MACHINES - 1 else 1.5)
    return seconds


def separated(cluster: Cluster, console: Console) -> list[Row]:
    """The links of half of the machines are down for CUT_S seconds: each of those is alone."""
    alone = list(range(MACHINES // 2, MACHINES))
    together = cluster.nodes[: MACHINES // 2]
    console.print(f"{len(alone)} links down for {CUT_S:g} s")
    cluster.all("watch", on=True)
    at = cut(alone, "down")
    time.sleep(CUT_S)
    victims = {cluster.nodes[number].name for number in alone}
    dead: dict[str, list[float]] = {name: [] for name in victims}
    history = changes(cluster)
    for name in victims:
        seen = first_seen(history, at, lambda c, n=name: c.peer == n and c.state in GONE_STATES)  # type: ignore[misc]
        dead[name] = [seconds for observer, seconds in seen.items() if observer in {node.name for node in together}]
    known = [seconds for each in dead.values() for seconds in each]
    together[0].ask("publish", numbers=[5000])
    back = cut(alone, "up")
    console.print("links up again")
    others = sum(1 for _ in cluster.nodes) - 1
    healed = max(a["at"] for a in cluster.all("wait", timeout_s=TIMEOUT_S, alive=others, within_s=TIMEOUT_S + 5)) - back
    time.sleep(3.0)
    missing = sum(not names for answer in cluster.all("holders", numbers=[5000]) for _, *names in answer["holders"])
    failures = sum(answer["failures"] for answer in cluster.all("stats"))
    rows = [
        Row(CASE, "cut off: noticed by those that are left", len(known), f"of {len(alone) * len(together)}", 1),
        Row(CASE, f"all know all again after links were down for {CUT_S:g} s", healed, "s", 1),
        Row(CASE, "nodes without what was published meanwhile (goal 0)", missing, "", MACHINES),
        Row(CASE, "errors of ours that were caught (goal 0)", failures, "", MACHINES),
    ]
    if known:
        rows.insert(1, high_row(CASE, "cut off: found dead after, p99", known, "s"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks/netns.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    reason = why_not()
    if reason:
        print(f"skipped: {reason}", file=sys.stderr)
        return
    console = Console(stderr=True, width=160)
    result = Result("netns", measure(console), 0)
    console.print(result.table())
    if options.write:
        result.write(options.write)
    else:
        print(result.to_json())


if __name__ == "__main__":
    main()
