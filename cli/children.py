"""Several node processes under one terminal. None outlives the parent, however the parent ends.

Each child is a session of its own, so that Ctrl-C in the terminal reaches only the parent, which then stops the
children in order; and each holds the reading end of a pipe from the parent, so that a killed parent is noticed by its
end of file.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcomm_p2p.child_processes import own_group
from kvcomm_p2p.cli.agents_file import AgentsFile, is_address
from kvcomm_p2p.cli.outcome import ExitCode

STOP_GRACE_S = 10.0
"""Longer than a node's own grace (`node.LEAVE_GRACE_S`), so that killing is the last resort."""

LINE_BYTES_MAX = 1 << 20

OnEvent = Callable[[str, Mapping[str, Any]], None]
OnLine = Callable[[str, str], None]


@dataclass(slots=True)
class Child:
    """One node: how to start it, and what became of it."""

    name: str
    arguments: list[str]
    process: asyncio.subprocess.Process | None = None
    reading: list[asyncio.Task[None]] = field(default_factory=list)


class PortReservations:
    """Loopback ports that nobody else gets until `close()`, although a child may listen on its own.

    A bound socket that does not listen keeps its port out of the pool of free ones, refuses connections, and with
    SO_REUSEADDR on both sides lets one listener in.
    """

    def __init__(self, count: int) -> None:
        self._sockets: list[socket.socket] = []
        for _ in range(count):
            reserved = socket.socket()
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.bind(("127.0.0.1", 0))
            self._sockets.append(reserved)
        self.ports = [int(reserved.getsockname()[1]) for reserved in self._sockets]

    def close(self) -> None:
        """Gives the ports back."""
        for reserved in self._sockets:
            reserved.close()


def node_commands(agents_file: AgentsFile, ports: Sequence[int]) -> list[Child]:
    """What to start, in the order of the file. Port i is agent i's, so that any agent can join any other by name."""
    address_of = {agent.name: f"127.0.0.1:{port}" for agent, port in zip(agents_file.agents, ports, strict=True)}
    seed = agents_file.agents[0].name
    children = []
    for agent in agents_file.agents:
        join = agent.join if agent.join is not None else (() if agent.name == seed else (seed,))
        arguments = ["--name", agent.name, "--port", address_of[agent.name].rpartition(":")[2]]
        for item in join:
            arguments += ["--join", item if is_address(item) and item not in address_of else address_of[item]]
        for flag, value in (("--role", agent.role), ("--system", agent.system), ("--model", agents_file.model)):
            if value:
                arguments += [flag, value]
        children.append(Child(agent.name, arguments))
    return children


class Family:
    """Starts children, passes on what they say, and ends them all when asked or when all have ended by themselves."""

    def __init__(self, children: Sequence[Child], *, on_event: OnEvent, on_line: OnLine) -> None:
        self._children = children
        self._on_event = on_event
        self._on_line = on_line
        self._stop = asyncio.Event()
        self._failed: dict[str, int] = {}

    async def run(self) -> ExitCode:
        """OK when all left as told; PARTIAL when some ended by themselves; USER when none could start for reasons that
        the user can mend."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._asked_to_stop)
        try:
            for child in self._children:
                if not self._stop.is_set():
                    await self._start(child)
            stopping = asyncio.create_task(self._stop.wait())
            everybody = asyncio.gather(*(self._watch(child) for child in self._children if child.process))
            waited: list[asyncio.Future[Any]] = [stopping, everybody]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            await self._end_all()
            await everybody
        finally:
            self._kill_all()
        return self._outcome()

    def _outcome(self) -> ExitCode:
        if not self._failed:
            return ExitCode.OK
        all_failed = len(self._failed) == len(self._children)
        return ExitCode.USER if all_failed and set(self._failed.values()) == {ExitCode.USER} else ExitCode.PARTIAL

    def _asked_to_stop(self) -> None:
        if self._stop.is_set():
            self._kill_all()
        self._stop.set()

    async def _start(self, child: Child) -> None:
        command = [sys.executable, "-m", "kvcomm_p2p.cli", "node", "--json", "--watch-parent", *child.arguments]
        child.process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            **own_group(),
            limit=LINE_BYTES_MAX,
        )
        for stream in (child.process.stdout, child.process.stderr):
            assert stream is not None
            child.reading.append(asyncio.create_task(self._read(child, stream)))

    async def _watch(self, child: Child) -> None:
        assert child.process is not None
        code = await child.process.wait()
        await asyncio.gather(*child.reading)
        if not self._stop.is_set() and code != ExitCode.OK:
            self._failed[child.name] = code
            how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
            self._on_event(child.name, {"event": "died", "name": child.name, "how": how, "code": code})

    async def _read(self, child: Child, stream: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await stream.readline()
            except ValueError:
                continue  # a line over the limit was dropped
            if not line:
                return
            text = line.decode(errors="replace").rstrip("\n")
            event = _event(text)
            if event is None:
                self._on_line(child.name, text)
            else:
                self._on_event(child.name, event)

    async def _end_all(self) -> None:
        """SIGTERM to everybody, then patience, then SIGKILL."""
        alive = [child.process for child in self._children if child.process and child.process.returncode is None]
        for process in alive:
            process.terminate()
        if alive:
            await asyncio.wait([asyncio.create_task(process.wait()) for process in alive], timeout=STOP_GRACE_S)
        self._kill_all()

    def _kill_all(self) -> None:
        for child in self._children:
            if child.process is not None and child.process.returncode is None:
                child.process.kill()


def _event(text: str) -> dict[str, Any] | None:
    if not text.startswith("{"):
        return None
    try:
        event = json.loads(text)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event and "name" in event else None
