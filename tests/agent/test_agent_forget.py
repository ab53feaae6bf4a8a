"""Agents that forget, and agents whose connections are encrypted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agent_cases import eventually, fill, joined, met, no_leaks, pool_metas, random_ids, shared

from kvcomm_p2p.agent import Agent
from kvcomm_p2p.errors import ConfigError, UsageError
from kvcomm_p2p.forgetting import anchor_named
from kvcomm_p2p.net.identity import load_identity, make_identity
from kvcomm_p2p.net.keys import ClusterKeys
from kvcomm_p2p.protocol.ids import AnchorId

MakeAgent = Callable[..., Agent]

TEXT = "The patient, Jane Doe, was born on the 3rd of May 1971 and lives in 14 Mill Lane. " * 3
QUESTION = "What is new? "


def test_a_text_is_forgotten_everywhere_and_does_not_come_back(make_agent: MakeAgent) -> None:
    async def run() -> None:
        async with make_agent("ann") as ann, make_agent("bob", join=[ann.address]) as bob:
            for agent in (ann, bob):
                await agent.generate(QUESTION + TEXT)
                await agent.settled()
            await met(ann, bob)
            assert await pool_metas(bob)
            forgotten = await ann.forget(TEXT[10:90], everywhere=True)
            assert forgotten.anchors > 0 and forgotten.told == 1
            await _holds_nothing_of(ann, bob)
            reply = await bob.generate(QUESTION + TEXT)
            assert reply.report.reused_tokens == 0
            await bob.settled()
            await _holds_nothing_of(ann, bob)
            await no_leaks(ann, bob)

    asyncio.run(run())


async def _holds_nothing_of(*agents: Agent) -> None:
    """Only what stood before the text may be left."""
    for agent in agents:

        async def held(agent: Agent = agent) -> list[Any]:
            return [meta for meta in await pool_metas(agent) if meta.end > len(QUESTION) + 64]

        end = 200
        while await held() and end:
            end -= 1
            await asyncio.sleep(0.02)
        assert not await held(), agent.name


def test_what_was_learned_goes_with_it(make_agent: MakeAgent) -> None:
    async def run() -> None:
        async with make_agent("ann") as ann:
            await ann.generate(QUESTION + TEXT)
            await ann.settled()
            memory = ann._running().memory
            memory._bytes = 1
            await ann.forget(TEXT)
            assert memory._bytes == 0
            with pytest.raises(UsageError, match="too short"):
                await ann.forget("ab")

    asyncio.run(run())


def test_an_anchor_is_forgotten_by_its_name(make_agent: MakeAgent) -> None:
    async def run() -> None:
        async with make_agent("ann") as ann:
            await fill(ann, random_ids(1, 200))
            await ann.settled()
            first = min(await pool_metas(ann), key=lambda meta: meta.start)
            assert (await ann.forget(first.anchor_id.hex())).anchors >= 1
            assert first.anchor_id not in {meta.anchor_id for meta in await pool_metas(ann)}

    asyncio.run(run())


def test_an_anchor_of_a_peer_is_forgotten_by_the_beginning_of_its_name(make_agent: MakeAgent) -> None:
    async def run() -> None:
        async with make_agent("ann") as ann, make_agent("bob", join=[ann.address]) as bob:
            await fill(ann, random_ids(1, 200))
            await met(ann, bob)
            await shared(ann, bob)
            first = min(await pool_metas(ann), key=lambda meta: meta.start)
            assert (await bob.forget(first.anchor_id.hex()[:8], everywhere=True)).told == 1
            end = 200
            while first.anchor_id in {meta.anchor_id for meta in await pool_metas(ann)} and end:
                end -= 1
                await asyncio.sleep(0.02)
            assert end, "ann has forgotten it"
            with pytest.raises(
                UsageError, match="no anchor that is known here has an id that begins with abcdef012345"
            ):
                await bob.forget("abcdef012345")

    asyncio.run(run())


def test_what_names_an_anchor() -> None:
    known = [
        AnchorId(bytes.fromhex(digits)) for digits in ("12345678" + "0" * 24, "ab345678" * 4, "ab34567890" + "f" * 22)
    ]

    def named(word: str) -> str:
        found = anchor_named(word, lambda: known)
        return "" if found is None else found.hex()

    assert named("12345678") == named("12345678000") == named("12345678" + "0" * 24) == known[0].hex()
    assert named("AB3456789") == known[2].hex()
    assert named("c" * 32) == "c" * 32, "a whole id may be unknown here"
    for text in ("ab34567", "ab345678 ", "fade away", "g" * 32, "0" * 33, "20261130"):
        assert named(text) == "", text
    with pytest.raises(
        UsageError, match=f"2 anchors have ids that begin with ab345678 .ab34567890f+, {known[1].hex()}"
    ):
        named("ab345678")
    with pytest.raises(
        UsageError, match="no anchor that is known here has an id that begins with deadbeef: give all 32"
    ):
        named("deadbeef")


def test_encrypted_agents_share(make_agent: MakeAgent, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The same state directory, so the same identity; and nothing secret in any log."""
    caplog.set_level(logging.DEBUG)
    with pytest.raises(ConfigError, match="kvcomm keys new"):
        asyncio.run(make_agent("ann", encrypt="always").start())
    make_identity(tmp_path / "state")
    document = random_ids(60, 192)

    async def run() -> None:
        async with (
            make_agent("ann", encrypt="always") as ann,
            make_agent("bob", join=[ann.address], encrypt="always") as bob,
        ):
            await met(ann, bob)
            await fill(ann, document)
            await shared(ann, bob)
            filled = await fill(bob, joined(document, random_ids(61, 40)), "exact")
            assert filled.report.exact_tokens >= 160
            identity = load_identity(tmp_path / "state")
            assert identity is not None
            assert bob.node_id == identity.public.node_id("bob")
            await eventually(lambda: len(ann.status().peers) == 1, "ann sees bob")

    asyncio.run(run())
    _nothing_secret(caplog.text, tmp_path / "state")


def _nothing_secret(text: str, state_dir: Path) -> None:
    secret = (state_dir / "cluster.key").read_bytes()
    identity = (state_dir / "identity.key").read_bytes()
    keys = ClusterKeys.derive(secret)
    for each in (secret, identity[:32], identity[32:], keys.seal, keys.content, keys.erasing):
        assert each.hex() not in text and repr(each)[2:-1] not in text
