"""Pictures of studies and sweeps. Matplotlib comes with the extra `eval`; importing this module needs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvcomm_p2p.sim.study import NAMES

COLOURS = {"none": "#7f7f7f", "own": "#e0a030", "central": "#c0392b", "peers": "#2471a3"}
INK = "#333333"
STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "figure.dpi": 120,
}


def draw_study(name: str, curves: Mapping[str, Any], folder: Path) -> list[Path]:
    """Pictures of one study from `study.series`; returns the files. What was not observed is not drawn."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    with pyplot.rc_context(STYLE):
        asked = {fabric: each for fabric, each in curves.items() if each["ttft_s"]}
        if asked:
            made.append(_save(_answers(name, asked), folder / f"{name}-first-token.png"))
        peers = curves.get("peers")
        if peers is not None:
            made.append(_save(_protocol(name, peers), folder / f"{name}-protocol.png"))
    return made


def _answers(name: str, asked: Mapping[str, Any]) -> Figure:
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4))
    for fabric, each in asked.items():
        seconds = each["ttft_s"]
        shares = [(i + 1) / len(seconds) for i in range(len(seconds))]
        left.step(seconds, shares, where="post", color=COLOURS[fabric], label=NAMES[fabric])
        if fabric != "none":
            share = [float("nan") if value is None else 100 * value for value in each["reused"]]
            right.plot(each["time_s"], share, color=COLOURS[fabric], marker=".", markersize=3)
    left.set(title=f"{name}: first token", xlabel="seconds", ylabel="share of prompts", xscale="log", ylim=(0, 1.02))
    left.legend(fontsize=8, loc="lower right")
    right.set(title="not recomputed", xlabel="simulated seconds", ylabel="% of prompt tokens", ylim=(0, 100))
    return figure


def _protocol(name: str, peers: Mapping[str, Any]) -> Figure:
    figure, axes = pyplot.subplots(1, 3, figsize=(11, 3.4))
    times = peers["convergence_s"]
    if times:
        axes[0].step(times, [(i + 1) / len(times) for i in range(len(times))], where="post", color=COLOURS["peers"])
    axes[0].set(title=f"{name}: an update known to all", xlabel="seconds", ylabel="share of updates", ylim=(0, 1.02))
    axes[0].set_xlim(left=0)
    _bars(axes[1], peers["traffic"], "control traffic", "bytes")
    served = peers["served_bytes"]
    axes[2].bar(range(len(served)), [value / 1e6 for value in served], color=COLOURS["peers"], width=1.0)
    axes[2].set(title="KV served, per node", xlabel="nodes, busiest first", ylabel="MB")
    return figure


def _bars(axes: Axes, values: Mapping[str, float], title: str, unit: str) -> None:
    shown = sorted(values.items(), key=lambda item: item[1])[-10:]
    axes.barh([name for name, _ in shown], [value for _, value in shown], color=COLOURS["peers"])
    axes.set(title=title, xlabel=unit)
    axes.tick_params(axis="y", labelsize=7)


def draw_sweep(name: str, key: str, runs: Sequence[Mapping[str, Any]], metric: str, unit: str, folder: Path) -> Path:
    """How a summary's `metric` changes with `key`, per fabric: medians over seeds, and the range."""
    folder.mkdir(parents=True, exist_ok=True)
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(5.4, 3.6))
        for fabric, by_value in sorted(_grouped(key, runs, metric).items()):
            xs = sorted(by_value)
            middle = [sorted(by_value[x])[len(by_value[x]) // 2] for x in xs]
            axes.plot(xs, middle, color=COLOURS[fabric], marker="o", markersize=3.5, label=NAMES[fabric])
            low, high = [min(by_value[x]) for x in xs], [max(by_value[x]) for x in xs]
            axes.fill_between(xs, low, high, color=COLOURS[fabric], alpha=0.15, linewidth=0)
        axes.set(title=f"{name}: {metric.replace('_', ' ')}", xlabel=key, ylabel=unit)
        values = sorted({float(run["changes"][key]) for run in runs})
        if _spreads(key, runs):
            axes.set_xscale("log", base=2)
            axes.set_xticks(values, [f"{value:g}" for value in values])
            axes.minorticks_off()
        seen = [
            value for by_value in _grouped(key, runs, metric).values() for each in by_value.values() for value in each
        ]
        if max(seen) > 10 * min(seen) > 0:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.legend(fontsize=8)
        return _save(figure, folder / f"{name}-{metric}-by-{key.replace('.', '-')}.png")


def _grouped(key: str, runs: Sequence[Mapping[str, Any]], metric: str) -> dict[str, dict[float, list[float]]]:
    grouped: dict[str, dict[float, list[float]]] = {}
    for run in runs:
        for summary in run["summaries"]:
            if summary["requests"] or metric not in ("ttft_p50_s", "ttft_p90_s", "ttft_p99_s"):
                by_value = grouped.setdefault(summary["fabric"], {})
                by_value.setdefault(float(run["changes"][key]), []).append(summary[metric])
    return grouped


def _spreads(key: str, runs: Sequence[Mapping[str, Any]]) -> bool:
    values = [float(run["changes"][key]) for run in runs]
    return min(values) > 0 and max(values) / min(values) > 8


def _save(figure: Figure, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return path
