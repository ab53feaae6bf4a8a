"""The blocking face: the same results, inside a running loop too, and nothing left behind."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agent_cases import dense, random_ids, settings_in

from kvcomm_p2p.agent import Agent
from kvcomm_p2p.errors import CancelledByCaller, ConfigError, NameTakenError, UsageError
from kvcomm_p2p.model.decoding import Sampling
from kvcomm_p2p.model.runner import ModelRunner
from kvcomm_p2p.reply import Reply
from kvcomm_p2p.sync import SyncAgent

SAMPLING = Sampling(max_new_tokens=12)


@pytest.fixture
def make_sync(tmp_path: Path, runner: ModelRunner) -> Callable[..., SyncAgent]:
    def make(name: str, **options: Any) -> SyncAgent:
        return SyncAgent(name, model=runner, settings=settings_in(tmp_path), **options)

    return make


@pytest.fixture(autouse=True)
def _nothing_left() -> Any:
    before = set(threading.enumerate())
    yield
    end = time.monotonic() + 5.0
    while left := [thread.name for thread in set(threading.enumerate()) - before if thread.is_alive()]:
        assert time.monotonic() < end, left
        time.sleep(0.01)


def test_generate_prefill_and_status(make_sync: Callable[..., SyncAgent], runner: ModelRunner) -> None:
    ids = random_ids(300, 100)
    with make_sync("ann") as ann, make_sync("bob", join=[ann.address]) as bob:
        reply = ann.generate("What is a KV cache?", sampling=SAMPLING)
        assert reply.report.prompt_tokens == len("<user>What is a KV cache?\n<assistant>")
        cache, report = bob.prefill(ids.astype(np.int64))
        assert cache.get_seq_length() == 99 and report.prompt_tokens == 100
        keys = torch.cat([layer.keys for layer in cache.layers])
        assert torch.allclose(keys, dense(runner, ids)[0].keys[:, 0, :, :99], atol=1e-4)
        assert ann.status().requests == bob.status().requests == 1
        assert [peer["name"] for peer in bob.status().peers] == ["ann"]
        with pytest.raises(UsageError, match="empty"):
            ann.generate("")


def test_works_inside_a_running_loop(make_sync: Callable[..., SyncAgent]) -> None:
    async def notebook() -> Reply:
        with make_sync("ann") as ann:
            return ann.generate("Inside", sampling=SAMPLING)

    assert isinstance(asyncio.run(notebook()), Reply)


def test_stream_gives_pieces_then_the_reply(make_sync: Callable[..., SyncAgent]) -> None:
    with make_sync("ann") as ann:
        items = list(ann.stream("Piece by piece", sampling=SAMPLING))
        assert isinstance(items[-1], Reply)
        assert "".join(item for item in items if isinstance(item, str)) == items[-1].text
        with pytest.raises(UsageError, match="mode"):
            list(ann.stream("hello", mode="faster"))


def test_a_stream_left_early_ends(make_sync: Callable[..., SyncAgent], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcomm_p2p.model.decoding.end_tokens", lambda runner: frozenset())
    endless = Sampling(max_new_tokens=1900, temperature=1.0, seed=1)
    with make_sync("ann") as ann:
        stream = ann.stream("On and on", sampling=endless)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        # One that nobody closes ends with the agent.
        left = ann.stream("On and on", sampling=endless)
        next(left)
    with pytest.raises((CancelledByCaller, StopIteration, asyncio.CancelledError)):
        while True:
            next(left)


def test_errors_of_start_leave_nothing_behind(make_sync: Callable[..., SyncAgent]) -> None:
    with make_sync("ann") as ann:
        twin = make_sync("ann", join=[ann.address])
        with pytest.raises(NameTakenError, match="ann"):
            twin.start()
        twin.close()
        twin.close()
    with pytest.raises(ConfigError, match="nowhere"), make_sync("bob", join=["nowhere"]):
        pass


def test_calls_after_close_say_so(make_sync: Callable[..., SyncAgent]) -> None:
    ann = make_sync("ann")
    with pytest.raises(UsageError, match="not running"):
        ann.generate("hello")
    ann.start()
    ann.close()
    ann.close()
    with pytest.raises(UsageError, match="not running"):
        ann.generate("hello")
    with pytest.raises(UsageError, match="not running"):
        ann.status()


def test_closing_from_another_thread_cancels(
    make_sync: Callable[..., SyncAgent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcomm_p2p.model.decoding.end_tokens", lambda runner: frozenset())
    outcomes: list[BaseException] = []
    begun = threading.Event()
    with make_sync("ann") as ann:

        def ask() -> None:
            try:
                ann.generate("On", sampling=Sampling(max_new_tokens=1900), on_text=lambda _: begun.set())
            except BaseException as error:
                outcomes.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        assert begun.wait(10)
    thread.join(10)
    assert [type(outcome) for outcome in outcomes] == [CancelledByCaller]


def test_the_package_offers_it() -> None:
    import kvcomm_p2p

    assert kvcomm_p2p.Agent is Agent
    assert kvcomm_p2p.SyncAgent is SyncAgent
