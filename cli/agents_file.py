"""`agents.toml`: the nodes that `kvcomm up` starts. Every problem of a file is reported at once."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcomm_p2p.errors import ConfigError
from kvcomm_p2p.local_names import check_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_TOP_KEYS = ("agent", "model")
_AGENT_KEYS = ("join", "name", "role", "system")
AGENTS_MAX = 64
"""More processes than this in one terminal is a mistake."""


@dataclass(frozen=True, slots=True)
class AgentEntry:
    """One `[[agent]]`. `join` holds "HOST:PORT" or names from the file; None: join the first agent of the file."""

    name: str
    role: str = ""
    system: str = ""
    join: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class AgentsFile:
    """A validated file: at least one agent, names unique. `model` None: the default model."""

    agents: tuple[AgentEntry, ...]
    model: str | None = None


def numbered(count: int, model: str | None) -> AgentsFile:
    """The file that `kvcomm up -n COUNT` stands for: agent-1 to agent-COUNT."""
    return AgentsFile(tuple(AgentEntry(f"agent-{number}") for number in range(1, count + 1)), model)


def read_agents_file(path: Path) -> AgentsFile:
    """Raises ConfigError that names every problem, each with the key and what to write instead."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}: write one like examples/agents.toml") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    problems: list[str] = []
    agents_file = _agents_file(document, problems)
    if problems:
        count = f"{len(problems)} problems" if len(problems) > 1 else "a problem"
        raise ConfigError(f"{path} has {count}:\n" + "\n".join(f"  - {problem}" for problem in problems))
    return agents_file


def _agents_file(document: Mapping[str, Any], problems: list[str]) -> AgentsFile:
    _unknown_keys("", document, _TOP_KEYS, problems)
    model = document.get("model")
    if model is not None and (not isinstance(model, str) or not model.strip()):
        problems.append(f'model = {model!r}: write the name or folder of a model, like model = "smollm2-135m"')
    tables = document.get("agent", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        problems.append("agent: write one [[agent]] table (two brackets) per agent")
        tables = []
    elif not 1 <= len(tables) <= AGENTS_MAX:
        problems.append(f"agent: {len(tables)} agents; write 1 to {AGENTS_MAX} [[agent]] tables")
    agents = tuple(_agent(index, table, problems) for index, table in enumerate(tables))
    _check_names(agents, problems)
    return AgentsFile(agents, model if isinstance(model, str) else None)


def _agent(index: int, table: Mapping[str, Any], problems: list[str]) -> AgentEntry:
    where = f"agent[{index}]"
    _unknown_keys(f"{where}.", table, _AGENT_KEYS, problems)
    texts: dict[str, str] = {}
    for key in ("name", "role", "system"):
        value = table.get(key, "")
        if not isinstance(value, str):
            problems.append(f'{where}.{key} = {value!r}: write a text in quotes, like {key} = "reviewer"')
            value = ""
        texts[key] = value
    if "name" not in table:
        problems.append(f'{where}.name is missing: add name = "agent-{index + 1}"')
    elif isinstance(table["name"], str):
        try:
            check_name(texts["name"])
        except ConfigError as error:
            problems.append(f"{where}.name: {error}")
    join = table.get("join")
    if isinstance(join, str):
        join = [join]
    if join is not None and (not isinstance(join, list) or not all(isinstance(item, str) for item in join)):
        problems.append(f'{where}.join = {join!r}: write a list of "HOST:PORT" or of names from this file')
        join = None
    return AgentEntry(texts["name"], texts["role"], texts["system"], None if join is None else tuple(join))


def _check_names(agents: tuple[AgentEntry, ...], problems: list[str]) -> None:
    first: dict[str, int] = {}
    for index, agent in enumerate(agents):
        if agent.name and agent.name in first:
            problems.append(
                f"agent[{index}].name = {agent.name!r} is also the name of agent[{first[agent.name]}]: take another"
            )
        first.setdefault(agent.name, index)
    for index, agent in enumerate(agents):
        for item in agent.join or ():
            if item not in first and not is_address(item):
                problems.append(
                    f"agent[{index}].join: {item!r} is neither HOST:PORT nor a name from this file; "
                    'write something like "127.0.0.1:7001"'
                )


def is_address(text: str) -> bool:
    """Whether `text` looks like HOST:PORT."""
    host, colon, port = text.rpartition(":")
    return bool(host) and colon == ":" and port.isascii() and port.isdigit() and 0 < int(port) < 65536


def _unknown_keys(where: str, table: Mapping[str, Any], known: tuple[str, ...], problems: list[str]) -> None:
    for key in sorted(set(table) - set(known)):
        problems.append(f"{where}{key} is not a known key: remove it (known here: {', '.join(known)})")
