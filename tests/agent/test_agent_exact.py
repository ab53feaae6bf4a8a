"""Exact reuse: the donor's bits, the same greedy tokens, told truthfully; and never after approximation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from agent_cases import (
    adds_up,
    dense,
    fill,
    is_dense,
    joined,
    no_leaks,
    pool_metas,
    random_ids,
    rows,
    same_bits,
    shared,
)

from kvcomm_p2p.agent import Agent
from kvcomm_p2p.model.decoding import Sampling, decode
from kvcomm_p2p.model.runner import ModelRunner
from kvcomm_p2p.planning.types import Mode
from kvcomm_p2p.prompts import prepare_ids
from kvcomm_p2p.report import PrefillReport

MakeAgent = Callable[..., Agent]


@pytest.mark.parametrize("mode", ["exact", "balanced"])
def test_a_peers_prefix_is_copied_bit_for_bit(make_agent: MakeAgent, runner: ModelRunner, mode: str) -> None:
    document = random_ids(1, 320)
    question = joined(document[:250], random_ids(2, 70))

    async def run() -> None:
        async with make_agent("ann") as ann, make_agent("bob", join=[ann.address]) as bob:
            theirs = await fill(ann, document)
            await shared(ann, bob)
            ours = await fill(bob, question, mode)
            report = ours.report
            assert adds_up(report)
            assert (report.mode, report.exact_tokens, report.reused_tokens) == (mode, 250, 0)
            assert [(s.kind, s.source, s.start, s.end) for s in report.spans] == [
                ("exact", "ann", 0, 250),
                ("recompute", "", 250, 320),
            ]
            assert report.sources == {"ann": 250}
            assert report.pulled_tokens == 256  # whole blocks
            assert report.pulled_bytes == 256 * runner.spec.layout.token_bytes
            assert same_bits(rows(ours.cache, 0, 250), rows(theirs.cache, 0, 250))
            assert is_dense(ours, runner, question)
            await no_leaks(ann, bob)

    asyncio.run(run())


@pytest.mark.parametrize("tokens", [31, 32, 40, 62])
def test_an_own_beginning_too_short_for_fingerprints_is_found(
    make_agent: MakeAgent, runner: ModelRunner, tokens: int
) -> None:
    """A role's system prompt: whole blocks of it suffice."""
    role = random_ids(1, tokens)

    async def run() -> None:
        async with make_agent("ann") as ann:
            first = await fill(ann, joined(role, random_ids(2, 100)))
            await ann.settled()
            second = await fill(ann, joined(role, random_ids(3, 90)), "exact")
            # Below a block it takes luck: both prompts may select the same fingerprint, depending on the cluster's key.
            assert second.report.exact_tokens in ({tokens} if tokens >= 32 else {0, tokens})
            assert same_bits(
                rows(second.cache, 0, second.report.exact_tokens), rows(first.cache, 0, second.report.exact_tokens)
            )
            assert is_dense(second, runner, joined(role, random_ids(3, 90)))
            assert not second.report.misses or not second.report.exact_tokens

    asyncio.run(run())


def test_a_warmed_role_is_there_for_the_first_prompt(make_agent: MakeAgent) -> None:
    role = [{"role": "system", "content": "You are the harbour master and answer in one short sentence. " * 2}]
    prompt = [*role, {"role": "user", "content": "When is high tide?"}]

    async def run() -> None:
        async with make_agent("ann") as ann, make_agent("bob") as bob:
            warmed = await ann.warm(role)
            await ann.settled()
            report = (await ann.generate(prompt, mode="exact", sampling=Sampling(max_new_tokens=8))).report
            assert 32 <= report.exact_tokens <= warmed < report.prompt_tokens
            cold = await bob.generate(prompt, mode="dense", sampling=Sampling(max_new_tokens=8))
            again = await ann.generate(prompt, mode="exact", sampling=Sampling(max_new_tokens=8))
            assert again.token_ids == cold.token_ids

    asyncio.run(run())


