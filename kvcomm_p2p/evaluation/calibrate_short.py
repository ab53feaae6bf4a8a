"""Measures what short runs cost that are corrected from memory, against leaving them as they were moved.

Short blocks of many texts, all moved between the same two templates; each is corrected by what was remembered of those before
it, as an agent does it. Longer blocks beside them are recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from kvcomm_p2p.evaluation.cases import BLOCKS_TOKENS, LENGTH_MIN, Case, Scenario, cases
from kvcomm_p2p.evaluation.documents import Problem
from kvcomm_p2p.evaluation.methods import Laboratory, plan_of
from kvcomm_p2p.evaluation.metrics import interval95
from kvcomm_p2p.evaluation.progress import stepping
from kvcomm_p2p.evaluation.results import Row
from kvcomm_p2p.model.runner import ModelRunner
from kvcomm_p2p.planning.types import Provenance, Repair, ReuseRules
from kvcomm_p2p.reuse.deviations import Deviation
from kvcomm_p2p.reuse.recall import MEMORY_TOKENS_MIN
from kvcomm_p2p.reuse.rules import GUARD_PROBES

if TYPE_CHECKING:
    from rich.console import Console

KL_SHORT_MAX = 0.02
"""Short runs that leave more than this (nats/token of a wholly reused prompt) are recomputed."""

SAMPLES_MIN = 6
"""Fewer prompts of a provenance do not tell what memory is worth there."""

CORRECTED = Repair(0, memory=True)
RULES = ReuseRules(approximate=True, reason="", guard_probes=GUARD_PROBES)


@dataclass(frozen=True, slots=True)
class ShortSample:
    """One prompt whose short runs, `share` of its tokens, were moved: `kl` corrected from memory, `kl_moved` left as they were,
    nats per token. `provenance`: the worst of theirs."""

    provenance: Provenance
    share: float
    kl: float
    kl_moved: float


def measure_short(
    runner: ModelRunner,
    console: Console | None = None,
    *,
    prompts: int,
    tokens: int = 24,
    problems: Sequence[Problem] = (),
) -> list[ShortSample]:
    """On `prompts` prompts, compared over `tokens` greedy tokens each, after as many more as it takes to remember enough.
    `problems`: as for `cases`; they are taken as far as they go.

    What is too unlike what is remembered is not counted: an agent recomputes it.
    """
    laboratory = Laboratory(runner)
    memory: list[Deviation] = []
    found: list[ShortSample] = []
    count = prompts + -(-MEMORY_TOKENS_MIN // min(BLOCKS_TOKENS))
    if problems:
        count = min(count, len(problems))
    short_cases = cases(runner, Scenario.SHORT, count, tokens=tokens, problems=problems, one_template=True)
    with stepping(console, "calibrate", count) as step:
        for case in short_cases:
            short = short_runs(case)
            if short is not None:
                if len(found) < prompts and sum(each.tokens for each in memory) >= MEMORY_TOKENS_MIN:
                    found += _sample(laboratory, short, memory)
                memory += laboratory.deviations(short)
            step("short runs, corrected from memory")
    return found


def short_runs(case: Case) -> Case | None:
    """The case with each of its pieces that is shorter than a run as a run of its own, and nothing else; None without any."""
    runs = [
        replace(run, pieces=(piece,))
        for run in case.runs
        for piece in run.pieces
        if RULES.short_tokens_min <= piece.length < LENGTH_MIN
    ]
    return replace(case, runs=tuple(runs)) if runs else None


def judge_short(samples: Sequence[ShortSample]) -> dict[Provenance, float]:
    """`Profile.short`: the mean divergence of each provenance where it is at most KL_SHORT_MAX, and less than without memory."""
    kept: dict[Provenance, float] = {}
    for provenance in sorted({sample.provenance for sample in samples}):
        chosen = [sample for sample in samples if sample.provenance is provenance]
        kl, moved = (_wholly(chosen, name) for name in ("kl", "kl_moved"))
        if len(chosen) >= SAMPLES_MIN and kl <= KL_SHORT_MAX and kl < moved:
            kept[provenance] = round(kl, 6)
    return kept


def rows_short(samples: Sequence[ShortSample]) -> list[Row]:
    """What was measured, in nats per token of a wholly reused prompt."""
    table: list[Row] = []
    for provenance in sorted({sample.provenance for sample in samples}):
        chosen = [sample for sample in samples if sample.provenance is provenance]
        for name, told in (("kl", "corrected from memory"), ("kl_moved", "moved only")):
            each = [getattr(sample, name) / sample.share for sample in chosen]
            case = f"short runs, {provenance.name.lower()}: {told}"
            interval = interval95(each, lambda values: float(np.mean(values)), 0)
            table.append(
                Row(case, "KL if wholly reused, mean", float(np.mean(each)), "nats/token", len(each), interval)
            )
    return table


def _sample(laboratory: Laboratory, case: Case, memory: Sequence[Deviation]) -> list[ShortSample]:
    plan = plan_of(case, [CORRECTED] * len(case.runs), RULES)
    corrected = laboratory.corrected(case, plan, memory)
    if corrected is None:
        return []
    moved = laboratory.carried_out(case, plan)
    worst = max(run.provenance for run in case.runs)
    share = float(case.reusable.mean())
    return [ShortSample(worst, share, corrected.divergence.kl_mean, moved.divergence.kl_mean)]


def _wholly(samples: Sequence[ShortSample], name: str) -> float:
    return float(np.mean([getattr(sample, name) / sample.share for sample in samples]))
