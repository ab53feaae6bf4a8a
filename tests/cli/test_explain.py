"""`kvcomm explain`: what it prints, and a report in words."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness import Kvcomm
from rich.console import Console

from kvcomm_p2p.cli.explain import rendered
from kvcomm_p2p.explain import CONTEXTS, KINDS, REMEDIES, Table, explained
from kvcomm_p2p.planning.types import Provenance, SpanKind
from kvcomm_p2p.protocol.anchors import MissReason
from kvcomm_p2p.report import MissReport, PrefillReport, RivalReport, RunReport, SpanReport, Timings

REPORT = PrefillReport(
    mode="balanced",
    prompt_tokens=12_090,
    exact_tokens=24,
    continued_tokens=0,
    reused_tokens=11_000,
    recomputed_tokens=1_066,
    pulled_bytes=46_080_000,
    pulled_tokens=11_040,
    spans=(
        SpanReport(0, 24, "exact", "me", anchors=("fcb0e2b2",)),
        SpanReport(24, 34, "recompute", why="no donor"),
        SpanReport(34, 66, "recompute", why="head of a reused run", run=1),
        SpanReport(66, 11_072, "reuse", "ann", 57, "", 6, ("c60ce4f0", "a7158d73", "ba8c6d28"), 1),
        SpanReport(11_072, 12_090, "recompute", why="no donor"),
    ),
    misses=(
        MissReport("tokens 34-90 from bob", "too_short", "56 equal tokens, fewer than 64"),
        MissReport("token ids from cyd", "stalled"),
        MissReport("tokens 11100-11130 from bob", "too_short", "30 equal tokens, fewer than 64"),
    ),
    timings=Timings(tokenize_s=0.003, find_s=0.001, pull_s=0.189, recompute_s=0.3, total_s=0.507),
    wait_lost_s=0.25,
    predicted_kl=0.0042,
    slots={"report": ((35, 11_072),)},
    covered_tokens=11_102,
    expected_kl=0.00114,
    planned_s=0.606,
    dense_s=70.6,
    runs=(
        RunReport(
            start=34,
            end=11_072,
            source="ann",
            donor_start=25,
            provenance="role",
            likeness=0.82,
            head_tokens=32,
            probes=6,
            shift=True,
            expected_kl=0.00114,
            saved_s=62.6,
            deviation=0.163,
            anchors=("c60ce4f0", "a7158d73", "ba8c6d28"),
            kv_bytes=46_080_000,
            others=(
                RivalReport(34, 11_072, "me", "c00e37cf", 3, "bare", 0.4, 60.1, "less alike context"),
                RivalReport(521, 1_000, "bob", "a7158d74", 9, "other", 0.1, None, "the copy has 2 repairs behind it"),
            ),
        ),
    ),
    kl_max=0.02,
)


def cells(table: Table) -> dict[str, str]:
    """A table of labels and what there is to say."""
    return {row[0]: row[1] for row in table.rows}


def titled(report: PrefillReport, beginning: str) -> Table:
    [table] = [table for table in explained(report, "me") if table.title.startswith(beginning)]
    return table


def shown(report: PrefillReport, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    for table in explained(report, "me"):
        console.print(rendered(table))
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_the_summary() -> None:
    table = titled(REPORT, "last request: 12,090 tokens in balanced mode")
    assert cells(table) == {
        "predicted": "606 ms, against 1 min 11 s for computing everything",
        "tokens": "24 exact, 11,000 reused, 1,066 computed",
        "covered": "11,102 tokens (92%) stand in some donor's KV, used or not",
        "divergence": "0.00114 expected, 0.0042 predicted by the guard, 0.02 allowed (nats per token)",
        "slot report": "tokens 35–11,072",
        "outcome": "next token's logits after 507 ms; 11,040 tokens (46.1 MB) pulled; 250 ms lost waiting for peers",
    }


def test_a_plan_has_no_outcome() -> None:
    plan = replace(REPORT, planned_only=True, predicted_kl=None, exact_only="no measured profile for tiny")
    words = cells(titled(plan, "plan: 12,090 tokens"))
    assert "outcome" not in words
    assert words["exact only"] == "no measured profile for tiny"
    assert not any(table.title.startswith("time") for table in explained(plan))
    assert cells(titled(REPORT, "time")) == {
        "tokenize": "3 ms",
        "find donors": "1 ms",
        "pull": "189 ms",
        "compute": "300 ms",
        "all but tokenizing": "507 ms",
    }


def test_spans_say_where_from_and_why() -> None:
    assert titled(REPORT, "spans").rows == (
        ("0–24", "exact", "its own pool", "fcb0e2b2", "0", "equal from the first token on"),
        ("24–34", "computed", "", "", "", "no donor"),
        ("34–66", "computed", "", "", "", "run 1: head of a reused run"),
        ("66–11,072", "reused", "ann", "c60ce4f0 +2", "57", "run 1: 6 probes computed"),
        ("11,072–12,090", "computed", "", "", "", "no donor"),
    )


def test_a_run_says_why_this_copy_and_what_it_costs() -> None:
    assert cells(titled(REPORT, "run 1: tokens 34–11,072")) == {
        "from": "ann, anchor c60ce4f0 +2, position 25",
        "why": "this copy was computed behind another beginning (likeness 0.82); others were worth less (see below)",
        "moved": "by 9 tokens towards the end",
        "repair": "32 tokens of head and 6 probes are computed; what the probes show corrects the rest",
        "cost": "46.1 MB from a peer; 1 min 3 s saved against computing it",
        "divergence": "0.00114 expected (nats per token of the answer)",
        "guard": "moved KV was off by 16.3% where it was computed as well",
    }
    own = replace(
        REPORT.runs[0], source="me", kv_bytes=0, hops=1, deviation=None, others=(), donor_start=34, shift=False
    )
    words = cells(titled(replace(REPORT, runs=(own,)), "run 1"))
    assert words["cost"].startswith("nothing to pull")
    assert words["from"].startswith("its own pool")
    assert words["why"].endswith("repaired once already; no other copy is known")
    assert words["moved"] == "not at all"
    assert "guard" not in words


def test_why_the_others_lost() -> None:
    assert titled(REPORT, "copies that were not taken").rows == (
        ("1", "34–11,072", "its own pool", "c00e37cf", "little or nothing (0.40)", "1 min 0 s", "less alike context"),
        ("1", "521–1,000", "bob", "a7158d74", "more other text (0.10)", "", "the copy has 2 repairs behind it"),
    )


def test_every_miss_is_told_and_every_reason_once_what_to_do() -> None:
    assert titled(REPORT, "not reused").rows == tuple((miss.what, miss.reason, miss.detail) for miss in REPORT.misses)
    advice = titled(REPORT, "what to do").rows
    assert advice == (("too_short", REMEDIES["too_short"]), ("stalled", REMEDIES["stalled"]))


def test_rejected_runs_and_the_fallback_are_told() -> None:
    report = replace(
        REPORT, runs=(), rejected_runs=REPORT.runs, fallback="0.3 predicted, 0.02 allowed", predicted_kl=0.3
    )
    assert cells(titled(report, "run 1: tokens 34–11,072, rejected by the guard"))["from"].startswith("ann")
    assert cells(titled(report, "last request"))["fallback"] == "computed instead: 0.3 predicted, 0.02 allowed"
    assert len(titled(report, "copies that were not taken").rows) == 2


def test_broken_kv_and_no_limit_are_shown_in_words() -> None:
    words = cells(titled(replace(REPORT, predicted_kl=float("nan"), kl_max=float("inf")), "last request"))
    assert words["divergence"] == "0.00114 expected, not a number predicted by the guard (nats per token)"


def test_a_dense_report_has_little_to_say() -> None:
    dense = replace(
        REPORT, mode="dense", spans=(SpanReport(0, 12_090, "recompute", why="dense"),), misses=(), runs=(), dense_s=0.0
    )
    titles = [table.title.split(":")[0] for table in explained(dense)]
    assert titles == ["last request", "spans", "time (phases overlap)"]
    assert "predicted" not in cells(titled(dense, "last request"))


def test_words_exist_for_every_kind_provenance_and_reason() -> None:
    assert set(CONTEXTS) == {each.name.lower() for each in Provenance}
    assert set(KINDS) == {kind.value for kind in SpanKind}
    assert set(REMEDIES) == {reason.value for reason in MissReason}


@pytest.mark.parametrize("width", [60, 80, 120])
def test_it_fits_a_narrow_terminal_and_loses_nothing(width: int) -> None:
    text = shown(REPORT, width)
    assert max(map(len, text.splitlines())) <= width
    squeezed = "".join(text.split())
    for table in explained(REPORT, "me"):
        for row in table.rows:
            # Wrapped cells stand in columns; words do not.
            for word in " ".join(row).split():
                assert word in squeezed or width < 80, word


def test_names_are_never_taken_for_markup() -> None:
    assert "[red]bob" in shown(replace(REPORT, misses=(MissReport("token ids from [red]bob", "busy"),)), 120)


def test_a_report_survives_json() -> None:
    assert PrefillReport.from_dict(json.loads(json.dumps(REPORT.as_dict()))) == REPORT
    with pytest.raises(ValueError, match="mode"):
        PrefillReport.from_dict({})


def test_the_plan_of_a_prompt_and_the_last_request(kvcomm: Kvcomm, tmp_path: Path) -> None:
    kvcomm.node("coder", "--system", "Be brief.")
    nothing = kvcomm.run("explain", "coder", "--last")
    assert (nothing.returncode, nothing.stdout) == (1, "")
    assert "node 'coder' has had no request yet: ask it something first" in nothing.stderr
    (tmp_path / "report.txt").write_text("profits rose", encoding="utf-8")
    slot = ("--slot", f"r=@{tmp_path / 'report.txt'}", "--file", str(tmp_path / "report.txt"))
    plan = kvcomm.run("explain", "coder", "--mode", "exact", *slot, "So {r}?")
    assert plan.returncode == 0
    assert "plan: 7 tokens in exact mode" in plan.stdout
    assert "planner" in plan.stdout and "head of a reused run" in plan.stdout
    assert kvcomm.run("explain", "coder", "--last").returncode == 1, "a plan is no request"
    kvcomm.run("ask", "--node", "coder", "What is new?")
    last = kvcomm.run("explain", "coder", "--last", COLUMNS="80")
    assert "last request: 5 tokens in balanced mode" in last.stdout
    assert REMEDIES["busy"] in last.stdout
    assert max(map(len, last.stdout.splitlines())) <= 80


def test_json_is_the_report(kvcomm: Kvcomm) -> None:
    kvcomm.node("coder")
    plan: dict[str, Any] = json.loads(kvcomm.run("explain", "coder", "one two three", "--json").stdout)
    assert (plan["prompt_tokens"], plan["planned_only"], plan["mode"]) == (3, True, "balanced")
    kvcomm.run("ask", "--node", "coder", "--mode", "exact", "one two three four")
    last = json.loads(kvcomm.run("explain", "coder", "--last", "--json").stdout)
    assert (last["prompt_tokens"], last["planned_only"], last["mode"]) == (4, False, "exact")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("nobody", "hi"), 1, "no node named 'nobody' runs here (these run: coder)"),
        (("nobody", "--last"), 1, "no node named 'nobody' runs here (these run: coder)"),
        (("coder", "LONG"), 1, "9,000 tokens"),
        (("coder", " "), 1, "the prompt is empty: write it in quotes, like kvcomm explain"),
        (("coder", "-"), 1, "the prompt is empty"),
        (("coder", "--slot", "x=y", "hi"), 1, "no text refers to slot 'x'"),
        (("coder", "--slot", "x", "hi"), 1, "is not NAME=TEXT"),
        (("coder", "what {x} says"), 1, "nothing fills {x}: give --slot x=TEXT or --slot x=@FILE"),
        (("coder", "--slot", "x=@/none", "{x}"), 1, "/none cannot be read"),
        (("coder", "CRASH"), 70, "internal error, please report it"),
        (("coder", "--mode", "wild", "hi"), 2, "--mode"),
        (("coder",), 2, "give either a prompt or --last"),
        (("coder", "hi", "--last"), 2, "give either a prompt or --last"),
        (("coder", "--last", "--mode", "exact"), 2, "give either a prompt or --last"),
        ((), 2, "NODE"),
    ],
)
def test_what_can_go_wrong(kvcomm: Kvcomm, arguments: tuple[str, ...], code: int, message: str) -> None:
    kvcomm.node("coder")
    done = kvcomm.run("explain", *arguments)
    assert done.returncode == code
    assert message in done.stderr
    assert done.stdout == ""
    assert code in (2, 70) or done.stderr.count("\n") == 1
