"""When this node itself did not run: time that its timers were late by is nobody's silence.

While anything is waited for, the node asks to be woken every PULSE_S. Whoever has the processors for longer than that
shows in the next event, whatever it is, and clocks by which others are judged are put forward by so much.
"""

from __future__ import annotations

import math
from collections.abc import Callable

PULSE_S = 0.02
"""Seconds between two looks at the clock while something is waited for. Shorter: more turns, finer judgement."""

LATE_S = 0.02
"""A timer that rings later than this was held up: bytes may be waiting to be read, so nobody is given up in that moment."""


TROUBLE_S = 1.0
"""For so long after a late awakening this node knows that it may be behind with reading."""


class Lateness:
    """Sees from `now` and from when this node wanted to be woken how long it did not run.

    `judges_at`: nobody is given up before. It lies LATE_S after a late awakening, so that what has arrived is read first;
    not after the second one in a row, or a node that is always late would never give up anybody.
    """

    def __init__(self) -> None:
        self._ran_at = -math.inf
        self._late_at = -math.inf
        self._graced = False
        self.judges_at = -math.inf

    @property
    def pulse_at(self) -> float:
        """When the node wants to look at the clock again, if it waits for anything."""
        return self._ran_at + PULSE_S

    def woke(self, now: float, due: Callable[[], float]) -> float:
        """Something happens at `now`; `due` says when the node wanted to be woken (infinity: not at all), and is not asked where
        the last event is too near for it to matter. Returns the seconds that it did not run, 0 for up to LATE_S."""
        late_s = now - self._ran_at
        if late_s > LATE_S:
            late_s = now - max(due(), self._ran_at)
        self._ran_at = now
        if late_s <= LATE_S:
            self._graced = self._graced and now <= self.judges_at
            return 0.0
        self._late_at = now
        if not self.grace(now):
            self.judges_at, self._graced = now, False
        return late_s

    def in_trouble(self, now: float) -> bool:
        """Whether this node did not come to run in time a moment ago."""
        return now - self._late_at <= TROUBLE_S

    def grace(self, now: float) -> bool:
        """Nobody is to be given up yet, since this node comes late. False: that was so last time, too; it does not count."""
        if self._graced:
            return False
        self.judges_at, self._graced = now + LATE_S, True
        return True
