"""The import table of ARCHITECTURE.md, from the syntax tree of every file."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from house import ROOT, sources

CLOCKS = frozenset({"time", "datetime", "sched"})
EXECUTION = frozenset({"asyncio", "threading", "multiprocessing", "concurrent", "subprocess", "signal", "_thread"})
INPUT_OUTPUT = frozenset(
    {"socket", "ssl", "select", "selectors", "http", "urllib", "tempfile", "shutil", "pathlib", "io"}
)


@dataclass(frozen=True)
class Rule:
    """What the files of one room may import besides the standard library, and what they may not even from there.

    `outside` None: any third-party package. `environment`: whether `os.environ` may be read.
    `hands_environment_on`: `{**os.environ, …}` for a child process, which reads no setting, is allowed. `pure`: no
    `open`, `print`, `input`, no module-level random state.
    """

    ours: tuple[str, ...]
    outside: frozenset[str] | None
    banned: frozenset[str] = frozenset()
    environment: bool = False
    hands_environment_on: bool = False
    pure: bool = False


RULES = {
    "protocol": Rule(
        ours=("kvcomm_p2p.protocol",),
        outside=frozenset({"numpy", "msgpack", "msgspec"}),
        banned=CLOCKS | EXECUTION | INPUT_OUTPUT | {"logging", "os", "ssl", "secrets", "uuid"},
        pure=True,
    ),
    "kernels": Rule(ours=("kvcomm_p2p.kernels",), outside=frozenset({"torch", "triton"}), banned=EXECUTION),
    "kvcomm_p2p/planning": Rule(
        ours=("kvcomm_p2p.planning", "kvcomm_p2p.protocol"),
        outside=frozenset({"numpy", "rapidfuzz", "pylatexenc"}),
        banned=CLOCKS | EXECUTION | INPUT_OUTPUT | {"logging", "os", "secrets", "uuid"},
        pure=True,
    ),
    "sim": Rule(
        ours=("kvcomm_p2p", "kvcomm_p2p.sim", "kvcomm_p2p.protocol", "kvcomm_p2p.planning", "kvcomm_p2p.errors"),
        outside=frozenset({"numpy", "networkx", "matplotlib", "msgspec", "tomli"}),
        banned=CLOCKS | {"asyncio", "threading", "socket"},
    ),
    "kvcomm_p2p": Rule(ours=("kvcomm_p2p",), outside=None, hands_environment_on=True),
    "cli": Rule(ours=("kvcomm_p2p",), outside=None, environment=True),
}

FORBIDDEN_OURS = {"kvcomm_p2p": ("kvcomm_p2p.sim", "kvcomm_p2p.cli")}
ENVIRONMENT_READERS = frozenset({"kvcomm_p2p/settings.py"})
"""The only file outside cli/ that reads `os.environ`."""


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, absolute name) of everything that is imported; `from a import b` counts as a.b, relative ones as "."."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield node.lineno, "."
            else:
                yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def violations(source: str, rule: Rule, forbidden: tuple[str, ...] = ()) -> list[str]:
    """What in `source` breaks `rule`, with lines."""
    tree = ast.parse(source)
    found = []
    for line, name in imports(tree):
        top = name.partition(".")[0]
        if name == ".":
            allowed = False
        elif top == "kvcomm_p2p":
            allowed = _ours(name, rule) and not any(_inside(name, each) for each in forbidden)
        elif top in sys.stdlib_module_names:
            allowed = top not in rule.banned
        else:
            allowed = rule.outside is None or top in rule.outside
        if not allowed:
            found.append(f"{line}: imports {name if name != '.' else 'relatively'}")
    found += list(_uses(tree, rule))
    return found


def _ours(name: str, rule: Rule) -> bool:
    # "kvcomm_p2p" alone allows names of the package itself (its version), not its modules.
    return any(_inside(name, each) for each in rule.ours if each != "kvcomm_p2p" or rule.outside is None) or (
        "kvcomm_p2p" in rule.ours and name == "kvcomm_p2p.__version__"
    )


def _inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def _uses(tree: ast.AST, rule: Rule) -> Iterator[str]:
    handed_on = {
        value
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict) and rule.hands_environment_on
        for key, value in zip(node.keys, node.values, strict=True)
        if key is None
    }
    for node in ast.walk(tree):
        reads = isinstance(node, ast.Attribute) and _dotted(node) in ("os.environ", "os.getenv")
        if reads and not rule.environment and node not in handed_on:
            yield f"{node.lineno}: reads os.environ"
        if not rule.pure:
            continue
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("open", "print", "input")
        ):
            yield f"{node.lineno}: calls {node.func.id}"
        if isinstance(node, ast.Attribute):
            name = _dotted(node)
            if name.startswith("random.") and name != "random.Random":
                yield f"{node.lineno}: module-level random state ({name})"
            if name.startswith(("np.random.", "numpy.random.")) and not name.endswith((".Generator", ".PCG64")):
                yield f"{node.lineno}: module-level random state ({name})"
        if isinstance(node, ast.ImportFrom) and node.module == "random":
            yield from (f"{node.lineno}: random.{alias.name}" for alias in node.names if alias.name != "Random")


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def rule_of(path: Path) -> tuple[str, Rule]:
    """The most specific room of a file."""
    relative = path.relative_to(ROOT).as_posix()
    room = max((room for room in RULES if relative.startswith(room + "/")), key=len)
    return room, RULES[room]


@pytest.mark.parametrize("room", sorted(RULES))
def test_every_file_keeps_the_table(room: str) -> None:
    broken = []
    files = [path for path in sources(room) if rule_of(path)[0] == room]
    for path in files:
        relative = path.relative_to(ROOT).as_posix()
        found = violations(path.read_text(encoding="utf-8"), RULES[room], FORBIDDEN_OURS.get(room, ()))
        if relative in ENVIRONMENT_READERS:
            found = [each for each in found if "os.environ" not in each]
        broken += [f"{relative}:{each}" for each in found]
    assert files
    assert broken == []


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("protocol", "import time"),
        ("protocol", "def f():\n    from asyncio import sleep"),
        ("protocol", "import torch"),
        ("protocol", "import logging"),
        ("protocol", "import random\nrandom.shuffle([])"),
        ("protocol", "from random import choice"),
        ("protocol", "import numpy as np\nnp.random.rand()"),
        ("protocol", "import os\nos.environ['A']"),
        ("protocol", "from kvcomm_p2p.kernels import rope_shift"),
        ("protocol", "from kvcomm_p2p.errors import KVCommError"),
        ("protocol", "from .ids import NodeId"),
        ("protocol", "print('x')"),
        ("kernels", "import numpy"),
        ("kernels", "from kvcomm_p2p.protocol.ids import NodeId"),
        ("kernels", "import os\nos.environ.get('A')"),
        ("kvcomm_p2p/planning", "import torch"),
        ("kvcomm_p2p/planning", "from time import monotonic"),
        ("kvcomm_p2p/planning", "from pathlib import Path"),
        ("kvcomm_p2p/planning", "open('x')"),
        ("kvcomm_p2p/planning", "from kvcomm_p2p.model.spec import Profile"),
        ("kvcomm_p2p", "from kvcomm_p2p.cli import main"),
        ("kvcomm_p2p", "import kvcomm_p2p.sim"),
        ("kvcomm_p2p", "import os\nos.getenv('A')"),
        ("kvcomm_p2p", "import os\nx = {'a': os.environ['A'], 'b': os.environ}"),
        ("sim", "import torch"),
        ("sim", "import time"),
        ("sim", "from kvcomm_p2p.agent import Agent"),
    ],
)
def test_the_test_sees_what_it_must(room: str, source: str) -> None:
    assert violations(source, RULES[room], FORBIDDEN_OURS.get(room, ()))


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("protocol", "import random\ndef f(rng: random.Random) -> None: rng.shuffle([])"),
        ("protocol", "import numpy as np, msgspec, hashlib\nfrom kvcomm_p2p.protocol.ids import NodeId"),
        ("kernels", "import torch, triton.language"),
        ("kvcomm_p2p/planning", "from kvcomm_p2p.protocol.anchors import Miss"),
        ("sim", "import networkx\nfrom kvcomm_p2p import __version__\nfrom kvcomm_p2p.planning.types import Plan"),
        ("cli", "import os, torch\nos.environ"),
        ("kvcomm_p2p", "import os, subprocess\nsubprocess.run([], env={**os.environ, 'A': 'b'})"),
    ],
)
def test_the_test_lets_through_what_it_must(room: str, source: str) -> None:
    assert violations(source, RULES[room]) == []
