from __future__ import annotations

import io
import json
import os
import socket
from pathlib import Path

import pytest
from rich.console import Console

from kvcomm_p2p.cli.output import duration, size
from kvcomm_p2p.evaluation.results import Result, Row, figure, machine

ROWS = [
    Row("1,000 shared", "ttft_median", 0.3456, "s", 5, (0.3, 0.4), 2.8, 8.1),
    Row("1,000 shared", "pulled", 46_080_000, "B", 5),
]


def test_the_results_object_has_the_documented_keys() -> None:
    document = json.loads(Result("bench ttft", ROWS, seed=7).to_json())
    assert list(document) == ["command", "version", "commit", "machine", "seed", "rows"]
    assert (document["command"], document["seed"]) == ("bench ttft", 7)
    assert document["rows"][0] == {
        "case": "1,000 shared",
        "metric": "ttft_median",
        "value": 0.3456,
        "unit": "s",
        "n": 5,
        "ci95": [0.3, 0.4],
        "baseline": 2.8,
        "ratio": 8.1,
    }
    assert document["rows"][1]["ci95"] is None


def test_the_machine_names_no_host_no_path_and_no_user() -> None:
    text = json.dumps(machine())
    assert machine()["cores"] >= 1
    assert machine()["memory_bytes"] > 1 << 28
    assert socket.gethostname() not in text
    assert str(Path.home()) not in text.replace("/", os.sep) or str(Path.home()) == "/"


@pytest.mark.parametrize(
    "values",
    [{"n": 0}, {"value": float("nan")}, {"ratio": float("inf")}, {"ci95": (0.0, float("nan"))}],
)
def test_a_row_without_a_measurement_does_not_exist(values: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="row 'a' 'b'"):
        Row(**{"case": "a", "metric": "b", "value": 1.0, "unit": "s", "n": 1, **values})  # type: ignore[arg-type]


def test_the_table_shows_the_same_rows_and_no_empty_columns() -> None:
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(Result("bench ttft", ROWS, seed=0).table())
    text = console.export_text()
    for expected in ("kvcomm bench ttft", "0.346 s", "0.300 … 0.400", "2.80 s", "8.10 ×", "46,080,000 B"):
        assert expected in text
    assert "baseline" not in str([column.header for column in Result("x", ROWS[1:], seed=0).table().columns])


def test_write_replaces_whole_files(tmp_path: Path) -> None:
    path = tmp_path / "results" / "ttft.json"
    Result("bench ttft", [], seed=0).write(path)
    Result("bench ttft", ROWS, seed=0).write(path)
    assert len(json.loads(path.read_text(encoding="utf-8"))["rows"]) == 2
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (12, "12"), (1234567.0, "1,234,567"), (1234.5, "1,234"), (0.0123456, "0.0123"), (99.95, "100.0"),
     (3.14159, "3.14"), (-0.5, "-0.500"), (0.000012345, "1.23e-05")],
)  # fmt: skip
def test_figures_have_three_digits(value: float, text: str) -> None:
    assert figure(value) == text


def test_sizes_and_durations() -> None:
    assert [size(n) for n in (0, 999, 46_080, 23_100_000, 1_073_741_824)] == [
        "0 B",
        "999 B",
        "46.1 kB",
        "23.1 MB",
        "1.1 GB",
    ]
    assert [duration(s) for s in (0.0004, 0.085, 1.234, 250, 7500)] == [
        "0 ms",
        "85 ms",
        "1.23 s",
        "4 min 10 s",
        "2 h 5 min",
    ]
