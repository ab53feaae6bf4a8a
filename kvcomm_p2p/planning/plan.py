"""How a prompt will be filled.

Order: exact prefix, then our own continued prefix, then runs from anywhere, then recompute; each only as far as the
mode and the model's rules allow, and all of it only where the cost model expects to be faster than recomputing.

What stood before a run in its donor's sequence decides how much of it has to be repaired, and which of several copies is
taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kvcomm_p2p.planning.candidates import Candidate, choose, find_candidates
from kvcomm_p2p.planning.caution import is_safe
from kvcomm_p2p.planning.chains import TokenIds
from kvcomm_p2p.planning.costs import PullCost, attended, correction_s, forward_s
from kvcomm_p2p.planning.placing import placed
from kvcomm_p2p.planning.prefix import PrefixPiece, continued_prefix, exact_prefix
from kvcomm_p2p.planning.provenance import PROVENANCE_TEXTS
from kvcomm_p2p.planning.repairs import allowed_repairs, choose_repairs, expected_kl, repair_s
from kvcomm_p2p.planning.rivals import Weight, rivals
from kvcomm_p2p.planning.spans import predicted_s, pull_cost, span_hops, travel_s, wire_bytes
from kvcomm_p2p.planning.travel import pays, travelling, worth_encoding
from kvcomm_p2p.planning.types import (
    Costs,
    Donor,
    Int8From,
    Mode,
    Plan,
    Provenance,
    Rejected,
    Repair,
    ReuseRules,
    RunChoice,
    Span,
    SpanKind,
    UnusedRun,
)
from kvcomm_p2p.protocol.anchors import HOPS_PUBLISHED_MAX, Miss, MissReason
from kvcomm_p2p.protocol.ids import NodeId

APPROXIMATE = frozenset({Mode.BALANCED, Mode.FAST})
KL_TARGET = {Mode.BALANCED: 0.003, Mode.FAST: 0.02}
"""What a plan aims at, nats per token of the answer."""
KL_MAX = {Mode.BALANCED: 0.02, Mode.FAST: 0.05}
"""The budget of a request: what is predicted to cost more, before or after the repair, is recomputed."""
NOBODY = Int8From()
LAST_WHY = "last token: its logits are needed"
SLOWER_WHY = "recomputing everything is faster"
RISKY_WHY = "recomputing everything may be faster: what would be saved is less than what is known for sure"

_REPAIRED_WORTH = 0.75
"""What a saved second counts when the run is of once-repaired KV: exact copies are preferred."""

_PROVENANCE_WORTH = 0.8
_LIKENESS_WORTH = 0.1
"""What a saved second counts less per class of provenance, and within a class for a context that is not alike at all."""

REPORTED_TOKENS_MIN = 16
"""Shorter equal runs are not worth a word in the report."""


def make_plan(
    prompt_ids: TokenIds,
    donors: Sequence[Donor],
    mode: Mode,
    rules: ReuseRules,
    costs: Costs,
    *,
    pulls: Mapping[NodeId, PullCost] | None = None,
    key: bytes = b"no key",
    int8: Int8From = NOBODY,
    by_context: bool = True,
) -> Plan:
    """Plan for `prompt_ids` (uint32 [T], T >= 1) with the KV of `donors`.

    EXACT spans draw on hops 0 behind tokens equal from position 0; in mode EXACT, or when `rules.approximate` is False,
    nothing else is used. A gap before an EXACT span is recomputed, which keeps it exact; nothing inexact stands before
    one. CONTINUED needs a donor of our own with tokens equal from position 0. A reused run has hops <= HOPS_PUBLISHED_MAX
    and at least `rules.run_tokens_min` tokens, or as few as `rules.short` allows, and is repaired as `rules` has measured
    for its provenance (see `Candidate.spans`); of copies of the same content, the one whose context is most like the
    prompt's is taken, unless another is much cheaper. `pulls`: cost of pulling from a peer where measured. `key`: the
    content key, under which peers' contexts are sketched. `int8`: whose runs may travel as int8, where that pays.
    `by_context` False: of copies that may be reused, the choice does not look at the context (to find out what that is worth);
    each is repaired as its context demands all the same. Raises ValueError for an empty prompt.
    """
    prompt = np.asarray(prompt_ids, np.uint32)
    if not len(prompt):
        raise ValueError("an empty prompt has no plan")
    dense = Span(0, len(prompt), SpanKind.RECOMPUTE, why="no donor")
    dense_s = predicted_s([dense], costs, {})
    if mode is Mode.DENSE:
        return Plan(len(prompt), mode, (replace(dense, why="dense mode"),), (), dense_s, dense_s)
    planner = _Planner(prompt, donors, mode, rules, costs, pulls or {}, key, by_context)
    best = planner.best()
    holders = worth_encoding(int8, rules, costs, pulls or {}) if mode in APPROXIMATE else frozenset()
    if holders:
        encoding = planner.encoding(holders)
        other, raw_s = encoding.best(), min(best.planned_s, dense_s) if best.safe else dense_s
        if other.safe and pays(other.spans, other.planned_s, raw_s, dense_s, int8.always):
            planner, best = encoding, other
    if best.planned_s >= dense_s or not best.safe:
        used = _donated(best)
        why = RISKY_WHY if best.planned_s < dense_s else SLOWER_WHY if used else dense.why
        rejected = best.rejected + [_rejected(part, MissReason.COST, why) for part in used]
        best = _Option((replace(dense, why=why),), dense_s, rejected, ())
    told = _told(best.rejected, best.spans)
    return Plan(
        tokens=len(prompt),
        mode=mode,
        spans=best.spans,
        rejected=told,
        dense_s=dense_s,
        planned_s=best.planned_s,
        runs=planner.compared(best),
        covered=planner.covered(),
        kl_max=rules.kl_max if mode in APPROXIMATE and rules.approximate else 0.0,
        exact_only=rules.reason if mode in APPROXIMATE and not rules.approximate else "",
    )


class _Option(NamedTuple):
    """One way to fill the prompt. `safe`: never slower than computing everything, as far as costs are known."""

    spans: tuple[Span, ...]
    planned_s: float
    rejected: list[Rejected]
    runs: tuple[RunChoice, ...]
    chosen: Sequence[Candidate] = ()
    safe: bool = True


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
        key: bytes,
        by_context: bool,
    ) -> None:
        self._prompt, self._donors, self._mode, self._rules = prompt, donors, mode, rules
        self._costs, self._pulls, self._key, self._by_context = costs, pulls, key, by_context
        self._approximate = mode in APPROXIMATE and rules.approximate
        self._found = [placed(run, prompt, key) for run in find_candidates(prompt, donors, REPORTED_TOKENS_MIN)]
        self._exact = exact_prefix(prompt[:-1], donors)

    def encoding(self, holders: frozenset[NodeId]) -> _Planner:
        """A planner of the same prompt whose runs travel as int8 from these holders, where they may."""
        other = copy(self)
        other._found = [travelling(run, holders, self._rules) for run in self._found]
        return other

    def best(self) -> _Option:
        """The fastest way that is safe, the fastest if none is."""
        return min(map(self.behind, self.prefixes()), key=lambda each: (not each.safe, each.planned_s))

    def prefixes(self) -> list[list[PrefixPiece]]:
        """Exact prefixes to try, longest first: what comes from peers or behind a gap may not pay."""
        pieces = self._exact
        options = [pieces, [piece for piece in pieces if piece.donor.local]]
        for i in reversed(range(len(pieces))):
            if not pieces[i].donor.local or pieces[i].start > (pieces[i - 1].end if i else 0):
                options.append(pieces[:i])
        return [option for i, option in enumerate(options) if option not in options[:i]]

    def behind(self, exact: list[PrefixPiece]) -> _Option:
        """The best spans with this exact prefix, and what they leave unused."""
        pieces = list(exact)
        done = pieces[-1].end if pieces else 0
        if self._approximate:
            pieces += continued_prefix(self._prompt[:-1], self._donors, done)
            done = pieces[-1].end if pieces else 0
        fixed = [piece.span() for piece in pieces]
        candidates, rejected = self._usable(done)
        chosen = self._pruned(fixed, self._chosen(candidates))
        repairs = choose_repairs(chosen, self._rules, self._costs, len(self._prompt))
        spans = self._spans(fixed, chosen, repairs)
        unpaid = [piece.span() for piece in self._exact if piece not in exact]
        # What would have been exact is not worth a second reason.
        rejected = [r for r in rejected if not any(span.start <= r.start and r.end <= span.end for span in unpaid)]
        touched = [(span.start, span.end) for span in spans if span.donor is not None]
        unused: list[Span | Candidate] = [*unpaid, *candidates]
        rejected += [
            _rejected(part, MissReason.COST, "recomputing is faster")
            for part in unused
            if not any(low < part.end and part.start < high for low, high in touched)
        ]
        runs = tuple(self._choice(run, repair) for run, repair in zip(chosen, repairs, strict=True))
        planned_s = self._seconds(spans, chosen, repairs)
        safe = is_safe(spans, planned_s, self._costs, self._pulls)
        return _Option(spans, planned_s, rejected, runs, chosen, safe)

    def compared(self, option: _Option) -> tuple[RunChoice, ...]:
        """Its runs, with the copies of the same tokens that were not taken."""
        return tuple(
            replace(choice, others=rivals(run, self._found, self._weight, self._refusal))
            for choice, run in zip(option.runs, option.chosen, strict=True)
        )

    def covered(self) -> int:
        """Prompt tokens in any equal piece of any donor."""
        inside = np.zeros(len(self._prompt), dtype=bool)
        for run in self._found:
            for piece in run.pieces:
                inside[piece.prompt_start : piece.prompt_end] = True
        for exact in self._exact:
            inside[exact.start : exact.end] = True
        return int(inside.sum())

    def _usable(self, done: int) -> tuple[list[Candidate], list[Rejected]]:
        """Candidates clipped to [done, T - 1): those that may be reused, and the others with the reason."""
        usable: list[Candidate] = []
        rejected: list[Rejected] = []
        for found in self._found:
            run = found.clipped(done, len(self._prompt) - 1)
            if run is None or run.tokens < REPORTED_TOKENS_MIN:
                continue
            refusal = self._refusal(run)
            if refusal is None:
                usable.append(run)
            else:
                rejected.append(_rejected(run, *refusal))
        return usable, rejected

    def _chosen(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Which copies to use, ascending and disjoint in the prompt."""
        tokens_min = self._rules.reused_tokens_min
        if self._by_context:
            return choose(candidates, self._worth_s, tokens_min)
        alike = [replace(run, provenance=Provenance.SAME, likeness=1.0) for run in candidates]
        blind = [placed(run, self._prompt, self._key) for run in choose(alike, self._worth_s, tokens_min)]
        return [run for run in blind if self._refusal(run) is None]

    def _refusal(self, run: Candidate) -> tuple[MissReason, str] | None:
        """Why a run may not be reused."""
        rules = self._rules
        options = rules.options(run.provenance, run.start, run.tokens, run.edge)
        hops = max(span_hops(span) for span in run.whole())
        if run.tokens < rules.run_tokens_min and not (self._approximate and options):
            return MissReason.TOO_SHORT, f"{run.tokens} equal tokens, fewer than {rules.run_tokens_min}"
        if not self._approximate:
            return MissReason.EXACT_ONLY, "the mode is exact" if self._mode is Mode.EXACT else rules.reason
        if hops > HOPS_PUBLISHED_MAX:
            return MissReason.EXACT_ONLY, f"the copy has {hops} repairs behind it"
        if not options:
            return MissReason.DIVERGENCE, f"no repair was measured for {PROVENANCE_TEXTS[run.provenance]}"
        if not allowed_repairs(run, rules, len(self._prompt)):
            least = min(expected_kl(run, each, len(self._prompt)) for each in options)
            detail = f"{PROVENANCE_TEXTS[run.provenance]}: {least:.3f} nats/token expected, {rules.kl_max:.3f} allowed"
            return MissReason.DIVERGENCE, detail
        return None

    def _worth_s(self, run: Candidate) -> float:
        """Seconds that reusing a run saves, less for copies from other contexts; latencies and second forwards, which runs
        share, are left to `_pruned`."""
        return self._weight(run).worth_s

    def _weight(self, run: Candidate) -> Weight:
        allowed = allowed_repairs(run, self._rules, len(self._prompt))
        if not allowed:
            return Weight(0.0)
        target = self._rules.kl_target
        repair = next((r for r in allowed if expected_kl(run, r, len(self._prompt)) <= target), allowed[-1])
        saved_s = self._saved_s(run, repair)
        if saved_s <= 0:
            return Weight(saved_s)
        context = _PROVENANCE_WORTH**run.provenance * (1 - _LIKENESS_WORTH * (1 - run.likeness))
        repaired = any(span_hops(span) > 0 for span in run.whole())
        return Weight(saved_s, context, _REPAIRED_WORTH if repaired else 1.0)

    def _saved_s(self, run: Candidate, repair: Repair) -> float:
        """Predicted seconds that a repaired run saves against recomputing it."""
        costs = self._costs
        saved = forward_s(costs, run.tokens, attended(run.tokens, run.start)) - costs.forward_s
        saved -= repair_s(run, repair, self._rules, costs) + _correction_s(run, repair, costs)
        saved -= run.tokens * costs.token_bytes / costs.align_bytes_per_s
        for holder, wire in wire_bytes(run.whole(), costs).items():
            saved -= travel_s(wire, pull_cost(costs, self._pulls, holder), costs)
        return saved

    def _choice(self, run: Candidate, repair: Repair) -> RunChoice:
        kl = expected_kl(run, repair, len(self._prompt))
        saved_s = self._saved_s(run, repair)
        return RunChoice(
            run.start,
            run.end,
            run.donor,
            run.provenance,
            run.likeness,
            repair,
            kl,
            saved_s,
            context=run.context,
            edge=run.edge,
        )

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
                best_s = self._predicted_s(fixed, chosen)
            fewer = [run for run in chosen if run not in group]
            fewer_s = self._predicted_s(fixed, fewer)
            if fewer_s <= best_s:
                chosen, best_s = fewer, fewer_s
        return chosen

    def _predicted_s(self, fixed: Sequence[Span], chosen: Sequence[Candidate]) -> float:
        repairs = choose_repairs(chosen, self._rules, self._costs, len(self._prompt))
        return self._seconds(self._spans(fixed, chosen, repairs), chosen, repairs)

    def _seconds(self, spans: Sequence[Span], chosen: Sequence[Candidate], repairs: Sequence[Repair]) -> float:
        corrections = [_correction_s(run, repair, self._costs) for run, repair in zip(chosen, repairs, strict=True)]
        return predicted_s(spans, self._costs, self._pulls) + sum(corrections)

    def _spans(self, fixed: Sequence[Span], chosen: Sequence[Candidate], repairs: Sequence[Repair]) -> tuple[Span, ...]:
        """Prefix, repaired runs, and recompute in between and at the end."""
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
        for number, (run, repair) in enumerate(zip(chosen, repairs, strict=True), start=1):
            recompute_until(run.start)
            spans += run.spans(repair, self._rules, number)
            at = run.end
        recompute_until(len(self._prompt))
        return tuple(spans)


def _correction_s(run: Candidate, repair: Repair, costs: Costs) -> float:
    return correction_s(costs, run.tokens) if repair.memory else 0.0


def _donated(option: _Option) -> list[Span | Candidate]:
    """Everything that would come from a donor, whole runs as one."""
    fixed = [span for span in option.spans if span.donor is not None and span.run == 0]
    return [*fixed, *option.chosen]


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


def _rejected(part: Span | Candidate, reason: MissReason, detail: str) -> Rejected:
    assert part.donor is not None
    run = UnusedRun(part.donor, part.pieces, part.provenance, part.edge) if isinstance(part, Candidate) else None
    return Rejected(part.start, part.end, part.donor.holder, Miss(reason, detail), run)
