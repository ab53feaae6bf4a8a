"""`kvcomm sim ablate` as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvcomm_p2p.cli.app import app
from kvcomm_p2p.sim.ablations import ABLATIONS

ROOT = Path(__file__).parents[2]

TINY = """
about = "Two agents for a moment"
agents = 2
duration_s = 4.0
costs = "llama-3.1-8b-h100"
updates = 0

[workload]
kind = "rag"
tasks_per_s = 1.5
documents = 3

[network]
inside = "fast"
"""


@pytest.fixture(autouse=True)
def _tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(TINY)


def ablate(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["sim", "ablate", "tiny.toml", *words])
    assert done.exit_code == code, done.output
    return done.output


def test_parts_are_compared_with_the_whole_over_seeds() -> None:
    told = ablate(
        "--without", "replication", "--without", "referrals", "--seeds", "2", "--jobs", "1", "--save", "a.json"
    )
    assert "replication" in told
    kept = json.loads(Path("a.json").read_text())
    assert kept["command"] == "sim ablate tiny.toml --without replication --without referrals --seeds 2"
    cases = {row["case"]: row for row in kept["rows"] if row["metric"] == "first token, p99"}
    assert list(cases) == [
        "tiny: peers (this protocol)",
        "tiny: peers, without replication",
        "tiny: peers, without referrals",
    ]
    whole, without = list(cases.values())[:2]
    assert whole["baseline"] is None and without["baseline"] == whole["value"] and without["n"] == whole["n"] > 3


def test_the_scenarios_own_ablations_are_the_default_and_unknown_parts_are_refused() -> None:
    told = ablate("--set", 'ablations=["provenance"]', "--seeds", "1", "--jobs", "1", "--json")
    kept = json.loads(told[told.index("{") :])
    assert {row["case"] for row in kept["rows"]} == {"tiny: peers (this protocol)", "tiny: peers, without provenance"}
    refused = ablate("--without", "gossip", code=1)
    assert "'gossip' is unknown: choose of referrals, replication" in refused


def test_help_and_document_list_the_parts() -> None:
    told = " ".join(ablate("--help").split())
    document = " ".join((ROOT / "docs" / "cli.md").read_text(encoding="utf-8").split())
    for part in ABLATIONS:
        assert part.name in told and f"`{part.name}`" in document
