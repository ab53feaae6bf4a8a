from __future__ import annotations

from pathlib import Path

import pytest

from kvcomm_p2p.cli.agents_file import AGENTS_MAX, AgentEntry, AgentsFile, numbered, read_agents_file
from kvcomm_p2p.cli.children import node_commands
from kvcomm_p2p.errors import ConfigError

ROOT = Path(__file__).parents[2]


def read(folder: Path, text: str) -> AgentsFile:
    path = folder / "agents.toml"
    path.write_text(text, encoding="utf-8")
    return read_agents_file(path)


def test_a_full_file(tmp_path: Path) -> None:
    agents_file = read(
        tmp_path,
        'model = "tiny"\n'
        '[[agent]]\nname = "planner"\n'
        '[[agent]]\nname = "coder"\nrole = "coder"\nsystem = "You write code."\njoin = "planner"\n'
        '[[agent]]\nname = "alone"\njoin = []\n',
    )
    assert agents_file == AgentsFile(
        (
            AgentEntry("planner"),
            AgentEntry("coder", "coder", "You write code.", ("planner",)),
            AgentEntry("alone", join=()),
        ),
        "tiny",
    )


def test_the_shipped_example_is_valid() -> None:
    assert len(read_agents_file(ROOT / "examples" / "agents.toml").agents) >= 3


def test_all_problems_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(
            tmp_path,
            'model = 3\ncolour = "red"\n'
            '[[agent]]\nname = "a"\nrole = 7\n'
            '[[agent]]\nname = "a"\njoin = ["nobody"]\n'
            '[[agent]]\njoin = [1]\nsystem_prompt = "x"\n'
            '[[agent]]\nname = "b/c"\n',
        )
    lines = str(caught.value).splitlines()
    assert "has 9 problems" in lines[0]
    for expected in (
        "model = 3: write",
        "colour is not a known key",
        'agent[0].role = 7: write a text in quotes, like role = "reviewer"',
        "agent[1].name = 'a' is also the name of agent[0]",
        "agent[1].join: 'nobody' is neither HOST:PORT nor a name",
        'agent[2].name is missing: add name = "agent-3"',
        "agent[2].join = [1]: write a list",
        "agent[3].name: agent name 'b/c'",
    ):
        assert any(expected in line for line in lines), expected
    assert "agent[2].system_prompt is not a known key" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "0 agents"),
        ("[agent]\nname = 'a'\n", "two brackets"),
        ("agent = 3\n", "two brackets"),
        ("name = \n", "is not TOML"),
        ("[[agent]]\nname = 'a'\njoin = '127.0.0.1:0'\n", "neither HOST:PORT"),
        ("".join(f"[[agent]]\nname = 'a{i}'\n" for i in range(AGENTS_MAX + 1)), f"1 to {AGENTS_MAX}"),
    ],
)
def test_files_that_cannot_work(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"agents\.toml") as caught:
        read(tmp_path, text)
    assert message in str(caught.value)


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file"):
        read_agents_file(tmp_path / "none.toml")
    (tmp_path / "agents.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_agents_file(tmp_path / "agents.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_agents_file(tmp_path)


def test_commands_join_the_first_agent_by_default() -> None:
    first, second = node_commands(numbered(2, "tiny"), [7001, 7002])
    assert first.arguments == ["--name", "agent-1", "--port", "7001", "--model", "tiny"]
    assert second.arguments == ["--name", "agent-2", "--port", "7002", "--join", "127.0.0.1:7001", "--model", "tiny"]


def test_commands_resolve_names_to_addresses() -> None:
    agents = (
        AgentEntry("a", join=("c", "10.0.0.1:9")),
        AgentEntry("b", role="judge", system="Be strict.", join=()),
        AgentEntry("c"),
    )
    commands = [child.arguments for child in node_commands(AgentsFile(agents), [1, 2, 3])]
    assert commands[0][4:] == ["--join", "127.0.0.1:3", "--join", "10.0.0.1:9"]
    assert commands[1][4:] == ["--role", "judge", "--system", "Be strict."]
    assert commands[2][4:] == ["--join", "127.0.0.1:1"]
