"""`kvcomm node`: one agent process, until Ctrl-C, SIGTERM, `stop` on its socket, or the end of its parent."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvcomm_p2p.cli.outcome import ExitCode
from kvcomm_p2p.cli.output import duration, emit, stdout
from kvcomm_p2p.local_names import claim_name
from kvcomm_p2p.logs import configure

if TYPE_CHECKING:
    from kvcomm_p2p.agent import Agent
    from kvcomm_p2p.local_names import NameClaim
    from kvcomm_p2p.settings import Settings

DEFAULT_MODEL = "smollm2-135m"
"""`model.registry.DEFAULT_MODEL`, which would cost the import of torch here; a test keeps them equal."""

LEAVE_GRACE_S = 8.0
"""A node that has not left after this is ended hard: a user who pressed Ctrl-C must get the terminal back."""

PEER_POLL_S = 0.5
LONELY_NOTICE_S = 3.0
"""How long the addresses to join may stay silent before the user is told."""


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """What the command line said. `model` None: the default model. `brief`: no hints (the parent gives them)."""

    name: str
    join: tuple[str, ...] = ()
    model: str | None = None
    role: str = ""
    system: str = ""
    port: int = 0
    as_json: bool = False
    watch_parent: bool = False


class Reporter:
    """Says what happens to a node: one JSON object or one line per event."""

    def __init__(self, options: NodeOptions) -> None:
        self._options = options

    def say(self, event: str, **fields: Any) -> None:
        """Events: starting, ready, lonely, peer, leaving, left."""
        record = {"event": event, "name": self._options.name, **fields}
        if self._options.as_json:
            emit(record)
        else:
            stdout().print(sentence(record), markup=False, highlight=False, soft_wrap=True)


def sentence(record: Mapping[str, Any]) -> str:
    """An event for people, in one line (`ready` in several when it stands alone)."""
    name, event = record["name"], record["event"]
    if event == "starting":
        return f"{name}: loading {record['model']} …"
    if event == "ready":
        role = f", {record['role']}" if record["role"] else ""
        took = duration(record["load_s"])
        line = f"{name}: ready at {record['address']} ({record['model']}{role}; loaded in {took})"
        if record["hints"]:
            line += (
                f"\n  join it:  kvcomm node --name NAME --join {record['address']}"
                f'\n  ask it:   kvcomm ask --node {shlex.quote(name)} "…"\n  stop it:  Ctrl-C'
            )
        return line
    if event == "lonely":
        return f"{name}: nobody answers at {', '.join(record['join'])} yet; trying again in the background"
    if event == "peer":
        return f"{name}: peer {record['peer']} ({record['address']}) is {record['state']}"
    if event == "leaving":
        return f"{name}: leaving"
    return f"{name}: left"


def run_node(options: NodeOptions, settings: Settings) -> ExitCode:
    """Runs the node to its end: OK after a clean leave, INTERRUPTED if it was stopped before it was ready.

    Raises NameTakenError before anything heavy is loaded, and what starting an agent raises.
    """
    configure(settings)
    parent = ParentWatch() if options.watch_parent else None
    claim = claim_name(settings.runtime_dir, options.name)
    try:
        reporter = Reporter(options)
        reporter.say("starting", pid=os.getpid(), model=options.model or DEFAULT_MODEL)
        began = time.monotonic()
        # Loaded here and not in the loop: seconds pass, in which Ctrl-C must work in the ordinary way.
        import_module("kvcomm_p2p.agent")
        return asyncio.run(_run(options, settings, claim, parent, reporter, began))
    finally:
        claim.release()


class ParentWatch:
    """Notices the end of the parent by the end of file on stdin, however the parent died.

    Until `call_on_end` there is nothing to clean up, and the process ends at once.
    """

    def __init__(self) -> None:
        self._stop: Callable[[], object] | None = None
        self._lock = threading.Lock()
        threading.Thread(target=self._watch, name="kvcomm-parent-watch", daemon=True).start()

    def call_on_end(self, stop: Callable[[], object]) -> None:
        """From now on `stop` is called (from another thread) instead of ending the process."""
        with self._lock:
            self._stop = stop

    def _watch(self) -> None:
        with suppress(OSError, ValueError):
            while os.read(sys.stdin.fileno(), 4096):
                pass
        with self._lock:
            if self._stop is None:
                os._exit(ExitCode.INTERRUPTED)
            with suppress(RuntimeError):  # the loop has just closed: the process is ending anyway
                self._stop()


async def _run(
    options: NodeOptions,
    settings: Settings,
    claim: NameClaim,
    parent: ParentWatch | None,
    reporter: Reporter,
    began: float,
) -> ExitCode:
    from kvcomm_p2p.agent import Agent
    from kvcomm_p2p.local_server import LocalServer

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    if parent is not None:
        parent.call_on_end(lambda: loop.call_soon_threadsafe(stop.set))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, _interrupted, stop)
    agent = Agent(
        options.name,
        model=options.model or DEFAULT_MODEL,
        join=options.join,
        role=options.role,
        settings=settings,
        port=options.port,
    )
    server = LocalServer(agent, claim, system=options.system)
    ready = False  # what never was does not leave
    try:
        if not await _finished_before(stop, agent.start()):
            return ExitCode.INTERRUPTED
        await server.start()
        status = agent.status()
        reporter.say(
            "ready",
            address=agent.address,
            node_id=status.node_id,
            model=status.model,
            role=options.role,
            load_s=round(time.monotonic() - began, 3),
            hints=not options.watch_parent,
        )
        ready = True
        await _until_stopped(stop, server.wait_stop_requested(), _watch_peers(agent, options.join, reporter))
        reporter.say("leaving")
        return ExitCode.OK
    finally:
        threading.Thread(target=_end_hard_after_grace, name="kvcomm-grace", daemon=True).start()
        await server.close()
        await agent.close()
        if ready:
            reporter.say("left")


def _interrupted(stop: asyncio.Event) -> None:
    """The second signal means: now."""
    if stop.is_set():
        os._exit(ExitCode.INTERRUPTED)
    stop.set()


def _end_hard_after_grace() -> None:
    time.sleep(LEAVE_GRACE_S)
    os._exit(ExitCode.INTERRUPTED)


async def _finished_before(stop: asyncio.Event, starting: Coroutine[Any, Any, None]) -> bool:
    """False if `stop` came first; then `starting` is cancelled."""
    task = asyncio.ensure_future(starting)
    await _until_stopped(stop, asyncio.shield(task))
    if task.done():
        task.result()
        return True
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    return False


async def _until_stopped(stop: asyncio.Event, *others: Awaitable[None]) -> None:
    """Returns when the first of them is done, cancelling the rest; raises what it raised."""
    tasks = [asyncio.ensure_future(each) for each in (stop.wait(), *others)]
    done, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)
    for task in done:
        task.result()


async def _watch_peers(agent: Agent, join: tuple[str, ...], reporter: Reporter) -> None:
    """Reports peers that come, change their state or go; and, once, that nobody answers."""
    states: dict[str, str] = {}
    lonely_at = time.monotonic() + LONELY_NOTICE_S if join else None
    while True:
        peers = {peer["node_id"]: peer for peer in agent.status().peers}
        for node_id, peer in sorted(peers.items()):
            if states.get(node_id) != peer["state"]:
                reporter.say("peer", peer=peer["name"], address=peer["address"], state=peer["state"])
        states = {node_id: peer["state"] for node_id, peer in peers.items()}
        if states:
            lonely_at = None
        elif lonely_at is not None and time.monotonic() >= lonely_at:
            reporter.say("lonely", join=list(join))
            lonely_at = None
        await asyncio.sleep(PEER_POLL_S)
