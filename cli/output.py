"""Where output goes: answers, tables, JSON to stdout; progress and errors to stderr. Plain text without a terminal."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from kvcomm_p2p.units import counted, duration, size

__all__ = ["PIPED_COLUMNS", "counted", "duration", "emit", "size", "stderr", "stdout", "write_text"]

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


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else PIPED_COLUMNS
    return Console(stderr=stderr, width=width, highlight=False)
