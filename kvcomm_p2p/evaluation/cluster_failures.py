"""What real processes make of death, silence and separation."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

from kvcomm_p2p.errors import KVCommError
from kvcomm_p2p.evaluation.cluster_processes import Answer, Cluster, NodeProcess, cpu_load
from kvcomm_p2p.evaluation.cluster_views import GONE_STATES, changes, false_deaths, first_seen, suspicions
from kvcomm_p2p.evaluation.progress import Step
from kvcomm_p2p.evaluation.results import Row
from kvcomm_p2p.evaluation.samples import high_row, median_row

GONE_TIMEOUT_S = 90.0
FREEZE_SHAPE = {"blocks": 16, "block_kv_bytes": 4 << 20}
FREEZE_AFTER_BYTES = 4 << 20
ATTEMPTS_SPOILED_MAX = 10
PARTITION_S = 60.0
HEAL_TIMEOUT_S = 120.0


def death(step: Step, *, nodes: int = 16, repeats: int = 10, seed: int = 0) -> list[Row]:
    """One of the nodes is killed, or falls silent: seconds until all others know that it is gone."""
    rows: list[Row] = []
    with Cluster(seed=seed) as cluster:
        step("starting")
        cluster.grow(nodes)
        for title, freeze, count in (
            (f"killed, {nodes} nodes", False, repeats),
            (f"silent without closing connections, {nodes} nodes", True, max(3, repeats // 2)),
        ):
            seconds = []
            for number in range(count):
                step(f"{title}: {number + 1}")
                victim = cluster.nodes[1 + number % (nodes - 1)]
                seconds.append(max(wait_gone(cluster, victim, freeze=freeze)))
                cluster.grow(1)
            rows += [
                median_row(title, "known to all to be gone, median (goal ≤ 8)", seconds, "s"),
                high_row(title, "known to all to be gone, p99 (goal ≤ 15)", seconds, "s"),
            ]
    return rows


def wait_gone(cluster: Cluster, victim: NodeProcess, *, freeze: bool) -> list[float]:
    """End a node (or stop it for good) and say how many seconds each of the others took to know. Raises KVCommError if not
    all do within GONE_TIMEOUT_S."""
    cluster.all("watch", on=True)
    at = victim.signal(signal.SIGSTOP) if freeze else victim.kill()
    cluster.forget(victim)
    try:
        cluster.all("wait", timeout_s=GONE_TIMEOUT_S, gone=victim.name, within_s=GONE_TIMEOUT_S + 5)
    finally:
        victim.kill()
    seen = first_seen(changes(cluster), at, lambda change: change.peer == victim.name and change.state in GONE_STATES)
    if len(seen) != len(cluster):
        raise KVCommError(f"only {len(seen)} of {len(cluster)} noted that {victim.name} is gone")
    return list(seen.values())


def load(step: Step, *, nodes: int = 16, minutes: float = 10.0, seed: int = 0) -> list[Row]:
    """All cores compute for minutes: how often a living node is taken for dead, or suspected."""
    cores = len(os.sched_getaffinity(0))
    title = f"{nodes} nodes, {2 * cores} busy processes on {cores} cores, {minutes:g} min"
    with Cluster(seed=seed) as cluster:
        step("starting")
        cluster.grow(nodes)
        cluster.all("watch", on=True)
        step(f"{minutes:g} min of load")
        with cpu_load(2 * cores):
            time.sleep(minutes * 60)
            names = [node.name for node in cluster.nodes]
            history = changes(cluster)
        violations = sum(answer["violations"] for answer in cluster.all("stats"))
    return [
        Row(title, "false deaths (goal 0)", false_deaths(history, names), "", nodes * (nodes - 1)),
        Row(title, "suspicions", suspicions(history, names), "", nodes * (nodes - 1)),
        Row(title, "violations counted", violations, "", nodes),
    ]


def freeze(step: Step, *, repeats: int = 10, seed: int = 0) -> list[Row]:
    """A holder stops in the middle of a pull: seconds lost waiting, and what a second request loses.

    A pull that was over before the signal, or that had stalled by itself on a busy machine, is measured again.
    """
    lost: list[float] = []
    again: list[float] = []
    seconds: list[float] = []
    spoiled = 0
    while len(lost) < repeats:
        step(f"holder {len(lost) + 1}")
        with Cluster(seed=seed + len(lost) + spoiled) as cluster:
            answer, second = _frozen_pull(cluster)
        if answer["struck_at"] and answer["missed"] and answer["right"]:
            lost.append(answer["wait_lost_s"])
            seconds.append(answer["ended"] - answer["struck_at"])
            again.append(second["wait_lost_s"])
        elif (spoiled := spoiled + 1) > ATTEMPTS_SPOILED_MAX:
            raise KVCommError(f"the holder could not be stopped in the middle of a pull: {answer}")
    title = "holder frozen in the middle of a pull"
    return [
        median_row(title, "wait_lost_s, median", lost, "s"),
        Row(title, "wait_lost_s, worst (goal ≤ 0.25)", max(lost), "s", len(lost)),
        Row(title, "from the signal to the end of the fetch, worst", max(seconds), "s", len(seconds)),
        Row(title, "wait_lost_s of the next fetch, worst", max(again), "s", len(again)),
        Row(title, "measured again: over, or stalled, before the signal", spoiled, "", repeats + spoiled),
    ]


def _frozen_pull(cluster: Cluster) -> tuple[Answer, Answer]:
    """The pull that was struck, and one that was asked for right after it."""
    holder, puller = cluster.grow(2)
    holder.ask("publish", numbers=[1], shape=FREEZE_SHAPE)
    strike = {"pid": holder.pid, "name": "SIGSTOP", "after_bytes": FREEZE_AFTER_BYTES}
    answer = puller.ask("fetch", holder=holder.node_id, number=1, shape=FREEZE_SHAPE, strike=strike)
    return answer, puller.ask("fetch", holder=holder.node_id, number=1, shape=FREEZE_SHAPE)


def partition(
    step: Step, *, nodes: int = 16, seconds: float = PARTITION_S, seed: int = 0, config: dict[str, Any] | None = None
) -> list[Row]:
    """Two halves do not hear each other for a minute while both change: seconds until all directories are right again."""
    rng = random.Random(seed)
    with Cluster(seed=seed, config=config) as cluster:
        step("starting")
        cluster.grow(nodes)
        held = {node.name: {(index << 20) + k for k in range(20)} for index, node in enumerate(cluster.nodes, 1)}
        for node in cluster.nodes:
            node.ask("publish", numbers=sorted(held[node.name]))
        cluster.all("wait", timeout_s=30, anchors=20 * (nodes - 1), within_s=35)
        step(f"apart for {seconds:g} s")
        half = nodes // 2
        _cut(cluster.nodes[:half], cluster.nodes[half:])
        forgotten = _churn(cluster, held, seconds, rng)
        cluster.all("watch", on=True)
        step("together again")
        healed_at = max(answer["at"] for answer in cluster.all("cut", addresses=[]))
        took = _healed(cluster, held, healed_at)
        lost, resurrected = _compare(cluster, held, forgotten)
    title = f"{half} + {nodes - half} nodes apart for {seconds:g} s"
    return [
        Row(title, "all directories right again after the link returned (goal ≤ 5)", took, "s", 1),
        Row(title, "anchors resurrected (goal 0)", resurrected, "", len(forgotten) * nodes),
        Row(title, "anchors lost (goal 0)", lost, "", sum(map(len, held.values())) * nodes),
    ]


def _cut(left: list[NodeProcess], right: list[NodeProcess]) -> None:
    for here, there in ((left, right), (right, left)):
        addresses = [address for node in there for address in node.addresses]
        for future in [node.begin("cut", addresses=addresses) for node in here]:
            future.result(10)


def _churn(cluster: Cluster, held: dict[str, set[int]], seconds: float, rng: random.Random) -> set[int]:
    """Every node publishes five and forgets three while time passes. Returns what was forgotten."""
    forgotten: set[int] = set()
    pause_s = seconds / len(cluster)
    for index, node in enumerate(cluster.nodes, 1):
        mine = held[node.name]
        gone = rng.sample(sorted(mine), 3)
        fresh = [(index << 20) + 1000 + k for k in range(5)]
        node.ask("forget", numbers=gone)
        node.ask("publish", numbers=fresh)
        forgotten.update(gone)
        mine.difference_update(gone)
        mine.update(fresh)
        time.sleep(pause_s)
    return forgotten


def _healed(cluster: Cluster, held: dict[str, set[int]], since: float) -> float:
    """Seconds until the last node knew all others alive with as many anchors as they hold."""
    total = sum(map(len, held.values()))
    asked = [
        node.begin("wait", timeout_s=HEAL_TIMEOUT_S, alive=len(cluster) - 1, anchors=total - len(held[node.name]))
        for node in cluster.nodes
    ]
    healed_at: float = max(future.result(HEAL_TIMEOUT_S + 5)["at"] for future in asked)
    return healed_at - since


def _compare(cluster: Cluster, held: dict[str, set[int]], forgotten: set[int]) -> tuple[int, int]:
    """(lost, resurrected) entries over all nodes' directories, as lookups tell."""
    holder_of = {number: name for name, numbers in held.items() for number in numbers}
    lost = resurrected = 0
    for answer in cluster.all("holders", numbers=[*sorted(holder_of), *sorted(forgotten)]):
        for number, *holders in answer["holders"]:
            lost += number in holder_of and holder_of[number] not in holders
            resurrected += number in forgotten and bool(holders)
    return lost, resurrected
