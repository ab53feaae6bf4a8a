"""Divergence against independent computations: one whole forward of the model, and numbers done by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from kvcomm_p2p.errors import UsageError
from kvcomm_p2p.evaluation.metrics import (
    Continuation,
    compare_log_probs,
    continue_greedily,
    diverge,
    diverge_at_once,
    interval95,
)
from kvcomm_p2p.model.cache import KVCache

PROMPT = [3 + (11 * index) % 250 for index in range(40)]
TOKENS = 8


def prefilled(runner: Any, ids: list[int] = PROMPT) -> tuple[KVCache, torch.Tensor]:
    cache = runner.new_cache(len(ids) + TOKENS)
    return cache, runner.prefill(ids, cache)


def disturbed(runner: Any, scale: float) -> tuple[KVCache, torch.Tensor]:
    """The prompt's cache with noise in the values of its first half, and logits that follow from it."""
    cache, _ = prefilled(runner)
    noise = torch.randn(cache.values[:, :, :, :20].shape, generator=torch.Generator().manual_seed(3))
    cache.values[:, :, :, :20] += scale * noise
    cache.truncate(len(PROMPT) - 1)
    return cache, runner.decode_step(PROMPT[-1], cache)


def test_greedy_continuation_is_what_whole_forwards_give(tiny_runner: Any) -> None:
    full = continue_greedily(tiny_runner, *prefilled(tiny_runner), TOKENS)
    ids = list(PROMPT)
    for token, log_probs in zip(full.token_ids, full.log_probs, strict=True):
        with torch.inference_mode():
            logits = tiny_runner.model(input_ids=torch.tensor([ids])).logits[0, -1]
        assert token == int(logits.argmax())
        torch.testing.assert_close(log_probs, logits.double().log_softmax(-1), atol=1e-4, rtol=0)
        ids.append(token)


def test_continuation_ends_with_the_end_token(tiny_runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    full = continue_greedily(tiny_runner, *prefilled(tiny_runner), TOKENS)
    end = full.token_ids[3]
    monkeypatch.setattr("kvcomm_p2p.evaluation.metrics.end_tokens", lambda runner: frozenset([end]))
    short = continue_greedily(tiny_runner, *prefilled(tiny_runner), TOKENS)
    assert short.token_ids == full.token_ids[: full.token_ids.index(end) + 1]


def test_caches_are_left_as_they_were(tiny_runner: Any) -> None:
    cache, logits = prefilled(tiny_runner)
    before = cache.keys[:, :, :, : len(PROMPT)].clone()
    full = continue_greedily(tiny_runner, cache, logits, TOKENS)
    diverge(tiny_runner, full, cache, logits)
    diverge_at_once(tiny_runner, full, cache, logits)
    assert cache.length == len(PROMPT)
    assert torch.equal(cache.keys[:, :, :, : len(PROMPT)], before)


def test_the_same_cache_does_not_diverge(tiny_runner: Any) -> None:
    full = continue_greedily(tiny_runner, *prefilled(tiny_runner), TOKENS)
    found = diverge(tiny_runner, full, *prefilled(tiny_runner))
    assert found.kl_max < 1e-9
    assert (found.top1, found.identical_tokens, found.first_divergence) == (1.0, TOKENS, None)


def test_a_disturbed_cache_diverges_and_more_noise_diverges_more(tiny_runner: Any) -> None:
    full = continue_greedily(tiny_runner, *prefilled(tiny_runner), TOKENS)
    slightly, badly = (diverge(tiny_runner, full, *disturbed(tiny_runner, scale)) for scale in (0.01, 1.0))
    assert 1e-8 < slightly.kl_mean < badly.kl_mean
    assert badly.first_divergence is not None and badly.top1 < 1


def test_at_once_and_one_by_one_agree(tiny_runner: Any) -> None:
    full = continue_greedily(tiny_runner, *prefilled(tiny_runner), TOKENS)
    cache, logits = disturbed(tiny_runner, 0.3)
    stepwise, at_once = diverge(tiny_runner, full, cache, logits), diverge_at_once(tiny_runner, full, cache, logits)
    assert stepwise.kl_mean > 1e-4
    np.testing.assert_allclose(at_once.kl, stepwise.kl, rtol=1e-3)
    assert at_once.top1 == stepwise.top1


def log_probs(*rows: list[float]) -> list[torch.Tensor]:
    return [torch.tensor(row, dtype=torch.float64).log() for row in rows]


def test_kl_is_from_the_full_run_to_the_method_in_nats() -> None:
    found = compare_log_probs(log_probs([0.5, 0.5]), log_probs([0.25, 0.75]))
    assert found.kl[0] == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    assert found.kl[0] != pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5))


def test_impossible_tokens_cost_nothing() -> None:
    found = compare_log_probs(log_probs([1.0, 0.0]), log_probs([0.5, 0.5]))
    assert found.kl[0] == pytest.approx(math.log(2))


def test_agreement_counts_positions_and_the_leading_ones() -> None:
    full = log_probs([0.9, 0.1], [0.6, 0.4], [0.9, 0.1], [0.1, 0.9])
    other = log_probs([0.8, 0.2], [0.4, 0.6], [0.9, 0.1], [0.2, 0.8])
    found = compare_log_probs(full, other)
    assert (found.top1, found.identical_tokens, found.first_divergence) == (0.75, 1, 1)
    assert found.first_margin == pytest.approx(math.log(0.6) - math.log(0.4))


def test_different_lengths_and_nothing_are_refused(tiny_runner: Any) -> None:
    with pytest.raises(UsageError, match="2 positions with 1"):
        compare_log_probs(log_probs([1.0], [1.0]), log_probs([1.0]))
    with pytest.raises(UsageError, match="0 positions"):
        compare_log_probs([], [])
    with pytest.raises(UsageError, match="0 tokens"):
        continue_greedily(tiny_runner, *prefilled(tiny_runner), 0)


def test_a_continuation_of_one_token_needs_no_forward(tiny_runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, logits = prefilled(tiny_runner)
    monkeypatch.setattr(tiny_runner, "decode_step", lambda *_: pytest.fail("no forward is needed"))
    full = continue_greedily(tiny_runner, cache, logits, 1)
    assert isinstance(full, Continuation) and len(full.token_ids) == 1
    assert diverge_at_once(tiny_runner, full, cache, logits).kl == (0.0,)


def test_interval_holds_the_mean_and_is_reproducible() -> None:
    values = [0.1, 0.2, 0.4, 0.3, 0.2, 0.6]
    mean = lambda array: float(np.mean(array))  # noqa: E731
    found = interval95(values, mean, seed=1)
    assert found is not None
    assert min(values) < found[0] < np.mean(values) < found[1] < max(values)
    assert found == interval95(values, mean, seed=1)
    assert interval95(values[:4], mean, seed=1) is None
