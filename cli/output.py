"""Where output goes: answers, tables, JSON to stdout; progress and errors to stderr. Plain text without a terminal."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console

PIPED_COLUMNS = 160
"""Width of tables that go to a file or a pipe, where nothing wraps."""


def stdout() -> Console:
    """Made per call, so that a redirected `sys.stdout` is honoured."""
    return _console(stderr=False)


def stderr() -> Console:
    """For progress and errors."""
    return _console(stderr=True)


def emit(event: Mapping[str, Any], *, indent: int | None = None) -> None:
    """Writes one JSON object to stdout, on one line unless `indent` is given, and flushes it."""
    sys.stdout.write(json.dumps(event, indent=indent, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def write_text(text: str) -> None:
    """Writes an answer's piece as it is (no markup, no wrapping) and flushes it."""
    sys.stdout.write(text)
    sys.stdout.flush()


def size(count_bytes: float) -> str:
    """Bytes for people: 512 B, 23.1 MB."""
    for unit in ("B", "kB", "MB"):
        if count_bytes < 1000:
            return f"{count_bytes:.0f} B" if unit == "B" else f"{count_bytes:.1f} {unit}"
        count_bytes /= 1000
    return f"{count_bytes:.1f} GB"


def duration(seconds: float) -> str:
    """Seconds for people: 85 ms, 1.23 s, 4 min 10 s, 2 h 5 min."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else PIPED_COLUMNS
    return Console(stderr=stderr, width=width, highlight=False)
