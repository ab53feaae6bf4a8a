"""`kvcomm forget`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from harness import Kvcomm

from kvcomm_p2p.cli.forget import forget, run_forget


def test_here_and_everywhere(kvcomm: Kvcomm) -> None:
    kvcomm.node("coder")
    here = kvcomm.run("forget", "--node", "coder", "two words")
    assert (here.returncode, here.stdout.count("\n")) == (0, 1)
    assert here.stdout.startswith("2 anchors erased from coder; what peers hold stays")
    everywhere = kvcomm.run("forget", "--node", "coder", "--everywhere", "two words")
    assert "2 members were told to do the same" in everywhere.stdout
    told = kvcomm.run("forget", "--node", "coder", "--everywhere", "--json", "a b c d")
    assert json.loads(told.stdout) == {"anchors": 4, "told": 2}


def test_a_file_name_is_refused_and_erases_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my notes.md").write_text("notes")
    monkeypatch.setattr("kvcomm_p2p.local_api.request", lambda *given, **more: pytest.fail("it was erased"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(typer.Exit) as refused:
        forget("my notes.md", "coder")
    assert refused.value.exit_code == 1
    assert "kvcomm forget - --node coder < 'my notes.md'" in capsys.readouterr().err


def test_what_is_not_there_is_said_and_too_few_digits_of_an_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = [{"forgotten": {"anchors": 0, "told": 0}}]
    monkeypatch.setattr("kvcomm_p2p.local_api.request", lambda *given, **more: answer)
    for what in ("nothing there", "a45e17", "long " * 2000, "nul \0"):
        run_forget(tmp_path, "coder", what, everywhere=False, as_json=False)
        told = capsys.readouterr().out
        assert told.startswith("coder holds nothing of it") and ("8 digits or more" in told) == (what == "a45e17")


def test_what_can_go_wrong(kvcomm: Kvcomm) -> None:
    kvcomm.node("coder")
    short = kvcomm.run("forget", "--node", "coder", "ab")
    assert (short.returncode, short.stdout) == (1, "")
    assert "too short" in short.stderr
    assert kvcomm.run("forget", "--node", "nobody", "some text").returncode == 1
