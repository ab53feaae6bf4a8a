"""The life of a prompt: find donors, plan, pull, check, align, repair, guard; or prefill everything.

`ReuseEngine.fill` is the only entry. Its coroutine runs on the driver's loop; forwards and copies run in compute threads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from kvcomm_p2p.errors import UsageError
from kvcomm_p2p.model.cache import KVCache, OpaqueCache
from kvcomm_p2p.model.runner import ModelRunner
from kvcomm_p2p.planning.costs import CostTracker
from kvcomm_p2p.planning.fetches import blocks_used, pulled_from_one
from kvcomm_p2p.planning.finding import FoundDonors
from kvcomm_p2p.planning.plan import APPROXIMATE, make_plan
from kvcomm_p2p.planning.replan import WIDEN_HEAD_FACTOR, dense_plan, only_exact, widened, without_blocks
from kvcomm_p2p.planning.segments import VisibilityMark
from kvcomm_p2p.planning.spans import lead_rows, recompute_positions
from kvcomm_p2p.planning.types import Mode, Plan, ReuseRules, SpanKind
from kvcomm_p2p.prompts import PreparedPrompt
from kvcomm_p2p.protocol.anchors import BlockKey, Miss
from kvcomm_p2p.report import PrefillReport, Timings
from kvcomm_p2p.reuse.align import Aligner, align_span, interpolate
from kvcomm_p2p.reuse.checks import layer0_mismatches, not_finite
from kvcomm_p2p.reuse.donors import DonorFinder
from kvcomm_p2p.reuse.foresight import Deviations, Foresight, Outlook
from kvcomm_p2p.reuse.guard import WIDEN_SHARE_MAX, RepairWatch, Verdict, broken, symptoms, verdict
from kvcomm_p2p.reuse.pulling import Pulled, Puller, donor_spans
from kvcomm_p2p.reuse.recall import Recall, Recalled
from kvcomm_p2p.reuse.reporting import ReportBuilder
from kvcomm_p2p.reuse.rules import profile_rules
from kvcomm_p2p.reuse.shifting import plan_shift

T = TypeVar("T")

NOTHING_FOUND = FoundDonors((), {}, (), 0.0)


@dataclass(frozen=True, slots=True)
class Filled:
    """A prompt of T tokens whose `cache` holds T rows, next-token `logits` [V], how it came about, and (for publishing) the
    plan that was carried out and the pulled blocks that are still ours. `found`: what there was to plan with."""

    cache: KVCache | OpaqueCache
    logits: torch.Tensor
    report: PrefillReport
    plan: Plan
    pulled: Pulled
    found: FoundDonors = NOTHING_FOUND


@dataclass(frozen=True, slots=True)
class _Repaired:
    """After a forward over a plan's recompute positions: next-token logits [V], the divergence that the guard predicts (None:
    nothing was reused, or nothing is known of this model), and the deviations that were seen."""

    logits: torch.Tensor
    predicted_kl: float | None
    deviations: Deviations = ()

    def means(self) -> dict[int, float]:
        """Mean deviation per run number."""
        return {rows.run: float(deviation.mean()) for rows, deviation in self.deviations}


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What the compute thread brought about. `guarded`: the plan that the guard has judged at last; `shown`: the deviations of
    aligned KV that the plan of the `outlook` showed, before anything was repaired twice."""

    repaired: _Repaired
    plan: Plan
    guarded: Plan
    outlook: Outlook
    shown: Deviations
    fallback: str
    recompute_s: float


