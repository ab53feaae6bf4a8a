"""How fast news spread among real processes: updates, newcomers; and what it costs when there is none."""

from __future__ import annotations

import random
import time

from kvcomm_p2p.errors import KVCommError
from kvcomm_p2p.evaluation.cluster_failures import wait_gone
from kvcomm_p2p.evaluation.cluster_processes import Cluster, NodeProcess
from kvcomm_p2p.evaluation.cluster_views import changes, first_seen
from kvcomm_p2p.evaluation.progress import Step
from kvcomm_p2p.evaluation.results import Row
from kvcomm_p2p.evaluation.samples import high_row, median_row

UPDATE_SPACING_S = (0.4, 1.0)
"""Seconds between updates, at random: they must not keep step with gossip rounds."""

LATE_S = 10.0
QUIET_S = 5.0
IDLE_S = 10.0
JOIN_ANCHORS = 1000
NUMBERS_PER_NODE = 1 << 20


def update(step: Step, *, nodes: int = 16, repeats: int = 50, seed: int = 0) -> list[Row]:
    """One node publishes one anchor: seconds until all others know; and bytes per second while nothing happens."""
    title = f"update, {nodes} nodes"
    with Cluster(seed=seed) as cluster:
        step("starting")
        cluster.grow(nodes)
        step("updates")
        seconds = _updates(cluster, repeats, random.Random(seed))
        step("idle traffic")
        idle = _idle(cluster)
    return [
        median_row(title, "known to all others, median (goal ≤ 0.5)", seconds, "s"),
        high_row(title, "known to all others, p99 (goal ≤ 1)", seconds, "s"),
        median_row(title, "control bytes sent per node while idle (goal ≤ 10,000)", idle, "B/s"),
    ]


def _updates(cluster: Cluster, repeats: int, rng: random.Random) -> list[float]:
    """Seconds of each of `repeats` updates until everybody knew."""
    cluster.all("watch", on=True)
    held: dict[str, int] = {node.name: 0 for node in cluster.nodes}
    told: list[tuple[str, int, float]] = []
    for count in range(repeats):
        origin = cluster.nodes[rng.randrange(len(cluster))]
        held[origin.name] += 1
        at = origin.ask("publish", numbers=[(count + 1) * NUMBERS_PER_NODE + int(origin.name[4:])])["at"]
        told.append((origin.name, held[origin.name], at))
        time.sleep(rng.uniform(*UPDATE_SPACING_S))
    cluster.all("wait", timeout_s=LATE_S, anchors=None)
    _settled(cluster, sum(held.values()), held)
    history = changes(cluster)
    cluster.all("watch", on=False)
    seconds = []
    for name, anchors, at in told:
        seen = first_seen(history, at, lambda change, n=name, a=anchors: change.peer == n and change.anchors >= a)  # type: ignore[misc]
        seconds.append(max(seen.values()))
    return seconds


def _settled(cluster: Cluster, total: int, held: dict[str, int]) -> None:
    """Wait until everybody knows what the others hold."""
    asked = [node.begin("wait", timeout_s=LATE_S, anchors=total - held[node.name]) for node in cluster.nodes]
    for future in asked:
        future.result(LATE_S + 5)


def _idle(cluster: Cluster) -> list[float]:
    """Bytes per second and node: frames of the control plane, without the headers of ZeroMQ and TCP."""
    time.sleep(QUIET_S)
    before = cluster.all("stats")
    time.sleep(IDLE_S)
    after = cluster.all("stats")
    return [
        (b["control_bytes"] + b["bulk_bytes"] - a["control_bytes"] - a["bulk_bytes"]) / (b["at"] - a["at"])
        for a, b in zip(before, after, strict=True)
    ]


