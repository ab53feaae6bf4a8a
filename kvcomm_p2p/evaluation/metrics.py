"""How far a filled cache is from full prefill: teacher-forced KL divergence and agreement of the most likely token.

The reference is the greedy continuation of the *full* run. Every other cache is fed the same tokens, so that position i
of one is comparable with position i of the other, whatever it would have said by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvcomm_p2p.errors import UsageError
from kvcomm_p2p.model.cache import KVCache, OpaqueCache
from kvcomm_p2p.model.call import cache_argument
from kvcomm_p2p.model.decoding import end_tokens
from kvcomm_p2p.model.runner import ModelRunner

RESAMPLES = 2000
"""Of the bootstrap behind a confidence interval."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """Greedy tokens after a prompt and, for each, the log-probabilities [V] (float64) it was chosen by."""

    token_ids: tuple[int, ...]
    log_probs: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Divergence:
    """Against a full run's continuation of n tokens. `kl`: KL(full || method) at each of them, nats.

    `top1`: share of positions at which both find the same token most likely. `identical_tokens`: leading positions at
    which they do, which is how long the method's own greedy answer would be the same. `first_margin`: at the first
    position where they do not, by how many nats the full run preferred its own choice (None if there is none).
    """

    kl: tuple[float, ...]
    top1: float
    identical_tokens: int
    first_margin: float | None

    @property
    def tokens(self) -> int:
        return len(self.kl)

    @property
    def kl_mean(self) -> float:
        return float(np.mean(self.kl))

    @property
    def kl_max(self) -> float:
        return max(self.kl)

    @property
    def first_divergence(self) -> int | None:
        """The first position whose most likely tokens differ, or None."""
        return self.identical_tokens if self.identical_tokens < self.tokens else None


def continue_greedily(
    runner: ModelRunner, cache: KVCache | OpaqueCache, logits: torch.Tensor, tokens: int
) -> Continuation:
    """The next `tokens` greedy tokens (fewer when the answer ends; the ending token is the last then) after a prompt
    whose KV `cache` holds and whose next-token `logits` [V] are given.

    A KVCache is left as long as it was; an OpaqueCache cannot be cut and keeps what was appended. Raises UsageError for
    `tokens` < 1.
    """
    if tokens < 1:
        raise UsageError(f"a continuation of {tokens} tokens cannot be compared: take at least 1")
    ends = end_tokens(runner)
    length = cache.length
    chosen: list[int] = []
    log_probs: list[torch.Tensor] = []
    try:
        while True:
            log_probs.append(_log_softmax(logits))
            chosen.append(int(logits.argmax()))
            if len(chosen) == tokens or chosen[-1] in ends or cache.length >= runner.spec.context_tokens_max:
                return Continuation(tuple(chosen), tuple(log_probs))
            logits = runner.decode_step(chosen[-1], cache)
    finally:
        _restore(cache, length)


def diverge(runner: ModelRunner, full: Continuation, cache: KVCache | OpaqueCache, logits: torch.Tensor) -> Divergence:
    """Feeds the full run's tokens to another cache of the same prompt, one by one as in decoding, and compares.

    Safe beside other forwards of the model. The cache is left as in `continue_greedily`.
    """
    length = cache.length
    log_probs: list[torch.Tensor] = []
    try:
        for index in range(len(full.token_ids)):
            if index:
                logits = runner.decode_step(full.token_ids[index - 1], cache)
            log_probs.append(_log_softmax(logits))
    finally:
        _restore(cache, length)
    return compare_log_probs(full.log_probs, log_probs)


def diverge_at_once(runner: ModelRunner, full: Continuation, cache: KVCache, logits: torch.Tensor) -> Divergence:
    """`diverge` in one forward over all tokens, which rounds differently (about 1e-9 nats) and is many times faster.

    The model must not be used by another thread meanwhile. Works on a copy of the cache.
    """
    log_probs = [_log_softmax(logits)]
    if len(full.token_ids) > 1:
        copied = cache.to_dynamic(runner.model.config, rows=cache.length)
        ids = torch.tensor([full.token_ids[:-1]], dtype=torch.int64, device=logits.device)
        with torch.inference_mode():
            output = runner.model(input_ids=ids, **{cache_argument(runner.model): copied})
        log_probs += [_log_softmax(row) for row in output.logits[0].float()]
    return compare_log_probs(full.log_probs, log_probs)


def compare_log_probs(full: Sequence[torch.Tensor], method: Sequence[torch.Tensor]) -> Divergence:
    """Log-probabilities [V] (float64) of the full run and of the method, position by position. Raises UsageError if
    their numbers differ or are 0."""
    if len(full) != len(method) or not full:
        raise UsageError(f"cannot compare {len(full)} positions with {len(method)}")
    kl = tuple(_kl(true, other) for true, other in zip(full, method, strict=True))
    same = [int(true.argmax()) == int(other.argmax()) for true, other in zip(full, method, strict=True)]
    identical = same.index(False) if False in same else len(same)
    margin = None
    if identical < len(same):
        true = full[identical]
        margin = float(true.max() - true[int(method[identical].argmax())])
    return Divergence(kl, sum(same) / len(same), identical, margin)


def interval95(
    values: Sequence[float], statistic: Callable[[npt.NDArray[np.float64]], float], seed: int
) -> tuple[float, float] | None:
    """Bootstrap 95 % interval of `statistic` over independent measurements; None for fewer than 5, which tell too
    little."""
    if len(values) < 5:
        return None
    rng = np.random.default_rng(seed)
    array = np.asarray(values, dtype=np.float64)
    drawn = [statistic(array[rng.integers(0, len(array), len(array))]) for _ in range(RESAMPLES)]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(low), float(high)


def _log_softmax(logits: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits.to(torch.float64), dim=-1)


def _kl(true: torch.Tensor, other: torch.Tensor) -> float:
    """Rounding can make an exact zero slightly negative; a divergence is not."""
    terms = true.exp() * (true - other)
    # A token of probability 0 contributes nothing, but 0 * (-inf - x) is NaN.
    return max(0.0, float(torch.where(torch.isneginf(true), 0.0, terms).sum()))


def _restore(cache: KVCache | OpaqueCache, length: int) -> None:
    if isinstance(cache, KVCache):
        cache.truncate(length)
