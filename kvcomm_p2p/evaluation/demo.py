"""Three agents in three processes, one document: the first reads it, the others take over what the first worked out.

Written for somebody who sees this for the first time: what happens is told as it happens, and the figures at the end come
with what they mean. This process loads no model itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcomm_p2p.evaluation.documents import chat, topic_text
from kvcomm_p2p.evaluation.nodes import NodeGroup
from kvcomm_p2p.evaluation.results import Result, Row
from kvcomm_p2p.report import tokens_by_source
from kvcomm_p2p.settings import Settings

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

DEFAULT_MODEL = "smollm2-135m"
ANSWER_TOKENS = 40
TOPIC = "execmodel"
TITLE = "Execution model"
DOCUMENT_CHARACTERS = 5600
"""More than 1,000 tokens of this text; the report tells how many it became."""

QUESTIONS = {
    "archivist": "What is the text above about? Answer in two sentences.",
    "teacher": "What does it mean that a name is bound? Explain it to a beginner.",
    "reviewer": "According to the text above, what is a code block? Quote the sentence that says so.",
}
"""Agents in the order in which they are asked -> what they are asked. Name and role are the same."""

INTRODUCTION = (
    "Three agents are going to answer questions about the same document, the chapter “{title}” of the Python reference. "
    "Each is a process of its own with its own copy of a small language model ({model}), its own role and its own "
    "instructions.\n"
    "Before a language model can write the first word of an answer, it has to read everything that it was given, and "
    "that is most of the waiting. What it works out while reading, it keeps as notes (its “KV cache”). Here only the first "
    "agent reads the document; the others fetch its notes directly from its process, fit them to their own prompt, and "
    "read just what is new to them.\n"
    "The model is tiny and every answer is cut off after {tokens} tokens: watch the times, not the wisdom."
)


@dataclass(frozen=True, slots=True)
class Turn:
    """One agent's answer. Without `comparison`, nothing was there to take over and nothing to compare with."""

    agent: str
    reply: Mapping[str, Any]
    comparison: Mapping[str, Any] | None = None

    @property
    def report(self) -> Mapping[str, Any]:
        """The prefill's report in plain types."""
        report: Mapping[str, Any] = self.reply["report"]
        return report

    @property
    def taken(self) -> Counter[str]:
        """Name of an agent -> prompt tokens that were taken over from it and not computed all the same."""
        return tokens_by_source(self.report["spans"])

    @property
    def sooner(self) -> float | None:
        """How many times sooner the first word came than by reading everything."""
        return self.comparison["dense_ttft_s"] / self.comparison["ttft_s"] if self.comparison else None


def run(
    console: Console | None = None,
    *,
    model: str = DEFAULT_MODEL,
    tokens: int = ANSWER_TOKENS,
    json: bool = False,
) -> Result:
    """Plays the demo on `console` (silent with `json` or without a console) and returns its figures.

    `tokens`: longest answer, and over how many tokens the answers are compared. Fetches the model if it is not here.
    Raises ModelError, KVCommError; no process is left in any case, Ctrl-C included.
    """
    from rich.console import Console

    told = Console(quiet=True) if console is None or json else console
    _fetch_model(console or told, model)
    told.print(INTRODUCTION.format(title=TITLE, model=model, tokens=tokens), markup=False, highlight=False)
    told.print()
    with NodeGroup({name: name for name in QUESTIONS}, model) as nodes:
        with told.status("Three processes are starting and loading the model …"):
            nodes.wait_ready(lambda name, seconds: _say(told, f"{name}: ready after {seconds:.1f} s"))
        turns = _play(told, nodes, topic_text(TOPIC, DOCUMENT_CHARACTERS), tokens)
    _tell_figures(told, turns)
    return Result("demo", [row for turn in turns for row in _rows(turn)], seed=0)


def _play(console: Console, nodes: NodeGroup, document: str, tokens: int) -> list[Turn]:
    """The agents answer one after the other, each when it knows what the ones before it offer."""
    turns: list[Turn] = []
    for number, (agent, question) in enumerate(QUESTIONS.items()):
        body = {"prompt": chat(agent, question), "slots": {"document": document}}
        console.print()
        console.print(f"{agent} is asked: {question}", style="bold", markup=False, highlight=False)
        if not turns:
            turns.append(_ask(console, nodes, agent, body, tokens))
        else:
            turns.append(_compare(console, nodes, agent, body, tokens))
        _say(console, _account(turns[-1]))
        later = list(QUESTIONS)[number + 1 :]
        if later:
            nodes.wait_heard(agent, later)
    return turns


def _ask(console: Console, nodes: NodeGroup, agent: str, body: Mapping[str, Any], tokens: int) -> Turn:
    """The answer as it is written."""
    events = nodes.ask(agent, {"op": "ask", **body, "sampling": {"max_new_tokens": tokens}})
    with console.status(f"{agent} reads the whole document …"):
        event = next(events)
    while event["event"] == "text":
        console.print(event["text"], end="", markup=False, highlight=False, soft_wrap=True)
        event = next(events)
    console.print(_ending(event["reply"]))
    return Turn(agent, event["reply"])


def _compare(console: Console, nodes: NodeGroup, agent: str, body: Mapping[str, Any], tokens: int) -> Turn:
    """The answer from notes of others, and how it compares with reading everything."""
    _say(
        console,
        f"({agent} answers with the notes it fetches, then reads everything itself and answers again, so that both can be "
        "compared. You see the first answer when both are done.)",
    )
    with console.status(f"{agent} answers twice …"):
        [event] = nodes.ask(agent, {"op": "compare", **body, "tokens": tokens})
    comparison = event["comparison"]
    text = comparison["reply"]["text"] + _ending(comparison["reply"])
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    return Turn(agent, comparison["reply"], comparison)


