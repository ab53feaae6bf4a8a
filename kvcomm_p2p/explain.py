"""A prefill's report in words: what was or would be reused, why from there, why not from elsewhere, and what to do about it.

`explained` gives plain tables; whoever shows them decides how.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvcomm_p2p.report import PrefillReport, RunReport, SpanReport
from kvcomm_p2p.units import counted, duration, size

CONTEXTS = {
    "same": "the same text",
    "near": "nearly the same text",
    "role": "another beginning",
    "text": "as much other text",
    "bare": "little or nothing",
    "other": "more other text",
}
"""What a copy was computed behind, by the name of its provenance."""

KINDS = {"exact": "exact", "continued": "continued", "reuse": "reused", "recompute": "computed"}

REMEDIES = {
    "not_found": "nobody who may show it has it: wait for gossip, or check visibility, groups, and what was forgotten",
    "model_mismatch": "run the same model, dtype and tokenizer on both sides",
    "busy": "usually nothing: more holders appear by themselves",
    "stalled": "see whether the holder is frozen or the machine overloaded",
    "deadline": "see whether the holder is frozen or the network slow",
    "unreachable": "nothing if the holder was stopped, else start it again",
    "digest_mismatch": "a faulty or hostile holder: look into it if it is yours",
    "length_mismatch": "a faulty or hostile holder: look into it if it is yours",
    "layer0_mismatch": "a faulty or hostile holder: look into it if it is yours",
    "not_finite": "check the holder's model and dtype",
    "tokens_mismatch": "a faulty or hostile holder: look into it if it is yours",
    "residual": "nothing: the copy did not fit, and is not used for a while",
    "divergence": "nothing, or --mode fast if a larger divergence is acceptable",
    "too_short": "nothing: recomputing so few tokens costs next to nothing",
    "cost": "nothing: computing it is faster",
    "exact_only": "another mode or role, or a model with a measured profile",
    "cancelled": "nothing",
    "evicted": "a larger pool_bytes_max at the holder",
    "shutdown": "nothing: the agent or the holder was closing",
}
"""What to do about a miss, by the value of its `MissReason`."""

BY_CHOICE = frozenset({"cost", "too_short"})
"""Reasons for which a copy that could be had is not taken because computing is faster: nothing is wrong."""


@dataclass(frozen=True, slots=True)
class Table:
    """`rows` of cells under `headings`; without headings, pairs of a label and what there is to say. `numbers` and `names`:
    indices of columns whose cells are not to be broken, numbers to be right-aligned."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: tuple[int, ...] = ()
    names: tuple[int, ...] = ()


def explained(report: PrefillReport, own_name: str = "") -> tuple[Table, ...]:
    """The report as tables, most important first; what there is nothing to say about is left out.

    `own_name`: the agent whose report it is, to tell its own pool from its peers. Never holds any text of the prompt.
    """
    runs = [(report.runs, ""), (report.rejected_runs, ", rejected by the guard")]
    tables = [
        _summary(report),
        _spans(report, own_name),
        *(_run(number, run, own_name, remark) for those, remark in runs for number, run in enumerate(those, start=1)),
        _rivals(report.runs or report.rejected_runs, own_name),
        _misses(report),
        _remedies(report),
    ]
    if not report.planned_only:
        tables.append(_timings(report))
    return tuple(table for table in tables if table.rows)


def _summary(report: PrefillReport) -> Table:
    what = "plan" if report.planned_only else "last request"
    return Table(
        f"{what}: {counted(report.prompt_tokens, 'token')} in {report.mode} mode", (), tuple(_summary_rows(report))
    )


def _summary_rows(report: PrefillReport) -> Iterator[tuple[str, str]]:
    if report.dense_s:
        yield "predicted", f"{duration(report.planned_s)}, against {duration(report.dense_s)} for computing everything"
    counts = {
        "exact": report.exact_tokens,
        "continued": report.continued_tokens,
        "reused": report.reused_tokens,
        "computed": report.recomputed_tokens,
    }
    yield "tokens", ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)
    share = report.covered_tokens / report.prompt_tokens
    yield "covered", f"{counted(report.covered_tokens, 'token')} ({share:.0%}) stand in some donor's KV, used or not"
    yield "divergence", _divergence(report)
    if report.exact_only:
        yield "exact only", report.exact_only
    for name, ranges in sorted(report.slots.items()):
        yield f"slot {name}", "tokens " + ", ".join(_range(start, end) for start, end in ranges)
    if report.planned_only:
        return
    outcome = f"next token's logits after {duration(report.timings.total_s)}"
    if report.pulled_bytes:
        outcome += f"; {counted(report.pulled_tokens, 'token')} ({size(report.pulled_bytes)}) pulled"
    if report.wait_lost_s:
        outcome += f"; {duration(report.wait_lost_s)} lost waiting for peers"
    yield "outcome", outcome
    if report.fallback:
        yield "fallback", f"computed instead: {report.fallback}"


