"""Exact is exact, whatever was approximated before, by whom, and in which order."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from agent_cases import (
    ANYTHING_GOES,
    Ids,
    adds_up,
    dense,
    fill,
    is_dense,
    joined,
    no_leaks,
    on_loop,
    random_ids,
    rows,
    same_bits,
    shared,
    with_profile,
)

from kvcomm_p2p.agent import Agent
from kvcomm_p2p.model.decoding import Sampling, decode
from kvcomm_p2p.model.runner import ModelRunner
from kvcomm_p2p.planning.spans import probe_positions, span_hops
from kvcomm_p2p.planning.types import Mode, Provenance, Repair, SpanKind
from kvcomm_p2p.prompts import prepare_ids
from kvcomm_p2p.protocol.anchors import BLOCK_TOKENS, HOPS_PUBLISHED_MAX, HeldAnchor
from kvcomm_p2p.protocol.pool import is_shared
from kvcomm_p2p.reuse.blocks import block_tensors
from kvcomm_p2p.reuse.engine import Filled
from kvcomm_p2p.reuse.guard import Verdict

MakeAgent = Callable[..., Agent]

DOCUMENTS = [random_ids(700 + number, 150 + 40 * number) for number in range(3)]
REQUESTS = 12
ANSWER_TOKENS = 40
KV_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Request:
    agent: int
    mode: str
    token_ids: Ids


def random_request(chances: random.Random, told: Sequence[Ids], mode: str) -> Request:
    """Documents behind own words, in any order, or something that was told before (an answer at its end) and more."""
    parts = [chances.choice(told)] if told and chances.random() < 0.5 else [own_words(chances)]
    parts += chances.sample(DOCUMENTS, chances.randint(1, 2))
    if told and chances.random() < 0.3:
        parts.append(chances.choice(told)[-90:])
    parts = [part for number, part in enumerate(parts) if sum(map(len, parts[: number + 1])) < 900]
    return Request(chances.randrange(3), mode, joined(*parts, own_words(chances)))


def own_words(chances: random.Random) -> Ids:
    return random_ids(chances.randrange(10_000, 20_000), chances.randint(5, 70))


@pytest.fixture
def shifting_runner(plain_runner: ModelRunner) -> ModelRunner:
    """With all kinds of repair, none of which the guard rejects."""
    repairs = {each: (Repair(16, 0.15, shift=True) if each > Provenance.ROLE else Repair(16),) for each in Provenance}
    return with_profile(plain_runner, replace(ANYTHING_GOES, repairs=repairs))


async def ask(agent: Agent, token_ids: Ids, mode: str, new_tokens: int = 0, seed: int = 0) -> tuple[Filled, Ids]:
    """Fill and answer a prompt of plain ids, published as `generate` does; the prompt with its answer."""
    stack = agent._running()
    prompt = prepare_ids(token_ids, agent.runner.vocabulary_size, key=stack.group_key)
    work = stack.fill(prompt, Mode(mode), rows_extra=new_tokens)
    publication = await asyncio.wrap_future(stack.driver.run(work))
    filled = publication.filled
    whole = token_ids
    if new_tokens:
        sampling = Sampling(max_new_tokens=new_tokens, temperature=1.0, seed=seed)
        answer = decode(agent.runner, filled.cache, token_ids.tolist(), filled.logits, sampling).token_ids
        stack.publish_answer(publication, answer)
        whole = joined(token_ids, np.array(answer))
    await agent.settled()
    return filled, whole


def check_exact(filled: Filled, runner: ModelRunner, token_ids: Ids) -> None:
    """What an exact request got is what full prefill gives, and nothing tainted was used for it."""
    report = filled.report
    assert adds_up(report) and report.reused_tokens == report.continued_tokens == 0
    assert {span.kind for span in filled.plan.spans} <= {SpanKind.EXACT, SpanKind.RECOMPUTE}
    assert not any(map(span_hops, filled.plan.spans))
    true, logits = dense(runner, token_ids)
    ours, theirs = rows(filled.cache, 0, len(token_ids)), rows(true, 0, len(token_ids))
    if report.exact_tokens == 0:
        assert same_bits(ours, theirs) and torch.equal(filled.logits, logits)
    assert difference(ours, theirs) < KV_TOLERANCE
    assert torch.allclose(filled.logits, logits, atol=KV_TOLERANCE)


def difference(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    return max(float((one - other).abs().max()) for one, other in zip(ours, theirs, strict=True))


async def held_by(agent: Agent) -> list[HeldAnchor]:
    return list(await on_loop(agent, lambda node: [node.held(meta.anchor_id) for meta in node._pool.metas()]))


async def check_pool(agent: Agent, told: Sequence[Ids]) -> None:
    """What is held as exact is what full prefill of something that was told gives there; repairs of repairs stay at home."""
    store, layout = agent._running().store, agent.runner.spec.layout
    true = [dense(agent.runner, token_ids)[0] for token_ids in told]
    for held in await held_by(agent):
        meta = held.meta
        assert meta.hops <= HOPS_PUBLISHED_MAX or not is_shared(meta)
        if meta.hops:
            assert not meta.chain_end
            continue
        errors = []
        for token_ids, cache in zip(told, true, strict=True):
            if np.array_equal(token_ids[meta.start : meta.end], held.token_ids):
                starts = [meta.start + index * BLOCK_TOKENS for index in range(meta.blocks)]
                blocks = [
                    (block_tensors(store.view(handle), layout, meta.block_tokens(i)), starts[i])
                    for i, handle in enumerate(held.handles)
                ]
                errors.append(max(difference(kv, rows(cache, at, at + kv[0].shape[2])) for kv, at in blocks))
        assert min(errors) < KV_TOLERANCE, f"held as exact, but off by {min(errors)}: {meta}"


async def history(make_agent: MakeAgent, runner: ModelRunner, seed: int) -> dict[str, int]:
    """A random history of three agents, checked all along; how many requests reused, continued, were exact."""
    chances = random.Random(seed)
    seen = {"reused": 0, "continued": 0, "exact": 0, "off": 0}
    told: list[Ids] = []
    async with AsyncExitStack() as running:
        agents: list[Agent] = []
        for name in ("ann", "bob", "cyd"):
            joining = [agents[0].address] if agents else []
            agents.append(await running.enter_async_context(make_agent(name, model=runner, join=joining)))
        for number in range(REQUESTS):
            mode = "exact" if number % 3 == 2 else chances.choice(["balanced", "fast"])
            request = random_request(chances, told, mode)
            agent = agents[request.agent]
            filled, whole = await ask(agent, request.token_ids, mode, chances.choice([0, ANSWER_TOKENS]), number)
            if mode == "exact":
                check_exact(filled, runner, request.token_ids)
                seen["exact"] += filled.report.exact_tokens > 0
            else:
                assert adds_up(filled.report)
                seen["reused"] += filled.report.reused_tokens > 0
                seen["continued"] += filled.report.continued_tokens > 0
                seen["off"] += not is_dense(filled, runner, request.token_ids)
            told.append(whole)
            await shared(agent, *(other for other in agents if other is not agent))
        for agent in agents:
            await check_pool(agent, told)
        await no_leaks(*agents)
    return seen


@pytest.fixture(autouse=True)
def _endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are as long as they may be."""
    monkeypatch.setattr("kvcomm_p2p.model.decoding.end_tokens", lambda runner: frozenset())


