"""Time waited in vain for holders that say BUSY, and BUSY again, and never serve.

Being busy is no fault: whoever serves as many as it can serves each in turn. So what counts is waiting that a request gave up,
since the holder last delivered a whole block here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvcomm_p2p.protocol.ids import NodeId

VAIN_WAITS = 3
"""Times `pull_busy_wait_s` that may be waited in vain for a holder before it is asked less."""

HOLDERS_PRUNED_AT = 256


@dataclass(slots=True)
class _Vain:
    told_at: float
    waited_s: float = 0.0
    until: float = 0.0


class VainWaits:
    """By holder. `limit_s`: more waiting than this in vain is too much."""

    def __init__(self, limit_s: float, is_known: Callable[[NodeId], bool]) -> None:
        self._limit_s = limit_s
        self._is_known = is_known
        self._holders: dict[NodeId, _Vain] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def told_busy(self, holder: NodeId, now: float) -> None:
        """It says that it is busy."""
        if holder in self._holders:
            self._holders[holder].told_at = now
            return
        if len(self._holders) >= HOLDERS_PRUNED_AT:
            self._holders = {each: vain for each, vain in self._holders.items() if self._is_known(each)}
        self._holders[holder] = _Vain(now)

    def gave_up(self, holder: NodeId, since: float, now: float) -> bool:
        """A request waited from `since` until now, and waits no longer. Whether this holder, if it said BUSY meanwhile, has been
        waited for in vain for too long. Time that several requests waited counts once."""
        vain = self._holders.get(holder)
        if vain is None or vain.told_at < since:
            return False
        vain.waited_s += max(0.0, now - max(since, vain.until))
        vain.until = max(vain.until, now)
        return vain.waited_s >= self._limit_s

    def served(self, holder: NodeId) -> None:
        """A block of it is here, whole and right."""
        self._holders.pop(holder, None)
