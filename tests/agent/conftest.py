"""Agents with tiny models, for which reuse always pays."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from agent_cases import ANYTHING_GOES, fixed_costs, settings_in, with_profile

from kvcomm_p2p.agent import Agent
from kvcomm_p2p.model.runner import ModelRunner
from kvcomm_p2p.planning.fetches import WAIT_LOST_MAX_S
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.settings import Settings


@pytest.fixture(autouse=True)
def _costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither plans nor pulls depend on how busy this machine is; tests of waiting use `real_waits`."""
    monkeypatch.setattr("kvcomm_p2p.stack.measured_costs", fixed_costs)
    monkeypatch.setattr("kvcomm_p2p.planning.fetches.WAIT_LOST_MAX_S", 20.0)
    monkeypatch.setattr("kvcomm_p2p.planning.superseding.SUPERSEDED_KEPT_S", 0.0)
    monkeypatch.setattr(Settings, "node_config", _passing_on_briefly)


def _passing_on_briefly(
    settings: Settings, node_config: Callable[[Settings], NodeConfig] = Settings.node_config
) -> NodeConfig:
    """What was pulled by a request that ended early is let go of in time for `no_leaks` not to wait long."""
    return replace(node_config(settings), passing_on_s=0.5)


@pytest.fixture
def real_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As little patience as in real life."""
    monkeypatch.setattr("kvcomm_p2p.planning.fetches.WAIT_LOST_MAX_S", WAIT_LOST_MAX_S)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def chat_tokenizer(tiny_tokenizer: Any) -> Any:
    """Bytes as tokens, with a chat template."""
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}<assistant>"
    return tokenizer


@pytest.fixture(scope="session")
def plain_runner(tiny_llama: Callable[..., Any], chat_tokenizer: Any) -> ModelRunner:
    """Without a profile."""
    model = tiny_llama(vocab_size=259, max_position_embeddings=2048)
    return ModelRunner.from_model(model, chat_tokenizer, "tiny")


@pytest.fixture(scope="session")
def runner(plain_runner: ModelRunner) -> ModelRunner:
    """With a profile whose guard lets everything finite pass."""
    return with_profile(plain_runner, ANYTHING_GOES)


@pytest.fixture
def make_agent(tmp_path: Path, runner: ModelRunner) -> Callable[..., Agent]:
    """`make_agent(name, join=[...], model=runner, groups=(), role="", **settings)`: not started."""

    def make(name: str, **options: Any) -> Agent:
        given = {key: options.pop(key) for key in ("join", "model", "groups", "role", "port") if key in options}
        given.setdefault("model", runner)
        return Agent(name, settings=settings_in(tmp_path, **options), **given)

    return make
