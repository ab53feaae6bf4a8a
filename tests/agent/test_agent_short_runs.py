"""Short runs: recomputed first, learned behind the answer, then corrected from memory; and what memory must never do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
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
    random_ids,
    rows,
    with_profile,
)

from kvcomm_p2p.agent import Agent
from kvcomm_p2p.kernels.rope_shift import rope_shift
from kvcomm_p2p.model.runner import ModelRunner
from kvcomm_p2p.planning.types import Provenance
from kvcomm_p2p.reuse.deviations import rotary_frequencies
from kvcomm_p2p.reuse.engine import Filled
from kvcomm_p2p.reuse.recall import MEMORY_TOKENS_MIN

MakeAgent = Callable[..., Agent]

TOKENS = 63
"""The longest short run, which fingerprints find for certain."""
THEIRS, OURS = random_ids(80, 45), random_ids(81, 61)
"""How everything begins that was computed before, and every prompt that follows."""
WORDS, OTHER_WORDS = np.split(np.random.default_rng(83).permutation(np.arange(3, 51, dtype=np.uint32)), 2)
START, MIDDLE, END = len(OURS), len(OURS) + TOKENS // 2, len(OURS) + TOKENS
ENOUGH = -(-MEMORY_TOKENS_MIN // (TOKENS - 3))
"""Contents that have to be learned before any is corrected; one may share its first tokens with another."""

SHORT = replace(ANYTHING_GOES, short=dict.fromkeys(Provenance, 0.01))


def content(number: int, words: Ids = WORDS) -> Ids:
    return words[np.random.default_rng(number).integers(0, len(words), TOKENS)]


def prompt(number: int, words: Ids = WORDS) -> Ids:
    return joined(OURS, content(number, words), random_ids(1000 + number, 20))


@pytest.fixture(scope="module")
def smooth(tiny_llama: Callable[..., Any], chat_tokenizer: Any) -> ModelRunner:
    """Weights small enough that a prefix changes KV without making noise of it."""
    model = tiny_llama(vocab_size=259, max_position_embeddings=2048, initializer_range=0.05)
    return with_profile(ModelRunner.from_model(model, chat_tokenizer, "tiny"), SHORT)


async def asked(agent: Agent, number: int, words: Ids = WORDS, before: str = "public", now: str = "public") -> Filled:
    """A content is computed behind one template and then asked for behind the other."""
    await fill(agent, joined(THEIRS, content(number, words)), visibility=before)
    await agent.settled()
    filled = await fill(agent, prompt(number, words), visibility=now)
    await agent.settled()
    assert adds_up(filled.report)
    return filled


async def learned(agent: Agent, **visibility: str) -> None:
    """Just enough."""
    for number in range(ENOUGH):
        assert not reused(await asked(agent, number, **visibility))


def reused(filled: Filled) -> bool:
    """Whether the content was reused, rather than recomputed."""
    (kind,) = [span.kind for span in filled.report.spans if span.start <= MIDDLE < span.end]
    assert kind in ("reuse", "recompute")
    return kind == "reuse"


def off_by(runner: ModelRunner, number: int, filled: Filled | None) -> float:
    """L2 distance of the content's KV from that of full prefill; None: of a copy that was moved and not corrected."""
    true = rows(dense(runner, prompt(number))[0], START, END)
    if filled is not None:
        here = rows(filled.cache, START, END)
    else:
        theirs = rows(dense(runner, joined(THEIRS, content(number)))[0], len(THEIRS), len(THEIRS) + TOKENS)
        here = torch.empty_like(theirs[0]), torch.empty_like(theirs[1])
        rope_shift(*theirs, None, START - len(THEIRS), rotary_frequencies(runner.spec.rotary), False, *here)
    return float(sum((one - other).norm() for one, other in zip(here, true, strict=True)))


def test_a_short_run_is_recomputed_first_then_learned_then_corrected(
    make_agent: MakeAgent, smooth: ModelRunner
) -> None:
    async def run() -> None:
        async with make_agent("ann", model=smooth) as ann:
            for number in range(ENOUGH):
                filled = await asked(ann, number)
                assert not reused(filled) and is_dense(filled, smooth, prompt(number))
                assert ann.status().deviations == number + 1
            for number in range(ENOUGH, ENOUGH + 3):
                filled = await asked(ann, number)
                assert reused(filled)
                assert filled.report.reused_tokens >= TOKENS - 3 - TOKENS // 8
                assert off_by(smooth, number, filled) < 0.6 * off_by(smooth, number, None)
            status = ann.status()
            assert status.deviations == ENOUGH, "what is reused shows no truth to learn from"
            assert 0 < status.deviation_bytes == ann._running().memory.kv_bytes
            await no_leaks(ann)

    asyncio.run(run())


