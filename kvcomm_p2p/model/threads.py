"""Which threads compute. Forwards run in one thread of their own, everything else with one OpenMP thread each.

libgomp keeps a team of threads for every thread that ever ran a parallel operation, and as soon as the teams together have
more threads than the machine has cores it stops spinning at barriers: with a second, idle team in the process, a forward took
20 % longer. So only the forward thread may have a team.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch

T = TypeVar("T")

_quirk = threading.Lock()


class ForwardThread:
    """Runs calls one at a time, in the order in which they were asked for. Ends with its owner."""

    def __init__(self) -> None:
        self._inside = threading.local()
        self._callers = threading.local()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kvcomm-forward")

    def run(self, call: Callable[[], T]) -> T:
        """The call's result or exception; blocks. Calls from the thread itself run at once.

        An interrupt (Ctrl-C) is raised when the call has ended, so that nothing goes on behind the caller's back.
        """
        if getattr(self._inside, "yes", False):
            return call()
        future = self._pool.submit(_timed, self._inside, call)
        try:
            result, seconds = future.result()
            self._callers.seconds = getattr(self._callers, "seconds", 0.0) + seconds
            return result
        except BaseException:
            if not future.done() and not future.cancel():
                wait([future])
            raise

    def spent_s(self) -> float:
        """Seconds that the calling thread's calls have run since it last asked, without the time that they waited."""
        seconds: float = getattr(self._callers, "seconds", 0.0)
        self._callers.seconds = 0.0
        return seconds


def _timed(inside: threading.local, call: Callable[[], T]) -> tuple[T, float]:
    inside.yes = True
    started = time.perf_counter()
    return call(), time.perf_counter() - started


def helper_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """A pool for copying, hashing, sampling and comparing, whose threads never start an OpenMP team."""
    return ThreadPoolExecutor(threads, thread_name_prefix=name, initializer=_alone)


def _alone() -> None:
    """From now on this thread computes by itself.

    `torch.set_num_threads` sets both the calling thread's number and the one with which later threads begin; the latter is put
    back from a thread that does nothing else.
    """
    with _quirk:
        everywhere = torch.get_num_threads()
        torch.set_num_threads(1)
        restore = threading.Thread(target=torch.set_num_threads, args=(everywhere,))
        restore.start()
        restore.join()
