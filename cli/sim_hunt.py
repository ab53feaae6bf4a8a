"""`kvcomm sim hunt`: many small scenarios drawn at random, until one breaks an invariant."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from kvcomm_p2p.cli.outcome import ExitCode, guarded
from kvcomm_p2p.cli.output import counted, duration, stdout
from kvcomm_p2p.cli.sim_failing import tell_failure
from kvcomm_p2p.cli.sim_inputs import rules_of


@guarded
def hunt(
    runs: Annotated[int, typer.Option("--runs", min=1, metavar="COUNT", help="Scenarios, one per seed.")] = 200,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the first scenario; the next has the next.")] = 0,
    into: Annotated[
        Path, typer.Option("--into", metavar="DIR", help="Where a scenario that breaks something is written.")
    ] = Path(),
    shrink: Annotated[bool, typer.Option("--shrink/--no-shrink", help="Make it smaller first.")] = True,
) -> None:
    """Hunt for bugs of the protocol: simulate many small scenarios with faults, losses and tight limits, and watch all
    invariants. Stops at the first that breaks one, with a smaller one and what led there."""
    from rich.progress import track

    from kvcomm_p2p.cli.output import stderr
    from kvcomm_p2p.sim.failing import check
    from kvcomm_p2p.sim.hunting import EVERY, draw

    began = time.monotonic()
    for number in track(range(seed, seed + runs), "hunting", console=stderr(), transient=True):
        scenario = draw(number)
        rules = rules_of(scenario)
        if check(scenario, rules, every=EVERY) is not None:
            tell_failure(scenario, rules, shrink=shrink, every=EVERY, into=into)
    seeds = f"seed {seed}" if runs == 1 else f"seeds {seed} to {seed + runs - 1}"
    took = duration(time.monotonic() - began)
    stdout().print(f"{counted(runs, 'scenario')} ({seeds}) broke nothing in {took}", soft_wrap=True)
    raise typer.Exit(ExitCode.OK)
