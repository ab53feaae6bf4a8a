"""What every benchmark returns: measured rows, as one JSON object for machines and the same rows as a table for people.

Importing this module imports neither torch nor rich.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcomm_p2p import __version__

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class Row:
    """One measured figure. A row without a measurement does not exist.

    `value` in `unit` is the median (or mean, as `metric` says) of `n` measurements; `ci95` is its confidence interval
    [low, high]. `baseline` is the same metric of what we compare with, in the same unit and measured in the same run;
    `ratio` says how much better than the baseline we are (for times baseline / value, so that larger is better).
    """

    case: str
    metric: str
    value: float
    unit: str
    n: int
    ci95: tuple[float, float] | None = None
    baseline: float | None = None
    ratio: float | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for a figure that was not measured: no samples, or not finite."""
        if self.n < 1:
            raise ValueError(f"row {self.case!r} {self.metric!r} has n={self.n}: a row needs at least one measurement")
        figures = [self.value, self.baseline, self.ratio, *(self.ci95 or ())]
        if any(figure is not None and not math.isfinite(figure) for figure in figures):
            raise ValueError(f"row {self.case!r} {self.metric!r} holds a figure that is not finite: {figures}")


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of one command, e.g. `Result("bench ttft", rows, seed=0)`."""

    command: str
    rows: Sequence[Row]
    seed: int

    def as_dict(self) -> dict[str, Any]:
        """The results object of the design, in plain types."""
        return {
            "command": self.command,
            "version": __version__,
            "commit": commit(),
            "machine": machine(),
            "seed": self.seed,
            "rows": [asdict(row) for row in self.rows],
        }

    def to_json(self) -> str:
        """The results object as indented JSON without a trailing newline."""
        return json.dumps(self.as_dict(), indent=2, ensure_ascii=False, allow_nan=False)

    def write(self, path: Path) -> None:
        """Replaces `path` by the JSON, whole or not at all; makes the folder. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        partial.write_text(self.to_json() + "\n", encoding="utf-8")
        partial.replace(path)

    def table(self) -> Table:
        """The same rows as a rich table; the columns that no row fills are left out."""
        from rich.table import Table

        with_interval = any(row.ci95 is not None for row in self.rows)
        with_baseline = any(row.baseline is not None for row in self.rows)
        with_ratio = any(row.ratio is not None for row in self.rows)
        table = Table(title=f"kvcomm {self.command}", title_justify="left")
        table.add_column("case")
        table.add_column("metric")
        table.add_column("value", justify="right")
        for wanted, heading in ((with_interval, "95 %"), (with_baseline, "baseline"), (with_ratio, "ratio")):
            if wanted:
                table.add_column(heading, justify="right")
        table.add_column("n", justify="right")
        for row in self.rows:
            cells = [row.case, row.metric, f"{figure(row.value)} {row.unit}".rstrip()]
            if with_interval:
                cells.append("" if row.ci95 is None else f"{figure(row.ci95[0])} … {figure(row.ci95[1])}")
            if with_baseline:
                cells.append("" if row.baseline is None else f"{figure(row.baseline)} {row.unit}".rstrip())
            if with_ratio:
                cells.append("" if row.ratio is None else f"{figure(row.ratio)} ×")
            table.add_row(*cells, str(row.n))
        return table


def figure(value: float) -> str:
    """Three significant digits, integers as they are, no exponent between 0.0001 and a million."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) >= 1e-4:
        digits = max(0, 2 - math.floor(math.log10(abs(value))))
        return f"{value:.{digits}f}"
    return f"{value:.2e}"


@cache
def machine() -> dict[str, Any]:
    """What the figures depend on. No host name, no path, no user."""
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "cpu": _cpu_model(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": _version("torch"),
        "transformers": _version("transformers"),
    }


@cache
def commit() -> str | None:
    """The commit that this source tree is at, with "-dirty" if tracked files differ from it; None when installed."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        head = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return head + ("-dirty" if changed else "")


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
