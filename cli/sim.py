"""`kvcomm sim`: parse, call the simulator, render."""

from __future__ import annotations

import csv
import json
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcomm_p2p.cli.outcome import guarded
from kvcomm_p2p.cli.output import emit, stderr, stdout, write_text
from kvcomm_p2p.cli.sim_replay import replay_nodes
from kvcomm_p2p.cli.sim_validate import validate
from kvcomm_p2p.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from kvcomm_p2p.evaluation.results import Result
    from kvcomm_p2p.planning.types import ReuseRules
    from kvcomm_p2p.sim.scenario import Scenario
    from kvcomm_p2p.sim.study import Figure, Study

sim = typer.Typer(help="Simulate many agents: what happens before you deploy them.", no_args_is_help=True)
sim.command()(validate)
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
) -> None:
    """Simulate one scenario on each of its fabrics."""
    from kvcomm_p2p.sim.study import figures

    chosen = _scenario(scenario, changes, fabric, seed)
    study = _run(chosen)
    rows = figures(study)
    result = _result("sim run", rows, chosen.seed)
    if csv_path is not None:
        _write_csv(rows, csv_path)
    pictures = _draw(study, plots) if plots is not None else []
    if report is not None:
        _write_report(study, rows, report, pictures, scenario, changes, fabric)
    _show(result, as_json, save)


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
    as_json: AsJson = False,
) -> None:
    """Simulate with many values of something. Interrupted, it keeps what it has and goes on where it was."""
    from kvcomm_p2p.cli.sim_engines import executor_of
    from kvcomm_p2p.sim.study import points
    from kvcomm_p2p.sim.study import sweep as run_sweep

    base = _written(scenario, changes, fabric, None)
    values = dict(_parsed_values(each) for each in over)
    chosen = points(base, values, repeats)
    folder = into or Path(f"sim-{chosen[0].scenario.name}")
    rules = rules_of(chosen[0].scenario)
    runs: list[dict[str, Any]] = []
    with _progress() as bar, executor_of(engine) as executor:
        task = bar.add_task(chosen[0].scenario.name, total=len(chosen))
        for done in run_sweep(chosen, rules, folder, executor=executor, jobs=jobs):
            runs.append(done)
            bar.advance(task)
    runs.sort(key=lambda done: str(done["changes"]))
    if plots is not None:
        _draw_sweep(chosen[0].scenario.name, list(values), runs, plots)
    if as_json:
        emit({"command": "sim sweep", "runs": runs})
    else:
        _print_sweep(runs)


@sim.command()
@guarded
def compare(
    first: Annotated[Path, typer.Argument(metavar="A.json", help="Saved by kvcomm sim run --save.")],
    second: Annotated[Path, typer.Argument(metavar="B.json", help="Another one.")],
) -> None:
    """Two saved results side by side, with the ratio."""
    before, after = _saved(first), _saved(second)
    lines = []
    for key, row in after.items():
        old = before.get(key)
        ratio = "" if old is None or not old["value"] else f"{row['value'] / old['value']:.3g} ×"
        was = "-" if old is None else f"{old['value']:.4g}"
        lines.append((f"{key[0]}: {key[1]}", was, f"{row['value']:.4g} {row['unit']}", ratio))
    _print_table(("figure", first.name, second.name, "B / A"), lines)


@sim.command()
@guarded
def plot(
    scenario: ScenarioArgument,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the pictures go.")],
    changes: SetOption = None,
    fabric: FabricOption = None,
) -> None:
    """Simulate one scenario and draw it."""
    for path in _draw(_run(_scenario(scenario, changes, fabric, None)), folder):
        stdout().print(str(path), soft_wrap=True)


# ---------------------------------------------------------------------------------------------------------------- inside


def _scenario(name: str, changes: list[str] | None, fabric: list[str] | None, seed: int | None) -> Scenario:
    from kvcomm_p2p.sim.scenario import load_scenario
    from kvcomm_p2p.sim.simulation import check_fits

    chosen = load_scenario(name, _changes(changes, fabric, seed))
    check_fits(chosen, _free_bytes())
    return chosen


def _written(name: str, changes: list[str] | None, fabric: list[str] | None, seed: int | None) -> dict[str, Any]:
    import msgspec

    written: dict[str, Any] = msgspec.to_builtins(_scenario(name, changes, fabric, seed))
    return written


def _changes(changes: list[str] | None, fabric: list[str] | None, seed: int | None) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for change in changes or ():
        key, equals, value = change.partition("=")
        if not equals or not key:
            raise UsageError(f"--set {change!r} is not KEY=VALUE, as network.loss=0.1")
        made[key] = _value(value)
    if fabric:
        made["fabrics"] = list(fabric)
    if seed is not None:
        made["seed"] = seed
    return made


