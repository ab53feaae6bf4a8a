"""What goes wrong with keys, remembered for people: who was not let in, where others do not let us in, who has another secret.

Bounded, whatever is tried; the oldest is forgotten first. Lives on the driver's loop.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import zmq

REMEMBERED_MAX = 32

REFUSED, OTHER_KEY = "refused", "other key"
"""Why a connection that we asked for failed: whoever listens there did not let us in; or is not who was expected, or does not
encrypt at all."""

T = TypeVar("T")


class Seen(Generic[T]):
    """How often each of a few things was seen, and when last."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._rows: OrderedDict[T, tuple[int, float]] = OrderedDict()

    def add(self, what: T) -> None:
        """Once more, now."""
        count, _ = self._rows.pop(what, (0, 0.0))
        self._rows[what] = (count + 1, self._clock())
        if len(self._rows) > REMEMBERED_MAX:
            self._rows.popitem(last=False)

    def forget(self, what: T) -> None:
        """It is all right again."""
        self._rows.pop(what, None)

    def rows(self) -> list[tuple[T, dict[str, Any]]]:
        """Each with its `count` and `age_s`, the latest last."""
        now = self._clock()
        return [(what, {"count": count, "age_s": max(0.0, now - at)}) for what, (count, at) in self._rows.items()]


class Troubles:
    """`turned_away`: (address, CURVE key) of who was not let in. `failed`: (dial name, why) of connections of ours.
    `other_secret`: CURVE keys of the allowed who seal with another secret."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.turned_away: Seen[tuple[str, bytes]] = Seen(clock)
        self.failed: Seen[tuple[str, str]] = Seen(clock)
        self.other_secret: Seen[bytes] = Seen(clock)

    def lost(self, dial_name: str, event: int) -> None:
        """A connection that we asked for ended with this event of ZeroMQ's monitor."""
        if event & zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self.failed.add((dial_name, REFUSED))
        elif event & (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
            self.failed.add((dial_name, OTHER_KEY))
