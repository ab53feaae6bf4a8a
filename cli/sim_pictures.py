"""Pictures of `kvcomm sim`: of a study that just ran, of results that were kept, and the page that holds them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcomm_p2p.cli.destinations import made
from kvcomm_p2p.errors import ConfigError

if TYPE_CHECKING:
    from kvcomm_p2p.sim.scenario import Scenario
    from kvcomm_p2p.sim.study import Figure, Study


def draw(study: Study, folder: Path) -> list[Path]:
    """Of what just ran. Raises ConfigError without matplotlib."""
    from kvcomm_p2p.sim.curves import series

    require_matplotlib()
    from kvcomm_p2p.sim.plots import draw_study

    return draw_study(study.scenario.name, series(study), made(folder))


def draw_kept(kept: Mapping[str, Any], folder: Path) -> list[Path]:
    """Of a result or a sweep that was kept."""
    require_matplotlib()
    from kvcomm_p2p.sim.plots import draw_study

    if "curves" in kept:
        return draw_study(kept["scenario"]["name"], kept["curves"], made(folder))
    return draw_runs(kept["scenario"], kept["over"], kept["runs"], folder)


def draw_compared(sweeps: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Several sweeps over the same key side by side, or how news spread in several runs. Raises ConfigError."""
    require_matplotlib()
    from kvcomm_p2p.sim import sweep_plots

    if any("curves" in each for each in sweeps):
        drawn = sweep_plots.draw_news([pair for each in sweeps for pair in _runs_of(each)], made(folder))
        if not drawn:
            raise ConfigError("in none of these runs an update was followed: set updates, and simulate peers")
        return drawn
    keys = {next(iter(each["over"])) if "over" in each else "" for each in sweeps}
    if len(keys) > 1 or "" in keys:
        raise ConfigError(
            "several results make one picture if all are runs, or sweeps whose first --over has the same key"
        )
    named = {_called(each): each["runs"] for each in sweeps}
    if not any(summary["requests"] for runs in named.values() for run in runs for summary in run["summaries"]):
        raise ConfigError("these sweeps ask nobody anything: there is no first token to compare")
    return sweep_plots.draw_compared(keys.pop(), named, made(folder))


def _runs_of(kept: Mapping[str, Any]) -> list[tuple[dict[str, Any], Mapping[str, Any]]]:
    """(scenario, curves) of a run, or of each run of a sweep."""
    from kvcomm_p2p.sim.scenario import put_key

    if "curves" in kept:
        return [(kept["scenario"], kept["curves"])]
    pairs = []
    for run in kept["runs"]:
        scenario = json.loads(json.dumps(kept["scenario"]))
        for key, value in run["changes"].items():
            put_key(scenario, key, value)
        pairs.append((scenario, run["curves"]))
    return pairs


def _called(sweep: Mapping[str, Any]) -> str:
    """The preset and what --set changed of it, as its command says."""
    words = str(sweep["command"]).split()
    changes = [words[at + 1] for at, word in enumerate(words) if word == "--set"]
    return ", ".join([str(sweep["scenario"]["name"]), *changes])


def draw_runs(
    scenario: Mapping[str, Any], over: Mapping[str, Sequence[Any]], runs: Sequence[Mapping[str, Any]], folder: Path
) -> list[Path]:
    """Of a sweep."""
    require_matplotlib()
    from kvcomm_p2p.sim.sweep_plots import draw_sweep

    return draw_sweep(str(scenario["name"]), over, runs, made(folder))


def write_report(study: Study, rows: Sequence[Figure], path: Path, command: str) -> None:
    """One HTML page with pictures, figures and the scenario. Raises ConfigError."""
    import tempfile

    from kvcomm_p2p.cli.sim_results import write_whole
    from kvcomm_p2p.sim.cost_table import load_table
    from kvcomm_p2p.sim.report import page

    with tempfile.TemporaryDirectory() as folder:
        table = load_table(study.scenario.costs)
        drawn = draw(study, Path(folder))
        text = page(
            study.scenario,
            table,
            rows,
            drawn,
            summaries=study.summaries(),
            command=command,
            scenario_text=toml(study.scenario),
        )
        write_whole(path, text)


def toml(scenario: Scenario) -> str:
    """The scenario in full, as a file that can be run."""
    import msgspec

    plain: dict[str, Any] = msgspec.to_builtins(scenario)
    tables = {key: value for key, value in plain.items() if isinstance(value, dict) and value}
    listed = {key: value for key, value in plain.items() if _is_tables(value)}
    lines = [_line(key, value) for key, value in plain.items() if key not in {**tables, **listed} and value != {}]
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(_line(key, value) for key, value in table.items())]
    for name, entries in listed.items():
        for entry in entries:
            lines += ["", f"[[{name}]]", *(_line(key, value) for key, value in entry.items())]
    return "\n".join(line for line in lines if line is not None)


def _is_tables(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(each, dict) for each in value)


def _line(key: str, value: Any) -> Any:
    """None for what TOML has no word for: it is the default then."""
    return None if value is None else f"{key} = {json.dumps(value, ensure_ascii=False)}"


def require_matplotlib() -> None:
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise ConfigError("pictures need matplotlib: pip install 'kvcomm-p2p[eval]'")
