from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from harness import Kvcomm, eventually

from kvcomm_p2p.cli.ask import account


def test_the_answer_goes_to_stdout_and_its_sources_to_stderr(kvcomm: Kvcomm) -> None:
    kvcomm.node("coder", "--system", "Be brief.")
    done = kvcomm.run("ask", "--node", "coder", "What is new?")
    assert done.returncode == 0
    assert done.stdout.split() == ["system:Be", "brief.", "user:What", "is", "new?"]
    assert done.stderr == (
        "5 prompt tokens: 2 from planner, 3 computed; 46.1 kB pulled; first token after 100 ms, all after 200 ms\n"
    )


def test_files_slots_and_length(kvcomm: Kvcomm, tmp_path: Path) -> None:
    kvcomm.node("coder")
    (tmp_path / "report.txt").write_text("profits rose", encoding="utf-8")
    arguments = ["--file", str(tmp_path / "report.txt"), "--slot", f"r=@{tmp_path / 'report.txt'}", "--slot", "x=y=z"]
    done = kvcomm.run("ask", "--node", "coder", *arguments, "--max-new-tokens", "6", "So {r}, {x}? More?")
    assert done.stdout.split() == ["profits", "rose", "So", "profits", "rose,", "y=z?"]


def test_json_is_the_reply(kvcomm: Kvcomm) -> None:
    kvcomm.node("coder")
    reply = json.loads(kvcomm.run("ask", "--node", "coder", "--json", "--mode", "exact", "hi").stdout)
    assert reply["text"] == "hi"
    assert reply["report"]["mode"] == "exact"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--node", "nobody", "hi"), 1, "no node named 'nobody' runs here (these run: coder)"),
        (("--node", "coder", "LONG"), 1, "9,000 tokens"),
        (("--node", "coder", " "), 1, "the prompt is empty: write it in quotes, like kvcomm ask"),
        (("--node", "coder", "--file", "/none", "hi"), 1, "/none cannot be read"),
        (("--node", "coder", "--slot", "x", "hi"), 1, "is not NAME=TEXT"),
        (("--node", "coder", "Sum up {report} for {who}"), 1, "nothing fills {report}, {who}: give --slot report=TEXT"),
        (("--node", "coder", "--slot", "a=b", "{a} and {c}"), 1, "nothing fills {c}: give --slot c=TEXT"),
        (("--node", "coder", "--mode", "wild", "hi"), 2, "--mode"),
        (("hi",), 2, "--node"),
    ],
)
def test_what_can_go_wrong(kvcomm: Kvcomm, arguments: tuple[str, ...], code: int, message: str) -> None:
    kvcomm.node("coder")
    done = kvcomm.run("ask", *arguments)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert code == 2 or done.stderr.count("\n") == 1
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("question", "slots"),
    [
        (r"Simplify \frac{a}{b} and \sqrt[n]{x} and x^{n}", []),
        ("What is ${HOME}, what are {} and {0} and { a }?", []),
        ("What does f'{name}' print?", ["name={name}"]),
    ],
)
def test_braces_that_are_no_slots_stay(kvcomm: Kvcomm, question: str, slots: list[str]) -> None:
    kvcomm.node("coder")
    options = [word for slot in slots for word in ("--slot", slot)]
    done = kvcomm.run("ask", "--node", "coder", "--max-new-tokens", "20", *options, question)
    assert (done.returncode, done.stdout.split()) == (0, question.split()), done.stderr


def test_a_file_that_is_not_utf_8(kvcomm: Kvcomm, tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    done = kvcomm.run("ask", "--node", "coder", "--file", str(tmp_path / "latin.txt"), "hi")
    assert done.returncode == 1
    assert "is not UTF-8 (byte 3)" in done.stderr


def test_a_bug_in_the_node_is_70(kvcomm: Kvcomm) -> None:
    kvcomm.node("coder")
    done = kvcomm.run("ask", "--node", "coder", "CRASH")
    assert done.returncode == 70
    assert "internal error, please report it" in done.stderr


def test_a_node_that_dies_while_it_answers_is_3(kvcomm: Kvcomm) -> None:
    node = kvcomm.node("coder")
    asking = kvcomm.start("ask", "--node", "coder", "SLOW " + "word " * 200)
    assert asking.popen.stdout is not None
    assert asking.popen.stdout.read(4) == "SLOW"
    node.interrupt(signal.SIGKILL)
    assert asking.finish() == 3
    assert "error: node 'coder' ended before its answer was complete" in "".join(asking.lines)


def test_ctrl_c_while_answering_is_130_and_cancels(kvcomm: Kvcomm) -> None:
    kvcomm.node("coder")
    asking = kvcomm.start("ask", "--node", "coder", "SLOW " + "word " * 200)
    assert asking.popen.stdout is not None
    assert asking.popen.stdout.read(4) == "SLOW"
    assert asking.interrupt() == 130
    assert asking.lines[-1].endswith("interrupted\n")


def test_status_of_all_and_of_one(kvcomm: Kvcomm) -> None:
    nothing = kvcomm.run("status")
    assert (nothing.returncode, nothing.stdout) == (0, "")
    assert "start one: kvcomm node --name a" in nothing.stderr
    seed = kvcomm.node("planner", "--role", "planner")
    kvcomm.node("coder", "--join", seed.ready["address"])
    kvcomm.run("ask", "--node", "coder", "one two three")
    text = kvcomm.run("status").stdout
    for expected in ("planner", "coder", "peers of coder", "33%", "coder missed: busy 1", "46.1 kB of 1.1 GB"):
        assert expected in text, expected
    [only] = json.loads(kvcomm.run("status", "--node", "coder", "--json").stdout)["nodes"]
    assert only["name"] == "coder"
    assert [peer["address"] for peer in only["peers"]] == [seed.ready["address"]]
    unknown = kvcomm.run("status", "--node", "nobody")
    assert unknown.returncode == 1
    assert "these run: coder, planner" in unknown.stderr


def test_status_with_a_loading_node_is_partial(kvcomm: Kvcomm) -> None:
    kvcomm.node("planner")
    loading = kvcomm.start("node", "--name", "slow", "--json", FAKE_START_S="60")
    loading.wait_for("starting")
    done = kvcomm.run("status", "--json")
    assert done.returncode == 3
    status = json.loads(done.stdout)
    assert [node["name"] for node in status["nodes"]] == ["planner"]
    assert "still loading" in status["unreachable"]["slow"]
    assert eventually(lambda: loading.popen.poll() is None)


def test_the_account_tells_trouble() -> None:
    report = {
        "spans": [
            {"start": 0, "end": 1010, "source": "planner", "probes": 10},
            {"start": 1010, "end": 1050, "source": "me", "probes": 0},
            {"start": 1050, "end": 1110, "source": "", "probes": 0},
        ],
        "prompt_tokens": 1110,
        "recomputed_tokens": 70,
        "pulled_bytes": 0,
        "fallback": "residual 0.9 over 0.3",
        "wait_lost_s": 0.25,
    }
    assert account({"report": report, "ttft_s": 1.5, "total_s": 75.0}, "me") == [
        "1,110 prompt tokens: 1,000 from planner, 40 from its own cache, 70 computed; "
        "first token after 1.50 s, all after 1 min 15 s",
        "full prefill instead: residual 0.9 over 0.3; 250 ms lost waiting for peers",
    ]
