"""How a prompt will be filled.

Order: exact prefix, then our own continued prefix, then runs from anywhere, then recompute; each only as far as the
mode and the model's rules allow, and all of it only where the cost model expects to be faster than recomputing.

What stood before a run in its donor's sequence is not compared yet; only, among equals, a copy computed behind nothing
comes last, and one that moves less comes first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from kvcomm_p2p.planning.candidates import Candidate, choose, find_candidates
from kvcomm_p2p.planning.chains import TokenIds
from kvcomm_p2p.planning.costs import PullCost, attended, forward_s
from kvcomm_p2p.planning.prefix import PrefixPiece, continued_prefix, exact_prefix
from kvcomm_p2p.planning.spans import (
    blocks_needed,
    exact_until,
    hops_at,
    predicted_s,
    pull_cost,
    pulled_bytes,
    recompute_positions,
    span_hops,
)
from kvcomm_p2p.planning.types import Costs, Donor, Mode, Plan, Rejected, ReuseRules, Span, SpanKind
from kvcomm_p2p.protocol.anchors import HOPS_PUBLISHED_MAX, Miss, MissReason
from kvcomm_p2p.protocol.ids import NodeId

__all__ = ["HEAD_WHY", "blocks_needed", "exact_until", "hops_at", "make_plan", "recompute_positions", "span_hops"]

HEAD_WHY = "head of a reused run"
LAST_WHY = "last token: its logits are needed"

_REPAIRED_WORTH = 0.75
"""What a saved second counts when the run is of once-repaired KV: exact copies are preferred."""

_REPORTED_MIN = 32
"""Shorter equal runs are not worth a word in the report."""


def make_plan(
    prompt_ids: TokenIds,
    donors: Sequence[Donor],
    mode: Mode,
    rules: ReuseRules,
    costs: Costs,
    *,
    pulls: Mapping[NodeId, PullCost] | None = None,
) -> Plan:
    """Plan for `prompt_ids` (uint32 [T], T >= 1) with the KV of `donors`.

    EXACT spans draw on hops 0 behind tokens equal from position 0; in mode EXACT, or when `rules.approximate` is False,
    nothing else is used. A gap before an EXACT span is recomputed, which keeps it exact; nothing inexact stands before
    one. CONTINUED needs a donor of our own with tokens equal from position 0. A reused run has at least
    `rules.run_tokens_min` tokens and hops <= HOPS_PUBLISHED_MAX, and begins with a head of min(head_tokens, n // 4)
    tokens: a RECOMPUTE span (why = HEAD_WHY) that names donor and donor_start too, because its KV is pulled and aligned
    like the rest, for the guard to compare. `pulls`: cost of pulling from a peer where measured. Raises ValueError for
    an empty prompt.
    """
    prompt = np.asarray(prompt_ids, np.uint32)
    if not len(prompt):
        raise ValueError("an empty prompt has no plan")
    dense = Span(0, len(prompt), SpanKind.RECOMPUTE, why="no donor")
    dense_s = predicted_s([dense], costs, {})
    if mode is Mode.DENSE:
        return Plan(len(prompt), mode, (replace(dense, why="dense mode"),), (), dense_s, dense_s)
    planner = _Planner(prompt, donors, mode, rules, costs, pulls or {})
    spans, planned_s, rejected = min(map(planner.behind, planner.prefixes()), key=lambda option: option[1])
    if planned_s >= dense_s:
        used = _whole_runs(spans)
        rejected += [_rejected(span, MissReason.COST, "recomputing everything is faster") for span in used]
        why = "recomputing everything is faster" if used else dense.why
        spans, planned_s = (replace(dense, why=why),), dense_s
    return Plan(len(prompt), mode, spans, _told(rejected, spans), dense_s, planned_s)


class _Planner:
    """The inputs of one plan, and the candidates, found once for all prefixes that are tried."""

    def __init__(
        self,
        prompt: TokenIds,
        donors: Sequence[Donor],
        mode: Mode,
        rules: ReuseRules,
        costs: Costs,
        pulls: Mapping[NodeId, PullCost],
    ) -> None:
        self._prompt, self._donors, self._mode, self._rules = prompt, donors, mode, rules
        self._costs, self._pulls = costs, pulls
        self._approximate = mode is Mode.BALANCED and rules.approximate
        self._reported_min = min(_REPORTED_MIN, rules.run_tokens_min)
        self._found = list(find_candidates(prompt, donors, self._reported_min))
        self._exact = exact_prefix(prompt[:-1], donors)

    def prefixes(self) -> list[list[PrefixPiece]]:
        """Exact prefixes to try, longest first: what comes from peers or behind a gap may not pay."""
        pieces = self._exact
        options = [pieces, [piece for piece in pieces if piece.donor.local]]
        for i in reversed(range(len(pieces))):
            if not pieces[i].donor.local or pieces[i].start > (pieces[i - 1].end if i else 0):
                options.append(pieces[:i])
        return [option for i, option in enumerate(options) if option not in options[:i]]

    def behind(self, exact: list[PrefixPiece]) -> tuple[tuple[Span, ...], float, list[Rejected]]:
        """The best spans with this exact prefix, their predicted seconds, and what they leave unused."""
        pieces = list(exact)
        done = pieces[-1].end if pieces else 0
        if self._approximate:
            pieces += continued_prefix(self._prompt[:-1], self._donors, done)
            done = pieces[-1].end if pieces else 0
        fixed = [piece.span() for piece in pieces]
        candidates, rejected = self._usable(done)
        chosen = self._pruned(fixed, choose(candidates, self._worth_s, self._rules.run_tokens_min))
        spans = self._spans(fixed, chosen)
        unpaid = [piece.span() for piece in self._exact if piece not in exact]
        # What would have been exact is not worth a second reason.
        rejected = [r for r in rejected if not any(span.start <= r.start and r.end <= span.end for span in unpaid)]
        touched = [(span.start, span.end) for span in spans if span.donor is not None]
        rejected += [
            _rejected(span, MissReason.COST, "recomputing is faster")
            for span in (*unpaid, *(run.span() for run in candidates))
            if not any(start < span.end and span.start < end for start, end in touched)
        ]
        return spans, predicted_s(spans, self._costs, self._pulls), rejected

    def _usable(self, done: int) -> tuple[list[Candidate], list[Rejected]]:
        """Candidates clipped to [done, T - 1): those that may be reused, and the others with the reason."""
        usable: list[Candidate] = []
        rejected: list[Rejected] = []
        for run in self._found:
            run = run.clipped(done, len(self._prompt) - 1)
            if run.tokens < self._reported_min:
                continue
            span = run.span()
            if run.tokens < self._rules.run_tokens_min:
                detail = f"{run.tokens} equal tokens, fewer than {self._rules.run_tokens_min}"
                rejected.append(_rejected(span, MissReason.TOO_SHORT, detail))
            elif not self._approximate:
                detail = "the mode is exact" if self._mode is Mode.EXACT else self._rules.reason
                rejected.append(_rejected(span, MissReason.EXACT_ONLY, detail))
            elif span_hops(span) > HOPS_PUBLISHED_MAX:
                detail = f"the copy has {span_hops(span)} repairs behind it"
                rejected.append(_rejected(span, MissReason.EXACT_ONLY, detail))
            else:
                usable.append(run)
        return usable, rejected

    def _worth_s(self, run: Candidate) -> float:
        """Seconds that reusing a run saves; latencies and second forwards, which runs share, are left to `_pruned`."""
        span, costs = run.span(), self._costs
        reused = run.tokens - self._head(run.tokens)
        saved = forward_s(costs, reused, attended(reused, run.end - reused)) - costs.forward_s
        saved -= run.tokens * costs.token_bytes / costs.align_bytes_per_s
        for holder, kv_bytes in pulled_bytes([span], costs.token_bytes).items():
            saved -= kv_bytes / pull_cost(costs, self._pulls, holder).bytes_per_s
        return saved * _REPAIRED_WORTH if saved > 0 and span_hops(span) > 0 else saved

    def _pruned(self, fixed: list[Span], chosen: list[Candidate]) -> list[Candidate]:
        """Without the runs whose absence makes the whole plan faster: one, or all of a holder.

        `_worth_s` leaves out a latency and a second forward at most, so only runs that save less than that are tried.
        """
        groups: dict[NodeId, list[Candidate]] = {}
        for run in chosen:
            groups.setdefault(run.donor.holder, []).append(run)
        best_s: float | None = None
        for group in [*groups.values(), *([run] for run in chosen)]:
            latency = pull_cost(self._costs, self._pulls, group[0].donor.holder).latency_s
            if sum(map(self._worth_s, group)) > latency + self._costs.forward_s:
                continue
            if best_s is None:
                best_s = predicted_s(self._spans(fixed, chosen), self._costs, self._pulls)
            fewer = [run for run in chosen if run not in group]
            fewer_s = predicted_s(self._spans(fixed, fewer), self._costs, self._pulls)
            if fewer_s <= best_s:
                chosen, best_s = fewer, fewer_s
        return chosen

    def _head(self, tokens: int) -> int:
        return min(self._rules.head_tokens, tokens // 4)

    def _spans(self, fixed: Sequence[Span], chosen: Sequence[Candidate]) -> tuple[Span, ...]:
        """Prefix, runs with their heads, and recompute in between and at the end."""
        spans: list[Span] = []
        at = 0

        def recompute_until(end: int) -> None:
            if at < end:
                why = LAST_WHY if 0 < at == len(self._prompt) - 1 else "no donor"
                spans.append(Span(at, end, SpanKind.RECOMPUTE, why=why))

        for span in fixed:
            recompute_until(span.start)
            spans.append(span)
            at = span.end
        for run in chosen:
            recompute_until(run.start)
            split = run.start + self._head(run.tokens)
            if split > run.start:
                head = run.clipped(run.start, split).span()
                spans.append(replace(head, kind=SpanKind.RECOMPUTE, why=HEAD_WHY))
            spans.append(run.clipped(split, run.end).span())
            at = run.end
        recompute_until(len(self._prompt))
        return tuple(spans)


def _whole_runs(spans: Sequence[Span]) -> list[Span]:
    """Spans with a donor; a head joined with the run that it begins."""
    joined: list[Span] = []
    for span in spans:
        if span.donor is None:
            continue
        if joined and joined[-1].why == HEAD_WHY and joined[-1].end == span.start:
            span = replace(span, start=joined[-1].start, donor_start=joined[-1].donor_start)
            joined[-1] = span
        else:
            joined.append(span)
    return joined


def _told(rejected: Sequence[Rejected], spans: Sequence[Span]) -> tuple[Rejected, ...]:
    """By position, each stretch and reason once, without what is filled from another donor anyway."""
    filled = np.zeros(spans[-1].end + 1, dtype=np.int64)
    for span in spans:
        if span.donor is not None:
            filled[span.start + 1 : span.end + 1] = 1
    filled = np.cumsum(filled)
    first: dict[tuple[int, int, MissReason], Rejected] = {}
    for item in rejected:
        if filled[item.end] - filled[item.start] < item.end - item.start:
            first.setdefault((item.start, item.end, item.miss.reason), item)
    return tuple(sorted(first.values(), key=lambda item: (item.start, item.end)))


def _rejected(span: Span, reason: MissReason, detail: str) -> Rejected:
    if span.donor is None:
        raise ValueError("only a donor's span can be rejected")
    return Rejected(span.start, span.end, span.donor.holder, Miss(reason, detail))
