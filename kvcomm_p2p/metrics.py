"""What an agent counts, as Prometheus reads it: docs/metrics.md lists every metric, METRICS is the same list in code.

Nothing is counted here: a scrape reads the counters of the node, of the wire, of the store and of the agent's requests at that
moment. Names of peers and reasons are labels; no text, token id or key is ever one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvcomm_p2p.agent_status import Distribution
from kvcomm_p2p.errors import TransportError
from kvcomm_p2p.net.driver import DriverStats
from kvcomm_p2p.protocol.peer_stats import SYNC_BOUNDS_S
from kvcomm_p2p.protocol.views import PeerView
from kvcomm_p2p.settings import METRICS_ANY_PORT

HOST = "127.0.0.1"

ALIGNMENT_ERRORS = ("layer0_mismatch", "not_finite", "residual", "tokens_mismatch")
"""Reasons of misses that say that KV did not fit where it was put."""


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric: `unit` is that of its values ("" for counts). A counter's name ends in _total, which is left out here."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    unit: str = ""


METRICS = (
    MetricSpec(
        "kvcomm_agent_info", "gauge", "Always 1; its labels say who this is.", ("name", "role", "node", "model")
    ),
    MetricSpec("kvcomm_requests", "counter", "Prompts that were filled."),
    MetricSpec("kvcomm_prompt_tokens", "counter", "Tokens of prompts, by how they were filled.", ("how",)),
    MetricSpec("kvcomm_misses", "counter", "What was found and not reused, by reason, as in reports.", ("reason",)),
    MetricSpec("kvcomm_alignment_errors", "counter", "KV that did not fit where it was put, by reason.", ("reason",)),
    MetricSpec("kvcomm_fallbacks", "counter", "Prompts that were prefilled in full after the guard's verdict."),
    MetricSpec("kvcomm_invalidations", "counter", "Own anchors that were evicted, forgotten or replaced."),
    MetricSpec("kvcomm_rejected_anchors", "counter", "Own anchors for which the pool had no room."),
    MetricSpec("kvcomm_prefill_seconds", "histogram", "Time from tokens to logits.", ("how",), "seconds"),
    MetricSpec(
        "kvcomm_prefill_phase_seconds", "counter", "Time spent in phases, which overlap.", ("phase",), "seconds"
    ),
    MetricSpec(
        "kvcomm_wait_lost_seconds", "counter", "Time lost waiting for peers that did not deliver.", (), "seconds"
    ),
    MetricSpec("kvcomm_reused_likeness", "histogram", "How alike the contexts of reused runs were, 0 to 1."),
    MetricSpec(
        "kvcomm_divergence_nats", "histogram", "Divergence of reused prompts, estimated.", ("estimate",), "nats"
    ),
    MetricSpec(
        "kvcomm_sync_seconds", "histogram", "From a publication until a peer says that it knows.", (), "seconds"
    ),
    MetricSpec("kvcomm_round_trip_seconds", "gauge", "Smoothed round trip to a peer.", ("peer",), "seconds"),
    MetricSpec("kvcomm_peers", "gauge", "Peers that are remembered, by state.", ("state",)),
    MetricSpec("kvcomm_anchors", "gauge", "Anchors held here, and known at peers.", ("where",)),
    MetricSpec("kvcomm_memory_bytes", "gauge", "Memory by use.", ("level",), "bytes"),
    MetricSpec("kvcomm_memory_limit_bytes", "gauge", "What the pool may hold.", (), "bytes"),
    MetricSpec("kvcomm_pulled_bytes", "counter", "KV received from peers.", (), "bytes"),
    MetricSpec("kvcomm_uploaded_bytes", "counter", "KV that was given to the transport for peers.", (), "bytes"),
    MetricSpec("kvcomm_transfers", "gauge", "Fetches, pulls and uploads in progress.", ("kind",)),
    MetricSpec("kvcomm_block_misses", "counter", "Blocks that were fetched and did not come, by reason.", ("reason",)),
    MetricSpec("kvcomm_blocks_checked", "counter", "Blocks whose digest was compared, by outcome.", ("ok",)),
    MetricSpec("kvcomm_busy", "counter", "Pulls of peers that were told BUSY."),
    MetricSpec("kvcomm_penalties", "counter", "Times that peers were not asked for a while.", ("peer",)),
    MetricSpec("kvcomm_violations", "counter", "Messages of peers that broke the protocol's rules."),
    MetricSpec("kvcomm_refused_deltas", "counter", "News of peers that went over a limit."),
    MetricSpec("kvcomm_messages_received", "counter", "Messages that reached the node, by type.", ("type",)),
    MetricSpec("kvcomm_frames_sent", "counter", "Frames given to the transport, by type.", ("type",)),
    MetricSpec("kvcomm_frames_lost", "counter", "Frames that the own transport refused, by type.", ("type",)),
    MetricSpec("kvcomm_frames_dropped", "counter", "Frames that came in and were not used, by reason.", ("reason",)),
    MetricSpec("kvcomm_unreachable", "counter", "Connections that were refused or lost."),
    MetricSpec("kvcomm_internal_failures", "counter", "Errors of ours that were caught; the log has them."),
)

_SPECS = {spec.name: spec for spec in METRICS}


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything at one moment. `sums`, `misses`, `wait_lost_s` and `distributions` are of `agent_status.Totals`."""

    name: str
    role: str
    node_id: str
    model_id: str
    stats: DriverStats
    peers: tuple[PeerView, ...]
    sums: Mapping[str, int]
    phases_s: Mapping[str, float]
    misses: Mapping[str, int]
    wait_lost_s: float
    distributions: Mapping[tuple[str, str], Distribution]
    deviation_bytes: int
    pool_bytes_max: int


