"""How much is asked of a holder at a time: small pieces where many want the same, larger ones where nobody else does.

Pieces let a holder that many want be left for peers that just got one. Whoever has the holder alone pays for them: a
request and an answer for each, in which nothing travels. So pieces double with each one that comes, up to GROWTH_MAX
times, until the holder says BUSY; and begin small again when nothing is under way from it.

`chunk_sizes` remembers what the link to a holder can do, which outlasts its pulls; this, who else wants it just now.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvcomm_p2p.protocol.ids import NodeId

GROWTH_MAX = 8
"""Times `pull_piece_bytes` that a piece may come to."""


class Pace:
    """Bytes per request, by holder."""

    def __init__(self, piece_bytes: int) -> None:
        self._piece_bytes = piece_bytes
        self._factor: dict[NodeId, int] = {}
        self._wanted: dict[NodeId, None] = {}

    def piece_bytes(self, holder: NodeId) -> int:
        """What the next request may come to, if that is more than one block."""
        return self._piece_bytes * self._factor.get(holder, 1)

    def brought(self, holder: NodeId) -> None:
        """It delivered all of a request."""
        if holder not in self._wanted:
            self._factor[holder] = min(GROWTH_MAX, 2 * self._factor.get(holder, 1))

    def busy(self, holder: NodeId) -> None:
        """Others want something of it, too."""
        self._wanted[holder] = None
        self._factor.pop(holder, None)

    def forget_but(self, holders: Iterable[NodeId]) -> None:
        """Only from these holders anything is under way or waited for."""
        if not self._factor and not self._wanted:
            return
        kept = set(holders)
        self._factor = {holder: factor for holder, factor in self._factor.items() if holder in kept}
        self._wanted = {holder: None for holder in self._wanted if holder in kept}
