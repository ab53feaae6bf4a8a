"""Real agents over loopback with tiny models: how to make them, wait for them, and compare with dense prefill."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvcomm_p2p.agent import Agent
from kvcomm_p2p.model.cache import KVCache
from kvcomm_p2p.model.runner import ModelRunner
from kvcomm_p2p.model.spec import Profile
from kvcomm_p2p.planning.costs import CostTracker
from kvcomm_p2p.planning.divergence import DivergenceFit
from kvcomm_p2p.planning.segments import Segment, cut_anchors
from kvcomm_p2p.planning.types import Costs, Provenance, Repair
from kvcomm_p2p.prompts import prepare_ids
from kvcomm_p2p.protocol.anchors import BLOCK_TOKENS, AnchorMeta, HeldAnchor, Visibility
from kvcomm_p2p.report import PrefillReport
from kvcomm_p2p.reuse.blocks import copy_block
from kvcomm_p2p.reuse.engine import Filled
from kvcomm_p2p.settings import Settings

Ids = npt.NDArray[np.uint32]

ANYTHING_GOES = Profile(
    run_tokens_min=64,
    repairs={each: (Repair(16),) for each in Provenance},
    divergence=DivergenceFit(intercept=-99.0, body=1.0, head=0.0, entropy=0.0, spread=0.0, prompts=1),
    measured="tests",
)
"""A profile whose guard rejects nothing finite."""


class FixedCosts(CostTracker):
    """Costs of a slow model on a fast network, whatever is measured: what can be reused is worth reusing."""

    def __init__(self, token_bytes: int = 1, **changes: Any) -> None:
        costs = Costs(
            forward_s=1e-3,
            token_s=1e-2,
            attention_s=1e-9,
            pull_latency_s=1e-4,
            pull_bytes_per_s=1e10,
            align_bytes_per_s=1e10,
            token_bytes=token_bytes,
        )
        super().__init__(replace(costs, **changes))

    def saw_forward(self, tokens: int, pairs: float, seconds: float) -> None:
        pass

    def saw_pull(self, peer: Any, kv_bytes: int, seconds: float) -> None:
        pass

    def saw_align(self, kv_bytes: int, seconds: float) -> None:
        pass


def fixed_costs(runner: ModelRunner) -> CostTracker:
    """In place of `stack.measured_costs`."""
    return FixedCosts(runner.spec.layout.token_bytes)


def with_profile(runner: ModelRunner, profile: Profile | None) -> ModelRunner:
    """A runner of the same model whose spec has this profile."""
    return ModelRunner(runner.model, runner.tokenizer, replace(runner.spec, profile=profile), runner._call)


def settings_in(folder: Path, **changes: Any) -> Settings:
    """Settings of one cluster under `folder`. Waits are long, so that a busy machine fails no test by accident."""
    defaults: dict[str, Any] = {
        "state_dir": folder / "state",
        "cache_dir": folder / "cache",
        "runtime_dir": folder / "run",
        "gossip_interval_s": 0.03,
        "probe_interval_s": 4.0,
        "probe_timeout_s": 2.0,
        "tokens_timeout_s": 5.0,
        "pull_stall_timeout_s": 5.0,
        "pool_bytes_max": 64 << 20,
    }
    return Settings(**(defaults | changes))


async def eventually(condition: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
    """Wait until `condition` holds; AssertionError naming `what` if it does not in time."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"never: {what}"
        await asyncio.sleep(0.01)


async def on_loop(agent: Agent, question: Callable[[Any], Any]) -> Any:
    """Evaluate `question(node)` on the agent's driver loop."""
    stack = agent._running()

    async def ask() -> Any:
        return question(stack.driver._interpreter.node)

    return await asyncio.wrap_future(stack.driver.run(ask()))


async def pool_metas(agent: Agent) -> list[AnchorMeta]:
    """Metadata of everything that an agent holds."""
    return list(await on_loop(agent, lambda node: node._pool.metas()))


async def listed(agent: Agent, of: Agent) -> set[bytes]:
    """Ids of the anchors of another agent that this one knows of."""
    return set(await on_loop(agent, lambda node: set(node._community.directory._of_holder.get(of.node_id, ()))))


async def shared(holder: Agent, *others: Agent) -> None:
    """Wait until what `holder` shows to everybody is published and known to `others`."""
    await holder.settled()
    shown = {meta.anchor_id for meta in await pool_metas(holder) if meta.visibility is Visibility.PUBLIC}
    end = time.monotonic() + 10.0
    for other in others:
        while await listed(other, holder) != shown:
            assert time.monotonic() < end, f"never: {other.name} knows what {holder.name} holds"
            await asyncio.sleep(0.01)


async def met(*agents: Agent) -> None:
    """Wait until everyone sees everyone alive."""
    for agent in agents:
        others = {other.node_id.hex() for other in agents if other is not agent}
        await eventually(
            lambda agent=agent, others=others: (
                others <= {peer["node_id"] for peer in agent.status().peers if peer["state"] == "alive"}
            ),
            f"{agent.name} sees the others",
        )


def kvcomm_threads() -> list[str]:
    """Names of the live threads of agents (a model's forward thread lives as long as the model)."""
    names = [thread.name for thread in threading.enumerate()]
    return sorted(name for name in names if name.startswith("kvcomm") and not name.startswith("kvcomm-forward"))


async def no_threads() -> None:
    """Wait until no threads of agents are left; idle hashers end a moment after their driver."""
    await eventually(lambda: not kvcomm_threads(), f"none of {kvcomm_threads()} are left")


def random_ids(seed: int, tokens: int, vocabulary: int = 259) -> Ids:
    """Reproducible token ids, none of them special."""
    return np.random.default_rng(seed).integers(3, vocabulary, tokens).astype(np.uint32)


