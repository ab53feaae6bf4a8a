"""How far answers from reused KV are from full prefill, and the measured profile that allows such reuse at all.

Every prompt is a real document behind one role's system prompt, whose KV was computed behind another role's. Controls
that must come out worse (rotation only) or broken (no rotation, wrong blocks) run on the same prompts, and exact prefix
reuse must give the same tokens as full prefill, always.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from kvcomm_p2p.errors import KVCommError, UsageError
from kvcomm_p2p.evaluation.documents import ROLES, Document, chat, cut_documents, questions, shortened
from kvcomm_p2p.evaluation.metrics import (
    Continuation,
    Divergence,
    continue_greedily,
    diverge,
    diverge_at_once,
    interval95,
)
from kvcomm_p2p.evaluation.progress import stepping
from kvcomm_p2p.evaluation.results import Result, Row
from kvcomm_p2p.evaluation.transplant import DonorCopy, Variant, copy_donor, plan_reuse, transplant
from kvcomm_p2p.model.cache import KVCache
from kvcomm_p2p.model.profiles import save_profile
from kvcomm_p2p.model.runner import ModelRunner
from kvcomm_p2p.model.spec import Profile
from kvcomm_p2p.planning.types import Mode, ReuseRules
from kvcomm_p2p.prompts import prepare
from kvcomm_p2p.settings import Settings

if TYPE_CHECKING:
    from rich.console import Console

KL_BUDGET = 0.02
"""Mean nats per token that the balanced mode may cost."""

GOOD_PROMPTS_MIN = 20
RESIDUAL_MARGIN = 1.5
HEAD_TOKENS = 32
RUN_TOKENS_MIN = 64
DOCUMENT_TOKENS = (400, 600, 800, 1000)
"""Lengths of the documents, in turn."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One prompt filled one way. `residual` None: no head was recomputed, so there is none to compare."""

    prompt_tokens: int
    recomputed_tokens: int
    divergence: Divergence
    residual: float | None


@dataclass(frozen=True, slots=True)
class Measured:
    """Everything that was measured: outcomes per variant, in the same order of prompts, and of exact prefix reuse."""

    reused: dict[Variant, list[Outcome]]
    exact: list[Outcome]


def run(
    console: Console | None = None,
    *,
    model: str | ModelRunner = "smollm2-135m",
    documents: int = 8,
    roles: int = 3,
    tokens: int = 32,
    seed: int = 0,
) -> Result:
    """Quality of reuse on `documents` x `roles` prompts, over `tokens` greedy tokens each. `roles` up to 5.

    Minutes on a CPU. Raises ModelError, and UsageError for a model whose keys cannot be moved.
    """
    runner = _runner(model)
    measured = measure(runner, console, documents=documents, roles=roles, tokens=tokens)
    return Result("bench quality", rows(measured, seed), seed)


def measure(
    runner: ModelRunner,
    console: Console | None = None,
    *,
    documents: int = 8,
    roles: int = 3,
    tokens: int = 32,
    document_tokens: Sequence[int] = DOCUMENT_TOKENS,
) -> Measured:
    """Fills every prompt in every variant and compares each with full prefill of the same prompt."""
    if runner.spec.rotary is None:
        raise UsageError(f"{runner.spec.name} allows exact reuse only: {runner.spec.exact_only_reason}")
    if not 1 <= roles < len(ROLES):
        raise UsageError(f"roles must be 1 to {len(ROLES) - 1}, not {roles}")
    donor_role, *readers = ROLES
    texts = _documents(runner, documents, document_tokens)
    asked = questions(documents + roles + 1)
    measured = Measured({variant: [] for variant in Variant}, [])
    with stepping(console, "quality", documents * (roles + 1)) as step:
        for number, document in enumerate(texts):
            ids = _token_ids(runner, donor_role, document, asked[number])
            copy = copy_donor(runner, ids, _prefilled(runner, ids, tokens)[0])
            follow_up = _token_ids(runner, donor_role, document, asked[number + 1])
            measured.exact.append(_exact(runner, follow_up, copy, tokens))
            step(document.title)
            for turn in range(roles):
                role = readers[(number + turn) % len(readers)]
                prompt = _token_ids(runner, role, document, asked[number + turn + 1])
                for variant, outcome in _variants(runner, prompt, copy, tokens).items():
                    measured.reused[variant].append(outcome)
                step(f"{document.title}, {role}")
    return measured


