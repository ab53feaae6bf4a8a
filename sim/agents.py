"""A simulated agent: finds donors, plans, waits for blocks, computes and publishes as a real one does, in virtual time.

It decides with the same code (`kvcomm_p2p.planning`); what takes a processor takes the time that the cost table says.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from kvcomm_p2p.planning.costs import CostTracker
from kvcomm_p2p.planning.fetches import blocks_used, pulled_from_one
from kvcomm_p2p.planning.finding import AskDirectory, AskTokens, Compute, Finding, FoundDonors
from kvcomm_p2p.planning.lineage import VARIANT_BYTES, Lineage
from kvcomm_p2p.planning.plan import make_plan
from kvcomm_p2p.planning.replan import WIDEN_HEAD_FACTOR, dense_plan, only_exact, widened, without_blocks
from kvcomm_p2p.planning.scouting import Look, Scouting
from kvcomm_p2p.planning.segments import Segment, cut_anchors
from kvcomm_p2p.planning.spans import hops_at, lead_rows, recompute_positions, work_of
from kvcomm_p2p.planning.superseding import Outdated, replaced, superseded
from kvcomm_p2p.planning.types import Costs, Mode, Plan, ReuseRules, SpanKind
from kvcomm_p2p.planning.winnow import ContentMark, content_mark, content_marks
from kvcomm_p2p.protocol.anchors import AnchorMeta
from kvcomm_p2p.protocol.ids import AnchorId, ModelId
from kvcomm_p2p.sim.cost_table import CostTable
from kvcomm_p2p.sim.fabrics import Fabric, Fetched
from kvcomm_p2p.sim.process import Process, Promise, spawn
from kvcomm_p2p.sim.workloads import Verdict
from kvcomm_p2p.sim.world import CONTENT_KEY

TokenIds = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Rules:
    """How agents reuse: the mode and what the model's profile allows in it. `replicates`: pulled blocks are published as
    replicas; `by_context`: of several copies the one whose context is most like the prompt's is taken. Both are off only to find
    out what they are worth (`sim.ablations`)."""

    mode: Mode
    reuse: ReuseRules
    model_id: ModelId
    replicates: bool = True
    by_context: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """One answered prompt. Times in seconds; `started_at`: when it was asked; `queued_s`: waiting for the model.

    `pull_s`: waiting for blocks. `covered`: prompt tokens that stand in an equal run of any donor; `reused`: those not computed;
    `exact`: of these, behind the same exact prefix. `dense_s`: what computing everything would have taken, without waiting.
    `misses`: by reason.
    """

    agent: int
    started_at: float
    ttft_s: float
    queued_s: float
    dense_s: float
    tokens: int
    covered: int
    reused: int
    exact: int
    pulled_bytes: int
    wait_lost_s: float
    misses: Mapping[str, int]
    pull_s: float = 0.0


@dataclass(slots=True)
class _Model:
    """One forward at a time, first come, first served."""

    busy: bool = False
    waiting: deque[Promise[None]] = field(default_factory=deque)

    def enter(self) -> Promise[None]:
        turn: Promise[None] = Promise()
        if self.busy:
            self.waiting.append(turn)
        else:
            self.busy = True
            turn.resolve(None)
        return turn

    def leave(self) -> None:
        if self.waiting:
            self.waiting.popleft().resolve(None)
        else:
            self.busy = False


class SimAgent:
    """One agent. `fabric` is where its KV goes and comes from; `costs` what it believes of its machine and link at first."""

    def __init__(self, number: int, fabric: Fabric, table: CostTable, rules: Rules, costs: Costs, seed: int) -> None:
        self.number = number
        self._fabric = fabric
        self._table = table
        self._rules = rules
        self._costs = CostTracker(costs)
        self._rng = random.Random(seed)
        self._model = _Model()
        self._lineage = Lineage()
        self._outdated = Outdated()
        self._scouting = Scouting()
        self._finding = Finding(
            self._lineage,
            me=fabric.me,
            model_id=rules.model_id,
            layout=table.layout,
            context_tokens_max=table.context_tokens_max,
            vocabulary_size=2**32 - 1,
            content_key=CONTENT_KEY,
            held=fabric.held,
            clock=lambda: fabric.now,
        )

    def answer(
        self,
        prompt: TokenIds,
        answer: TokenIds,
        contents: Sequence[tuple[int, int]] = (),
        verdict: Verdict = Verdict.KEPT,
    ) -> Process[Outcome]:
        """Fill the prompt, publish it, decode the answer, publish that. `contents`, `verdict`: see `workloads.Step`."""
        fabric, started_at = self._fabric, self._fabric.now
        marks = tuple(content_mark(prompt, start, end, CONTENT_KEY) for start, end in contents)
        table = self._table
        yield fabric.sleep(table.request_s + len(prompt) * table.request_token_s)
        found, plan = yield from self._planned(prompt, marks)
        costs = self._costs.costs
        _, lead = lead_rows(plan, costs, self._costs.pulls)
        asked_at = fabric.now
        fetched: Fetched = yield fabric.fetch(plan, found, costs)
        waited_s = fabric.now - asked_at
        self._saw_pull(plan, fetched, waited_s)
        usable = without_blocks(plan, fetched.failed, self._rules.reuse)
        work = work_of(usable.spans, self._believed(), lead)
        turn_at = fabric.now
        yield self._model.enter()
        queued_s = fabric.now - turn_at
        # What was aligned or computed while blocks were coming is not waited for again.
        yield fabric.sleep(max(0.0, max(work.align_s, work.ahead_s) - waited_s))
        yield fabric.sleep(fetched.kv_bytes / table.check_bytes_per_s)
        filled = yield from self._complete(usable, lead, verdict)
        self._model.leave()
        outcome = replace(self._outcome(started_at, queued_s, filled, plan.covered, fetched, found), pull_s=waited_s)
        look = self._scouting.look(filled, found, fabric.now)
        if look is not None:
            spawn(self._look(look, found))
        yield from self._publish(prompt, answer, filled, fetched, marks)
        return outcome

    def _look(self, look: Look, found: FoundDonors) -> Process[None]:
        """Pull a few blocks over a link believed too slow, and place them, for what can be learned; as `reuse.scouting`."""
        fabric, asked_at = self._fabric, self._fabric.now
        fetched: Fetched = yield fabric.look(look, found)
        fabric.keep(fetched, ())
        if fetched.failed or not fetched.kv_bytes:
            return
        self._costs.saw_pull(look.donor.holder, fetched.wire_bytes, fabric.now - asked_at)
        placed_s = fetched.kv_bytes / self._table.align_bytes_per_s
        yield fabric.sleep(placed_s)
        self._costs.saw_align(fetched.kv_bytes, placed_s)

    def _complete(self, plan: Plan, lead: int, verdict: Verdict) -> Process[Plan]:
        """Repair, and once more or all over if the guard says so; the plan that was carried out in the end."""
        if not any(span.donor is not None for span in plan.spans):
            yield from self._forward(np.arange(plan.tokens), plan.tokens)
            return plan
        reused = sum(span.tokens for span in plan.spans if span.run)
        yield self._fabric.sleep(reused * self._table.foresee_token_s)
        yield from self._repair(plan, lead)
        if plan.runs and verdict in (Verdict.WIDENED, Verdict.WIDENED_REJECTED):
            since = min(span.start for span in plan.spans if span.run)
            plan = widened(plan, WIDEN_HEAD_FACTOR, self._rules.reuse)
            yield self._fabric.sleep(work_of(plan.spans, self._believed(), lead).align_s)
            yield from self._repair(plan, max(lead, since))
        if plan.runs and verdict in (Verdict.REJECTED, Verdict.WIDENED_REJECTED):
            plan, exact = only_exact(plan, "the guard rejected it")
            yield from self._forward(np.arange(exact, plan.tokens), plan.tokens)
        return plan

    def _repair(self, plan: Plan, since: int) -> Process[None]:
        positions = recompute_positions(plan)
        yield from self._forward(positions[positions >= since], plan.tokens)

    def _forward(self, positions: npt.NDArray[np.int64], tokens: int) -> Process[None]:
        """One forward over these rows of a prompt of so many tokens."""
        table, count = self._table, len(positions)
        pairs = float((positions + 1).sum())
        seconds = table.forward_s + count * table.token_s + pairs * table.attention_s
        if count != tokens - int(positions[0]):
            seconds += table.repair_s + count * table.repair_token_s
        yield self._fabric.sleep(seconds)
        self._costs.saw_forward(count, pairs, seconds)

    def _planned(self, prompt: TokenIds, marks: Sequence[ContentMark]) -> Process[tuple[FoundDonors, Plan]]:
        fabric, rules = self._fabric, self._rules
        if rules.mode is Mode.DENSE:
            return FoundDonors((), {}, (), 0.0), dense_plan(len(prompt), rules.mode, "")
        thousands = len(prompt) / 1000
        search = self._finding.search(prompt, marks)
        answer = None
        yield fabric.sleep(thousands * self._table.find_s)
        while True:
            try:
                question = search.send(answer)
            except StopIteration as stop:
                found: FoundDonors = stop.value
                break
            if isinstance(question, Compute):
                answer = question.call()
            elif isinstance(question, AskDirectory):
                answer = yield fabric.find(question.lookup)
            else:
                assert isinstance(question, AskTokens)
                answer = yield fabric.tokens(question.wanted)
        yield fabric.sleep(thousands * self._table.plan_s)
        plan = make_plan(
            prompt,
            found.donors,
            rules.mode,
            rules.reuse,
            self._costs.costs,
            pulls=self._costs.pulls,
            key=CONTENT_KEY,
            by_context=rules.by_context,
            int8=fabric.int8(found.donors),
        )
        return found, plan

    def _believed(self) -> Costs:
        """What computing really takes here: the table's, whatever the agent believes."""
        return self._table.costs(pull_latency_s=1e-3, pull_bytes_per_s=1e9)

    def _saw_pull(self, plan: Plan, fetched: Fetched, seconds: float) -> None:
        """What the engine observes of a pull, and of placing its blocks."""
        holder = pulled_from_one(plan)
        if holder is not None and fetched.failed:
            self._costs.saw_cut(holder, fetched.wire_bytes, seconds, fetched.failed.values())
        elif holder is not None:
            self._costs.saw_pull(holder, fetched.wire_bytes, seconds)
        placed = sum(span.tokens for span in plan.spans if span.donor is not None) * self._table.layout.token_bytes
        self._costs.saw_align(placed, placed / self._table.align_bytes_per_s)

    def _outcome(
        self, started_at: float, queued_s: float, plan: Plan, covered: int, fetched: Fetched, found: FoundDonors
    ) -> Outcome:
        computed = len(recompute_positions(plan))
        exact = sum(span.tokens for span in plan.spans if span.kind in (SpanKind.EXACT, SpanKind.CONTINUED))
        misses: dict[str, int] = {}
        reasons = [miss for _, miss in found.dropped] + list(fetched.failed.values()) + [r.miss for r in plan.rejected]
        for miss in reasons:
            misses[miss.reason.value] = misses.get(miss.reason.value, 0) + 1
        return Outcome(
            agent=self.number,
            started_at=started_at,
            ttft_s=self._fabric.now - started_at,
            queued_s=queued_s,
            dense_s=self._table.dense_s(plan.tokens),
            tokens=plan.tokens,
            covered=covered,
            reused=plan.tokens - computed,
            exact=exact,
            pulled_bytes=fetched.wire_bytes,
            wait_lost_s=found.wait_lost_s + fetched.wait_lost_s,
            misses=misses,
        )

    def _publish(
        self, prompt: TokenIds, answer: TokenIds, plan: Plan, fetched: Fetched, marks: tuple[ContentMark, ...]
    ) -> Process[None]:
        """The prompt right away, the answer when it is decoded; as `reuse.publish`."""
        repaired = hops_at(plan)[-1][1] > 0
        variant = (self._lineage.continued(plan) or self._rng.randbytes(VARIANT_BYTES)) if repaired else b""
        self._fabric.keep(fetched, blocks_used(plan) if self._rules.replicates else ())
        segments = self._cut(prompt, plan, variant, marks)
        published_at = self._fabric.now
        yield from self._share(segments, variant, None)
        held = [segment.meta for segment in segments if self._fabric.held(segment.meta.anchor_id) is not None]
        self._supersede(superseded(plan, held))
        # The answer is decoded meanwhile.
        published_s = self._fabric.now - published_at
        yield self._fabric.sleep(max(0.0, len(answer) * self._table.decode_token_s - published_s))
        last = segments[-1].meta
        whole = np.concatenate((prompt, answer))[:-1]  # the last token of an answer has no row yet
        if len(whole) <= last.end:
            return
        before = segments[-2].meta if len(segments) > 1 else None
        marks = (*marks, *content_marks(whole, [(len(prompt), len(whole))], CONTENT_KEY))
        longer = self._cut(whole, plan, variant, marks, last)
        yield from self._share(longer, variant, before)
        if (
            replaced(last, [segment.meta for segment in longer])
            and self._fabric.held(longer[0].meta.anchor_id) is not None
        ):
            self._supersede([last.anchor_id])

    def _supersede(self, anchor_ids: Sequence[AnchorId]) -> None:
        """Forget, a little later, what longer anchors hold."""
        due = self._outdated.add(anchor_ids, self._fabric.now)
        if due:
            self._fabric.forget(due)

    def _cut(
        self,
        token_ids: TokenIds,
        plan: Plan,
        variant: bytes,
        marks: Sequence[ContentMark],
        last: AnchorMeta | None = None,
    ) -> list[Segment]:
        return cut_anchors(
            token_ids,
            hops=hops_at(plan),
            visibility=(),
            model_id=self._rules.model_id,
            layout=self._table.layout,
            key=CONTENT_KEY,
            variant=variant,
            start=0 if last is None else last.start,
            sequence=None if last is None else last.sequence_id,
            marks=marks,
        )

    def _share(self, segments: list[Segment], variant: bytes, before: AnchorMeta | None) -> Process[None]:
        """Copy, hash and publish what is not held yet, first to last."""
        self._lineage.published(segments, variant, None if before is None else before.anchor_id, CONTENT_KEY)
        for segment in segments:
            if self._fabric.held(segment.meta.anchor_id) is None:
                yield self._fabric.sleep(segment.meta.kv_bytes / self._table.publish_bytes_per_s)
            self._fabric.publish([segment])