def _ending(reply: Mapping[str, Any]) -> str:
    return " …" if reply["finish_reason"] == "length" else ""


def _account(turn: Turn) -> str:
    """Where an agent's reading came from, in one sentence."""
    report = turn.report
    taken = " and ".join(f"took over {count:,} from {name}" for name, count in turn.taken.most_common())
    line = f"{turn.agent} was given {report['prompt_tokens']:,} tokens (pieces of words)"
    line += f", {taken} and read {report['recomputed_tokens']:,} itself" if taken else " and read all of them itself"
    line += f"; its first word came after {turn.reply['ttft_s']:.2f} s"
    if turn.comparison:
        line += f", instead of {turn.comparison['dense_ttft_s']:.2f} s"
    if report["wait_lost_s"] > 0:
        line += f" ({report['wait_lost_s']:.2f} s of it lost waiting for notes that did not come in time)"
    if not turn.taken or report["fallback"]:
        reasons = [report["fallback"]] if report["fallback"] else [miss["detail"] for miss in report["misses"]]
        line += "".join(f" ({reason})" for reason in dict.fromkeys(reasons) if reason)
    return line


def _tell_figures(console: Console, turns: list[Turn]) -> None:
    console.print()
    console.print(_table(turns))
    gains = [f"{turn.sooner:.1f} times sooner for {turn.agent}" for turn in turns if turn.sooner and turn.sooner > 1.05]
    if gains:
        verdict = (
            f"The first word came {' and '.join(gains)}. Both times were measured in the same process, one right after "
            "the other, with the same model.\n"
        )
    else:
        verdict = "Nothing was gained this time: the table and the lines above say who read what, and why.\n"
    console.print(
        verdict
        + "Notes from another agent are nearly, not exactly, what reading everything gives, because the other one "
        "read the document after other instructions. “Same next word” says how often both find the same word most likely; "
        "“difference” is how far their probabilities are apart (KL divergence in nats per token; 0 is identical, and up to "
        "0.02 is allowed). For answers that must be identical there is the mode “exact”.",
        markup=False,
        highlight=False,
    )


def _table(turns: list[Turn]) -> Table:
    from rich.table import Table

    table = Table(title="What each agent read, and how long its first word took", title_justify="left")
    table.add_column("agent")
    table.add_column("prompt\ntokens", justify="right")
    table.add_column("taken over\nfrom")
    table.add_column("read\nitself", justify="right")
    table.add_column("first word\nafter", justify="right")
    table.add_column("reading\neverything", justify="right")
    table.add_column("sooner\nby", justify="right")
    table.add_column("same\nnext word", justify="right")
    table.add_column("difference\n(KL)", justify="right")
    for turn in turns:
        taken = "\n".join(f"{name} {count:,}" for name, count in turn.taken.most_common()) or "nobody"
        cells = [turn.agent, f"{turn.report['prompt_tokens']:,}", taken, f"{turn.report['recomputed_tokens']:,}"]
        cells.append(f"{turn.reply['ttft_s']:.2f} s")
        if turn.comparison is None or turn.sooner is None:
            cells += [f"{turn.reply['ttft_s']:.2f} s", "–", "–", "–"]
        else:
            cells += [f"{turn.comparison['dense_ttft_s']:.2f} s", f"{turn.sooner:.1f} ×"]
            cells += [f"{turn.comparison['top1']:.0%}", f"{turn.comparison['kl_mean']:.4f}"]
        table.add_row(*cells)
    return table


def _rows(turn: Turn) -> list[Row]:
    report, comparison = turn.report, turn.comparison
    counts = ("prompt_tokens", "exact_tokens", "reused_tokens", "recomputed_tokens")
    rows = [Row(turn.agent, name.replace("_", " "), report[name], "", 1) for name in counts]
    rows.append(Row(turn.agent, "pulled", report["pulled_bytes"] / 1e6, "MB", 1))
    if comparison is None:
        return [*rows, Row(turn.agent, "first token", turn.reply["ttft_s"], "s", 1)]
    return [
        *rows,
        Row(turn.agent, "first token", comparison["ttft_s"], "s", 1, None, comparison["dense_ttft_s"], turn.sooner),
        Row(turn.agent, "KL from full prefill, mean", comparison["kl_mean"], "nats/token", comparison["tokens"]),
        Row(turn.agent, "same most likely token", comparison["top1"], "", comparison["tokens"]),
    ]


def _say(console: Console, text: str) -> None:
    console.print(f"  {text}", style="dim", markup=False, highlight=False)


def _fetch_model(console: Console, model: str) -> None:
    """Brings the model here, with a bar, unless it is here already. Raises ModelError."""
    cache_dir = Settings.from_env().cache_dir
    # What needs no fetching is recognised without torch, whose import would delay the start by seconds.
    if (cache_dir / "models" / model / "config.json").is_file() or (Path(model) / "config.json").is_file():
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from kvcomm_p2p.model.registry import pull

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task(f"fetching the model {model}", total=None)

        def progress(phase: str, done: int, total: int) -> None:
            bars.update(task, description=f"fetching the model {model}: {phase}", completed=done, total=total or None)

        pull(model, cache_dir=cache_dir, progress=progress)
