"""What a plan means: where its KV comes from, how many repairs are behind it, what has to be pulled, what it costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcomm_p2p.planning.costs import PullCost, align_s, attended, forward_s
from kvcomm_p2p.planning.types import Costs, Plan, Span, SpanKind
from kvcomm_p2p.protocol.anchors import BLOCK_TOKENS, AnchorMeta, BlockKey
from kvcomm_p2p.protocol.ids import NodeId

LEAD_TOKENS_MIN = 8
"""A shorter own beginning is not worth a forward of its own while blocks are on their way."""

LEAD_WAIT_FORWARDS = 8
"""Waiting is worth filling when it takes this many times a forward's fixed cost, that is on slow links. A fast pull is work for
the same cores: on loopback a forward beside it took twice its time, and both together longer than one after the other."""


def span_hops(span: Span) -> int:
    """Largest hops among the donor's anchors that the span draws from, one more for what travels as int8; 0 without a
    donor."""
    if span.donor is None:
        return 0
    start, end = span.donor_start, span.donor_start + span.tokens
    return max((a.hops for a in span.donor.anchors if a.start < end and start < a.end), default=0) + span.encoded


def hops_at(plan: Plan) -> tuple[tuple[int, int], ...]:
    """Repairs behind the KV that the plan leads to: ascending (first position, hops), beginning with (0, ...), growing.

    A token computed behind KV with hops h has hops h itself. REUSE adds one to its donor's, EXACT and CONTINUED keep
    theirs. An entangled run is as much repaired as its worst part from its first reused token on.
    """
    whole = entangled(plan)
    steps = [(0, 0)]
    for span in plan.spans:
        if span.kind is SpanKind.RECOMPUTE:
            continue
        hops = max(map(span_hops, whole.get(span.run, (span,)))) + (span.kind is SpanKind.REUSE)
        if hops > steps[-1][1]:
            steps.append((span.start, hops))
    return tuple(steps[1:]) if len(steps) > 1 and steps[1][0] == 0 else tuple(steps)


def entangled(plan: Plan) -> dict[int, tuple[Span, ...]]:
    """By number, the spans of the reused runs in which what comes first depends on what comes later: probes shift all of
    their run, and interpolated holes are filled from both sides."""
    runs: dict[int, tuple[Span, ...]] = {}
    for span in plan.spans:
        if span.run:
            runs[span.run] = (*runs.get(span.run, ()), span)
    return {
        number: spans
        for number, spans in runs.items()
        if any(span.shift or (span.kind is SpanKind.REUSE and span.donor is None) for span in spans)
    }


def exact_until(plan: Plan) -> int:
    """Number of leading tokens whose KV will be wholly exact: chain hashes may be advertised up to there."""
    return next((start for start, hops in hops_at(plan) if hops > 0), plan.tokens)


def recompute_positions(plan: Plan) -> npt.NDArray[np.int64]:
    """Prompt positions to compute through all layers, ascending: int64 [R], probes included. Holds plan.tokens - 1 always."""
    parts = [np.arange(s.start, s.end) if s.kind is SpanKind.RECOMPUTE else probe_positions(s) for s in plan.spans]
    return np.concatenate(parts)


def probe_positions(span: Span) -> npt.NDArray[np.int64]:
    """Prompt positions of a span's probes, ascending, evenly spaced: int64 [probes]."""
    return span.start + (2 * np.arange(span.probes) + 1) * span.tokens // (2 * max(1, span.probes))


def blocks_needed(span: Span) -> list[tuple[AnchorMeta, int]]:
    """The donor's blocks (anchor, index within it) that hold any token of the span, ascending; [] without a donor.

    The head of a reused run has a donor as well: its KV is recomputed, but the guard compares it with the donor's.
    """
    if span.donor is None:
        return []
    needed: list[tuple[AnchorMeta, int]] = []
    at, end = span.donor_start, span.donor_start + span.tokens
    for anchor in span.donor.anchors:
        if anchor.start <= at < anchor.end and at < end:
            stop = min(end, anchor.end)
            first, last = (at - anchor.start) // BLOCK_TOKENS, (stop - 1 - anchor.start) // BLOCK_TOKENS
            needed += [(anchor, index) for index in range(first, last + 1)]
            at = stop
    return needed


def pulled_bytes(spans: Iterable[Span], token_bytes: int) -> dict[NodeId, int]:
    """Bytes of the whole blocks that the spans need from each peer; a block that two spans share counts once."""
    bytes_from: dict[NodeId, int] = {}
    seen: set[tuple[NodeId, BlockKey]] = set()
    for span in spans:
        if span.donor is None or span.donor.local:
            continue
        holder = span.donor.holder
        for anchor, index in blocks_needed(span):
            block = (holder, BlockKey(anchor.anchor_id, index))
            if block not in seen:
                seen.add(block)
                bytes_from[holder] = bytes_from.get(holder, 0) + anchor.block_tokens(index) * token_bytes
    return bytes_from


