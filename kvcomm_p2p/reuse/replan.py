"""Change a plan after the fact: blocks that did not come, or nothing reused at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from kvcomm_p2p.planning.spans import blocks_needed
from kvcomm_p2p.planning.types import Mode, Plan, Span, SpanKind
from kvcomm_p2p.protocol.anchors import BLOCK_TOKENS, BlockKey, Miss


def dense_plan(tokens: int, mode: Mode, why: str = "") -> Plan:
    """Everything is recomputed."""
    span = Span(0, tokens, SpanKind.RECOMPUTE, why=why or "dense prefill was asked for")
    return Plan(tokens, mode, (span,), (), dense_s=0.0, planned_s=0.0)


def without_blocks(plan: Plan, failed: Mapping[BlockKey, Miss], head_tokens: int, run_tokens_min: int) -> Plan:
    """The same plan with the tokens of missing blocks recomputed.

    What remains of a run keeps its donor: the hole is computed in the same forward, attending to everything before it. Behind a
    hole a run begins anew, with a head that the guard can compare, or is recomputed if it is shorter than `run_tokens_min`. An
    exact span stays exact on both sides of the hole, since recomputing gives what full prefill gives.
    """
    if not failed:
        return plan
    pieces = [piece for span in plan.spans for piece in _pieces(span, failed)]
    return replace(plan, spans=tuple(_guarded(pieces, head_tokens, run_tokens_min)))


def _guarded(pieces: Sequence[Span], head_tokens: int, run_tokens_min: int) -> Iterator[Span]:
    """Give every stretch of reused pieces that does not follow its head one of its own."""
    headed: Span | None = None
    at = 0
    while at < len(pieces):
        piece = pieces[at]
        at += 1
        if piece.kind is not SpanKind.REUSE or (headed is not None and _follows(headed, piece)):
            yield piece
            headed = piece if piece.donor is not None else None
            continue
        whole = piece
        while at < len(pieces) and pieces[at].kind is SpanKind.REUSE and _follows(whole, pieces[at]):
            whole = replace(whole, end=pieces[at].end)
            at += 1
        if whole.tokens < run_tokens_min:
            yield Span(
                whole.start, whole.end, SpanKind.RECOMPUTE, why="too little is left of a run with missing blocks"
            )
            headed = None
            continue
        head = min(head_tokens, whole.tokens // 4)
        yield replace(whole, end=whole.start + head, kind=SpanKind.RECOMPUTE, why="head of what is left of a run")
        yield replace(whole, start=whole.start + head, donor_start=whole.donor_start + head)
        headed = whole


def _follows(before: Span, piece: Span) -> bool:
    return (
        before.donor is piece.donor
        and before.end == piece.start
        and before.donor_start + before.tokens == piece.donor_start
    )


def _pieces(span: Span, failed: Mapping[BlockKey, Miss]) -> Iterator[Span]:
    if span.donor is None:
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
