"""Controls for `kvcomm eval`: the same prompts filled in other ways, at the cost that the mode under test had.

Each prompt takes over the runs that it shares with one earlier prompt of the workload, the one it shares most with, whose KV is
computed for the purpose. So the controls tell how methods differ on the prompts of a workload, not what the cluster held.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcomm_p2p.evaluation.cases import LENGTH_MIN, Scenario, compared
from kvcomm_p2p.evaluation.cases import Case as PromptCase
from kvcomm_p2p.evaluation.methods import Laboratory, Outcome
from kvcomm_p2p.evaluation.results import Row
from kvcomm_p2p.evaluation.scores import Sample
from kvcomm_p2p.evaluation.summary import Case, divergence_rows
from kvcomm_p2p.model.runner import ModelRunner
from kvcomm_p2p.planning.runs import find_runs

PROMPTS_MAX = 8
"""Prompts per workload and mode that the controls are measured on."""

COST_MIN = 0.05
"""Share of the reusable tokens that the controls recompute at least."""

CONTINUED_TOKENS = 24

NAMES = {
    "noise": "full prefill in two halves",
    "rotation only": "rotation only",
    "control: no rotation": "no rotation",
    "control: wrong blocks": "wrong blocks",
    "random tokens": "random tokens, equal budget",
    "first tokens": "first tokens, equal budget",
    "CacheBlend's rule (keys)": "CacheBlend's rule, equal budget",
    "LSTM predictor": "LSTM predictor, equal budget",
    "KVCOMM's anchors": "KVCOMM's anchors",
    "nearest tokens' deviations": "nearest tokens' deviations",
}


def control_rows(runner: ModelRunner, case: Case) -> list[Row]:
    """The controls of one workload in one mode: `Controls` of `evaluation.eval`. Nothing where nothing was shared."""
    if runner.spec.rotary is None:
        return []
    laboratory = Laboratory(runner)
    found: dict[str, list[Outcome]] = {}
    samples = [sample for sample in case.samples if not sample.cold]
    share = max(COST_MIN, _share(samples))
    for sample in samples[:: max(1, len(samples) // PROMPTS_MAX)][:PROMPTS_MAX]:
        prompt = _case(runner, sample, case.samples[: sample.number])
        if prompt is None:
            continue
        found.setdefault("noise", []).append(laboratory.noise(prompt))
        for name, filling in laboratory.methods(prompt, share, sample.number).items():
            if name in NAMES:
                found.setdefault(name, []).append(laboratory.compare(prompt, filling))
        laboratory.remember(prompt)
    rows: list[Row] = []
    for name, outcomes in found.items():
        kl = [outcome.divergence.kl for outcome in outcomes]
        label = f"{case.name}, {NAMES[name]}"
        rows += divergence_rows(label, kl, [outcome.divergence.top1 for outcome in outcomes], 0)
        cost = 100 * float(np.mean([outcome.cost for outcome in outcomes]))
        rows.append(Row(label, "reusable tokens recomputed", cost, "%", len(outcomes)))
    return rows


def _share(samples: Sequence[Sample]) -> float:
    """What the mode recomputed of what it could have reused."""
    covered = sum(sample.covered_tokens for sample in samples)
    reused = sum(sample.prompt_tokens - sample.recomputed_tokens for sample in samples)
    return min(0.5, max(0.0, 1 - reused / covered)) if covered else 0.0


def _case(runner: ModelRunner, sample: Sample, earlier: Sequence[Sample]) -> PromptCase | None:
    """The sample's prompt, with the earlier prompt of another agent that it shares most with as its donor."""
    best, shared = None, 0
    for other in earlier:
        if other.agent != sample.agent:
            runs = find_runs(sample.prompt_ids, other.prompt_ids, length_min=LENGTH_MIN)
            tokens = sum(run.length for run in runs)
            if tokens > shared:
                best, shared = other, tokens
    if best is None:
        return None
    made = compared(runner, Scenario.OTHER, sample.prompt_ids, [best.prompt_ids], LENGTH_MIN, CONTINUED_TOKENS)
    return made if made.runs else None
