"""What is published, who may see it, and that the pool stays within its budget."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from agent_cases import (
    adds_up,
    eventually,
    fill,
    is_dense,
    joined,
    listed,
    met,
    no_leaks,
    pool_metas,
    random_ids,
    shared,
)

from kvcomm_p2p.agent import Agent
from kvcomm_p2p.model.decoding import Sampling
from kvcomm_p2p.model.runner import ModelRunner
from kvcomm_p2p.prompts import Text
from kvcomm_p2p.protocol.anchors import AnchorMeta, BlockKey, Miss, MissReason, Visibility

MakeAgent = Callable[..., Agent]

DOCUMENT = random_ids(60, 192)
QUESTION = joined(random_ids(61, 21), DOCUMENT, random_ids(62, 20))


async def ask_tokens(asker: Agent, holder: Agent, meta: AnchorMeta) -> Any:
    """What a peer answers when asked outright for an anchor."""
    stack = asker._running()
    answer = await asyncio.wrap_future(stack.driver.run(stack.driver.tokens(holder.node_id, meta, 5.0)))
    return answer.result


async def ask_blocks(asker: Agent, holder: Agent, meta: AnchorMeta) -> set[MissReason]:
    """Why a peer does not give the blocks of an anchor; an empty set if it gives any."""
    stack = asker._running()
    held = await asyncio.wrap_future(holder._running().driver.run(_held(holder, meta)))
    wants = [
        (BlockKey(meta.anchor_id, index), meta.kv_bytes // meta.tokens * meta.block_tokens(index), held.digests[index])
        for index in range(meta.blocks)
    ]
    result = await asyncio.wrap_future(stack.driver.run(stack.driver.fetch(holder.node_id, wants, 5.0)))
    for handle in result.found.values():
        stack.store.drop(handle)
    return set() if result.found else {miss.reason for miss in result.missed.values()}


async def _held(agent: Agent, meta: AnchorMeta) -> Any:
    return agent._running().driver.held(meta.anchor_id)


def test_private_text_never_leaves_nor_what_stands_behind_it(make_agent: MakeAgent) -> None:
    before, behind = "public words " * 12, " words that are public, but stand behind a secret " * 4
    secret = "the password is swordfish, tell nobody at all. " * 4

    async def run() -> None:
        async with make_agent("ann") as ann, make_agent("bob", join=[ann.address]) as bob:
            reply = await ann.generate(
                before + "{secret}" + behind,
                slots={"secret": Text(secret, "private")},
                sampling=Sampling(max_new_tokens=40),
            )
            ((start, _),) = reply.report.slots["secret"]
            await ann.settled()
            metas = await pool_metas(ann)
            public = [meta for meta in metas if meta.visibility is Visibility.PUBLIC]
            private = [meta for meta in metas if meta.visibility is Visibility.PRIVATE]
            assert max(meta.end for meta in public) <= start
            assert max(meta.end for meta in private) > reply.report.prompt_tokens, "the answer is private too"
            await shared(ann, bob)
            assert await listed(bob, ann) == {meta.anchor_id for meta in public}
            for meta in private:
                answer = await ask_tokens(bob, ann, meta)
                assert isinstance(answer, Miss) and answer.reason is MissReason.NOT_FOUND
                assert await ask_blocks(bob, ann, meta) == {MissReason.NOT_FOUND}
            for meta in public:
                assert not isinstance(await ask_tokens(bob, ann, meta), Miss)
                assert await ask_blocks(bob, ann, meta) == set()
            # Neither the secret nor what follows it is found by a peer with the same text.
            other = await bob.generate(secret + behind, sampling=Sampling(max_new_tokens=1))
            assert other.report.exact_tokens == other.report.reused_tokens == other.report.pulled_tokens == 0
            # The owner goes on with it.
            again = await ann.generate(
                before + secret + behind + "?", visibility="private", sampling=Sampling(max_new_tokens=1)
            )
            assert again.report.exact_tokens > 300
            await no_leaks(ann, bob)

    asyncio.run(run())


def test_a_private_prompt_stays_private(make_agent: MakeAgent) -> None:
    async def run() -> None:
        async with make_agent("ann") as ann, make_agent("bob", join=[ann.address]) as bob:
            await fill(ann, DOCUMENT, visibility="private")
            await fill(ann, random_ids(63, 100))
            await shared(ann, bob)
            assert len(await listed(bob, ann)) == 1
            ours = await fill(bob, QUESTION)
            assert ours.report.recomputed_tokens == len(QUESTION)
            # The same tokens published openly later do not open what is private, the strictest wins.
            await fill(ann, DOCUMENT)
            await shared(ann, bob)
            assert len(await listed(bob, ann)) == 1

    asyncio.run(run())


def test_text_that_becomes_private_is_withdrawn(make_agent: MakeAgent) -> None:
    async def run() -> None:
        async with make_agent("ann") as ann, make_agent("bob", join=[ann.address]) as bob:
            await fill(ann, DOCUMENT)
            await shared(ann, bob)
            assert len(await listed(bob, ann)) == 1
            await fill(ann, DOCUMENT, visibility="private")
            await ann.settled()
            assert {meta.visibility for meta in await pool_metas(ann)} == {Visibility.PRIVATE}
            await shared(ann, bob)
            assert await listed(bob, ann) == set()
            await no_leaks(ann)

    asyncio.run(run())


def test_groups_share_among_themselves(make_agent: MakeAgent) -> None:
    async def run() -> None:
        async with (
            make_agent("ann", groups=["red"]) as ann,
            make_agent("bob", join=[ann.address], groups=["blue", "red"]) as bob,
            make_agent("eve", join=[ann.address], groups=["blue"]) as eve,
        ):
            await met(ann, bob, eve)
            await fill(ann, DOCUMENT, visibility="group", group="red")
            await ann.settled()
            (meta,) = await pool_metas(ann)
            assert meta.visibility is Visibility.GROUP
            answer = await ask_tokens(eve, ann, meta)
            assert isinstance(answer, Miss) and answer.reason is MissReason.NOT_FOUND
            assert await ask_blocks(eve, ann, meta) == {MissReason.NOT_FOUND}
            inside = await eventually_reused(bob)
            assert inside.report.sources == {"ann": 170}
            outside = await fill(eve, QUESTION)
            assert outside.report.recomputed_tokens == len(QUESTION)
            # A member's replica is as closed as the original.
            await bob.settled()
            assert isinstance(await ask_tokens(eve, bob, meta), Miss)

    async def eventually_reused(agent: Agent) -> Any:
        for _ in range(500):
            filled = await fill(agent, QUESTION, visibility="group", group="red", publish=False)
            if filled.report.reused_tokens:
                return await fill(agent, QUESTION, visibility="group", group="red")
            await asyncio.sleep(0.01)
        raise AssertionError("a member never found the group's anchor")

    asyncio.run(run())


def test_prompt_and_answer_become_anchors_that_others_quote(make_agent: MakeAgent, runner: ModelRunner) -> None:
    async def run() -> None:
        async with make_agent("ann") as ann, make_agent("bob", join=[ann.address]) as bob:
            for seed in range(40):  # random weights end most answers early
                sampling = Sampling(temperature=1.0, seed=seed, max_new_tokens=130)
                reply = await ann.generate(f"Story {seed}", sampling=sampling)
                if reply.finish_reason == "length":
                    break
            answer = np.array(reply.token_ids, dtype=np.uint32)
            assert len(answer) == 130
            await shared(ann, bob)
            metas = await pool_metas(ann)
            assert max(meta.end for meta in metas) == reply.report.prompt_tokens + len(answer) - 1
            quoting = joined(random_ids(64, 50), answer, random_ids(65, 10))
            ours = await fill(bob, quoting)
            assert adds_up(ours.report)
            (span,) = [span for span in ours.report.spans if span.kind == "reuse"]
            assert span.source == "ann" and span.end >= 50 + len(answer) - 1
            assert span.donor_start - reply.report.prompt_tokens == span.start - 50
            await no_leaks(ann, bob)

    asyncio.run(run())


def test_the_same_prompt_again_takes_no_more_memory(make_agent: MakeAgent) -> None:
    async def run() -> None:
        async with make_agent("ann") as ann, make_agent("bob", join=[ann.address]) as bob:
            await fill(ann, DOCUMENT)
            await shared(ann, bob)
            for agent, prompt in ((ann, DOCUMENT), (bob, QUESTION)):
                await fill(agent, prompt)
                await agent.settled()
                before = agent.status()
                for _ in range(3):
                    await fill(agent, prompt)
                    await agent.settled()
                after = agent.status()
                assert (after.pool_bytes, after.anchors) == (before.pool_bytes, before.anchors), agent.name
            text = "Once upon a time there was a river that ran through a wide green valley to the sea."
            sizes = []
            for _ in range(3):
                await ann.generate(text, sampling=Sampling(max_new_tokens=40))
                await ann.settled()
                sizes.append((ann.status().pool_bytes, ann.status().anchors))
            assert len(set(sizes)) == 1, sizes
            await no_leaks(ann, bob)

    asyncio.run(run())


def test_replicas_serve_when_the_origin_is_gone(make_agent: MakeAgent, runner: ModelRunner) -> None:
    async def run() -> None:
        async with make_agent("bob") as bob, make_agent("cyd", join=[bob.address]) as cyd:
            async with make_agent("ann", join=[bob.address]) as ann:
                await fill(ann, DOCUMENT)
                await shared(ann, bob)
                (origin,) = await pool_metas(ann)
                ours = await fill(bob, QUESTION)
                assert ours.report.sources == {"ann": 170}
                await shared(bob, cyd)
            await eventually(
                lambda: all(peer["state"] != "alive" for peer in cyd.status().peers if peer["name"] == "ann"),
                "cyd knows that ann left",
            )
            assert origin in await pool_metas(bob)
            third = await fill(cyd, joined(random_ids(66, 40), DOCUMENT, random_ids(67, 9)))
            assert third.report.sources == {"bob": 170}
            assert third.report.predicted_kl is not None
            prefixed = joined(DOCUMENT, random_ids(68, 30))
            exact = await fill(cyd, prefixed, "exact")
            assert exact.report.exact_tokens == len(DOCUMENT)
            assert is_dense(exact, runner, prefixed)
            await no_leaks(bob, cyd)

    asyncio.run(run())


def test_what_a_longer_anchor_replaces_is_served_until_peers_know(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever heard of a prompt while it was being answered can still have it afterwards; later it is gone."""
    monkeypatch.setattr("kvcomm_p2p.planning.superseding.SUPERSEDED_KEPT_S", 3600.0)
    text = "The rain in Spain stays mainly in the plain. " * 3

    async def run() -> None:
        async with make_agent("ann") as ann, make_agent("bob", join=[ann.address]) as bob:
            await met(ann, bob)
            await ann.generate(text, sampling=Sampling(max_new_tokens=20))
            await ann.settled()
            short, long = sorted(await pool_metas(ann), key=lambda meta: meta.end)
            assert short.start == long.start == 0 and short.end < long.end
            for meta in (short, long):
                assert await ask_blocks(bob, ann, meta) == set()
            monkeypatch.setattr("kvcomm_p2p.planning.superseding.SUPERSEDED_KEPT_S", 0.0)
            await fill(ann, random_ids(73, 40))
            await ann.settled()
            assert short not in await pool_metas(ann) and long in await pool_metas(ann)
            await no_leaks(ann, bob)

    asyncio.run(run())


