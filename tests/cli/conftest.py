"""`kvcomm` as a fixture, and loading the fakes in this process."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from harness import FAKES, Kvcomm


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """A directory (not yet made) with a short path: pytest's own are near the limit of a Unix socket's."""
    with tempfile.TemporaryDirectory(prefix="kv", dir="/tmp") as folder:
        yield Path(folder) / "run"


@pytest.fixture
def kvcomm(runtime_dir: Path) -> Iterator[Kvcomm]:
    commands = Kvcomm(runtime_dir)
    yield commands
    commands.close()


@pytest.fixture
def real_kvcomm(runtime_dir: Path) -> Iterator[Kvcomm]:
    """With real agents: give them a tiny model."""
    commands = Kvcomm(runtime_dir, fakes=False)
    yield commands
    commands.close()


@pytest.fixture
def fake_agent(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The fake's module, for servers in this process; its `Sampling` stands in for the real one."""
    monkeypatch.setitem(sys.modules, "kvcomm_p2p.model.decoding", _load("fake_decoding"))
    return _load("fake_agent")


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FAKES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
