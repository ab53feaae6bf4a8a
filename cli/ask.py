"""`kvcomm ask`: one question to a running node, answered in a stream."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcomm_p2p.cli.output import duration, emit, size, stderr, write_text
from kvcomm_p2p.cli.texts import check_filled, read_file
from kvcomm_p2p.errors import UsageError
from kvcomm_p2p.local_api import request
from kvcomm_p2p.report import tokens_by_source


@dataclass(frozen=True, slots=True)
class Question:
    """What the command line said. `files` stand before the question, in order; `slots` fill `{name}` in it."""

    text: str
    files: tuple[Path, ...] = ()
    slots: tuple[str, ...] = ()
    mode: str = "balanced"
    sampling: Mapping[str, Any] = field(default_factory=dict)

    def body(self, command: str = "kvcomm ask --node a") -> dict[str, Any]:
        """The request for the local API. Raises UsageError, also for a `{name}` in a typed text that no slot fills."""
        slots = dict(_slot(item) for item in self.slots)
        if self.text == "-":
            text = sys.stdin.read()
        else:
            text = self.text
            check_filled(text, slots)
        parts = [*(read_file(path) for path in self.files), text]
        content = "\n\n".join(part for part in parts if part.strip())
        if not content:
            raise UsageError(f'the prompt is empty: write it in quotes, like {command} "What is new?"')
        body: dict[str, Any] = {
            "op": "ask",
            "prompt": content,
            "mode": self.mode,
            "sampling": dict(self.sampling),
        }
        if slots:
            body["slots"] = slots
        return body


def run_ask(directory: Path, name: str, question: Question, *, as_json: bool) -> None:
    """Streams the answer to stdout and says on stderr where the prompt's tokens came from; JSON: the reply alone."""
    for event in request(directory, name, question.body()):
        if event["event"] == "text":
            if not as_json:
                write_text(event["text"])
        elif as_json:
            emit(event["reply"], indent=2)
        else:
            write_text("\n")
            for line in account(event["reply"], name):
                stderr().print(line, markup=False, soft_wrap=True, style="dim")


def account(reply: Mapping[str, Any], own_name: str) -> list[str]:
    """Where the prompt's tokens came from and what it cost, in one line; a second one if something went wrong."""
    report = reply["report"]
    tokens = tokens_by_source(report["spans"])
    parts = [f"{count:,} from {source}" for source, count in tokens.most_common() if source != own_name]
    if tokens[own_name]:
        parts.append(f"{tokens[own_name]:,} from its own cache")
    parts.append(f"{report['recomputed_tokens']:,} computed")
    line = f"{report['prompt_tokens']:,} prompt tokens: {', '.join(parts)}"
    if report["pulled_bytes"]:
        line += f"; {size(report['pulled_bytes'])} pulled"
    line += f"; first token after {duration(reply['ttft_s'])}, all after {duration(reply['total_s'])}"
    lines = [line]
    troubles = [f"full prefill instead: {report['fallback']}"] if report["fallback"] else []
    if report["wait_lost_s"] > 0:
        troubles.append(f"{duration(report['wait_lost_s'])} lost waiting for peers")
    if troubles:
        lines.append("; ".join(troubles))
    return lines


def _slot(item: str) -> tuple[str, str]:
    name, equals, value = item.partition("=")
    if not equals or not name:
        raise UsageError(f"--slot {item!r} is not NAME=TEXT or NAME=@FILE: write it like --slot report=@report.txt")
    return name, read_file(Path(value[1:])) if value.startswith("@") else value
