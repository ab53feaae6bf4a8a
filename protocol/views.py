"""What can be read of a node: its peers and its counters, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvcomm_p2p.protocol.ids import ModelId, NodeId


@dataclass(frozen=True, slots=True)
class PeerView:
    """A peer as this node sees it.

    `state`: "alive", "expired" or "left". `heard_age_s`: seconds since its heartbeat last rose. `penalty_s`: seconds
    for which it is not asked for anything because it failed to deliver.
    """

    node_id: NodeId
    name: str
    state: str
    model_id: ModelId
    control: str
    bulk: str
    anchors: int
    heard_age_s: float
    penalty_s: float


@dataclass(frozen=True, slots=True)
class NodeStats:
    """Gauges, and counters since the node began. `messages`: received, by type name; `misses`: blocks, by reason."""

    pool_bytes: int
    pool_anchors: int
    peers_alive: int
    peers_known: int
    peer_anchors: int
    fetches: int
    pulls: int
    uploads: int
    received_bytes: int
    sent_bytes: int
    violations: int
    unknown_senders: int
    unasked_chunks: int
    busy: int
    rejected_anchors: int
    refused_deltas: int
    messages: Mapping[str, int]
    misses: Mapping[str, int]
