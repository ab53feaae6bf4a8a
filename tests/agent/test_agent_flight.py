"""Streams, many calls at once, cancelling, peers that fail, and `model.generate`."""

from __future__ import annotations

import asyncio
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from agent_cases import (
    dense,
    eventually,
    fill,
    greedy,
    is_dense,
    joined,
    met,
    no_leaks,
    no_threads,
    random_ids,
    reasons,
    shared,
)

from kvcomm_p2p.agent import Agent
from kvcomm_p2p.errors import CancelledByCaller, UsageError
from kvcomm_p2p.model.call import cache_argument
from kvcomm_p2p.model.decoding import Sampling
from kvcomm_p2p.model.runner import ModelRunner
from kvcomm_p2p.reply import Reply

MakeAgent = Callable[..., Agent]

DOCUMENT = random_ids(200, 192)
MOVED = joined(random_ids(201, 37), DOCUMENT, random_ids(202, 20))
FEW = Sampling(max_new_tokens=3)
ENDLESS = Sampling(max_new_tokens=1500, temperature=1.0, seed=1, repetition_penalty=1.5)


@pytest.fixture
def never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers go on until their length is reached."""
    monkeypatch.setattr("kvcomm_p2p.model.decoding.end_tokens", lambda runner: frozenset())


# -------------------------------------------------------------------------------------------------------------- streams


def test_a_stream_gives_the_text_and_then_the_reply(make_agent: MakeAgent, never_ends: None) -> None:
    async def run() -> None:
        async with make_agent("ann") as ann:
            items = [item async for item in ann.stream("Hallo Wörld 🚣", sampling=Sampling(max_new_tokens=30))]
            assert isinstance(items[-1], Reply)
            assert all(isinstance(item, str) for item in items[:-1])
            assert "".join(items[:-1]) == items[-1].text  # type: ignore[arg-type]
            assert len(items) > 3
            again = await ann.generate("Hallo Wörld 🚣", sampling=Sampling(max_new_tokens=30))
            assert again.text == items[-1].text
            with pytest.raises(UsageError, match="empty"):
                async for _ in ann.stream(""):
                    pass

    asyncio.run(run())


def test_leaving_a_stream_cancels_it(make_agent: MakeAgent, never_ends: None) -> None:
    async def run() -> None:
        async with make_agent("ann") as ann:
            stream = ann.stream("Tell me more.", sampling=ENDLESS)
            async for piece in stream:
                assert isinstance(piece, str)
                break
            started = time.monotonic()
            await stream.aclose()  # type: ignore[attr-defined]
            assert time.monotonic() - started < 1.0
            assert not ann._flights
            await no_leaks(ann)

    asyncio.run(run())


# ------------------------------------------------------------------------------------------------- many calls, cancelling


def test_calls_in_flight_give_what_they_give_alone(make_agent: MakeAgent, runner: ModelRunner) -> None:
    prompts = [f"{'Some words shared by all of them. ' * 4} Number {number}" for number in range(6)]
    sampling = Sampling(max_new_tokens=20)

    async def run() -> None:
        async with make_agent("ann") as ann, make_agent("bob", join=[ann.address]) as bob:
            await ann.generate(prompts[0], sampling=sampling)
            await shared(ann, bob)
            alone = [await bob.generate(prompt, mode="dense", sampling=sampling) for prompt in prompts]
            together = await asyncio.gather(*(bob.generate(p, mode="exact", sampling=sampling) for p in prompts))
            assert [reply.token_ids for reply in together] == [reply.token_ids for reply in alone]
            assert sum(reply.report.exact_tokens for reply in together) > 0
            status = bob.status()
            assert status.requests == 12
            assert status.prompt_tokens == sum(r.report.prompt_tokens for r in (*alone, *together))
            assert 0 < status.hit_rate < 1
            assert status.as_dict()["hit_rate"] == status.hit_rate
            await no_leaks(ann, bob)

    asyncio.run(run())


@pytest.mark.parametrize("delay_s", [0.0, 0.002, 0.005, 0.01, 0.02, 0.05])
def test_cancelling_a_task_frees_everything(make_agent: MakeAgent, never_ends: None, delay_s: float) -> None:
    text = "A shared piece of text that is worth pulling from a peer. " * 6

    async def run() -> None:
        async with make_agent("ann") as ann, make_agent("bob", join=[ann.address]) as bob:
            await ann.generate("prefix " + text, sampling=FEW)
            await shared(ann, bob)
            for number in range(4):
                task = asyncio.create_task(bob.generate(f"other {number} " + text, sampling=ENDLESS))
                await asyncio.sleep(delay_s)
                started = time.monotonic()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert time.monotonic() - started < 5.0
            await no_leaks(ann, bob)
            assert not bob._flights
            assert (await bob.generate("still there?", sampling=FEW)).token_ids is not None
        await no_threads()

    asyncio.run(run())


def test_cancel_all_tells_the_callers(make_agent: MakeAgent, never_ends: None) -> None:
    async def run() -> None:
        async with make_agent("ann") as ann:
            seen = asyncio.Event()
            loop = asyncio.get_running_loop()
            tasks = [
                asyncio.create_task(
                    ann.generate(f"Go on {n}", sampling=ENDLESS, on_text=lambda _: loop.call_soon_threadsafe(seen.set))
                )
                for n in range(3)
            ]
            await seen.wait()
            ann.cancel_all()
            outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5.0)
            assert [type(outcome) for outcome in outcomes] == [CancelledByCaller] * 3
            await no_leaks(ann)

    asyncio.run(run())


@pytest.mark.parametrize("delay_s", [0.0, 0.003, 0.01, 0.1])
def test_closing_ends_what_is_in_flight(make_agent: MakeAgent, never_ends: None, delay_s: float) -> None:
    async def run() -> None:
        async with make_agent("ann") as ann:
            await fill(ann, DOCUMENT)
            bob = make_agent("bob", join=[ann.address])
            await bob.start()
            await shared(ann, bob)
            tasks = [
                asyncio.create_task(bob.generate("Go on and on", sampling=ENDLESS)),
                asyncio.create_task(bob.generate("And on", sampling=ENDLESS, mode="dense")),
                asyncio.create_task(bob.prefill(MOVED.astype(np.int64))),
            ]
            await asyncio.sleep(delay_s)
            started = time.monotonic()
            await bob.close()
            assert time.monotonic() - started < 2.0
            outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5.0)
            for outcome in outcomes[:2]:
                assert isinstance(outcome, CancelledByCaller), repr(outcome)
            # The short one may have been quicker.
            assert isinstance(outcomes[2], CancelledByCaller) or not isinstance(outcomes[2], BaseException)
        await no_threads()

    asyncio.run(run())


# ---------------------------------------------------------------------------------------------------- peers that fail


def test_a_peer_that_stops_during_a_fill(
    make_agent: MakeAgent, runner: ModelRunner, monkeypatch: Any, real_waits: None
) -> None:
    """Its sockets close without a word, after it has told its token ids."""
    from kvcomm_p2p.reuse.pulling import Puller

    pull = Puller.pull

    async def run() -> None:
        async with make_agent("ann") as ann, make_agent("bob", join=[ann.address], pull_stall_timeout_s=0.2) as bob:
            await fill(ann, DOCUMENT)
            await shared(ann, bob)
            driver = ann._running().driver

            async def vanish() -> None:
                driver._interpreter._transport.close(0.0)

            async def pull_from_nobody(self: Any, *args: Any) -> Any:
                await asyncio.wrap_future(driver.run(vanish()))
                return await pull(self, *args)

            monkeypatch.setattr(Puller, "pull", pull_from_nobody)
            ours = await fill(bob, MOVED)
            monkeypatch.setattr(Puller, "pull", pull)
            assert is_dense(ours, runner, MOVED)
            assert ours.report.wait_lost_s <= 0.25
            assert reasons(ours.report) <= {"stalled", "unreachable"} and ours.report.misses
            assert ours.report.recomputed_tokens == len(MOVED)
            # It is not waited for again.
            again = await fill(bob, joined(random_ids(204, 11), DOCUMENT), publish=False)
            assert again.report.wait_lost_s == 0
            await no_leaks(bob)

    asyncio.run(run())


@pytest.mark.parametrize("frozen_before", ["tokens", "blocks"])
def test_a_peer_that_freezes(make_agent: MakeAgent, runner: ModelRunner, monkeypatch: Any, frozen_before: str) -> None:
    from kvcomm_p2p.reuse.pulling import Puller

    pull = Puller.pull

    async def run() -> None:
        async with (
            make_agent("ann") as ann,
            make_agent("bob", join=[ann.address], pull_stall_timeout_s=0.2, tokens_timeout_s=0.1) as bob,
        ):
            await fill(ann, DOCUMENT)
            await shared(ann, bob)
            wake = threading.Event()
            loop = ann._running().driver._loop

            async def freeze_then_pull(self: Any, *args: Any) -> Any:
                loop.call_soon_threadsafe(wake.wait, 5.0)
                return await pull(self, *args)

            try:
                if frozen_before == "tokens":
                    loop.call_soon_threadsafe(wake.wait, 5.0)
                else:
                    monkeypatch.setattr(Puller, "pull", freeze_then_pull)
                ours = await fill(bob, MOVED)
            finally:
                wake.set()
            assert is_dense(ours, runner, MOVED)
            assert reasons(ours.report) == {"stalled"}
            assert 0.05 < ours.report.wait_lost_s <= 0.25
            await no_leaks(bob)

    asyncio.run(run())


def test_two_peers_that_freeze_one_after_the_other_cost_one_budget(
    make_agent: MakeAgent, runner: ModelRunner, monkeypatch: Any, real_waits: None
) -> None:
    """One before it tells its token ids, the other before it sends its blocks."""
    from kvcomm_p2p.reuse.pulling import Puller

    pull = Puller.pull
    other = random_ids(206, 160)

    async def run() -> None:
        async with (
            make_agent("ann") as ann,
            make_agent("cyd", join=[ann.address]) as cyd,
            make_agent("bob", join=[ann.address], pull_stall_timeout_s=0.2, tokens_timeout_s=0.1) as bob,
        ):
            await fill(ann, DOCUMENT)
            await fill(cyd, other)
            await shared(ann, bob)
            await shared(cyd, bob)
            await met(bob, cyd)
            wake = threading.Event()
            ann._running().driver._loop.call_soon_threadsafe(wake.wait, 5.0)

            async def freeze_then_pull(self: Any, *args: Any) -> Any:
                cyd._running().driver._loop.call_soon_threadsafe(wake.wait, 5.0)
                return await pull(self, *args)

            monkeypatch.setattr(Puller, "pull", freeze_then_pull)
            prompt = joined(random_ids(207, 9), DOCUMENT, other, random_ids(208, 9))
            try:
                ours = await fill(bob, prompt)
            finally:
                wake.set()
            assert is_dense(ours, runner, prompt)
            assert {(miss.what.split()[0], miss.reason) for miss in ours.report.misses} == {
                ("token", "stalled"),
                ("5", "stalled"),  # blocks
            }
            assert 0.1 <= ours.report.wait_lost_s <= 0.25
            await no_leaks(bob)

    asyncio.run(run())


# ------------------------------------------------------------------------------------------------------ model.generate


@pytest.mark.parametrize("tokens", [1, 2, 33, 229])
def test_model_generate_goes_on_from_a_prefill(make_agent: MakeAgent, runner: ModelRunner, tokens: int) -> None:
    ids = joined(DOCUMENT, random_ids(205, 37))[:tokens]

    async def run() -> None:
        async with make_agent("ann") as ann, make_agent("bob", join=[ann.address]) as bob:
            await fill(ann, DOCUMENT)
            await shared(ann, bob)
            expected = greedy(runner, ids.tolist(), 12)
            for given in (ids.tolist(), ids.astype(np.int64), torch.tensor(ids.astype(np.int64))[None]):
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    cache, report = prefilled = await bob.prefill(given, mode="exact")
                    assert cache.get_seq_length() == tokens - 1
                    out = runner.model.generate(
                        torch.tensor([ids.tolist()]),
                        max_new_tokens=12,
                        do_sample=False,
                        pad_token_id=2,
                        **{cache_argument(runner.model): cache},  # renamed between releases of transformers
                    )
                assert out[0, tokens:].tolist() == expected
                assert report.prompt_tokens == tokens
                assert torch.allclose(prefilled.logits, dense(runner, ids)[1], atol=1e-4)
            assert bob.status().requests == 3
            await eventually(lambda: bob.status().pool_bytes > 0, "the prefill is published")
            await no_leaks(ann, bob)

    asyncio.run(run())
