"""The guard: recomputed tokens show how wrong aligned KV is, and so how far the answer will be from full prefill's."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvcomm_p2p.model.cache import LayerRepair
from kvcomm_p2p.planning.divergence import RunDeviation, Symptoms
from kvcomm_p2p.planning.spans import probe_positions
from kvcomm_p2p.planning.types import Plan, Span, SpanKind

WIDEN_KL_FACTOR = 3.0
"""A predicted divergence up to this many times the budget is answered by longer heads; a larger one by dense prefill."""

WIDEN_SHARE_MAX = 0.1
"""Heads are lengthened where the first repair took at most this share of full prefill: two in vain are a fifth more."""


class Verdict(enum.Enum):
    """What the guard says of a repaired prompt."""

    KEEP = "keep"
    WIDEN = "widen"
    RECOMPUTE = "recompute"


BROKEN_KL_FACTOR = 25.0
"""No difference of contexts is predicted to cost this many times the budget: wrong blocks and poison are."""


def broken(predicted_kl: float | None, kl_max: float) -> bool:
    """Whether a rejected prompt was filled with something that no context explains (NaN counts)."""
    return predicted_kl is not None and not predicted_kl <= BROKEN_KL_FACTOR * kl_max


def verdict(predicted_kl: float | None, kl_max: float, *, may_widen: bool) -> Verdict:
    """From the predicted divergence (None: nothing was reused; NaN: broken KV) and the budget, nats per token."""
    if predicted_kl is None or predicted_kl <= kl_max:
        return Verdict.KEEP
    if may_widen and predicted_kl <= WIDEN_KL_FACTOR * kl_max:
        return Verdict.WIDEN
    return Verdict.RECOMPUTE


@dataclass(frozen=True, slots=True)
class Watched:
    """Recomputed tokens of one run that have aligned KV to compare with: prompt `positions`, ascending; the first `heads` of
    them are its head and what is recomputed behind holes, the others probes."""

    run: int
    positions: npt.NDArray[np.int64]
    is_head: npt.NDArray[np.bool_]


class RepairWatch:
    """Compares, layer by layer within the forward, what is recomputed with what was aligned there; then lets `shift` correct
    the rest. One per forward."""

    def __init__(self, plan: Plan, since: int, layers: int, shift: LayerRepair | None = None) -> None:
        """`since`: positions before are not recomputed in this forward."""
        self._watched = watched(plan, since)
        rows = [each.positions for each in self._watched]
        self._rows = torch.from_numpy(np.concatenate(rows) if rows else np.empty(0, np.int64))
        self._layers = layers
        self._shift = shift
        self._among: torch.Tensor | None = None
        self._sum = torch.zeros(len(self._rows))

    def layer(
        self,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        positions: torch.Tensor,
        new_keys: torch.Tensor,
        new_values: torch.Tensor,
    ) -> None:
        """As `LayerRepair.layer`. Layer 0 depends on no context: it is checked elsewhere and not counted."""
        if self._among is None:
            self._rows = self._rows.to(positions.device)
            self._among = torch.searchsorted(positions, self._rows)
            self._sum = self._sum.to(positions.device)
        if layer or self._layers == 1:
            for slab, new in ((keys, new_keys), (values, new_values)):
                true = new[:, self._among].float()
                difference = (slab[:, self._rows].float() - true).pow(2).sum(dim=(0, 2)).sqrt()
                self._sum += difference / true.pow(2).sum(dim=(0, 2)).sqrt().clamp_min(1e-6)
        if self._shift is not None:
            self._shift.layer(layer, keys, values, positions, new_keys, new_values)

    def deviations(self) -> list[tuple[Watched, npt.NDArray[np.float32]]]:
        """Per run, the deviation of each of its recomputed tokens: mean over layers >= 1 and over keys and values."""
        mean = (self._sum / (2 * max(1, self._layers - 1))).cpu().numpy()
        ends = np.cumsum([len(each.positions) for each in self._watched])
        return list(zip(self._watched, np.split(mean, ends[:-1]), strict=True)) if len(ends) else []


def watched(plan: Plan, since: int = 0) -> list[Watched]:
    """The recomputed tokens of every run of the plan that have aligned KV, from `since` on."""
    found: list[Watched] = []
    for number in range(1, len(plan.runs) + 1):
        parts = [_recomputed(span) for span in plan.spans if span.run == number]
        positions = np.concatenate([rows for rows, _ in parts])
        is_head = np.concatenate([np.full(len(rows), head) for rows, head in parts])
        late = positions >= since
        if late.any():
            found.append(Watched(number, positions[late], is_head[late]))
    return found


def symptoms(
    plan: Plan,
    deviations: Sequence[tuple[Watched, npt.NDArray[np.float32]]],
    corrected: dict[int, float],
    logits: torch.Tensor,
) -> Symptoms:
    """What a repaired prompt shows. `corrected`: per run number, what is left of its probes' deviation where they shift the
    rest; `logits` [V] of the next token."""
    return Symptoms.of(list(_runs(plan, deviations, corrected)), entropy(logits))


def entropy(logits: torch.Tensor) -> float:
    """Nats, of softmax(logits [V])."""
    log_probs = torch.log_softmax(logits.double(), dim=-1)
    return float(-(log_probs.exp() * log_probs.clamp_min(-700.0)).sum())


def _runs(
    plan: Plan, deviations: Sequence[tuple[Watched, npt.NDArray[np.float32]]], corrected: dict[int, float]
) -> Iterator[RunDeviation]:
    for rows, deviation in deviations:
        tokens = sum(s.tokens for s in plan.spans if s.run == rows.run and s.kind is SpanKind.REUSE)
        head = float(deviation[rows.is_head].mean()) if rows.is_head.any() else None
        body = float(deviation[~rows.is_head].mean()) if not rows.is_head.all() else None
        yield RunDeviation(tokens / plan.tokens, head, corrected.get(rows.run, body), rows.run in corrected)


def _recomputed(span: Span) -> tuple[npt.NDArray[np.int64], bool]:
    if span.kind is SpanKind.RECOMPUTE:
        return np.arange(span.start, span.end), True
    return probe_positions(span).astype(np.int64), False
