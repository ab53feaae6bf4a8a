"""`kvcomm sim`: parse, call the simulator, render."""

from __future__ import annotations

import csv
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcomm_p2p.cli.destinations import check_can_write
from kvcomm_p2p.cli.outcome import guarded
from kvcomm_p2p.cli.output import counted, emit, stderr, stdout, write_text
from kvcomm_p2p.cli.sim_ablate import ablate
from kvcomm_p2p.cli.sim_failing import telling_failures
from kvcomm_p2p.cli.sim_hunt import hunt
from kvcomm_p2p.cli.sim_inputs import chosen_scenario, parsed_values, rules_of, runs_at_once, told, written
from kvcomm_p2p.cli.sim_pictures import draw, draw_compared, draw_kept, draw_runs, require_matplotlib, write_report
from kvcomm_p2p.cli.sim_recording import node_maker
from kvcomm_p2p.cli.sim_replay import replay_nodes
from kvcomm_p2p.cli.sim_results import (
    laid_out,
    print_crossings,
    print_sweep,
    print_table,
    read_kept,
    result_of,
    rows_of,
    save_study,
    sweep_result,
    write_whole,
)
from kvcomm_p2p.cli.sim_validate import validate
from kvcomm_p2p.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from kvcomm_p2p.sim.scenario import Scenario
    from kvcomm_p2p.sim.study import Figure, Study

sim = typer.Typer(help="Simulate many agents: what happens before you deploy them.", no_args_is_help=True)
sim.command()(validate)
sim.command()(ablate)
sim.command()(hunt)
sim.command("replay")(replay_nodes)

ScenarioArgument = Annotated[
    str, typer.Argument(metavar="SCENARIO", help="A preset (see kvcomm sim ls) or a TOML file.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the scenario, as network.loss=0.1; repeatable."),
]
FabricOption = Annotated[
    list[str] | None,
    typer.Option("--fabric", metavar="NAME", help="none, own, central or peers; repeatable [default: the scenario's]."),
]
AsJson = Annotated[bool, typer.Option("--json", help="The results object on stdout.")]
Save = Annotated[Path | None, typer.Option("--save", metavar="PATH", help="Also write the results object to a file.")]
CsvOption = Annotated[Path | None, typer.Option("--csv", metavar="PATH", help="Also write the figures as CSV.")]
PlotsOption = Annotated[
    Path | None, typer.Option("--plots", metavar="DIR", help="Also draw pictures into this folder.")
]


@sim.command("ls")
@guarded
def list_presets(as_json: AsJson = False) -> None:
    """The scenarios that come with kvcomm, and the tables of costs."""
    from kvcomm_p2p.sim.cost_table import described, load_table, shipped
    from kvcomm_p2p.sim.scenario import load_scenario, presets

    scenarios = [load_scenario(name) for name in presets()]
    tables = [load_table(name) for name in shipped()]
    if as_json:
        told = [{"name": each.name, "about": each.about, "agents": each.agents} for each in scenarios]
        emit({"scenarios": told, "costs": [described(table) for table in tables]})
        return
    for scenario in scenarios:
        stdout().print(f"{scenario.name:<15} {scenario.agents:>5} agents  {scenario.about}", soft_wrap=True)
    for table in tables:
        stdout().print(f"costs {described(table)}", soft_wrap=True)


@sim.command()
@guarded
def run(
    scenario: ScenarioArgument,
    changes: SetOption = None,
    fabric: FabricOption = None,
    seed: Annotated[int | None, typer.Option("--seed", help="[default: the scenario's]")] = None,
    as_json: AsJson = False,
    save: Save = None,
    csv_path: CsvOption = None,
    plots: PlotsOption = None,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="PATH", help="Also write one HTML page that opens offline.")
    ] = None,
    record: Annotated[
        Path | None, typer.Option("--record", metavar="DIR", help="Also record every node of the fabric peers.")
    ] = None,
    every: Annotated[
        int, typer.Option("--every", min=1, metavar="EVENTS", help="Of a node, between checks of all that it knows.")
    ] = 50,
    shrink: Annotated[
        bool, typer.Option("--shrink/--no-shrink", help="If an invariant breaks: find a smaller scenario that does it.")
    ] = True,
) -> None:
    """Simulate one scenario on each of its fabrics."""
    from kvcomm_p2p.sim.study import figures

    chosen = chosen_scenario(scenario, changes, fabric, seed)
    check_can_write([save, csv_path, report], [plots])
    if plots is not None or report is not None:
        require_matplotlib()
    with node_maker(chosen, record) as make_node, telling_failures(chosen, shrink=shrink, every=every):
        study = _run(chosen, every=every, make_node=make_node)
    rows = figures(study)
    seeds = None if seed is None else [str(seed)]
    command = told("run", scenario, {"set": changes, "fabric": fabric, "seed": seeds})
    result = result_of(command.removeprefix("kvcomm "), rows, chosen.seed)
    if save is not None:
        save_study(result, study, save)
    if csv_path is not None:
        _write_csv(rows, csv_path)
    pictures = [] if plots is None else draw(study, plots)
    if report is not None:
        write_report(study, rows, report, command)
    if as_json:
        write_text(result.to_json() + "\n")
    else:
        stdout().print(result.table())
    for path in (save, csv_path, report, *pictures):
        if path is not None:
            stderr().print(f"written: {path}", markup=False, soft_wrap=True)


