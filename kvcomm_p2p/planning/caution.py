"""Reuse only where it cannot turn out slower, even if what is known of this machine and its links is somewhat wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvcomm_p2p.planning.costs import PullCost
from kvcomm_p2p.planning.spans import lead_of, predicted_s, pull_wait_s
from kvcomm_p2p.planning.types import Costs, Span, SpanKind
from kvcomm_p2p.protocol.ids import NodeId

COST_ERROR = 0.3
SLOWER_MAX = 1.05
"""A plan with reuse takes at most SLOWER_MAX times what computing everything takes, as long as every cost is within a share of
COST_ERROR of what it is believed to be."""

_WORST = (1 + COST_ERROR) / (1 - COST_ERROR)


def is_safe(spans: Sequence[Span], planned_s: float, costs: Costs, pulls: Mapping[NodeId, PullCost]) -> bool:
    """Whether this way to fill a prompt, expected to take `planned_s`, keeps SLOWER_MAX whichever costs are off by COST_ERROR.

    Only what costs are relative to each other matters. The plan is worst off where everything but computing takes _WORST times
    as long as believed, relative to computing; and, because it may need two forwards where one computes everything, where a
    forward's fixed cost does so too. (Of tokens and pairs it computes fewer: where those cost more, it wins.)
    """
    _, lead = lead_of(spans, pull_wait_s(spans, costs, pulls), costs)
    aside_s = planned_s - predicted_s(spans, costs, pulls, lead)
    slow = replace(
        costs,
        pull_latency_s=costs.pull_latency_s * _WORST,
        pull_bytes_per_s=costs.pull_bytes_per_s / _WORST,
        align_bytes_per_s=costs.align_bytes_per_s / _WORST,
        int8_bytes_per_s=costs.int8_bytes_per_s / _WORST,
    )
    slow_pulls = {peer: PullCost(cost.latency_s * _WORST, cost.bytes_per_s / _WORST) for peer, cost in pulls.items()}
    dense = [Span(0, spans[-1].end, SpanKind.RECOMPUTE)]
    return all(
        predicted_s(spans, each, slow_pulls, lead) + aside_s * _WORST <= SLOWER_MAX * predicted_s(dense, each, {})
        for each in (slow, replace(slow, forward_s=costs.forward_s * _WORST))
    )
