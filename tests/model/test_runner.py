"""Prefill, recompute and decode give what the unmodified model gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcomm_p2p.errors import CancelledByCaller, UsageError
from kvcomm_p2p.model.runner import ModelRunner

IDS = torch.tensor([(37 * i + 11) % 250 for i in range(70)])


def full_logits(runner: ModelRunner, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return runner.model(input_ids=ids[None]).logits[0, -1]


def test_every_architecture_can_be_shared(runner: ModelRunner) -> None:
    assert runner.spec.share_refusal == ""
    config = runner.model.config.get_text_config()
    assert runner.spec.layout.layers == config.num_hidden_layers


def test_prefill_equals_the_plain_model(runner: ModelRunner) -> None:
    cache = runner.new_cache(8)
    logits = runner.prefill(IDS, cache)
    torch.testing.assert_close(logits, full_logits(runner, IDS), rtol=0, atol=1e-4)
    assert cache.length == len(IDS)


@pytest.mark.parametrize("start", [1, 33, 69])
def test_continued_prefill_equals_the_plain_model(runner: ModelRunner, start: int) -> None:
    cache = runner.new_cache(80)
    runner.prefill(IDS[:start], cache)
    logits = runner.prefill(IDS[start:], cache, start)
    torch.testing.assert_close(logits, full_logits(runner, IDS), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "positions",
    [range(70), [69], [0, 1, 2, 40, 41, 69], list(range(8, 20)) + list(range(50, 70)), list(range(1, 70, 2))],
    ids=["all", "last", "scattered", "spans", "odd"],
)
def test_recompute_rebuilds_damaged_rows(runner: ModelRunner, positions: Any) -> None:
    cache = runner.new_cache(80)
    runner.prefill(IDS, cache)
    keys, values = cache.keys[:, :, :, :70].clone(), cache.values[:, :, :, :70].clone()
    rows = torch.tensor(list(positions))
    cache.keys[:, :, :, rows] = float("nan")
    cache.values[:, :, :, rows] = float("nan")
    logits = runner.recompute(IDS, rows, cache)
    torch.testing.assert_close(logits, full_logits(runner, IDS), rtol=0, atol=1e-4)
    torch.testing.assert_close(cache.keys[:, :, :, :70], keys, rtol=0, atol=1e-4)
    torch.testing.assert_close(cache.values[:, :, :, :70], values, rtol=0, atol=1e-4)


def test_recompute_into_rows_that_nothing_counted(runner: ModelRunner) -> None:
    whole, cache = runner.new_cache(70), runner.new_cache(70)
    logits = runner.prefill(IDS, whole)
    cache.keys.copy_(whole.keys)
    cache.values.copy_(whole.values)
    again = runner.recompute(IDS, [3, 4, 40, 69], cache)
    torch.testing.assert_close(again, logits, rtol=0, atol=1e-4)
    assert cache.length == 70


@pytest.mark.parametrize("start", [0, 1, 33])
def test_extend_leaves_the_keys_and_values_of_prefill(runner: ModelRunner, start: int) -> None:
    whole, cache = runner.new_cache(70), runner.new_cache(70)
    runner.prefill(IDS, whole)
    if start:
        runner.prefill(IDS[:start], cache)
    runner.extend(IDS[start:60], cache, start)
    assert cache.length == 60
    torch.testing.assert_close(cache.keys[:, :, :, :60], whole.keys[:, :, :, :60], rtol=0, atol=1e-4)
    torch.testing.assert_close(cache.values[:, :, :, :60], whole.values[:, :, :, :60], rtol=0, atol=1e-4)
    with pytest.raises(UsageError):
        runner.extend(IDS[60:], cache, 59)


def test_recompute_leaves_other_rows_alone_and_sees_them(runner: ModelRunner) -> None:
    cache = runner.new_cache(80)
    runner.prefill(IDS, cache)
    cache.values[:, :, :, 60:64] += 1.0
    before = cache.values[:, :, :, :69].clone()
    logits = runner.recompute(IDS, [69], cache)
    assert torch.equal(cache.values[:, :, :, :69], before)
    assert (logits - full_logits(runner, IDS)).abs().max() > 1e-3


def test_decode_equals_the_plain_model(runner: ModelRunner) -> None:
    cache = runner.new_cache(4)
    runner.prefill(IDS[:60], cache)
    for index in range(60, 70):
        logits = runner.decode_step(int(IDS[index]), cache)
        torch.testing.assert_close(logits, full_logits(runner, IDS[: index + 1]), rtol=0, atol=1e-4)


def test_layer0_depends_on_token_and_position_only(runner: ModelRunner) -> None:
    cache = runner.new_cache(80)
    runner.prefill(IDS, cache)
    rows = torch.tensor([3, 17, 64])
    keys, values = runner.layer0(IDS[rows], rows)
    torch.testing.assert_close(keys, cache.keys[0, 0, :, rows], rtol=0, atol=1e-5)
    torch.testing.assert_close(values, cache.values[0, 0, :, rows], rtol=0, atol=1e-5)


def test_cancelled_prefill_stops_between_chunks(tiny_runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcomm_p2p.model.runner.PREFILL_CHUNK_TOKENS", 16)
    cache = tiny_runner.new_cache(80)
    answers = iter([False, False, True])
    with pytest.raises(CancelledByCaller):
        tiny_runner.prefill(IDS, cache, cancelled=lambda: next(answers))
    assert cache.length == 36  # 70 tokens are four chunks of up to 18
    logits = tiny_runner.prefill(IDS[36:], cache, 36, cancelled=lambda: False)
    torch.testing.assert_close(logits, full_logits(tiny_runner, IDS), rtol=0, atol=1e-4)


@pytest.mark.parametrize("positions", [[], [3, 2, 69], [3, 3, 69], [-1, 69], [5], [70]])
def test_recompute_refuses_bad_positions(tiny_runner: Any, positions: list[int]) -> None:
    cache = tiny_runner.new_cache(80)
    with pytest.raises(UsageError, match="positions"):
        tiny_runner.recompute(IDS, positions, cache)


def test_misuse_is_refused(tiny_runner: Any) -> None:
    cache = tiny_runner.new_cache(80)
    with pytest.raises(UsageError, match="start at 3"):
        tiny_runner.prefill(IDS, cache, 3)
    with pytest.raises(UsageError, match="empty"):
        tiny_runner.prefill([], cache)
    with pytest.raises(UsageError, match="exceed the context"):
        tiny_runner.prefill([1] * 600, cache)
    with pytest.raises(UsageError, match="reserve"):
        tiny_runner.recompute(list(range(100)), [99], tiny_runner.new_cache(10))


def test_a_failed_forward_leaves_the_length(tiny_runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tiny_runner.new_cache(80)
    tiny_runner.prefill(IDS[:10], cache)
    last = tiny_runner.model.model.layers[-1]
    with monkeypatch.context() as patch:
        patch.setattr(last.mlp, "forward", lambda x: (_ for _ in ()).throw(MemoryError("full")))
        patch.setattr(last.self_attn, "forward", lambda **kw: (_ for _ in ()).throw(MemoryError("full")))
        with pytest.raises(MemoryError):
            tiny_runner.prefill(IDS[10:20], cache, 10)
    assert cache.length == 10
    logits = tiny_runner.prefill(IDS[10:], cache, 10)
    torch.testing.assert_close(logits, full_logits(tiny_runner, IDS), rtol=0, atol=1e-4)