class AgentCollector(Collector):
    """Reads `facts` at every scrape; where that fails (the agent is closing), there are no metrics."""

    def __init__(self, facts: Callable[[], Facts]) -> None:
        self._facts = facts

    def collect(self) -> Iterator[Metric]:
        """All metrics of METRICS that have values."""
        facts = self._facts()
        yield from _counted(_values(facts))
        yield from _histograms(facts)

    def describe(self) -> list[Metric]:
        """So that registering reads nothing."""
        return []


def exposition(facts: Callable[[], Facts]) -> str:
    """All metrics in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(AgentCollector(facts))
    return generate_latest(registry).decode()


class MetricsServer:
    """Answers scrapes over HTTP on the loopback interface, in a thread of its own, until it is closed."""

    def __init__(self, port: int, facts: Callable[[], Facts]) -> None:
        """`port`: METRICS_ANY_PORT takes a free one. Raises TransportError if it cannot be had."""
        registry = CollectorRegistry()
        registry.register(AgentCollector(facts))
        try:
            self._server, self._thread = start_http_server(
                0 if port == METRICS_ANY_PORT else port, addr=HOST, registry=registry
            )
        except OSError as error:
            why = error.strerror or error
            raise TransportError(f"metrics_port {port}: {why}; choose another one, or any") from error
        self.address = f"{HOST}:{self._server.server_port}"

    def close(self) -> None:
        """Stop. Calling it again does nothing."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _values(facts: Facts) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """(name, labels, value) of everything but histograms."""
    yield "kvcomm_agent_info", (facts.name, facts.role, facts.node_id, facts.model_id), 1
    yield from _request_values(facts)
    node, wire = facts.stats.node, facts.stats.wire
    yield "kvcomm_invalidations", (), node.invalidated
    yield "kvcomm_rejected_anchors", (), node.rejected_anchors
    yield "kvcomm_anchors", ("own",), node.pool_anchors
    yield "kvcomm_anchors", ("peers",), node.peer_anchors
    yield "kvcomm_memory_bytes", ("pool",), node.pool_bytes
    yield "kvcomm_memory_bytes", ("store",), facts.stats.store_held_bytes
    yield "kvcomm_memory_bytes", ("arriving",), facts.stats.store_reserved_bytes
    yield "kvcomm_memory_bytes", ("deviations",), facts.deviation_bytes
    yield "kvcomm_memory_limit_bytes", (), facts.pool_bytes_max
    yield "kvcomm_pulled_bytes", (), node.received_bytes
    yield "kvcomm_uploaded_bytes", (), node.sent_bytes
    for kind in ("fetches", "pulls", "uploads"):
        yield "kvcomm_transfers", (kind,), getattr(node, kind)
    yield "kvcomm_blocks_checked", ("yes",), wire.verified_blocks
    yield "kvcomm_blocks_checked", ("no",), wire.mismatched_blocks
    yield "kvcomm_busy", (), node.busy
    yield "kvcomm_violations", (), node.violations
    yield "kvcomm_refused_deltas", (), node.refused_deltas
    yield "kvcomm_unreachable", (), wire.unreachable
    yield "kvcomm_internal_failures", (), wire.failures
    for name, counts in (
        ("kvcomm_block_misses", node.misses),
        ("kvcomm_messages_received", node.messages),
        ("kvcomm_frames_sent", wire.sent),
        ("kvcomm_frames_lost", wire.lost),
        ("kvcomm_frames_dropped", wire.dropped),
    ):
        for label, count in sorted(counts.items()):
            yield name, (label,), count
    yield from _peer_values(facts.peers)


def _request_values(facts: Facts) -> Iterator[tuple[str, tuple[str, ...], float]]:
    yield "kvcomm_requests", (), facts.sums.get("requests", 0)
    for how in ("exact", "continued", "reused", "recomputed"):
        yield "kvcomm_prompt_tokens", (how,), facts.sums.get(f"{how}_tokens", 0)
    for reason, count in sorted(facts.misses.items()):
        yield "kvcomm_misses", (reason,), count
    for reason in ALIGNMENT_ERRORS:
        yield "kvcomm_alignment_errors", (reason,), facts.misses.get(reason, 0)
    yield "kvcomm_fallbacks", (), facts.sums.get("fallbacks", 0)
    for phase, seconds in sorted(facts.phases_s.items()):
        yield "kvcomm_prefill_phase_seconds", (phase,), seconds
    yield "kvcomm_wait_lost_seconds", (), facts.wait_lost_s


def _peer_values(peers: tuple[PeerView, ...]) -> Iterator[tuple[str, tuple[str, ...], float]]:
    states = [peer.state for peer in peers]
    for state in sorted(set(states)):
        yield "kvcomm_peers", (state,), states.count(state)
    penalties: dict[str, int] = {}
    round_trips: dict[str, float] = {}
    for peer in peers:
        if peer.penalties:
            penalties[peer.name] = penalties.get(peer.name, 0) + peer.penalties
        if peer.round_trip_s is not None and peer.state in ("alive", "suspect"):
            round_trips[peer.name] = peer.round_trip_s
    for name, count in sorted(penalties.items()):
        yield "kvcomm_penalties", (name,), count
    for name, seconds in sorted(round_trips.items()):
        yield "kvcomm_round_trip_seconds", (name,), seconds


def _counted(values: Iterator[tuple[str, tuple[str, ...], float]]) -> Iterator[Metric]:
    families: dict[str, Any] = {}
    for name, labels, value in values:
        spec = _SPECS[name]
        if name not in families:
            family = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
            families[name] = family(name, spec.help, labels=spec.labels)
        families[name].add_metric(labels, value)
    yield from families.values()


def _histograms(facts: Facts) -> Iterator[Metric]:
    families: dict[str, Any] = {}
    for (name, label), distribution in sorted(facts.distributions.items()):
        spec = _SPECS[name]
        if name not in families:
            families[name] = HistogramMetricFamily(name, spec.help, labels=spec.labels)
        labels = (label,) if spec.labels else ()
        families[name].add_metric(labels, *_cumulative(distribution.bounds, distribution.counts, distribution.total))
    sync = HistogramMetricFamily("kvcomm_sync_seconds", _SPECS["kvcomm_sync_seconds"].help)
    node = facts.stats.node
    sync.add_metric((), *_cumulative(SYNC_BOUNDS_S, node.sync_counts, node.sync_sum_s))
    families["kvcomm_sync_seconds"] = sync
    yield from families.values()


def _cumulative(bounds: Any, counts: Any, total: float) -> tuple[list[tuple[str, float]], float]:
    """Prometheus counts everything up to a bound in its class."""
    buckets, so_far = [], 0
    for bound, count in zip((*map(str, bounds), "+Inf"), counts, strict=True):
        so_far += count
        buckets.append((bound, float(so_far)))
    return buckets, total
