"""`kvcomm doctor`: why lookups miss, in the order in which things go wrong."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from kvcomm_p2p.cli.outcome import ExitCode, guarded
from kvcomm_p2p.cli.output import emit, stdout
from kvcomm_p2p.cli.peers import AsJson, NodeName, ask_all
from kvcomm_p2p.cli.setup import load_settings
from kvcomm_p2p.cli.texts import text_or_file
from kvcomm_p2p.errors import UsageError

if TYPE_CHECKING:
    from kvcomm_p2p.doctor import Finding

LOOK_AGAIN_ROUNDS = 5
"""Gossip rounds between the two looks that tell what stands from what moves."""

MARKS = {"ok": ("ok", "green"), "note": ("note", "yellow"), "problem": ("problem", "bold red")}


@guarded
def doctor(
    name: NodeName = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            "--prompt",
            "-p",
            metavar="FILE|TEXT",
            help="A prompt that misses (- reads it from stdin); it is looked up, not run.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say why nothing is reused, and what to do. Exit code 1 if something was found."""
    settings = load_settings()
    text = None if prompt is None else _prompt(prompt)
    directory = settings.runtime_dir
    first, silent = ask_all(directory, None, "inspect")
    if name is not None and name not in [node["name"] for node in first]:
        ask_all(directory, name, "inspect")  # raises for a name that does not run
    if prompt is not None and name is None and len(first) != 1:
        raise UsageError("several nodes run here: name the one whose lookup misses, kvcomm doctor NAME --prompt …")
    from kvcomm_p2p.doctor import Finding, examine
    from kvcomm_p2p.net.key_files import look

    time.sleep(LOOK_AGAIN_ROUNDS * max((node["gossip_interval_s"] for node in first), default=0.0))
    second = {node["name"]: node for node in ask_all(directory, None, "inspect")[0]}
    findings: dict[str, list[Finding]] = {
        each: [Finding("process", "problem", why, "wait for its ready line, or see its log")]
        for each, why in silent.items()
        if name in (None, each)
    }
    for node in first:
        if name in (None, node["name"]):
            others = [other for other in first if other is not node]
            report = None if text is None else _report(directory, node["name"], text)
            later = second.get(node["name"])
            on_disk = None
            if "state_dir" in node:
                on_disk = look(Path(node["state_dir"]), node["bind_host"], encrypted=node["security"]["encrypted"])
            findings[node["name"]] = list(examine(node, later, others, report, on_disk))
    if not findings:
        fix = "start one: kvcomm node --name a"
        findings[""] = [Finding("process", "problem", "no node of yours runs on this machine", fix)]
        on_disk = look(settings.state_dir, settings.bind_host, encrypted=settings.encrypted)
        findings[""] += [Finding("keys on disk", "problem", what, remedy) for what, remedy in on_disk["problems"]]
    identities = {node["name"]: node["identity"] for node in first if node["name"] in findings}
    _tell(findings, identities, as_json=as_json)


def _tell(findings: dict[str, list[Finding]], identities: dict[str, Any], *, as_json: bool) -> None:
    from kvcomm_p2p.doctor import is_healthy

    healthy = all(is_healthy(found) for found in findings.values())
    if as_json:
        nodes = [
            {"name": each, "identity": identities.get(each, {}), "findings": [asdict(finding) for finding in found]}
            for each, found in findings.items()
        ]
        emit({"healthy": healthy, "nodes": nodes}, indent=2)
    else:
        for each, found in findings.items():
            _render(each, found)
    raise typer.Exit(ExitCode.OK if healthy else ExitCode.USER)


def _render(name: str, findings: Sequence[Finding]) -> None:
    console = stdout()
    if name:
        console.print(Text(name, style="bold"))
    for finding in findings:
        mark, style = MARKS[finding.level]
        about = f" [{finding.about}]" if finding.about else ""
        head = Text.assemble("  ", (f"{mark:<8}", style), f"{finding.check}{about}: {finding.text}")
        console.print(head, soft_wrap=True)
        if finding.fix and finding.level != "ok":
            console.print(Text(f"           do: {finding.fix}"), soft_wrap=True)


def _prompt(prompt: str) -> str:
    """`prompt` is a text, or the path of a file that holds it. Raises UsageError."""
    text = text_or_file(prompt, "--prompt")
    if not text.strip():
        raise UsageError("the prompt is empty")
    return text


def _report(directory: Path, name: str, text: str) -> dict[str, Any]:
    """The plan of the prompt, which is not run."""
    from kvcomm_p2p.local_api import request

    [event] = request(directory, name, {"op": "explain", "prompt": text, "mode": "balanced"})
    report: dict[str, Any] = event["report"]
    return report
