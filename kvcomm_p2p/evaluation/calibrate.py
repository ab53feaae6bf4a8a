"""Measures a model's profile: how far each repair of each kind of copy is from full prefill, and what predicts it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvcomm_p2p.errors import ConfigError, KVCommError, UsageError
from kvcomm_p2p.evaluation.calibrate_short import judge_short, measure_short, rows_short
from kvcomm_p2p.evaluation.cases import LENGTH_MIN, Case, Scenario, cases
from kvcomm_p2p.evaluation.documents import load_gsm8k
from kvcomm_p2p.evaluation.encoding import divergence_rows, measure_int8, profile_kl
from kvcomm_p2p.evaluation.methods import Laboratory, Outcome, plan_of
from kvcomm_p2p.evaluation.metrics import interval95
from kvcomm_p2p.evaluation.progress import stepping
from kvcomm_p2p.evaluation.results import Result, Row
from kvcomm_p2p.model.profiles import save_profile
from kvcomm_p2p.model.runner import ModelRunner
from kvcomm_p2p.model.spec import Profile
from kvcomm_p2p.planning.divergence import Symptoms, fit_divergence
from kvcomm_p2p.planning.plan import KL_MAX
from kvcomm_p2p.planning.repairs import repaired_tokens
from kvcomm_p2p.planning.types import Mode, Provenance, Repair, ReuseRules
from kvcomm_p2p.reuse.rules import GUARD_PROBES
from kvcomm_p2p.settings import Settings

if TYPE_CHECKING:
    from rich.console import Console

PROMPTS = 12
"""Of each kind of copy; fewer of those in SEVERAL."""

PROMPTS_MIN = 8
"""Of all kinds together: fewer do not determine a fit."""

OPTIONS = (
    Repair(8),
    Repair(32),
    Repair(64),
    Repair(96),
    Repair(16, 0.10, True),
    Repair(32, 0.10, True),
    Repair(32, 0.20, True),
)
"""Repairs that are tried, of every kind of copy."""

KINDS = {
    Scenario.NEAR: (Provenance.SAME, Provenance.NEAR),
    Scenario.ROLE: (Provenance.ROLE,),
    Scenario.BARE: (Provenance.BARE,),
    Scenario.TEXT: (Provenance.TEXT,),
    Scenario.OTHER: (Provenance.OTHER,),
}
"""Which provenance the single runs of a scenario have."""

SEVERAL = {Scenario.REORDERED: 2, Scenario.REORDERED_BARE: 2, Scenario.LONG: 3, Scenario.EDITED: 3}
"""Prompts of several runs, often of several provenances: one for so many of the others."""

KL_USEFUL = 0.05
"""A repair that leaves more than this (nats/token) is of no use in any mode."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt repaired one way. `shares`: of the prompt's tokens, how much its runs of each provenance hold; `tokens`: of
    them that are recomputed."""

    scenario: Scenario
    repair: Repair
    outcome: Outcome
    shares: Mapping[Provenance, float]
    tokens: float

    @property
    def kl(self) -> float:
        return self.outcome.divergence.kl_mean


def run(
    console: Console | None = None,
    *,
    model: str | ModelRunner = "smollm2-135m",
    prompts: int = PROMPTS,
    tokens: int = 24,
    save_to: Path | None = None,
    gsm8k: Path | None = None,
) -> Result:
    """Measures on `prompts` prompts of each kind, compared over `tokens` greedy tokens each, writes the profile to `save_to`
    (default: `profile_path` in the user's cache) and returns what was measured. About a quarter of an hour for a small model
    on two cores. `gsm8k`: problems and solutions, on which short runs are measured instead of on short documents.

    Raises ModelError; ConfigError where nothing can be written, or for problems that cannot be read; UsageError for a model
    whose keys cannot be moved; KVCommError, writing nothing, when reuse does not keep any budget on this model or the guard
    could not tell wrong blocks from good.
    """
    cache_dir = Settings.from_env().cache_dir
    runner = model if isinstance(model, ModelRunner) else ModelRunner.load(model, cache_dir=cache_dir)
    path = save_to or profile_path(runner, cache_dir)
    _refuse_unwritable(path)
    problems = load_gsm8k(gsm8k) if gsm8k is not None else ()
    samples, wrong = measure(runner, console, prompts=prompts, tokens=tokens)
    profile = judge(samples, wrong, runner.spec.name)
    short = measure_short(runner, console, prompts=prompts, tokens=tokens, problems=problems)
    int8 = measure_int8(runner, prompts, tokens)
    profile = replace(profile, short=judge_short(short), int8=profile_kl(int8))
    save_profile(runner.spec.model_id, profile, path)
    return Result(
        "calibrate",
        [*rows(samples, wrong, profile), *rows_short(short), *divergence_rows("wholly as int8", int8, 0)],
        0,
    )


def profile_path(runner: ModelRunner, cache_dir: Path) -> Path:
    """Where nodes with this cache folder look for the model's profile."""
    return cache_dir / "profiles" / f"{runner.spec.model_id.hex()}.json"


def measure(
    runner: ModelRunner, console: Console | None = None, *, prompts: int = PROMPTS, tokens: int = 24
) -> tuple[list[Sample], list[Symptoms]]:
    """All repairs on all kinds of copies; and what wrong blocks show to the guard. Raises UsageError for a model whose keys
    cannot be moved."""
    if runner.spec.rotary is None:
        raise UsageError(f"{runner.spec.name} allows exact reuse only: {runner.spec.exact_only_reason}")
    laboratory = Laboratory(runner)
    samples: list[Sample] = []
    wrong: list[Symptoms] = []
    planned = [
        *((scenario, prompts) for scenario in KINDS),
        *((scenario, max(1, prompts // rarer)) for scenario, rarer in SEVERAL.items()),
    ]
    with stepping(console, "calibrate", sum(count for _, count in planned)) as step:
        for scenario, count in planned:
            for case in cases(runner, scenario, count, tokens=tokens):
                if case.runs:
                    samples += [_sample(laboratory, case, repair) for repair in OPTIONS]
                    if scenario is Scenario.ROLE:
                        wrong += _wrong(laboratory, case)
                step(scenario.value)
    return samples, wrong


def judge(samples: Sequence[Sample], wrong: Sequence[Symptoms], name: str) -> Profile:
    """The profile that these measurements allow; `name`: the model's. Raises KVCommError saying what was not good enough."""
    repairs = _useful(samples)
    if Provenance.ROLE not in repairs and Provenance.NEAR not in repairs:
        raise KVCommError(f"no repair keeps {KL_USEFUL} nats/token on {name}: it keeps exact reuse only")
    seen = [(sample.outcome.symptoms, sample.kl) for sample in samples if sample.outcome.symptoms is not None]
    prompts = len(seen) // len(OPTIONS)
    if prompts < PROMPTS_MIN or not wrong:
        raise KVCommError(f"{prompts} prompts were compared, {PROMPTS_MIN} are needed at least: measure more of them")
    fit = fit_divergence([symptom for symptom, _ in seen], [kl for _, kl in seen])
    least = min(fit.kl(symptom) for symptom in wrong)
    if not least > KL_MAX[Mode.FAST]:
        raise KVCommError(
            f"the guard cannot tell wrong blocks from good ones on {name}: it predicts {least:.3g} nats/token for them"
        )
    told = ", ".join(f"{kind.name.lower()} {options[-1].kl:.4f}" for kind, options in sorted(repairs.items()))
    measured = (
        f"{date.today().isoformat()}, {prompts} prompts of the Python reference: least KL by provenance (nats/token of a "
        f"wholly reused prompt) {told}; predicted within a factor of {np.exp(1.645 * fit.spread):.1f} in 90 %; wrong blocks "
        f"are predicted at {least:.2g} at least"
    )
    return Profile(LENGTH_MIN, MappingProxyType(repairs), fit, measured)


def rows(samples: Sequence[Sample], wrong: Sequence[Symptoms], profile: Profile) -> list[Row]:
    """What was measured, per scenario and repair, and how well the divergence is predicted."""
    table: list[Row] = []
    for scenario in Scenario:
        for repair in OPTIONS:
            chosen = [sample for sample in samples if (sample.scenario, sample.repair) == (scenario, repair)]
            if not chosen:
                continue
            kl, case = [sample.kl for sample in chosen], f"{scenario.value}: {describe(repair)}"
            interval = interval95(kl, _mean, 0)
            tokens = float(np.mean([sample.tokens for sample in chosen]))
            table += [
                Row(case, "KL from full prefill, mean", float(np.mean(kl)), "nats/token", len(kl), interval),
                Row(case, "tokens recomputed", tokens, "", len(kl)),
            ]
    errors = [
        abs(np.log(max(sample.kl, 1e-5) / profile.divergence.kl(sample.outcome.symptoms)))
        for sample in samples
        if sample.outcome.symptoms is not None
    ]
    within = 100 * float(np.mean(np.array(errors) <= np.log(3)))
    table.append(Row("guard", "predicted within a factor of 3", within, "%", len(errors)))
    least = min(profile.divergence.kl(symptom) for symptom in wrong)
    table.append(Row("guard", "least prediction for wrong blocks", least, "nats/token", len(wrong)))
    return table


def describe(repair: Repair) -> str:
    """A repair in a few words."""
    probes = f", probes {repair.probe_share:.0%}" if repair.probe_share else ""
    return f"head {repair.head_tokens}{probes}{' and shift' if repair.shift else ''}"


def _refuse_unwritable(path: Path) -> None:
    """Before minutes of measuring rather than after; makes no folder."""
    folder = next(each for each in path.absolute().parents if each.exists())
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"the profile {path} cannot be written: name a file in a folder that you may write to")


def _sample(laboratory: Laboratory, case: Case, repair: Repair) -> Sample:
    rules = ReuseRules(approximate=True, reason="", guard_probes=GUARD_PROBES)
    outcome = laboratory.carried_out(case, plan_of(case, [repair] * len(case.runs), rules))
    tokens = sum(repaired_tokens(run, repair, rules) for run in case.runs)
    shares: dict[Provenance, float] = {}
    for run in case.runs:
        shares[run.provenance] = shares.get(run.provenance, 0.0) + run.tokens / len(case.token_ids)
    return Sample(case.scenario, repair, outcome, shares, tokens)


def _wrong(laboratory: Laboratory, case: Case) -> list[Symptoms]:
    rules = ReuseRules(approximate=True, reason="", guard_probes=GUARD_PROBES)
    outcome = laboratory.carried_out(case, plan_of(case, [Repair(32)] * len(case.runs), rules), wrong_blocks=True)
    return [outcome.symptoms] if outcome.symptoms is not None else []


def _useful(samples: Sequence[Sample]) -> dict[Provenance, tuple[Repair, ...]]:
    """Per provenance the repairs with what each leaves of a wholly reused prompt, by cost, without those that a cheaper one
    beats. Nothing was ever seen of a copy from the same context: it counts as one from nearly the same."""
    seen = sorted({provenance for sample in samples for provenance in sample.shares})
    measured: dict[Provenance, list[tuple[float, Repair]]] = {provenance: [] for provenance in seen}
    for option in OPTIONS:
        # What edits bring is no matter of provenance: those prompts are for the fit alone.
        chosen = [sample for sample in samples if sample.repair == option and sample.scenario is not Scenario.EDITED]
        if not chosen:
            continue
        shares = np.array([[sample.shares.get(provenance, 0.0) for provenance in seen] for sample in chosen])
        for column, (provenance, kl) in enumerate(zip(seen, _parts(shares, [s.kl for s in chosen]), strict=True)):
            cost = np.average([sample.tokens for sample in chosen], weights=shares[:, column] + 1e-9)
            measured[provenance].append((float(cost), replace(option, kl=round(float(kl), 6))))
    kept: dict[Provenance, tuple[Repair, ...]] = {}
    for provenance, options in measured.items():
        useful: list[Repair] = []
        for _, repair in sorted(options, key=lambda pair: pair[0]):
            if repair.kl <= KL_USEFUL and (not useful or repair.kl < useful[-1].kl):
                useful.append(repair)
        if useful:
            kept[provenance] = tuple(useful)
    if Provenance.NEAR in kept:
        kept.setdefault(Provenance.SAME, kept[Provenance.NEAR])
    return kept


def _parts(shares: npt.NDArray[np.float64], kl: Sequence[float]) -> npt.NDArray[np.float64]:
    """What each provenance brings [P], none below 0, so that its shares [n, P] of n prompts add up to their KL as well as can
    be (non-negative least squares, by coordinate descent)."""
    x, left = np.zeros(shares.shape[1]), np.array(kl, dtype=np.float64)
    sizes = np.maximum((shares**2).sum(axis=0), 1e-12)
    for _ in range(500):
        for column, size in enumerate(sizes):
            better = max(0.0, x[column] + float(shares[:, column] @ left) / size)
            left += shares[:, column] * (x[column] - better)
            x[column] = better
    return x


def _mean(values: Sequence[float] | np.ndarray) -> float:
    return float(np.mean(values))