def _divergence(report: PrefillReport) -> str:
    parts = [f"{_kl(report.expected_kl)} expected"]
    if report.predicted_kl is not None:
        parts.append(f"{_kl(report.predicted_kl)} predicted by the guard")
    if math.isfinite(report.kl_max):
        parts.append(f"{_kl(report.kl_max)} allowed")
    return ", ".join(parts) + " (nats per token)"


def _spans(report: PrefillReport, own_name: str) -> Table:
    rows = [
        (
            _range(span.start, span.end),
            KINDS.get(span.kind, span.kind),
            _source(span.source, own_name),
            _ids(span.anchors),
            f"{span.donor_start:,}" if span.source else "",
            _span_why(span),
        )
        for span in report.spans
    ]
    return Table("spans", ("tokens", "how", "from", "anchor", "there at", "why"), tuple(rows), (4,), (0, 1, 3))


def _span_why(span: SpanReport) -> str:
    parts = [f"run {span.run}"] if span.run else []
    if span.why:
        parts.append(span.why)
    elif span.kind == "exact":
        parts.append("equal from the first token on")
    elif span.kind == "continued":
        parts.append("an earlier turn of its own")
    if span.probes:
        parts.append(f"{counted(span.probes, 'probe')} computed")
    return ": ".join(parts[:2]) + "".join(f", {part}" for part in parts[2:])


def _run(number: int, run: RunReport, own_name: str, remark: str) -> Table:
    behind = CONTEXTS.get(run.provenance, run.provenance)
    why = f"this copy was computed behind {behind} (likeness {run.likeness:.2f})"
    why += ", repaired once already; " if run.hops else "; "
    why += "no other copy is known" if not run.others else "others were worth less (see below)"
    repair = f"{counted(run.head_tokens, 'token')} of head and {counted(run.probes, 'probe')} are computed"
    if run.shift:
        repair += "; what the probes show corrects the rest"
    if run.memory:
        repair += "; what was observed at such copies before corrects the rest"
    cost = f"{size(run.kv_bytes)} from a peer" if run.kv_bytes else "nothing to pull"
    rows = [
        ("from", f"{_source(run.source, own_name)}, anchor {_ids(run.anchors)}, position {run.donor_start:,}"),
        ("why", why),
        ("moved", _moved(run.start - run.donor_start)),
        ("repair", repair),
        ("cost", f"{cost}; {duration(run.saved_s)} saved against computing it"),
        ("divergence", f"{_kl(run.expected_kl)} expected (nats per token of the answer)"),
    ]
    if run.deviation is not None:
        rows.append(("guard", f"moved KV was off by {run.deviation:.1%} where it was computed as well"))
    if run.predicted_deviation is not None:
        rows.append(("predictor", f"{run.predicted_deviation:.1%} were predicted before, of what was not computed"))
    return Table(f"run {number}: tokens {_range(run.start, run.end)}{remark}", (), tuple(rows))


def _rivals(runs: Sequence[RunReport], own_name: str) -> Table:
    rows = [
        (
            f"{number}",
            _range(other.start, other.end),
            _source(other.source, own_name),
            other.anchor,
            f"{CONTEXTS.get(other.provenance, other.provenance)} ({other.likeness:.2f})",
            "" if other.saved_s is None else duration(max(0.0, other.saved_s)),
            other.why,
        )
        for number, run in enumerate(runs, start=1)
        for other in run.others
    ]
    headings = ("run", "tokens", "from", "anchor", "behind (likeness)", "saves", "why not")
    return Table("copies that were not taken", headings, tuple(rows), (0, 5), (1, 3))


def _misses(report: PrefillReport) -> Table:
    rows = [(miss.what, miss.reason, miss.detail) for miss in report.misses]
    return Table("not reused", ("what", "reason", "detail"), tuple(rows), names=(1,))


def _remedies(report: PrefillReport) -> Table:
    reasons = dict.fromkeys(miss.reason for miss in report.misses)
    rows = [(reason, REMEDIES[reason]) for reason in reasons if reason in REMEDIES]
    return Table("what to do about it", (), tuple(rows))


def _timings(report: PrefillReport) -> Table:
    timings = report.timings
    phases = {
        "tokenize": timings.tokenize_s,
        "find donors": timings.find_s,
        "plan": timings.plan_s,
        "pull": timings.pull_s,
        "align": timings.align_s,
        "compute": timings.recompute_s,
        "all but tokenizing": timings.total_s,
    }
    rows = [(name, duration(seconds)) for name, seconds in phases.items() if seconds]
    return Table("time (phases overlap)", (), tuple(rows))


def _range(start: int, end: int) -> str:
    """Half-open, as everywhere in reports."""
    return f"{start:,}–{end:,}"


def _source(source: str, own_name: str) -> str:
    return "its own pool" if source and source == own_name else source


def _ids(anchors: Sequence[str]) -> str:
    if not anchors:
        return ""
    return anchors[0] + (f" +{len(anchors) - 1}" if len(anchors) > 1 else "")


def _moved(positions: int) -> str:
    if not positions:
        return "not at all"
    return f"by {counted(abs(positions), 'token')} towards the {'end' if positions > 0 else 'beginning'}"


def _kl(nats: float) -> str:
    return "not a number" if math.isnan(nats) else f"{nats:.3g}"
