"""The log is structured, and says nothing of prompts, token ids and keys, at any level."""

from __future__ import annotations

import ast
import asyncio
import io
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_cases import met

from kvcomm_p2p.agent import Agent
from kvcomm_p2p.errors import ConfigError
from kvcomm_p2p.logs import FIELDS, ROOT, JsonFormatter, TextFormatter, configure
from kvcomm_p2p.model.decoding import Sampling
from kvcomm_p2p.settings import Settings

MakeAgent = Callable[..., Agent]
SOURCES = [Path(__file__).parents[2] / room for room in ("kvcomm_p2p", "cli")]
SECRET = "Xylophone quartz jukebox wizardry. " * 8
CONTENT = (
    "prompt",
    "text",
    "token_ids",
    "tokens",
    "secret",
    "seal",
    "content",
    "key",
    "keys",
    "content_key",
    "group_key",
)
"""Names of things whose value must not be logged."""


@pytest.fixture
def log() -> Iterator[Callable[..., io.StringIO]]:
    """Sets up our log as the given settings say, for this test only."""
    root = logging.getLogger(ROOT)
    before = (root.level, root.propagate, list(root.handlers))

    def set_up(**settings: Any) -> io.StringIO:
        stream = io.StringIO()
        configure(Settings(**settings), stream)
        return stream

    yield set_up
    root.setLevel(before[0])
    root.propagate = before[1]
    root.handlers[:] = before[2]


def test_a_line_is_one_object_with_the_fields_of_its_event(log: Callable[..., io.StringIO]) -> None:
    stream = log(log="json", log_level="info")
    logger = logging.getLogger("kvcomm_p2p.net")
    logger.info(
        "peer %s is late\nindeed", "coder", extra={"event": "late", "peer": "coder", "seconds": 0.5, "made_up": 1}
    )
    logger.debug("not at this level")
    try:
        raise ValueError("broken")
    except ValueError:
        logger.exception("it broke")
    first, second = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert {name: value for name, value in first.items() if name != "time"} == {
        "level": "info",
        "logger": "kvcomm_p2p.net",
        "message": "peer coder is late\nindeed",
        "event": "late",
        "peer": "coder",
        "seconds": 0.5,
    }
    assert first["time"].endswith("+00:00")
    assert "ValueError: broken" in second["error"]


def test_lines_for_people(log: Callable[..., io.StringIO]) -> None:
    stream = log()
    logging.getLogger("kvcomm_p2p.net").warning("peer %s is late", "coder")
    logging.getLogger("kvcomm_p2p.net").info("not at this level")
    assert stream.getvalue()[8:] == " warning net: peer coder is late\n"


def test_setting_up_again_replaces(log: Callable[..., io.StringIO]) -> None:
    first, second = log(), log(log="json")
    logging.getLogger("kvcomm_p2p.net").warning("once")
    assert first.getvalue() == ""
    assert len(second.getvalue().splitlines()) == 1
    ours = [
        each for each in logging.getLogger(ROOT).handlers if isinstance(each.formatter, JsonFormatter | TextFormatter)
    ]
    assert len(ours) == 1


def test_wrong_settings_are_named() -> None:
    with pytest.raises(ConfigError, match="log 'xml' is not one of text, json; log_level 'loud' is not one of debug"):
        Settings(log="xml", log_level="loud")


def test_agents_that_work_log_no_content(log: Callable[..., io.StringIO], make_agent: MakeAgent) -> None:
    stream = log(log="json", log_level="debug")
    seen: dict[str, Any] = {}

    async def run() -> None:
        async with make_agent("first") as first, make_agent("second", join=[first.address]) as second:
            await met(first, second)
            seen["keys"] = [first._running().group_key]
            for agent in (first, second):
                reply = await agent.generate(SECRET, sampling=Sampling(max_new_tokens=3))
                seen["ids"] = reply.token_ids
                await agent.settled()
            prepared = await second._prepare(second._running(), SECRET, None, "public", "")
            seen["prompt"] = prepared.token_ids.tolist()
            with pytest.raises(ValueError):
                await second.generate("", sampling=Sampling(max_new_tokens=3))

    asyncio.run(run())
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert any(line.get("event") == "peer_joined" and line["peer"] == "second" for line in lines)
    for line in lines:
        assert set(line) <= {"time", "level", "logger", "message", "error", *FIELDS}
        whole = json.dumps(line)
        for word in ("Xylophone", "quartz", "jukebox", "wizardry"):
            assert word.lower() not in whole.lower()
        for separator in (", ", " ", ","):
            assert separator.join(map(str, seen["prompt"][40:45])) not in whole
        for key in seen["keys"]:
            assert key.hex()[:16] not in whole and repr(key)[2:20] not in whole


def logged(tree: ast.AST) -> Iterator[tuple[int, ast.expr]]:
    """(line, argument) of every call of a logger."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
        ):
            levels = ("debug", "info", "warning", "error", "exception", "critical", "log")
            if node.func.value.id in ("log", "_log", "logger") and node.func.attr in levels:
                yield from (
                    (node.lineno, argument) for argument in [*node.args, *(word.value for word in node.keywords)]
                )


def content_in(argument: ast.expr) -> list[str]:
    """Names in an argument that stand for content. The length of something may be told."""
    names = []
    for node in ast.walk(argument):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len":
            return []
        if isinstance(node, ast.Name | ast.Attribute):
            names.append(node.id if isinstance(node, ast.Name) else node.attr)
    return [name for name in names if name in CONTENT]


def test_no_call_of_a_logger_names_content() -> None:
    found, calls = [], 0
    for room in SOURCES:
        for path in sorted(room.rglob("*.py")):
            for line, argument in logged(ast.parse(path.read_text(encoding="utf-8"))):
                calls += 1
                if content_in(argument) and not _is_count(path, argument):
                    found.append(f"{path.name}:{line}: {content_in(argument)}")
    assert calls > 15
    assert found == []


def _is_count(path: Path, argument: ast.expr) -> bool:
    """`span.tokens` is a number of tokens."""
    return isinstance(argument, ast.Attribute) and argument.attr == "tokens" and ast.unparse(argument) == "span.tokens"


@pytest.mark.parametrize(
    "call", ["log.info('%s', prompt)", "log.debug('%s', a.token_ids[3:])", "_log.warning(f'{keys.seal}')"]
)
def test_the_test_sees_what_it_must(call: str) -> None:
    assert any(content_in(argument) for _, argument in logged(ast.parse(call)))
    assert not any(content_in(argument) for _, argument in logged(ast.parse("log.info('%d', len(prompt))")))