def test_greedy_text_is_that_of_full_prefill(make_agent: MakeAgent) -> None:
    report = "The river rose by two metres. " * 12
    prompt = [{"role": "system", "content": report}, {"role": "user", "content": "What rose?"}]
    other = [{"role": "system", "content": report}, {"role": "user", "content": "By how much?"}]
    sampling = Sampling(max_new_tokens=24)

    async def run() -> None:
        async with make_agent("ann") as ann, make_agent("bob", join=[ann.address]) as bob:
            await ann.generate(prompt, sampling=sampling)
            await shared(ann, bob)
            exact = await bob.generate(other, mode="exact", sampling=sampling)
            full = await bob.generate(other, mode="dense", sampling=sampling)
            assert exact.report.exact_tokens > 300
            assert exact.report.sources == {"ann": exact.report.exact_tokens}
            assert full.report.exact_tokens == 0 and full.report.recomputed_tokens == full.report.prompt_tokens
            assert (exact.token_ids, exact.text, exact.finish_reason) == (
                full.token_ids,
                full.text,
                full.finish_reason,
            )
            assert exact.ttft_s <= exact.total_s
            assert exact.as_dict()["report"]["exact_tokens"] == exact.report.exact_tokens

    asyncio.run(run())


def test_turns_of_a_conversation_are_exact_from_the_own_pool(make_agent: MakeAgent, runner: ModelRunner) -> None:
    first = random_ids(3, 150)

    async def run() -> None:
        async with make_agent("ann") as ann:
            history = first
            for turn in range(3):
                filled = await fill(ann, history)
                expected = 0 if turn == 0 else len(history) - 41
                assert filled.report.exact_tokens >= expected
                assert filled.report.continued_tokens == filled.report.reused_tokens == 0
                assert filled.report.sources == ({"ann": filled.report.exact_tokens} if turn else {})
                assert filled.report.pulled_bytes == 0
                assert is_dense(filled, runner, history)
                await ann.settled()
                history = joined(history, random_ids(30 + turn, 40))
            await no_leaks(ann)

    asyncio.run(run())


def test_an_answer_is_exact_prefix_of_the_next_turn(make_agent: MakeAgent, runner: ModelRunner) -> None:
    text = "A question that is long enough to be shared with others, and then some more of it. " * 2

    async def run() -> None:
        async with make_agent("ann") as ann:
            reply = await ann.generate(text, sampling=Sampling(max_new_tokens=50))
            assert len(reply.token_ids) >= 20
            await ann.settled()
            prompt_ids = runner.tokenizer("<user>" + text + "\n<assistant>", add_special_tokens=False)["input_ids"]
            whole = joined(np.array(prompt_ids), np.array(reply.token_ids), random_ids(4, 30))
            again = await fill(ann, whole, "exact")
            # All rows that exist: the last token of the answer was drawn but never run.
            assert again.report.exact_tokens >= len(prompt_ids) + len(reply.token_ids) - 1
            assert is_dense(again, runner, whole)

    asyncio.run(run())


def test_after_approximate_reuse_the_next_turn_is_continued_and_never_exact(
    make_agent: MakeAgent, runner: ModelRunner
) -> None:
    document = random_ids(5, 256)
    prompt = joined(random_ids(6, 64), document, random_ids(7, 40))
    later = joined(prompt, random_ids(8, 50))

    async def run() -> None:
        async with make_agent("ann") as ann, make_agent("bob", join=[ann.address]) as bob:
            await fill(ann, document)
            await shared(ann, bob)
            first = await fill(bob, prompt)
            assert first.report.reused_tokens > 200
            await bob.settled()
            second = await fill(bob, later)
            report = second.report
            assert adds_up(report)
            assert report.continued_tokens > 0
            assert report.exact_tokens <= 64
            tainted = [s for s in report.spans if s.start >= 64 and s.end <= len(prompt)]
            assert {s.kind for s in tainted} == {"continued"}
            assert same_bits(rows(second.cache, 64, len(prompt)), rows(first.cache, 64, len(prompt)))
            await bob.settled()
            third = await fill(bob, later, "exact")
            assert third.report.continued_tokens == third.report.reused_tokens == 0
            assert third.report.exact_tokens <= 64
            assert is_dense(third, runner, later)
            assert not torch.allclose(second.logits, third.logits, atol=1e-3), "the approximation made no difference"
            await no_leaks(ann, bob)

    asyncio.run(run())


