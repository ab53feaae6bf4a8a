"""Plans, anchors and spans for tests of the reuse engine's parts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from kvcomm_p2p.planning.types import Donor, Mode, Plan, Span, SpanKind
from kvcomm_p2p.protocol.anchors import BLOCK_TOKENS, AnchorMeta, KVLayout, Visibility
from kvcomm_p2p.protocol.ids import AnchorId, ChainHash, ModelId, NodeId, SequenceId

LAYOUT = KVLayout(layers=3, kv_heads=2, key_dim=8, value_dim=4, dtype="float32")


def meta(number: int, start: int, end: int, *, hops: int = 0, sequence: int = 1, **changes: Any) -> AnchorMeta:
    """An anchor; equal numbers have equal ids."""
    values: dict[str, Any] = {
        "anchor_id": AnchorId(number.to_bytes(16, "big")),
        "model_id": ModelId(b"m" * 16),
        "sequence_id": SequenceId(sequence.to_bytes(8, "big")),
        "start": start,
        "end": end,
        "chain_end": ChainHash(b""),
        "fingerprints": b"",
        "hops": hops,
        "visibility": Visibility.PUBLIC,
        "group": b"",
        "kv_bytes": LAYOUT.block_bytes(end - start),
    }
    return AnchorMeta(**(values | changes))


def donor(anchors: Sequence[AnchorMeta], *, holder: bytes = b"h" * 16, local: bool = False, ids: Any = None) -> Donor:
    start, end = anchors[0].start, anchors[-1].end
    token_ids = np.arange(start, end, dtype=np.uint32) if ids is None else ids
    return Donor(NodeId(holder), local, anchors[0].sequence_id, start, token_ids, tuple(anchors))


def plan_of(spans: Sequence[Span], mode: Mode = Mode.BALANCED) -> Plan:
    return Plan(spans[-1].end, mode, tuple(spans), (), 1.0, 0.5)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Plans with every kind of span, donors of several anchors at any offsets, and a recomputed last token."""
    spans: list[Span] = []
    at = 0
    for number in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(SpanKind))
        tokens = draw(st.integers(1, 150))
        source = None
        donor_start = 0
        head = kind is SpanKind.RECOMPUTE and draw(st.booleans())
        if kind is not SpanKind.RECOMPUTE or head:
            first = BLOCK_TOKENS * draw(st.integers(0, 5))
            donor_start = first + draw(st.integers(0, 70))
            cuts = sorted(
                {
                    first + BLOCK_TOKENS * cut
                    for cut in draw(st.lists(st.integers(1, 8), max_size=3))
                    if first + BLOCK_TOKENS * cut < donor_start + tokens
                }
            )
            end = donor_start + tokens + draw(st.integers(0, 40))
            bounds = [first, *cuts, end]
            anchors = [meta(100 * number + i, low, high) for i, (low, high) in enumerate(itertools.pairwise(bounds))]
            source = donor(anchors, local=draw(st.booleans()))
        spans.append(Span(at, at + tokens, kind, source, donor_start, f"why {number}"))
        at += tokens
    spans.append(Span(at, at + 1, SpanKind.RECOMPUTE, why="last token: its logits are needed"))
    return plan_of(spans)
