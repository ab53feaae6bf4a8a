"""Links that are believed too slow are looked at, so that agents on fast ones begin to reuse."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from agent_cases import FixedCosts, fill, joined, no_leaks, random_ids, shared

from kvcomm_p2p.model.runner import ModelRunner
from kvcomm_p2p.planning.costs import CostTracker
from kvcomm_p2p.reuse import scouting

MakeAgent = Any


class SlowToPull(FixedCosts):
    """A slow model, and a first belief that pulling is far slower still; what is seen of transfers is learned."""

    saw_pull = CostTracker.saw_pull
    saw_align = CostTracker.saw_align


def believe_it_is_slow(runner: ModelRunner) -> CostTracker:
    return SlowToPull(
        runner.spec.layout.token_bytes, token_s=1e-3, pull_latency_s=5.0, pull_bytes_per_s=1e3, align_bytes_per_s=1e3
    )


DOCUMENT = random_ids(1, 192)


def question(number: int) -> Any:
    return joined(random_ids(10 + number, 40), DOCUMENT, random_ids(50 + number, 9))


def test_what_was_too_slow_is_looked_at_and_reused_the_next_time(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcomm_p2p.stack.measured_costs", believe_it_is_slow)

    async def run() -> None:
        async with make_agent("ann") as ann, make_agent("bob", join=[ann.address]) as bob:
            await fill(ann, joined(DOCUMENT, random_ids(2, 9)))
            await shared(ann, bob)
            first = await fill(bob, question(0), publish=False)
            assert first.report.reused_tokens == 0
            await bob.settled()
            second = await fill(bob, question(1), publish=False)
            assert second.report.sources.get("ann", 0) > 0
            await no_leaks(ann, bob)

    asyncio.run(run())


def test_a_peer_is_looked_at_once_in_a_while(make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcomm_p2p.stack.measured_costs", stubborn)
    looked: list[int] = []
    real = scouting.Scout.look

    async def look(self: scouting.Scout, look: Any, found: Any) -> bool:
        looked.append(1)
        return await real(self, look, found)

    monkeypatch.setattr(scouting.Scout, "look", look)

    async def run() -> None:
        async with make_agent("ann") as ann, make_agent("bob", join=[ann.address]) as bob:
            await fill(ann, joined(DOCUMENT, random_ids(2, 9)))
            await shared(ann, bob)
            for number in range(3):
                reply = await fill(bob, question(number), publish=False)
                assert reply.report.sources.get("ann", 0) == 0
                await bob.settled()
            assert len(looked) == 1
            await no_leaks(bob)

    asyncio.run(run())


def stubborn(runner: ModelRunner) -> CostTracker:
    """Believes that pulling is slow, whatever is seen."""
    return FixedCosts(runner.spec.layout.token_bytes, token_s=1e-3, pull_latency_s=5.0, pull_bytes_per_s=1e3)


def test_nothing_is_looked_at_where_reuse_pays(make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    async def no(self: scouting.Scout, look: Any, found: Any) -> bool:
        raise AssertionError("looked at a link that is used")

    monkeypatch.setattr(scouting.Scout, "look", no)

    async def run() -> None:
        async with make_agent("ann") as ann, make_agent("bob", join=[ann.address]) as bob:
            await fill(ann, joined(DOCUMENT, random_ids(2, 9)))
            await shared(ann, bob)
            assert (await fill(bob, question(0))).report.sources.get("ann", 0) > 0

    asyncio.run(run())
