"""Change a plan after the fact: blocks that did not come, or nothing reused at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from kvcomm_p2p.planning.spans import blocks_needed
from kvcomm_p2p.planning.types import Mode, Plan, Span, SpanKind
from kvcomm_p2p.protocol.anchors import BLOCK_TOKENS, BlockKey, Miss


def dense_plan(tokens: int, mode: Mode, why: str = "") -> Plan:
    """Everything is recomputed."""
    span = Span(0, tokens, SpanKind.RECOMPUTE, why=why or "dense prefill was asked for")
    return Plan(tokens, mode, (span,), (), dense_s=0.0, planned_s=0.0)


def without_blocks(plan: Plan, failed: Mapping[BlockKey, Miss]) -> Plan:
    """The same plan with the tokens of missing blocks recomputed.

    What remains of a run keeps its donor: the hole is computed in the same forward, attending to everything before it. An
    exact span stays exact on both sides of the hole, since recomputing gives what full prefill gives.
    """
    if not failed:
        return plan
    return replace(plan, spans=tuple(piece for span in plan.spans for piece in _pieces(span, failed)))


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
