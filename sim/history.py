"""The last events of a world, each with what came before it: of these a story is told.

What happened before an event, as far as it can have made a difference: the node's own earlier events, and for everything that
came from elsewhere the event during which it was sent. Whatever is not reached by following these is of no concern.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kvcomm_p2p.protocol import events as ev
from kvcomm_p2p.sim.world import World

KEPT = 100_000


@dataclass(frozen=True, slots=True)
class Moment:
    """One event that a node handled. `number` counts all events of the world; `before` and `cause` are numbers of earlier ones:
    the node's own last, and the one during which this was sent (0: none)."""

    number: int
    at_s: float
    machine: int
    event: ev.Event
    effects: tuple[ev.Effect, ...]
    before: int
    cause: int


class History:
    """Watches a world from now on and keeps its last `kept` events. Make it before whatever may raise."""

    def __init__(self, world: World, kept: int = KEPT) -> None:
        self._world = world
        self._kept = kept
        self._moments: OrderedDict[int, Moment] = OrderedDict()
        self._last_of: dict[int, int] = {}
        world.observers.append(self._observe)

    def __len__(self) -> int:
        return len(self._moments)

    def _observe(self, number: int, event: ev.Event, now: float, effects: list[ev.Effect]) -> None:
        world = self._world
        before = self._last_of.get(number, 0)
        self._moments[world.moment] = Moment(world.moment, now, number, event, tuple(effects), before, world.cause)
        self._last_of[number] = world.moment
        if len(self._moments) > self._kept:
            self._moments.popitem(last=False)

    def end(self, machine: int) -> Moment | None:
        """The last event of a machine; also one that its node raised at instead of answering."""
        world = self._world
        handling = world.handling
        if handling is not None and handling[0] == machine and world.moment and world.moment not in self._moments:
            event = handling[1]
            return Moment(world.moment, world.now, machine, event, (), self._last_of.get(machine, 0), world.cause)
        return self._moments.get(self._last_of.get(machine, 0))

    def past(self, last: Moment) -> list[Moment]:
        """The event and all that came before it in the sense of this module, as far as it is kept, in order of time."""
        found = {last.number: last}
        waiting = [last.before, last.cause]
        while waiting:
            number = waiting.pop()
            moment = self._moments.get(number)
            if moment is None or number in found:
                continue
            found[number] = moment
            waiting += (moment.before, moment.cause)
        return [found[number] for number in sorted(found)]