def _value(text: str) -> Any:
    """Numbers, true and false, lists as TOML writes them; everything else is text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _parsed_values(text: str) -> tuple[str, list[Any]]:
    key, equals, values = text.partition("=")
    if not equals or not key or not values:
        raise UsageError(f"--over {text!r} is not KEY=A,B,C, as agents=4,8,16")
    return key, [_value(value) for value in values.split(",")]


def rules_of(scenario: Scenario) -> ReuseRules:
    """What the named model's shipped profile allows in this mode."""
    from kvcomm_p2p.model.profiles import shipped_profile
    from kvcomm_p2p.planning.types import Mode, ReuseRules
    from kvcomm_p2p.reuse.rules import profile_rules

    mode = Mode(scenario.mode)
    if mode in (Mode.EXACT, Mode.DENSE):
        return ReuseRules(approximate=False, reason=f"mode {mode.value}")
    profile = shipped_profile(scenario.profile)
    rules = profile_rules(profile, mode)
    if rules is None:
        raise ConfigError(f"no profile is shipped for {scenario.profile!r}: use smollm2-135m, or mode exact")
    return rules


def _run(chosen: Scenario) -> Study:
    from kvcomm_p2p.sim.study import NAMES, run_study

    rules = rules_of(chosen)
    with _progress() as bar:
        tasks: dict[str, Any] = {fabric: bar.add_task(NAMES[fabric], total=1.0) for fabric in chosen.fabrics}
        return run_study(
            chosen,
            rules,
            progress=lambda fabric, share: bar.update(tasks[fabric], completed=share),
            clock=time.perf_counter,
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


def _result(command: str, rows: Sequence[Figure], seed: int) -> Result:
    from dataclasses import asdict

    from kvcomm_p2p.evaluation.results import Result, Row

    return Result(command, [Row(**asdict(row)) for row in rows], seed)


def _show(result: Result, as_json: bool, save: Path | None) -> None:
    if save is not None:
        result.write(save)
    if as_json:
        write_text(result.to_json() + "\n")
    else:
        stdout().print(result.table())


def _write_csv(rows: Sequence[Figure], path: Path) -> None:
    from dataclasses import asdict, fields

    from kvcomm_p2p.sim.study import Figure

    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Figure)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def _draw(study: Study, folder: Path) -> list[Path]:
    from kvcomm_p2p.sim.study import series

    _require_matplotlib()
    from kvcomm_p2p.sim.plots import draw_study

    return draw_study(study.scenario.name, series(study), folder)


def _draw_sweep(name: str, keys: list[str], runs: list[dict[str, Any]], folder: Path) -> None:
    _require_matplotlib()
    from kvcomm_p2p.sim.plots import draw_sweep

    for key in keys:
        numeric = all(isinstance(each["changes"][key], int | float) for each in runs)
        for metric, unit in (("ttft_p50_s", "seconds"), ("ttft_p99_s", "seconds")) if numeric else ():
            if any(summary["requests"] for each in runs for summary in each["summaries"]):
                stderr().print(str(draw_sweep(name, key, runs, metric, unit, folder)), soft_wrap=True)


def _require_matplotlib() -> None:
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise ConfigError("pictures need matplotlib: pip install 'kvcomm-p2p[eval]'")


def _write_report(
    study: Study,
    rows: Sequence[Figure],
    path: Path,
    pictures: list[Path],
    name: str,
    changes: list[str] | None,
    fabric: list[str] | None,
) -> None:
    import tempfile

    from kvcomm_p2p.sim.cost_table import load_table
    from kvcomm_p2p.sim.report import page

    command = " ".join(
        ["kvcomm sim run", name, *(f"--set {each}" for each in changes or ()), *(f"--fabric {f}" for f in fabric or ())]
    )
    with tempfile.TemporaryDirectory() as folder:
        drawn = pictures or _draw(study, Path(folder))
        table = load_table(study.scenario.costs)
        text = _toml(study.scenario)
        path.write_text(page(study.scenario, table, rows, drawn, command=command, scenario_text=text))


def _toml(scenario: Scenario) -> str:
    """The scenario in full, as one key per line."""
    import msgspec

    return "\n".join(f"{key} = {json.dumps(value)}" for key, value in msgspec.to_builtins(scenario).items())


def _print_sweep(runs: list[dict[str, Any]]) -> None:
    lines = []
    for done in runs:
        told = ", ".join(f"{key} {value}" for key, value in done["changes"].items())
        for summary in done["summaries"]:
            lines.append(
                (
                    told,
                    summary["fabric"],
                    f"{summary['ttft_p50_s']:.3g} s",
                    f"{summary['ttft_p99_s']:.3g} s",
                    f"{100 * summary['reused']:.1f} %",
                    f"{summary['control_bytes_per_node_s'] / 1000:.2f} kB/s",
                )
            )
    _print_table(("run", "fabric", "first token p50", "p99", "not recomputed", "control per node"), lines)


def _print_table(head: tuple[str, ...], lines: Iterable[tuple[str, ...]]) -> None:
    from rich.table import Table

    table = Table(*head)
    for line in lines:
        table.add_row(*line)
    stdout().print(table)


def _saved(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    try:
        rows = json.loads(path.read_text())["rows"]
        return {(row["case"], row["metric"]): row for row in rows}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no result that kvcomm sim run --save wrote: {error}") from error


def _free_bytes() -> int:
    """Memory that can be had now; where the system does not say, all of it counts as free."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    except OSError:
        pass
    return 1 << 62
