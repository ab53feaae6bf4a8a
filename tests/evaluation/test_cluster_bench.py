"""`kvcomm bench cluster`: every case measures something real, here with few processes and little patience."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcomm_p2p.cli.app import app
from kvcomm_p2p.cli.bench import CLUSTER_CASES
from kvcomm_p2p.errors import UsageError
from kvcomm_p2p.evaluation import cluster, cluster_soak, cluster_spread
from kvcomm_p2p.evaluation.cluster_views import Change, false_deaths, first_seen, suspicions
from kvcomm_p2p.evaluation.results import Result, Row
from kvcomm_p2p.evaluation.samples import high_row, median_row, quantile


def values(rows: list[Row] | tuple[Row, ...]) -> dict[str, float]:
    """By the beginning of the metric, up to a comma or bracket."""
    return {row.metric: row.value for row in rows}


def only(rows: Any, words: str) -> float:
    (value,) = [value for metric, value in values(rows).items() if words in metric]
    return value


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_spread, "QUIET_S", 0.2)
    monkeypatch.setattr(cluster_spread, "IDLE_S", 1.0)
    monkeypatch.setattr(cluster_spread, "JOIN_ANCHORS", 50)
    monkeypatch.setattr(cluster_spread, "UPDATE_SPACING_S", (0.1, 0.3))


def test_updates_and_idle_traffic() -> None:
    rows = cluster.run(cases=["update"], nodes=4, repeats=4).rows
    assert 0 < only(rows, "median (goal ≤ 0.5)") <= only(rows, "p99") < 5
    assert 10 < only(rows, "while idle") < 100_000


def test_newcomers() -> None:
    rows = cluster.run(cases=["join"], nodes=3, repeats=2).rows
    assert 0 < only(rows, "knows every anchor, median") <= only(rows, "slowest") < 10
    assert 0 < only(rows, "all others know the newcomer") < 10


def test_a_frozen_holder() -> None:
    rows = cluster.run(cases=["freeze"], repeats=1).rows
    assert 0.1 < only(rows, "wait_lost_s, worst") < 0.5
    assert only(rows, "next fetch") == 0.0


def test_a_partition() -> None:
    rows = cluster.run(cases=["partition"], nodes=4, seconds=2.0).rows
    assert 0 < only(rows, "all directories right") < 60
    assert (only(rows, "resurrected"), only(rows, "lost")) == (0, 0)


def test_a_herd_and_control_latency() -> None:
    rows = cluster.run(cases=["herd"], nodes=4, repeats=1).rows
    assert 0 < only(rows, "copies") <= 3
    assert only(rows, "one transfer alone") > 0
    (step, measured) = (lambda text: None), cluster.latency
    rows = measured(step, questions=20)
    assert only(rows, "idle, median") > 0
    assert only(rows, "pulled meanwhile") > 1


def test_a_short_soak_samples_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_soak, "SAMPLE_S", 0.5)
    rows, outcome = cluster_soak.soak(lambda text: None, minutes=0.15)
    assert len(outcome.samples) > 10
    assert only(rows, "resident memory per node, end") > 10
    assert only(rows, "descriptors per node, end") > 10
    assert only(rows, "errors of ours") == 0
    assert outcome.events["wrong bytes"] == 0
    assert outcome.events["pulls whole"] > 0


def test_what_does_not_exist_is_the_callers_error() -> None:
    with pytest.raises(UsageError, match="no case nonsense"):
        cluster.run(cases=["update", "nonsense"])
    with pytest.raises(UsageError, match="no option speed"):
        cluster.run(cases=["update"], speed=1)


def test_the_command_names_all_cases_and_hands_over_options(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CLUSTER_CASES.split(", ") == list(cluster.CASES)
    asked: dict[str, Any] = {}

    def run(console: Any, **given: Any) -> Result:
        asked.update(given)
        return Result("bench cluster", [Row("a", "b", 1.0, "s", 1)], 0)

    monkeypatch.setattr(cluster, "run", run)
    arguments = ["bench", "cluster", "update", "load", "--minutes", "0.5", "--nodes", "4"]
    assert CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0
    assert asked == {"cases": ["update", "load"], "minutes": 0.5, "nodes": 4}


def test_neither_the_parent_nor_its_nodes_load_torch() -> None:
    code = "import sys; import kvcomm_p2p.evaluation.cluster, kvcomm_p2p.evaluation.cluster_node; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_histories_are_read_as_they_should_be() -> None:
    history = [
        Change(1.0, "a", "x", "alive", 1),
        Change(2.0, "a", "x", "suspect", 1),
        Change(2.5, "b", "x", "dead", 1),
        Change(3.0, "a", "x", "dead", 1),
        Change(4.0, "a", "x", "alive", 2),
    ]
    assert first_seen(history, 1.5, lambda change: change.state == "dead") == {"b": 1.0, "a": 1.5}
    assert first_seen(history, 2.8, lambda change: change.anchors == 1) == {"a": pytest.approx(0.2)}
    assert (false_deaths(history, ["x"]), suspicions(history, ["x"])) == (2, 1)
    assert false_deaths(history, ["y"]) == 0


def test_quantiles_are_measured_values() -> None:
    seconds = [float(number) for number in range(1, 51)]
    assert quantile(seconds, 0.99) == high_row("c", "m", seconds, "s").value == 50.0
    row = median_row("c", "m", seconds, "s")
    assert row.ci95 is not None
    assert row.ci95[0] <= row.value == 25.5 <= row.ci95[1]
