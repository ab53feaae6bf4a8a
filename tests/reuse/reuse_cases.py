"""Plans, anchors and spans for tests of the reuse engine's parts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from kvcomm_p2p.planning.candidates import Candidate
from kvcomm_p2p.planning.types import (
    Donor,
    Mode,
    Plan,
    Provenance,
    Repair,
    ReuseRules,
    Run,
    RunChoice,
    Span,
    SpanKind,
)
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


RULES = ReuseRules(approximate=True, reason="", guard_probes=4)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Plans with every kind of span and run, donors of several anchors at any offsets, and a recomputed last token."""
    spans: list[Span] = []
    runs: list[RunChoice] = []
    at = 0
    for number in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(SpanKind))
        if kind is SpanKind.RECOMPUTE:
            tokens = draw(st.integers(1, 150))
            spans.append(Span(at, at + tokens, kind, why=f"why {number}"))
        elif kind is SpanKind.REUSE:
            candidate = draw(candidates(at, 100 * number))
            repair = Repair(draw(st.integers(0, 40)), draw(st.sampled_from([0.0, 0.1])), draw(st.booleans()))
            runs.append(
                RunChoice(at, candidate.end, candidate.donor, Provenance.BARE, 0.5, repair, kl=0.001, saved_s=0.1)
            )
            spans += candidate.spans(repair, RULES, len(runs))
        else:
            tokens = draw(st.integers(1, 150))
            source, donor_start = draw(sources(100 * number, tokens))
            spans.append(Span(at, at + tokens, kind, source, donor_start, f"why {number}"))
        at = spans[-1].end
    spans.append(Span(at, at + 1, SpanKind.RECOMPUTE, why="last token: its logits are needed"))
    return replace(plan_of(spans), runs=tuple(runs))


@st.composite
def candidates(draw: st.DrawFn, at: int, number: int) -> Candidate:
    """One to three equal pieces of one donor with small holes, at least RULES.run_tokens_min tokens, from `at` on."""
    lengths = draw(st.lists(st.integers(8, 120), min_size=1, max_size=3).filter(lambda each: sum(each) >= 64))
    holes = [(draw(st.integers(1, 20)), draw(st.integers(0, 20))) for _ in lengths[1:]]
    source, donor_start = draw(sources(number, sum(lengths) + sum(hole for _, hole in holes)))
    pieces = []
    for length, (gap, skipped) in zip(lengths, [*holes, (0, 0)], strict=True):
        pieces.append(Run(donor_start, at, length))
        at += length + gap
        donor_start += length + skipped
    return Candidate(source, tuple(pieces))


@st.composite
def sources(draw: st.DrawFn, number: int, tokens: int) -> tuple[Donor, int]:
    """A donor of several anchors that holds `tokens` tokens from the position on that is returned too."""
    first = BLOCK_TOKENS * draw(st.integers(0, 5))
    donor_start = first + draw(st.integers(0, 70))
    cuts = sorted(
        {
            first + BLOCK_TOKENS * cut
            for cut in draw(st.lists(st.integers(1, 8), max_size=3))
            if first + BLOCK_TOKENS * cut < donor_start + tokens
        }
    )
    bounds = [first, *cuts, donor_start + tokens + draw(st.integers(0, 40))]
    anchors = [meta(number + i, low, high) for i, (low, high) in enumerate(itertools.pairwise(bounds))]
    return donor(anchors, local=draw(st.booleans())), donor_start
