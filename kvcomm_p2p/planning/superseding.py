"""Which anchors are not needed any more: a conversation is held once, not once per turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvcomm_p2p.planning.types import Plan, SpanKind
from kvcomm_p2p.protocol.anchors import AnchorMeta
from kvcomm_p2p.protocol.ids import AnchorId

SUPERSEDED_KEPT_S = 5.0
"""How long an anchor stays after a longer one has taken its place: peers learn of the longer one a little later."""


class Outdated:
    """Anchors whose rows now stand in longer ones. They are not forgotten at once, since peers learn of the longer ones a
    little later: what is due goes with the next publication."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[float, tuple[AnchorId, ...]]] = deque()

    def add(self, anchor_ids: Sequence[AnchorId], now: float) -> list[AnchorId]:
        """Longer ones took the place of these (or of none); returns what is to be forgotten by now. `now`: seconds that
        only grow."""
        if anchor_ids:
            self._waiting.append((now, tuple(anchor_ids)))
        due: list[AnchorId] = []
        while self._waiting and self._waiting[0][0] + SUPERSEDED_KEPT_S <= now:
            due += self._waiting.popleft()[1]
        return due


def superseded(plan: Plan, longer: Sequence[AnchorMeta]) -> list[AnchorId]:
    """Anchors of earlier turns that a plan drew on and that the new ones in `longer` hold as well."""
    earlier = {
        anchor.anchor_id: anchor
        for span in plan.spans
        if span.donor is not None and span.donor.local and span.kind in (SpanKind.EXACT, SpanKind.CONTINUED)
        for anchor in span.donor.anchors
        if span.start <= anchor.start and anchor.end <= span.end
    }
    return [key for key, anchor in earlier.items() if any(_holds(meta, anchor) for meta in longer)]


def replaced(last: AnchorMeta, longer: Sequence[AnchorMeta]) -> bool:
    """Whether a prompt's last anchor was cut anew when the answer stood behind it: `longer` is what was cut from there on."""
    return last.anchor_id not in {meta.anchor_id for meta in longer}


def _holds(longer: AnchorMeta, anchor: AnchorMeta) -> bool:
    """Whether everything that `anchor` (the same tokens behind the same prefix) offers is offered by a longer one."""
    same = (longer.hops, longer.visibility, longer.group) == (anchor.hops, anchor.visibility, anchor.group)
    inside = longer.start <= anchor.start and anchor.end <= longer.end
    return same and inside and longer.tokens > anchor.tokens
