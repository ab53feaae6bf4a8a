"""Ways to fill a prompt from copies computed elsewhere, side by side at equal cost: ours, others' rules, and controls that
must come out worse.

Cost is the share of the reusable tokens that is recomputed through all layers; what a rule needs to select them (CacheBlend
computes two layers of all tokens) is not charged. Others' rules are our implementations of what their papers describe, on the
same aligned KV, so that only the rule differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from kvcomm_p2p.evaluation.cases import Case
from kvcomm_p2p.evaluation.metrics import Divergence, compare_log_probs, diverge_at_once
from kvcomm_p2p.model.cache import KVCache, LayerRepair
from kvcomm_p2p.model.runner import ModelRunner
from kvcomm_p2p.model.spec import Profile, RotaryGeometry
from kvcomm_p2p.planning.candidates import Candidate, head_tokens
from kvcomm_p2p.planning.divergence import DivergenceFit, Symptoms
from kvcomm_p2p.planning.repairs import allowed_repairs, choose_repairs
from kvcomm_p2p.planning.replan import WIDEN_HEAD_FACTOR, widened
from kvcomm_p2p.planning.spans import recompute_positions
from kvcomm_p2p.planning.types import Costs, Mode, Plan, Repair, ReuseRules, RunChoice, Span, SpanKind
from kvcomm_p2p.protocol.anchors import BlockKey, KVLayout, Visibility
from kvcomm_p2p.reuse.align import align_span, interpolate
from kvcomm_p2p.reuse.correctors import ProbeShift, ShiftRun, kvcomm_average, nearest_tokens
from kvcomm_p2p.reuse.deviations import Deviation, observe
from kvcomm_p2p.reuse.foresight import token_features
from kvcomm_p2p.reuse.guard import RepairWatch, Verdict, symptoms, verdict
from kvcomm_p2p.reuse.predictor import Predictor
from kvcomm_p2p.reuse.predictor_choice import choose
from kvcomm_p2p.reuse.recall import CORRECTED_SHARE_MIN
from kvcomm_p2p.reuse.shifting import plan_shift

Rows = npt.NDArray[np.int64]

COSTS_EVEN = Costs(1e-3, 1e-2, 1e-9, 1e-4, 1e12, 1e12, 1)
"""Every recomputed token costs the same: budgets are compared in tokens."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One prompt filled one way. `cost`: recomputed share of the reusable tokens; `symptoms`: what the guard sees, where
    there is anything to see."""

    divergence: Divergence
    cost: float
    symptoms: Symptoms | None = None

    def predicted(self, fit: DivergenceFit) -> float | None:
        """The divergence that the guard predicts; None where it saw nothing."""
        return None if self.symptoms is None else fit.kl(self.symptoms)


@dataclass(frozen=True, slots=True)
class Guarded:
    """What came of a prompt: what the guard said first (RECOMPUTE: at last), the divergence that it predicted for what was
    tried last (None: nothing was), and what the user got."""

    verdict: Verdict
    predicted_kl: float | None
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Filling:
    """How one method fills a case: `rows` of runs to recompute, what corrects the others, and in which way KV is aligned."""

    rows: Rows
    repair: LayerRepair | None = None
    correct: Callable[[torch.Tensor, torch.Tensor, int], object] | None = None
    rotate: bool = True
    wrong_blocks: bool = False


class Laboratory:
    """Fills cases; keeps deviations of earlier cases for the methods that need a memory, and teaches them to a predictor, which
    so never has seen what it predicts."""

    MEMORY_MAX = 12

    LEARNED_SHARE = 0.15
    """Share of each run's tokens that the predictor is shown: the first 16 and evenly spaced ones, as a guard sees them."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._memory: list[Deviation] = []
        self._predictor = Predictor()

    def compare(self, case: Case, filling: Filling) -> Outcome:
        """Fills in a new cache and compares with the case's full prefill."""
        cache = self.aligned(case, rotate=filling.rotate, wrong_blocks=filling.wrong_blocks)
        if filling.correct is not None:
            for run in case.runs:
                for piece in run.pieces:
                    rows = slice(piece.prompt_start, piece.prompt_end)
                    filling.correct(cache.keys[:, 0, :, rows], cache.values[:, 0, :, rows], piece.prompt_start)
        positions = np.union1d(np.flatnonzero(~case.reusable), filling.rows).astype(np.int64)
        logits = self._runner.recompute(case.token_ids.astype(np.int64), positions, cache, repair=filling.repair)
        inside = int(case.reusable[positions].sum())
        divergence = diverge_at_once(self._runner, case.full, cache, logits)
        return Outcome(divergence, inside / max(1, int(case.reusable.sum())))

    def planned(self, case: Case, rules: ReuseRules, fit: DivergenceFit) -> Guarded:
        """As the engine does it: repairs by provenance from measured rules; then its guard keeps, widens, or prefills."""
        tokens = len(case.token_ids)
        usable = tuple(run for run in case.runs if allowed_repairs(run, rules, tokens))
        if not usable:
            return Guarded(Verdict.RECOMPUTE, None, self._dense(case))
        plan = plan_of(replace(case, runs=usable), choose_repairs(usable, rules, COSTS_EVEN, tokens), rules)
        outcome = self.carried_out(case, plan)
        first = said = verdict(outcome.predicted(fit), rules.kl_max, may_widen=True)
        if said is Verdict.WIDEN:
            outcome = self.carried_out(case, widened(plan, WIDEN_HEAD_FACTOR, rules))
            said = verdict(outcome.predicted(fit), rules.kl_max, may_widen=False)
        predicted = outcome.predicted(fit)
        if said is Verdict.RECOMPUTE:
            return Guarded(said, predicted, self._dense(case))
        return Guarded(first, predicted, outcome)

    def _dense(self, case: Case) -> Outcome:
        return Outcome(compare_log_probs(case.full.log_probs, case.full.log_probs), 1.0)

    @property
    def profile(self) -> Profile | None:
        """The model's."""
        return self._runner.spec.profile

    @property
    def layout(self) -> KVLayout:
        """Of the model's KV."""
        return self._runner.spec.layout

    def carried_out(self, case: Case, plan: Plan, *, wrong_blocks: bool = False) -> Outcome:
        """Any plan over the case's runs."""
        return self._carried_out(case, plan, self.aligned(case, wrong_blocks=wrong_blocks))

    def corrected(self, case: Case, plan: Plan, memory: Sequence[Deviation]) -> Outcome | None:
        """A plan over the case's runs, its reused tokens corrected by the nearest of these deviations; None where an agent would
        recompute a run because too little of it is like any of them."""
        cache = self.aligned(case)
        for number in range(1, len(plan.runs) + 1):
            spans = [span for span in plan.spans if span.run == number and span.kind is SpanKind.REUSE and span.donor]
            near = 0
            for span in spans:
                rows = slice(span.start, span.end)
                keys, values = cache.keys[:, 0, :, rows], cache.values[:, 0, :, rows]
                near += int(nearest_tokens(keys, values, span.start, memory, self._runner.spec.rotary).corrected.sum())
            if near < CORRECTED_SHARE_MIN * sum(span.tokens for span in spans):
                return None
        return self._carried_out(case, plan, cache)

    def _carried_out(self, case: Case, plan: Plan, cache: KVCache) -> Outcome:
        positions = recompute_positions(plan)
        interpolate(cache, plan, self._runner.spec.rotary)
        shift = plan_shift(plan, self._runner.spec.rotary, cache.keys.device)
        watch = RepairWatch(plan, 0, self._runner.spec.layout.layers, shift)
        logits = self._runner.recompute(case.token_ids.astype(np.int64), positions, cache, repair=watch)
        deviations = watch.deviations()
        seen = symptoms(plan, deviations, {} if shift is None else shift.left(), logits) if deviations else None
        cost = int(case.reusable[positions].sum()) / max(1, int(case.reusable.sum()))
        return Outcome(diverge_at_once(self._runner, case.full, cache, logits), cost, seen)

    def noise(self, case: Case) -> Outcome:
        """Full prefill in two halves: what rounding alone does."""
        cache = self._empty(case)
        ids = case.token_ids.astype(np.int64)
        half = len(ids) // 2
        self._runner.prefill(ids[:half], cache, 0)
        logits = self._runner.prefill(ids[half:], cache, half)
        return Outcome(diverge_at_once(self._runner, case.full, cache, logits), 1.0)

    def methods(self, case: Case, share: float, seed: int) -> dict[str, Filling]:
        """All that can be compared at recomputing `share` (0 to 1) of the reusable tokens, the same number of them each time;
        and what recomputes none, at any share."""
        rotary = self._runner.spec.rotary
        budgets = _budgets(case, share)
        budget = sum(budgets)
        nothing = np.empty(0, np.int64)
        found = {
            "rotation only": Filling(nothing),
            "control: no rotation": Filling(nothing, rotate=False),
            "control: wrong blocks": Filling(nothing, wrong_blocks=True),
        }
        if budget:
            inside = np.flatnonzero(case.reusable)
            found |= {
                "first tokens": Filling(_heads(case, budgets)),
                "first and last tokens": Filling(_ends(case, budgets)),
                "CacheBlend's rule (keys)": Filling(largest(self.deviation(case, layer=1, values=False), budget)),
                "LSTM predictor": Filling(self._predicted(case, budgets)),
                "random tokens": Filling(np.sort(np.random.default_rng(seed).choice(inside, budget, replace=False))),
                "oracle: largest true deviation": Filling(largest(self.deviation(case), budget)),
            }
            for head in (16, 32):
                rows, repair = _probed(case, head, budgets, rotary)
                found[f"first {head} and probes"] = Filling(rows)
                found[f"first {head}, probes and shift"] = Filling(rows, repair)
        if len(self._memory) >= 4:
            memory = list(self._memory)
            found["KVCOMM's anchors"] = Filling(
                nothing, correct=lambda keys, values, start: kvcomm_average(keys, values, start, memory, rotary)
            )
            found["nearest tokens' deviations"] = Filling(
                nothing, correct=lambda keys, values, start: nearest_tokens(keys, values, start, memory, rotary)
            )
        return found

    def remember(self, case: Case) -> None:
        """Keep the case's true deviations for later cases, as a node keeps them of prompts that it prefilled in full; and teach
        those of some tokens, as a guard sees them."""
        self._teach(case)
        self._memory += self.deviations(case)
        del self._memory[: -self.MEMORY_MAX]

    def deviations(self, case: Case) -> list[Deviation]:
        """By what each piece of the case's runs is off where it was moved to."""
        cache, spec = self.aligned(case), self._runner.spec
        pieces = [piece for run in case.runs for piece in run.pieces]
        rows = [slice(piece.prompt_start, piece.prompt_end) for piece in pieces]
        return [
            observe(
                (cache.keys[:, 0, :, each], cache.values[:, 0, :, each]),
                (case.cache.keys[:, 0, :, each], case.cache.values[:, 0, :, each]),
                each.start,
                spec.rotary,
                model_id=spec.model_id,
                edge=b"",
                visibility=Visibility.PUBLIC,
            )
            for each in rows
        ]

    def _predicted(self, case: Case, budgets: Sequence[int]) -> Rows:
        """In few contiguous spans of each run, as the engine would choose them."""
        rows = [np.empty(0, np.int64)]
        for (positions, x), budget in zip(self._features(case), budgets, strict=True):
            spans = choose(self._predictor.predict(x), budget)
            rows += [positions[start:end] for start, end in spans]
        return np.concatenate(rows)

    def _teach(self, case: Case) -> None:
        deviation = self.deviation(case)
        shown, _ = _probed(case, 16, _budgets(case, self.LEARNED_SHARE), self._runner.spec.rotary)
        for positions, x in self._features(case):
            rows = np.flatnonzero(np.isin(positions, shown))
            seen = torch.from_numpy(deviation[positions[rows]])
            self._predictor.observe(x, torch.from_numpy(rows), seen, seconds=math.inf)

    def _features(self, case: Case) -> Iterator[tuple[Rows, torch.Tensor]]:
        """Of every run, the positions [n] of its tokens, and what the predictor is told of them [n, F]."""
        cache = self.aligned(case)
        for run in case.runs:
            positions = np.asarray(_tokens(run), dtype=np.int64)
            yield positions, token_features(run.context, run.pieces[0].donor_start, positions, cache)

    def deviation(self, case: Case, layer: int | None = None, values: bool = True) -> npt.NDArray[np.float64]:
        """Relative L2 difference of aligned from true KV per token [T], mean over layers >= 1 (or of one); -1 outside runs.

        Of layer 1's keys it is what CacheBlend selects by: layer 0 is context-free, so computing layers 0 and 1 for all
        tokens gives layer 1's true keys.
        """
        cache, tokens = self.aligned(case), len(case.token_ids)
        layers = slice(1, None) if layer is None else slice(layer, layer + 1)
        parts = []
        pairs = [(cache.keys, case.cache.keys), (cache.values, case.cache.values)]
        for aligned, true in pairs if values else pairs[:1]:
            right = true[layers, 0, :, :tokens]
            error = (aligned[layers, 0, :, :tokens] - right).pow(2).sum(dim=(1, 3)).sqrt()
            parts.append((error / right.pow(2).sum(dim=(1, 3)).sqrt().clamp_min(1e-6)).mean(dim=0))
        found = torch.stack(parts).mean(dim=0).double().cpu().numpy()
        return np.where(case.reusable, found, -1.0)

    def aligned(self, case: Case, *, rotate: bool = True, wrong_blocks: bool = False) -> KVCache:
        """A new cache whose rows of runs hold the copies' KV; all others are undefined."""
        cache = self._empty(case)
        for run in case.runs:
            blocks = case.blocks_of(run.donor)
            for span in run.whole():
                chosen = _shuffled(blocks) if wrong_blocks else blocks
                align_span(cache, span, chosen, self._runner.spec.rotary if rotate else None)
        return cache

    def _empty(self, case: Case) -> KVCache:
        cache = self._runner.new_cache(len(case.token_ids))
        assert isinstance(cache, KVCache)
        cache.keys.zero_()
        cache.values.zero_()
        return cache


