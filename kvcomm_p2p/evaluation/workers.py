"""Starts, asks and ends worker processes (see `worker`)."""

from __future__ import annotations

import json
import os
import queue
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from kvcomm_p2p.child_processes import own_group
from kvcomm_p2p.errors import KVCommError

START_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 300.0
END_TIMEOUT_S = 10.0


class Worker:
    """One agent process. A context manager: the process has ended when the context has, frozen or not."""

    def __init__(
        self,
        name: str,
        model: str,
        join: Sequence[str] = (),
        *,
        cluster: str,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """Starts the process; `wait_ready` says when it can be asked. Workers of different clusters never meet. `settings`: more
        of them, as environment variables."""
        self.name = name
        options = json.dumps({"name": name, "model": model, "join": list(join)})
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvcomm_p2p.evaluation.worker", options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "KVCOMM_CLUSTER": cluster, **(settings or {})},
            text=True,
            **own_group(),
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, name=f"{name}-answers", daemon=True).start()
        self.address = ""

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> Worker:
        """Returns itself once its model is loaded and its sockets are open. Raises KVCommError saying why not."""
        self.address = self._answer(START_TIMEOUT_S)["address"]
        return self

    def ask(self, **command: Any) -> dict[str, Any]:
        """The answer to one command. Raises KVCommError: what the worker said, or that it said nothing."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._ended() from error
        return self._answer(ANSWER_TIMEOUT_S)

    def end(self) -> None:
        """Ends the process, by force if it does not leave by itself. Calling it again does nothing."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(END_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired):
            self.kill()

    def kill(self) -> None:
        """SIGKILL, which also ends a frozen process."""
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise KVCommError(f"the process of {self.name!r} did not answer within {timeout_s:g} s") from None
        if not line:
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise KVCommError(str(answer["error"]))
        return answer

    def _ended(self) -> KVCommError:
        return KVCommError(f"the process of {self.name!r} ended (status {self._process.wait()}): see its message above")


@contextmanager
def pair(model: str | Path, holder: str = "holder", consumer: str = "consumer") -> Iterator[tuple[Worker, Worker]]:
    """Two agents in two processes, the second joined to the first."""
    cluster = private_cluster()
    with ExitStack() as stack:
        first = stack.enter_context(Worker(holder, str(model), cluster=cluster)).wait_ready()
        second = stack.enter_context(Worker(consumer, str(model), [first.address], cluster=cluster)).wait_ready()
        yield first, second


def private_cluster() -> str:
    """A cluster name that nobody else uses, so that a measurement meets no other nodes of this user."""
    return f"evaluation-{secrets.token_hex(8)}"
