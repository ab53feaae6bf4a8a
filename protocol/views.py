"""What can be read of a node: its peers and its counters, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvcomm_p2p.protocol.ids import ModelId, NodeId
from kvcomm_p2p.protocol.member_table import Peer
from kvcomm_p2p.protocol.peer_stats import PeerCounts


@dataclass(frozen=True, slots=True)
class PeerView:
    """A peer as this node sees it.

    `state`: "alive", "suspect", "dead" or "left". `heard_age_s`: seconds since it last told us anything. `penalty_s`:
    seconds
    for which it is not asked for anything because it failed to deliver. `log_seq`: how much of its log of anchors is
    here;
    `told_seq`: how long it said its log is; `known_seq`: how much of ours it said it knows. The rest as in
    `peer_stats.PeerCounts`.
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
    epoch: int = 0
    incarnation: int = 0
    groups: tuple[bytes, ...] = ()
    log_seq: int = 0
    told_seq: int = 0
    known_seq: int = 0
    round_trip_s: float | None = None
    pulled_bytes: int = 0
    uploaded_bytes: int = 0
    busy_told: int = 0
    busy_given: int = 0
    penalties: int = 0
    violations: int = 0
    misses: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NodeStats:
    """Gauges, and counters since the node began. `messages`: received, by type name; `misses`: blocks, by reason.
    `throttled`: requests of peers that were too many; `pull_counts`: see `Pulls`. `invalidated`: own anchors that
    were evicted, forgotten or replaced. `sharded`: no full index is kept here, owners of shards are asked.
    `sync_counts`, `sync_sum_s`: see `peer_stats.SyncTimes`. `refutations`: how often others suspected us wrongly;
    `stalls`: how often we came late to our own timers; `local_trouble`: 0 (well) to 7, how much more patient that
    makes us now. `twin`: where another process runs that is this node, too ("": there is none), and whether peers talk to
    that one (`twins`)."""

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
    invalidated: int = 0
    throttled: int = 0
    pull_counts: Mapping[str, int] = field(default_factory=dict)
    sync_counts: tuple[int, ...] = ()
    sync_sum_s: float = 0.0
    sharded: bool = False
    failed_probes: int = 0
    refutations: int = 0
    stalls: int = 0
    local_trouble: int = 0
    twin: tuple[str, bool] = ("", False)


def peer_view(
    peer: Peer, counts: PeerCounts, *, anchors: int, heard_age_s: float, penalty_s: float, log_seq: int
) -> PeerView:
    """A peer as it is now."""
    record = peer.record
    return PeerView(
        node_id=peer.node_id,
        name=record.name,
        state=peer.state.word,
        model_id=record.model_id,
        control=record.control,
        bulk=record.bulk,
        anchors=anchors,
        heard_age_s=heard_age_s,
        penalty_s=penalty_s,
        epoch=record.epoch,
        incarnation=peer.incarnation,
        groups=record.groups,
        log_seq=log_seq,
        **_counts_view(counts),
    )


def _counts_view(counts: PeerCounts) -> dict[str, Any]:
    """The fields of a PeerView that come from its counts."""
    names = ("told_seq", "known_seq", "round_trip_s", "pulled_bytes", "uploaded_bytes", "busy_told", "busy_given")
    view = {name: getattr(counts, name) for name in (*names, "penalties", "violations")}
    view["misses"] = {reason.value: count for reason, count in counts.misses.items()}
    return view
