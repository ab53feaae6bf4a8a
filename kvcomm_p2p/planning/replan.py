"""Change a plan after the fact: blocks that did not come, runs that need more repair, or nothing reused at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from kvcomm_p2p.planning.candidates import Candidate
from kvcomm_p2p.planning.spans import blocks_needed
from kvcomm_p2p.planning.types import (
    Mode,
    Plan,
    Rejected,
    Repair,
    ReuseRules,
    Run,
    RunChoice,
    Span,
    SpanKind,
    UnusedRun,
)
from kvcomm_p2p.protocol.anchors import BLOCK_TOKENS, BlockKey, Miss, MissReason

NO_HEAD = "corrected from memory, which the guard did not accept: no head to lengthen"

WIDEN_HEAD_FACTOR = 4
"""By how much heads are lengthened where the guard finds the first repair too little."""


def dense_plan(tokens: int, mode: Mode, why: str = "") -> Plan:
    """Everything is recomputed."""
    span = Span(0, tokens, SpanKind.RECOMPUTE, why=why or "dense prefill was asked for")
    return Plan(tokens, mode, (span,), (), dense_s=0.0, planned_s=0.0)


def only_exact(plan: Plan, why: str, *, sound: bool = True) -> tuple[Plan, int]:
    """The plan with everything recomputed from its first span on that is not exact, its runs rejected; and how many rows stand
    before that, which are right already when the plan was carried out. Not `sound`: nothing is kept, since what is not
    finite spreads to whatever is computed beside it."""
    kept: list[Span] = []
    for span in plan.spans if sound else ():
        if span.run or span.kind not in (SpanKind.EXACT, SpanKind.RECOMPUTE) or span is plan.spans[-1]:
            break
        kept.append(span)
    exact = kept[-1].end if kept else 0
    rest = Span(exact, plan.tokens, SpanKind.RECOMPUTE, why=why)
    missed = {number: Miss(MissReason.RESIDUAL, why) for number in range(1, len(plan.runs) + 1)}
    return replace(plan, spans=(*kept, rest), runs=(), rejected=(*plan.rejected, *_unused(plan, missed))), exact


def without_blocks(plan: Plan, failed: Mapping[BlockKey, Miss], rules: ReuseRules) -> Plan:
    """The same plan with the tokens of missing blocks recomputed.

    What remains of a run keeps its donor: the hole is computed in the same forward, attending to everything before it, so what
    follows it is no worse than before. It keeps a head and probes for the guard, or is recomputed if fewer than
    `rules.run_tokens_min` tokens are left (`rules.short_tokens_min` of one that is corrected from memory). An exact span
    stays exact on both sides of the hole, since recomputing gives what full prefill gives.
    """
    if not failed:
        return plan
    return _rebuilt(plan, lambda run: run.repair, rules, failed)


def widened(plan: Plan, factor: int, rules: ReuseRules) -> Plan:
    """The same plan with `factor` times as long heads; runs that are corrected from memory have none and are recomputed."""
    if factor < 1:
        raise ValueError("a plan cannot be widened by less than 1")
    miss = Miss(MissReason.RESIDUAL, NO_HEAD)
    plan = without_runs(plan, {number: miss for number, run in enumerate(plan.runs, start=1) if run.repair.memory})
    return _rebuilt(plan, lambda run: replace(run.repair, head_tokens=run.repair.head_tokens * factor), rules, {})


def without_runs(plan: Plan, missed: Mapping[int, Miss]) -> Plan:
    """The same plan with these runs (by number) recomputed, holes included; the reasons are told in `rejected`."""
    if not missed:
        return plan
    kept = [number for number in range(1, len(plan.runs) + 1) if number not in missed]
    rejected = list(_unused(plan, missed))
    spans = [Span(item.start, item.end, SpanKind.RECOMPUTE, why=item.miss.detail) for item in rejected]
    for span in plan.spans:
        if not any(item.start <= span.start < item.end for item in rejected):
            spans.append(replace(span, run=kept.index(span.run) + 1) if span.run else span)
    return replace(
        plan,
        spans=tuple(sorted(spans, key=lambda span: span.start)),
        runs=tuple(plan.runs[number - 1] for number in kept),
        rejected=(*plan.rejected, *rejected),
    )


def _unused(plan: Plan, missed: Mapping[int, Miss]) -> Iterator[Rejected]:
    """These runs, as they stand in the plan, rejected."""
    for number, miss in sorted(missed.items()):
        choice = plan.runs[number - 1]
        spans = [span for span in plan.spans if span.run == number]
        pieces = tuple(_joined_pieces(span for span in spans if span.donor is not None))
        run = UnusedRun(choice.donor, pieces, choice.provenance, choice.edge)
        yield Rejected(spans[0].start, spans[-1].end, choice.donor.holder, miss, run)


def _rebuilt(
    plan: Plan, repair_of: Callable[[RunChoice], Repair], rules: ReuseRules, failed: Mapping[BlockKey, Miss]
) -> Plan:
    spans: list[Span] = []
    runs: list[RunChoice] = []
    for number, group in groupby(_joined_runs(plan.spans), key=lambda span: span.run):
        members = list(group)
        if not number:
            for span in members:
                spans += _pieces(span, failed)
            continue
        choice = plan.runs[number - 1]
        repair = repair_of(choice)
        rebuilt = _repaired(members, failed, repair, rules, len(runs) + 1)
        if any(span.run for span in rebuilt):
            runs.append(replace(choice, repair=repair))
        spans += rebuilt
    return replace(plan, spans=tuple(spans), runs=tuple(runs))


def _joined_runs(spans: Sequence[Span]) -> Iterator[Span]:
    """Spans with the holes of a run numbered like the run."""
    numbers = {span.run for span in spans} - {0}
    first = {number: min(s.start for s in spans if s.run == number) for number in sorted(numbers)}
    last = {number: max(s.end for s in spans if s.run == number) for number in sorted(numbers)}
    for span in spans:
        inside = [n for n in first if first[n] <= span.start and span.end <= last[n]]
        yield replace(span, run=inside[0]) if inside and not span.run else span


def _repaired(
    members: Sequence[Span], failed: Mapping[BlockKey, Miss], repair: Repair, rules: ReuseRules, number: int
) -> list[Span]:
    """What is left of one run, repaired again; recomputed if it is too little."""
    came = [piece for span in members for piece in _pieces(span, failed)]
    whys = [replace(piece, run=0, kind=SpanKind.RECOMPUTE) for piece in came if piece.donor is None]
    pieces = _joined_pieces(piece for piece in came if piece.donor is not None)
    donor = next(span.donor for span in members if span.donor is not None)
    start, end = members[0].start, members[-1].end
    tokens_min = rules.short_tokens_min if repair.memory else rules.run_tokens_min
    if sum(piece.length for piece in pieces) < tokens_min:
        return [Span(start, end, SpanKind.RECOMPUTE, why="too little is left of a run with missing blocks")]
    encoded = any(span.encoded for span in members)
    built = Candidate(donor, tuple(pieces), encoded=encoded).spans(repair, rules, number)
    # Holes are told with their own reasons; so is what is missing before the first piece and behind the last.
    kept = [span for span in built if span.donor is not None]
    return sorted([*kept, *whys], key=lambda span: span.start)


def _joined_pieces(spans: Iterable[Span]) -> list[Run]:
    """Equal tokens of spans of one donor, those that follow each other as one."""
    pieces: list[Run] = []
    for span in spans:
        if pieces and _follows(pieces[-1], span):
            pieces[-1] = replace(pieces[-1], length=pieces[-1].length + span.tokens)
        else:
            pieces.append(Run(span.donor_start, span.start, span.tokens))
    return pieces


def _follows(run: Run, piece: Span) -> bool:
    return run.prompt_end == piece.start and run.donor_start + run.length == piece.donor_start


def _pieces(span: Span, failed: Mapping[BlockKey, Miss]) -> Iterator[Span]:
    if span.donor is None or not failed:
        yield span
        return
    for anchor, index in blocks_needed(span):
        first = anchor.start + index * BLOCK_TOKENS
        low = max(first, span.donor_start)
        high = min(first + anchor.block_tokens(index), span.donor_start + span.tokens)
        shift = span.start - span.donor_start
        miss = failed.get(BlockKey(anchor.anchor_id, index))
        if miss is None:
            yield replace(span, start=low + shift, end=high + shift, donor_start=low)
        else:
            yield Span(low + shift, high + shift, SpanKind.RECOMPUTE, why=f"block missing: {miss.reason.value}")
