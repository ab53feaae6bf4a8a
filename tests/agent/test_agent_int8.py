"""KV as int8 between agents on a slow link: when it travels so, what is made of it, and what never is."""

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
    FixedCosts,
    adds_up,
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
from kvcomm_p2p.net.encoding import decode, encode
from kvcomm_p2p.net.lossy_transport import LossyTransport
from kvcomm_p2p.net.zmq_transport import ZmqTransport
from kvcomm_p2p.planning.costs import CostTracker
from kvcomm_p2p.protocol.anchors import BLOCK_TOKENS, Visibility
from kvcomm_p2p.reuse.blocks import copy_block
from kvcomm_p2p.reuse.checks import LAYER0_INT8_ERROR_MAX, PulledBlock, layer0_mismatches
from kvcomm_p2p.reuse.engine import Filled

MakeAgent = Callable[..., Agent]

DOCUMENT = random_ids(20, 256)
BEFORE, AFTER = random_ids(21, 45), random_ids(22, 30)
PROMPT = joined(BEFORE, DOCUMENT, AFTER)
SLOW_BYTES_PER_S = 1.6e5


@pytest.fixture
def int8_runner(plain_runner: ModelRunner) -> ModelRunner:
    """With a measured divergence of int8."""
    return with_profile(plain_runner, replace(ANYTHING_GOES, int8=1e-4))


@pytest.fixture(autouse=True)
def _slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replies travel slowly, and everybody knows; a token costs so much that pulling pays either way."""

    def costs(runner: ModelRunner) -> CostTracker:
        layout = runner.spec.layout
        share = layout.int8_bytes(BLOCK_TOKENS) / layout.block_bytes(BLOCK_TOKENS)
        return FixedCosts(layout.token_bytes, pull_bytes_per_s=SLOW_BYTES_PER_S, int8_share=share)

    def transport(**options: Any) -> LossyTransport:
        return LossyTransport(ZmqTransport(**options), reply_bytes_per_s=SLOW_BYTES_PER_S)

    monkeypatch.setattr("kvcomm_p2p.stack.measured_costs", costs)
    monkeypatch.setattr("kvcomm_p2p.stack.ZmqTransport", transport)


def travelled(filled: Filled, runner: ModelRunner) -> bool:
    """Whether what was pulled came as int8: that many bytes."""
    layout = runner.spec.layout
    blocks = filled.report.pulled_tokens // BLOCK_TOKENS
    int8, raw = blocks * layout.int8_bytes(BLOCK_TOKENS), blocks * layout.block_bytes(BLOCK_TOKENS)
    assert filled.report.pulled_bytes in (int8, raw)
    return filled.report.pulled_bytes == int8


def run_pair(make_agent: MakeAgent, work: Callable[[Agent, Agent], Any], theirs: Any, ours: Any) -> Any:
    async def run() -> Any:
        apart = {"shared_memory": False}
        async with (
            make_agent("ann", **apart, **theirs) as ann,
            make_agent("bob", join=[ann.address], **apart, **ours) as bob,
        ):
            await fill(ann, joined(random_ids(23, 64), DOCUMENT, random_ids(24, 20)))
            await shared(ann, bob)
            return await work(ann, bob)

    return asyncio.run(run())


def test_on_a_slow_link_a_run_travels_as_int8_and_stays_private(
    make_agent: MakeAgent, int8_runner: ModelRunner
) -> None:
    async def work(ann: Agent, bob: Agent) -> None:
        ours = await fill(bob, PROMPT)
        report = ours.report
        assert adds_up(report) and report.reused_tokens > 200 and report.fallback == ""
        assert travelled(ours, int8_runner)
        assert report.expected_kl == pytest.approx(1e-4 * 256 / len(PROMPT))
        assert not reasons(report) - {"cost"}
        await bob.settled()
        for meta in await pool_metas(bob):
            # What was computed before the reused run is exact; all from there on is kept to oneself.
            assert (meta.hops, meta.visibility) == (
                (0, Visibility.PUBLIC) if meta.end <= 64 else (2, Visibility.PRIVATE)
            )
        again = await fill(bob, joined(PROMPT, random_ids(25, 10)))
        assert again.report.continued_tokens > 200, "an own next turn goes on with it"
        await no_leaks(ann, bob)

    run_pair(make_agent, work, {"model": int8_runner}, {"model": int8_runner})


@pytest.mark.parametrize("raw", ["ann", "bob", "profile"])
def test_raw_where_a_peer_does_not_or_we_do_not_want_it_or_its_cost_is_unknown(
    make_agent: MakeAgent, int8_runner: ModelRunner, runner: ModelRunner, raw: str
) -> None:
    async def work(ann: Agent, bob: Agent) -> None:
        ours = await fill(bob, PROMPT)
        assert ours.report.reused_tokens > 200
        assert not travelled(ours, int8_runner)
        await no_leaks(ann, bob)

    options = {
        name: {"model": int8_runner} | ({"wire_encoding": "raw"} if raw == name else {}) for name in ("ann", "bob")
    }
    if raw == "profile":
        options["bob"]["model"] = runner
    run_pair(make_agent, work, options["ann"], options["bob"])


def test_int8_wherever_it_may_be(
    make_agent: MakeAgent, int8_runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a setting, on a fast link too; exact prefixes stay raw all the same."""
    monkeypatch.setattr("test_agent_int8.SLOW_BYTES_PER_S", 1e10)

    async def work(ann: Agent, bob: Agent) -> None:
        ours = await fill(bob, PROMPT)
        assert travelled(ours, int8_runner) and ours.report.reused_tokens > 200
        exact = joined(random_ids(23, 64), DOCUMENT[:128], random_ids(26, 40))
        same = await fill(bob, exact)
        assert same.report.exact_tokens == 192 and not travelled(same, int8_runner)
        assert is_dense(same, int8_runner, exact)

    run_pair(make_agent, work, {"model": int8_runner}, {"model": int8_runner, "wire_encoding": "int8"})