def rows(measured: Measured, seed: int) -> list[Row]:
    """The table: per variant KL, top-1, residual and share recomputed; for exact reuse the tokens that differ."""
    table: list[Row] = []
    for variant, outcomes in measured.reused.items():
        kl = [outcome.divergence.kl_mean for outcome in outcomes]
        top1 = [outcome.divergence.top1 for outcome in outcomes]
        share = [100 * outcome.recomputed_tokens / outcome.prompt_tokens for outcome in outcomes]
        residuals = [outcome.residual for outcome in outcomes if outcome.residual is not None]
        case, n = variant.value, len(outcomes)
        table += [
            Row(case, "KL from full prefill, mean", _mean(kl), "nats/token", n, interval95(kl, _mean, seed)),
            Row(case, "KL from full prefill, worst prompt", max(kl), "nats/token", n),
            Row(case, "same most likely token", _mean(top1), "", n, interval95(top1, _mean, seed)),
            Row(case, "prompt tokens recomputed, mean", _mean(share), "%", n),
        ]
        if residuals:
            table += [
                Row(case, "residual of the head, smallest", min(residuals), "", len(residuals)),
                Row(case, "residual of the head, largest", max(residuals), "", len(residuals)),
            ]
    compared = [outcome.divergence for outcome in measured.exact]
    tokens = sum(each.tokens for each in compared)
    table += [
        Row("exact prefix", "answers that differ", sum(each.identical_tokens < each.tokens for each in compared), "",
            len(compared)),
        Row("exact prefix", "tokens compared", tokens, "", len(compared)),
        Row("exact prefix", "KL from full prefill, largest", max(each.kl_max for each in compared), "nats", tokens),
    ]  # fmt: skip
    return table


def measure_profile(
    runner: ModelRunner,
    path: Path,
    console: Console | None = None,
    *,
    margin: float = RESIDUAL_MARGIN,
    documents: int = 8,
    roles: int = 3,
    tokens: int = 32,
) -> Profile:
    """Measures `runner`'s model and writes its profile to `path`.

    `residual_max` is `margin` x the largest residual of the head among prompts within the KL budget. Raises
    KVCommError, writing nothing, when reuse does not keep the budget on this model or the guard could not tell wrong
    blocks from good.
    """
    measured = measure(runner, console, documents=documents, roles=roles, tokens=tokens)
    profile = judge(measured, runner.spec.name, margin)
    save_profile(runner.spec.model_id, profile, path)
    return profile


