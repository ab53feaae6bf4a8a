"""The documents say what is true, as far as a machine can tell: links, commands, options, settings, reasons, targets."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from house import ROOT, documents

from kvcomm_p2p.cli.app import app
from kvcomm_p2p.cli.outcome import ExitCode
from kvcomm_p2p.protocol.anchors import MissReason
from kvcomm_p2p.settings import Settings

LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
COMMAND = re.compile(r"\bkvcomm((?: +[^\s`|;&()]+)*)")
SETTING = re.compile(r"\bKVCOMM_([A-Z0-9_]+)")
TARGET = re.compile(r"\bmake ([a-z][a-z-]*)")


def texts() -> dict[str, str]:
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in documents()}


def anchor(heading: str) -> str:
    """The fragment that code hosts make of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def broken_links(path: Path, text: str) -> list[str]:
    broken = []
    for link in LINK.findall(text):
        if re.match(r"[a-z]+:", link):
            continue
        place, _, fragment = link.partition("#")
        target = (path.parent / place).resolve() if place else path
        headings = (
            re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE) if target.is_file() else []
        )
        if not target.exists() or (fragment and fragment not in map(anchor, headings)):
            broken.append(link)
    return broken


def wrong_command(words: list[str]) -> str:
    """Why `kvcomm words…` cannot be typed like that, or ""."""
    command: Any = typer.main.get_command(app)
    path = "kvcomm"
    while words and hasattr(command, "commands") and not words[0].startswith("-"):
        if words[0] not in command.commands:
            return f"{path} has no command {words[0]}"
        path += f" {words[0]}"
        command = command.commands[words.pop(0)]
    known = {option for parameter in command.params for option in parameter.opts} | {"--help", "-h"}
    for word in words:
        option = word.partition("=")[0].strip('"')
        if re.fullmatch(r"--?[a-z][a-z-]*", option) and option not in known:
            return f"{path} has no option {option}"
    return ""


def wrong_commands(text: str) -> list[str]:
    found = []
    for code in CODE.findall(text):
        for line in code.strip("`").splitlines():
            if line.lstrip().startswith(("from ", "import ")):
                continue
            for match in COMMAND.finditer(line.split("#")[0]):
                words = match[1].split()
                if words and re.fullmatch(r"[a-z-]+", words[0]):
                    problem = wrong_command(words)
                    if problem:
                        found.append(problem)
    return found


def test_links_resolve() -> None:
    broken = {name: broken_links(ROOT / name, text) for name, text in texts().items()}
    assert {name: links for name, links in broken.items() if links} == {}


def test_commands_and_options_exist() -> None:
    wrong = {name: wrong_commands(text) for name, text in texts().items()}
    assert {name: found for name, found in wrong.items() if found} == {}


def test_settings_exist() -> None:
    known = {field.name.upper() for field in dataclasses.fields(Settings)} | {"CONFIG"}
    wrong = {name: sorted(set(SETTING.findall(text)) - known) for name, text in texts().items()}
    assert {name: found for name, found in wrong.items() if found} == {}


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    used = {target for text in texts().values() for code in CODE.findall(text) for target in TARGET.findall(code)}
    assert used
    assert used <= targets


def test_every_command_is_documented() -> None:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    root: Any = typer.main.get_command(app)
    missing = []
    for name, command in root.commands.items():
        for full in [f"{name} {sub}" for sub in getattr(command, "commands", {})] or [name]:
            if f"kvcomm {full}" not in text:
                missing.append(full)
    assert missing == []


def test_every_setting_is_documented() -> None:
    text = (ROOT / "docs" / "tuning.md").read_text(encoding="utf-8")
    assert [field.name for field in dataclasses.fields(Settings) if f"`{field.name}`" not in text] == []


def test_every_exit_code_is_documented() -> None:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert [code for code in ExitCode if not re.search(rf"^\| {code.value} \|", text, re.MULTILINE)] == []


def test_every_miss_reason_is_explained() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    assert [reason.value for reason in MissReason if f"`{reason.value}`" not in text] == []


def test_every_dependency_is_explained() -> None:
    text = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    lists = project[project.index("dependencies = [") : project.index("[project.scripts]")]
    names = re.findall(r'"([A-Za-z0-9_-]+)(?:>=|==)', lists)
    assert len(names) > 10
    assert [name for name in names if f"`{name}`" not in text] == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("`kvcomm nod --name a`", "kvcomm has no command nod"),
        ("```\nkvcomm node --nome a\n```", "kvcomm node has no option --nome"),
        ("`kvcomm bench tft`", "kvcomm bench has no command tft"),
    ],
)
def test_the_test_sees_wrong_commands(text: str, problem: str) -> None:
    assert wrong_commands(text) == [problem]
    assert wrong_commands(text.replace("nod ", "node ").replace("nome", "name").replace("tft", "ttft")) == []


def test_the_test_sees_broken_links(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A heading, here\n", encoding="utf-8")
    text = "[a](page.md) [b](#a-heading-here) [c](page.md#no) [d](none.md) [e](https://example.org/x)"
    assert broken_links(page, text) == ["page.md#no", "none.md"]
