"""The pull benchmark runs, and moves what it says."""

from __future__ import annotations

from kvcomm_p2p.evaluation.pull import CASES, ENCRYPTED, TOKEN_BYTES, WAYS, measure


def test_one_turn_gives_every_row() -> None:
    megabytes = {case: sum(tokens) * TOKEN_BYTES / 2**20 for case, tokens in CASES.items()}
    assert 31.9 < megabytes["32 MiB loopback"] < 32.1 and 0.95 < megabytes["1 MiB loopback"] < 1.05
    result = measure(runs=1)
    rows = {(row.case, row.metric): row for row in result.rows}
    assert len(rows) == len(CASES) * (2 + 2 * len((*WAYS, ENCRYPTED)))
    assert all(row.value > 0 and row.n == 1 and row.unit == "ms" for row in rows.values())
    for case in CASES:
        for metric in (*WAYS, ENCRYPTED):
            row = rows[case, metric]
            assert row.baseline == rows[case, "plain TCP socket"].value
            assert row.ratio is not None and abs(row.ratio * row.value - row.baseline) < 1e-9
