"""What many nodes noted (`cluster_commands.do_history`), read as one history."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvcomm_p2p.evaluation.cluster_processes import Cluster, NodeProcess

GONE_STATES = frozenset({"dead", "left", "forgotten"})
"""How a peer is called that nobody waits for any more."""


class Change(NamedTuple):
    """`observer` saw at `at` (CLOCK_MONOTONIC) that `peer` is in `state` and holds `anchors` anchors."""

    at: float
    observer: str
    peer: str
    state: str
    anchors: int


def changes(cluster: Cluster, but: Sequence[NodeProcess] = ()) -> list[Change]:
    """Of all nodes since they began to watch, in the order of time."""
    found: list[Change] = []
    observers = [node for node in cluster.nodes if node not in but]
    for node, answer in zip(observers, cluster.all("history", but=but), strict=True):
        found += [Change(at, node.name, peer, state, anchors) for at, peer, state, anchors in answer["changes"]]
    return sorted(found)


def first_seen(history: Iterable[Change], since: float, seen: Callable[[Change], bool]) -> dict[str, float]:
    """For each observer who saw it at all: seconds after `since` until the first change for which `seen`."""
    first: dict[str, float] = {}
    for change in history:
        if change.at >= since and change.observer not in first and seen(change):
            first[change.observer] = change.at - since
    return first


def false_deaths(history: Iterable[Change], alive: Iterable[str]) -> int:
    """How often somebody took one of `alive` for gone."""
    living = frozenset(alive)
    return sum(change.peer in living and change.state in GONE_STATES for change in history)


def suspicions(history: Iterable[Change], alive: Iterable[str]) -> int:
    """How often somebody suspected one of `alive`."""
    living = frozenset(alive)
    return sum(change.peer in living and change.state == "suspect" for change in history)
