"""What is measured of one request: where its tokens came from, and how its answer compares with full prefill's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

import numpy as np
import numpy.typing as npt

from kvcomm_p2p.errors import ConfigError

COPY_TOKENS = 8
"""Length of the pieces of an answer that are looked for in its prompt."""

RUN_TOKENS = 16
"""Shortest equal run that counts as possible to take over: a fingerprint's window."""

_BLEU_ORDERS = 4


@dataclass(frozen=True, slots=True)
class Sample:
    """One request in the mode under test, beside full prefill of the same prompt.

    `number`: its place in the run, from 0. `cold`: its agent's first. `covered_tokens`: of the prompt, in equal runs that
    some donor held, used or not (as the request's report says); `possible_tokens`: see `Published.possible`. `kl`:
    KL(full || method) in nats at each token of the full run's greedy answer. `identical_tokens`: leading tokens that both
    greedy answers share. `score`, `copied`: task score and verbatim share of the own answer, `dense_*` of the full run's;
    None where there is nothing to score. Seconds are from the text to the first token's logits. Token ids are uint32.
    """

    task: str
    agent: str
    number: int
    cold: bool
    prompt_ids: npt.NDArray[np.uint32]
    covered_tokens: int
    recomputed_tokens: int
    possible_tokens: int
    kl: tuple[float, ...]
    top1: float
    answer_ids: npt.NDArray[np.uint32]
    dense_answer_ids: npt.NDArray[np.uint32]
    answer: str
    dense_answer: str
    score: float | None
    dense_score: float | None
    ttft_s: float
    dense_ttft_s: float
    predicted_kl: float | None = None
    """What the guard predicted of the mean of `kl` (None: it had nothing to compare)."""
    fallback: str = ""

    @property
    def kl_mean(self) -> float:
        return float(np.mean(self.kl))

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def reused(self) -> bool:
        """Whether any of the prompt's KV was taken over."""
        return self.recomputed_tokens < self.prompt_tokens

    @property
    def identical_tokens(self) -> int:
        return common_beginning(self.answer_ids, self.dense_answer_ids)

    @property
    def same_answer(self) -> bool:
        return np.array_equal(self.answer_ids, self.dense_answer_ids)

    @property
    def copied(self) -> float | None:
        return copied_share(self.answer_ids, self.prompt_ids)

    @property
    def dense_copied(self) -> float | None:
        return copied_share(self.dense_answer_ids, self.prompt_ids)


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that did not end, and why."""

    task: str
    agent: str
    number: int
    reason: str


class Published:
    """All k-grams of the prompts and answers that agents have published so far, known to nobody but the harness."""

    def __init__(self, run_tokens: int = RUN_TOKENS) -> None:
        self._width = run_tokens
        self._seen: set[bytes] = set()

    def add(self, token_ids: Sequence[int] | npt.NDArray[np.uint32]) -> None:
        """A prompt with its answer behind it."""
        self._seen.update(_grams(token_ids, self._width))

    def possible(self, token_ids: Sequence[int] | npt.NDArray[np.uint32]) -> int:
        """Tokens of a prompt that stand in a run of at least `run_tokens` that was published before: what no method that
        matches tokens could exceed."""
        inside = np.zeros(len(token_ids) + 1, dtype=np.int64)
        for start, gram in enumerate(_grams(token_ids, self._width)):
            if gram in self._seen:
                inside[start] += 1
                inside[start + self._width] -= 1
        return int((np.cumsum(inside)[:-1] > 0).sum())


def common_beginning(one: npt.NDArray[np.uint32], other: npt.NDArray[np.uint32]) -> int:
    """Leading elements that both have."""
    shorter = min(len(one), len(other))
    return int(np.cumprod(one[:shorter] == other[:shorter]).sum())


def copied_share(
    answer: Sequence[int] | npt.NDArray[np.uint32], prompt: Sequence[int] | npt.NDArray[np.uint32]
) -> float | None:
    """Share of the answer's COPY_TOKENS-grams that occur in the prompt; None for an answer that has none."""
    pieces = list(_grams(answer, COPY_TOKENS))
    if not pieces:
        return None
    known = set(_grams(prompt, COPY_TOKENS))
    return sum(piece in known for piece in pieces) / len(pieces)


def bleu_terms(answer: str, reference: str) -> tuple[int, ...]:
    """What BLEU sums over a corpus: matching n-grams and n-grams of orders 1 to 4, length of answer and of reference.

    Tokenized as sacrebleu's default ("13a").
    """
    metric = import_module("sacrebleu.metrics").BLEU(effective_order=True)
    score = metric.sentence_score(answer, [reference])
    return (*map(int, score.counts), *map(int, score.totals), int(score.sys_len), int(score.ref_len))


def corpus_bleu(terms: Iterable[float]) -> float:
    """BLEU, 0 to 100, of a corpus from the sums of its `bleu_terms`."""
    sums = [int(term) for term in terms]
    matching, total = sums[:_BLEU_ORDERS], sums[_BLEU_ORDERS : 2 * _BLEU_ORDERS]
    metric = import_module("sacrebleu.metrics").BLEU
    return float(metric.compute_bleu(matching, total, sums[-2], sums[-1], smooth_method="exp").score)


def extra(module: str) -> ModuleType:
    """A module of the `eval` extra. Raises ConfigError saying how to install it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name != package:
            raise
        raise ConfigError(f"this needs {package}, which is not installed: pip install 'kvcomm-p2p[eval]'") from error


def _grams(token_ids: Sequence[int] | npt.NDArray[np.uint32], width: int) -> Iterable[bytes]:
    data = np.ascontiguousarray(token_ids, dtype=np.uint32).tobytes()
    return (data[start : start + 4 * width] for start in range(0, len(data) - 4 * width + 1, 4))
