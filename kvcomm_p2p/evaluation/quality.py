"""How far answers from reused KV are from full prefill: our repairs, others' rules at equal cost, and controls that must fail.

The prompts share no text with those that profiles are calibrated on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvcomm_p2p.errors import UsageError
from kvcomm_p2p.evaluation.cases import Case, Scenario, cases
from kvcomm_p2p.evaluation.documents import load_gsm8k
from kvcomm_p2p.evaluation.methods import Laboratory, Outcome, plan_of
from kvcomm_p2p.evaluation.metrics import interval95
from kvcomm_p2p.evaluation.progress import stepping
from kvcomm_p2p.evaluation.results import Result, Row
from kvcomm_p2p.model.runner import ModelRunner
from kvcomm_p2p.planning.types import Mode, Repair, ReuseRules
from kvcomm_p2p.reuse.rules import profile_rules
from kvcomm_p2p.settings import Settings

if TYPE_CHECKING:
    from rich.console import Console

SHARES: Mapping[Scenario, tuple[float, ...]] = {
    Scenario.NEAR: (0.05,),
    Scenario.ROLE: (0.10,),
    Scenario.TEXT: (0.10,),
    Scenario.BARE: (0.15,),
    Scenario.OTHER: (0.15,),
    Scenario.REORDERED: (0.15, 0.30),
    Scenario.REORDERED_BARE: (0.15, 0.30),
    Scenario.LONG: (0.15,),
    Scenario.EDITED: (0.10,),
    Scenario.SHORT: (0.0, 0.30),
}
"""Shares of the reusable tokens that are recomputed."""

BASELINE = "first tokens"

HOLES = (0, 3, 5)
"""Longest holes, in tokens, that are interpolated where a document was edited."""


def run(
    console: Console | None = None,
    *,
    model: str | ModelRunner = "smollm2-135m",
    prompts: int = 30,
    tokens: int = 24,
    seed: int = 0,
    scenarios: Sequence[Scenario] = tuple(Scenario),
    gsm8k: Path | None = None,
) -> Result:
    """Every method on `prompts` prompts per scenario, over `tokens` greedy tokens each. `gsm8k`: problems and solutions for
    the short blocks. About an hour on two cores for all of it. Raises ModelError, ConfigError for an unreadable file, and
    UsageError for a model whose keys cannot be moved or too few problems.
    """
    runner = model if isinstance(model, ModelRunner) else _load(model)
    if runner.spec.rotary is None:
        raise UsageError(f"{runner.spec.name} allows exact reuse only: {runner.spec.exact_only_reason}")
    problems = load_gsm8k(gsm8k) if gsm8k is not None else ()
    rows: list[Row] = []
    made = {
        scenario: cases(runner, scenario, prompts, held_out=True, tokens=tokens, problems=problems)
        for scenario in scenarios
    }
    with stepping(console, "quality", prompts * len(made)) as step:
        for scenario, each in made.items():
            laboratory = Laboratory(runner)
            measured: list[dict[str, Outcome]] = []
            for number, case in enumerate(each):
                measured.append(_measured(laboratory, case, SHARES[scenario], seed + number))
                laboratory.remember(case)
                step(scenario.value)
            names = dict.fromkeys(name for outcomes in measured for name in outcomes)
            rows += table(scenario, {name: [outcomes.get(name) for outcomes in measured] for name in names}, seed)
    return Result("bench quality", rows, seed)


def table(scenario: Scenario, outcomes: Mapping[str, Sequence[Outcome | None]], seed: int) -> list[Row]:
    """Per method: KL with its confidence interval and, where both were measured at the same share, how many times less it is
    than that of the first tokens (geometric mean over prompts, so 2 is half of it). `outcomes`: one per prompt, in the
    same order for all methods, None where a method was not measured."""
    rows: list[Row] = []
    for name, each in outcomes.items():
        found = [outcome for outcome in each if outcome is not None]
        kl = [outcome.divergence.kl_mean for outcome in found]
        top1 = [outcome.divergence.top1 for outcome in found]
        case, n = f"{scenario.value}: {name}", len(found)
        rows += [
            Row(case, "KL from full prefill, mean", _mean(kl), "nats/token", n, interval95(kl, _mean, seed)),
            Row(case, "KL, worst prompt", max(kl), "nats/token", n),
            Row(case, "same most likely token", _mean(top1), "", n, interval95(top1, _mean, seed)),
            Row(case, "reusable tokens recomputed", 100 * _mean([outcome.cost for outcome in found]), "%", n),
        ]
        base = outcomes.get(f"{BASELINE}, {name.rpartition(', ')[2]}")
        if base is not None and base is not each:
            ratio = [
                float(np.log(max(theirs.divergence.kl_mean, 1e-6) / max(ours.divergence.kl_mean, 1e-6)))
                for theirs, ours in zip(base, each, strict=True)
                if theirs is not None and ours is not None
            ]
            interval = interval95(ratio, _mean, seed)
            low_high = None if interval is None else (float(np.exp(interval[0])), float(np.exp(interval[1])))
            times = float(np.exp(_mean(ratio)))
            rows.append(Row(case, "times less KL than the first tokens", times, "", len(ratio), low_high))
    return rows


def _measured(laboratory: Laboratory, case: Case, shares: Sequence[float], seed: int) -> dict[str, Outcome]:
    if not case.runs:
        return {}
    found = {"noise: full prefill in two halves": laboratory.noise(case)}
    for mode in (Mode.BALANCED, Mode.FAST):
        rules = profile_rules(laboratory.profile, mode)
        if rules is not None and laboratory.profile is not None:
            found[f"kvcomm {mode.value}"] = laboratory.planned(case, rules, laboratory.profile.divergence).outcome
    if case.scenario is Scenario.EDITED:
        for tokens in HOLES:
            rules = ReuseRules(approximate=True, reason="", interpolated_tokens=tokens)
            plan = plan_of(case, [Repair(32)] * len(case.runs), rules)
            done = f"holes up to {tokens} tokens interpolated" if tokens else "holes recomputed"
            found[f"first 32 tokens, {done}"] = laboratory.carried_out(case, plan)
    for share in shares:
        for name, filling in laboratory.methods(case, share, seed).items():
            free = not len(filling.rows)
            label = name if free else f"{name}, {share:.0%}"
            if label not in found:
                found[label] = laboratory.compare(case, filling)
    return found


def _load(model: str) -> ModelRunner:
    return ModelRunner.load(model, cache_dir=Settings.from_env().cache_dir)


def _mean(values: Sequence[float] | npt.NDArray[np.float64]) -> float:
    return float(np.mean(values))
