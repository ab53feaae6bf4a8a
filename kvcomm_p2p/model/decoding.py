"""Generation after a prefill: sampling, streaming text, stop strings, cancellation. The KV of the answer ends up in the
cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvcomm_p2p.errors import UsageError
from kvcomm_p2p.model.streaming import TextStream

if TYPE_CHECKING:
    from kvcomm_p2p.model.cache import KVCache, OpaqueCache
    from kvcomm_p2p.model.runner import ModelRunner

FinishReason = Literal["eos", "stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 switch those filters off.

    `stop`: texts that end the answer and are not part of it. `seed` None draws differently every time.
    Raises `UsageError` for values that make no sense.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_new_tokens: int = 512
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        stop: Any = self.stop
        if isinstance(stop, str):
            raise UsageError("stop is a tuple of texts: write stop=(text,)")
        object.__setattr__(self, "stop", tuple(stop))
        problems = {
            "temperature must be 0 (greedy) or larger": self.temperature >= 0,
            "top_k must be 0 (off) or larger": self.top_k >= 0,
            "top_p must be above 0 and at most 1": 0 < self.top_p <= 1,
            "repetition_penalty must be above 0": self.repetition_penalty > 0,
            "max_new_tokens must be at least 1": self.max_new_tokens >= 1,
            "a stop text must not be empty": all(self.stop),
        }
        for problem, fine in problems.items():
            if not fine:
                raise UsageError(problem)


@dataclass(frozen=True, slots=True)
class Decoded:
    """An answer. `token_ids` has no end-of-sequence token. `finish_reason`: "eos", "stop" (a stop text), "length"
    (`max_new_tokens`, or the context is full) or "cancelled"."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason


def decode(
    runner: ModelRunner,
    cache: KVCache | OpaqueCache,
    token_ids: Sequence[int],
    logits: torch.Tensor,
    sampling: Sampling,
    on_text: Callable[[str], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> Decoded:
    """Generates after the prompt `token_ids`, whose KV `cache` holds and whose next-token `logits` [V] are given.

    Mutates the cache: afterwards it holds the prompt and the answer up to and including the last token that was run
    (all of the answer after "eos", otherwise all but its last token); `cache.length` says how many. `on_text` gets the
    text piece by piece, whole characters only, and never a part of a stop text. `cancelled` is asked before every
    token.
    """
    draw = _Draw(token_ids, sampling, logits.device)
    ends = end_tokens(runner)
    stream = TextStream(runner.tokenizer, sampling.stop, on_text)
    answer: list[int] = []
    reason: FinishReason = "length"
    while len(answer) < sampling.max_new_tokens:
        if cancelled is not None and cancelled():
            reason = "cancelled"
            break
        token = draw(logits)
        if token in ends:
            reason = "eos"
            break
        answer.append(token)
        if stream.push(token):
            reason = "stop"
            break
        if len(answer) == sampling.max_new_tokens or cache.length >= runner.spec.context_tokens_max:
            break
        logits = runner.decode_step(token, cache)
    stream.finish()
    return Decoded(tuple(answer), stream.text, reason)


def end_tokens(runner: ModelRunner) -> frozenset[int]:
    """The tokens that end an answer: the model's generation config, else its config, else the tokenizer."""
    sources = (getattr(runner.model, "generation_config", None), runner.model.config, runner.tokenizer)
    for source in sources:
        found = getattr(source, "eos_token_id", None)
        if found is not None:
            return frozenset([found] if isinstance(found, int) else found)
    return frozenset()


class _Draw:
    """Draws the next token from logits [V] with transformers' own processors, in transformers' order."""

    def __init__(self, prompt: Sequence[int], sampling: Sampling, device: torch.device) -> None:
        self._processors = LogitsProcessorList()
        self._greedy = sampling.temperature == 0
        if sampling.repetition_penalty != 1.0:
            self._processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
        if not self._greedy:
            self._add_warpers(sampling)
        # Only the repetition penalty looks at what came before; it needs each token once, in any order.
        self._seen: dict[int, None] = dict.fromkeys(int(token) for token in prompt)
        self._device = device
        self._generator = torch.Generator(device=device)
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)

    def __call__(self, logits: torch.Tensor) -> int:
        scores = logits[None]
        if self._processors:
            seen = torch.tensor([list(self._seen)], dtype=torch.int64, device=self._device)
            scores = self._processors(seen, scores)  # type: ignore[arg-type]
        if self._greedy:
            token = int(scores.argmax(dim=-1))
        else:
            token = int(torch.multinomial(scores.softmax(dim=-1), 1, generator=self._generator))
        self._seen[token] = None
        return token

    def _add_warpers(self, sampling: Sampling) -> None:
        warpers: list[Any] = []
        if sampling.temperature != 1.0:
            warpers.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k:
            warpers.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1.0:
            warpers.append(TopPLogitsWarper(sampling.top_p))
        self._processors.extend(warpers)
