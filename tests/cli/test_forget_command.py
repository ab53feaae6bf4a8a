"""`kvcomm forget`."""

from __future__ import annotations

import json

from harness import Kvcomm


def test_here_and_everywhere(kvcomm: Kvcomm) -> None:
    kvcomm.node("coder")
    here = kvcomm.run("forget", "--node", "coder", "two words")
    assert (here.returncode, here.stdout.count("\n")) == (0, 1)
    assert here.stdout.startswith("2 anchors erased from coder; its peers keep their copies")
    everywhere = kvcomm.run("forget", "--node", "coder", "--everywhere", "two words")
    assert "2 members were told to do the same" in everywhere.stdout
    told = kvcomm.run("forget", "--node", "coder", "--everywhere", "--json", "a b c d")
    assert json.loads(told.stdout) == {"anchors": 4, "told": 2}


def test_what_can_go_wrong(kvcomm: Kvcomm) -> None:
    kvcomm.node("coder")
    short = kvcomm.run("forget", "--node", "coder", "ab")
    assert (short.returncode, short.stdout) == (1, "")
    assert "too short" in short.stderr
    assert kvcomm.run("forget", "--node", "nobody", "some text").returncode == 1
