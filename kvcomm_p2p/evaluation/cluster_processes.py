"""Starts nodes in processes of their own (see `cluster_node`), tells them what to do, and ends them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from kvcomm_p2p.child_processes import own_group
from kvcomm_p2p.errors import KVCommError

START_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 30.0
END_TIMEOUT_S = 5.0

Answer = dict[str, Any]

_SPIN = """
import os, sys
value = 1
while os.getppid() == int(sys.argv[1]):
    for _ in range(10**6):
        value = value * 3 % 1000003
"""


class NodeProcess:
    """One node. Start it from a thread that lives as long as it shall: the kernel ends it with that thread."""

    def __init__(self, name: str, secret: str, *, prefix: Sequence[str] = (), **options: Any) -> None:
        """Starts the process; `wait_ready` says when it can be asked. `options`: see `ClusterNode`; `prefix`: a command that
        runs another (`ip netns exec …`), without becoming its parent."""
        self.name = name
        self.options = {"name": name, "secret": secret, "parent": os.getpid(), **options}
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "kvcomm_p2p.evaluation.cluster_node", json.dumps(self.options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            text=True,
            **own_group(),
        )
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[Answer]] = {0: Future()}
        self._ready = self._waiting[0]
        self._reader = threading.Thread(target=self._read, name=f"{name}-answers", daemon=True)
        self._reader.start()
        self.control = self.bulk = self.node_id = ""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def addresses(self) -> list[str]:
        return [self.control, self.bulk]

    def wait_ready(self) -> NodeProcess:
        """Returns itself once its sockets are open. Raises KVCommError."""
        ready = self._result(self._ready, START_TIMEOUT_S)
        self.control, self.bulk, self.node_id = ready["control"], ready["bulk"], ready["node_id"]
        return self

    def begin(self, do: str, **arguments: Any) -> Future[Answer]:
        """Tell it to do something; the future brings its answer, or a KVCommError."""
        number = next(self._numbers)
        future: Future[Answer] = Future()
        with self._lock:
            self._waiting[number] = future
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({"id": number, "do": do, **arguments}) + "\n")
            self._process.stdin.flush()
        except (OSError, ValueError):  # ValueError: we closed its stdin
            self._fail(number, "has ended")
        return future

    def ask(self, do: str, *, within_s: float = ANSWER_TIMEOUT_S, **arguments: Any) -> Answer:
        """Tell it to do something and wait. Raises KVCommError: what it said, or that it said nothing in time."""
        return self._result(self.begin(do, **arguments), within_s)

    def signal(self, number: signal.Signals) -> float:
        """Send it a signal; returns the time (CLOCK_MONOTONIC) right before."""
        at = time.monotonic()
        self._process.send_signal(number)
        return at

    def end(self) -> None:
        """Let it leave; by force if it does not. Calling it again does nothing."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._close()

    def kill(self) -> float:
        """SIGKILL, which also ends a stopped process. Returns the time (CLOCK_MONOTONIC) right before."""
        at = time.monotonic()
        self._process.kill()
        self._process.wait()
        self._close()
        return at

    def _close(self) -> None:
        self._reader.join(1.0)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError, OSError):
            for line in self._process.stdout:
                answer: Answer = json.loads(line)
                number = answer.pop("id")
                if "error" in answer:
                    self._fail(number, f"says: {answer['error']}")
                    continue
                with self._lock:
                    future = self._waiting.pop(number, None)
                if future is not None:
                    future.set_result(answer)
        with self._lock:
            left = list(self._waiting)
        for number in left:
            self._fail(number, "has ended")

    def _fail(self, number: int, why: str) -> None:
        with self._lock:
            future = self._waiting.pop(number, None)
        if future is not None:
            future.set_exception(KVCommError(f"the process of {self.name!r} {why}"))

    def _result(self, future: Future[Answer], within_s: float) -> Answer:
        try:
            return future.result(within_s)
        except TimeoutError:
            raise KVCommError(f"the process of {self.name!r} did not answer within {within_s:g} s") from None


class Cluster:
    """Processes that know each other. A context manager: all have ended when the context has."""

    def __init__(self, *, config: dict[str, Any] | None = None, seed: int = 0, prefix: Sequence[str] = ()) -> None:
        """`config`: fields of NodeConfig that differ from its defaults, for every node."""
        self.nodes: list[NodeProcess] = []
        self._secret = secrets.token_hex(32)
        self._config = config or {}
        self._seed = seed
        self._prefix = prefix
        self._names = itertools.count()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for node in self.nodes:  # all at once: each takes a moment to say goodbye
            with contextlib.suppress(OSError, ProcessLookupError):
                node.signal(signal.SIGCONT)
                node.signal(signal.SIGKILL)
        for node in self.nodes:
            node.kill()

    def __len__(self) -> int:
        return len(self.nodes)

    def start(self, count: int = 1, **options: Any) -> list[NodeProcess]:
        """So many more nodes, listening, not joined. Raises KVCommError."""
        fresh = []
        for _ in range(count):
            number = next(self._names)
            given = {"name": f"node{number}", "seed": self._seed * 10_000 + number, "config": self._config}
            mine: dict[str, Any] = {"prefix": self._prefix, **given, **options}
            fresh.append(NodeProcess(mine.pop("name"), self._secret, **mine))
        self.nodes += fresh
        for node in fresh:
            node.wait_ready()
        return fresh

    def join(self, fresh: Sequence[NodeProcess], timeout_s: float = 30.0) -> None:
        """Let nodes join through the first of the cluster and wait until everybody knows everybody. Raises KVCommError."""
        seed = self.nodes[0]
        for future in [
            node.begin("join", seeds=[seed.control], timeout_s=timeout_s) for node in fresh if node is not seed
        ]:
            future.result(timeout_s + 5)
        self.all("wait", timeout_s=timeout_s, alive=len(self.nodes) - 1, within_s=timeout_s + 5)

    def grow(self, count: int, **options: Any) -> list[NodeProcess]:
        """`start` and `join`."""
        fresh = self.start(count, **options)
        self.join(fresh)
        return fresh

    def all(
        self, do: str, *, but: Sequence[NodeProcess] = (), within_s: float = ANSWER_TIMEOUT_S, **arguments: Any
    ) -> list[Answer]:
        """Tell everybody at once and wait for all answers, in the order of `nodes`. Raises KVCommError."""
        asked = [(node, node.begin(do, **arguments)) for node in self.nodes if node not in but]
        return [node._result(future, within_s) for node, future in asked]

    def forget(self, node: NodeProcess) -> None:
        """It is not one of us any more (killed, or to be ended by the caller)."""
        self.nodes.remove(node)


@contextmanager
def cpu_load(processes: int) -> Iterator[None]:
    """So many processes that compute without pause, at the same priority as everybody."""
    spinning = [subprocess.Popen([sys.executable, "-c", _SPIN, str(os.getpid())]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()
