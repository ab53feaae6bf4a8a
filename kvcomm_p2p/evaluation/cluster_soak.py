"""Half an hour of churn among real processes: does anything grow that should not?"""

from __future__ import annotations

import random
import signal
import tempfile
import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvcomm_p2p.errors import KVCommError
from kvcomm_p2p.evaluation.cluster_processes import Answer, Cluster, NodeProcess
from kvcomm_p2p.evaluation.progress import Step
from kvcomm_p2p.evaluation.results import Row

SAMPLE_S = 10.0
ACTION_S = 0.25
REPLACE_S = 8.0
"""Mean seconds between nodes that leave, die or restart."""

SHAPE = {"blocks": 4, "block_kv_bytes": 256 << 10}
CONFIG = {
    "pool_bytes_max": 32 << 20,
    "pool_anchors_max": 300,
    "tombstone_s": 20.0,
    "forget_after_s": 60.0,
}
"""Small pools, so that eviction never stops; short memories, so that a steady state is reached within minutes."""

WARM_UP_S = 300.0
STABLE, CHURNING = 4, 4
PULLS_AT_ONCE = 4


@dataclass(slots=True)
class Sample:
    """Of all stable nodes together (`use`: sums), `at` seconds after the beginning."""

    at: float
    use: dict[str, float]


@dataclass(slots=True)
class Soak:
    """What happened. `events` counts what was done and how it ended."""

    samples: list[Sample] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)


def soak(step: Step, *, minutes: float = 30.0, seed: int = 0) -> tuple[list[Row], Soak]:
    """Joins, leaves, kills, restarts, pauses, publishing, pulls and evictions; every SAMPLE_S seconds the nodes that live
    all the time say what they use. Returns rows and what they were made of. Raises KVCommError if one of those nodes dies.
    """
    outcome = Soak()
    with tempfile.TemporaryDirectory() as folder, Cluster(seed=seed, config=CONFIG) as cluster:
        step("starting")
        churn = _Churn(cluster, Path(folder), outcome, random.Random(seed))
        stable = churn.begin()
        churn.run(minutes * 60, step)
        ends = [node.ask("stats") for node in stable]
    return _rows(minutes, outcome, ends), outcome


class _Churn:
    def __init__(self, cluster: Cluster, folder: Path, outcome: Soak, rng: random.Random) -> None:
        self._cluster = cluster
        self._folder = folder
        self._stable: list[NodeProcess] = []
        self._outcome = outcome
        self._rng = rng
        self._pulls: list[Future[Answer]] = []
        self._held: dict[int, NodeProcess] = {}
        self._next = 1

    def begin(self) -> list[NodeProcess]:
        """Start the nodes that stay; half of them share memory with whoever does."""
        self._stable = [self._start(shared=number % 2 == 0) for number in range(STABLE)]
        self._cluster.join(self._stable)
        return self._stable

    def run(self, seconds: float, step: Step) -> None:
        began = time.monotonic()
        sample_at, replace_at = began, began
        while (now := time.monotonic()) < began + seconds:
            if now >= sample_at:
                sample_at += SAMPLE_S
                self._outcome.samples.append(Sample(now - began, self._use()))
                step(f"{(now - began) / 60:.1f} of {seconds / 60:g} min")
            if now >= replace_at:
                replace_at = now + REPLACE_S * self._rng.uniform(0.5, 1.5)
                self._count(self._replace)
            self._count(self._rng.choice((self._publish, self._burst, self._pull, self._pull)))
            time.sleep(ACTION_S)

    def _count(self, action: Any) -> None:
        """Whatever meets a node that is just being ended may fail; how often is part of the result."""
        try:
            self._outcome.events[action()] += 1
        except KVCommError:
            self._outcome.events[f"{action.__name__.strip('_')} failed"] += 1

    def _use(self) -> dict[str, float]:
        total: Counter[str] = Counter()
        for node in self._stable:
            stats = node.ask("stats")
            total.update(stats["use"])
            total.update({name: stats[name] for name in ("threads", "store_blocks", "store_bytes", "known", "anchors")})
        return dict(total)

    def _publish(self) -> str:
        node = self._rng.choice(self._cluster.nodes)
        number, self._next = self._next, self._next + 1
        node.ask("publish", numbers=[number], shape=SHAPE)
        self._held[number] = node
        if len(self._held) > 200:
            del self._held[min(self._held)]
        return "publish"

    def _burst(self) -> str:
        node = self._rng.choice(self._cluster.nodes)
        first, self._next = self._next, self._next + 20
        node.ask("publish", numbers=list(range(first, first + 20)))
        if self._rng.random() < 0.3:
            node.ask("forget", numbers=list(range(first, first + 10)))
        return "burst of small anchors"

    def _pull(self) -> str:
        for future in [pull for pull in self._pulls if pull.done()]:
            self._pulls.remove(future)
            answer = None if future.exception() else future.result()
            if answer is None:
                self._outcome.events["pulls whose puller ended"] += 1
            else:
                whole = not answer["missed"]
                self._outcome.events["pulls whole" if whole else "pulls with misses"] += 1
                self._outcome.events["wrong bytes"] += not answer["right"]
        if len(self._pulls) >= PULLS_AT_ONCE or not self._held:
            return "waited for pulls"
        number = self._rng.choice(sorted(self._held))
        holder = self._held[number]
        others = [node for node in self._cluster.nodes if node is not holder]
        puller = self._rng.choice(others)
        wanted = {"holder": holder.node_id, "number": number, "shape": SHAPE, "deadline_s": 5.0}
        self._pulls.append(puller.begin("fetch", publish=True, **wanted))
        return "pull"

    def _replace(self) -> str:
        churning = [node for node in self._cluster.nodes if node not in self._stable]
        if len(churning) < CHURNING:
            self._join(self._start(shared=self._rng.random() < 0.5))
            return "join"
        victim = self._rng.choice(churning)
        kind = self._rng.choice(("leave", "kill", "restart", "pause"))
        if kind == "pause":
            victim.signal(signal.SIGSTOP)
            time.sleep(1.5)
            victim.signal(signal.SIGCONT)
            return kind
        self._cluster.forget(victim)
        self._held = {number: node for number, node in self._held.items() if node is not victim}
        if kind == "leave":
            victim.ask("leave")
            victim.end()
        else:
            victim.kill()
        if kind == "restart":  # with its state, at the same address
            ports = [int(address.rpartition(":")[2]) for address in victim.addresses]
            again = {name: victim.options[name] for name in ("name", "state_dir", "shared")}
            self._join(*self._cluster.start(1, ports=ports, **again))
        else:
            self._join(self._start(shared=self._rng.random() < 0.5))
        return kind

    def _start(self, shared: bool) -> NodeProcess:
        state_dir = self._folder / str(len(list(self._folder.iterdir())))
        state_dir.mkdir(mode=0o700)
        (fresh,) = self._cluster.start(1, shared=shared, state_dir=str(state_dir))
        return fresh

    def _join(self, fresh: NodeProcess) -> None:
        fresh.ask("join", seeds=[self._rng.choice(self._stable).control], timeout_s=10.0)


