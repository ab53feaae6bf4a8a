"""Requests that have not ended yet, and how they are ended early."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class InFlight:
    """Thread safe."""

    def __init__(self) -> None:
        self._cancels: set[threading.Event] = set()
        self._idle = threading.Condition()

    def __len__(self) -> int:
        return len(self._cancels)

    @contextmanager
    def one(self) -> Iterator[threading.Event]:
        """One request, to its end: an event that `cancel_all` and cancelling the task set."""
        cancel = threading.Event()
        with self._idle:
            self._cancels.add(cancel)
        try:
            yield cancel
        except asyncio.CancelledError:
            cancel.set()
            raise
        finally:
            with self._idle:
                self._cancels.discard(cancel)
                self._idle.notify_all()

    def cancel_all(self) -> None:
        """Ask every request to end."""
        with self._idle:
            for event in self._cancels:
                event.set()

    def wait(self, timeout_s: float) -> bool:
        """Blocks until none is left; False if some are after `timeout_s`."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._cancels, timeout_s)
