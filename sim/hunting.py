"""Small scenarios drawn at random, to find those that break an invariant: faults, losses, churn, tiny pools, tight limits."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from kvcomm_p2p.sim.scenario import Scenario, check_scenario

EVERY = 20
"""Events of a node between checks of all that it knows: more often than in runs that are for figures."""

COSTS = ("llama-3.1-8b-h100", "smollm2-135m-2-cores")
MIB = 1 << 20

_WORKLOADS: tuple[Mapping[str, Any], ...] = (
    {"kind": "rag", "documents": 4, "per_question": 2, "readers": 2},
    {"kind": "rag", "documents": 8, "per_question": 1, "readers": 1},
    {"kind": "mathematics", "debaters": 3},
    {"kind": "code"},
    {"kind": "creative"},
    {"kind": "graph", "graph": "ring"},
    {"kind": "graph", "graph": "star"},
)
_SETTINGS: Mapping[str, tuple[Any, ...]] = {
    "gossip_interval_s": (0.05, 1.0),
    "probe_interval_s": (0.4, 3.0),
    "forget_after_s": (30.0,),
    "recontact_s": (1.0, 5.0),
    "join_retry_s": (0.05, 2.0),
    "delta_bytes_max": (8192, 16384),
    "gossip_bytes_per_s_max": (65536,),
    "tombstone_s": (5.0, 10.0),
    "tokens_timeout_s": (0.02, 1.0),
    "pull_stall_timeout_s": (0.05, 1.0),
    "uploads_max": (1, 2),
    "upload_lease_s": (1.0,),
    "upload_bytes_in_flight_max": (MIB, 4 * MIB),
    "upload_bytes_per_s_max": (20 * MIB,),
    "requests_per_peer_s_max": (2, 20),
    "passing_on_s": (0.5, 3.0),
    "passing_on_bytes_max": (1, 16 * MIB),
    "credit_bytes": (MIB, 4 * MIB),
    "pull_piece_bytes": (1, MIB),
    "pull_busy_wait_s": (0.2,),
    "pulls_per_peer_max": (1,),
    "pool_anchors_max": (3, 10),
    "directory": ("full", "sharded"),
    "lookup_timeout_s": (0.02, 0.5),
    "penalty_first_s": (0.1, 5.0),
    "anchor_ttl_s": (3.0, 10.0),
}
_BOUND_TO: Mapping[str, Mapping[str, Any]] = {
    "probe_interval_s": {"probe_timeout_s": 0.2},
    "tombstone_s": {"gossip_interval_s": 0.2},
    "pull_stall_timeout_s": {"upload_lease_s": 2.0},
    "pool_anchors_max": {"anchors_per_peer_max": 40},
}
"""Settings that only work together."""


def draw(seed: int) -> Scenario:
    """The same for the same seed. A third of all have no faults, so that what they do break is easy to see."""
    rng = random.Random(f"hunt {seed}")
    agents = rng.choice((2, 3, 4, 5, 8))
    duration_s = float(rng.choice((6, 12, 20)))
    workload = dict(rng.choice(_WORKLOADS))
    workload["tasks_per_s"] = rng.choice((0.3, 0.6))
    written: dict[str, Any] = {
        "name": f"hunt-{seed}",
        "seed": seed,
        "agents": agents,
        "duration_s": duration_s,
        "fabrics": ["peers"],
        "costs": rng.choice(COSTS),
        "mode": rng.choice(("balanced", "fast", "exact")),
        "updates": rng.choice((0, 3, 10)),
        "publish_per_s": rng.choice((0.0, 0.0, 0.5, 3.0)),
        "publish_kept": rng.choice((1, 5)),
        "pool_bytes": rng.choice((40, 200, 1024)) * MIB,
        "models": rng.choice((1, 1, 2)),
        "workload": workload if rng.random() < 0.85 else {"kind": "none"},
        "network": _network(rng),
        "protocol": _settings(rng),
        "faults": [] if rng.random() < 1 / 3 else [_fault(rng, agents, duration_s) for _ in range(rng.randint(1, 4))],
    }
    scenario = check_scenario(written)
    made = scenario.make_workload()
    if made is not None and next(made.tasks(random.Random(f"tasks {seed}"))).at_s >= duration_s:
        scenario = check_scenario({**written, "workload": {"kind": "none"}})
    return scenario


def _network(rng: random.Random) -> dict[str, Any]:
    clean = rng.random() < 0.4
    return {
        "inside": rng.choice(("lan", "fast", "loopback", "wan", "dsl")),
        "between": rng.choice(("wan", "dsl")),
        "sites": rng.choice((1, 1, 2)),
        "same_host": rng.random() < 0.25,
        "loss": 0.0 if clean else rng.choice((0.0, 0.02, 0.1, 0.25)),
        "duplication": 0.0 if clean else rng.choice((0.0, 0.1, 0.5)),
        "reordering": 0.0 if clean else rng.choice((0.0, 0.1, 0.5)),
    }


def _settings(rng: random.Random) -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    for name in rng.sample(sorted(_SETTINGS), rng.choice((0, 1, 3, 6))):
        chosen |= {**_BOUND_TO.get(name, {}), name: rng.choice(_SETTINGS[name])}
    if chosen.get("probe_interval_s", 1.0) < 2 * chosen.get("probe_timeout_s", 0.5):
        chosen["probe_timeout_s"] = chosen["probe_interval_s"] / 2
    if chosen.get("upload_lease_s", 5.0) < chosen.get("pull_stall_timeout_s", 0.2):
        chosen["upload_lease_s"] = 5.0
    if chosen.get("gossip_interval_s", 0.2) > chosen.get("tombstone_s", 60.0) / 5:
        chosen["gossip_interval_s"] = 0.2
    return chosen


def _fault(rng: random.Random, agents: int, duration_s: float) -> dict[str, Any]:
    kind = rng.choice(("crash", "restart", "freeze", "partition", "slow", "leave", "churn", "loss"))
    fault: dict[str, Any] = {
        "kind": kind,
        "at_s": round(rng.random() * duration_s * 0.8, 1),
        "for_s": round(rng.choice((0.05, 1.0, 5.0, 12.0)) * (0.5 + rng.random()), 2),
        "keeps_state": rng.random() < 0.6,
        "rolled_back": rng.random() < 0.3,
        "one_way": rng.random() < 0.3,
    }
    if kind == "loss":
        return {**fault, "loss": rng.choice((0.2, 0.5, 1.0))}
    if kind == "churn":
        return {**fault, "share": 1.0, "for_s": round(duration_s / 2, 1), "every_s": rng.choice((0.3, 1.0, 4.0))}
    return {**fault, "nodes": sorted(rng.sample(range(agents), rng.randint(1, max(1, agents // 2))))}
