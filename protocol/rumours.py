"""News about members that ride on other messages."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.messages import RUMOURS_MAX, Rumour, Status

RETELL = 4
"""Each rumour is told RETELL * ceil(log10(n + 1)) times: enough to reach everybody but for a few (memberlist's
retransmit multiple)."""

RUMOURS_HELD_MAX = 1024
RUMOURS_PER_MESSAGE = 8


@dataclass(slots=True)
class _Told:
    rumour: Rumour
    times: int
    order: int


class Rumours:
    """What this node still tells. Bounded: past RUMOURS_HELD_MAX the most told goes first.

    About a node only the latest is kept, but a suspicion once for each accuser: they confirm each other.
    """

    def __init__(self) -> None:
        self._about: dict[NodeId, dict[bytes, _Told]] = {}
        self._held = 0
        self._order = 0

    def __len__(self) -> int:
        return self._held

    def add(self, rumour: Rumour) -> None:
        """Tell this from now on, instead of what was told about the node so far. One that is told already stays as
        often told as it is."""
        told = self._about.get(rumour.node_id, {})
        if any(item.rumour == rumour for item in told.values()):
            return
        kept = {
            accuser: item
            for accuser, item in told.items()
            if rumour.status is Status.SUSPECT and _same_suspicion(item.rumour, rumour)
        }
        self._order += 1
        kept[rumour.accuser] = _Told(rumour, 0, self._order)
        self._held += len(kept) - len(told)
        self._about[rumour.node_id] = kept
        if self._held > RUMOURS_HELD_MAX:
            self._drop(max((item for told in self._about.values() for item in told.values()), key=_told_most))

    def take(self, nodes: int, first: Rumour | None = None) -> tuple[Rumour, ...]:
        """Rumours for one message, the least told first, `first` before all. Counts them as told to one more node."""
        chosen: tuple[Rumour, ...] = () if first is None else (first,)
        if self._held:
            items = (item for told in self._about.values() for item in told.values() if item.rumour != first)
            limit = RETELL * math.ceil(math.log10(nodes + 1))
            for item in heapq.nsmallest(RUMOURS_PER_MESSAGE - len(chosen), items, key=_told_least):
                chosen += (item.rumour,)
                item.times += 1
                if item.times >= limit:
                    self._drop(item)
        return chosen[:RUMOURS_MAX]

    def _drop(self, item: _Told) -> None:
        told = self._about[item.rumour.node_id]
        del told[item.rumour.accuser]
        self._held -= 1
        if not told:
            del self._about[item.rumour.node_id]


def _same_suspicion(one: Rumour, other: Rumour) -> bool:
    return (one.epoch, one.incarnation, one.status) == (other.epoch, other.incarnation, other.status)


def _told_least(item: _Told) -> tuple[int, int]:
    return item.times, -item.order


def _told_most(item: _Told) -> tuple[int, int]:
    return item.times, -item.order
