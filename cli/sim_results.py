"""What `kvcomm sim` keeps and shows: results with their scenario and curves, sweeps as one file, tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcomm_p2p.cli.output import stdout
from kvcomm_p2p.errors import ConfigError

if TYPE_CHECKING:
    from kvcomm_p2p.evaluation.results import Result
    from kvcomm_p2p.sim.crossing import Crossing
    from kvcomm_p2p.sim.study import Figure, Study

DIGITS = 4
"""Significant digits of what is kept for pictures; figures are kept as they are."""

KEY_METRIC = "ttft_p99_s"
"""In what a central pool loses or wins."""


def result_of(command: str, rows: Sequence[Figure], seed: int) -> Result:
    """The results object of all benchmarks."""
    from kvcomm_p2p.evaluation.results import Result, Row

    return Result(command, [Row(**asdict(row)) for row in rows], seed)


def save_study(result: Result, study: Study, path: Path) -> None:
    """The results object, and with it the scenario in full, the table of costs, summaries and curves. Raises ConfigError."""
    import msgspec

    from kvcomm_p2p.sim.cost_table import load_table
    from kvcomm_p2p.sim.curves import series

    kept = result.as_dict()
    kept["scenario"] = msgspec.to_builtins(study.scenario)
    kept["costs"] = msgspec.to_builtins(load_table(study.scenario.costs))
    kept["summaries"] = [rounded(asdict(each)) for each in study.summaries()]
    kept["curves"] = rounded(series(study))
    write_whole(path, laid_out(kept))


def sweep_result(
    command: str, over: Mapping[str, Sequence[Any]], scenario: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """A whole sweep as one object: what was swept over, the scenario that was changed, summaries, and where a pool loses."""
    import msgspec

    from kvcomm_p2p.evaluation.results import Result
    from kvcomm_p2p.sim.cost_table import load_table
    from kvcomm_p2p.sim.crossing import crossings

    kept = Result(command, [], int(scenario["seed"])).as_dict()
    del kept["rows"]
    key = next(iter(over))
    found: list[Crossing] = crossings(runs, key, metric=KEY_METRIC) if _numbers(over[key]) else []
    kept["over"] = dict(over)
    kept["scenario"] = dict(scenario)
    kept["costs"] = msgspec.to_builtins(load_table(scenario["costs"]))
    kept["runs"] = [
        rounded({"changes": r["changes"], "summaries": r["summaries"], "curves": r["curves"]}) for r in runs
    ]
    for run in kept["runs"]:  # what is drawn of many runs at once is how news spread
        run["curves"] = {
            fabric: {"heard_s": curves["heard_s"]} for fabric, curves in run["curves"].items() if "heard_s" in curves
        }
    kept["crossings"] = [{**asdict(each), "setting": dict(each.setting)} for each in found]
    return kept


def _numbers(values: Iterable[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def rounded(value: Any) -> Any:
    """Floats to DIGITS significant digits, in whatever they stand."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    return value


def laid_out(kept: Mapping[str, Any]) -> str:
    """JSON that people can read: a line for each entry of a list or table at the second level, two more for curves."""
    return "{\n" + ",\n".join(f" {json.dumps(key)}: {_laid(value, 1)}" for key, value in kept.items()) + "\n}\n"


def _laid(value: Any, depth: int) -> str:
    pad = " " * (depth + 1)
    deep = depth < 3
    if deep and isinstance(value, Mapping) and any(isinstance(each, Mapping | list) for each in value.values()):
        lines = [f"{pad}{json.dumps(key)}: {_laid(each, depth + 1)}" for key, each in value.items()]
        return "{\n" + ",\n".join(lines) + "\n" + " " * depth + "}"
    if deep and isinstance(value, list) and value and isinstance(value[0], Mapping):
        return (
            "[\n" + ",\n".join(pad + json.dumps(each, ensure_ascii=False) for each in value) + "\n" + " " * depth + "]"
        )
    return json.dumps(value, ensure_ascii=False)


def write_whole(path: Path, text: str) -> None:
    """Replaces a file, whole or not at all; makes the folder. Raises ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.part")
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error


def read_kept(path: Path) -> dict[str, Any]:
    """What `kvcomm sim run --save` or `kvcomm sim sweep --save` wrote. Raises ConfigError."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is no result: it is not JSON ({error}); write one with --save") from error
    if not isinstance(kept, dict) or not ({"curves", "scenario"} <= kept.keys() or {"runs", "over"} <= kept.keys()):
        raise ConfigError(f"{path} is no result of kvcomm sim run or sweep with --save: it has no curves and no runs")
    return kept


def rows_of(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Figures of a saved result by (case, metric). Raises ConfigError."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        found = {(str(row["case"]), str(row["metric"])): row for row in rows}
        for row in found.values():
            row["value"], row["unit"] = float(row["value"]), str(row["unit"])
        return found
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{path} is no result that kvcomm sim run --save wrote: {what}") from error


def print_sweep(runs: Sequence[Mapping[str, Any]]) -> None:
    """A line for each run and fabric."""
    lines = []
    for done in runs:
        told = ", ".join(f"{key} {value}" for key, value in done["changes"].items())
        for summary in done["summaries"]:
            asked = bool(summary["requests"])
            lines.append(
                (
                    told,
                    summary["fabric"],
                    f"{summary['ttft_p50_s']:.3g} s" if asked else "",
                    f"{summary['ttft_p99_s']:.3g} s" if asked else "",
                    f"{100 * summary['reused']:.1f} %" if asked else "",
                    f"{summary['update_median_s']:.2f} / {summary['update_p99_s']:.2f} s" if summary["updates"] else "",
                    f"{summary['control_bytes_per_node_s'] / 1000:.2f} kB/s",
                )
            )
    head = ("run", "fabric", "first token p50", "p99", "not recomputed", "update known to all", "control per node")
    print_table(head, lines)


def print_crossings(found: Sequence[Mapping[str, Any]], key: str, values: Sequence[float]) -> None:
    """Where the central pool loses at the 99th percentile of the first token; over seeds, the range."""
    from kvcomm_p2p.sim.crossing import range_of
    from kvcomm_p2p.sim.study import named

    if not found:
        return
    lines = [
        (
            ", ".join(f"{name} {value}" for name, value in each["setting"].items()) or "as written",
            named(each["against"]),
            range_of(each["wins_to"], "never"),
            range_of(each["loses_from"], f"not up to {max(values):g}"),
        )
        for each in found
    ]
    print_table(("one central pool, p99", "against", f"better up to {key}", f"not better from {key}"), lines)


def print_table(head: tuple[str, ...], lines: Iterable[tuple[str, ...]]) -> None:
    """To stdout."""
    from rich.table import Table

    table = Table(*head)
    for line in lines:
        table.add_row(*line)
    stdout().print(table)
