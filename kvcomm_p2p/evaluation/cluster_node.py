"""A node in a process of its own, without a model: driver, store and a transport that can be spoiled. Does as it is told.

    python -m kvcomm_p2p.evaluation.cluster_node OPTIONS

Commands come on stdin, one JSON object per line with an "id" and a "do" (see `cluster_commands`); answers go to stdout with
the same "id", in any order. The process ends with its stdin and with its parent, frozen or not.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Any, TextIO

from kvcomm_p2p.errors import KVCommError
from kvcomm_p2p.evaluation.cluster_commands import ClusterNode

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """From now on the kernel ends this process (also a stopped one) when the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    """Runs until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    options = json.loads(sys.argv[1])
    if options.get("parent"):
        die_with_parent(options["parent"])
    lock = threading.Lock()
    try:
        node = ClusterNode(options)
        addresses = node.driver.start()
    except KVCommError as error:
        _say(answers, lock, {"id": 0, "error": str(error)})
        return
    ready = {"id": 0, "control": addresses.control, "bulk": addresses.bulk, "node_id": node.driver.node_id.hex()}
    _say(answers, lock, ready)
    try:
        for line in sys.stdin:
            command: dict[str, Any] = json.loads(line)
            number = command.pop("id")
            work: Coroutine[Any, Any, dict[str, Any]] = getattr(node, f"do_{command.pop('do')}")(**command)
            node.driver.run(work).add_done_callback(partial(_answer, answers, lock, number))
    finally:
        node.driver.stop()


def _answer(answers: TextIO, lock: threading.Lock, number: int, future: Future[dict[str, Any]]) -> None:
    if future.cancelled():
        return
    error = future.exception()
    _say(
        answers,
        lock,
        {"id": number, "error": f"{type(error).__name__}: {error}"} if error else {"id": number, **future.result()},
    )


def _say(answers: TextIO, lock: threading.Lock, answer: dict[str, Any]) -> None:
    with lock:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