def plan_of(case: Case, repairs: Sequence[Repair], rules: ReuseRules) -> Plan:
    """The plan that reuses every run of the case with these repairs."""
    spans: list[Span] = []
    at = 0
    for number, (run, repair) in enumerate(zip(case.runs, repairs, strict=True), start=1):
        if at < run.start:
            spans.append(Span(at, run.start, SpanKind.RECOMPUTE, why="no donor"))
        spans += run.spans(repair, rules, number)
        at = run.end
    spans.append(Span(at, len(case.token_ids), SpanKind.RECOMPUTE, why="no donor"))
    choices = tuple(
        RunChoice(run.start, run.end, run.donor, run.provenance, run.likeness, repair, 0.0, 0.0)
        for run, repair in zip(case.runs, repairs, strict=True)
    )
    return Plan(len(case.token_ids), Mode.BALANCED, tuple(spans), (), 0.0, 0.0, choices)


def largest(deviation: npt.NDArray[np.float64], count: int) -> Rows:
    """The `count` positions of the largest values, ascending."""
    return np.sort(np.argsort(-deviation, kind="stable")[:count]).astype(np.int64)


def _budgets(case: Case, share: float) -> list[int]:
    """For each run how many of its tokens are recomputed: `share` of them, and of all together to the token."""
    ends = np.cumsum([0, *(run.tokens for run in case.runs)])
    budgets: list[int] = np.diff(np.floor(share * ends + 0.5).astype(np.int64)).tolist()
    return budgets