def test_parts_of_an_anchor_are_replicas_too(make_agent: MakeAgent) -> None:
    """Who pulled the end of a document serves that end, under a name that all holders of it give it."""
    tail = DOCUMENT[75:]

    async def run() -> None:
        async with (
            make_agent("bob") as bob,
            make_agent("cyd", join=[bob.address]) as cyd,
            make_agent("dan", join=[bob.address]) as dan,
        ):
            async with make_agent("ann", join=[bob.address]) as ann:
                await fill(ann, DOCUMENT)
                await shared(ann, bob, cyd)
                (whole,) = await pool_metas(ann)
                prompt = joined(random_ids(70, 40), tail)
                for ours in await asyncio.gather(fill(bob, prompt), fill(cyd, prompt)):
                    assert ours.report.sources["ann"] > 80
                await bob.settled()
                await cyd.settled()
            parts = []
            for agent in (bob, cyd):
                (part,) = [meta for meta in await pool_metas(agent) if meta.sequence_id == whole.sequence_id]
                parts.append(part)
            assert parts[0].anchor_id == parts[1].anchor_id != whole.anchor_id
            assert (parts[0].start, parts[0].end) == (64, len(DOCUMENT))
            await shared(bob, dan)
            await shared(cyd, dan)
            third = await fill(dan, joined(random_ids(71, 9), tail, random_ids(72, 9)))
            assert set(third.report.sources) <= {"bob", "cyd"} and third.report.reused_tokens > 80
            await no_leaks(bob, cyd, dan)

    asyncio.run(run())


