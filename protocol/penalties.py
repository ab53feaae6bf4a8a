"""The penalty box: peers that failed to deliver are not waited for again for a while."""

from __future__ import annotations

from kvcomm_p2p.protocol.ids import NodeId


class PenaltyBox:
    """Penalties double with each failure in a row, from `first_s` to `max_s`; a delivery ends them."""

    def __init__(self, first_s: float, max_s: float) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._served: dict[NodeId, tuple[float, float]] = {}

    def __len__(self) -> int:
        return len(self._served)

    def punish(self, peer: NodeId, now: float) -> None:
        """Ignored while an earlier penalty runs: what failed at the same time failed once."""
        until, length_s = self._served.get(peer, (now, 0.0))
        if until <= now:
            length_s = min(max(2 * length_s, self._first_s), self._max_s)
            self._served[peer] = (now + length_s, length_s)

    def left_s(self, peer: NodeId, now: float) -> float:
        """Seconds until the peer may be asked again, 0 if it may be now."""
        until, _ = self._served.get(peer, (now, 0.0))
        return max(0.0, until - now)

    def forgive(self, peer: NodeId) -> None:
        self._served.pop(peer, None)
