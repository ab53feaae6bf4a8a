"""What KV as int8 saves and costs: bytes, speed of encoding and decoding, and divergence of the answers.

Divergence is measured twice. *Wholly as int8*: all rows of a full prefill but the last token's went through int8 and back,
so that nothing else differs from full prefill; that is what a profile holds (`Profile.int8`). *On top of a plan*: the same
repaired plan with copies that travelled raw, and as int8.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kvcomm_p2p.errors import UsageError
from kvcomm_p2p.evaluation.cases import Case, DonorCopy, Scenario, cases
from kvcomm_p2p.evaluation.methods import COSTS_EVEN, Laboratory, plan_of
from kvcomm_p2p.evaluation.metrics import Divergence, diverge_at_once, interval95
from kvcomm_p2p.evaluation.progress import stepping
from kvcomm_p2p.evaluation.results import Result, Row
from kvcomm_p2p.model.cache import KVCache
from kvcomm_p2p.model.runner import ModelRunner
from kvcomm_p2p.net.encoding import decode, encode
from kvcomm_p2p.planning.repairs import allowed_repairs, choose_repairs
from kvcomm_p2p.planning.types import Mode
from kvcomm_p2p.protocol.anchors import BLOCK_TOKENS, KVLayout
from kvcomm_p2p.reuse.blocks import block_tensors, copy_block
from kvcomm_p2p.reuse.rules import profile_rules
from kvcomm_p2p.settings import Settings

if TYPE_CHECKING:
    from rich.console import Console

SCENARIO = Scenario.ROLE
SPEED_TURNS = 40


def run(
    console: Console | None = None,
    *,
    model: str | ModelRunner = "smollm2-135m",
    prompts: int = 12,
    tokens: int = 24,
    seed: int = 0,
) -> Result:
    """On `prompts` held-out documents, compared over `tokens` greedy tokens each. A few minutes on two cores.

    Raises ModelError, and UsageError for a model whose KV cannot be moved."""
    cache_dir = Settings.from_env().cache_dir
    runner = model if isinstance(model, ModelRunner) else ModelRunner.load(model, cache_dir=cache_dir)
    if runner.spec.rotary is None:
        raise UsageError(f"{runner.spec.name} allows exact reuse only: {runner.spec.exact_only_reason}")
    laboratory = Laboratory(runner)
    whole: list[Divergence] = []
    plans: dict[str, list[Divergence]] = {"raw": [], "int8": []}
    rows: list[Row] = []
    with stepping(console, "encoding", prompts) as step:
        for case in cases(runner, SCENARIO, prompts, held_out=True, tokens=tokens):
            if not rows:
                rows = speed(copy_block(case.cache, 0, BLOCK_TOKENS), runner.spec.layout)
            whole.append(whole_int8(runner, case))
            for name, outcome in planned(laboratory, case).items():
                plans[name].append(outcome)
            step(SCENARIO.value)
    return Result("bench encoding", rows + table(whole, plans, seed), seed)


def whole_int8(runner: ModelRunner, case: Case) -> Divergence:
    """Of the case's full prefill with all rows but the last token's through int8 and back, against itself."""
    layout, last = runner.spec.layout, len(case.token_ids) - 1
    cache = runner.new_cache(len(case.token_ids))
    assert isinstance(cache, KVCache)
    for start in range(0, last, BLOCK_TOKENS):
        end = min(start + BLOCK_TOKENS, last)
        keys, values = block_tensors(_there_and_back(copy_block(case.cache, start, end), layout), layout, end - start)
        cache.keys[:, 0, :, start:end] = keys.to(cache.keys.device)
        cache.values[:, 0, :, start:end] = values.to(cache.values.device)
    cache.length = last
    logits = runner.prefill(case.token_ids[last:].astype(np.int64), cache, last)
    return diverge_at_once(runner, case.full, cache, logits)


def measure_int8(runner: ModelRunner, prompts: int, tokens: int) -> list[Divergence]:
    """`whole_int8` of so many documents that are not held out."""
    return [whole_int8(runner, case) for case in cases(runner, SCENARIO, prompts, tokens=tokens)]


def planned(laboratory: Laboratory, case: Case) -> dict[str, Divergence]:
    """The plan that the profile's rules lead to, with raw copies and with the same as int8; nothing without a profile or runs."""
    rules, tokens = profile_rules(laboratory.profile, Mode.BALANCED), len(case.token_ids)
    if rules is None:
        return {}
    usable = tuple(run for run in case.runs if allowed_repairs(run, rules, tokens))
    if not usable:
        return {}
    case = replace(case, runs=usable)
    plan = plan_of(case, choose_repairs(usable, rules, COSTS_EVEN, tokens), rules)
    encoded = replace(case, copies=tuple(map(_as_int8(laboratory.layout), case.copies)))
    return {name: laboratory.carried_out(each, plan).divergence for name, each in (("raw", case), ("int8", encoded))}


