"""Runs found behind other prefixes: what is reused, how it is aligned, what the rules forbid."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from agent_cases import (
    ANYTHING_GOES,
    adds_up,
    dense,
    fill,
    is_dense,
    joined,
    no_leaks,
    random_ids,
    reasons,
    rows,
    shared,
    with_profile,
)

from kvcomm_p2p.agent import Agent
from kvcomm_p2p.errors import UsageError
from kvcomm_p2p.model.decoding import Sampling
from kvcomm_p2p.model.runner import ModelRunner
from kvcomm_p2p.planning.plan import KL_MAX
from kvcomm_p2p.planning.spans import probe_positions
from kvcomm_p2p.planning.types import Mode, SpanKind
from kvcomm_p2p.reuse.engine import Filled
from kvcomm_p2p.reuse.rules import GUARD_PROBES

MakeAgent = Callable[..., Agent]

DOCUMENT = random_ids(20, 256)
BEFORE, AFTER = random_ids(21, 45), random_ids(22, 30)
PROMPT = joined(BEFORE, DOCUMENT, AFTER)


def rotated(keys: torch.Tensor, shift: int, inv_freq: tuple[float, ...]) -> np.ndarray:
    """Keys [L, H, n, D] turned by `shift` positions, in float64, pairs (i, i + D / 2)."""
    source = keys.numpy().astype(np.float64)
    half = len(inv_freq)
    angle = shift * np.asarray(inv_freq, dtype=np.float64)
    low, high = source[..., :half], source[..., half : 2 * half]
    turned = source.copy()
    turned[..., :half] = low * np.cos(angle) - high * np.sin(angle)
    turned[..., half : 2 * half] = high * np.cos(angle) + low * np.sin(angle)
    return turned


def test_a_run_behind_another_prefix(make_agent: MakeAgent, runner: ModelRunner) -> None:
    donor_ids = joined(random_ids(23, 64), DOCUMENT, random_ids(24, 20))

    async def run() -> None:
        async with make_agent("ann") as ann, make_agent("bob", join=[ann.address]) as bob:
            theirs = await fill(ann, donor_ids)
            await shared(ann, bob)
            ours = await fill(bob, PROMPT)
            report = ours.report
            assert adds_up(report)
            assert [(s.start, s.end, s.kind, s.source, s.donor_start) for s in report.spans] == [
                (0, 45, "recompute", "", 0),
                (45, 61, "recompute", "", 0),
                (61, 301, "reuse", "ann", 80),
                (301, 331, "recompute", "", 0),
            ]
            assert "head" in report.spans[1].why
            assert (report.reused_tokens, report.recomputed_tokens, report.exact_tokens) == (234, 97, 0)
            assert report.spans[2].probes == GUARD_PROBES == 6
            assert report.sources == {"ann": 234}
            assert report.pulled_tokens == 256  # positions 64 to 320 of the donor, the head's included
            assert report.predicted_kl is not None and report.predicted_kl > 0
            assert report.fallback == ""
            check_alignment(ours, theirs.cache, runner)
            await no_leaks(ann, bob)

    def check_alignment(ours: Filled, donor: object, runner: ModelRunner) -> None:
        cache = ours.cache
        keys, values = rows(cache, 61, 301)
        donor_keys, donor_values = rows(donor, 80, 320)
        probes = probe_positions(ours.plan.spans[2]) - 61
        kept = np.setdiff1d(np.arange(240), probes)
        assert runner.spec.rotary is not None
        expected = rotated(donor_keys, 61 - 80, runner.spec.rotary.inv_freq)
        assert np.abs(keys.numpy() - expected)[:, :, kept].max() < 1e-4
        assert torch.equal(values[:, :, kept], donor_values[:, :, kept])
        assert not torch.equal(values[1:, :, probes], donor_values[1:, :, probes])
        true_keys, true_values = runner.layer0(DOCUMENT[16:].astype(np.int64), np.arange(61, 301))
        assert torch.allclose(keys[0], true_keys, atol=1e-4)
        assert torch.allclose(values[0], true_values, atol=1e-4)
        # What was recomputed first stands before anything reused: it is what full prefill gives.
        full, _ = dense(runner, PROMPT)
        assert torch.allclose(rows(cache, 0, 61)[0], rows(full, 0, 61)[0], atol=1e-3)
        assert not torch.allclose(keys[1:], rows(full, 61, 301)[0][1:], atol=1e-2), "nothing was approximated"

    asyncio.run(run())


def test_recomputing_everything_that_was_aligned_gives_full_prefill(
    make_agent: MakeAgent, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With heads as long as their runs, aligned KV is read by the guard alone."""
    monkeypatch.setattr("kvcomm_p2p.planning.candidates.head_tokens", lambda repair, tokens: tokens - 1)
    monkeypatch.setattr("kvcomm_p2p.planning.plan._Planner._worth_s", lambda self, run: 1.0)
    monkeypatch.setattr("kvcomm_p2p.planning.plan.predicted_s", lambda spans, costs, pulls: -len(spans))

    async def run() -> None:
        async with make_agent("ann") as ann, make_agent("bob", join=[ann.address]) as bob:
            await fill(ann, DOCUMENT)
            await shared(ann, bob)
            ours = await fill(bob, PROMPT)
            assert ours.report.reused_tokens == 1
            assert ours.report.predicted_kl is not None and ours.report.predicted_kl > 0
            true = dense(bob.runner, PROMPT)
            assert torch.allclose(rows(ours.cache, 0, 300)[0], rows(true[0], 0, 300)[0], atol=1e-3)
            # One token of 331 is approximate.
            assert torch.nn.functional.cosine_similarity(ours.logits, true[1], dim=0) > 0.99

    asyncio.run(run())