def test_no_chain_hash_is_advertised_for_tainted_kv(make_agent: MakeAgent, runner: ModelRunner) -> None:
    document = random_ids(9, 256)
    prompt = joined(random_ids(10, 96), document, random_ids(11, 64))

    async def run() -> None:
        async with make_agent("ann") as ann, make_agent("bob", join=[ann.address]) as bob:
            await fill(ann, document)
            await shared(ann, bob)
            assert (await fill(bob, prompt)).report.reused_tokens > 200
            await bob.settled()

            held = await pool_metas(bob)
            tainted = [meta for meta in held if meta.hops]
            assert max(meta.end for meta in tainted) == len(prompt) and min(meta.start for meta in tainted) == 96
            assert all(meta.chain_end == b"" for meta in tainted)
            # What a third agent gets of it in exact mode is what stands before the taint.
            async with make_agent("cyd", join=[ann.address]) as cyd:
                await shared(bob, cyd)
                third = await fill(cyd, prompt, "exact")
                assert third.report.exact_tokens <= 96
                assert is_dense(third, runner, prompt)

    asyncio.run(run())


def test_exact_and_dense_give_the_same_logits(make_agent: MakeAgent, runner: ModelRunner) -> None:
    ids = random_ids(12, 200)

    async def run() -> None:
        async with make_agent("ann") as ann:
            await fill(ann, ids)
            await ann.settled()
            again = await fill(ann, ids, "exact")
            assert again.report.exact_tokens == 199
            assert torch.allclose(again.logits, dense(runner, ids)[1], atol=1e-4)

    asyncio.run(run())


async def turn(agent: Agent, ids: Any, new_tokens: int, seed: int) -> tuple[PrefillReport, Any]:
    """Fill and answer a prompt of plain ids, published like `generate` does; the report and the answer's ids."""
    stack = agent._running()
    prompt = prepare_ids(ids, agent.runner.vocabulary_size, key=stack.group_key)
    work = stack.fill(prompt, Mode.BALANCED, rows_extra=new_tokens)
    publication = await asyncio.wrap_future(stack.driver.run(work))
    sampling = Sampling(max_new_tokens=new_tokens, temperature=1.0, seed=seed)
    filled = publication.filled
    answer = decode(agent.runner, filled.cache, ids.tolist(), filled.logits, sampling)
    stack.publish_answer(publication, answer.token_ids)
    await agent.settled()
    return filled.report, np.array(answer.token_ids, dtype=np.uint32)


@pytest.mark.parametrize("tainted", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_long_conversations_go_on_where_they_were(
    make_agent: MakeAgent, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, seed: int, tainted: bool
) -> None:
    """Turns of any length, on and off the block grid: nothing known is computed again, and little is held twice."""
    monkeypatch.setattr("kvcomm_p2p.model.decoding.end_tokens", lambda runner: frozenset())
    rng = np.random.default_rng(seed)
    document = random_ids(400 + seed, 150)

    async def run() -> None:
        async with make_agent("ann") as ann, make_agent("bob", join=[ann.address]) as bob:
            await fill(ann, document)
            await shared(ann, bob)
            before = random_ids(410 + seed, int(rng.integers(20, 90))) if tainted else random_ids(1, 0)
            history = joined(before, document, random_ids(420 + seed, int(rng.integers(1, 70))))
            known = 0
            for number in range(5):
                report, answer = await turn(bob, history, int(rng.choice([1, 2, 31, 32, 33, 64, 100])), number)
                assert adds_up(report)
                assert (report.reused_tokens > 0) is (tainted and number == 0)
                assert report.exact_tokens + report.continued_tokens >= known, (number, report.spans)
                assert (report.continued_tokens > 0) is (tainted and number > 0)
                # The answer's last token was drawn, but never run.
                known = len(history) + len(answer) - 1
                held = sum(meta.tokens for meta in await pool_metas(bob))
                assert held <= known + 150 + 96, (held, known)  # and what was pulled, and odd ends
                history = joined(history, answer, random_ids(430 + 10 * seed + number, int(rng.integers(1, 60))))
            assert {meta.hops for meta in await pool_metas(bob)} == ({0, 1} if tainted else {0})
            await no_leaks(ann, bob)

    asyncio.run(run())
