"""Writing to disk beside the loop: of each kind of thing the latest, one write at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress

Write = Callable[[], None]
"""Blocks on the disk; raises nothing, a disk that fails is logged."""


class Saving:
    """Peers can ask for more than a disk can write: what comes while something is written waits, and replaces what waits of its
    kind. Any thread may call."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._waiting: dict[str, Write] = {}
        self._submitted = False

    def keep(self, kind: str, write: Write) -> None:
        """Write this soon."""
        with self._lock:
            self._waiting[kind] = write
            submit, self._submitted = not self._submitted, True
        if submit:
            self._submit(self._write_waiting)

    def written(self) -> Future[None] | None:
        """Done when everything that was to be kept until now has been written. None: that is so already."""
        with self._lock:
            idle = not self._submitted
        return None if idle else self._submit(self.flush)

    def flush(self) -> None:
        """Write everything that waits, now."""
        with self._writing:
            with self._lock:
                waiting, self._waiting = self._waiting, {}
            for write in waiting.values():
                write()

    def _write_waiting(self) -> None:
        """One round; the executor's other work has its turn before the next."""
        try:
            self.flush()
        finally:
            with self._lock:
                self._submitted = bool(self._waiting)
            if self._submitted:
                self._submit(self._write_waiting)

    def _submit(self, work: Write) -> Future[None] | None:
        with suppress(RuntimeError):  # the executor has ended: `flush` writes the rest
            return self._executor.submit(work)
        return None
