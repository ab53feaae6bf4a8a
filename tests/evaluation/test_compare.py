"""Comparison on real agents with a tiny model, and the checks that decide what a measurement may claim."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvcomm_p2p.agent import Agent
from kvcomm_p2p.errors import UsageError
from kvcomm_p2p.evaluation.compare import compare
from kvcomm_p2p.evaluation.demo import Turn, _account, _rows, _table
from kvcomm_p2p.evaluation.documents import chat
from kvcomm_p2p.evaluation.ttft import covers
from kvcomm_p2p.settings import Settings

TEXT = "The quick brown fox jumps over the lazy dog. " * 12


def settings(folder: Path) -> Settings:
    return Settings(state_dir=folder, cache_dir=folder, runtime_dir=folder)


def test_compare_on_one_agent_is_identical_and_is_found_again(chat_runner: Any, tmp_path: Path) -> None:
    async def scenario() -> tuple[Any, Any]:
        async with Agent("a", model=chat_runner, settings=settings(tmp_path)) as agent:
            first = await compare(agent, chat("planner", "What?"), {"document": TEXT}, tokens=6)
            again = await compare(agent, chat("planner", "What?"), {"document": TEXT}, tokens=6)
            return first, again

    first, again = asyncio.run(scenario())
    assert first.report.recomputed_tokens == first.report.prompt_tokens
    # The second time everything but the last token comes from the own pool, unless recomputing so little is cheaper.
    assert again.report.exact_tokens in (0, first.report.prompt_tokens - 1)
    for comparison in (first, again):
        assert comparison.divergence.kl_max < 1e-6
        assert comparison.divergence.identical_tokens == comparison.divergence.tokens
        assert comparison.text == comparison.dense_text
        assert 0 < comparison.ttft_s < comparison.total_s and comparison.dense_ttft_s > 0
        plain = json.loads(json.dumps(comparison.as_dict()))
        assert plain["reply"]["report"]["slots"]["document"] == [list(first.report.slots["document"][0])]


def test_compare_of_no_tokens_is_refused(chat_runner: Any, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Agent("a", model=chat_runner, settings=settings(tmp_path)) as agent:
            await compare(agent, "hello", tokens=0)

    with pytest.raises(UsageError, match="at least 1"):
        asyncio.run(scenario())


def report(**changes: Any) -> dict[str, Any]:
    """90 prompt tokens of a role, 1,000 of the document, 10 of a question; pulled from "holder"."""
    spans = [
        {"start": 0, "end": 122, "kind": "recompute", "source": "", "probes": 0},
        {"start": 122, "end": 1090, "kind": "reuse", "source": "holder", "probes": 0},
        {"start": 1090, "end": 1100, "kind": "recompute", "source": "", "probes": 0},
    ]
    return {
        "prompt_tokens": 1100,
        "exact_tokens": 0,
        "reused_tokens": 968,
        "recomputed_tokens": 132,
        "pulled_tokens": 1024,
        "pulled_bytes": 1024 * 46080,
        "slots": {"document": [[90, 1090]]},
        "spans": spans,
        "misses": [],
        "fallback": "",
        "wait_lost_s": 0.0,
    } | changes


def test_a_document_counts_as_pulled_only_if_it_came_from_the_peer() -> None:
    assert covers(report(), "holder") == ""
    assert "0 reused" in covers(report(), "consumer")
    assert "999 pulled" in covers(report(pulled_tokens=999), "holder")
    assert "residual" in covers(report(fallback="the residual was too large"), "holder")
    miss = {"what": "prompt", "reason": "not_found", "detail": ""}
    assert "not_found" in covers(report(pulled_tokens=0, misses=[miss]), "holder")


def turn(**changes: Any) -> Turn:
    reply = {"ttft_s": 0.5, "text": "an answer", "report": report(**changes)}
    comparison = {"ttft_s": 0.5, "dense_ttft_s": 3.0, "kl_mean": 0.002, "top1": 0.97, "tokens": 32, "reply": reply}
    return Turn("teacher", reply, comparison)


def shown(turns: list[Turn]) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(_table(turns))
    return console.export_text()


def test_the_table_says_who_read_what_and_how_much_sooner() -> None:
    text = shown([Turn("archivist", turn().reply), turn()])
    for cell in ("archivist", "teacher", "holder 968", "132", "0.50 s", "3.00 s", "6.0 ×", "97%", "0.0020"):
        assert cell in text


def test_an_account_names_what_went_wrong() -> None:
    assert "took over 968 from holder and read 132 itself" in _account(turn())
    assert "0.20 s of it lost" in _account(turn(wait_lost_s=0.2))
    alone = turn(spans=[], fallback="the heads differ")
    assert "read all of them itself" in _account(alone) and "the heads differ" in _account(alone)


def test_rows_of_a_turn_carry_baseline_and_ratio() -> None:
    [first_token] = [row for row in _rows(turn()) if row.metric == "first token"]
    assert (first_token.value, first_token.baseline, first_token.ratio) == (0.5, 3.0, 6.0)
