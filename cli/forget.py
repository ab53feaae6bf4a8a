"""`kvcomm forget`: erase a text, or an anchor, from a node and from all that it can reach."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvcomm_p2p.cli.outcome import guarded
from kvcomm_p2p.cli.output import counted, emit, stdout
from kvcomm_p2p.cli.setup import load_settings
from kvcomm_p2p.cli.texts import names_a_file
from kvcomm_p2p.errors import UsageError

FORGET_TIMEOUT_S = 30.0

_FEW_DIGITS = re.compile("[0-9a-fA-F]{4,7}")
"""What may be meant as the beginning of an anchor's id, and is too short for that."""


@guarded
def forget(
    what: Annotated[
        str,
        typer.Argument(
            metavar="TEXT|ANCHOR",
            help="The text itself, no file name (- reads it from stdin), or an anchor's id, at least its first 8 digits.",
        ),
    ],
    node: Annotated[str, typer.Option("--node", "-n", metavar="NAME", help="Name of a running node.")],
    everywhere: Annotated[
        bool, typer.Option("--everywhere", help="From the nodes of all members, too, and of those that come later.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output on stdout.")] = False,
) -> None:
    """Erase what nodes keep of a text, or of one anchor, and refuse it for a week."""
    run_forget(load_settings().runtime_dir, node, _text_of(what, node), everywhere, as_json)


def _text_of(what: str, node: str) -> str:
    """What an argument means. Raises UsageError for a file's name: a text so short stands in much that is worth keeping, and
    nothing takes a week of refusing it back."""
    if what == "-":
        return sys.stdin.read()
    if names_a_file(what):
        given = f"kvcomm forget - --node {shlex.quote(node)}"
        raise UsageError(
            f"{what} is a file; to forget what stands in it: {given} < {shlex.quote(what)} "
            f"(if this is the text itself, too: printf %s {shlex.quote(what)} | {given})"
        )
    return what


def run_forget(directory: Path, node: str, what: str, everywhere: bool, as_json: bool) -> None:
    """Asks the running node. Raises what `local_api.request` raises."""
    from kvcomm_p2p.local_api import request

    body = {"op": "forget", "what": what, "everywhere": everywhere}
    [event] = request(directory, node, body, timeout_s=FORGET_TIMEOUT_S)
    forgotten = event["forgotten"]
    if as_json:
        emit(forgotten)
        return
    here = f"{counted(forgotten['anchors'], 'anchor')} erased from {node}"
    if not forgotten["anchors"]:
        here = f"{node} holds nothing of it"
        if _FEW_DIGITS.fullmatch(what):
            here += f" ({what} was taken as a text: of an anchor's id give 8 digits or more)"
    if not everywhere:
        told = "what peers hold stays: --everywhere erases that as well"
    elif forgotten["told"]:
        members = counted(forgotten["told"], "member was", "members were")
        told = f"{members} told to do the same, and will tell those that come later"
    else:
        told = "nobody else is there to be told; members that come later will be"
    stdout().print(f"{here}; {told}", markup=False, soft_wrap=True)
