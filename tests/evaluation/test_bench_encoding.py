"""`kvcomm bench encoding` on a tiny model: what it reports, and that it would notice a bad codec."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvcomm_p2p.evaluation import encoding
from kvcomm_p2p.protocol.anchors import KVLayout


def worst(result: Any) -> float:
    (row,) = [row for row in result.rows if (row.case, row.metric) == ("wholly as int8", "KL, worst prompt")]
    return float(row.value)


def test_bytes_speed_and_divergence(word_runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    result = encoding.run(model=word_runner, prompts=2, tokens=5)
    metrics = {(row.case, row.metric): row for row in result.rows}
    layout = word_runner.spec.layout
    row = metrics["a block of 32 tokens", "bytes, int8"]
    assert row.value == layout.int8_bytes(32) / 1e3 and row.ratio == layout.block_bytes(32) / layout.int8_bytes(32)
    assert {"encoding", "decoding"} <= {metric for case, metric in metrics if case == "a block of 32 tokens"}
    assert worst(result) < 0.01

    def noisy(data: memoryview, layout: KVLayout, tokens: int) -> memoryview:
        numbers = np.random.default_rng(0).standard_normal(layout.block_bytes(tokens) // 4).astype("<f4")
        return memoryview(numbers.tobytes())

    monkeypatch.setattr(encoding, "decode", noisy)
    assert worst(encoding.run(model=word_runner, prompts=2, tokens=5)) > 2 * worst(result)
