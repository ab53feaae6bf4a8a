"""`kvcomm explain`: the plan of a prompt, or the plan and outcome of a node's last request."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import JustifyMethod
from rich.table import Table
from rich.text import Text

from kvcomm_p2p import explain
from kvcomm_p2p.cli.ask import Question
from kvcomm_p2p.cli.output import emit, stdout
from kvcomm_p2p.local_api import request
from kvcomm_p2p.report import PrefillReport


def run_explain(directory: Path, name: str, body: Mapping[str, Any], *, as_json: bool) -> None:
    """Asks the node `name` and prints its report: as tables, or as one JSON object."""
    [event] = request(directory, name, body)
    if as_json:
        emit(event["report"], indent=2)
        return
    console = stdout()
    for number, each in enumerate(explain.explained(PrefillReport.from_dict(event["report"]), name)):
        if number:
            console.print()
        console.print(rendered(each))


def explain_body(question: Question) -> dict[str, Any]:
    """The request for the local API. Raises UsageError."""
    body = question.body("kvcomm explain a")
    return {"op": "explain", "prompt": body["prompt"], "mode": body["mode"], "slots": body.get("slots")}


def rendered(table: explain.Table) -> Table:
    """For a terminal of any width: words wrap, numbers do not."""
    title = Text(table.title, style="bold")
    if table.headings:
        drawn = Table(
            title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0)
        )
    else:
        drawn = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False, padding=(0, 1))
        drawn.add_column(style="dim", no_wrap=True)
        drawn.add_column(overflow="fold")
    for index, heading in enumerate(table.headings):
        justify: JustifyMethod = "right" if index in table.numbers else "left"
        drawn.add_column(heading, justify=justify, no_wrap=index in table.numbers + table.names, overflow="fold")
    for row in table.rows:
        drawn.add_row(*(Text(cell) for cell in row))
    return drawn
