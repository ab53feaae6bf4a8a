"""A lock that serves its waiters in the order in which they came, so that no request starves behind another's decode
loop."""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType


class FairLock:
    """First come, first served; not re-entrant. Use it as a context manager."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._held = False
        self._waiters: deque[threading.Lock] = deque()

    def __enter__(self) -> FairLock:
        with self._guard:
            if not self._held:
                self._held = True
                return self
            turn = threading.Lock()
            turn.acquire()
            self._waiters.append(turn)
        try:
            turn.acquire()
        except BaseException:
            self._abandon(turn)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pass_on()

    def _pass_on(self) -> None:
        with self._guard:
            if self._waiters:
                self._waiters.popleft().release()  # ownership moves on without being dropped
            else:
                self._held = False

    def _abandon(self, turn: threading.Lock) -> None:
        """A waiter was interrupted: leave the queue, or hand on the turn that it was just given."""
        with self._guard:
            if turn in self._waiters:
                self._waiters.remove(turn)
                return
        self._pass_on()
