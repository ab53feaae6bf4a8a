"""Pictures of one study. Matplotlib comes with the extra `eval`; importing this module needs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvcomm_p2p.sim.study import named

LOOKS = {
    "none": ("#767676", ":", "^"),
    "own": ("#E69F00", "--", "s"),
    "central": ("#D55E00", "-.", "D"),
    "peers": ("#0072B2", "-", "o"),
}
"""Colour, line and marker of a fabric; colours of Okabe and Ito, which people who see fewer colours can tell apart."""

OTHERS = (
    ("#CC79A7", "-", "v"),
    ("#009E73", "-", "P"),
    ("#56B4E9", "-", "X"),
    ("#000000", "-", "*"),
    ("#999933", "-", "p"),
)
"""Of the protocol without something, in their order."""

INK, PALE = "#333333", "#d9d9d9"
STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#ececec",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
    "figure.dpi": 130,
}


def draw_study(name: str, curves: Mapping[str, Any], folder: Path) -> list[Path]:
    """Pictures of one study from `curves.series`; returns the files. What was not observed is not drawn."""
    made = []
    asked = {fabric: each for fabric, each in curves.items() if each["ttft_s"]}
    peers = curves.get("peers")
    with pyplot.rc_context(STYLE):
        if asked:
            made.append(save(_answers(name, asked), folder / f"{name}-first-token.png"))
        if peers is not None and "outages" in peers and peers["ttft_s"]:
            made.append(save(_outages(name, peers), folder / f"{name}-outages.png"))
        if peers is not None and peers["ttft_s"] and sum(peers["served_bytes"]):
            made.append(save(_holders(name, peers), folder / f"{name}-holders.png"))
        if peers is not None and (peers["heard_s"] or peers["traffic"]):
            made.append(save(_protocol(name, peers), folder / f"{name}-protocol.png"))
    return made


def looks(fabrics: Sequence[str]) -> dict[str, tuple[str, str, str]]:
    """Colour, line and marker for each."""
    more = [fabric for fabric in fabrics if fabric not in LOOKS]
    return {**LOOKS, **{fabric: OTHERS[number % len(OTHERS)] for number, fabric in enumerate(more)}}


def _answers(name: str, asked: Mapping[str, Any]) -> Figure:
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(8.6, 3.5))
    look = looks(list(asked))
    for fabric, each in asked.items():
        colour, line, _ = look[fabric]
        seconds = each["ttft_s"]
        left.step(seconds, _shares(seconds), where="post", color=colour, linestyle=line, label=named(fabric))
        if fabric != "none":
            right.plot(each["time_s"], _percent(each["reused"]), color=colour, linestyle=line, label=named(fabric))
    left.set(title=f"{name}: time to the first token", xlabel="seconds", ylabel="% of prompts answered", ylim=(0, 101))
    _seconds_axis(left, [value for each in asked.values() for value in each["ttft_s"]])
    right.set(title="Prompt tokens not recomputed", xlabel="simulated seconds", ylabel="%", ylim=(0, 100))
    right.set_xlim(left=0)
    figure.legend(*left.get_legend_handles_labels(), loc="lower center", ncols=min(4, len(asked)))
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    return figure


def _outages(name: str, peers: Mapping[str, Any]) -> Figure:
    """Who was down against who was not, and how fast who came back has something to reuse again."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(8.6, 3.5))
    end_s = peers["time_s"][-1] + peers["time_s"][0]
    for _, from_s, until_s in peers["outages"]:
        left.axvspan(from_s, end_s if until_s is None else until_s, color=PALE, alpha=0.5, linewidth=0)
    blue, orange = LOOKS["peers"][0], LOOKS["central"][0]
    left.plot(peers["time_s"], _percent(peers["reused_others"]), color=blue, label="never down")
    hit = peers["reused_hit"]
    left.plot(
        peers["time_s"], _percent(hit), color=orange, linestyle="--", marker="o", markersize=3, label="down at times"
    )
    left.set(title=f"{name}: tokens not recomputed", xlabel="simulated seconds (grey: agents down)", ylabel="%")
    left.set(ylim=(0, 100), xlim=(0, end_s))
    left.legend(loc="lower right")
    ages, shares = peers["since_return_s"], _percent(peers["since_return"])
    bars = right.bar(ages, shares, width=0.8 * (ages[1] - ages[0]), color=orange)
    for bar, count in zip(bars, peers["since_return_n"], strict=True):
        if count:
            middle = bar.get_x() + bar.get_width() / 2
            right.annotate(f"{count}", (middle, 2), ha="center", color="white", fontsize=8, fontweight="bold")
    first_s = peers["outages"][0][1]
    meanwhile = [share for at, share in zip(peers["time_s"], peers["reused_others"], strict=True) if at >= first_s]
    right.axhline(_mean_percent(meanwhile), color=blue, linewidth=1.4, label="never down, since the first outage")
    right.set(title="After a return with nothing", xlabel="seconds since the return (in bars: prompts)", ylabel="%")
    right.set(ylim=(0, 100))
    right.grid(axis="x", visible=False)
    right.legend(loc="upper left")
    figure.tight_layout()
    return figure


