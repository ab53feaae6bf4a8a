"""Collects what happened to one prompt and turns it into a `PrefillReport`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from kvcomm_p2p.planning.finding import FoundDonors
from kvcomm_p2p.planning.spans import blocks_needed, pulled_bytes, span_hops
from kvcomm_p2p.planning.types import Donor, Mode, Plan, Rejected, Rival, RunChoice, Span, SpanKind
from kvcomm_p2p.prompts import PreparedPrompt
from kvcomm_p2p.protocol.anchors import BlockKey, Miss
from kvcomm_p2p.report import MissReport, PrefillReport, RivalReport, RunReport, SpanReport, Timings
from kvcomm_p2p.reuse.pulling import Pulled

ID_BYTES_SHOWN = 4
"""How much of an anchor's id people are shown."""


class ReportBuilder:
    """One per `fill`; the clock starts when it is made."""

    def __init__(self, prompt: PreparedPrompt, mode: Mode, peer_name: Callable[[bytes], str]) -> None:
        self._prompt = prompt
        self._mode = mode
        self._peer_name = peer_name
        self._started = time.perf_counter()
        self._misses: list[MissReport] = []
        self._find_s = self._plan_s = self._wait_lost_s = 0.0
        self._pulled = Pulled()
        self._predicted_kl: float | None = None
        self._deviations: Mapping[int, float] = {}
        self._foreseen: Mapping[int, float] = {}
        self._fallback = ""
        self._widened = False
        self._plan: Plan | None = None
        self._rejected: Plan | None = None

    def found(self, found: FoundDonors) -> None:
        """The search is over."""
        self._find_s = time.perf_counter() - self._started
        self._wait_lost_s += found.wait_lost_s
        for holder, miss in found.dropped:
            what = "prompt" if holder is None else f"token ids from {self._peer_name(holder)}"
            self._misses.append(MissReport(what, miss.reason.value, miss.detail))

    def planned(self, plan: Plan, seconds: float) -> None:
        """The plan is made."""
        self._plan_s = seconds
        self._plan = plan
        self.recomputed(plan.rejected)

    def recomputed(self, rejected_runs: Sequence[Rejected]) -> None:
        """Something that was found is not used, one reason each."""
        for rejected in rejected_runs:
            what = f"tokens {rejected.start}-{rejected.end} from {self._peer_name(rejected.holder)}"
            self._misses.append(MissReport(what, rejected.miss.reason.value, rejected.miss.detail))

    def pulled(self, pulled: Pulled, failed: Mapping[BlockKey, Miss]) -> None:
        """Blocks are here, or are not: one miss per anchor and reason."""
        self._pulled = pulled
        self._wait_lost_s += pulled.wait_lost_s
        grouped: dict[tuple[bytes, str], tuple[int, Miss]] = {}
        for key, miss in failed.items():
            count, _ = grouped.get((key.anchor_id, miss.reason.value), (0, miss))
            grouped[key.anchor_id, miss.reason.value] = (count + 1, miss)
        for (anchor_id, reason), (count, miss) in grouped.items():
            what = f"{count} block{'s' if count > 1 else ''} of anchor {shown_id(anchor_id)}"
            self._misses.append(MissReport(what, reason, miss.detail))

    def foreseen(self, deviations: Mapping[int, float]) -> None:
        """The prefix predictor has spoken, before the repair. `deviations`: by `RunChoice.start`, of what is not recomputed."""
        self._foreseen = deviations

    def guarded(
        self,
        predicted_kl: float | None,
        deviations: Mapping[int, float],
        fallback: str,
        plan: Plan | None = None,
        *,
        widened: bool = False,
    ) -> None:
        """The guard has spoken (on a fallback: of `plan`). `deviations`: run number -> mean over its compared tokens. `widened`:
        it asked for longer heads first."""
        self._widened = widened
        self._predicted_kl = predicted_kl
        self._deviations = deviations
        self._fallback = fallback
        if fallback:
            self._rejected = plan
            self._misses.append(MissReport("reused runs", "residual", fallback))

    def finish(self, plan: Plan, timings: Timings) -> PrefillReport:
        """The report of the plan that was carried out; `timings` gives pull, align and recompute."""
        counts = dict.fromkeys(SpanKind, 0)
        for span in plan.spans:
            counts[span.kind] += span.tokens - span.probes
            counts[SpanKind.RECOMPUTE] += span.probes
        planned = self._plan or plan
        return PrefillReport(
            mode=self._mode.value,
            prompt_tokens=plan.tokens,
            exact_tokens=counts[SpanKind.EXACT],
            continued_tokens=counts[SpanKind.CONTINUED],
            reused_tokens=counts[SpanKind.REUSE],
            recomputed_tokens=counts[SpanKind.RECOMPUTE],
            pulled_bytes=self._pulled.kv_bytes,
            pulled_tokens=sum(len(block.token_ids) for block in self._pulled.remote.values()),
            spans=tuple(self._span(span) for span in _joined(plan)),
            misses=tuple(self._misses),
            timings=replace(
                timings,
                find_s=self._find_s,
                plan_s=self._plan_s,
                total_s=time.perf_counter() - self._started,
            ),
            wait_lost_s=self._wait_lost_s,
            predicted_kl=self._predicted_kl,
            fallback=self._fallback,
            slots=self._prompt.slots,
            covered_tokens=planned.covered,
            expected_kl=planned.kl,
            planned_s=planned.planned_s,
            dense_s=planned.dense_s,
            runs=self._runs(plan),
            kl_max=planned.kl_max,
            exact_only=planned.exact_only,
            rejected_runs=() if self._rejected is None else self._runs(self._rejected),
            widened=self._widened,
        )

    def _runs(self, plan: Plan) -> tuple[RunReport, ...]:
        return tuple(self._run(plan, number, run) for number, run in enumerate(plan.runs, start=1))

    def _run(self, plan: Plan, number: int, run: RunChoice) -> RunReport:
        spans = [span for span in plan.spans if span.run == number]
        return RunReport(
            start=spans[0].start,
            end=spans[-1].end,
            source=self._peer_name(run.donor.holder),
            donor_start=spans[0].donor_start,
            provenance=run.provenance.name.lower(),
            likeness=run.likeness,
            head_tokens=sum(span.tokens for span in spans if span.kind is SpanKind.RECOMPUTE),
            probes=sum(span.probes for span in spans),
            shift=any(span.shift for span in spans),
            expected_kl=run.kl,
            saved_s=run.saved_s,
            deviation=self._deviations.get(number),
            anchors=_anchors(spans),
            hops=max(span_hops(span) for span in spans),
            kv_bytes=sum(pulled_bytes(spans, run.donor.anchors[0].kv_bytes // run.donor.anchors[0].tokens).values()),
            memory=run.repair.memory,
            predicted_deviation=self._foreseen.get(run.start),
            others=tuple(self._rival(rival) for rival in run.others),
        )

    def _rival(self, rival: Rival) -> RivalReport:
        return RivalReport(
            start=rival.start,
            end=rival.end,
            source=self._peer_name(rival.donor.holder),
            anchor=_anchor_at(rival.donor, rival.donor_start),
            donor_start=rival.donor_start,
            provenance=rival.provenance.name.lower(),
            likeness=rival.likeness,
            saved_s=rival.saved_s,
            why=rival.why,
        )

    def _span(self, span: Span) -> SpanReport:
        source = ""
        if span.donor is not None and span.kind is not SpanKind.RECOMPUTE:
            source = self._peer_name(span.donor.holder)
        return SpanReport(
            start=span.start,
            end=span.end,
            kind=span.kind.value,
            source=source,
            donor_start=span.donor_start if source else 0,
            why=span.why,
            probes=span.probes,
            anchors=_anchors([span]) if source else (),
            run=span.run,
        )


def shown_id(anchor_id: bytes) -> str:
    """The beginning of an id, for people."""
    return anchor_id[:ID_BYTES_SHOWN].hex()


def _anchors(spans: Sequence[Span]) -> tuple[str, ...]:
    """Those that the spans come from, in order."""
    ids = [meta.anchor_id for span in spans for meta, _ in blocks_needed(span)]
    return tuple(shown_id(anchor_id) for anchor_id in dict.fromkeys(ids))


def _anchor_at(donor: Donor, position: int) -> str:
    return next(shown_id(meta.anchor_id) for meta in donor.anchors if meta.start <= position < meta.end)


def _joined(plan: Plan) -> list[Span]:
    """Spans with neighbours that tell the same put together (a plan with missing blocks is cut at block borders)."""
    joined: list[Span] = []
    for span in plan.spans:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.donor is span.donor
            and (last.kind, last.why, last.run) == (span.kind, span.why, span.run)
            and (span.donor is None or last.donor_start + last.tokens == span.donor_start)
        ):
            joined[-1] = replace(last, end=span.end, probes=last.probes + span.probes)
        else:
            joined.append(span)
    return joined
