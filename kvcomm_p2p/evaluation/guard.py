"""Can the guard be trusted? What it predicts against what is measured, and what slips through.

Many prompts of every kind, none of which profiles are calibrated on, go the engine's way: repairs by provenance, the guard's
prediction, longer heads or dense prefill where it asks for them. A request *slips through* when its measured divergence is
above LIMIT_KL although the guard let it pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvcomm_p2p.errors import UsageError
from kvcomm_p2p.evaluation.cases import Scenario, cases
from kvcomm_p2p.evaluation.methods import Guarded, Laboratory
from kvcomm_p2p.evaluation.progress import stepping
from kvcomm_p2p.evaluation.results import Result, Row
from kvcomm_p2p.model.runner import ModelRunner
from kvcomm_p2p.planning.types import Mode
from kvcomm_p2p.reuse.guard import Verdict
from kvcomm_p2p.reuse.rules import profile_rules
from kvcomm_p2p.settings import Settings

if TYPE_CHECKING:
    from rich.console import Console

LIMIT_KL = 0.05
"""Nats per token of the answer."""

FACTOR = 3.0
"""A prediction is right when it is within this factor of what is measured."""

MIX = (
    Scenario.ROLE,
    Scenario.OTHER,
    Scenario.BARE,
    Scenario.REORDERED,
    Scenario.NEAR,
    Scenario.EDITED,
    Scenario.REORDERED_BARE,
    Scenario.TEXT,
    Scenario.LONG,
)
"""Kinds of prompts, in turn."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One request: its kind, what the guard said and predicted, and what was measured."""

    scenario: Scenario
    guarded: Guarded

    @property
    def kl(self) -> float:
        return self.guarded.outcome.divergence.kl_mean

    @property
    def reused(self) -> bool:
        return self.guarded.verdict is not Verdict.RECOMPUTE


def run(
    console: Console | None = None,
    *,
    model: str | ModelRunner = "smollm2-135m",
    requests: int = 500,
    tokens: int = 16,
    mode: Mode = Mode.BALANCED,
) -> Result:
    """`requests` prompts, each compared over `tokens` greedy tokens. About half an hour for 500 on two cores.

    Raises ModelError, and UsageError for a model without a profile.
    """
    if not isinstance(model, ModelRunner):
        model = ModelRunner.load(model, cache_dir=Settings.from_env().cache_dir)
    seen: list[Seen] = []
    with stepping(console, "guard", requests) as step:
        for each in watch(model, requests, tokens, mode):
            seen.append(each)
            step(each.scenario.value)
    return Result("bench guard", rows(seen), 0)


def watch(runner: ModelRunner, requests: int, tokens: int, mode: Mode) -> Iterator[Seen]:
    """The requests one by one, kinds mixed."""
    laboratory = Laboratory(runner)
    rules = profile_rules(runner.spec.profile, mode)
    if rules is None or runner.spec.profile is None:
        raise UsageError(f"no profile for {runner.spec.name}: run kvcomm calibrate first")
    each = -(-requests // len(MIX))
    streams = [cases(runner, scenario, each, held_out=True, tokens=tokens) for scenario in MIX]
    for number in range(requests):
        case = next(streams[number % len(MIX)])
        if case.runs:
            yield Seen(case.scenario, laboratory.planned(case, rules, runner.spec.profile.divergence))


def rows(seen: Sequence[Seen]) -> list[Row]:
    """Per kind and over all: how often the prediction holds, what slips through, what is prefilled for nothing."""
    table: list[Row] = []
    for name, chosen in [(s.value, [x for x in seen if x.scenario is s]) for s in MIX] + [("all requests", list(seen))]:
        if not chosen:
            continue
        n = len(chosen)
        kept = [each for each in chosen if each.reused]
        rejected = [each for each in chosen if not each.reused and each.guarded.predicted_kl is not None]
        slipped = sum(each.kl > LIMIT_KL for each in kept)
        table += [
            Row(name, f"above {LIMIT_KL} nats/token through the guard", 100 * slipped / n, "%", n),
            Row(name, "the same, upper 95 % bound", 100 * upper_bound(slipped, n), "%", n),
            Row(name, "reused", 100 * len(kept) / n, "%", n),
            Row(name, "longer heads asked for", 100 * sum(x.guarded.verdict is Verdict.WIDEN for x in kept) / n, "%", n),
            Row(name, "rejected after the repair", 100 * len(rejected) / n, "%", n),
        ]  # fmt: skip
        if kept:
            kl = [each.kl for each in kept]
            ratios = [abs(np.log(max(x.kl, 1e-5) / max(x.guarded.predicted_kl or 1e-5, 1e-5))) for x in kept]
            right = 100 * float(np.mean(np.array(ratios) <= np.log(FACTOR)))
            table += [
                Row(name, "KL of reused ones, mean", float(np.mean(kl)), "nats/token", len(kept)),
                Row(name, "KL of reused ones, largest", max(kl), "nats/token", len(kept)),
                Row(name, f"predicted within a factor of {FACTOR:.0f}", right, "%", len(kept)),
            ]
    return table


def upper_bound(events: int, trials: int) -> float:
    """One-sided 95 % upper bound of a proportion (Clopper-Pearson), by bisection of the binomial distribution."""
    low, high = events / trials, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        terms = np.cumsum(np.log(np.arange(trials, trials - events, -1) / np.arange(1, events + 1)))
        logs = np.array([0.0, *terms]) + np.arange(events + 1) * np.log(max(middle, 1e-300))
        logs += (trials - np.arange(events + 1)) * np.log1p(-min(middle, 1 - 1e-16))
        low, high = (middle, high) if float(np.exp(logs).sum()) > 0.05 else (low, middle)
    return high
