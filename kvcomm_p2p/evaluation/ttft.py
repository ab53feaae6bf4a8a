"""Time to first token of a second agent that shares a document with a first one, against full prefill.

Two processes. The first agent prefills a document behind its own role's system prompt; the second asks something else
about the same document behind another role's, pulls the document's KV from the first and computes the rest. The same
process then prefills the same prompt in full, with the same code and by a plain call of the model. Every measured run
has another document, and the second agent keeps nothing of it. First it has never computed anything; then, the usual state
of an agent, it has answered once and knows its own role's prompt ("own role known").
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcomm_p2p.errors import KVCommError
from kvcomm_p2p.evaluation.documents import Document, chat, cut_documents, library, questions
from kvcomm_p2p.evaluation.metrics import interval95
from kvcomm_p2p.evaluation.progress import stepping
from kvcomm_p2p.evaluation.results import Result, Row
from kvcomm_p2p.evaluation.workers import Worker, pair
from kvcomm_p2p.model.registry import find_folder
from kvcomm_p2p.settings import Settings

if TYPE_CHECKING:
    from rich.console import Console

DOCUMENT_TOKENS = (1000, 4000)
RUNS = 5
LONG_RUNS = 3
LONG_TOKENS = 2500
"""Documents from here on are measured LONG_RUNS times: their full prefill takes many seconds on a CPU."""

WARM_UP_TOKENS = 300
HOLDER_ROLE, CONSUMER_ROLE = "planner", "reviewer"


def run(
    console: Console | None = None,
    *,
    model: str = "smollm2-135m",
    document_tokens: Sequence[int] = DOCUMENT_TOKENS,
    runs: int | None = None,
    tokens: int = 32,
    seed: int = 0,
) -> Result:
    """Medians over `runs` documents of each length (None: 5, long ones 3); divergence over `tokens` greedy tokens.

    One more, short document goes first and is not counted: it makes both sides load what they load once. Raises
    ModelError, and KVCommError if a run did not pull its whole document from the other process.
    """
    plan = [(length, runs or (RUNS if length < LONG_TOKENS else LONG_RUNS)) for length in document_tokens]
    tokenizer = load_tokenizer(model)
    rows: list[Row] = []
    with (
        stepping(console, "time to first token", 2 * sum(count for _, count in plan) + 1) as step,
        pair(model) as (holder, consumer),
    ):
        _measured(holder, consumer, cut_documents(tokenizer, WARM_UP_TOKENS, 1)[0], 0, 2, checked=False)
        step("")
        topics = library()
        documents = {length: cut_documents(tokenizer, length, count, topics) for length, count in plan}
        for known in (False, True):
            if known:
                consumer.ask(do="hold", messages=chat(CONSUMER_ROLE, "Hello."), slots={"document": "Nothing yet."})
            for length in documents:
                answers = []
                for number, document in enumerate(documents[length]):
                    answers.append(_measured(holder, consumer, document, number, tokens, held=known))
                    step(f"{length:,} tokens, {document.title}")
                rows += _rows(f"{length:,} shared tokens{', own role known' if known else ''}", answers, seed)
    return Result("bench ttft", rows, seed)


def covers(report: dict[str, Any], peer: str) -> str:
    """Why a report (as a dict) does not show that the slot "document" came from `peer`, or "" if it does.

    All of the document's blocks must have been pulled; its head and what shares a token with its borders is computed.
    """
    start, end = report["slots"]["document"][0]
    reused = sum(
        min(span["end"], end) - max(span["start"], start)
        for span in report["spans"]
        if span["source"] == peer and span["start"] < end and start < span["end"]
    )
    if report["fallback"]:
        return f"full prefill instead: {report['fallback']}"
    if report["pulled_tokens"] < end - start or reused < 0.9 * (end - start):
        misses = "; ".join(f"{miss['what']}: {miss['reason']} {miss['detail']}" for miss in report["misses"])
        return f"{report['pulled_tokens']} pulled and {reused} reused of {end - start} tokens ({misses or 'no miss'})"
    return ""


def _measured(
    holder: Worker,
    consumer: Worker,
    document: Document,
    number: int,
    tokens: int,
    *,
    checked: bool = True,
    held: bool = False,
) -> dict[str, Any]:
    """One run; `held`: the holder has this document already, from an earlier one."""
    first, second = questions(number + 2)[-2:]
    slots = {"document": document.text}
    if not held:
        anchors = holder.ask(do="hold", messages=chat(HOLDER_ROLE, first), slots=slots)["anchors"]
        consumer.ask(do="wait", anchors=anchors)
    answer = consumer.ask(
        do="measure",
        messages=chat(CONSUMER_ROLE, second),
        slots=slots,
        tokens=tokens,
        dense_first=bool(number % 2),
    )
    problem = covers(answer["report"], holder.name)
    if checked and problem:
        raise KVCommError(f"the document {document.title!r} was not pulled from the peer: {problem}")
    return answer


def _rows(case: str, answers: Sequence[dict[str, Any]], seed: int) -> list[Row]:
    n = len(answers)
    reports = [answer["report"] for answer in answers]

    def ttft(metric: str, baseline: str) -> Row:
        shared, other = [a["ttft_s"] for a in answers], [a[baseline] for a in answers]
        # Per run, since each has a prompt of its own length.
        ratio = median(slow / fast for slow, fast in zip(other, shared, strict=True))
        return Row(case, metric, median(shared), "s", n, interval95(shared, _median, seed), median(other), ratio)

    def plain(metric: str, values: list[float], unit: str) -> Row:
        return Row(case, metric, median(values), unit, n)

    phases = [
        plain(f"of it: {name}", [report["timings"][key] for report in reports], "s")
        for name, key in (
            ("find", "find_s"),
            ("plan", "plan_s"),
            ("pull", "pull_s"),
            ("align", "align_s"),
            ("recompute", "recompute_s"),
        )
    ]
    kl, top1 = [a["kl_mean"] for a in answers], [a["top1"] for a in answers]
    return [
        ttft("first token, against full prefill", "dense_ttft_s"),
        ttft("first token, against a plain model call", "plain_ttft_s"),
        *phases,
        plain("prompt tokens", [report["prompt_tokens"] for report in reports], ""),
        plain("recomputed tokens", [report["recomputed_tokens"] for report in reports], ""),
        plain("pulled", [report["pulled_bytes"] / 1e6 for report in reports], "MB"),
        Row(case, "KL from full prefill, mean", float(np.mean(kl)), "nats/token", n),
        Row(case, "same most likely token", float(np.mean(top1)), "", n),
    ]


def _median(values: Any) -> float:
    return float(np.median(values))


def load_tokenizer(model: str) -> Any:
    """The tokenizer of a model that is here, without the model. Raises ModelError saying how to get it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(find_folder(model, Settings.from_env().cache_dir), local_files_only=True)
