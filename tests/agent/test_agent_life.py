"""Bad input, starting and stopping."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch
from agent_cases import (
    dense,
    eventually,
    fill,
    joined,
    kvcomm_threads,
    met,
    no_leaks,
    no_threads,
    random_ids,
    settings_in,
    shared,
)

from kvcomm_p2p.agent import Agent
from kvcomm_p2p.errors import ConfigError, NameTakenError, TransportError, UsageError
from kvcomm_p2p.model.decoding import Sampling
from kvcomm_p2p.model.runner import ModelRunner

MakeAgent = Callable[..., Agent]

DOCUMENT = random_ids(200, 192)
MOVED = joined(random_ids(201, 37), DOCUMENT, random_ids(202, 20))
FEW = Sampling(max_new_tokens=3)
ENDLESS = Sampling(max_new_tokens=1500, temperature=1.0, seed=1, repetition_penalty=1.5)


# ------------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("", "empty"),
        (" \n", "empty"),
        ([], "at least one message"),
        ([{"role": "user"}], "'content'"),
        ("x" * 2100, "2048"),
    ],
)
def test_prompts_that_cannot_be_answered(make_agent: MakeAgent, prompt: Any, says: str) -> None:
    async def run() -> None:
        async with make_agent("ann") as ann:
            with pytest.raises(UsageError, match=says):
                await ann.generate(prompt)
            assert ann.status().requests == 0
            assert (await ann.generate("Still alive?", sampling=FEW)).finish_reason in ("length", "eos")

    asyncio.run(run())


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([], "empty"),
        ([1, 259], r"\[0, 259\)"),
        ([-1, 5], r"\[0, 259\)"),
        ([1.5], "integers"),
        ([[1, 2], [3, 4]], "shape"),
        (list(range(200)) * 11, "2048"),
    ],
)
def test_token_ids_that_cannot_be_prefilled(make_agent: MakeAgent, ids: Any, says: str) -> None:
    async def run() -> None:
        async with make_agent("ann") as ann:
            with pytest.raises(UsageError, match=says):
                await ann.prefill(ids)

    asyncio.run(run())


def test_slots_and_options_that_are_not_known(make_agent: MakeAgent) -> None:
    async def run() -> None:
        async with make_agent("ann") as ann:
            with pytest.raises(UsageError, match="reprot"):
                await ann.generate("Read {report}.", slots={"reprot": "text"})
            with pytest.raises(UsageError, match="public, group, private"):
                await ann.generate("Read.", visibility="secret")
            with pytest.raises(UsageError, match="group="):
                await ann.generate("Read.", visibility="group")

    asyncio.run(run())


def test_a_prompt_as_long_as_the_context(make_agent: MakeAgent, runner: ModelRunner) -> None:
    ids = random_ids(203, 2048)

    async def run() -> None:
        async with make_agent("ann") as ann:
            filled = await fill(ann, ids)
            assert torch.allclose(filled.logits, dense(runner, ids)[1], atol=1e-3)
            await ann.settled()
            text = "x" * (2048 - len("<user>\n<assistant>"))
            reply = await ann.generate(text, sampling=Sampling(max_new_tokens=5))
            assert reply.report.prompt_tokens == 2048
            assert len(reply.token_ids) <= 1
            await no_leaks(ann)

    asyncio.run(run())


# ------------------------------------------------------------------------------------------------------- start and stop


@pytest.mark.parametrize("name", ["", "a/b", "x" * 65, "line\nbreak", "ü" * 40])
def test_names_that_cannot_be(make_agent: MakeAgent, name: str) -> None:
    with pytest.raises(ConfigError, match="name"):
        make_agent(name)


def test_join_takes_a_list(make_agent: MakeAgent) -> None:
    with pytest.raises(ConfigError, match=r'join=\["127.0.0.1:5701"\]'):
        make_agent("ann", join="127.0.0.1:5701")


@pytest.mark.parametrize("seed", ["nowhere", "127.0.0.1", "127.0.0.1:99999", "10.1.2.3:5701"])
def test_join_names_what_is_no_address(make_agent: MakeAgent, seed: str) -> None:
    with pytest.raises(ConfigError, match=seed):
        make_agent("ann", join=[seed])


def test_an_agent_that_is_not_running_says_so(make_agent: MakeAgent) -> None:
    async def run() -> None:
        ann = make_agent("ann")
        for _ in range(2):
            for call in (lambda: ann.generate("hello"), lambda: ann.prefill([1, 2])):
                with pytest.raises(UsageError, match="not running"):
                    await call()
            for read in (ann.status, lambda: ann.address, lambda: ann.runner):
                with pytest.raises(UsageError, match="not running"):
                    read()
            await ann.close()
            await ann.start()
            await ann.close()
            await ann.close()

    asyncio.run(run())


def test_starting_twice_and_again_after_closing(make_agent: MakeAgent) -> None:
    async def run() -> None:
        ann = make_agent("ann")
        outcomes = await asyncio.gather(ann.start(), ann.start(), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [type(None), UsageError]
        with pytest.raises(UsageError, match="already running"):
            await ann.start()
        first = ann.node_id
        await ann.close()
        await no_threads()
        await ann.start()
        assert ann.node_id == first  # who was here before is who it was
        assert (await ann.generate("Again?", sampling=FEW)).token_ids is not None
        await ann.close()
        await no_threads()

    asyncio.run(run())


def test_a_start_that_is_cancelled_leaves_nothing(make_agent: MakeAgent) -> None:
    async def run() -> None:
        ann = make_agent("ann")
        task = asyncio.create_task(ann.start())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await no_threads()
        async with ann:
            assert ann.status().requests == 0

    asyncio.run(run())


@pytest.mark.parametrize("option", ["port", "bulk_port"])
def test_a_port_in_use_is_named(make_agent: MakeAgent, tmp_path: Any, runner: ModelRunner, option: str) -> None:
    async def run() -> None:
        with socket.socket() as taken, socket.socket() as other:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            other.bind(("127.0.0.1", 0))
            port, free = taken.getsockname()[1], other.getsockname()[1]
            other.close()
            ports = {"port": free, "bulk_port": free} | {option: port}
            ann = Agent("ann", model=runner, settings=settings_in(tmp_path), **ports)
            with pytest.raises(TransportError, match=str(port)):
                await ann.start()
            await no_threads()
            # Nothing of the failed start keeps the other port.
            async with Agent("ann", model=runner, settings=settings_in(tmp_path), port=free) as again:
                assert again.address == f"127.0.0.1:{free}"

    asyncio.run(run())


def test_a_model_that_is_not_there(make_agent: MakeAgent) -> None:
    async def run() -> None:
        ann = make_agent("ann", model="smollm2-135m")
        with pytest.raises(ConfigError, match="kvcomm model pull"):
            await ann.start()
        await no_threads()

    asyncio.run(run())


def test_a_name_is_taken_once(make_agent: MakeAgent) -> None:
    async def run() -> None:
        async with make_agent("ann") as ann:
            twin = make_agent("ann", join=[ann.address])
            with pytest.raises(NameTakenError, match="ann"):
                await twin.start()
            async with make_agent("bob", join=[ann.address]) as bob:
                await met(ann, bob)
            await eventually(lambda: kvcomm_threads().count("kvcomm-driver") == 1, "only ann's driver is left")

    asyncio.run(run())


def test_agents_find_each_other_whoever_starts_first(
    make_agent: MakeAgent, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcomm_p2p.stack.JOIN_TIMEOUT_S", 0.1)

    async def run() -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        async with make_agent("bob", join=[f"127.0.0.1:{port}"]) as bob:
            await fill(bob, DOCUMENT)
            async with make_agent("ann", port=port) as ann:
                await met(ann, bob)
                await shared(bob, ann)
                assert (await fill(ann, MOVED)).report.sources == {"bob": 170}

    asyncio.run(run())
