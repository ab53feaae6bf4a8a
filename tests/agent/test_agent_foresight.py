"""The prefix predictor in real agents: behind every request it learns, before every repair it says what it expects."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from agent_cases import (
    ANYTHING_GOES,
    Ids,
    adds_up,
    dense,
    eventually,
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
from kvcomm_p2p.explain import explained
from kvcomm_p2p.model.runner import ModelRunner
from kvcomm_p2p.planning.divergence import DivergenceFit
from kvcomm_p2p.report import RunReport
from kvcomm_p2p.reuse.foresight import Foresight, predictor_path
from kvcomm_p2p.reuse.predictor import SKILL_OBSERVATIONS_MIN, Predictor
from kvcomm_p2p.reuse.selection import CHOSEN_WHY

MakeAgent = Callable[..., Agent]

DOCUMENT = random_ids(70, 256)
SQUARES = DivergenceFit(intercept=0.0, body=2.0, head=0.0, entropy=0.0, spread=0.0, prompts=1)
"""The divergence is the mean squared deviation."""


def prompt(number: int) -> Ids:
    """The document behind `30 + number` other tokens."""
    return joined(random_ids(100 + number, 30 + number), DOCUMENT, random_ids(200 + number, 25))


def foresight_of(agent: Agent) -> Foresight:
    return agent._running()._foresight


async def learned(agent: Agent, observations: int) -> None:
    await eventually(lambda: foresight_of(agent).predictor.observations == observations, f"{observations} observations")


class Predicting(Predictor):
    """Trusted; predicts `level` everywhere, ten times that at rows `peak`."""

    observations = property(lambda self: 64)
    skill = property(lambda self: 0.6)
    shape_skill = property(lambda self: 0.6)

    def __init__(self, level: float, peak: slice = slice(0, 0)) -> None:
        super().__init__()
        self._level, self._peak = level, peak

    def predict(self, features: torch.Tensor) -> torch.Tensor:
        deviations = torch.full((len(features),), self._level)
        deviations[self._peak] *= 10
        return deviations


def only_run(report: Any) -> RunReport:
    [run] = report.runs
    assert isinstance(run, RunReport)
    return run


def test_every_reused_prompt_teaches_and_is_predicted_once_there_is_skill(make_agent: MakeAgent) -> None:
    async def run() -> None:
        async with make_agent("ann") as ann, make_agent("bob", join=[ann.address]) as bob:
            await fill(ann, DOCUMENT)
            await shared(ann, bob)
            for number in range(SKILL_OBSERVATIONS_MIN):
                report = (await fill(bob, prompt(number))).report
                seen = only_run(report)
                assert seen.deviation is not None and seen.deviation > 0
                assert seen.predicted_deviation is None
                await learned(bob, number + 1)
            report = (await fill(bob, prompt(SKILL_OBSERVATIONS_MIN))).report
            seen = only_run(report)
            assert seen.predicted_deviation is not None and seen.deviation is not None
            assert 0.2 < seen.predicted_deviation / seen.deviation < 5  # of a random model's, all of one kind
            told = [row for table in explained(report) for row in table.rows if row[0] == "predictor"]
            assert len(told) == 1 and f"{seen.predicted_deviation:.1%}" in told[0][1]
            assert foresight_of(ann).predictor.observations == 0

    asyncio.run(run())


def test_learning_is_not_on_the_way_of_the_request(make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has not even begun to learn from what the caller has already got back."""
    go_on = threading.Event()
    observe = Predictor.observe

    def blocked(self: Predictor, *given: Any, **limits: Any) -> bool:
        assert go_on.wait(30)
        return observe(self, *given, **limits)

    monkeypatch.setattr(Predictor, "observe", blocked)

    async def run() -> None:
        async with make_agent("ann") as ann, make_agent("bob", join=[ann.address]) as bob:
            await fill(ann, DOCUMENT)
            await shared(ann, bob)
            for number in range(3):
                filled = await fill(bob, prompt(number))
                assert filled.report.reused_tokens > 0 and filled.report.timings.total_s > 0
            assert foresight_of(bob).predictor.observations == 0
            go_on.set()
            await learned(bob, 3)

    asyncio.run(run())


def test_what_an_agent_has_learned_survives_it(make_agent: MakeAgent, tmp_path: Path, runner: ModelRunner) -> None:
    path = predictor_path(tmp_path / "cache", runner.spec.model_id)

    async def run() -> None:
        async with make_agent("ann") as ann:
            async with make_agent("bob", join=[ann.address]) as bob:
                await fill(ann, DOCUMENT)
                await shared(ann, bob)
                for number in range(3):
                    await fill(bob, prompt(number))
                await learned(bob, 3)
                assert not path.exists()
            assert path.exists()
            async with make_agent("bob", join=[ann.address]) as bob:
                assert foresight_of(bob).predictor.observations == 3

    asyncio.run(run())
    assert Predictor.load(path, runner.spec.model_id)[1] == ""


