"""`kvcomm sim` as it is typed: what it keeps, what it draws, what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcomm_p2p.cli.app import app
from kvcomm_p2p.sim.scenario import check_scenario, load_scenario

TINY = """
about = "Two agents for a moment"
agents = 2
duration_s = 5.0
costs = "llama-3.1-8b-h100"
updates = 2
fabrics = ["own", "central", "peers"]

[workload]
kind = "rag"
tasks_per_s = 1.0
documents = 4

[network]
inside = "fast"
"""


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


def kvcomm(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == code, done.output
    return done.output


def test_a_run_is_kept_with_its_scenario_and_can_be_drawn_and_compared(tiny: Path) -> None:
    kvcomm("sim", "run", "tiny.toml", "--set", "workload.documents=3", "--save", "deep/a.json")
    kept = json.loads(Path("deep/a.json").read_text())
    assert kept["command"] == "sim run tiny.toml --set workload.documents=3"
    assert check_scenario(kept["scenario"]) == load_scenario("tiny.toml", {"workload.documents": 3})
    assert [each["fabric"] for each in kept["summaries"]] == ["own", "central", "peers"]
    assert kept["rows"] and all(len(curve["ttft_s"]) <= 101 for curve in kept["curves"].values())
    kvcomm("sim", "run", "tiny.toml", "--fabric", "peers", "--save", "b.json")
    told = kvcomm("sim", "compare", "deep/a.json", "b.json")
    assert "tiny: peers (this protocol): first token, p50" in told and "×" in told
    assert "own prefix cache" in told, "what only one of them has is shown, too"
    pytest.importorskip("matplotlib")
    drawn = kvcomm("sim", "plot", "deep/a.json", "pictures").split()
    assert "pictures/tiny-first-token.png" in drawn and all(Path(each).is_file() for each in drawn)


def test_the_page_holds_a_scenario_that_runs_again(tiny: Path) -> None:
    pytest.importorskip("matplotlib")
    told = kvcomm("sim", "run", "tiny.toml", "--seed", "3", "--report", "new/page.html")
    assert "written: new/page.html" in told
    text = Path("new/page.html").read_text()
    assert "kvcomm sim run tiny.toml --seed 3" in text
    assert "http:" not in text and "https:" not in text, "it opens without a network"
    import html

    scenario = html.unescape(text.split("<pre>")[2].split("</pre>")[0])
    Path("again.toml").write_text(scenario)
    assert load_scenario("again.toml") == load_scenario("tiny.toml", {"seed": 3})


def test_a_sweep_is_kept_as_one_file_and_says_where_the_pool_loses(tiny: Path) -> None:
    words = ("sim", "sweep", "tiny.toml", "--over", "agents=2,3", "--repeats", "2", "--jobs", "2")
    told = kvcomm(*words, "--save", "all.json")
    assert "not better from agents" in told
    kept = json.loads(Path("all.json").read_text())
    assert kept["command"] == "sim sweep tiny.toml --over agents=2,3 --repeats 2"
    assert [run["changes"] for run in kept["runs"]] == [{"agents": n, "seed": s} for n in (2, 3) for s in (0, 1)]
    assert {each["against"] for each in kept["crossings"]} == {"own", "peers"}
    assert len(list(Path("sim-tiny").glob("*.json"))) == 4
    if find_spec("matplotlib"):
        kvcomm("sim", "plot", "all.json", "all.json", "pictures")
        assert Path("pictures/compared-ttft_p99_s-by-agents.png").is_file()
    assert kvcomm(*words, "--json") == kvcomm(*words, "--json"), "what is there is not run again"


def test_an_interrupted_sweep_keeps_what_it_has_and_goes_on(tiny: Path) -> None:
    """Interrupted after its first run; nobody waits for the runs that were going on."""
    words = [sys.executable, "-m", "kvcomm_p2p.cli", "sim", "sweep", "tiny.toml", "--jobs", "1", "--into", "runs"]
    words += ["--over", "duration_s=5,3000"]
    restore = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background has it ignored
    try:
        process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    finally:
        signal.signal(signal.SIGINT, restore)
    deadline = time.monotonic() + 60
    while not list(Path("runs").glob("*.json")) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "runs keeps 1 run: the same command goes on" in told and "Traceback" not in told
    (kept,) = Path("runs").glob("*.json")
    before = kept.stat().st_mtime_ns
    kvcomm("sim", "sweep", "tiny.toml", "--into", "runs", "--over", "duration_s=5")
    assert kept.stat().st_mtime_ns == before


REFUSED: list[tuple[list[str], str]] = [
    (["run", "sixten"], "did you mean sixteen"),
    (["run", "sixteen", "--set", "agent=4"], "agent is unknown: did you mean agents?"),
    (["run", "sixteen", "--set", "agents"], "not KEY=VALUE"),
    (["run", "sixteen", "--set", "agents=-4"], "agents must be a whole number from 1 to"),
    (["run", "sixteen", "--set", "duration_s=Infinity"], "duration_s must be a finite number"),
    (["run", "sixteen", "--set", "network.loss=2"], "network.loss must be a number from 0 to 1, not 2"),
    (["run", "sixteen", "--set", "network=lan"], "network must be a table with the keys inside"),
    (["run", "sixteen", "--set", "seed.x=1"], "seed must be a whole number"),
    (["run", "sixteen", "--set", "workload.agents=99"], "workload.agents is the scenario's agents"),
    (["run", "sixteen", "--set", "workload.exponent=400"], "workload.exponent must be 0 to 8"),
    (["run", "sixteen", "--set", "workload.tasks_per_s=1e-7"], "raise tasks_per_s"),
    (["run", "sixteen", "--set", "workload.per_question=12"], "reads 8192"),
    (["run", "sixteen", "--set", "workload.tasks_per_s=1e9"], "GB are free: lower"),
    (["run", "sixteen", "--set", "updates=1000000000"], "GB are free: lower"),
    (["run", "sixteen", "--set", "costs=gpu.json"], "gpu.json"),
    (["run", "sixteen", "--set", "profile=gpt"], "no profile is shipped"),
    (["run", "sixteen", "--fabric", "peer"], "did you mean peers?"),
    (["run", "herd", "--fabric", "own"], "herd is of the fabric peers"),
    (["run", "sixteen", "--set", "warmup_s=1000"], "warmup_s = 1000 must be below duration_s"),
    (["run", "churn", "--set", "duration_s=15", "--set", "warmup_s=1"], "is never"),
    (["run", "sixteen", "--save", "."], "cannot be written"),
    (["run", "sixteen", "--report", "tiny.toml/page.html"], "cannot be made"),
    (["run", "sixteen", "--plots", "tiny.toml"], "tiny.toml cannot be made"),
    (["ablate", "sixteen", "--save", "."], "cannot be written"),
    (["plot", "sixteen", "tiny.toml"], "tiny.toml cannot be made"),
    (["validate", "--save", "."], "cannot be written"),
    (["sweep", "sixteen", "--over", "agents"], "not KEY=A,B,C"),
    (["sweep", "sixteen", "--over", "agents=4,,8"], "not KEY=A,B,C"),
    (["sweep", "sixteen", "--over", "agents=4", "--over", "agents=8"], "there twice"),
    (["sweep", "sixteen", "--over", "seed=1,2"], "--repeats"),
    (["sweep", "sixteen", "--over", "agents=4,0"], "with agents=0"),
    (["sweep", "sixteen", "--over", "agents=4", "--engine", "spark://there"], "dask://HOST:PORT"),
    (["sweep", "sixteen", "--over", "agents=4", "--into", "tiny.toml"], "choose another --into"),
    (["compare", "none.json", "none.json"], "none.json cannot be read"),
    (["compare", "tiny.toml", "tiny.toml"], "tiny.toml is no result"),
    (["plot", "none.json", "there"], "none.json cannot be read"),
    (["plot", "other.json", "there"], "no curves and no runs"),
    (["plot", "other.json", "there", "--set", "agents=3"], "for scenarios"),
    (["plot", "sixteen", "skew", "there"], "one scenario at a time"),
    (["replay", "none.rec"], "none.rec cannot be read"),
    (["replay", "tiny.toml"], "tiny.toml"),
    (["replay", "tiny.toml", "--network", "pigeon"], "choose one of"),
]


@pytest.mark.parametrize(("words", "told"), REFUSED, ids=[" ".join(words) for words, _ in REFUSED])
def test_what_cannot_be_done_is_one_sentence_that_names_the_key(words: list[str], told: str, tiny: Path) -> None:
    Path("other.json").write_text('{"rows": []}')
    done: Any = CliRunner().invoke(app, ["sim", *words])
    assert done.exit_code in (1, 2), done.output
    assert told in done.output, done.output
    assert "Traceback" not in done.output and "internal error" not in done.output


def test_graphs_that_cannot_be_are_refused(tiny: Path) -> None:
    Path("broken.graphml").write_text("<graphml")
    Path("three.txt").write_text("a b\nb c\n")
    base = ("sim", "run", "tiny.toml", "--set", "workload.kind=graph", "--set", "workload.documents=2", "--set")
    assert "not a graph that can be read" in kvcomm(*base, "workload.graph=broken.graphml", code=1)
    assert "set agents to that" in kvcomm(*base, "workload.graph=three.txt", code=1)
    assert "set agents to 2" in kvcomm(*base, "workload.graph=star", "--set", "agents=1", code=1)