def test_two_donors_fill_one_prompt(make_agent: MakeAgent) -> None:
    left, right = random_ids(25, 128), random_ids(26, 160)
    prompt = joined(random_ids(27, 10), left, random_ids(28, 33), right, random_ids(29, 12))

    async def run() -> None:
        async with (
            make_agent("ann") as ann,
            make_agent("bob", join=[ann.address]) as bob,
            make_agent("cyd", join=[ann.address]) as cyd,
        ):
            await fill(ann, left)
            await fill(bob, right)
            await shared(ann, cyd)
            await shared(bob, cyd)
            ours = await fill(cyd, prompt)
            assert adds_up(ours.report)
            assert ours.report.sources == {"ann": 106, "bob": 138}  # six probes of each are computed
            assert [(s.start, s.end) for s in ours.report.spans if s.kind == "reuse"] == [(26, 138), (187, 331)]
            await no_leaks(ann, bob, cyd)

    asyncio.run(run())


def test_text_in_slots_is_found_behind_another_template(make_agent: MakeAgent) -> None:
    report = "Zwölf Boxkämpfer jagen Viktor. 🚣 河水上涨了两米。 " * 5
    sampling = Sampling(max_new_tokens=4)

    async def run() -> None:
        async with make_agent("ann") as ann, make_agent("bob", join=[ann.address]) as bob:
            await ann.generate("Read this: {report} What is it?", slots={"report": report}, sampling=sampling)
            await shared(ann, bob)
            reply = await bob.generate(
                [{"role": "system", "content": "You are a stern reviewer."}, {"role": "user", "content": "[report]!"}],
                slots={"report": report},
                sampling=sampling,
            )
            assert adds_up(reply.report)
            ((start, end),) = reply.report.slots["report"]
            assert end - start == len(report.encode())
            reused = [span for span in reply.report.spans if span.kind == "reuse"]
            assert {span.source for span in reused} == {"ann"}
            assert start <= reused[0].start and reused[0].end >= end
            assert reused[0].start - start <= 17

    asyncio.run(run())


