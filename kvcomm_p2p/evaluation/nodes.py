"""Node processes as a user would start them (`kvcomm node`), for the demo: started together, ended together."""

from __future__ import annotations

import json
import os
import queue
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from kvcomm_p2p.child_processes import own_group
from kvcomm_p2p.errors import KVCommError
from kvcomm_p2p.evaluation.workers import private_cluster
from kvcomm_p2p.local_api import request

START_TIMEOUT_S = 180.0
LEAVE_TIMEOUT_S = 5.0
HEARD_TIMEOUT_S = 15.0
POLL_S = 0.1
UNCHANGED_S = 0.8
"""Several rounds of gossip."""

LOG_LINES_KEPT = 20


class NodeGroup:
    """Nodes that know only each other, in processes of their own: the first one is the seed of the others.

    A context manager: when it ends, however it ends, no process is left. Should this process be killed, the nodes notice
    the end of their stdin and leave.
    """

    def __init__(self, roles: Mapping[str, str], model: str) -> None:
        """`roles`: name -> role. Starts nothing yet."""
        self._roles = roles
        self._model = model
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._logs: dict[str, deque[str]] = {name: deque(maxlen=LOG_LINES_KEPT) for name in roles}
        self._events: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue()

    def __enter__(self) -> NodeGroup:
        self._directory = Path(tempfile.mkdtemp(prefix="kvcomm-"))
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def wait_ready(self, on_ready: Callable[[str, float], None]) -> None:
        """Returns when all nodes can be asked; `on_ready(name, seconds since the start)` for each. Raises KVCommError."""
        waiting = set(self._roles)
        began = time.monotonic()
        while waiting:
            try:
                name, event = self._events.get(timeout=max(0.1, START_TIMEOUT_S - (time.monotonic() - began)))
            except queue.Empty:
                raise KVCommError(f"{', '.join(sorted(waiting))} did not start within {START_TIMEOUT_S:g} s") from None
            if event["event"] == "ready":
                waiting.discard(name)
                on_ready(name, time.monotonic() - began)
            elif event["event"] == "ended":
                raise self._failure(name)

    def ask(self, name: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of one request to the local API of a node; raises what it raises."""
        return request(self._directory, name, body)

    def wait_heard(self, holder: str, listeners: Sequence[str]) -> None:
        """Returns when `holder` has published what it has and `listeners` know of it. Raises KVCommError if they do not.

        What counts is that nothing changes any more: a longer text replaces a shorter one, so numbers alone tell little.
        """
        deadline = time.monotonic() + HEARD_TIMEOUT_S
        seen: tuple[int, ...] = ()
        unchanged_since = 0.0
        while True:
            offered = self._status(holder)
            heard = [
                peer["anchors"] for name in listeners for peer in self._status(name)["peers"] if peer["name"] == holder
            ]
            now = time.monotonic()
            state = (offered["anchors"], offered["pool_bytes"], *heard)
            if state != seen:
                seen, unchanged_since = state, now
            agreed = len(heard) == len(listeners) and set(heard) == {offered["anchors"]} and offered["anchors"] > 0
            if agreed and now - unchanged_since >= UNCHANGED_S:
                return
            if now > deadline:
                raise KVCommError(f"{', '.join(listeners)} did not hear what {holder} offers in {HEARD_TIMEOUT_S:g} s")
            time.sleep(POLL_S)

    def _status(self, name: str) -> dict[str, Any]:
        [event] = self.ask(name, {"op": "status"})
        status: dict[str, Any] = event["status"]
        return status

    def _start(self) -> None:
        # A bound socket that does not listen keeps the port ours until the node, started with it, listens there.
        with socket.socket() as reserved:
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.bind(("127.0.0.1", 0))
            port = int(reserved.getsockname()[1])
            seed = next(iter(self._roles))
            cluster = private_cluster()
            for name, role in self._roles.items():
                place = ["--port", str(port)] if name == seed else ["--join", f"127.0.0.1:{port}"]
                self._processes[name] = self._spawn(name, [*place, "--role", role], cluster)

    def _spawn(self, name: str, arguments: Sequence[str], cluster: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "kvcomm_p2p.cli", "node", "--json", "--watch-parent", "--name", name]
        process = subprocess.Popen(
            [*command, "--model", self._model, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "KVCOMM_RUNTIME_DIR": str(self._directory), "KVCOMM_CLUSTER": cluster},
            text=True,
            **own_group(),
        )
        assert process.stdout is not None and process.stderr is not None
        for call, stream in ((self._read_events, process.stdout), (self._read_log, process.stderr)):
            threading.Thread(target=call, args=(name, stream), name=f"{name}-output", daemon=True).start()
        return process

    def _read_events(self, name: str, stream: IO[str]) -> None:
        for line in stream:
            try:
                event = json.loads(line)
            except ValueError:
                self._logs[name].append(line)
                continue
            self._events.put((name, event))
        self._events.put((name, {"event": "ended"}))

    def _read_log(self, name: str, stream: IO[str]) -> None:
        self._logs[name].extend(stream)

    def _failure(self, name: str) -> KVCommError:
        status = self._processes[name].wait()
        said = "".join(self._logs[name]).strip().removeprefix("error: ")
        return KVCommError(f"the process of {name!r} ended (status {status}): {said or 'it said nothing'}")

    def _end(self) -> None:
        """The end of stdin tells each node to leave; who has not left in time is killed."""
        for process in self._processes.values():
            if process.stdin is not None:
                process.stdin.close()
        deadline = time.monotonic() + LEAVE_TIMEOUT_S
        try:
            for process in self._processes.values():
                try:
                    process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        finally:
            for process in self._processes.values():
                if process.poll() is None:
                    process.kill()
            shutil.rmtree(self._directory, ignore_errors=True)
