"""Copies of one anchor at several holders, and what is inherited from donors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from agent_cases import adds_up, fill, joined, no_leaks, pool_metas, random_ids, shared

from kvcomm_p2p.agent import Agent
from kvcomm_p2p.planning.types import Mode
from kvcomm_p2p.prompts import prepare_ids
from kvcomm_p2p.protocol.anchors import Visibility

MakeAgent = Callable[..., Agent]


def test_two_holders_of_one_anchor_in_one_plan_leak_nothing(make_agent: MakeAgent) -> None:
    x, y, z = random_ids(1, 512), random_ids(2, 200), random_ids(3, 200)

    async def run() -> None:
        async with (
            make_agent("ann") as ann,
            make_agent("bob", join=[ann.address]) as bob,
            make_agent("cid", join=[ann.address]) as cid,
        ):
            await fill(ann, joined(x, y))
            await fill(bob, joined(x, z))
            await shared(ann, cid)
            await shared(bob, cid)
            prompt = joined(random_ids(4, 40), x, y, random_ids(5, 40), x, z, random_ids(6, 20))
            filled = await fill(cid, prompt)
            assert adds_up(filled.report)
            assert filled.report.reused_tokens > 1000
            await no_leaks(ann, bob, cid)

    asyncio.run(run())


def test_the_own_copy_of_an_anchor_is_not_pulled_again(make_agent: MakeAgent) -> None:
    document = random_ids(1, 1024)

    async def run() -> None:
        async with make_agent("ann") as ann, make_agent("bob", join=[ann.address]) as bob:
            await fill(ann, document)
            await shared(ann, bob)
            await fill(bob, document[:512], "exact")
            await bob.settled()
            prompt = joined(document[:512], random_ids(2, 50), document, random_ids(3, 20))
            filled = await fill(bob, prompt)
            assert adds_up(filled.report)
            assert filled.report.exact_tokens == 512
            assert filled.report.pulled_tokens <= 512, "the first half is here already"
            await no_leaks(ann, bob)

    asyncio.run(run())


def test_what_is_computed_behind_private_text_stays_private_when_it_is_reused(make_agent: MakeAgent) -> None:
    secret, document = random_ids(1, 100), random_ids(2, 250)

    async def run() -> None:
        async with make_agent("ann") as ann:
            vocabulary = ann.runner.vocabulary_size
            await ann.fill(prepare_ids(joined(secret, document), vocabulary, visibility="private"), Mode.BALANCED)
            await ann.settled()
            public = joined(random_ids(3, 40), document, random_ids(4, 60))
            filled = await ann.fill(prepare_ids(public, vocabulary), Mode.BALANCED)
            await ann.settled()
            assert filled.report.reused_tokens > 100
            for meta in await pool_metas(ann):
                assert meta.visibility is Visibility.PRIVATE or meta.end <= 64, (meta.start, meta.end, meta.hops)

    asyncio.run(run())
