"""`kvcomm sim ablate`: parse, call the simulator, render."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcomm_p2p.cli.destinations import check_can_write
from kvcomm_p2p.cli.outcome import guarded
from kvcomm_p2p.cli.output import stderr, write_text
from kvcomm_p2p.cli.sim_inputs import chosen_scenario, rules_of, runs_at_once, told
from kvcomm_p2p.cli.sim_results import print_table, result_of, write_whole
from kvcomm_p2p.sim.ablations import ABLATIONS  # loads nothing else of the simulator

if TYPE_CHECKING:
    from kvcomm_p2p.sim.study import Figure


@guarded
def ablate(
    scenario: Annotated[str, typer.Argument(metavar="SCENARIO", help="A preset (see kvcomm sim ls) or a TOML file.")],
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Change a key of the scenario, as network.loss=0.1; repeatable."
        ),
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option(
            "--without",
            metavar="PART",
            help=f"Take away this: {', '.join(each.name for each in ABLATIONS)}; repeatable [default: the scenario's, or each].",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="So many, from the scenario's seed on.")] = 3,
    jobs: Annotated[int, typer.Option(min=1, help="Processes [default: one per core].")] = os.cpu_count() or 1,
    as_json: Annotated[bool, typer.Option("--json", help="The results object on stdout.")] = False,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="PATH", help="Also write the results object to a file.")
    ] = None,
) -> None:
    """What each part of the protocol is worth in a scenario: with everything, and without each part, for several seeds."""
    from kvcomm_p2p.sim.worth import runs_of_seeds, worth

    chosen = chosen_scenario(scenario, [*(changes or ()), 'fabrics=["peers"]'])
    check_can_write([save])
    parts = without or list(chosen.ablations) or [each.name for each in ABLATIONS]
    studies = runs_of_seeds(
        chosen,
        parts,
        rules_of(chosen),
        seeds,
        jobs=runs_at_once([chosen], jobs),
        done=lambda seed: stderr().print(f"seed {seed} is done", soft_wrap=True),
    )
    rows = worth(studies)
    command = told("ablate", scenario, {"set": changes, "without": without, "seeds": [str(seeds)]})
    result = result_of(command.removeprefix("kvcomm "), rows, chosen.seed)
    if save is not None:
        write_whole(save, result.to_json() + "\n")
    if as_json:
        write_text(result.to_json() + "\n")
    else:
        _print(rows)


def _print(rows: list[Figure]) -> None:
    """One line per run: what people look at first."""
    by_case: dict[str, dict[str, Figure]] = {}
    for row in rows:
        by_case.setdefault(row.case, {})[row.metric] = row
    lines = []
    for case, metrics in by_case.items():
        worse = metrics.get("seeds with a worse p99")
        lines.append(
            (
                case.partition(": ")[2],
                *(_time(metrics[f"first token, {name}"]) for name in ("mean", "p50", "p99")),
                "" if worse is None else f"{worse.value:.0f} {worse.unit}",
                f"{metrics['not recomputed'].value:.1f} %",
                f"{metrics['largest share of bytes from one holder'].value:.0f} %",
                f"{metrics['told that a holder is busy'].value:.0f}",
                f"{metrics['control traffic per node'].value:.2f} kB/s",
            )
        )
    head = (
        "",
        "first token, mean",
        "p50",
        "p99",
        "p99 worse in",
        "not recomputed",
        "most from one holder",
        "busy",
        "control",
    )
    print_table(head, lines)


def _time(row: Figure) -> str:
    if row.baseline is None or not row.baseline:
        return f"{row.value:.3g} s"
    return f"{row.value:.3g} s ({100 * (row.value / row.baseline - 1):+.1f} %)"