def _heads(case: Case, budgets: Sequence[int]) -> Rows:
    rows = [row for run, budget in zip(case.runs, budgets, strict=True) for row in _tokens(run)[:budget]]
    return np.asarray(rows, dtype=np.int64)


def _ends(case: Case, budgets: Sequence[int]) -> Rows:
    rows: list[int] = []
    for run, budget in zip(case.runs, budgets, strict=True):
        tokens, last = _tokens(run), budget // 2
        rows += [*tokens[: budget - last], *tokens[len(tokens) - last :]]
    return np.asarray(rows, dtype=np.int64)


def _probed(case: Case, head: int, budgets: Sequence[int], rotary: RotaryGeometry | None) -> tuple[Rows, ProbeShift]:
    """Head and evenly spaced probes of every run, together its budget; at least two are probes, unless it is smaller."""
    rows: list[int] = []
    runs = []
    for run, budget in zip(case.runs, budgets, strict=True):
        tokens = _tokens(run)
        first = min(head_tokens(Repair(head), run.tokens), max(0, budget - 2))
        body, count = tokens[first:], budget - first
        probes = [body[(2 * i + 1) * len(body) // (2 * count)] for i in range(count)]
        rows += [*tokens[:first], *probes]
        runs.append(ShiftRun(run.start, run.end, body[0], tuple(probes)))
    return np.asarray(rows, dtype=np.int64), ProbeShift(runs, rotary, case.cache.keys.device)


def _tokens(run: Candidate) -> list[int]:
    return [row for piece in run.pieces for row in range(piece.prompt_start, piece.prompt_end)]


def _shuffled(blocks: Mapping[BlockKey, memoryview]) -> dict[BlockKey, memoryview]:
    """Every block gets the bytes of another one of the same size, half the sequence away."""
    sizes: dict[int, list[BlockKey]] = {}
    for key, data in blocks.items():
        sizes.setdefault(data.nbytes, []).append(key)
    return {
        key: blocks[keys[(index + max(1, len(keys) // 2)) % len(keys)]]
        for keys in sizes.values()
        for index, key in enumerate(keys)
    }
