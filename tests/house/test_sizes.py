"""Files of about 250 lines, functions of about 40: these are the limits beyond which nothing lands."""

from __future__ import annotations

import ast
from pathlib import Path

from house import ROOT, sources

FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 70


def long_functions(source: str, lines_max: int) -> list[str]:
    """name:line (lines) of every function that is longer, its decorators not counted."""
    return [
        f"{node.name}:{node.lineno} ({node.end_lineno - node.lineno + 1} lines)"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > lines_max
    ]


def own_files() -> list[Path]:
    return sources("kvcomm_p2p", "protocol", "kernels", "sim", "cli", "benchmarks", "examples")


def test_files_are_short() -> None:
    lengths = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8").count("\n") for path in own_files()}
    assert len(lengths) > 20
    assert {name: lines for name, lines in lengths.items() if lines > FILE_LINES_MAX} == {}


def test_functions_are_short() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): long_functions(path.read_text(encoding="utf-8"), FUNCTION_LINES_MAX)
        for path in own_files()
    }
    assert {name: functions for name, functions in found.items() if functions} == {}


def test_the_test_sees_a_long_function() -> None:
    source = "async def f():\n    def g():\n        pass\n        pass\n"
    assert long_functions(source, 2) == ["f:1 (4 lines)", "g:2 (3 lines)"]