def test_without_a_profile_only_exact_reuse(make_agent: MakeAgent, plain_runner: ModelRunner) -> None:
    async def run() -> None:
        async with (
            make_agent("ann", model=plain_runner) as ann,
            make_agent("bob", join=[ann.address], model=plain_runner) as bob,
        ):
            await fill(ann, DOCUMENT)
            await shared(ann, bob)
            ours = await fill(bob, PROMPT)
            assert ours.report.recomputed_tokens == len(PROMPT)
            assert reasons(ours.report) == {"exact_only"}
            assert "no measured profile for tiny" in ours.report.misses[0].detail
            assert "no measured profile for tiny" in bob.status().exact_only_reason
            assert is_dense(ours, plain_runner, PROMPT)
            prefixed = joined(DOCUMENT, AFTER)
            assert (await fill(bob, prefixed)).report.exact_tokens == len(DOCUMENT)

    asyncio.run(run())


@pytest.mark.parametrize("role", ["judge", "Selector"])
def test_roles_that_compare_get_exact_reuse_only(make_agent: MakeAgent, runner: ModelRunner, role: str) -> None:
    async def run() -> None:
        async with make_agent("ann") as ann, make_agent("bob", join=[ann.address], role=role) as bob:
            await fill(ann, DOCUMENT)
            await shared(ann, bob)
            ours = await fill(bob, PROMPT)
            assert ours.report.reused_tokens == 0
            assert [(m.reason, role in m.detail) for m in ours.report.misses] == [("exact_only", True)]
            assert is_dense(ours, runner, PROMPT)
            assert (await fill(bob, joined(DOCUMENT, AFTER))).report.exact_tokens == len(DOCUMENT)

    asyncio.run(run())


@pytest.mark.parametrize("mode", ["faster", "", "EXACT", "exakt"])
def test_unknown_modes_are_refused_by_name(make_agent: MakeAgent, mode: str) -> None:
    async def run() -> None:
        async with make_agent("ann") as ann:
            for call in (
                ann.generate("hello there", mode=mode),
                ann.prefill([5, 6, 7], mode=mode),
            ):
                with pytest.raises(UsageError, match="exact, balanced, fast, dense"):
                    await call

    asyncio.run(run())


def test_dense_mode_reuses_nothing_and_still_publishes(make_agent: MakeAgent, runner: ModelRunner) -> None:
    async def run() -> None:
        async with make_agent("ann") as ann:
            for _ in range(2):
                filled = await fill(ann, DOCUMENT, "dense")
                await ann.settled()
                assert filled.report.recomputed_tokens == 256 and filled.report.misses == ()
                assert is_dense(filled, runner, DOCUMENT)
            assert ann.status().anchors == 1

    asyncio.run(run())


def test_the_guard_rejects_a_run_that_fits_badly(make_agent: MakeAgent, runner: ModelRunner) -> None:
    strict = with_profile(runner, replace(ANYTHING_GOES, divergence=replace(ANYTHING_GOES.divergence, intercept=9.0)))

    async def run() -> None:
        async with make_agent("ann") as ann, make_agent("bob", join=[ann.address], model=strict) as bob:
            await fill(ann, DOCUMENT)
            await fill(ann, BEFORE)
            await shared(ann, bob)
            ours = await fill(bob, PROMPT)
            report = ours.report
            assert adds_up(report)
            assert report.predicted_kl is not None and report.predicted_kl > KL_MAX[Mode.BALANCED]
            assert f"{report.predicted_kl:.3g}" in report.fallback and "0.02 allowed" in report.fallback
            assert ("residual") in reasons(report)
            assert report.reused_tokens == 0
            assert is_dense(ours, strict, PROMPT)
            assert {span.kind for span in ours.plan.spans} <= {SpanKind.EXACT, SpanKind.RECOMPUTE}
            assert bob.status().fallbacks == 0  # fill is the engine's face; totals count generate and prefill
            # What did not fit here is not passed on under our name.
            await bob.settled()
            await no_leaks(ann, bob)
            again = await bob.prefill(PROMPT.astype(np.int64))
            assert again.report.exact_tokens == len(PROMPT) - 1 and again.report.fallback == ""

    asyncio.run(run())
