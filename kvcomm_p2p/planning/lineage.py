"""How this node's own sequences hang together."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvcomm_p2p.planning.chains import chain_hashes
from kvcomm_p2p.planning.segments import Segment
from kvcomm_p2p.planning.types import Plan, SpanKind
from kvcomm_p2p.protocol.anchors import BLOCK_TOKENS, AnchorMeta
from kvcomm_p2p.protocol.ids import AnchorId, ChainHash

LINEAGE_MAX = 20_000
"""Anchors whose predecessor is remembered (about 100 bytes each)."""

BEGINNINGS_MAX = 8
"""Sequences remembered per first block (a role's system prompt, say): the latest."""


VARIANT_BYTES = 8
"""Of the nonce under which a conversation's repaired KV is published."""


class Lineage:
    """What only the maker of a sequence knows: which of its own anchors each one follows, and the nonce of its variant.

    An anchor's KV depends on all that stands before it; with this, a later turn of a conversation finds the whole chain, and
    sequences that branch off share what they have in common.
    """

    def __init__(self) -> None:
        self._before: OrderedDict[AnchorId, tuple[AnchorId | None, bytes]] = OrderedDict()
        self._beginnings: OrderedDict[ChainHash, OrderedDict[AnchorId, None]] = OrderedDict()

    def add(self, anchors: Sequence[AnchorMeta], variant: bytes, before: AnchorId | None = None) -> None:
        """Note that each anchor follows the one before it (the first follows `before`)."""
        for anchor in anchors:
            self._before.setdefault(anchor.anchor_id, (before, variant))
            before = anchor.anchor_id
        while len(self._before) > LINEAGE_MAX:
            self._before.popitem(last=False)

    def published(
        self, segments: Sequence[Segment], variant: bytes, before: AnchorId | None, content_key: bytes
    ) -> None:
        """Note what was cut out of one sequence: each anchor follows the one before it (the first follows `before`), and one at
        position 0 with a whole block begins a sequence. At least one segment."""
        self.add([segment.meta for segment in segments], variant, before)
        first = segments[0]
        if first.meta.start == 0 and first.meta.tokens >= BLOCK_TOKENS:
            (chain,) = chain_hashes(first.token_ids[:BLOCK_TOKENS], content_key, first.meta.model_id)
            self.begin(chain, first.meta.anchor_id)

    def known(self, anchor_id: AnchorId) -> bool:
        """Whether this node made the anchor (and has not forgotten how)."""
        return anchor_id in self._before

    def before(self, anchor_id: AnchorId) -> AnchorId | None:
        """The anchor that this one follows, if it is known."""
        return self._before.get(anchor_id, (None, b""))[0]

    def variant(self, anchor_id: AnchorId) -> bytes:
        """Nonce under which this anchor was made; empty if it is not ours."""
        return self._before.get(anchor_id, (None, b""))[1]

    def continued(self, plan: Plan) -> bytes:
        """Nonce of the conversation of ours that a plan continues; empty if it continues none, and a new one begins."""
        for span in plan.spans:
            if span.kind is SpanKind.CONTINUED and span.donor is not None:
                for anchor in reversed(span.donor.anchors):
                    variant = self.variant(anchor.anchor_id)
                    if variant:
                        return variant
        return b""

    def begin(self, first_block: ChainHash, anchor_id: AnchorId) -> None:
        """Note that the anchor begins a sequence whose first block has this chain hash."""
        same = self._beginnings.setdefault(first_block, OrderedDict())
        same[anchor_id] = None
        same.move_to_end(anchor_id)
        self._beginnings.move_to_end(first_block)
        if len(same) > BEGINNINGS_MAX:
            same.popitem(last=False)
        if len(self._beginnings) > LINEAGE_MAX:
            self._beginnings.popitem(last=False)

    def beginnings(self, first_block: ChainHash) -> tuple[AnchorId, ...]:
        """Anchors that begin sequences with this first block, latest first: an own prefix too short for fingerprints."""
        return tuple(reversed(self._beginnings.get(first_block, ())))