def test_mode_exact_never_pulls_int8(make_agent: MakeAgent, int8_runner: ModelRunner) -> None:
    async def work(ann: Agent, bob: Agent) -> None:
        exact = joined(random_ids(23, 64), DOCUMENT[:128], random_ids(26, 40))
        ours = await fill(bob, exact, "exact")
        assert ours.report.exact_tokens == 192 and not travelled(ours, int8_runner)
        assert (await fill(bob, PROMPT, "exact")).report.pulled_bytes == 0

    run_pair(make_agent, work, {"model": int8_runner}, {"model": int8_runner, "wire_encoding": "int8"})


def test_poisoned_blocks_are_noticed_as_int8_too(make_agent: MakeAgent, int8_runner: ModelRunner) -> None:
    async def run() -> None:
        options: dict[str, Any] = {"model": int8_runner, "shared_memory": False}
        async with make_agent("liar", **options) as liar, make_agent("bob", join=[liar.address], **options) as bob:
            donor = joined(random_ids(23, 64), DOCUMENT)
            await publish_forged(liar, donor, lambda blocks, _: blocks[1:] + blocks[:1])
            await shared(liar, bob)
            ours = await fill(bob, PROMPT)
            assert ours.report.pulled_bytes < 256 * int8_runner.spec.layout.token_bytes / 3, "it travelled as int8"
            assert "layer0_mismatch" in reasons(ours.report)
            assert ours.report.reused_tokens == 0 and is_dense(ours, int8_runner, PROMPT)

    asyncio.run(run())


# --------------------------------------------------------------------------------------------------------------- layer 0


def pulled(data: memoryview, ids: np.ndarray, position: int, *, int8: bool) -> PulledBlock:
    return PulledBlock((b"a" * 16, 0), data, b"", ids.astype(np.uint32), position, int8)  # type: ignore[arg-type]


def test_layer_0_allows_int8_what_int8_does_and_no_more(runner: ModelRunner) -> None:
    layout = runner.spec.layout
    cache, _ = dense(runner, DOCUMENT)
    for start in range(0, 128, BLOCK_TOKENS):
        ids = DOCUMENT[start : start + BLOCK_TOKENS]
        raw = copy_block(cache, start, start + BLOCK_TOKENS)
        there = decode(memoryview(encode(raw, layout)), layout, BLOCK_TOKENS)
        assert not layer0_mismatches(runner, [pulled(there, ids, start, int8=True)])
        assert layer0_mismatches(runner, [pulled(there, ids, start, int8=False)]), "a raw block is not that far off"
        assert layer0_mismatches(runner, [pulled(there, ids, start + 1, int8=True)]), "another position"
        assert layer0_mismatches(runner, [pulled(there, ids[::-1].copy(), start, int8=True)]), "other tokens"
        keys = torch.frombuffer(bytearray(there), dtype=torch.float32).clone()
        keys *= 1 + 2 * LAYER0_INT8_ERROR_MAX
        louder = memoryview(keys.numpy().tobytes())
        assert layer0_mismatches(runner, [pulled(louder, ids, start, int8=True)]), "twice as far as allowed"