def join(step: Step, *, nodes: int = 16, repeats: int = 5, seed: int = 0) -> list[Row]:
    """A newcomer joins nodes that hold 1,000 anchors each: seconds until it knows them all, and until all know it."""
    title = f"join, {nodes} nodes × {JOIN_ANCHORS:,} anchors"
    with Cluster(seed=seed) as cluster:
        step("starting")
        cluster.grow(nodes)
        step("publishing")
        fill(cluster, JOIN_ANCHORS)
        knows, known = [], []
        for count in range(repeats):
            step(f"newcomer {count + 1}")
            one, all_others = _newcomer(cluster, JOIN_ANCHORS)
            knows.append(one)
            known.append(all_others)
    return [
        median_row(title, "the newcomer knows every anchor, median (goal ≤ 1)", knows, "s"),
        Row(title, "the newcomer knows every anchor, slowest", max(knows), "s", len(knows)),
        median_row(title, "all others know the newcomer, median", known, "s"),
    ]


def fill(cluster: Cluster, anchors: int, timeout_s: float = 60.0) -> None:
    """Let every node hold so many anchors that nobody else holds, and wait until all know of all."""
    for index, node in enumerate(cluster.nodes):
        first = (index + 1) * NUMBERS_PER_NODE
        node.ask("publish", numbers=list(range(first, first + anchors)))
    cluster.all("wait", timeout_s=timeout_s, anchors=anchors * (len(cluster) - 1), within_s=timeout_s + 5)


def _newcomer(cluster: Cluster, anchors: int) -> tuple[float, float]:
    old = list(cluster.nodes)
    cluster.all("watch", on=True)
    (fresh,) = cluster.start()
    fresh.ask("watch", on=True)
    at = fresh.ask("join", seeds=[old[0].control])["at"]
    fresh.ask("wait", timeout_s=60.0, anchors=anchors * len(old), alive=len(old), within_s=65)
    for node in old:
        node.ask("wait", timeout_s=60.0, alive=len(old), within_s=65)
    held: dict[str, int] = {}
    knows = float("inf")
    history = changes(cluster)
    for change in history:
        if change.observer == fresh.name:
            held[change.peer] = change.anchors
            if sum(held.values()) == anchors * len(old):
                knows = change.at - at
                break
    seen = first_seen(history, at, lambda change: change.peer == fresh.name and change.state == "alive")
    if len(seen) != len(old) or knows == float("inf"):
        raise KVCommError("what the nodes noted does not contain the newcomer: they were not watching")
    fresh.ask("leave")
    fresh.end()
    cluster.forget(fresh)
    cluster.all("wait", timeout_s=60.0, alive=len(old) - 1, within_s=65)
    return knows, max(seen.values())


def sixtyfour(step: Step, *, nodes: int = 64, repeats: int = 20, seed: int = 0) -> list[Row]:
    """Many nodes on one machine: join, updates, one death, and what a process takes."""
    title = f"{nodes} nodes on one machine"
    with Cluster(seed=seed) as cluster:
        step("starting")
        fresh = cluster.start(nodes)
        step("joining")
        at = time.monotonic()
        cluster.join(fresh, timeout_s=120.0)
        joined = time.monotonic() - at
        step("updates")
        seconds = _updates(cluster, repeats, random.Random(seed))
        idle = _idle(cluster)
        use = [answer["use"] for answer in cluster.all("stats")]
        step("a death")
        victim: NodeProcess = cluster.nodes[nodes // 2]
        died = wait_gone(cluster, victim, freeze=False)
    return [
        Row(title, "all know all after they joined at once", joined, "s", 1),
        median_row(title, "update known to all others, median", seconds, "s"),
        high_row(title, "update known to all others, p99", seconds, "s"),
        Row(title, "killed node known to all to be gone", max(died), "s", 1),
        median_row(title, "control bytes sent per node while idle", idle, "B/s"),
        median_row(title, "resident memory per process", [each["rss_bytes"] / 1e6 for each in use], "MB"),
        median_row(title, "memory per process, shared pages divided", [each["pss_bytes"] / 1e6 for each in use], "MB"),
    ]