def _holders(name: str, peers: Mapping[str, Any]) -> Figure:
    """Prompts asked of each agent, and KV that it served, as shares."""
    prompts, served = peers["prompts"], peers["served_bytes"]
    order = sorted(range(len(prompts)), key=lambda agent: (-prompts[agent], agent))
    figure, axes = pyplot.subplots(figsize=(8.6, 3.2))
    places = range(len(order))
    for shift, values, colour, label in (
        (-0.2, prompts, LOOKS["own"][0], f"of {sum(prompts):,.0f} prompts asked"),
        (0.2, served, LOOKS["peers"][0], f"of {sum(served) / 1e9:,.1f} GB of KV served to others"),
    ):
        shares = [100 * values[agent] / max(1, sum(values)) for agent in order]
        axes.bar([place + shift for place in places], shares, width=0.4, color=colour, label=label)
    axes.axhline(100 / len(order), color=INK, linewidth=1, linestyle=":", label="equal shares")
    axes.set(title=f"{name}: load per agent", xlabel="agents, most asked first", ylabel="% of all")
    axes.set_xticks(places, [str(agent) for agent in order] if len(order) <= 32 else [""] * len(order))
    axes.grid(axis="x", visible=False)
    axes.legend()
    figure.tight_layout()
    return figure


def _protocol(name: str, peers: Mapping[str, Any]) -> Figure:
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(8.6, 3.5), width_ratios=(3, 2))
    blue = LOOKS["peers"][0]
    heard, everybody = peers["heard_s"], peers["convergence_s"]
    if heard:
        left.plot(heard, _shares(heard), color=blue, label="% of nodes that have heard of an update")
        left.step(
            everybody, _shares(everybody), where="post", color=INK, linestyle="--", label="% of updates known to all"
        )
        left.legend(loc="lower right")
        left.set_xlim(0, 1.02 * end_of(heard))
    left.set(title=f"{name}: how news spread", xlabel="seconds since the update", ylabel="%", ylim=(0, 101))
    _bars(right, peers["traffic"])
    figure.tight_layout()
    return figure


def _bars(axes: Axes, values: Mapping[str, float]) -> None:
    shown = sorted(values.items(), key=lambda item: item[1])[-8:]
    total = sum(values.values())
    axes.barh([name for name, _ in shown], [100 * value / total for _, value in shown], color=LOOKS["peers"][0])
    axes.set(title="Control traffic by message", xlabel=f"% of {total / 1e6:,.1f} MB, all nodes")
    axes.grid(axis="y", visible=False)


def end_of(ascending: Sequence[float]) -> float:
    """Where an axis of times may end: at the last, or, where few come much later than all others, soon after these."""
    most = ascending[int(0.98 * (len(ascending) - 1))]
    return min(ascending[-1], 3 * most)


def _shares(values: Sequence[float]) -> list[float]:
    """Percentages to which ascending values (or equally spaced quantiles) belong."""
    return [100 * (number + 1) / len(values) for number in range(len(values))]


def _percent(shares: Sequence[float | None]) -> list[float]:
    return [float("nan") if share is None else 100 * share for share in shares]


def _mean_percent(shares: Sequence[float | None]) -> float:
    known = [share for share in shares if share is not None]
    return 100 * sum(known) / max(1, len(known))


def _seconds_axis(axes: Axes, values: Sequence[float]) -> None:
    """Logarithmic where values differ by much, with plain numbers."""
    least, largest = min(values), max(values)
    if least <= 0 or largest < 4 * least:
        axes.set_xlim(left=0)
        return
    axes.set_xscale("log")
    ticks = [step * 10.0**power for power in range(-3, 4) for step in (1, 2, 5)]
    axes.set_xticks([tick for tick in ticks if least / 1.5 <= tick <= 1.5 * largest])
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()


def save(figure: Figure, path: Path) -> Path:
    """Writes the picture and forgets it."""
    figure.savefig(path)
    pyplot.close(figure)
    return path
