"""From a plan to what is asked of whom: which blocks, in which groups, for how long; and which of what came is kept.

No input or output: the engine's puller and publisher carry it out over a network, the simulator in virtual time.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby

from kvcomm_p2p.planning.costs import pull_s
from kvcomm_p2p.planning.finding import FoundDonors
from kvcomm_p2p.planning.spans import blocks_needed, encoded_blocks
from kvcomm_p2p.planning.types import Costs, Plan
from kvcomm_p2p.protocol.anchors import AnchorMeta, BlockKey
from kvcomm_p2p.protocol.ids import AnchorId, NodeId

DEADLINE_FACTOR = 6.0
"""A pull may take this many times its predicted time before the rest of it is given up (stalls end much earlier)."""

DEADLINE_MIN_S = 2.0

GROUP_BLOCKS = 16
"""Blocks per fetch: small enough that aligning one group hides behind pulling the next, large enough to keep the link busy."""

BUSY_SHARE = 0.5
"""A holder that is busy is waited for as long as this share of what recomputing the wanted tokens would take."""

WAIT_LOST_MAX_S = 0.24
"""What one request may lose in all by waiting for peers that do not deliver: token ids and blocks together (promised: 0.25)."""

REPLICA_BLOCKS_MIN = 2
"""Shorter pieces of a peer's anchor are not kept as replicas."""

Wants = dict[BlockKey, tuple[AnchorMeta, int]]
"""Blocks, each with its anchor and its number within it, in the order of the prompt."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How many seconds a fetch may take, lose in all without progress, and be put off by holders that are busy."""

    deadline_s: float
    stall_s: float
    busy_s: float


def own_blocks(plan: Plan) -> Wants:
    """Blocks of the own pool that a plan reads."""
    return {
        BlockKey(anchor.anchor_id, index): (anchor, index)
        for span in plan.spans
        if span.donor is not None and span.donor.local
        for anchor, index in blocks_needed(span)
    }


def peers_blocks(plan: Plan) -> dict[tuple[NodeId, bool], Wants]:
    """Blocks that a plan needs of each peer: those that travel raw (False) and those that travel as int8 (True)."""
    wanted: dict[tuple[NodeId, bool], Wants] = {}
    encoded = encoded_blocks(plan.spans)
    for span in plan.spans:
        if span.donor is not None and not span.donor.local:
            holder = span.donor.holder
            for anchor, index in blocks_needed(span):
                key = BlockKey(anchor.anchor_id, index)
                wanted.setdefault((holder, (holder, key) in encoded), {})[key] = anchor, index
    return wanted


def blocks_used(plan: Plan) -> frozenset[BlockKey]:
    """Blocks that a plan, as it was carried out, drew on. What came and is not among them is not kept as a replica."""
    return frozenset(BlockKey(anchor.anchor_id, index) for span in plan.spans for anchor, index in blocks_needed(span))


def pulled_from_one(plan: Plan) -> NodeId | None:
    """The only peer that a plan pulls from, whose link can be timed by it; None for nobody or several."""
    holders = {span.donor.holder for span in plan.spans if span.donor is not None and not span.donor.local}
    return next(iter(holders)) if len(holders) == 1 else None


def limits_of(wants: Wants, lost_s: float, costs: Costs) -> Limits:
    """For everything that is wanted of one holder. `lost_s`: what the request has lost by waiting already."""
    kv_bytes = sum(anchor.block_bytes(index) for anchor, index in wants.values())
    tokens = sum(anchor.block_tokens(index) for anchor, index in wants.values())
    return Limits(
        deadline_s=max(DEADLINE_MIN_S, DEADLINE_FACTOR * pull_s(costs, kv_bytes)),
        stall_s=max(WAIT_LOST_MAX_S - lost_s, 0.0),
        busy_s=BUSY_SHARE * (costs.forward_s + tokens * costs.token_s),
    )


def in_groups(wants: Wants) -> list[Wants]:
    """What is wanted of one holder as it is asked for: GROUP_BLOCKS at a time."""
    items = list(wants.items())
    return [dict(items[at : at + GROUP_BLOCKS]) for at in range(0, len(items), GROUP_BLOCKS)]


def anchors_of(wants: Wants) -> dict[AnchorId, AnchorMeta]:
    """The anchors that these blocks belong to."""
    return {anchor.anchor_id: anchor for anchor, _ in wants.values()}


def other_holders(wants: Wants, found: FoundDonors, holder: NodeId) -> tuple[NodeId, ...]:
    """Peers that have any of these blocks' anchors as well, nearest first, for when `holder` cannot serve."""
    peers = (peer for anchor_id in anchors_of(wants) for peer in found.holders.get(anchor_id, ()))
    return tuple(dict.fromkeys(peer for peer in peers if peer != holder))


def replica_pieces(
    anchors: Mapping[AnchorId, AnchorMeta], came: Container[BlockKey]
) -> list[tuple[AnchorMeta, list[int]]]:
    """What can be held of pulled anchors, as (anchor, consecutive block numbers): one piece per stretch of blocks that came."""
    return [
        (anchor, piece)
        for anchor in anchors.values()
        for piece in consecutive(index for index in range(anchor.blocks) if BlockKey(anchor.anchor_id, index) in came)
        if len(piece) >= min(REPLICA_BLOCKS_MIN, anchor.blocks)
    ]


def consecutive(numbers: Iterable[int]) -> list[list[int]]:
    """Cut ascending numbers where they skip."""
    stretches = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    return [[number for _, number in stretch] for _, stretch in stretches]
