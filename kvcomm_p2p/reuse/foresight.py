"""The prefix predictor at work: before a run is repaired it says how wrong the run is, afterwards it learns how wrong it was.

What it says goes into the report. Once it has shown skill, runs that the guard would reject by far are not repaired first.
Which tokens are recomputed stays "the first ones" unless the model's profile says that it chooses them.

It learns behind the request, in a thread of its own. What it keeps on disk is a few thousand weights per model; the runs that
it goes on learning from (features of tokens, which tell their content apart) are in memory only, and runs that not everybody
may see are never among them.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from kvcomm_p2p.model.cache import KVCache
from kvcomm_p2p.model.spec import ModelSpec
from kvcomm_p2p.model.threads import helper_pool
from kvcomm_p2p.planning.divergence import RunDeviation, Symptoms
from kvcomm_p2p.planning.provenance import BARE_TOKENS_MAX, Context
from kvcomm_p2p.planning.replan import without_runs
from kvcomm_p2p.planning.segments import VisibilityMark
from kvcomm_p2p.planning.types import Plan, ReuseRules
from kvcomm_p2p.protocol.anchors import Miss, MissReason, Visibility
from kvcomm_p2p.protocol.ids import ModelId
from kvcomm_p2p.reuse.guard import Watched
from kvcomm_p2p.reuse.predictor import Predictor
from kvcomm_p2p.reuse.predictor_features import RunFeatures, features
from kvcomm_p2p.reuse.publish import filled_marks
from kvcomm_p2p.reuse.selection import Rows, kept_rows, respent, run_positions, run_spans

OBSERVATIONS_PER_SAVE = 50

QUEUED_PROMPTS_MAX = 8
"""Prompts that wait to be learned from; what comes while so many do is not learned from."""

LEARNED_TOKENS_MAX = 16_384
"""Of one prompt; runs beyond are not learned from. What waits in memory is bounded by this times QUEUED_PROMPTS_MAX."""

GRADIENT_STEPS = 2
"""Per run. A fixed number: the same requests teach the same, however busy the machine is."""

TRUSTED_SKILL, TRUSTED_OBSERVATIONS = 0.5, 64
"""From both on, what it predicts may refuse a run."""

REFUSED_KL_FACTOR = 5.0
"""Runs are refused before their repair from so many times the allowed divergence on; the guard rejects from far less on."""

UNKNOWN_ENTROPY = 1.0
"""Nats. Before the forward, nobody knows how undecided the model will be."""

TRIED_EVERY = 8
"""Of the prompts in which something would be refused, every so many-th is repaired and left to the guard all the same: what is
never compared again could stay misjudged forever."""

Deviations = Sequence[tuple[Watched, npt.NDArray[np.float32]]]
"""What `RepairWatch.deviations` gives."""

log = logging.getLogger("kvcomm_p2p.agent")


@dataclass(frozen=True, slots=True, eq=False)
class Foreseen:
    """One run whose KV is aligned: prompt `positions` int64 [n] of its equal tokens, their `features` [n, F], and the
    `deviations` [n] that are predicted of them."""

    positions: Rows
    features: torch.Tensor
    deviations: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Outlook:
    """A plan that takes into account what was predicted.

    `runs`: what was, by `RunChoice.start`; nothing of runs that are corrected from memory, which are compared with something
    else than what was aligned. `expected`: by the same, the mean predicted deviation of what of a run is not recomputed; empty
    before the predictor has shown what it is worth. `chooses`: whether tokens to recompute are chosen by prediction.
    """

    plan: Plan
    runs: Mapping[int, Foreseen] = field(default_factory=dict)
    expected: Mapping[int, float] = field(default_factory=dict)
    chooses: bool = False

    def chosen(self, plan: Plan, rules: ReuseRules) -> Plan:
        """A plan over the same aligned runs, its heads' budgets spent where they are wanted."""
        if not self.chooses:
            return plan
        starts = {number: run.start for number, run in enumerate(plan.runs, start=1) if run.start in self.runs}
        return respent(plan, {number: self.runs[start].deviations for number, start in starts.items()}, rules)


