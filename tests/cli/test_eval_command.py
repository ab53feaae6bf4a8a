"""`kvcomm eval` hands over what was asked for and shows what comes back; the measurement itself is faked here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcomm_p2p.cli.app import app
from kvcomm_p2p.cli.eval import Workload
from kvcomm_p2p.cli.node import DEFAULT_MODEL
from kvcomm_p2p.errors import ConfigError
from kvcomm_p2p.evaluation import eval as evaluation
from kvcomm_p2p.evaluation.eval import Evaluation
from kvcomm_p2p.evaluation.results import Result, Row
from kvcomm_p2p.evaluation.summary import Case
from kvcomm_p2p.evaluation.workloads.catalogue import NAMES, Data


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the last run was asked for; "result" and "interrupted" may be set beforehand."""
    options: dict[str, Any] = {"interrupted": False}

    def run(console: Any, **given: Any) -> Evaluation:
        options.update(given)
        rows = [Row(name, "tokens covered by donors, steady", 96.1, "%", 9) for name in ("rag, balanced", "rag, exact")]
        cases = (Case("rag", "balanced"), Case("rag", "exact"))
        skipped = {"mathematics": "it needs problems"}
        return Evaluation(Result("eval rag", rows, 0), cases, skipped, options["interrupted"])

    monkeypatch.setattr(evaluation, "run", run)
    return options


def kvcomm(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["eval", *arguments], catch_exceptions=False)


def test_a_table_per_case_and_what_was_skipped(asked: dict[str, Any]) -> None:
    done = kvcomm("rag")
    assert done.exit_code == 0
    for text in ("kvcomm eval: rag, balanced", "kvcomm eval: rag, exact", "96.1 %"):
        assert text in done.stdout
    assert "mathematics was skipped: it needs problems" in done.stderr


def test_json_and_file_are_the_same_object(asked: dict[str, Any], tmp_path: Path) -> None:
    done = kvcomm("--json", "--save", str(tmp_path / "new" / "eval.json"))
    assert json.loads(done.stdout)["command"] == "eval rag"
    assert json.loads((tmp_path / "new" / "eval.json").read_text()) == json.loads(done.stdout)


def test_options_are_handed_over(asked: dict[str, Any]) -> None:
    kvcomm(
        *("code", "--mode", "exact", "--mode", "dense", "-n", "4", "--tokens", "9", "--seed", "3", "--execute"),
        *("--gsm8k", "g", "--humaneval", "h", "--readers", "2", "--plots", "p", "--model", "m"),
    )
    assert (asked["workload"], list(asked["modes"]), asked["model"]) == ("code", ["exact", "dense"], "m")
    assert (asked["requests"], asked["tokens"], asked["seed"], asked["plots"]) == (4, 9, 3, Path("p"))
    assert asked["data"] == Data(gsm8k=Path("g"), humaneval=Path("h"), readers=2, execute=True)


def test_defaults(asked: dict[str, Any]) -> None:
    kvcomm()
    assert (asked["workload"], list(asked["modes"]), asked["model"]) == ("all", ["balanced"], DEFAULT_MODEL)
    assert (asked["requests"], asked["tokens"], asked["data"].execute) == (None, None, False)
    assert evaluation.DEFAULT_MODEL == DEFAULT_MODEL
    assert [each.value for each in Workload] == [*NAMES, "all"]


def test_after_an_interrupt_what_is_there_is_shown(asked: dict[str, Any]) -> None:
    asked["interrupted"] = True
    done = kvcomm("rag")
    assert done.exit_code == 130
    assert "96.1 %" in done.stdout
    assert "interrupted" in done.stderr


def test_a_mistake_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any, **__: Any) -> Evaluation:
        raise ConfigError("this needs sacrebleu, which is not installed: pip install 'kvcomm-p2p[eval]'")

    monkeypatch.setattr(evaluation, "run", run)
    done = kvcomm("rag")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == "error: this needs sacrebleu, which is not installed: pip install 'kvcomm-p2p[eval]'\n"
    assert kvcomm("chess").exit_code == 2
