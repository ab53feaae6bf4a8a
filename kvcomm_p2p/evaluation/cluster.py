"""Measurements on clusters of real processes without a model: `kvcomm bench cluster`. Importing this loads no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvcomm_p2p.errors import UsageError
from kvcomm_p2p.evaluation.cluster_bulk import herd, latency
from kvcomm_p2p.evaluation.cluster_failures import death, freeze, load, partition
from kvcomm_p2p.evaluation.cluster_spread import join, sixtyfour, update
from kvcomm_p2p.evaluation.progress import stepping
from kvcomm_p2p.evaluation.results import Result, Row

if TYPE_CHECKING:
    from rich.console import Console

CASES: dict[str, Callable[..., list[Row]]] = {
    "update": update,
    "join": join,
    "death": death,
    "load": load,
    "freeze": freeze,
    "partition": partition,
    "herd": herd,
    "latency": latency,
    "sixtyfour": sixtyfour,
}
"""Each takes a step function and keyword options, starts its own processes and ends them."""

_OPTIONS = {
    "nodes": frozenset({"update", "join", "death", "load", "partition", "herd", "sixtyfour"}),
    "repeats": frozenset({"update", "join", "death", "freeze", "herd", "sixtyfour"}),
    "minutes": frozenset({"load"}),
    "seconds": frozenset({"partition"}),
}


def run(console: Console | None = None, *, cases: Sequence[str] = (), seed: int = 0, **options: Any) -> Result:
    """The named cases (all, if none is named), one after the other. `options`: nodes, repeats, minutes (load), seconds
    (partition); each goes to the cases that know it. Raises UsageError for an unknown case or option, KVCommError when a
    process fails or what is waited for does not happen."""
    names = list(cases) or list(CASES)
    unknown = [name for name in names if name not in CASES]
    if unknown:
        raise UsageError(f"there is no case {', '.join(unknown)}: choose of {', '.join(CASES)}")
    given = {name: value for name, value in options.items() if value is not None}
    for name in given:
        if name not in _OPTIONS:
            raise UsageError(f"there is no option {name}")
    rows: list[Row] = []
    for name in names:
        with stepping(console, f"cluster {name}", 0) as step:
            mine = {option: value for option, value in given.items() if name in _OPTIONS[option]}
            rows += CASES[name](step, seed=seed, **mine)
    return Result(f"bench cluster {' '.join(names)}", rows, seed)
