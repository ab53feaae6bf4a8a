"""The pool's budget, and models that must not be mixed up."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from typing import Any

import pytest
from agent_cases import (
    ANYTHING_GOES,
    fill,
    is_dense,
    joined,
    no_leaks,
    random_ids,
    reasons,
    settings_in,
    shared,
    with_profile,
)

from kvcomm_p2p.agent import Agent
from kvcomm_p2p.model.runner import ModelRunner
from kvcomm_p2p.net.keys import load_cluster_keys

MakeAgent = Callable[..., Agent]

DOCUMENT = random_ids(60, 192)
QUESTION = joined(random_ids(61, 21), DOCUMENT, random_ids(62, 20))


def test_the_pool_keeps_its_budget_and_answers_stay_right(make_agent: MakeAgent, runner: ModelRunner) -> None:
    budget = runner.spec.layout.block_bytes(600)

    async def run() -> None:
        async with (
            make_agent("ann", pool_bytes_max=budget) as ann,
            make_agent("bob", join=[ann.address], pool_bytes_max=budget) as bob,
        ):
            documents = [random_ids(80 + number, 150) for number in range(8)]
            reused = 0
            for number in range(24):
                agent = (ann, bob)[number % 2]
                document = documents[0 if number % 3 else number % 8]
                prompt = joined(document, random_ids(100 + number, 40))
                filled = await fill(agent, prompt, "exact")
                await agent.settled()
                reused += filled.report.exact_tokens
                assert is_dense(filled, runner, prompt), number
                assert 0 < agent.status().pool_bytes <= budget
            assert reused > 1000
            await no_leaks(ann, bob)

    asyncio.run(run())


def test_a_prompt_larger_than_the_pool(make_agent: MakeAgent, runner: ModelRunner) -> None:
    async def run() -> None:
        async with make_agent("ann", pool_bytes_max=runner.spec.layout.block_bytes(64)) as ann:
            ids = random_ids(72, 1200)
            filled = await fill(ann, ids)
            await ann.settled()
            assert is_dense(filled, runner, ids)
            assert ann.status().pool_bytes <= runner.spec.layout.block_bytes(64)
            await no_leaks(ann)

    asyncio.run(run())


def test_a_longer_turn_that_finds_no_room_leaves_the_shorter_one(make_agent: MakeAgent, runner: ModelRunner) -> None:
    async def run() -> None:
        async with make_agent("ann", pool_bytes_max=runner.spec.layout.block_bytes(200)) as ann:
            ids = random_ids(74, 300)
            await fill(ann, ids[:150])
            await fill(ann, ids)
            await ann.settled()
            again = await fill(ann, ids)
            assert again.report.exact_tokens == 150
            assert is_dense(again, runner, ids)

    asyncio.run(run())


@pytest.mark.parametrize("what", ["weights", "dtype", "tokenizer"])
def test_another_model_of_the_same_name_is_never_mixed_up(
    make_agent: MakeAgent, runner: ModelRunner, tiny_llama: Any, what: str
) -> None:
    model, tokenizer = runner.model, runner.tokenizer
    if what == "weights":
        model = tiny_llama(seed=1, vocab_size=259, max_position_embeddings=2048)
    elif what == "dtype":
        model = copy.deepcopy(model).bfloat16()
    else:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.add_tokens(["<kv>"])
    other = with_profile(ModelRunner.from_model(model, tokenizer, "tiny"), ANYTHING_GOES)

    async def run() -> None:
        async with make_agent("ann", model=other) as ann, make_agent("bob", join=[ann.address]) as bob:
            await fill(ann, DOCUMENT)
            await shared(ann, bob)
            assert ann.status().model == bob.status().model and ann.status().model_id != bob.status().model_id
            for prompt in (QUESTION, joined(DOCUMENT, random_ids(73, 20))):
                ours = await fill(bob, prompt, publish=False)
                assert reasons(ours.report) == {"model_mismatch"}
                assert ours.report.pulled_bytes == 0
                assert is_dense(ours, runner, prompt)

    asyncio.run(run())


def test_settings_give_every_agent_the_same_cluster_key(tmp_path: Any) -> None:
    folder = settings_in(tmp_path).state_dir
    assert load_cluster_keys(folder) == load_cluster_keys(folder)