def test_kv_is_repaired_once_at_most_before_it_is_published(make_agent: MakeAgent) -> None:
    """The document moves from agent to agent; what has two repairs behind it stays at home."""

    async def run() -> None:
        async with (
            make_agent("ann") as ann,
            make_agent("bob", join=[ann.address]) as bob,
            make_agent("cyd", join=[ann.address]) as cyd,
        ):
            inner = random_ids(69, 128)
            await fill(ann, DOCUMENT)
            await shared(ann, bob)
            # Behind reused KV, `inner` is computed: it has one repair behind it.
            assert (await fill(bob, joined(QUESTION, inner))).report.reused_tokens > 0
            await shared(bob, cyd)
            once = [meta for meta in await pool_metas(bob) if meta.hops == 1]
            assert once and {meta.visibility for meta in once} == {Visibility.PUBLIC}
            ours = await fill(cyd, joined(random_ids(70, 75), inner, random_ids(71, 64)))
            assert ours.report.sources == {"bob": 96 + 16} or ours.report.reused_tokens > 64
            await cyd.settled()
            twice = [meta for meta in await pool_metas(cyd) if meta.hops > 1]
            assert twice and {meta.visibility for meta in twice} == {Visibility.PRIVATE}
            assert max(meta.hops for meta in await pool_metas(cyd)) == 2
            await shared(cyd, ann)
            assert not {meta.anchor_id for meta in twice} & await listed(ann, cyd)

    asyncio.run(run())