def joined(*parts: Ids) -> Ids:
    return np.concatenate(parts).astype(np.uint32)


async def fill(agent: Agent, ids: Ids, mode: str = "balanced", **options: Any) -> Filled:
    """The engine's result for plain ids, published."""
    visibility = {key: options.pop(key) for key in ("visibility", "group") if key in options}
    prompt = prepare_ids(ids, agent.runner.vocabulary_size, key=agent._running().group_key, **visibility)
    return await agent.fill(prompt, mode, **options)


def dense(runner: ModelRunner, ids: Ids) -> tuple[KVCache, torch.Tensor]:
    """Full prefill: cache and next-token logits."""
    cache = runner.new_cache(len(ids))
    assert isinstance(cache, KVCache)
    return cache, runner.prefill(ids.astype(np.int64), cache)


def rows(cache: Any, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [L, H, n, D] of rows [start, end)."""
    return cache.keys[:, 0, :, start:end], cache.values[:, 0, :, start:end]


def same_bits(left: tuple[torch.Tensor, torch.Tensor], right: tuple[torch.Tensor, torch.Tensor]) -> bool:
    return torch.equal(left[0], right[0]) and torch.equal(left[1], right[1])


def is_dense(filled: Filled, runner: ModelRunner, ids: Ids) -> bool:
    """Whether logits and all KV are what full prefill gives (up to rounding)."""
    cache, logits = dense(runner, ids)
    keys, values = rows(filled.cache, 0, len(ids))
    true_keys, true_values = rows(cache, 0, len(ids))
    return (
        torch.allclose(filled.logits, logits, atol=1e-4, rtol=1e-4)
        and torch.allclose(keys, true_keys, atol=1e-3, rtol=1e-3)
        and torch.allclose(values, true_values, atol=1e-3, rtol=1e-3)
    )


def adds_up(report: PrefillReport) -> bool:
    """Whether counts agree with the spans, and the spans cover the prompt without a gap."""
    counts = {"exact": 0, "continued": 0, "reuse": 0, "recompute": 0}
    at = 0
    for span in report.spans:
        if span.start != at or span.end <= span.start:
            return False
        counts[span.kind] += span.end - span.start - span.probes
        counts["recompute"] += span.probes
        at = span.end
    told = (report.exact_tokens, report.continued_tokens, report.reused_tokens, report.recomputed_tokens)
    return at == report.prompt_tokens == sum(told) and tuple(counts.values()) == told


def reasons(report: PrefillReport) -> set[str]:
    return {miss.reason for miss in report.misses}


async def no_leaks(*agents: Agent) -> None:
    """Wait until each store holds what its pool holds, and not a byte more."""
    for agent in agents:
        await agent.settled()
        store = agent._running().store

        def settled(agent: Agent = agent, store: Any = store) -> bool:
            return bool(store.held_bytes == agent.status().pool_bytes and store.reserved_bytes == 0)

        # What was pulled by a request that ended early is passed on to others for a while (`passing_on_s`), then let go of.
        await eventually(settled, f"{agent.name}'s store holds only its pool", timeout_s=20.0)


async def publish_forged(
    liar: Agent,
    ids: Ids,
    forge: Callable[[list[bytearray], Segment], list[bytearray]],
    *,
    meta: Callable[[Any], Any] = lambda meta: meta,
    told_ids: Callable[[Ids], Ids] = lambda ids: ids,
    digest_of: Callable[[bytes], bytes] = lambda data: hashlib.sha256(data).digest(),
    cache: KVCache | None = None,
) -> None:
    """Let a member of the cluster hold anchors of `ids` whose blocks, metadata, token ids or digests are forged.

    `forge` gets copies of an anchor's true blocks and gives what is published instead.
    """
    stack = liar._running()
    spec = liar.runner.spec
    cache = cache or dense(liar.runner, ids)[0]
    segments = cut_anchors(
        ids, hops=[(0, 0)], visibility=(), model_id=spec.model_id, layout=spec.layout, key=stack.group_key
    )
    for segment in segments:
        start = segment.meta.start
        ends = [start + index * BLOCK_TOKENS + segment.meta.block_tokens(index) for index in range(segment.meta.blocks)]
        starts = [start + index * BLOCK_TOKENS for index in range(segment.meta.blocks)]
        true = [bytearray(copy_block(cache, low, high)) for low, high in zip(starts, ends, strict=True)]
        blocks = [bytes(block) for block in forge(true, segment)]
        handles = tuple(stack.store.put(block) for block in blocks)
        held = HeldAnchor(
            meta(segment.meta), told_ids(segment.token_ids), handles, tuple(digest_of(block) for block in blocks)
        )
        await asyncio.wrap_future(stack.driver.run(stack.driver.publish([held])))


def block_views(runner: ModelRunner, block: bytearray) -> tuple[torch.Tensor, torch.Tensor]:
    """Writable keys and values [L, H, n, D] of a block's bytes."""
    layout = runner.spec.layout
    tokens = len(block) // layout.token_bytes
    flat = torch.frombuffer(block, dtype=getattr(torch, layout.dtype))
    split = layout.layers * layout.kv_heads * tokens * layout.key_dim
    keys = flat[:split].view(layout.layers, layout.kv_heads, tokens, layout.key_dim)
    values = flat[split:].view(layout.layers, layout.kv_heads, tokens, layout.value_dim)
    return keys, values


def greedy(runner: ModelRunner, ids: Sequence[int], tokens: int) -> list[int]:
    """Tokens of a plain greedy continuation by transformers alone."""
    out = runner.model.generate(torch.tensor([list(ids)]), max_new_tokens=tokens, do_sample=False, pad_token_id=2)
    return [int(token) for token in out[0, len(ids) :]]