@pytest.mark.parametrize("seed", [0, 4])
def test_exact_requests_are_exact_in_any_history(
    make_agent: MakeAgent, shifting_runner: ModelRunner, seed: int
) -> None:
    seen = asyncio.run(history(make_agent, shifting_runner, seed))
    assert seen["reused"] >= 3 and seen["off"] >= 3, seen
    assert seen["exact"] >= 1, seen


def test_taint_that_is_not_counted_is_noticed(
    make_agent: MakeAgent, shifting_runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcomm_p2p.reuse.publish.hops_at", lambda plan: ((0, 0),))
    with pytest.raises(AssertionError):
        asyncio.run(history(make_agent, shifting_runner, 0))


def test_tainted_answers_are_not_found_by_exact_requests(make_agent: MakeAgent, runner: ModelRunner) -> None:
    document = DOCUMENTS[2]
    question = joined(random_ids(720, 64), document, random_ids(721, 20))

    async def run() -> None:
        async with make_agent("ann") as ann, make_agent("bob", join=[ann.address]) as bob:
            await fill(ann, document)
            await shared(ann, bob)
            first, whole = await ask(bob, question, "balanced", 100)
            assert first.report.reused_tokens > 100
            await shared(bob, ann)
            held = await held_by(bob)
            assert any(each.meta.end == len(whole) - 1 and each.meta.hops == 1 for each in held), "no tainted answer"
            later = joined(whole, random_ids(722, 30))
            quoting = joined(random_ids(723, 20), whole[-100:], random_ids(724, 30))
            for agent in (ann, bob):
                again = await fill(agent, later, "exact", publish=False)
                check_exact(again, runner, later)
                assert again.report.exact_tokens == 64
                quoted = await fill(agent, quoting, "exact", publish=False)
                check_exact(quoted, runner, quoting)
                assert quoted.report.exact_tokens == 0
            # Where approximation is allowed, both are found.
            assert (await ask(bob, joined(whole, random_ids(725, 30)), "balanced"))[0].report.continued_tokens > 0
            await shared(bob, ann)
            assert (await ask(ann, joined(random_ids(726, 9), quoting), "balanced"))[0].report.reused_tokens > 0
            await no_leaks(ann, bob)

    asyncio.run(run())


def test_nothing_of_the_first_repair_stays_where_a_wider_one_reuses(
    make_agent: MakeAgent, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probes of the first repair were computed behind what the second may compute again."""
    document = random_ids(730, 256)
    question = joined(random_ids(731, 64), document, random_ids(732, 20))
    verdicts = iter([Verdict.WIDEN])
    monkeypatch.setattr("kvcomm_p2p.reuse.engine.verdict", lambda *_, **__: next(verdicts, Verdict.KEEP))

    async def run() -> None:
        async with make_agent("ann") as ann, make_agent("bob", join=[ann.address]) as bob:
            theirs = await fill(ann, document)
            await shared(ann, bob)
            filled = await fill(bob, question)
            reused = [span for span in filled.plan.spans if span.kind is SpanKind.REUSE]
            assert next(verdicts, None) is None and reused
            for span in reused:
                kept = np.setdiff1d(np.arange(span.start, span.end), probe_positions(span))
                ours, copied = filled.cache.values[:, 0, :, kept], rows_at(theirs, kept - span.start + span.donor_start)
                assert torch.equal(ours, copied)

    asyncio.run(run())


def rows_at(filled: Filled, positions: Any) -> torch.Tensor:
    """Values [L, H, n, D] of these rows: moving them changes keys only."""
    cache: Any = filled.cache
    values: torch.Tensor = cache.values[:, 0, :, positions]
    return values