class Foresight:
    """One per agent. `before` may run in any number of threads; `after` and `close` are called by one at a time."""

    def __init__(self, spec: ModelSpec, path: Path) -> None:
        """`path`: where the weights are kept between runs. Agents of one model may share it: whoever saves last is loaded next.
        A file that cannot be used is told once in the log, and replaced with the next save."""
        self._spec = spec
        self._path = path
        self._predictor, reason = Predictor.load(path, spec.model_id)
        if reason and path.exists():
            log.warning("the prefix predictor begins anew: %s", reason)
        self._saved = self._predictor.observations
        self._refusals = itertools.count(1)
        self._room = threading.BoundedSemaphore(QUEUED_PROMPTS_MAX)
        self._pool = helper_pool(1, "kvcomm-learn")

    @property
    def predictor(self) -> Predictor:
        """The agent's own."""
        return self._predictor

    def before(self, plan: Plan, cache: KVCache, rules: ReuseRules) -> Outlook:
        """Look at a plan whose runs are aligned in `cache`, before its forward: without those that are not worth their repair,
        which are in its `rejected`. Mutates nothing."""
        runs = self._foreseen(plan, cache)
        smaller = without_runs(plan, self._missed(plan, runs, rules))
        outlook = Outlook(smaller, runs, chooses=self._chooses())
        chosen = outlook.chosen(smaller, rules)
        expected: dict[int, float] = {}
        if self._predictor.skill is not None:
            for number, choice in enumerate(chosen.runs, start=1):
                if choice.start in runs:
                    expected[choice.start] = _body(chosen, number, runs[choice.start])
        return replace(outlook, plan=chosen, expected=expected)

    def after(self, outlook: Outlook, deviations: Deviations, visibility: Sequence[VisibilityMark]) -> None:
        """Learn from what the outlook's plan showed when it was carried out, later and elsewhere; returns at once.

        `visibility`: the prompt's marks; runs that are not public, or stand behind what is not, are left out.
        """
        marks = filled_marks(outlook.plan, visibility)
        hidden = (mark.start for mark in marks if mark.visibility is not Visibility.PUBLIC)
        public_until = min(hidden, default=outlook.plan.tokens)
        lessons: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        left = LEARNED_TOKENS_MAX
        for watched, seen in deviations:
            run = outlook.runs.get(outlook.plan.runs[watched.run - 1].start)
            if run is None or run.positions[-1] >= public_until or len(run.positions) > left:
                continue
            left -= len(run.positions)
            rows = np.searchsorted(run.positions, watched.positions)
            lessons.append((run.features, torch.from_numpy(rows), torch.from_numpy(seen)))
        if lessons and self._room.acquire(blocking=False):
            try:
                self._pool.submit(self._learn, lessons)
            except RuntimeError:  # closed meanwhile
                self._room.release()

    def close(self) -> None:
        """Learn what waits, and save. Safe to call twice."""
        self._pool.shutdown(wait=True)
        self._save()

    def _foreseen(self, plan: Plan, cache: KVCache) -> dict[int, Foreseen]:
        runs: dict[int, Foreseen] = {}
        for number, choice in enumerate(plan.runs, start=1):
            if choice.repair.memory:
                continue
            spans = run_spans(plan, number)
            positions = run_positions(spans)
            x = token_features(choice.context, spans[0].donor_start, positions, cache)
            runs[choice.start] = Foreseen(positions, x, self._predictor.predict(x))
        return runs

    def _missed(self, plan: Plan, runs: Mapping[int, Foreseen], rules: ReuseRules) -> dict[int, Miss]:
        """Runs that are not worth their repair: while the divergence that is predicted of all together is far too large, the one
        that brings most of it. Those whose rest is corrected are left to the guard: nothing says what that will leave."""
        profile, predictor = self._spec.profile, self._predictor
        skill = predictor.skill
        if profile is None or skill is None or skill <= TRUSTED_SKILL or predictor.observations < TRUSTED_OBSERVATIONS:
            return {}
        left: dict[int, RunDeviation] = {}
        for number, choice in enumerate(plan.runs, start=1):
            if choice.start in runs and not choice.repair.shift:
                share = int(kept_rows(run_spans(plan, number)).sum()) / plan.tokens
                body = _body(plan, number, runs[choice.start])
                left[number] = RunDeviation(share, body, body)
        missed: dict[int, Miss] = {}
        while left:
            kl = profile.divergence.kl(Symptoms.of(list(left.values()), UNKNOWN_ENTROPY))
            if kl <= REFUSED_KL_FACTOR * rules.kl_max:
                break
            worst = max(left, key=lambda number: (left[number].share * (left[number].body or 0.0) ** 2, -number))
            detail = f"{kl:.3g} nats/token predicted before its repair, {rules.kl_max:.3g} allowed"
            missed[worst] = Miss(MissReason.DIVERGENCE, detail)
            del left[worst]
        return {} if missed and next(self._refusals) % TRIED_EVERY == 0 else missed

    def _chooses(self) -> bool:
        """Whether tokens are chosen by prediction: where that was measured to be better, unless it turns out to be worse than
        knowing the position (a fresh predictor chooses the first ones)."""
        shape = self._predictor.shape_skill
        profile = self._spec.profile
        return profile is not None and profile.selection == "predictor" and (shape is None or shape > 0)

    def _learn(self, lessons: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> None:
        """In the pool's thread."""
        try:
            for x, rows, deviations in lessons:
                self._predictor.observe(x, rows, deviations, seconds=math.inf, steps_max=GRADIENT_STEPS)
            if self._predictor.observations - self._saved >= OBSERVATIONS_PER_SAVE:
                self._save()
        except Exception:
            log.exception("the prefix predictor could not learn")
        finally:
            self._room.release()

    def _save(self) -> None:
        """Only if there is something new. What cannot be written is lost, and told."""
        if self._predictor.observations == self._saved:
            return
        self._saved = self._predictor.observations
        try:
            self._predictor.save(self._path, self._spec.model_id)
        except OSError as error:
            log.warning("what the prefix predictor has learned was not saved: %s", error)


def predictor_path(cache_dir: Path, model_id: ModelId) -> Path:
    """Where the predictor of a model is kept."""
    return cache_dir / "predictors" / f"{model_id.hex()}.safetensors"


def token_features(context: Context | None, donor_start: int, positions: Rows, cache: KVCache) -> torch.Tensor:
    """Features [n, F] of a run's tokens, whose KV is aligned in the slab's rows `positions` (int64 [n], n >= 1, ascending).

    `donor_start`: where the first of them stands in the donor's sequence; `context`: what stands before the run there, against
    what stands before it here; of None nothing is known, which counts as unlike.
    """
    start, tokens = int(positions[0]), len(positions)
    if context is None:
        longer = max(start, donor_start)
        near, first, lengths = 0.0, 0.0, min(start, donor_start) / longer if longer else 1.0
        bare = donor_start <= BARE_TOKENS_MAX
    else:
        near, first, lengths, bare = context.near, context.first, context.lengths, context.bare
    run = RunFeatures(start - donor_start, start, donor_start, near, first, lengths, bare, tokens)
    whole = int(positions[-1]) + 1 - start == tokens
    rows = slice(start, start + tokens) if whole else torch.from_numpy(positions).to(cache.keys.device)
    return features(run, cache.keys[0, 0][:, rows], cache.values[0, 0][:, rows])


def _body(plan: Plan, number: int, run: Foreseen) -> float:
    """Mean predicted deviation of what stays as it is aligned; of all if nothing does."""
    kept = torch.from_numpy(kept_rows(run_spans(plan, number)))
    left = run.deviations[kept] if bool(kept.any()) else run.deviations
    return float(left.mean())
