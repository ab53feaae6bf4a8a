"""`kvcomm bench`: measurements, each a thin call into `kvcomm_p2p.evaluation`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Annotated

import typer

from kvcomm_p2p.cli.outcome import guarded
from kvcomm_p2p.cli.output import stderr, stdout, write_text

if TYPE_CHECKING:
    from kvcomm_p2p.evaluation.results import Result

bench = typer.Typer(help="Measure, and print the figures as a table or as JSON.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="The results object on stdout.")]


@bench.command()
@guarded
def ttft(as_json: AsJson = False) -> None:
    """Time to first token with KV pulled from a peer, against full prefill in the same run."""
    _measure("ttft", as_json=as_json)


@bench.command()
@guarded
def pull(as_json: AsJson = False) -> None:
    """Loopback pull of KV blocks, against a plain TCP socket moving the same bytes."""
    _measure("pull", as_json=as_json)


@bench.command()
@guarded
def quality(as_json: AsJson = False) -> None:
    """Divergence from full prefill (KL, top-1) with reused KV."""
    _measure("quality", as_json=as_json)


def _measure(name: str, *, as_json: bool) -> None:
    result: Result = import_module(f"kvcomm_p2p.evaluation.{name}").run(console=stderr())
    if as_json:
        write_text(result.to_json() + "\n")
    else:
        stdout().print(result.table())
