"""What an agent tells about itself."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvcomm_p2p.planning.types import Mode
from kvcomm_p2p.report import PrefillReport

if TYPE_CHECKING:
    from kvcomm_p2p.stack import AgentStack


PREFILL_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0)
LIKENESS_BOUNDS = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)
DIVERGENCE_BOUNDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)


@dataclass(slots=True)
class Distribution:
    """How many values lay at or below each of `bounds` and above the one before; one more class has what is above all."""

    bounds: tuple[float, ...]
    counts: list[int]
    total: float = 0.0

    @classmethod
    def over(cls, bounds: tuple[float, ...]) -> Distribution:
        """Without values."""
        return cls(bounds, [0] * (len(bounds) + 1))

    def add(self, value: float) -> None:
        """One more value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Totals:
    """Sums over all prefills of an agent, and the report of the last one. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: Counter[str] = Counter()
        self._misses: Counter[str] = Counter()
        self._wait_lost_s = 0.0
        self._phases_s: dict[str, float] = {}
        self._distributions: dict[tuple[str, str], Distribution] = {}
        self.last: PrefillReport | None = None

    def add(self, report: PrefillReport) -> None:
        """Count one prefill."""
        with self._lock:
            self.last = report
            self._sums["requests"] += 1
            for name in ("prompt", "exact", "continued", "reused", "recomputed"):
                self._sums[f"{name}_tokens"] += getattr(report, f"{name}_tokens")
            self._sums["pulled_bytes"] += report.pulled_bytes
            self._sums["fallbacks"] += bool(report.fallback)
            self._misses.update(miss.reason for miss in report.misses)
            self._wait_lost_s += report.wait_lost_s
            for phase in ("find", "plan", "pull", "align", "recompute"):
                self._phases_s[phase] = self._phases_s.get(phase, 0.0) + getattr(report.timings, f"{phase}_s")
            self._distribute(report)

    def _distribute(self, report: PrefillReport) -> None:
        how = "computed" if report.recomputed_tokens == report.prompt_tokens else "reused"
        self._distribution("kvcomm_prefill_seconds", how, PREFILL_BOUNDS_S).add(report.timings.total_s)
        for run in report.runs:
            self._distribution("kvcomm_reused_likeness", "", LIKENESS_BOUNDS).add(run.likeness)
        for estimate in ("expected", "predicted"):
            kl = getattr(report, f"{estimate}_kl")
            if report.runs and kl is not None:
                self._distribution("kvcomm_divergence_nats", estimate, DIVERGENCE_BOUNDS).add(kl)

    def _distribution(self, name: str, label: str, bounds: tuple[float, ...]) -> Distribution:
        return self._distributions.setdefault((name, label), Distribution.over(bounds))

    def phases_s(self) -> dict[str, float]:
        """Seconds by phase of `report.Timings`."""
        with self._lock:
            return dict(self._phases_s)

    def distributions(self) -> dict[tuple[str, str], Distribution]:
        """Copies, by name of the metric and label."""
        with self._lock:
            return {key: replace(each, counts=list(each.counts)) for key, each in self._distributions.items()}

    def read(self) -> tuple[dict[str, int], dict[str, int], float]:
        """Sums by name, misses by reason, seconds lost waiting."""
        with self._lock:
            return dict(self._sums), dict(self._misses), self._wait_lost_s


@dataclass(frozen=True, slots=True)
class AgentStatus:
    """A snapshot. Token counts are sums over all prefills; `misses` counts by reason. `deviations`: entries of the memory
    that corrects short runs, and their bytes."""

    name: str
    role: str
    node_id: str
    address: str
    model: str
    model_id: str
    exact_only_reason: str
    uptime_s: float
    pool_bytes: int
    pool_bytes_max: int
    anchors: int
    requests: int
    prompt_tokens: int
    exact_tokens: int
    continued_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    pulled_bytes: int
    fallbacks: int
    wait_lost_s: float
    deviations: int = 0
    deviation_bytes: int = 0
    misses: dict[str, int] = field(default_factory=dict)
    peers: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, stack: AgentStack, name: str, role: str, totals: Totals, uptime_s: float) -> AgentStatus:
        """Read a running agent's parts."""
        sums, misses, wait_lost_s = totals.read()
        stats, peers = stack.snapshot()
        spec = stack.runner.spec
        return cls(
            name=name,
            role=role,
            node_id=stack.node_id.hex(),
            address=stack.address,
            model=spec.name,
            model_id=spec.model_id.hex(),
            exact_only_reason=spec.share_refusal or stack.engine.rules(Mode.BALANCED).reason,
            uptime_s=uptime_s,
            pool_bytes=stats.node.pool_bytes,
            pool_bytes_max=stack.pool_bytes_max,
            anchors=stats.node.pool_anchors,
            requests=sums.get("requests", 0),
            prompt_tokens=sums.get("prompt_tokens", 0),
            exact_tokens=sums.get("exact_tokens", 0),
            continued_tokens=sums.get("continued_tokens", 0),
            reused_tokens=sums.get("reused_tokens", 0),
            recomputed_tokens=sums.get("recomputed_tokens", 0),
            pulled_bytes=sums.get("pulled_bytes", 0),
            fallbacks=sums.get("fallbacks", 0),
            wait_lost_s=wait_lost_s,
            deviations=len(stack.memory),
            deviation_bytes=stack.memory.kv_bytes,
            misses=misses,
            peers=[
                {
                    "name": peer.name,
                    "node_id": peer.node_id.hex(),
                    "state": peer.state,
                    "address": peer.control,
                    "anchors": peer.anchors,
                    "model_id": peer.model_id.hex(),
                    "last_heard_s": peer.heard_age_s,
                }
                for peer in peers
            ],
        )

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were not computed."""
        if not self.prompt_tokens:
            return 0.0
        return (self.exact_tokens + self.continued_tokens + self.reused_tokens) / self.prompt_tokens

    def as_dict(self) -> dict[str, Any]:
        """Plain types, ready for JSON; with the hit rate."""
        return {**asdict(self), "hit_rate": self.hit_rate}
