"""Plans that are looked at and not carried out, and the report of the last request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from agent_cases import (
    ANYTHING_GOES,
    adds_up,
    eventually,
    fill,
    joined,
    met,
    no_leaks,
    pool_metas,
    random_ids,
    reasons,
    shared,
    with_profile,
)

from kvcomm_p2p.agent import Agent
from kvcomm_p2p.errors import UsageError
from kvcomm_p2p.explain import explained
from kvcomm_p2p.model.decoding import Sampling
from kvcomm_p2p.model.runner import ModelRunner
from kvcomm_p2p.planning.plan import KL_MAX
from kvcomm_p2p.planning.types import Mode, Provenance, Repair
from kvcomm_p2p.report import PrefillReport

MakeAgent = Callable[..., Agent]

TEXT = "".join(
    f"Section {number}: the committee met and found that {number * 7919 % 1000} of them agreed. " for number in range(9)
)
QUESTION = "Read [report] and say what the committee found."
OTHER = "As a strict reviewer who trusts nobody, judge this: [report] Is it sound?"
NO_TOKENS = Sampling(max_new_tokens=1)


def shape(report: PrefillReport) -> list[tuple[int, int, str, str, int]]:
    return [(span.start, span.end, span.kind, span.source, span.probes) for span in report.spans]


async def ask(agent: Agent, prompt: str, **options: Any) -> PrefillReport:
    """The report of a request with TEXT as its report."""
    reply = await agent.generate(prompt, slots={"report": TEXT}, sampling=NO_TOKENS, **options)
    return reply.report


def test_the_plan_is_what_a_request_then_does(make_agent: MakeAgent) -> None:
    async def run() -> None:
        async with make_agent("ann") as ann, make_agent("bob", join=[ann.address]) as bob:
            await ask(ann, QUESTION)
            await shared(ann, bob)
            before = (bob.status(), await pool_metas(bob))
            plan = await bob.explain(OTHER, slots={"report": TEXT}, visibility="private")
            assert (bob.status().pool_bytes, bob.status().requests, await pool_metas(bob)) == (0, 0, [])
            assert before[0].pulled_bytes == bob.status().pulled_bytes == 0
            assert bob.last_report is None
            assert plan.planned_only and adds_up(plan)
            assert (plan.pulled_bytes, plan.pulled_tokens, plan.predicted_kl) == (0, 0, None)
            assert plan.kl_max == KL_MAX[Mode.BALANCED]
            done = await ask(bob, OTHER, visibility="private")
            assert not done.planned_only
            assert shape(plan) == shape(done)
            assert plan.slots == done.slots
            assert (plan.planned_s, plan.dense_s, plan.covered_tokens) == (
                done.planned_s,
                done.dense_s,
                done.covered_tokens,
            )
            assert [replace(run, deviation=None) for run in done.runs] == list(plan.runs)
            assert all(run.deviation is not None for run in done.runs)
            assert bob.last_report == done
            await no_leaks(ann, bob)

    asyncio.run(run())


def test_a_run_names_its_donor_and_anchors(make_agent: MakeAgent) -> None:
    async def run() -> None:
        async with make_agent("ann") as ann, make_agent("bob", join=[ann.address]) as bob:
            await ask(ann, QUESTION)
            await shared(ann, bob)
            report = await ask(bob, OTHER)
            [reused] = report.runs
            [span] = [span for span in report.spans if span.kind == "reuse"]
            known = {meta.anchor_id.hex()[:8] for meta in await pool_metas(ann)}
            assert span.anchors and set(reused.anchors) <= known and set(span.anchors) <= set(reused.anchors)
            assert (span.run, span.source, reused.source, reused.hops) == (1, "ann", "ann", 0)
            assert reused.kv_bytes == report.pulled_bytes > 0
            assert reused.others == ()

    asyncio.run(run())


def test_the_copies_that_lost_are_named_with_the_reason(make_agent: MakeAgent, plain_runner: ModelRunner) -> None:
    """Copies from behind other text need more repair than those from behind another beginning."""
    document = random_ids(1, 300)
    ours = joined(random_ids(2, 40), document, random_ids(3, 20))
    repairs = {each: (Repair(16 + 8 * each),) for each in Provenance}
    runner = with_profile(plain_runner, replace(ANYTHING_GOES, repairs=repairs))

    async def run() -> None:
        async with (
            make_agent("ann", model=runner) as ann,
            make_agent("cyd", model=runner, join=[ann.address]) as cyd,
            make_agent("bob", model=runner, join=[ann.address]) as bob,
        ):
            await met(ann, bob, cyd)
            await fill(ann, joined(random_ids(4, 48), document), "dense")
            await fill(cyd, joined(random_ids(5, 400), document[:200]), "dense")
            await shared(ann, bob)
            await shared(cyd, bob)
            report = (await fill(bob, ours)).report
            [reused] = report.runs
            assert (reused.source, reused.provenance) == ("ann", "role")
            [other] = reused.others
            assert (other.source, other.provenance, other.start, other.end) == ("cyd", "other", 40, 240)
            assert other.why in ("less alike context", "shorter")
            assert other.donor_start == 400
            assert other.saved_s is not None and 0 < other.saved_s < reused.saved_s
            assert other.anchor in {meta.anchor_id.hex()[:8] for meta in await pool_metas(cyd)}

    asyncio.run(run())


def test_a_fallback_keeps_the_runs_that_the_guard_rejected(make_agent: MakeAgent, plain_runner: ModelRunner) -> None:
    hopeless = replace(ANYTHING_GOES.divergence, intercept=9.0)
    runner = with_profile(plain_runner, replace(ANYTHING_GOES, divergence=hopeless))

    async def run() -> None:
        async with make_agent("ann", model=runner) as ann, make_agent("bob", model=runner, join=[ann.address]) as bob:
            await ask(ann, QUESTION)
            await shared(ann, bob)
            report = await ask(bob, OTHER)
            assert report.fallback and report.runs == ()
            [rejected] = report.rejected_runs
            assert (rejected.source, reasons(report)) == ("ann", {"residual"})
            assert rejected.deviation is not None and rejected.deviation > 0
            assert report.predicted_kl is not None and report.predicted_kl > report.kl_max
            titles = [table.title for table in explained(report, "bob")]
            assert any(title.endswith("rejected by the guard") for title in titles)

    asyncio.run(run())


def test_the_last_report_is_one_and_has_no_text(make_agent: MakeAgent) -> None:
    secret = "The password is swordfish. " * 8

    async def run() -> None:
        async with make_agent("ann") as ann:
            assert ann.last_report is None
            first = await ask(ann, QUESTION)
            assert ann.last_report == first
            await ann.generate(secret, sampling=NO_TOKENS, visibility="private")
            last = ann.last_report
            assert last is not None and last.prompt_tokens != first.prompt_tokens
            words = json.dumps(last.as_dict()) + repr(explained(last, "ann"))
            assert "swordfish" not in words and "password" not in words
            await fill(ann, random_ids(1, 70))
            assert ann.last_report == last, "what the engine's own face fills is not a request"
            plain = await ann.prefill(random_ids(2, 64))
            assert ann.last_report == plain.report
            assert PrefillReport.from_dict(json.loads(json.dumps(plain.report.as_dict()))) == plain.report

    asyncio.run(run())


def test_without_a_profile_the_plan_says_why(make_agent: MakeAgent, plain_runner: ModelRunner) -> None:
    async def run() -> None:
        async with (
            make_agent("ann", model=plain_runner) as ann,
            make_agent("bob", model=plain_runner, join=[ann.address]) as bob,
        ):
            await ask(ann, QUESTION)
            await shared(ann, bob)
            plan = await bob.explain(OTHER, slots={"report": TEXT})
            assert "no measured profile" in plan.exact_only
            assert (plan.kl_max, plan.reused_tokens, reasons(plan)) == (0.0, 0, {"exact_only"})
            exact = await bob.explain(OTHER, slots={"report": TEXT}, mode="exact")
            assert exact.exact_only == ""
        async with make_agent("cat", role="Judge") as judge:
            assert "compares candidates" in (await judge.explain("Which is better?")).exact_only

    asyncio.run(run())


def test_dense_mode_asks_nobody(make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with make_agent("ann") as ann:
            plan = await ann.explain(QUESTION, slots={"report": TEXT}, mode="dense")
            assert [(span.kind, span.why) for span in plan.spans] == [("recompute", "dense prefill was asked for")]
            assert plan.timings.find_s == 0

    asyncio.run(run())


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        (" ", {}, "the prompt is empty"),
        ("hi", {"slots": {"x": "y"}}, "x"),
        ("hi", {"mode": "wild"}, "mode 'wild' is not known"),
        ("word " * 600, {}, "the context of tiny holds 2048"),
    ],
)
def test_bad_input_is_refused_as_by_generate(
    make_agent: MakeAgent, prompt: str, options: dict[str, Any], message: str
) -> None:
    async def run() -> None:
        async with make_agent("ann") as ann:
            with pytest.raises(UsageError, match=message) as explaining:
                await ann.explain(prompt, **options)
            with pytest.raises(UsageError) as generating:
                await ann.generate(prompt, **options)
            assert str(explaining.value) == str(generating.value)

    asyncio.run(run())


def test_a_dead_peer_is_a_miss_in_the_plan(make_agent: MakeAgent) -> None:
    async def run() -> None:
        async with make_agent("bob", tokens_timeout_s=0.2) as bob:
            ann = make_agent("ann", join=[bob.address])
            async with ann:
                await ask(ann, QUESTION)
                await shared(ann, bob)
            await eventually(lambda: bob.status().peers[0]["state"] != "alive", "ann has left")
            plan = await bob.explain(OTHER, slots={"report": TEXT})
            assert plan.reused_tokens == 0
            assert reasons(plan) <= {"not_found", "unreachable", "stalled", "deadline"}
            assert plan.misses

    asyncio.run(run())