def _rows(minutes: float, outcome: Soak, ends: list[Answer]) -> list[Row]:
    title = f"churn for {minutes:g} min, {STABLE} nodes that stay, {CHURNING} that come and go"
    rows: list[Row] = []
    for key, what, unit, scale in (
        ("rss_bytes", "resident memory", "MB/h", 1e-6),
        ("descriptors", "descriptors", "1/h", 1.0),
        ("threads", "threads", "1/h", 1.0),
        ("segments", "shared-memory segments", "1/h", 1.0),
        ("shared_bytes", "shared memory", "MB/h", 1e-6),
    ):
        rows += _growth(title, what, unit, scale / STABLE, outcome.samples, key)
    for event, count in sorted(outcome.events.items()):
        rows.append(Row(title, f"events: {event}", count, "", 1))
    rows.append(Row(title, "errors of ours that were caught (goal 0)", sum(e["failures"] for e in ends), "", STABLE))
    rows.append(Row(title, "violations counted (goal 0)", sum(e["violations"] for e in ends), "", STABLE))
    return rows


def _growth(title: str, what: str, unit: str, scale: float, samples: list[Sample], key: str) -> list[Row]:
    """Slope per hour of a straight line through the samples after warm-up (± 1.96 standard errors as if they were
    independent), and the levels at both ends (medians of a fifth each)."""
    warm = [sample for sample in samples if sample.at >= min(WARM_UP_S, samples[-1].at / 3) and key in sample.use]
    if len(warm) < 5:
        return []
    hours = np.array([sample.at for sample in warm]) / 3600
    values = np.array([sample.use[key] for sample in warm]) * scale
    slope, level = np.polyfit(hours, values, 1)
    spread = hours - hours.mean()
    error = float(np.sqrt(np.sum((values - slope * hours - level) ** 2) / (len(warm) - 2) / np.sum(spread**2)))
    fifth = max(1, len(warm) // 5)
    first, last = float(np.median(values[:fifth])), float(np.median(values[-fifth:]))
    interval = (float(slope) - 1.96 * error, float(slope) + 1.96 * error)
    return [
        Row(title, f"{what} per node, slope after warm-up", float(slope), unit, len(warm), interval),
        Row(
            title,
            f"{what} per node, end (baseline: after warm-up)",
            last,
            unit.partition("/")[0].strip("1"),
            fifth,
            None,
            first,
        ),
    ]
