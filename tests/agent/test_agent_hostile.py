"""Members of the cluster that lie or are broken: their KV is not used, the report says why, the answer is right."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from agent_cases import (
    ANYTHING_GOES,
    adds_up,
    block_views,
    dense,
    fill,
    is_dense,
    joined,
    no_leaks,
    pool_metas,
    publish_forged,
    random_ids,
    reasons,
    shared,
    with_profile,
)

from kvcomm_p2p.agent import Agent
from kvcomm_p2p.model.runner import ModelRunner
from kvcomm_p2p.planning.plan import KL_MAX
from kvcomm_p2p.planning.types import Mode
from kvcomm_p2p.reuse.blocks import copy_block

MakeAgent = Callable[..., Agent]

DOCUMENT = random_ids(40, 192)
PREFIXED = joined(DOCUMENT, random_ids(41, 20))
MOVED = joined(random_ids(42, 37), DOCUMENT, random_ids(43, 20))


def unchanged(blocks: list[bytearray], segment: Any) -> list[bytearray]:
    return blocks


def with_nan(blocks: list[bytearray], segment: Any) -> list[bytearray]:
    for block in blocks:
        block[-4:] = np.float32(np.nan).tobytes()
    return blocks


def with_infinity(blocks: list[bytearray], segment: Any) -> list[bytearray]:
    for block in blocks:
        block[:4] = np.float32(-np.inf).tobytes()
    return blocks


def zeroed(blocks: list[bytearray], segment: Any) -> list[bytearray]:
    return [bytearray(len(block)) for block in blocks]


def truncated(blocks: list[bytearray], segment: Any) -> list[bytearray]:
    return [block[: len(block) // 2] for block in blocks]


def lengthened(blocks: list[bytearray], segment: Any) -> list[bytearray]:
    return [block + block for block in blocks]


async def refused(
    make_agent: MakeAgent, runner: ModelRunner, prompt: Any, reason: str, mode: str = "balanced", **forgery: Any
) -> None:
    """Let a liar forge DOCUMENT; a victim must end with full prefill and this reason, twice."""
    forgery.setdefault("forge", unchanged)
    async with make_agent("liar") as liar, make_agent("victim", join=[liar.address]) as victim:
        await publish_forged(liar, DOCUMENT, **forgery)
        await shared(liar, victim)
        ours = await fill(victim, prompt, mode, publish=False)
        assert adds_up(ours.report)
        assert reasons(ours.report) == {reason}, ours.report.misses
        assert ours.report.reused_tokens == ours.report.exact_tokens == 0
        assert is_dense(ours, runner, prompt)
        assert victim.status().pool_bytes == 0
        await no_leaks(victim)


PLACES = pytest.mark.parametrize("prompt", [PREFIXED, MOVED], ids=["prefix", "moved"])


@PLACES
@pytest.mark.parametrize(
    ("forge", "reason"),
    [
        (with_nan, "not_finite"),
        (with_infinity, "not_finite"),
        (zeroed, "layer0_mismatch"),
    ],
)
def test_blocks_that_cannot_be_right(
    make_agent: MakeAgent, runner: ModelRunner, prompt: Any, forge: Any, reason: str
) -> None:
    asyncio.run(refused(make_agent, runner, prompt, reason, forge=forge))


@PLACES
def test_blocks_of_another_prompt(make_agent: MakeAgent, runner: ModelRunner, prompt: Any) -> None:
    other = dense(runner, random_ids(44, len(DOCUMENT)))[0]
    asyncio.run(refused(make_agent, runner, prompt, "layer0_mismatch", cache=other))


@PLACES
def test_blocks_at_shifted_positions(make_agent: MakeAgent, runner: ModelRunner, prompt: Any) -> None:
    shifted = dense(runner, joined(random_ids(45, 1), DOCUMENT))[0]

    def forge(blocks: list[bytearray], segment: Any) -> list[bytearray]:
        return [
            bytearray(copy_block(shifted, 1 + start, 1 + start + 32))
            for start in range(segment.meta.start, segment.meta.end, 32)
        ]

    asyncio.run(refused(make_agent, runner, prompt, "layer0_mismatch", forge=forge))


@PLACES
@pytest.mark.parametrize("mode", ["exact", "balanced"])
def test_digests_that_are_not_those_of_the_blocks(
    make_agent: MakeAgent, runner: ModelRunner, prompt: Any, mode: str
) -> None:
    reason = "exact_only" if mode == "exact" and prompt is MOVED else "digest_mismatch"
    asyncio.run(
        refused(make_agent, runner, prompt, reason, mode, digest_of=lambda data: hashlib.sha256(data + b"!").digest())
    )


@PLACES
@pytest.mark.parametrize(("forge", "factor"), [(truncated, 0.5), (lengthened, 2.0)])
def test_blocks_announced_with_another_size(
    make_agent: MakeAgent, runner: ModelRunner, prompt: Any, forge: Any, factor: float
) -> None:
    asyncio.run(
        refused(
            make_agent,
            runner,
            prompt,
            "length_mismatch",
            forge=forge,
            meta=lambda meta: replace(meta, kv_bytes=int(meta.kv_bytes * factor)),
        )
    )


@PLACES
def test_token_ids_that_are_not_the_blocks(make_agent: MakeAgent, runner: ModelRunner, prompt: Any) -> None:
    """Whoever names our tokens but holds KV of others."""
    others = random_ids(46, len(DOCUMENT))

    async def run() -> None:
        async with make_agent("liar") as liar, make_agent("victim", join=[liar.address]) as victim:
            cache = dense(runner, others)[0]
            await publish_forged(liar, DOCUMENT, unchanged, cache=cache)
            await shared(liar, victim)
            ours = await fill(victim, prompt)
            assert reasons(ours.report) == {"layer0_mismatch"}
            assert is_dense(ours, runner, prompt)

    asyncio.run(run())


@PLACES
def test_token_ids_that_do_not_match_the_metadata(make_agent: MakeAgent, runner: ModelRunner, prompt: Any) -> None:
    async def run() -> None:
        async with make_agent("liar") as liar, make_agent("victim", join=[liar.address]) as victim:
            await publish_forged(liar, DOCUMENT, unchanged, told_ids=lambda ids: random_ids(47, len(ids)))
            await shared(liar, victim)
            ours = await fill(victim, prompt)
            assert reasons(ours.report) == {"tokens_mismatch"}
            assert is_dense(ours, runner, prompt)

    asyncio.run(run())


def test_token_ids_outside_the_vocabulary(make_agent: MakeAgent, runner: ModelRunner) -> None:
    """They share a block with tokens of ours, so they would reach the layer-0 check."""

    def told(ids: Any) -> Any:
        wrong = ids.copy()
        wrong[-3:] = 4_000_000_000
        return wrong

    async def run() -> None:
        async with make_agent("liar") as liar, make_agent("victim", join=[liar.address]) as victim:
            await publish_forged(liar, DOCUMENT, unchanged, told_ids=told)
            await shared(liar, victim)
            ours = await fill(victim, MOVED)
            assert reasons(ours.report) == {"tokens_mismatch"}
            assert is_dense(ours, runner, MOVED)

    asyncio.run(run())


def test_positions_beyond_the_context(make_agent: MakeAgent, runner: ModelRunner) -> None:
    async def run() -> None:
        async with make_agent("liar") as liar, make_agent("victim", join=[liar.address]) as victim:
            far = 1 << 20
            await publish_forged(
                liar, DOCUMENT, unchanged, meta=lambda m: replace(m, start=m.start + far, end=m.end + far)
            )
            await shared(liar, victim)
            ours = await fill(victim, MOVED)
            assert reasons(ours.report) <= {"layer0_mismatch", "not_found", "tokens_mismatch"} and ours.report.misses
            assert is_dense(ours, runner, MOVED)

    asyncio.run(run())


GUARDED = replace(ANYTHING_GOES, divergence=replace(ANYTHING_GOES.divergence, intercept=-9.5, body=8.0))
"""Allows deviations of up to 2. Random weights make contexts matter much: honest KV of another context deviates by 1.2 here,
poison by about 7."""


def deep_garbage(runner: ModelRunner, blocks: list[bytearray]) -> list[bytearray]:
    """Layer 0 as it should be, everything deeper noise."""
    generator = torch.Generator().manual_seed(0)
    for block in blocks:
        for part in block_views(runner, block):
            part[1:] = torch.randn(part[1:].shape, generator=generator) * part[1:].std() * 7
    return blocks


def test_poison_below_layer_0_is_caught_by_the_guard(make_agent: MakeAgent, runner: ModelRunner) -> None:
    guarded = with_profile(runner, GUARDED)

    async def run() -> None:
        async with make_agent("liar") as liar, make_agent("victim", join=[liar.address], model=guarded) as victim:
            await publish_forged(liar, DOCUMENT, lambda blocks, _: deep_garbage(runner, blocks))
            await shared(liar, victim)
            ours = await fill(victim, MOVED)
            assert adds_up(ours.report)
            assert ours.report.predicted_kl is not None and ours.report.predicted_kl > KL_MAX[Mode.BALANCED]
            assert ours.report.fallback
            assert reasons(ours.report) == {"residual"}
            assert ours.report.reused_tokens == 0
            assert is_dense(ours, guarded, MOVED)
            await victim.settled()
            lies = {meta.anchor_id for meta in await pool_metas(liar)}
            assert not lies & {meta.anchor_id for meta in await pool_metas(victim)}, "poison was passed on"
            await no_leaks(liar, victim)

    asyncio.run(run())


def test_honest_kv_passes_the_guard_that_catches_poison(make_agent: MakeAgent, runner: ModelRunner) -> None:
    guarded = with_profile(runner, GUARDED)

    async def run() -> None:
        async with make_agent("ann") as ann, make_agent("bob", join=[ann.address], model=guarded) as bob:
            await fill(ann, DOCUMENT)
            await shared(ann, bob)
            ours = await fill(bob, MOVED)
            assert ours.report.fallback == "" and ours.report.reused_tokens > 150

    asyncio.run(run())


def test_one_bad_block_costs_its_own_tokens(make_agent: MakeAgent, runner: ModelRunner) -> None:
    def forge(blocks: list[bytearray], segment: Any) -> list[bytearray]:
        blocks[1] = bytearray(len(blocks[1]))
        return blocks

    async def run() -> None:
        async with make_agent("liar") as liar, make_agent("victim", join=[liar.address]) as victim:
            await publish_forged(liar, DOCUMENT, forge)
            await shared(liar, victim)
            ours = await fill(victim, PREFIXED)
            assert adds_up(ours.report)
            assert reasons(ours.report) == {"layer0_mismatch"}
            assert [(s.start, s.end, s.kind) for s in ours.report.spans] == [
                (0, 32, "exact"),
                (32, 64, "recompute"),
                (64, 192, "exact"),
                (192, 212, "recompute"),
            ]
            assert "layer0_mismatch" in ours.report.spans[1].why
            assert is_dense(ours, runner, PREFIXED)
            await no_leaks(liar, victim)

    asyncio.run(run())


def test_a_holder_whose_bytes_changed_is_believed_again(make_agent: MakeAgent, runner: ModelRunner) -> None:
    """Evicted and computed again with other bits, an anchor keeps its id: remembered digests must not stick."""

    async def run() -> None:
        async with make_agent("ann") as ann, make_agent("bob", join=[ann.address]) as bob:
            await publish_forged(ann, DOCUMENT, unchanged)
            await shared(ann, bob)
            assert (await fill(bob, PREFIXED, publish=False)).report.exact_tokens == 192
            (meta,) = await pool_metas(ann)
            stack = ann._running()
            await asyncio.wrap_future(stack.driver.run(stack.driver.forget([meta.anchor_id])))

            def nudge(blocks: list[bytearray], segment: Any) -> list[bytearray]:
                for block in blocks:
                    block_views(runner, block)[1].mul_(1 + 1e-6)
                return blocks

            await publish_forged(ann, DOCUMENT, nudge)
            await shared(ann, bob)
            first = await fill(bob, PREFIXED, publish=False)
            assert reasons(first.report) == {"digest_mismatch"} and is_dense(first, runner, PREFIXED)
            # The holder is left alone for a second, then asked again.
            end = time.monotonic() + 20.0
            while (again := await fill(bob, PREFIXED, publish=False)).report.exact_tokens != 192:
                assert time.monotonic() < end, again.report.misses
                await asyncio.sleep(0.05)
            await no_leaks(bob)

    asyncio.run(run())