def speed(block: memoryview, layout: KVLayout) -> list[Row]:
    """Of one whole block: bytes, and how fast it is encoded and decoded by one thread."""
    encoded = memoryview(encode(block, layout))
    case, n = f"a block of {BLOCK_TOKENS} tokens", SPEED_TURNS
    rows = [
        Row(case, "bytes, raw", block.nbytes / 1e3, "kB", 1),
        Row(
            case, "bytes, int8", encoded.nbytes / 1e3, "kB", 1, None, block.nbytes / 1e3, block.nbytes / encoded.nbytes
        ),
    ]
    for metric, work in (
        ("encoding", lambda: encode(block, layout)),
        ("decoding", lambda: decode(encoded, layout, BLOCK_TOKENS)),
    ):
        seconds = _seconds(work)
        rows.append(Row(case, metric, 1e3 * statistics.median(seconds), "ms", n))
        rows.append(Row(case, f"{metric}, fastest", 1e3 * min(seconds), "ms", n))
        rows.append(Row(case, metric, block.nbytes / statistics.median(seconds) / 1e6, "MB/s of KV", n))
    return rows


def table(whole: Sequence[Divergence], plans: Mapping[str, Sequence[Divergence]], seed: int) -> list[Row]:
    """What the answers lost."""
    rows = divergence_rows("wholly as int8", whole, seed)
    for name, each in plans.items():
        if each:
            rows += divergence_rows(f"{SCENARIO.value}: the same plan, {name}", each, seed)
    added = [int8.kl_mean - raw.kl_mean for raw, int8 in zip(plans["raw"], plans["int8"], strict=True)]
    if added:
        interval = interval95(added, _mean, seed)
        rows.append(
            Row(SCENARIO.value, "KL that int8 adds to a plan", _mean(added), "nats/token", len(added), interval)
        )
    return rows


def profile_kl(divergences: Sequence[Divergence]) -> float:
    """What a profile says of these: the mean, nats per token."""
    return round(_mean([each.kl_mean for each in divergences]), 6)


def divergence_rows(case: str, divergences: Sequence[Divergence], seed: int) -> list[Row]:
    """KL and most likely tokens, over prompts."""
    kl = [each.kl_mean for each in divergences]
    top1 = [each.top1 for each in divergences]
    n = len(kl)
    return [
        Row(case, "KL from full prefill, mean", _mean(kl), "nats/token", n, interval95(kl, _mean, seed)),
        Row(case, "KL, worst prompt", max(kl), "nats/token", n),
        Row(case, "same most likely token", _mean(top1), "", n, interval95(top1, _mean, seed)),
    ]


def _as_int8(layout: KVLayout) -> Callable[[DonorCopy], DonorCopy]:
    return lambda copy: replace(
        copy, blocks={key: _there_and_back(block, layout) for key, block in copy.blocks.items()}
    )


def _there_and_back(block: memoryview, layout: KVLayout) -> memoryview:
    return decode(memoryview(encode(block, layout)), layout, block.nbytes // layout.token_bytes)


def _seconds(work: Callable[[], object]) -> list[float]:
    taken = []
    for _ in range(SPEED_TURNS + 3):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return taken[3:]


def _mean(values: Sequence[float] | np.ndarray) -> float:
    return float(np.mean(values))
