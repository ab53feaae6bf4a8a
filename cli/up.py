"""`kvcomm up`: several nodes in one terminal, their lines prefixed with their names."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from kvcomm_p2p.cli.agents_file import AgentsFile
from kvcomm_p2p.cli.children import Family, PortReservations, node_commands
from kvcomm_p2p.cli.node import sentence
from kvcomm_p2p.cli.outcome import ExitCode
from kvcomm_p2p.cli.output import emit, stderr, stdout

COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red", "bright_cyan", "bright_magenta")


class Terminal:
    """Renders what the nodes say."""

    def __init__(self, names: list[str], *, as_json: bool) -> None:
        self._names = names
        self._as_json = as_json
        self._ready: set[str] = set()
        self._out = stderr() if as_json else stdout()

    def event(self, name: str, event: Mapping[str, Any]) -> None:
        """One event of one node; after the last one is ready, how to talk to them."""
        if self._as_json:
            emit(event)
        else:
            self.line(name, _sentence(event), "bold red" if event["event"] == "died" else "")
        if event["event"] == "ready":
            self._ready.add(name)
            if len(self._ready) == len(self._names):
                self._all_ready()

    def line(self, name: str, text: str, style: str = "") -> None:
        """One line of one node that is no event (a log line, an error)."""
        width = max(len(each) for each in self._names)
        colour = COLOURS[self._names.index(name) % len(COLOURS)]
        self._out.print(Text.assemble((name.ljust(width), colour), (" │ ", "dim"), (text, style)), soft_wrap=True)

    def _all_ready(self) -> None:
        if self._as_json:
            emit({"event": "all_ready", "names": self._names})
            return
        count = len(self._names)
        subject = "the node is" if count == 1 else f"all {count} nodes are"
        hint = f'kvcomm ask --node {shlex.quote(self._names[0])} "…"'
        self._out.print(f"{subject} ready: {hint} in another terminal; Ctrl-C ends them", markup=False, soft_wrap=True)


def run_up(agents_file: AgentsFile, *, as_json: bool, flags: Sequence[str] = ()) -> ExitCode:
    """Runs the nodes until Ctrl-C, or until all have ended. `flags`: more arguments of each `kvcomm node`."""
    names = [agent.name for agent in agents_file.agents]
    terminal = Terminal(names, as_json=as_json)
    ports = PortReservations(len(names))
    try:
        children = node_commands(agents_file, ports.ports)
        for child in children:
            child.arguments += flags

        async def run() -> ExitCode:
            return await Family(children, on_event=terminal.event, on_line=terminal.line).run()

        return asyncio.run(run())
    finally:
        ports.close()


def _sentence(event: Mapping[str, Any]) -> str:
    if event["event"] == "died":
        return f"ended by itself ({event['how']})"
    return sentence(event).removeprefix(f"{event['name']}: ")
