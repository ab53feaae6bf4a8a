"""What this node has asked of whom, so that nothing is brought twice, and what others wait for here."""

from __future__ import annotations

from typing import NamedTuple

from kvcomm_p2p.protocol.ids import NodeId

WANT_TIMEOUT_S = 0.5
"""An unanswered question for a log may be put to somebody else after this time."""


class Asked(NamedTuple):
    """A question that is not answered yet."""

    peer: NodeId
    until: float


class Wants:
    """Logs that were asked for, at most one question each."""

    def __init__(self) -> None:
        self._asked: dict[NodeId, Asked] = {}
        self._of_peer: dict[NodeId, dict[NodeId, None]] = {}

    def __len__(self) -> int:
        return len(self._asked)

    def is_open(self, origin: NodeId, now: float) -> bool:
        """Whether an answer may still come."""
        asked = self._asked.get(origin)
        return asked is not None and now < asked.until

    def ask(self, origin: NodeId, peer: NodeId, now: float) -> None:
        """`peer` is asked for this log now; an earlier question counts no more."""
        self.answered(origin)
        self._asked[origin] = Asked(peer, now + WANT_TIMEOUT_S)
        self._of_peer.setdefault(peer, {})[origin] = None

    def answered(self, origin: NodeId) -> None:
        """Nothing more is awaited of this log. Ignored if nothing was."""
        asked = self._asked.pop(origin, None)
        if asked is None:
            return
        origins = self._of_peer[asked.peer]
        del origins[origin]
        if not origins:
            del self._of_peer[asked.peer]

    def of(self, peer: NodeId) -> list[NodeId]:
        """Logs that this peer was asked for, in the order asked."""
        return list(self._of_peer.get(peer, ()))

    def drop(self, peer: NodeId) -> list[NodeId]:
        """It will not answer: the logs that it was asked for, which may be asked of others now."""
        origins = self.of(peer)
        for origin in origins:
            self.answered(origin)
        return origins
