"""`kvcomm calibrate`: measures a model's profile, a thin call into `kvcomm_p2p.evaluation.calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcomm_p2p.cli.outcome import guarded
from kvcomm_p2p.cli.output import stderr, stdout, write_text
from kvcomm_p2p.cli.setup import load_settings


@guarded
def calibrate(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Name, hub id or folder of a model [default: smollm2-135m]."),
    ] = None,
    prompts: Annotated[
        int | None,
        typer.Option("--prompts", "-n", min=2, metavar="COUNT", help="Prompts of each kind of copy [default: 12]."),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option("--tokens", min=1, metavar="COUNT", help="Compared tokens of each [default: 24].")
    ] = None,
    save_to: Annotated[
        Path | None,
        typer.Option("--save-to", metavar="PATH", help="Write the profile here [default: where nodes look for it]."),
    ] = None,
    gsm8k: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Measure short runs on a gsm8k.jsonl [default: short documents]."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The results object on stdout.")] = False,
) -> None:
    """Measure how far repaired reuse is from full prefill on a model, so that its nodes may use it. Takes minutes."""
    cache_dir = load_settings().cache_dir
    from kvcomm_p2p.cli.node import DEFAULT_MODEL
    from kvcomm_p2p.evaluation.calibrate import profile_path, run
    from kvcomm_p2p.model.runner import ModelRunner

    runner = ModelRunner.load(model or DEFAULT_MODEL, cache_dir=cache_dir)
    found_at = profile_path(runner, cache_dir)
    options = {"prompts": prompts, "tokens": tokens}
    given = {name: value for name, value in options.items() if value is not None}
    result = run(stderr(), model=runner, save_to=save_to or found_at, gsm8k=gsm8k, **given)
    if as_json:
        write_text(result.to_json() + "\n")
    else:
        stdout().print(result.table())
    console = stderr() if as_json else stdout()
    written = (save_to or found_at).absolute()
    lines = [f"The profile of {runner.spec.name} was written to {written}."]
    if written.parent != found_at.absolute().parent:
        lines.append(f"Nodes look for it in {found_at.parent}: copy it there to use it.")
    lines.append("Nodes that are running use it after a restart.")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