@sim.command()
@guarded
def sweep(
    scenario: ScenarioArgument,
    over: Annotated[
        list[str], typer.Option("--over", metavar="KEY=A,B,C", help="Run with each of these values; repeatable.")
    ],
    changes: SetOption = None,
    fabric: FabricOption = None,
    repeats: Annotated[int, typer.Option(min=1, help="Seeds per combination.")] = 1,
    jobs: Annotated[int, typer.Option(min=1, help="Processes [default: one per core].")] = os.cpu_count() or 1,
    into: Annotated[
        Path | None, typer.Option("--into", metavar="DIR", help="Where runs are kept [default: sim-SCENARIO].")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine", metavar="ADDRESS", help="dask://HOST:PORT or ray://HOST:PORT, if one machine is not enough."
        ),
    ] = None,
    plots: PlotsOption = None,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="PATH", help="Also write the whole sweep to one file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate with many values of something. Interrupted, it keeps what it has and goes on where it was."""
    from kvcomm_p2p.cli.sim_engines import executor_of
    from kvcomm_p2p.sim.sweeps import points
    from kvcomm_p2p.sim.sweeps import sweep as run_sweep

    values = parsed_values(over)
    base = written(chosen_scenario(scenario, changes, fabric))
    chosen = points(base, values, repeats)
    check_can_write([save], [plots])
    if plots is not None:
        require_matplotlib()
    jobs = jobs if engine else runs_at_once([point.scenario for point in chosen], jobs)
    folder = into or Path(f"sim-{base['name']}")
    runs: list[dict[str, Any]] = []
    with executor_of(engine) as executor, _progress() as bar, _keeping(folder, runs):
        task = bar.add_task(base["name"], total=len(chosen))
        for done in run_sweep(chosen, rules_of(chosen[0].scenario), folder, executor=executor, jobs=jobs):
            runs.append(done)
            bar.advance(task)
    order = {point.key: number for number, point in enumerate(chosen)}
    runs.sort(key=lambda done: order[done["key"]])
    repeated = None if repeats == 1 else [str(repeats)]
    command = told("sweep", scenario, {"over": over, "set": changes, "fabric": fabric, "repeats": repeated})
    whole = sweep_result(command.removeprefix("kvcomm "), values, base, runs)
    if save is not None:
        write_whole(save, laid_out(whole))
    if plots is not None:
        for path in draw_runs(base, values, runs, plots):
            stderr().print(str(path), soft_wrap=True)
    if as_json:
        emit(whole)
    else:
        print_sweep(runs)
        print_crossings(whole["crossings"], *next(iter(values.items())))


@sim.command()
@guarded
def compare(
    first: Annotated[Path, typer.Argument(metavar="A.json", help="Saved by kvcomm sim run --save.")],
    second: Annotated[Path, typer.Argument(metavar="B.json", help="Another one.")],
) -> None:
    """Two saved results side by side, with the ratio."""
    before, after = rows_of(first), rows_of(second)
    lines = []
    for key in dict.fromkeys([*before, *after]):
        old, new = before.get(key), after.get(key)
        ratio = "" if old is None or new is None or not old["value"] else f"{new['value'] / old['value']:.3g} ×"
        was, now = ("-" if row is None else f"{row['value']:.4g} {row['unit']}" for row in (old, new))
        lines.append((f"{key[0]}: {key[1]}", was, now, ratio))
    print_table(("figure", first.name, second.name, "B / A"), lines)


@sim.command()
@guarded
def plot(
    scenarios: Annotated[
        list[str],
        typer.Argument(metavar="SCENARIO...", help="A preset, a TOML file, or results that --save wrote (JSON)."),
    ],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the pictures go.")],
    changes: SetOption = None,
    fabric: FabricOption = None,
) -> None:
    """Draw a result that was kept (or several sweeps side by side), or simulate one scenario and draw it."""
    kept = [name for name in scenarios if name.endswith(".json")]
    if kept and (changes or fabric):
        raise UsageError(f"{kept[0]} is a result that is there already: --set and --fabric are for scenarios")
    if len(scenarios) > 1 and len(kept) < len(scenarios):
        raise UsageError("one scenario at a time; several results (JSON) are drawn side by side")
    if len(kept) > 1:
        made = draw_compared([read_kept(Path(name)) for name in kept], folder)
    elif kept:
        made = draw_kept(read_kept(Path(kept[0])), folder)
    else:
        check_can_write([], [folder])
        require_matplotlib()
        made = draw(_run(chosen_scenario(scenarios[0], changes, fabric)), folder)
    for path in made:
        stdout().print(str(path), soft_wrap=True)


# ---------------------------------------------------------------------------------------------------------------- inside


def _run(chosen: Scenario, **more: Any) -> Study:
    """`more`: see `study.run_study`."""
    from kvcomm_p2p.sim.study import named, run_study

    rules = rules_of(chosen)
    with _progress() as bar:
        tasks: dict[str, Any] = {name: bar.add_task(named(name), total=1.0) for name, _, _ in chosen.runs()}
        return run_study(
            chosen,
            rules,
            progress=lambda name, share: bar.update(tasks[name], completed=share),
            clock=time.perf_counter,
            **more,
        )


def _progress() -> Any:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=stderr(),
        transient=True,
    )


@contextmanager
def _keeping(folder: Path, runs: Sequence[Any]) -> Iterator[None]:
    """Says what an interrupted sweep has kept, and what cannot be kept."""
    try:
        yield
    except KeyboardInterrupt:
        stderr().print(f"{folder} keeps {counted(len(runs), 'run')}: the same command goes on there", soft_wrap=True)
        raise
    except OSError as error:
        raise ConfigError(
            f"runs cannot be kept in {folder}: {error.strerror or error}; choose another --into"
        ) from error


def _write_csv(rows: Sequence[Figure], path: Path) -> None:
    import io
    from dataclasses import asdict, fields

    from kvcomm_p2p.sim.study import Figure

    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, [field.name for field in fields(Figure)])
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    write_whole(path, text.getvalue())
