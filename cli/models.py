"""`kvcomm model`: getting models and listing those that are here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console

from kvcomm_p2p.cli.outcome import guarded
from kvcomm_p2p.cli.output import emit, size, stderr, stdout
from kvcomm_p2p.cli.setup import load_settings

models = typer.Typer(help="Get models and list those that are here.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output on stdout.")]

PHASES = {
    "wait": "waiting for another kvcomm that pulls it",
    "download": "downloading",
    "unpack": "unpacking",
    "convert": "converting",
}


@models.command()
@guarded
def pull(
    ref: Annotated[str, typer.Argument(metavar="MODEL", help="smollm2-135m, or a hub id like owner/name.")],
    as_json: AsJson = False,
) -> None:
    """Make a model available offline; quick if it is here already. Safe to interrupt and to repeat."""
    cache_dir = load_settings().cache_dir
    from kvcomm_p2p.model.registry import pull as pull_model

    with _progress(stderr()) as progress:
        folder = pull_model(ref, cache_dir=cache_dir, progress=progress)
    if as_json:
        emit({"ref": ref, "folder": str(folder)})
    else:
        stdout().print(f"{ref} is here: {folder}", markup=False, soft_wrap=True)


@models.command("ls")
@guarded
def list_(as_json: AsJson = False) -> None:
    """List the models that need no path."""
    cache_dir = load_settings().cache_dir
    from kvcomm_p2p.model.registry import list_models

    known = list_models(cache_dir)
    if as_json:
        rows = [
            {"ref": model.ref, "folder": str(model.folder) if model.folder else None, "disk_bytes": model.disk_bytes}
            for model in known
        ]
        emit({"models": rows}, indent=2)
        return
    from rich.table import Table

    table = Table()
    table.add_column("model")
    table.add_column("size", justify="right")
    table.add_column("where")
    for model in known:
        where = str(model.folder) if model.folder else f"not here yet: kvcomm model pull {model.ref}"
        table.add_row(model.ref, size(model.disk_bytes) if model.folder else "", where)
    stdout().print(table)


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """A bar per phase on a terminal; otherwise one line when a phase begins."""
    if not console.is_terminal:
        said: set[str] = set()

        def say(phase: str, done: int, total: int) -> None:
            if phase not in said:
                said.add(phase)
                console.print(f"{PHASES.get(phase, phase)} …", markup=False)

        yield say
        return

    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    begun: dict[str, TaskID] = {}
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TimeElapsedColumn(),
        console=console,
    ) as bars:  # fmt: skip

        def show(phase: str, done: int, total: int) -> None:
            if phase not in begun:
                begun[phase] = bars.add_task(PHASES.get(phase, phase), total=total or None)
            bars.update(begun[phase], completed=done, total=total or None)

        yield show
