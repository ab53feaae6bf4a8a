"""A peer that dies or freezes while its KV is being pulled: is the answer right, and how long was it waited for?

Two processes per case. The consumer sends the signal itself, at the moment that the case names, so that it always
strikes in the middle of a pull; a case whose pull was over before is measured again with another document.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcomm_p2p.errors import KVCommError
from kvcomm_p2p.evaluation.documents import Document, chat, cut_documents, questions
from kvcomm_p2p.evaluation.progress import stepping
from kvcomm_p2p.evaluation.results import Result, Row
from kvcomm_p2p.evaluation.ttft import CONSUMER_ROLE, HOLDER_ROLE, covers, load_tokenizer
from kvcomm_p2p.evaluation.workers import pair

if TYPE_CHECKING:
    from rich.console import Console

DOCUMENT_TOKENS = 1000
ATTEMPTS = 3
WAIT_LOST_MAX_S = 0.25
"""What the report may show as lost to a peer that does not deliver."""


@dataclass(frozen=True, slots=True)
class Case:
    """`signal` is sent once more than `after_bytes` bytes came (-1: once the token ids are known). `same_role`: the
    consumer's prompt begins as the holder's, so that only exact KV is used and the answer must be identical."""

    signal: str
    after_bytes: int
    same_role: bool

    @property
    def title(self) -> str:
        what = "killed" if self.signal == "SIGKILL" else "frozen"
        when = "before the first block" if self.after_bytes < 0 else "in the middle of the pull"
        return f"{what} {when}, {'same' if self.same_role else 'another'} prefix"


CASES = tuple(
    Case(signal, after_bytes, same_role)
    for signal in ("SIGKILL", "SIGSTOP")
    for after_bytes, same_role in ((-1, True), (4 << 20, True), (4 << 20, False))
)


def run(
    console: Console | None = None,
    *,
    model: str = "smollm2-135m",
    document_tokens: int = DOCUMENT_TOKENS,
    tokens: int = 32,
    seed: int = 0,
) -> Result:
    """Every case once, each with processes of its own. Raises ModelError, and KVCommError if a pull could not be struck
    in the middle, or if an answer from exact KV differs from the one of full prefill."""
    documents = cut_documents(load_tokenizer(model), document_tokens, ATTEMPTS)
    rows: list[Row] = []
    with stepping(console, "faults", len(CASES)) as step:
        for case in CASES:
            rows += _rows(case, _struck(model, case, documents, tokens))
            step(case.title)
    return Result("bench faults", rows, seed)


def _struck(model: str, case: Case, documents: list[Document], tokens: int) -> dict[str, Any]:
    """One case, measured until the signal came in the middle."""
    problem = ""
    for document in documents:
        answer = _attempt(model, case, document, tokens)
        report = answer["report"]
        if answer["struck_at_bytes"] < 0:
            problem = "the pull was over before the signal"
        elif not covers(report, "holder"):
            problem = "everything had arrived before the signal took effect"
        else:
            return answer
    raise KVCommError(f"{case.title}: no pull of {len(documents)} could be struck in the middle ({problem})")


def _attempt(model: str, case: Case, document: Document, tokens: int) -> dict[str, Any]:
    first, second = questions(2)
    role = HOLDER_ROLE if case.same_role else CONSUMER_ROLE
    with pair(model) as (holder, consumer):
        try:
            slots = {"document": document.text}
            held = holder.ask(do="hold", messages=chat(HOLDER_ROLE, first), slots=slots)
            consumer.ask(do="wait", anchors=held["anchors"])
            return consumer.ask(
                do="strike",
                messages=chat(role, second),
                slots=slots,
                tokens=tokens,
                pid=holder.pid,
                signal=case.signal,
                after_bytes=case.after_bytes,
            )
        finally:
            holder.kill()


def _rows(case: Case, answer: dict[str, Any]) -> list[Row]:
    report = answer["report"]
    if case.same_role and answer["identical_tokens"] != answer["tokens"]:
        raise KVCommError(
            f"{case.title}: only exact KV was used, but the answer differs from full prefill after "
            f"{answer['identical_tokens']} tokens"
        )
    title = case.title
    dense_s = answer["dense_ttft_s"]
    ratio = dense_s / answer["ttft_s"]
    reused = report["exact_tokens"] + report["reused_tokens"]
    return [
        Row(title, "time lost waiting", report["wait_lost_s"], "s", 1),
        Row(title, "first token, against full prefill", answer["ttft_s"], "s", 1, None, dense_s, ratio),
        Row(title, "had arrived when struck", answer["struck_at_bytes"] / 1e6, "MB", 1),
        Row(title, "reused tokens", reused, "", 1),
        Row(title, "same greedy tokens as full prefill", answer["identical_tokens"], f"of {answer['tokens']}", 1),
        Row(title, "KL from full prefill, mean", answer["kl_mean"], "nats/token", answer["tokens"]),
    ]