def encoded_blocks(spans: Iterable[Span]) -> frozenset[tuple[NodeId, BlockKey]]:
    """Blocks (holder, key) that travel as int8: those that encoded spans need, and no other span."""
    needed: dict[bool, set[tuple[NodeId, BlockKey]]] = {False: set(), True: set()}
    for span in spans:
        if span.donor is not None and not span.donor.local:
            blocks = blocks_needed(span)
            needed[span.encoded].update((span.donor.holder, BlockKey(a.anchor_id, index)) for a, index in blocks)
    return frozenset(needed[True] - needed[False])


class Wire(NamedTuple):
    """Bytes that come from one peer: `wire_bytes` travel; for them `int8_bytes` of KV are encoded there and decoded here."""

    wire_bytes: int
    int8_bytes: int


def wire_bytes(spans: Sequence[Span], costs: Costs) -> dict[NodeId, Wire]:
    """What comes from each peer for these spans."""
    whole = pulled_bytes(spans, costs.token_bytes)
    if not any(span.encoded for span in spans):
        return {holder: Wire(kv_bytes, 0) for holder, kv_bytes in whole.items()}
    raw = pulled_bytes((span for span in spans if not span.encoded), costs.token_bytes)
    found: dict[NodeId, Wire] = {}
    for holder, kv_bytes in whole.items():
        int8_bytes = kv_bytes - raw.get(holder, 0)
        found[holder] = Wire(kv_bytes - int8_bytes + round(costs.int8_share * int8_bytes), int8_bytes)
    return found


def predicted_s(
    spans: Sequence[Span], costs: Costs, pulls: Mapping[NodeId, PullCost], lead: int | None = None
) -> float:
    """Seconds from knowing the plan to next-token logits, as the engine goes about it.

    Blocks are aligned as they come; on a slow link the prompt's own beginning is computed meanwhile. All the rest is one forward
    after that. `lead`: where that beginning ends; None: as decided with these costs (`lead_rows`).
    """
    wait = pull_wait_s(spans, costs, pulls)
    if lead is None:
        _, lead = lead_of(spans, wait, costs)
    work = work_of(spans, costs, lead)
    return max(wait, work.align_s, work.ahead_s) + work.rest_s


class Work(NamedTuple):
    """Seconds of computing that a plan asks for: forwards before and after the blocks are there, and placing the blocks."""

    ahead_s: float
    rest_s: float
    align_s: float


def work_of(spans: Sequence[Span], costs: Costs, lead: int) -> Work:
    """`lead`: recomputed spans that end there are computed while blocks are coming, all others after that."""
    ahead, rest = np.zeros(2), np.zeros(2)
    copied = 0
    for span in spans:
        if span.donor is not None:
            copied += span.tokens * costs.token_bytes
        if span.kind is SpanKind.RECOMPUTE:
            (ahead if span.end <= lead else rest)[:] += span.tokens, attended(span.tokens, span.start)
        elif span.donor is not None:
            rest += span.probes, span.probes * (span.start + span.end) / 2
    return Work(_forward_s(costs, ahead), _forward_s(costs, rest), align_s(costs, copied))


def pull_wait_s(spans: Sequence[Span], costs: Costs, pulls: Mapping[NodeId, PullCost]) -> float:
    """Seconds until all blocks of peers are here, 0 if none are needed: bytes share our link, latencies run side by side."""
    pulled = wire_bytes(spans, costs)
    by_peer = [(pull_cost(costs, pulls, holder), wire) for holder, wire in pulled.items()]
    latency = max((cost.latency_s for cost, _ in by_peer), default=0.0)
    return latency + sum(travel_s(wire, cost, costs) for cost, wire in by_peer)


def travel_s(wire: Wire, cost: PullCost, costs: Costs) -> float:
    """Seconds that bytes take from one peer, without latency."""
    return wire.wire_bytes / cost.bytes_per_s + wire.int8_bytes / costs.int8_bytes_per_s


def lead_rows(plan: Plan, costs: Costs, pulls: Mapping[NodeId, PullCost]) -> tuple[int, int]:
    """(exact, lead): rows [0, exact) come from the own pool, [exact, lead) are computed while peers' blocks are coming.

    (0, 0) if too little can be done meanwhile, or the blocks will be here soon.
    """
    return lead_of(plan.spans, pull_wait_s(plan.spans, costs, pulls), costs)


def lead_of(spans: Sequence[Span], wait_s: float, costs: Costs) -> tuple[int, int]:
    """`lead_rows` of the spans of a plan whose blocks take `wait_s` to come."""
    if wait_s <= LEAD_WAIT_FORWARDS * costs.forward_s:
        return 0, 0
    exact = 0
    for span in spans:
        if span.kind is SpanKind.EXACT and span.donor is not None and span.donor.local:
            exact = span.end
        elif span.kind is SpanKind.RECOMPUTE and span.donor is None and span.tokens >= LEAD_TOKENS_MIN:
            return (exact, span.end) if span.end < spans[-1].end else (0, 0)
        else:
            break
    return 0, 0


def _forward_s(costs: Costs, tokens_and_pairs: npt.NDArray[np.float64]) -> float:
    return forward_s(costs, int(tokens_and_pairs[0]), float(tokens_and_pairs[1]))


def pull_cost(costs: Costs, pulls: Mapping[NodeId, PullCost], holder: NodeId) -> PullCost:
    """What is known of this peer, or of peers in general."""
    return pulls.get(holder) or PullCost(costs.pull_latency_s, costs.pull_bytes_per_s)
