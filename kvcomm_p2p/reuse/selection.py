"""Where a run's recomputed tokens go, when something better than "the first ones" is known of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from kvcomm_p2p.planning.candidates import HEAD_WHY
from kvcomm_p2p.planning.types import Plan, ReuseRules, Span, SpanKind
from kvcomm_p2p.reuse.predictor_choice import choose

CHOSEN_WHY = "expected to be most wrong"

Rows = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def run_spans(plan: Plan, number: int) -> list[Span]:
    """The spans of a run that have a donor, ascending: its equal tokens, recomputed or not; holes are not among them."""
    return [span for span in plan.spans if span.run == number and span.donor is not None]


def run_positions(spans: Sequence[Span]) -> Rows:
    """Prompt positions of the spans, ascending: int64 [n]."""
    return np.concatenate([np.arange(span.start, span.end, dtype=np.int64) for span in spans])


def kept_rows(spans: Sequence[Span]) -> Mask:
    """bool [n], of the rows of a run's spans: those that stay as they are aligned, probes among them."""
    return np.concatenate([np.full(span.tokens, span.kind is SpanKind.REUSE) for span in spans])


def respent(plan: Plan, deviations: Mapping[int, torch.Tensor], rules: ReuseRules) -> Plan:
    """The same plan with as many tokens of each run recomputed, in contiguous spans, where deviations are largest.

    `deviations`: run number -> [n], expected of the run's equal tokens in order; runs that are missing stay as they are. The
    first tokens behind a hole stay recomputed. As many probes as before are spread over what is left.
    """
    spans = [span for span in plan.spans if not (span.run in deviations and span.donor is not None)]
    for number, expected in sorted(deviations.items()):
        before = run_spans(plan, number)
        spans += _respent_run(before, expected, rules)
    return replace(plan, spans=tuple(sorted(spans, key=lambda span: span.start)))


def _respent_run(before: Sequence[Span], expected: torch.Tensor, rules: ReuseRules) -> list[Span]:
    positions, recomputed = run_positions(before), ~kept_rows(before)
    sources = np.concatenate([np.arange(span.donor_start, span.donor_start + span.tokens) for span in before])
    follows = np.diff(positions) + np.diff(sources) == 2
    fixed = _behind_holes(follows, rules.hole_head_tokens) & recomputed
    values = expected.detach().clone()
    values[torch.from_numpy(fixed)] = 0.0
    chosen = fixed.copy()
    for start, end in choose(values, int(recomputed.sum() - fixed.sum())):
        chosen[start:end] = True
    if np.array_equal(chosen, recomputed):
        return list(before)
    cuts = np.flatnonzero(~follows | (chosen[1:] != chosen[:-1])) + 1
    parts = list(pairwise([0, *cuts.tolist(), len(positions)]))
    probes = iter(_shared(sum(span.probes for span in before), [high - low for low, high in parts if not chosen[low]]))
    shift = any(span.shift for span in before)
    after: list[Span] = []
    for low, high in parts:
        start, donor_start = int(positions[low]), int(sources[low])
        span = replace(before[0], start=start, end=start + high - low, donor_start=donor_start, probes=0, shift=False)
        if chosen[low]:
            why = HEAD_WHY if low == 0 or fixed[low] else CHOSEN_WHY
            after.append(replace(span, kind=SpanKind.RECOMPUTE, why=why))
        else:
            after.append(replace(span, kind=SpanKind.REUSE, why="", probes=next(probes), shift=shift))
    return after


def _behind_holes(follows: Mask, tokens: int) -> Mask:
    """bool [n]: the first `tokens` rows behind each place where a row does not follow the one before (`follows`, [n - 1])."""
    behind = np.zeros(len(follows) + 1, dtype=bool)
    for at in (np.flatnonzero(~follows) + 1).tolist():
        behind[at : at + tokens] = True
    return behind


def _shared(probes: int, lengths: Sequence[int]) -> list[int]:
    """Probes for stretches of these lengths: each its share, rounded so that the sum is kept, at most every other token."""
    bounds = np.cumsum([0, *lengths])
    counts = np.diff((probes * bounds + bounds[-1] // 2) // max(1, int(bounds[-1])))
    return [min(int(count), length // 2) for count, length in zip(counts, lengths, strict=True)]
