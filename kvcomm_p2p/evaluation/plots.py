"""Pictures of an evaluation, one line per mode: times, divergences, and how coverage grows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvcomm_p2p.evaluation.summary import Case

KL_FLOOR = 1e-7
"""Smaller divergences, exact zeros among them, are drawn here: the axis is logarithmic."""


def draw(folder: Path, cases: Sequence[Case]) -> list[Path]:
    """Writes WORKLOAD-ttft.png, WORKLOAD-kl.png and WORKLOAD-coverage.png for every workload that has samples; makes the
    folder. Returns the paths. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for workload in dict.fromkeys(case.workload for case in cases):
        group = [case for case in cases if case.workload == workload and case.samples]
        for name, picture in _PICTURES.items() if group else ():
            figure = Figure(figsize=(6.4, 4.0), dpi=150, layout="constrained")
            axes = figure.add_subplot()
            picture(axes, group)
            axes.set_title(workload)
            axes.grid(alpha=0.3)
            axes.legend()
            path = folder / f"{workload}-{name}.png"
            figure.savefig(path)
            written.append(path)
    return written


def _ttft(axes: Axes, cases: Sequence[Case]) -> None:
    for case in cases:
        (line,) = _cdf(axes, [sample.ttft_s for sample in case.samples], label=case.mode)
        dense = [sample.dense_ttft_s for sample in case.samples]
        _cdf(axes, dense, label=f"full prefill ({case.mode}'s prompts)", color=line.get_color(), linestyle="--")
    axes.set(xlabel="time to first token, s", ylabel="share of requests", xscale="log", ylim=(0, 1.02))


def _kl(axes: Axes, cases: Sequence[Case]) -> None:
    for case in cases:
        values = np.concatenate([np.asarray(sample.kl) for sample in case.samples])
        _cdf(axes, np.maximum(values, KL_FLOOR), label=case.mode)
    axes.set(xlabel="KL from full prefill, nats (per token)", ylabel="share of tokens", xscale="log", ylim=(0, 1.02))


def _coverage(axes: Axes, cases: Sequence[Case]) -> None:
    for case in cases:
        numbers = [sample.number + 1 for sample in case.samples]
        (line,) = axes.plot(
            numbers, [_share(s.covered_tokens, s.prompt_tokens) for s in case.samples], "o-", label=case.mode
        )
        possible = [_share(sample.possible_tokens, sample.prompt_tokens) for sample in case.samples]
        axes.plot(numbers, possible, "--", color=line.get_color(), label=f"possible ({case.mode})")
    axes.set(xlabel="request", ylabel="prompt tokens covered by donors", ylim=(-0.02, 1.02))


def _cdf(axes: Axes, values: Any, **options: Any) -> Any:
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    return axes.plot(ordered, np.arange(1, len(ordered) + 1) / len(ordered), drawstyle="steps-post", **options)


def _share(tokens: int, of: int) -> float:
    return tokens / of


_PICTURES: dict[str, Callable[[Axes, Sequence[Case]], None]] = {"ttft": _ttft, "kl": _kl, "coverage": _coverage}
