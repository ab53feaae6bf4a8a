"""`kvcomm sim validate`: real agents are asked, the simulator repeats it, and both are put side by side."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcomm_p2p.cli.destinations import check_can_write
from kvcomm_p2p.cli.outcome import guarded
from kvcomm_p2p.cli.output import stderr, stdout, write_text
from kvcomm_p2p.cli.setup import load_settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcomm_p2p.evaluation.results import Row
    from kvcomm_p2p.sim.agreement import Quantity
    from kvcomm_p2p.sim.metrics import Observed


@guarded
def validate(
    agents: Annotated[int, typer.Option(min=2, metavar="COUNT", help="Processes, each with the model.")] = 8,
    requests: Annotated[int, typer.Option(min=1, metavar="COUNT", help="Prompts per agent.")] = 4,
    model: Annotated[str, typer.Option("--model", "-m", metavar="MODEL")] = "smollm2-135m",
    costs: Annotated[
        str,
        typer.Option(
            "--costs",
            metavar="TABLE",
            help="What bench costs measured here; forwards are timed anew.",
        ),
    ] = "smollm2-135m-2-cores",
    mode: Annotated[str, typer.Option("--mode", metavar="MODE", help="exact, balanced or fast")] = "balanced",
    seed: Annotated[int, typer.Option("--seed")] = 0,
    record: Annotated[
        Path | None, typer.Option("--record", metavar="PATH", help="Keep the recording (it holds token ids).")
    ] = None,
    recording: Annotated[
        Path | None, typer.Option("--recording", metavar="PATH", help="Ask nobody: simulate this recording again.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The results object on stdout.")] = False,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="PATH", help="Also write the results object to a file.")
    ] = None,
) -> None:
    """Does the simulator agree with reality? Asks real agents on this machine, and simulates the same."""
    import tempfile

    from kvcomm_p2p.evaluation.results import Result
    from kvcomm_p2p.sim.agreement import agreement
    from kvcomm_p2p.sim.cost_table import load_table, save_table
    from kvcomm_p2p.sim.recorded import read_real_run

    load_settings()
    check_can_write([save, record])
    with tempfile.TemporaryDirectory(prefix="kvcomm-") as folder:
        path = recording
        if path is None:
            from kvcomm_p2p.evaluation.validate import record_run

            path = record or Path(folder) / f"real-{agents}.jsonl"
            run = record_run(stderr(), model=model, agents=agents, requests=requests, mode=mode, seed=seed)
            run.write(path)
        real = read_real_run(path)
        here = Path(folder) / "costs.json"
        save_table(real.costs(load_table(costs)), here)
        quantities = agreement(real, _simulated(path, str(here), seed))
    case = f"{len(real.head.agents)} agents"
    command = f"sim validate --agents {len(real.head.agents)}"
    command += f" --requests {requests}" if recording is None else f" --recording {recording.name}"
    result = Result(command, _rows(case, quantities, real.head.load_before, real.end.duration_s), seed)
    if save is not None:
        result.write(save)
    if as_json:
        write_text(result.to_json() + "\n")
    else:
        _print(case, quantities, real.head.load_before)


def _simulated(path: Path, costs: str, seed: int) -> Observed:
    from kvcomm_p2p.cli.sim_inputs import rules_of
    from kvcomm_p2p.sim.recorded import read_real_run
    from kvcomm_p2p.sim.scenario import check_scenario
    from kvcomm_p2p.sim.study import run_study

    scenario = check_scenario({**read_real_run(path).scenario(path, costs), "seed": seed})
    (observed,) = run_study(scenario, rules_of(scenario), clock=time.perf_counter).observed
    return observed


def _rows(case: str, quantities: Sequence[Quantity], load: float, duration_s: float) -> list[Row]:
    from kvcomm_p2p.evaluation.results import Row

    rows = [
        Row(case, "load average when the first prompt was asked", load, "processes", 1),
        Row(case, "recorded", duration_s, "s", 1),
    ]
    for each in quantities:
        rows.append(Row(case, each.name, each.simulated, each.unit, each.n, baseline=each.real))
        points = each.unit == "%"
        off = each.differs if points else 100 * each.differs
        rows.append(Row(case, f"{each.name}: simulated against real", off, "points" if points else "%", each.n))
        if each.limit is not None:
            rows.append(Row(case, f"{each.name}: within its limit", float(bool(each.within)), "", each.n))
    return rows


def _print(case: str, quantities: Sequence[Quantity], load: float) -> None:
    from rich.table import Table

    table = Table("quantity", "real", "simulated", "differs by", "may", "", title=f"{case}, load average {load:.2f}")
    for each in quantities:
        points = each.unit == "%"
        off = f"{each.differs:+.1f} points" if points else f"{100 * each.differs:+.1f} %"
        limit = "" if each.limit is None else (f"{each.limit:g} points" if points else f"{100 * each.limit:g} %")
        within = {None: "", True: "within", False: "not within"}[each.within]
        shown = (f"{value:.3g} {each.unit}" for value in (each.real, each.simulated))
        table.add_row(each.name, *shown, off, limit, within)
    stdout().print(table)
