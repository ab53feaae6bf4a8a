"""One prompt, twice in the same process: with KV from peers, and by full prefill. What `compare` of the local API
answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from kvcomm_p2p.agent import Agent
from kvcomm_p2p.errors import UsageError
from kvcomm_p2p.evaluation.metrics import Continuation, Divergence, continue_greedily, diverge
from kvcomm_p2p.model.decoding import Decoded, Sampling, decode
from kvcomm_p2p.model.threads import helper_pool
from kvcomm_p2p.planning.types import Mode
from kvcomm_p2p.prompts import PreparedPrompt, Text, prepare
from kvcomm_p2p.report import PrefillReport
from kvcomm_p2p.reuse.engine import Filled

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Comparison:
    """`ttft_s`: seconds from the text to the first token's logits with exchange; `dense_ttft_s`: the same by full
    prefill.

    `divergence`: of the run with exchange from the full run, over the full run's greedy answer. `text`: the greedy
    answer with exchange; `dense_text`: the one without. `total_s`: `ttft_s` and the decoding of `text`.
    """

    ttft_s: float
    dense_ttft_s: float
    divergence: Divergence
    report: PrefillReport
    text: str
    dense_text: str
    finish_reason: str
    total_s: float

    def as_dict(self) -> dict[str, Any]:
        """Plain types, ready for JSON."""
        return {
            "ttft_s": self.ttft_s,
            "dense_ttft_s": self.dense_ttft_s,
            "kl_mean": self.divergence.kl_mean,
            "kl_max": self.divergence.kl_max,
            "top1": self.divergence.top1,
            "identical_tokens": self.divergence.identical_tokens,
            "tokens": self.divergence.tokens,
            "dense_text": self.dense_text,
            "reply": {
                "text": self.text,
                "finish_reason": self.finish_reason,
                "ttft_s": self.ttft_s,
                "total_s": self.total_s,
                "report": self.report.as_dict(),
            },
        }


async def compare(
    agent: Agent,
    prompt: str | list[dict[str, Any]],
    slots: Mapping[str, str | Text] | None = None,
    tokens: int = 32,
) -> Comparison:
    """Fills `prompt` as `Agent.generate` does in balanced mode, publishes it, then fills it again without any reuse,
    and compares `tokens` greedy tokens (fewer if the answer ends).

    The full run begins when publishing is over, so that neither slows the other down. Raises UsageError.
    """
    if tokens < 1:
        raise UsageError(f"tokens must be at least 1, not {tokens}")
    started = time.perf_counter()
    prepared = await aside(partial(prepare, agent.runner.tokenizer, prompt, slots))
    prepare_s = time.perf_counter() - started
    shared, shared_s = await timed_fill(agent, prepared, Mode.BALANCED, tokens, publish=True)
    await agent.settled()
    dense, dense_s = await timed_fill(agent, prepared, Mode.DENSE, tokens)
    full, divergence = await aside(partial(compare_filled, agent, dense, shared, tokens))
    decoding = time.perf_counter()
    answer = await aside(partial(_decode, agent, prepared, shared, tokens))
    return Comparison(
        ttft_s=prepare_s + shared_s,
        dense_ttft_s=prepare_s + dense_s,
        divergence=divergence,
        report=shared.report,
        text=answer.text,
        dense_text=agent.runner.tokenizer.decode(full.token_ids, skip_special_tokens=True),
        finish_reason=answer.finish_reason,
        total_s=prepare_s + shared_s + time.perf_counter() - decoding,
    )


async def timed_fill(
    agent: Agent, prompt: PreparedPrompt, mode: Mode, rows_extra: int, *, publish: bool = False
) -> tuple[Filled, float]:
    """A filled prompt with room for `rows_extra` more tokens, and the seconds until its next-token logits were here, as
    seen by the caller (queueing and thread changes included)."""
    started = time.perf_counter()
    filled = await agent.fill(prompt, mode, rows_extra=rows_extra, publish=publish)
    return filled, time.perf_counter() - started


def compare_filled(agent: Agent, dense: Filled, other: Filled, tokens: int) -> tuple[Continuation, Divergence]:
    """The greedy continuation of a full run, and how far another run of the same prompt is from it."""
    full = continue_greedily(agent.runner, dense.cache, dense.logits, tokens)
    return full, diverge(agent.runner, full, other.cache, other.logits)


def _decode(agent: Agent, prompt: PreparedPrompt, filled: Filled, tokens: int) -> Decoded:
    ids = [int(token) for token in prompt.token_ids]
    return decode(agent.runner, filled.cache, ids, filled.logits, Sampling(max_new_tokens=tokens))


_pool = helper_pool(1, "kvcomm-compare")


async def aside(call: Callable[[], T]) -> T:
    """The result of a blocking call, computed without disturbing the forward thread (see `model.threads`)."""
    return await asyncio.get_running_loop().run_in_executor(_pool, call)
