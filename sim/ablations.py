"""What can be taken away from the fabric `peers` to find out what it is worth, and how: one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from kvcomm_p2p.errors import ConfigError

_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Ablation:
    """`name`: in scenarios. `title`: in tables and pictures. `about`: what is different, for people.

    How: `protocol` are settings of all nodes that take the place of the scenario's; `replicates` and `by_context` are those of
    `agents.Rules`.
    """

    name: str
    title: str
    about: str
    protocol: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    replicates: bool = True
    by_context: bool = True


ABLATIONS = (
    Ablation(
        "referrals",
        "peers, without referrals",
        "a busy holder names nobody, and blocks just pulled are not passed on",
        protocol={"passing_on_s": 0.0},
    ),
    Ablation(
        "replication",
        "peers, without replication",
        "pulled blocks are not kept and published as replicas",
        replicates=False,
    ),
    Ablation(
        "referrals and replication",
        "peers, without referrals and replication",
        "neither: only who computed something serves it",
        protocol={"passing_on_s": 0.0},
        replicates=False,
    ),
    Ablation(
        "provenance",
        "peers, without provenance",
        "of several copies the choice does not look at what stood before them; the repair does",
        by_context=False,
    ),
    Ablation(
        "full index",
        "peers, full index",
        "every node keeps an index of everybody's anchors, however many",
        protocol={"directory": "full"},
    ),
    Ablation(
        "sharded directory",
        "peers, sharded directory",
        "nobody keeps an index of everybody's anchors: owners of shards are asked",
        protocol={"directory": "sharded"},
    ),
)


def ablation(name: str) -> Ablation:
    """The ablation of this name. Raises ConfigError."""
    for each in ABLATIONS:
        if each.name == name:
            return each
    raise ConfigError(f"ablations: {name!r} is unknown: choose of {', '.join(each.name for each in ABLATIONS)}")


def runs_of(fabrics: Sequence[str], names: Sequence[str]) -> list[tuple[str, str, Ablation | None]]:
    """What a study simulates, in its order: (name in the results, fabric, what is taken away).

    Raises ConfigError for ablations that are unknown, named twice, or without the fabric that they are compared with.
    """
    if names and "peers" not in fabrics:
        raise ConfigError("ablations are compared with the fabric peers: add it to fabrics")
    if len(set(names)) < len(names):
        raise ConfigError("ablations: one is named twice")
    without = [ablation(name) for name in names]
    return [(fabric, fabric, None) for fabric in fabrics] + [(each.title, "peers", each) for each in without]