class ReuseEngine:
    """Fills caches. One per agent; any number of `fill` calls may be in flight."""

    def __init__(
        self,
        runner: ModelRunner,
        finder: DonorFinder,
        puller: Puller,
        costs: CostTracker,
        compute: Executor,
        peer_name: Callable[[bytes], str],
        content_key: bytes,
        recall: Recall | None = None,
        foresight: Foresight | None = None,
    ) -> None:
        """`recall`: corrects short runs from memory; None: they are recomputed. `foresight`: predicts deviations, and learns
        to; None: nothing is predicted."""
        self._runner = runner
        self._finder = finder
        self._puller = puller
        self._costs = costs
        self._compute = compute
        self._peer_name = peer_name
        self._content_key = content_key
        self._recall = recall
        self._foresight = foresight

    def rules(self, mode: Mode, exact_only: str = "", visibility: Sequence[VisibilityMark] = ()) -> ReuseRules:
        """What may be approximated in a prompt with these marks: nothing when `exact_only` gives a reason, or without a
        measured profile."""
        spec = self._runner.spec
        reason = exact_only or spec.exact_only_reason
        if not reason and spec.profile is None:
            reason = (
                f"no measured profile for {spec.name}: only exact prefixes are reused (kvcomm calibrate {spec.name} "
                "measures one)"
            )
        measured = profile_rules(spec.profile, mode) if mode in APPROXIMATE else None
        if reason or measured is None:
            return ReuseRules(approximate=False, reason=reason)
        short, short_from = self._recall.short(visibility) if self._recall is not None else ({}, {})
        return replace(measured, short=short, short_from=short_from)

    async def fill(
        self,
        prompt: PreparedPrompt,
        mode: Mode,
        *,
        exact_only: str = "",
        rows_extra: int = 0,
        cancelled: Callable[[], bool] | None = None,
    ) -> Filled:
        """Fill a cache with room for `rows_extra` more tokens.

        Raises UsageError for an empty prompt or one longer than the model's context, CancelledByCaller.
        """
        tokens = self._checked(prompt)
        report = ReportBuilder(prompt, mode, self._peer_name)
        cache = self._runner.new_cache(min(tokens + rows_extra, self._runner.spec.context_tokens_max))
        plan, rules, found = await self._planned(prompt, mode, exact_only, report)
        if isinstance(cache, OpaqueCache) or not donor_spans(plan):
            filled = await self._dense(prompt, cache, plan, report, cancelled)
        else:
            filled = await self._reuse(prompt, cache, plan, rules, found, report, cancelled)
        return replace(filled, found=found)

    async def explain(self, prompt: PreparedPrompt, mode: Mode, *, exact_only: str = "") -> PrefillReport:
        """What `fill` would do now, as a report without an outcome (`planned_only`): donors are looked up and asked for token
        ids, but nothing is pulled, computed or published. Raises UsageError as `fill` does."""
        self._checked(prompt)
        report = ReportBuilder(prompt, mode, self._peer_name)
        plan, _, _ = await self._planned(prompt, mode, exact_only, report)
        return replace(report.finish(plan, Timings()), planned_only=True)

    def _checked(self, prompt: PreparedPrompt) -> int:
        """Tokens of a prompt that can be filled. Raises UsageError."""
        spec = self._runner.spec
        tokens = len(prompt.token_ids)
        if tokens == 0:
            raise UsageError("the prompt is empty: give at least one token")
        if tokens > spec.context_tokens_max:
            raise UsageError(
                f"the prompt has {tokens} tokens, the context of {spec.name} holds {spec.context_tokens_max}: shorten it"
            )
        return tokens

    async def _planned(
        self, prompt: PreparedPrompt, mode: Mode, exact_only: str, report: ReportBuilder
    ) -> tuple[Plan, ReuseRules, FoundDonors]:
        """Find donors and plan."""
        refusal = self._runner.spec.share_refusal
        if mode is Mode.DENSE or refusal:
            plan = dense_plan(len(prompt.token_ids), mode, "" if mode is Mode.DENSE else refusal)
            return plan, ReuseRules(False, refusal), NOTHING_FOUND
        found = await self._finder.find(prompt.token_ids, prompt.marks)
        report.found(found)
        planning = time.perf_counter()
        rules = self.rules(mode, exact_only, prompt.visibility)
        plan = await self._run(
            partial(
                make_plan,
                prompt.token_ids,
                found.donors,
                mode,
                rules,
                self._costs.costs,
                pulls=self._costs.pulls,
                key=self._content_key,
                int8=self._puller.int8(found.donors),
            )
        )
        report.planned(plan, time.perf_counter() - planning)
        return plan, rules, found

    async def _dense(
        self,
        prompt: PreparedPrompt,
        cache: KVCache | OpaqueCache,
        plan: Plan,
        report: ReportBuilder,
        cancelled: Callable[[], bool] | None,
    ) -> Filled:
        started = time.perf_counter()
        ids = prompt.token_ids.astype(np.int64)

        def prefill() -> torch.Tensor:
            self._runner.spent_s()
            logits = self._runner.prefill(ids, cache, 0, cancelled=cancelled)
            self._costs.saw_prefill(len(ids), 0, self._runner.spent_s())
            return logits

        logits = await self._run(prefill)
        seconds = time.perf_counter() - started
        return Filled(cache, logits, report.finish(plan, Timings(recompute_s=seconds)), plan, Pulled())

    async def _reuse(
        self,
        prompt: PreparedPrompt,
        cache: KVCache,
        plan: Plan,
        rules: ReuseRules,
        found: FoundDonors,
        report: ReportBuilder,
        cancelled: Callable[[], bool] | None,
    ) -> Filled:
        cache.reserve(plan.tokens)
        aligner = Aligner(cache, donor_spans(plan), self._runner.spec.rotary)

        local = self._puller.local(plan)
        wrong: dict[BlockKey, Miss] = {}

        def place(blocks: dict[BlockKey, memoryview]) -> dict[BlockKey, Miss]:
            aligner.put(blocks)
            return not_finite([local.remote[key] for key in blocks], self._runner.spec.layout)

        async def on_blocks(blocks: dict[BlockKey, memoryview]) -> None:
            wrong.update(await self._run(partial(place, blocks)))

        costs = self._costs.costs
        pull = asyncio.create_task(self._puller.pull(plan, found, costs, local, on_blocks))
        try:
            if local.blocks:
                await self._run(partial(aligner.put, dict(local.blocks)))
            exact, lead = (0, 0) if local.failed else lead_rows(plan, costs, self._costs.pulls)
            if lead:
                await self._run(partial(self._extend, prompt, cache, exact, lead))
            pulled = await pull
            failed = {**pulled.failed, **wrong}
            sound = [block for key, block in pulled.remote.items() if key not in failed]
            failed.update(await self._run(partial(layer0_mismatches, self._runner, sound)))
            self._blame(failed, found)
            report.pulled(pulled, failed)
            usable = without_blocks(plan, failed, rules)
            work = partial(self._complete, prompt, cache, usable, pulled.blocks, rules, lead, cancelled)
            outcome = await self._run(work)
        except BaseException:
            pull.cancel()
            pull.add_done_callback(self._abandoned)
            raise
        # What failed a check, or led to a fallback, is not kept as a replica.
        used = blocks_used(outcome.plan)
        self._puller.release(pulled, [key for key in pulled.handles if key not in used])
        self._observe_pull(pulled, plan)
        self._costs.saw_align(aligner.kv_bytes, aligner.seconds)
        timings = Timings(pull_s=pulled.seconds, align_s=aligner.seconds, recompute_s=outcome.recompute_s)
        repaired = outcome.repaired
        if outcome.fallback and broken(repaired.predicted_kl, rules.kl_max):
            self._distrust(outcome.guarded)
        report.recomputed(outcome.guarded.rejected[len(usable.rejected) :])
        report.foreseen(outcome.outlook.expected)
        widened = outcome.guarded is not outcome.outlook.plan
        report.guarded(repaired.predicted_kl, repaired.means(), outcome.fallback, outcome.guarded, widened=widened)
        filled = Filled(cache, repaired.logits, report.finish(outcome.plan, timings), outcome.plan, pulled)
        if self._foresight is not None:
            self._foresight.after(outcome.outlook, outcome.shown, prompt.visibility)
        return filled

    def _extend(self, prompt: PreparedPrompt, cache: KVCache, exact: int, lead: int) -> None:
        """Compute rows [exact, lead) behind what the own pool gave."""
        cache.length = exact
        self._runner.extend(prompt.token_ids[exact:lead].astype(np.int64), cache, exact)

    def _complete(
        self,
        prompt: PreparedPrompt,
        cache: KVCache,
        plan: Plan,
        blocks: Mapping[BlockKey, memoryview],
        rules: ReuseRules,
        lead: int,
        cancelled: Callable[[], bool] | None,
    ) -> _Outcome:
        """Repair and guard a slab into which `blocks` were aligned; in a compute thread. Rows [0, lead) are computed already."""
        ids = prompt.token_ids.astype(np.int64)
        started = time.perf_counter()
        recall = self._recall
        recalled = Recalled(plan) if recall is None else recall.correct(cache, plan, prompt.visibility)
        foresight = self._foresight
        outlook = Outlook(recalled.plan) if foresight is None else foresight.before(recalled.plan, cache, rules)
        plan = outlook.plan
        repaired = self._repair(ids, cache, plan, lead, cancelled)
        shown = repaired.deviations
        predicted, fallback = repaired.predicted_kl, ""
        cheap = time.perf_counter() - started <= WIDEN_SHARE_MAX * plan.dense_s
        if verdict(predicted, rules.kl_max, may_widen=cheap) is Verdict.WIDEN:
            # Rows of earlier heads are right already: what stands before the first longer head does not change.
            since = min(span.start for span in plan.spans if span.run)
            plan = outlook.chosen(widened(plan, WIDEN_HEAD_FACTOR, rules), rules)
            # What the first forward left in its probes' rows was computed behind runs that may now be gone.
            for span in plan.spans:
                if span.kind is SpanKind.REUSE:
                    align_span(cache, span, blocks, self._runner.spec.rotary)
            repaired = self._repair(ids, cache, plan, max(lead, since), cancelled)
            predicted = repaired.predicted_kl
        guarded = plan
        if verdict(predicted, rules.kl_max, may_widen=False) is Verdict.RECOMPUTE:
            fallback = f"{predicted:.3g} nats/token predicted from what was recomputed, more than the {rules.kl_max:.3g} allowed"
            plan, exact = only_exact(plan, fallback, sound=predicted == predicted)
            cache.truncate(exact)
            logits = self._runner.prefill(ids[exact:], cache, exact, cancelled=cancelled)
            repaired = replace(repaired, logits=logits)
            if recall is not None:
                recall.blame(recalled.used)
        return _Outcome(repaired, plan, guarded, outlook, shown, fallback, time.perf_counter() - started)

    def _repair(
        self,
        ids: npt.NDArray[np.int64],
        cache: KVCache,
        plan: Plan,
        since: int,
        cancelled: Callable[[], bool] | None,
    ) -> _Repaired:
        """One forward over what the plan recomputes from `since` on, watched and shifted; as an ordinary continuation when
        that is the end of the prompt."""
        spec = self._runner.spec
        positions = recompute_positions(plan)
        positions = positions[positions >= since]
        first = int(positions[0])
        self._runner.spent_s()
        if len(positions) == len(ids) - first:
            cache.length = first
            logits = self._runner.prefill(ids[first:], cache, first, cancelled=cancelled)
            self._costs.saw_forward(len(positions), float((positions + 1).sum()), self._runner.spent_s())
            return _Repaired(logits, None)
        interpolate(cache, plan, spec.rotary)
        shift = plan_shift(plan, spec.rotary, cache.keys.device)
        watch = RepairWatch(plan, since, spec.layout.layers, shift)
        logits = self._runner.recompute(ids, positions, cache, repair=watch)
        self._costs.saw_forward(len(positions), float((positions + 1).sum()), self._runner.spent_s())
        deviations = watch.deviations()
        if spec.profile is None or not deviations:
            return _Repaired(logits, None, deviations)
        shown = symptoms(plan, deviations, {} if shift is None else shift.left(), logits)
        return _Repaired(logits, spec.profile.divergence.kl(shown), deviations)

    def _abandoned(self, pull: asyncio.Task[Pulled]) -> None:
        """A fill ended early: let go of what its pull brought (one that is cancelled itself lets go by itself)."""
        if not pull.cancelled() and pull.exception() is None:
            self._puller.release(pull.result(), list(pull.result().handles))

    def _blame(self, failed: dict[BlockKey, Miss], found: FoundDonors) -> None:
        """Forget what holders said of anchors whose blocks did not come or were not what they should be: an anchor that was
        evicted and computed again has other bits, hence other digests, under the same id."""
        wrong = {key.anchor_id for key in failed}
        for holder, anchor_id in found.details:
            if anchor_id in wrong:
                self._finder.forget(holder, anchor_id)

    def _distrust(self, plan: Plan) -> None:
        """What these runs were filled with is no KV of these tokens in any context: their donors are not asked again for a
        while."""
        for run in plan.runs:
            for anchor in run.donor.anchors:
                self._finder.distrust(run.donor.holder, anchor.anchor_id)

    def _observe_pull(self, pulled: Pulled, plan: Plan) -> None:
        holder = pulled_from_one(plan)
        if holder is not None and pulled.failed:
            self._costs.saw_cut(holder, pulled.kv_bytes, pulled.seconds, pulled.failed.values())
        elif holder is not None:
            self._costs.saw_pull(holder, pulled.kv_bytes, pulled.seconds)

    async def _run(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._compute, call)