def test_a_corrupt_file_is_told_and_costs_nothing_else(
    make_agent: MakeAgent, tmp_path: Path, runner: ModelRunner, caplog: pytest.LogCaptureFixture
) -> None:
    path = predictor_path(tmp_path / "cache", runner.spec.model_id)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\xff" * 100)

    async def run() -> None:
        async with make_agent("ann") as ann:
            await fill(ann, DOCUMENT)
            await ann.settled()
            report = (await fill(ann, prompt(0), publish=False)).report
            assert report.reused_tokens > 0
            await learned(ann, 1)

    asyncio.run(run())
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert [path.name in message for message in warnings] == [True]
    assert Predictor.load(path, runner.spec.model_id)[0].observations == 1


@pytest.mark.parametrize("visibility", ["private", "group"])
def test_what_not_everybody_may_see_teaches_nothing(
    make_agent: MakeAgent, tmp_path: Path, runner: ModelRunner, visibility: str
) -> None:
    async def run() -> None:
        async with make_agent("ann", groups=["us"]) as ann:
            await fill(ann, DOCUMENT)
            await ann.settled()
            options = {"visibility": visibility} | ({"group": "us"} if visibility == "group" else {})
            # Not published: the next prompt would as soon take its run from there, and be no more public.
            assert (await fill(ann, prompt(0), publish=False, **options)).report.reused_tokens > 0
            assert (await fill(ann, prompt(1), publish=False)).report.reused_tokens > 0

    asyncio.run(run())
    path = predictor_path(tmp_path / "cache", runner.spec.model_id)
    assert Predictor.load(path, runner.spec.model_id)[0].observations == 1


def test_a_hopeless_run_is_recomputed_instead_of_repaired_and_rejected(
    make_agent: MakeAgent, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = with_profile(runner, replace(ANYTHING_GOES, divergence=SQUARES))
    repairs: list[int] = []
    monkeypatch.setattr(judged, "recompute", lambda *given, **options: repairs.append(1))

    async def run() -> None:
        async with make_agent("ann") as ann, make_agent("bob", join=[ann.address], model=judged) as bob:
            await fill(ann, DOCUMENT)
            await shared(ann, bob)
            foresight_of(bob)._predictor = Predicting(0.9)
            ours = await fill(bob, prompt(0))
            report = ours.report
            assert adds_up(report)
            assert repairs == [] and report.reused_tokens == 0
            assert report.fallback == "" and report.predicted_kl is None and report.runs == ()
            assert reasons(report) == {"divergence"}
            assert "predicted before its repair, 0.02 allowed" in report.misses[0].detail
            assert is_dense(ours, judged, prompt(0))
            await no_leaks(ann, bob)
            assert (await fill(bob, prompt(0))).report.exact_tokens == len(prompt(0)) - 1

    asyncio.run(run())


def test_the_same_run_would_otherwise_have_been_repaired_and_rejected(
    make_agent: MakeAgent, runner: ModelRunner
) -> None:
    judged = with_profile(runner, replace(ANYTHING_GOES, divergence=replace(SQUARES, intercept=9.0)))

    async def run() -> None:
        async with make_agent("ann") as ann, make_agent("bob", join=[ann.address], model=judged) as bob:
            await fill(ann, DOCUMENT)
            await shared(ann, bob)
            report = (await fill(bob, prompt(0))).report
            assert report.fallback and "residual" in reasons(report)
            # What was seen of it is learned all the same: that is how it comes to be refused.
            await learned(bob, 1)

    asyncio.run(run())


def test_a_profile_may_let_the_predictor_choose(make_agent: MakeAgent, runner: ModelRunner) -> None:
    chooser = with_profile(runner, replace(ANYTHING_GOES, selection="predictor"))

    async def run() -> None:
        async with make_agent("ann") as ann, make_agent("bob", join=[ann.address], model=chooser) as bob:
            await fill(ann, DOCUMENT)
            await shared(ann, bob)
            first = (await fill(bob, prompt(0), "balanced", publish=False)).report
            assert not any(span.why == CHOSEN_WHY for span in first.spans)  # a fresh one chooses the head
            foresight_of(bob)._predictor = Predicting(0.01, slice(100, 116))
            ours = await fill(bob, prompt(0))
            report, seen = ours.report, only_run(ours.report)
            assert adds_up(report)
            [chosen] = [span for span in report.spans if span.why == CHOSEN_WHY]
            assert (chosen.start, chosen.end, chosen.kind) == (130, 146, "recompute")
            assert (seen.head_tokens, seen.probes) == (16, only_run(first).probes)
            assert report.recomputed_tokens == first.recomputed_tokens
            assert report.predicted_kl is not None and seen.deviation is not None
            # What was chosen was computed: only what stands before it makes it wrong still.
            full, _ = dense(chooser, prompt(0))
            off = (rows(ours.cache, 0, 286)[1] - rows(full, 0, 286)[1]).abs().amax(dim=(0, 1, 3))
            assert float(off[30]) > 1e-3 and float(off[146]) > 1e-3
            assert float(off[130:146].mean()) < float(off[100:130].mean())

    asyncio.run(run())