def judge(measured: Measured, name: str, margin: float = RESIDUAL_MARGIN) -> Profile:
    """The profile that these measurements allow. Raises KVCommError saying what was not good enough."""
    repaired = measured.reused[Variant.REPAIRED]
    kl = _mean([outcome.divergence.kl_mean for outcome in repaired])
    top1 = _mean([outcome.divergence.top1 for outcome in repaired])
    if kl > KL_BUDGET:
        raise KVCommError(f"reuse costs {name} {kl:.4f} nats/token, more than {KL_BUDGET}: it keeps exact reuse only")
    good = [
        outcome.residual
        for outcome in repaired
        if outcome.residual is not None and outcome.divergence.kl_mean <= KL_BUDGET
    ]
    if len(good) < GOOD_PROMPTS_MIN:
        raise KVCommError(
            f"only {len(good)} prompts kept the budget, {GOOD_PROMPTS_MIN} are needed: measure more of them"
        )
    residual_max = margin * max(good)
    wrong = [outcome.residual for outcome in measured.reused[Variant.WRONG_BLOCKS] if outcome.residual is not None]
    if not wrong or not residual_max < min(wrong):
        raise KVCommError(
            f"the guard cannot tell good from wrong blocks on {name}: {margin} x {max(good):.3f} is not below "
            f"{min(wrong, default=float('nan')):.3f}"
        )
    lengths = f"{min(DOCUMENT_TOKENS)} to {max(DOCUMENT_TOKENS)} tokens"
    greedy = max(outcome.divergence.tokens for outcome in repaired)
    return Profile(
        head_tokens=HEAD_TOKENS,
        run_tokens_min=RUN_TOKENS_MIN,
        residual_max=round(residual_max, 4),
        measured=(
            f"{date.today().isoformat()}, {len(repaired)} prompts: documents of {lengths} from the Python reference, "
            f"copied from behind another role's system prompt; {greedy} greedy tokens each: KL {kl:.4f} nats/token, "
            f"top-1 {top1:.3f}; residual of good prompts at most {max(good):.4f}, times {margin}; of wrong blocks at "
            f"least {min(wrong):.4f}"
        ),
    )


def _variants(runner: ModelRunner, ids: npt.NDArray[np.uint32], copy: DonorCopy, tokens: int) -> dict[Variant, Outcome]:
    full = _full(runner, ids, tokens)
    rules = ReuseRules(approximate=True, reason="", head_tokens=HEAD_TOKENS, run_tokens_min=RUN_TOKENS_MIN)
    plan = plan_reuse(runner, ids, copy, Mode.BALANCED, rules)
    outcomes = {}
    for variant in Variant:
        filled = transplant(runner, ids, plan, copy, variant)
        divergence = diverge_at_once(runner, full, filled.cache, filled.logits)
        outcomes[variant] = Outcome(len(ids), filled.recomputed_tokens, divergence, filled.residual)
    return outcomes


def _exact(runner: ModelRunner, ids: npt.NDArray[np.uint32], copy: DonorCopy, tokens: int) -> Outcome:
    full = _full(runner, ids, tokens)
    plan = plan_reuse(
        runner, ids, copy, Mode.EXACT, ReuseRules(approximate=False, reason="exact prefixes are measured")
    )
    filled = transplant(runner, ids, plan, copy, Variant.REPAIRED)
    return Outcome(len(ids), filled.recomputed_tokens, diverge(runner, full, filled.cache, filled.logits), None)


def _full(runner: ModelRunner, ids: npt.NDArray[np.uint32], tokens: int) -> Continuation:
    return continue_greedily(runner, *_prefilled(runner, ids, tokens), tokens)


def _prefilled(runner: ModelRunner, ids: npt.NDArray[np.uint32], tokens: int) -> tuple[KVCache, torch.Tensor]:
    cache = runner.new_cache(len(ids) + tokens)
    assert isinstance(cache, KVCache)
    return cache, runner.prefill(ids.astype(np.int64), cache)


def _documents(runner: ModelRunner, count: int, lengths: Sequence[int]) -> list[Document]:
    """Documents of the given lengths in turn: beginnings of long ones that share nothing."""
    long = cut_documents(runner.tokenizer, max(lengths), count)
    return [shortened(runner.tokenizer, document, lengths[index % len(lengths)]) for index, document in enumerate(long)]


def _token_ids(runner: ModelRunner, role: str, document: Document, question: str) -> npt.NDArray[np.uint32]:
    return prepare(runner.tokenizer, chat(role, question), {"document": document.text}).token_ids


def _runner(model: str | ModelRunner) -> ModelRunner:
    if isinstance(model, ModelRunner):
        return model
    return ModelRunner.load(model, cache_dir=Settings.from_env().cache_dir)


def _mean(values: Sequence[float] | npt.NDArray[np.float64]) -> float:
    return float(np.mean(values))
