"""What a study leaves for pictures: curves with few points, plain types."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvcomm_p2p.sim.metrics import Observed, misses, reused_by, seconds_since_return
from kvcomm_p2p.sim.study import Study

TIME_BINS = 30
QUANTILES = 101
RETURN_BIN_S, RETURN_BINS = 20.0, 5
AGENTS_LISTED = 64
"""Of more agents only the quantiles are kept."""


def series(study: Study) -> dict[str, Any]:
    """Curves by fabric, times in seconds.

    `time_s`, `reused`: share of prompt tokens not recomputed, by when they were asked; `reused_hit`: the same of agents that
    were down at some time, `reused_others`: of the rest (both only where somebody was down). `outages`: [agent, from, until].
    `since_return_s`, `since_return`: share by how long the agent had been back, `since_return_n` prompts each. `ttft_s`,
    `convergence_s`, `heard_s`: quantiles, from 0 to 1 in equal steps. `served_bytes`, `prompts`: by agent (quantiles of more
    than AGENTS_LISTED).
    """
    return {observed.fabric: _curves(observed, study) for observed in study.observed}


def quantiles(values: Sequence[float], count: int = QUANTILES) -> list[float]:
    """The values themselves, ascending, or so many quantiles of them from the least to the largest."""
    if len(values) <= count:
        return sorted(values)
    return [float(value) for value in np.quantile(np.asarray(values), np.linspace(0, 1, count))]


def _curves(observed: Observed, study: Study) -> dict[str, Any]:
    counted = [each for each in observed.outcomes if each.started_at >= study.scenario.warmup_s]
    edges = np.linspace(0, observed.duration_s, TIME_BINS + 1)
    asked = Counter(each.agent for each in counted)
    prompts = [asked[agent] for agent in range(study.scenario.agents)]
    return {
        "time_s": ((edges[:-1] + edges[1:]) / 2).tolist(),
        **_hit_rates(observed, edges),
        "ttft_s": quantiles([each.ttft_s for each in counted]),
        "served_bytes": _by_agent(observed.served_bytes),
        "prompts": _by_agent(prompts),
        "misses": dict(sorted(misses(observed).items())),
        "traffic": dict(sorted(observed.traffic.items())),
        "convergence_s": quantiles(observed.convergence_s),
        "heard_s": quantiles(observed.heard_s),
    }


def _by_agent(values: Sequence[float]) -> list[float]:
    return list(values) if len(values) <= AGENTS_LISTED else quantiles(values, AGENTS_LISTED)


def _hit_rates(observed: Observed, edges: Any) -> dict[str, Any]:
    if not observed.outcomes:
        return {"reused": [None] * (len(edges) - 1)}
    everybody = observed.outcomes
    rates: dict[str, Any] = {"reused": _known(reused_by([each.started_at for each in everybody], everybody, edges))}
    if not observed.outages:
        return rates
    hit = {outage.agent for outage in observed.outages}
    for name, chosen in (
        ("reused_hit", [each for each in everybody if each.agent in hit]),
        ("reused_others", [each for each in everybody if each.agent not in hit]),
    ):
        rates[name] = _known(reused_by([each.started_at for each in chosen], chosen, edges))
    rates["outages"] = [
        [each.agent, each.from_s, each.until_s if math.isfinite(each.until_s) else None] for each in observed.outages
    ]
    back = [
        (seconds, each) for each in everybody if (seconds := seconds_since_return(each, observed.outages)) is not None
    ]
    ages = np.arange(RETURN_BINS + 1, dtype=np.float64) * float(RETURN_BIN_S)
    rates["since_return_s"] = ((ages[:-1] + ages[1:]) / 2).tolist()
    rates["since_return"] = _known(reused_by([seconds for seconds, _ in back], [each for _, each in back], ages))
    rates["since_return_n"] = np.histogram([seconds for seconds, _ in back], ages)[0].tolist()
    return rates


def _known(shares: Any) -> list[float | None]:
    return [None if math.isnan(share) else share for share in shares.tolist()]