@pytest.mark.parametrize(("before", "now"), [("private", "public"), ("private", "private"), ("public", "private")])
def test_what_was_private_corrects_nothing_that_others_may_see(
    make_agent: MakeAgent, smooth: ModelRunner, before: str, now: str
) -> None:
    """A deviation is as private as the copy and the prompt that it was seen between."""

    async def run() -> None:
        async with make_agent("ann", model=smooth) as ann:
            await learned(ann, before=before, now=now)
            seen_by_all = await asked(ann, 50)
            assert not reused(seen_by_all) and is_dense(seen_by_all, smooth, prompt(50))
            assert reused(await asked(ann, 51, now="private"))

    asyncio.run(run())


def test_without_memory_short_runs_are_recomputed_for_ever(make_agent: MakeAgent, smooth: ModelRunner) -> None:
    async def run() -> None:
        async with make_agent("ann", model=smooth, deviation_bytes=0) as ann:
            await learned(ann)
            filled = await asked(ann, 50)
            assert not reused(filled) and is_dense(filled, smooth, prompt(50))
            assert {miss.reason for miss in filled.report.misses} == {"too_short"}
            assert (ann.status().deviations, ann.status().deviation_bytes) == (0, 0)

    asyncio.run(run())


def test_a_model_for_which_nothing_was_measured_learns_nothing(make_agent: MakeAgent, smooth: ModelRunner) -> None:
    async def run() -> None:
        async with make_agent("ann", model=with_profile(smooth, ANYTHING_GOES)) as ann:
            await learned(ann)
            assert not reused(await asked(ann, 50))
            assert ann.status().deviations == 0

    asyncio.run(run())


def test_what_is_like_nothing_remembered_is_recomputed_and_learned(make_agent: MakeAgent, smooth: ModelRunner) -> None:
    async def run() -> None:
        async with make_agent("ann", model=smooth) as ann:
            await learned(ann)
            strange = await asked(ann, 50, OTHER_WORDS)
            assert not reused(strange) and is_dense(strange, smooth, prompt(50, OTHER_WORDS))
            assert "tokens are like any that are remembered" in " ".join(miss.detail for miss in strange.report.misses)
            assert ann.status().deviations == ENOUGH + 1
            assert reused(await asked(ann, 51))

    asyncio.run(run())


def test_another_template_is_another_kind(make_agent: MakeAgent, smooth: ModelRunner) -> None:
    async def run() -> None:
        async with make_agent("ann", model=smooth) as ann:
            await learned(ann)
            await fill(ann, joined(random_ids(90, 45), content(50)))
            await ann.settled()
            assert not reused(await fill(ann, prompt(50)))

    asyncio.run(run())


def test_the_memory_keeps_its_budget(make_agent: MakeAgent, smooth: ModelRunner) -> None:
    layout = smooth.spec.layout
    # Bytes of one deviation, about: half precision, with features in place of layer 0.
    one = TOKENS * layout.kv_heads * 2 * (layout.key_dim + layout.value_dim) * layout.layers

    async def run() -> None:
        async with make_agent("ann", model=smooth, deviation_bytes=3 * one) as ann:
            for number in range(ENOUGH):
                await asked(ann, number)
                assert ann.status().deviation_bytes <= 3 * one
            assert 0 < ann.status().deviations < ENOUGH

    asyncio.run(run())


def test_what_led_to_a_fallback_is_forgotten(make_agent: MakeAgent, smooth: ModelRunner) -> None:
    strict = replace(SHORT, divergence=replace(SHORT.divergence, intercept=99.0))

    async def run() -> None:
        async with make_agent("ann", model=with_profile(smooth, strict)) as ann:
            await learned(ann)
            filled = await asked(ann, 50)
            assert filled.report.fallback and is_dense(filled, smooth, prompt(50))
            assert ann.status().deviations < ENOUGH
            # It showed the truth, though: that is learned.
            assert ann.status().deviations >= 1

    asyncio.run(run())
