"""From predicted deviations: which tokens of a run to recompute, and how far off the rest will be.

Recomputed tokens come in few contiguous spans, because a forward over scattered queries needs dense masks and more calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch

SPAN_PRICE_TOKENS = 1.0
"""A separate span has to be worth as much as so many of the least deviating recomputed tokens, besides its own tokens."""

_BISECTIONS = 16

Slice = tuple[int, int]


def choose(deviation: torch.Tensor, budget: int, span_min: int = 8) -> list[Slice]:
    """Spans (start, end) of a run to recompute: ascending, apart, together min(budget, n) tokens, where `deviation` [n] (>= 0)
    is largest.

    Each has at least `span_min` tokens unless all together have fewer. Spans begin at multiples of `span_min` and grow from
    there, as many as are worth their price (SPAN_PRICE_TOKENS); a tie goes to fewer spans, then to earlier ones. No
    contiguous window of as many tokens, the first ones among them, holds more deviation. What is not finite counts as 0.
    Raises ValueError for a negative budget or `span_min` < 1.
    """
    if budget < 0 or span_min < 1:
        raise ValueError(f"neither budget {budget} may be negative nor span_min {span_min} below 1")
    values = torch.nan_to_num(deviation.detach().double(), nan=0.0, posinf=0.0, neginf=0.0).clamp_min(0.0).tolist()
    n = len(values)
    if budget >= n:
        return [(0, n)] if n else []
    if not budget:
        return []
    sums = [0.0, *accumulate(values)]
    bounds = [*range(0, n - span_min + 1, span_min), n] if n >= span_min else [0, n]
    first = max(range(n - budget + 1), key=lambda start: sums[start + budget] - sums[start])
    window = [(first, first + budget)]
    spans = _worth_it(sums, bounds, budget)
    spans = _grown(spans, values, budget) if spans else window
    return max(window, spans, key=lambda each: sum(sums[end] - sums[start] for start, end in each))


def predicted_divergence(deviation: torch.Tensor, recomputed: Sequence[Slice] = ()) -> float:
    """Mean over the run's tokens of the squared deviation [n] that stays: 0 for tokens in the spans `recomputed`.

    A number for comparing plans of one run, not nats: how it relates to the divergence of answers is fitted per model
    elsewhere. Never grows when more is recomputed; of several runs, take the mean weighted by their tokens. 0 for no tokens.
    """
    left = deviation.detach().double().square()
    for start, end in recomputed:
        left[start:end] = 0.0
    return float(left.mean()) if len(left) else 0.0


def _worth_it(sums: Sequence[float], bounds: Sequence[int], budget: int) -> list[Slice]:
    """The spans of whole cells [bounds[i], bounds[i + 1]) at the lowest price per token at which they fit the budget.
    `sums`: deviations before each token, added up."""
    low = 0.0
    high = max((sums[end] - sums[start]) / (end - start) for start, end in pairwise(bounds))
    best: list[Slice] = []
    for _ in range(_BISECTIONS):
        price = (low + high) / 2
        spans = _at_price(sums, bounds, price)
        tokens = sum(end - start for start, end in spans)
        if tokens > budget:
            low = price
            continue
        best, high = spans, price
        if tokens == budget:
            break
    return best


def _at_price(sums: Sequence[float], bounds: Sequence[int], price: float) -> list[Slice]:
    """The spans that maximise their deviations minus `price` per token and span price: one pass over the cells, keeping the
    best with the last cell in (`inside`) and out (`outside`), and where each cell came from."""
    entry = price * SPAN_PRICE_TOKENS
    outside, inside = 0.0, float("-inf")
    stayed: list[bool] = []
    left: list[bool] = []
    for index in range(len(bounds) - 1):
        gain = sums[bounds[index + 1]] - sums[bounds[index]] - price * (bounds[index + 1] - bounds[index])
        stayed.append(inside >= outside - entry)
        left.append(inside > outside)
        outside, inside = max(outside, inside), max(inside, outside - entry) + gain
    spans: list[Slice] = []
    chosen = inside > outside
    end = bounds[-1]
    for index in range(len(bounds) - 2, -1, -1):
        if not chosen:
            chosen, end = left[index], bounds[index]
        elif not stayed[index]:
            spans.append((bounds[index], end))
            chosen, end = False, bounds[index]
    return spans[::-1]


def _grown(spans: Sequence[Slice], values: Sequence[float], budget: int) -> list[Slice]:
    """Spans that spend the budget: what is left goes, token by token, to the edge with the largest value; spans that come to
    touch become one."""
    grown = list(spans)
    for _ in range(budget - sum(end - start for start, end in spans)):
        edges = [(values[end], -number, 1) for number, (_, end) in enumerate(grown) if end < len(values)]
        edges += [(values[start - 1], -number, 0) for number, (start, _) in enumerate(grown) if start > 0]
        _, number, forward = max(edges)
        start, end = grown[-number]
        grown[-number] = (start, end + 1) if forward else (start - 1, end)
        grown = _merged(grown)
    return grown


def _merged(spans: Sequence[Slice]) -> list[Slice]:
    merged: list[Slice] = []
    for start, end in spans:
        if merged and merged[-1][1] >= start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged
