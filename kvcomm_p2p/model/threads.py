"""Which threads compute. Forwards run in one thread of their own, everything else with one OpenMP thread each.

libgomp keeps a team of threads for every thread that ever ran a parallel operation, and as soon as the teams together have
more threads than the machine has cores it stops spinning at barriers: with a second, idle team in the process, a forward took
20 % longer. So only the forward thread may have a team.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")

_quirk = threading.Lock()


class ForwardThread:
    """Runs calls one at a time, in the order in which they were asked for. Ends with its owner."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kvcomm-forward", initializer=self._begin)

    def run(self, call: Callable[[], T]) -> T:
        """The call's result or exception; blocks. Calls from the thread itself run at once."""
        if threading.current_thread() is self._thread:
            return call()
        return self._pool.submit(call).result()

    def _begin(self) -> None:
        self._thread = threading.current_thread()


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
