"""What can be seen of a running agent from outside: its peers, what decides about reuse, its metrics, its recording.

Everything is plain types, ready for JSON, and holds neither text of prompts nor token ids nor keys.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kvcomm_p2p.agent_status import Totals
from kvcomm_p2p.errors import UsageError
from kvcomm_p2p.metrics import Facts, MetricsServer, exposition
from kvcomm_p2p.net.keys import cluster_mark
from kvcomm_p2p.planning.types import Mode
from kvcomm_p2p.protocol.messages import PROTOCOL_VERSION
from kvcomm_p2p.protocol.views import PeerView
from kvcomm_p2p.settings import Settings
from kvcomm_p2p.stack import AgentStack


class Watch:
    """A look at one running agent. From any thread but the driver's."""

    def __init__(self, stack: AgentStack, name: str, role: str, settings: Settings, totals: Totals) -> None:
        self._stack = stack
        self._name = name
        self._role = role
        self._settings = settings
        self._totals = totals

    def peers(self) -> dict[str, Any]:
        """The agent and its peers: see `peer_row`."""
        _, peers = self._stack.snapshot()
        spec = self._stack.runner.spec
        return {
            "name": self._name,
            "node_id": self._stack.node_id.hex(),
            "address": self._stack.address,
            "model": spec.name,
            "model_id": spec.model_id.hex(),
            "metrics_address": "" if self._stack.metrics is None else self._stack.metrics.address,
            "peers": [peer_row(peer) for peer in sorted(peers, key=lambda each: (each.name, each.node_id))],
        }

    def inspect(self) -> dict[str, Any]:
        """`peers`, and what else `kvcomm_p2p.doctor` looks at.

        `cluster_mark`: see `net.keys`; `security`: see `net.gate.Gate.view`. `identity` are the parts
        of the model's id. `exact_only`: why nothing may be approximated, "" if it may.
        """
        stats, _ = self._stack.snapshot()
        spec = self._stack.runner.spec
        _, misses, wait_lost_s = self._totals.read()
        return {
            **self.peers(),
            "protocol_version": PROTOCOL_VERSION,
            "cluster": self._settings.cluster,
            "cluster_mark": cluster_mark(self._stack.group_key),
            "state_dir": str(self._settings.state_dir),
            "bind_host": self._settings.bind_host,
            "security": self._stack.security(),
            "identity": dict(spec.identity_parts),
            "share_refusal": spec.share_refusal,
            "exact_only": spec.share_refusal or self._stack.engine.rules(Mode.BALANCED).reason,
            "gossip_interval_s": self._settings.gossip_interval_s,
            "pool_bytes_max": self._settings.pool_bytes_max,
            "misses": misses,
            "wait_lost_s": wait_lost_s,
            "stats": asdict(stats.node),
            "dropped": dict(stats.wire.dropped),
            "lost": dict(stats.wire.lost),
            "unreachable": stats.wire.unreachable,
            "failures": stats.wire.failures,
        }

    def metrics_text(self) -> str:
        """All metrics in Prometheus' text format."""
        return exposition(self.facts)

    def serve_metrics(self) -> None:
        """Answer scrapes where the settings say so, until the stack is closed. Raises TransportError."""
        if self._settings.metrics_port:
            self._stack.metrics = MetricsServer(self._settings.metrics_port, self.facts)

    def recording(self) -> dict[str, Any]:
        """Where the recording is, written up to now. Raises UsageError if there is none."""
        recorder = self._stack.recorder
        if recorder is None:
            raise UsageError(
                f"node {self._name!r} is not being recorded, and that can only begin with a node: start it with "
                "kvcomm node --record DIR, or all with kvcomm up --record DIR"
            )

        async def flush() -> None:
            recorder.flush()

        self._stack.driver.run(flush()).result(timeout=5.0)
        return {"path": str(recorder.path), "redacted": recorder.redacted}

    def facts(self) -> Facts:
        """Everything that metrics are made of."""
        stats, peers = self._stack.snapshot()
        sums, misses, wait_lost_s = self._totals.read()
        return Facts(
            name=self._name,
            role=self._role,
            node_id=self._stack.node_id.hex(),
            model_id=self._stack.runner.spec.model_id.hex(),
            stats=stats,
            peers=peers,
            sums=sums,
            phases_s=self._totals.phases_s(),
            misses=misses,
            wait_lost_s=wait_lost_s,
            distributions=self._totals.distributions(),
            deviation_bytes=self._stack.memory.kv_bytes,
            pool_bytes_max=self._stack.pool_bytes_max,
        )


def peer_row(peer: PeerView) -> dict[str, Any]:
    """A peer for JSON: the fields of PeerView, with ids and groups in hexadecimal digits."""
    row = asdict(peer)
    row["groups"] = [tag.hex() for tag in peer.groups]
    return {key: value.hex() if isinstance(value, bytes) else value for key, value in row.items()}
