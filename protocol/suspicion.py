"""How long a suspect may clear itself before it counts as dead (Lifeguard's suspicion timeout)."""

from __future__ import annotations

import math

from kvcomm_p2p.protocol.ids import NodeId

SHORTEST_PROBES = 4
LONGEST_FACTOR = 6
CONFIRMATIONS = 2


def shortest_s(nodes: int, probe_interval_s: float) -> float:
    """Seconds that a suspect of a cluster of `nodes` has at least: news needs about log n rounds to reach it and back.

    4 * max(1, log10 n) probe intervals, as memberlist has it.
    """
    return SHORTEST_PROBES * max(1.0, math.log10(max(1, nodes))) * probe_interval_s


class Suspicion:
    """One suspect's term. It begins long and shrinks with each further node that suspects the same on its own.

    Where there are fewer than CONFIRMATIONS others to ask, it is the shortest at once.
    """

    def __init__(self, began_at: float, nodes: int, probe_interval_s: float, accuser: NodeId | None) -> None:
        """`nodes`: alive or suspect, this one and the suspect included."""
        self.began_at = began_at
        self._shortest_s = shortest_s(nodes, probe_interval_s)
        self._confirmations = CONFIRMATIONS if nodes - 2 >= CONFIRMATIONS else 0
        self._accusers: dict[NodeId, None] = {} if accuser is None else {accuser: None}
        self._granted_s = 0.0

    def confirm(self, accuser: NodeId) -> bool:
        """Somebody suspects it on its own. Returns whether that shortened the term."""
        if accuser in self._accusers or len(self._accusers) > self._confirmations:
            return False
        self._accusers[accuser] = None
        return len(self._accusers) > 1

    @property
    def ends_at(self) -> float:
        """longest - (longest - shortest) * ln(c + 1) / ln(k + 1) after it began, with c of k confirmations (Lifeguard,
        section 3.2)."""
        term_s = self._shortest_s
        if self._confirmations:
            confirmed = min(self._confirmations, max(0, len(self._accusers) - 1))
            longest_s = LONGEST_FACTOR * self._shortest_s
            shrunk = math.log(confirmed + 1) / math.log(self._confirmations + 1)
            term_s = longest_s - (longest_s - self._shortest_s) * shrunk
        return self.began_at + term_s + self._granted_s

    def extend(self, seconds: float) -> None:
        """We were not there to hear it for so long."""
        self._granted_s += seconds
