"""The pull benchmark runs, and moves what it says."""

from __future__ import annotations

from kvcomm_p2p.evaluation.pull import TOKEN_BYTES, TOKENS, measure


def test_one_turn_gives_every_row() -> None:
    assert TOKENS * TOKEN_BYTES // 1_000_000 == 33  # 32 MiB, in 23 blocks
    result = measure(runs=1)
    rows = {row.metric: row for row in result.rows}
    assert len(rows) == 6
    assert all(row.value > 0 and row.n == 1 and row.unit == "ms" for row in rows.values())
    for metric in ("pull, digests not checked", "pull, digests checked meanwhile"):
        row = rows[metric]
        assert row.baseline == rows["plain TCP socket"].value
        assert row.ratio is not None and abs(row.ratio * row.value - row.baseline) < 1e-9
