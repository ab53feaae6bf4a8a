"""Pictures of sweeps: how something grows with what was swept over, and how news spread in each run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvcomm_p2p.sim.crossing import crossings, range_of
from kvcomm_p2p.sim.plots import INK, LOOKS, STYLE, end_of, looks, save
from kvcomm_p2p.sim.study import named

Runs = Sequence[Mapping[str, Any]]
METRICS = {"ttft_p50_s": "median", "ttft_p99_s": "99th percentile"}
NEWS_COLOURS = ("#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7", "#000000")
LINES = ("-", "--", ":", "-.")
LOG_FROM = 3.0, 6.0
"""Values that differ by more than this factor get a logarithmic axis: across, up."""


def draw_sweep(name: str, over: Mapping[str, Sequence[Any]], runs: Runs, folder: Path) -> list[Path]:
    """Pictures over the first key of `over`, which must be numbers; further keys become panels (or lines). Returns the files;
    what was not observed is not drawn."""
    key = next(iter(over))
    made = []
    with pyplot.rc_context(STYLE):
        if any(curves.get("heard_s") for run in runs for curves in run["curves"].values()):
            news = _news(f"{name}: how an update spreads", _news_of(over, runs))
            made.append(save(news, folder / f"{name}-news-by-{_file(key)}.png"))
        numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in over[key])
        if numbers and any(each["requests"] for run in runs for each in run["summaries"]):
            for metric in METRICS:
                told = "-".join(_file(each) for each in over)
                title = f"{name}: first token, {METRICS[metric]}"
                panels = _by_setting(key, runs)
                made.append(save(_panels(title, key, panels, metric), folder / f"{name}-{metric}-by-{told}.png"))
    return made


def _file(key: str) -> str:
    return key.replace(".", "-")


def draw_compared(key: str, sweeps: Mapping[str, Runs], folder: Path) -> list[Path]:
    """Several sweeps over the same key, by what to call them, side by side. Returns the files."""
    made = []
    with pyplot.rc_context(STYLE):
        for metric in METRICS:
            path = folder / f"compared-{metric}-by-{_file(key)}.png"
            made.append(save(_panels(f"First token, {METRICS[metric]}", key, sweeps, metric), path))
    return made


def _by_setting(key: str, runs: Runs) -> dict[str, Runs]:
    """A panel for each setting of the other keys, called after it."""
    panels: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        told = ", ".join(f"{other} = {value}" for other, value in run["changes"].items() if other not in (key, "seed"))
        panels.setdefault(told, []).append(run)
    return dict(panels)


def _panels(title: str, key: str, panels: Mapping[str, Runs], metric: str) -> Figure:
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    width = {1: 6.4, 2: 8.6, 3: 10.0}[columns]
    height = 3.2 * rows + 0.6
    figure, grid = pyplot.subplots(rows, columns, figsize=(width, height), squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    handles: dict[str, Any] = {}
    for axes, (told, chosen) in zip(grid.flat, panels.items(), strict=False):
        _panel(axes, key, chosen, metric)
        axes.set_title(told, fontweight="normal", fontsize=10)
        handles.update(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.suptitle(title, x=0.015, ha="left", fontsize=11, fontweight="bold")
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=4)
    figure.tight_layout(rect=(0, 0.3 / height, 1, 1))
    return figure


def _panel(axes: Axes, key: str, runs: Runs, metric: str) -> None:
    grouped = _grouped(key, runs, metric)
    look = looks(list(grouped))
    for fabric, by_value in grouped.items():
        colour, line, marker = look[fabric]
        xs = sorted(by_value)
        middle = [median(by_value[x]) for x in xs]
        axes.plot(xs, middle, color=colour, linestyle=line, marker=marker, markersize=4.5, label=named(fabric))
        low, high = [min(by_value[x]) for x in xs], [max(by_value[x]) for x in xs]
        axes.fill_between(xs, low, high, color=colour, alpha=0.15, linewidth=0)
    _mark_crossing(axes, key, runs, metric)
    values = sorted({x for by_value in grouped.values() for x in by_value})
    seen = [value for by_value in grouped.values() for each in by_value.values() for value in each]
    if values[0] > 0 and values[-1] / values[0] > LOG_FROM[0]:
        axes.set_xscale("log", base=2)
        axes.set_xticks(values, [f"{value:g}" for value in values])
        axes.minorticks_off()
    if max(seen) > LOG_FROM[1] * min(seen) > 0:
        axes.set_yscale("log")
        ticks = [step * 10.0**power for power in range(-3, 5) for step in (1, 2, 5)]
        axes.set_yticks([tick for tick in ticks if min(seen) / 1.5 <= tick <= 1.5 * max(seen)])
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
    else:
        axes.set_ylim(0, 1.1 * max(seen))
    axes.set(xlabel=key, ylabel="seconds")


def _mark_crossing(axes: Axes, key: str, runs: Runs, metric: str) -> None:
    """A line where the central pool is no better than own caches."""
    for each in crossings(runs, key, metric=metric):
        if each.against == "own" and any(bound is not None for bound in each.loses_from):
            at = median(bound for bound in each.loses_from if bound is not None)
            axes.axvline(at, color=INK, linewidth=1, linestyle=(0, (2, 3)))
            told = f"pool no better than own\ncaches from {range_of(each.loses_from, 'never')}"
            place: dict[str, Any] = {"xytext": (-4, 3), "textcoords": "offset points", "ha": "right", "va": "bottom"}
            axes.annotate(told, (at, 0), xycoords=("data", "axes fraction"), fontsize=8, color=INK, **place)


def draw_news(results: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], folder: Path) -> list[Path]:
    """How fast news spread in several results of runs, given as (scenario, curves by fabric): a colour for each number of agents,
    a line for each loss. Returns the files; empty if no update was followed."""
    seen = [
        (scenario, curves["peers"]["heard_s"]) for scenario, curves in results if curves.get("peers", {}).get("heard_s")
    ]
    if not seen:
        return []
    sizes = sorted({scenario["agents"] for scenario, _ in seen})
    losses = sorted({scenario["network"]["loss"] for scenario, _ in seen})
    lines = []
    for scenario, heard in sorted(seen, key=lambda each: (each[0]["agents"], each[0]["network"]["loss"])):
        agents, loss = scenario["agents"], scenario["network"]["loss"]
        told = f"{agents:,} nodes" + (f", {100 * loss:g} % lost" if loss else "")
        lines.append((told, sizes.index(agents), losses.index(loss), heard))
    with pyplot.rc_context(STYLE):
        return [save(_news("How one update spreads", lines), folder / "compared-news.png")]


def _news_of(over: Mapping[str, Sequence[Any]], runs: Runs) -> list[tuple[str, int, int, list[float]]]:
    """For the first seed: what to call each curve, its colour (the first key's value), its line (the other keys'), the curve."""
    key, *others = over
    settings = list(dict.fromkeys(tuple(run["changes"][other] for other in others) for run in runs))
    lines = []
    for run in runs:
        heard = run["curves"].get("peers", {}).get("heard_s")
        if heard and run["changes"]["seed"] == runs[0]["changes"]["seed"]:
            setting = tuple(run["changes"][other] for other in others)
            told = [_value(run["changes"][key], key), *(f"{o} {v}" for o, v in zip(others, setting, strict=True))]
            lines.append((", ".join(told), list(over[key]).index(run["changes"][key]), settings.index(setting), heard))
    return lines


def _news(title: str, lines: Sequence[tuple[str, int, int, list[float]]]) -> Figure:
    """Share of nodes that have heard of an update, by the time since it was made."""
    figure, axes = pyplot.subplots(figsize=(8.6, 3.8))
    for told, colour, line, heard in lines:
        shares = [100 * (number + 1) / len(heard) for number in range(len(heard))]
        tint, dashes = NEWS_COLOURS[colour % len(NEWS_COLOURS)], LINES[line % len(LINES)]
        axes.plot([0, *heard], [0, *shares], label=told, color=tint, linestyle=dashes)
    last_s = max(end_of(heard) for _, _, _, heard in lines)
    axes.set(title=title, xlabel="seconds since the update", ylabel="% of nodes that know it")
    axes.set(ylim=(0, 101), xlim=(0, last_s * 1.02))
    axes.legend(loc="lower right")
    figure.tight_layout()
    return figure


def _value(value: Any, key: str) -> str:
    return f"{value:,} {key}" if isinstance(value, int) else f"{key} {value}"


def _grouped(key: str, runs: Runs, metric: str) -> dict[str, dict[float, list[float]]]:
    """Fabric, value of the key, values of the metric; fabrics in the order of LOOKS."""
    grouped: dict[str, dict[float, list[float]]] = {}
    for run in runs:
        for summary in run["summaries"]:
            if summary["requests"]:
                by_value = grouped.setdefault(summary["fabric"], {})
                by_value.setdefault(float(run["changes"][key]), []).append(summary[metric])
    order = [*LOOKS, *grouped]
    return dict(sorted(grouped.items(), key=lambda item: order.index(item[0])))
