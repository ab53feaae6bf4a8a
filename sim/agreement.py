"""Does a simulation agree with the real run that it repeats? Quantity by quantity, with what it may be off by."""

from __future__ import annotations

from dataclasses import dataclass

from kvcomm_p2p.sim.metrics import Observed, percentile
from kvcomm_p2p.sim.recorded import RealRun

TTFT_P50_MAX, TTFT_P90_MAX, BYTES_MAX, POINTS_MAX = 0.15, 0.25, 0.10, 2.0


@dataclass(frozen=True, slots=True)
class Quantity:
    """`differs`: relative to the real value, or the difference itself for shares in percent. `limit`: what it may be at most;
    None: only told."""

    name: str
    unit: str
    real: float
    simulated: float
    differs: float
    limit: float | None
    n: int

    @property
    def within(self) -> bool | None:
        return None if self.limit is None else abs(self.differs) <= self.limit


def agreement(run: RealRun, observed: Observed) -> list[Quantity]:
    """What was asked after warming up, on both sides; bytes of the whole recording."""
    since = run.head.warmup_s
    real = [each for each in run.outcomes() if each.started_at >= since]
    simulated = [each for each in observed.outcomes if each.started_at >= since - 1e-9]
    rows: list[Quantity] = []
    n = len(real)
    sums = [
        {name: sum(getattr(each, name) for each in outcomes) for name in ("tokens", "covered", "reused", "exact")}
        for outcomes in (real, simulated)
    ]
    for name, told, limit in (
        ("reused", "not recomputed", POINTS_MAX),
        ("covered", "covered by donors", POINTS_MAX),
        ("exact", "of these behind the same exact prefix", None),
    ):
        before, after = (100 * each[name] / max(1, each["tokens"]) for each in sums)
        rows.append(Quantity(told, "%", before, after, after - before, limit, n))
    for q, limit in ((50, TTFT_P50_MAX), (90, TTFT_P90_MAX), (99, None)):
        before, after = (percentile([each.ttft_s for each in outcomes], q) for outcomes in (real, simulated))
        rows.append(_relative(f"first token, p{q}", "s", before, after, limit, n))
    before, after = (sum(each.pulled_bytes for each in outcomes) / 1e6 for outcomes in (real, simulated))
    rows.append(_relative("pulled", "MB", before, after, None, n))
    rows += _metadata(run, observed)
    return rows


def _metadata(run: RealRun, observed: Observed) -> list[Quantity]:
    nodes = len(run.head.agents)
    per_node_s = nodes * run.end.duration_s * 1000
    real: dict[str, int] = {}
    for node in run.end.sent_bytes:
        for name, size in node.items():
            real[name] = real.get(name, 0) + size
    simulated = dict(observed.traffic)
    rows = [
        _relative(
            "metadata per node",
            "kB/s",
            sum(real.values()) / per_node_s,
            sum(simulated.values()) / per_node_s,
            BYTES_MAX,
            nodes,
        )
    ]
    for name in sorted(real.keys() | simulated.keys()):
        before, after = (each.get(name, 0) / per_node_s for each in (real, simulated))
        rows.append(_relative(f"of it {name}", "kB/s", before, after, None, nodes))
    return rows


def _relative(name: str, unit: str, real: float, simulated: float, limit: float | None, n: int) -> Quantity:
    differs = simulated / real - 1 if real else float(simulated > 0)
    return Quantity(name, unit, real, simulated, differs, limit, n)
