"""From how many agents on one way to share loses against another, read off the runs of a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Runs = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Crossing:
    """One per setting of what else was swept over (`setting`: (key, value) pairs), and fabric `against`.

    `wins_to`, `loses_from`: per seed, the largest value of the swept key up to which `fabric` was better in `metric`, and the
    smallest from which on it never was again. None: it was never better; it lost at no value (so far as was swept).
    """

    setting: tuple[tuple[str, Any], ...]
    fabric: str
    against: str
    metric: str
    wins_to: tuple[float | None, ...]
    loses_from: tuple[float | None, ...]


def crossings(runs: Runs, key: str, *, metric: str, fabric: str = "central") -> list[Crossing]:
    """Where `fabric` stops being better (smaller in `metric`) than each other fabric of the runs, as `key` grows; ordered by
    setting. Empty if `fabric` was not simulated."""
    found = []
    for setting in _settings(runs, key):
        by_seed: dict[Any, list[tuple[float, dict[str, float]]]] = {}
        for run in runs:
            if _setting(run, key) == setting:
                values = {each["fabric"]: each[metric] for each in run["summaries"]}
                by_seed.setdefault(run["changes"]["seed"], []).append((float(run["changes"][key]), values))
        fabrics = {name: None for pairs in by_seed.values() for _, values in pairs for name in values}
        for against in fabrics:
            if against == fabric or fabric not in fabrics:
                continue
            bounds = [_bounds(by_seed[seed], fabric, against) for seed in sorted(by_seed)]
            wins_to, loses_from = tuple(each[0] for each in bounds), tuple(each[1] for each in bounds)
            found.append(Crossing(setting, fabric, against, metric, wins_to, loses_from))
    return found


def range_of(bounds: Sequence[float | None], never: str) -> str:
    """ "32", "16 to 64", or with seeds where there is none, "64 or never"."""
    known = sorted({value for value in bounds if value is not None})
    if not known:
        return never
    told = f"{known[0]:g}" if len(known) == 1 else f"{known[0]:g} to {known[-1]:g}"
    return told if None not in bounds else f"{told} or {never}"


def _bounds(
    pairs: Sequence[tuple[float, dict[str, float]]], fabric: str, against: str
) -> tuple[float | None, float | None]:
    wins_to: float | None = None
    loses_from: float | None = None
    for value, metrics in sorted(pairs, key=lambda pair: pair[0]):
        if fabric not in metrics or against not in metrics:
            continue
        if metrics[fabric] < metrics[against]:
            wins_to, loses_from = value, None
        elif loses_from is None:
            loses_from = value
    return wins_to, loses_from


def _setting(run: Mapping[str, Any], key: str) -> tuple[tuple[str, Any], ...]:
    return tuple((name, value) for name, value in run["changes"].items() if name not in (key, "seed"))


def _settings(runs: Runs, key: str) -> list[tuple[tuple[str, Any], ...]]:
    """In the order in which they come."""
    return list(dict.fromkeys(_setting(run, key) for run in runs))
