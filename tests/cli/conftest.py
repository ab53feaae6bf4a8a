"""`kvcomm` as a fixture, a model for real agents, and loading the fakes in this process."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

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
    """With real agents: give them `tiny_model`."""
    commands = Kvcomm(runtime_dir, fakes=False)
    yield commands
    commands.close()


@pytest.fixture(scope="session")
def tiny_model(tiny_llama: Callable[..., Any], tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random model, for real agents."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tiny_llama(vocab_size=259).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


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
