"""What a request takes beside its forwards, its lookups and its plan; part of `evaluation.costs`."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt
import torch

from kvcomm_p2p.agent import Agent
from kvcomm_p2p.evaluation.documents import topic_text
from kvcomm_p2p.evaluation.workers import private_cluster
from kvcomm_p2p.model.cache import KVCache
from kvcomm_p2p.model.decoding import Sampling
from kvcomm_p2p.model.runner import ModelRunner
from kvcomm_p2p.model.spec import ModelSpec
from kvcomm_p2p.net.encoding import decode, encode
from kvcomm_p2p.net.shared_memory import SharedMemory
from kvcomm_p2p.planning.costs import forward_s
from kvcomm_p2p.planning.plan import make_plan
from kvcomm_p2p.planning.segments import cut_anchors
from kvcomm_p2p.planning.spans import recompute_positions
from kvcomm_p2p.planning.types import Costs, Donor, Mode, Plan, ReuseRules
from kvcomm_p2p.protocol.anchors import BLOCK_TOKENS, BlockKey
from kvcomm_p2p.protocol.ids import ANCHOR_ID_BYTES, NODE_ID_BYTES, AnchorId, NodeId, SequenceId
from kvcomm_p2p.reuse.blocks import copy_block
from kvcomm_p2p.reuse.checks import PulledBlock, layer0_mismatches, not_finite
from kvcomm_p2p.reuse.guard import RepairWatch
from kvcomm_p2p.reuse.predictor import Predictor
from kvcomm_p2p.reuse.predictor_features import RunFeatures, features
from kvcomm_p2p.reuse.publish import copy_anchor
from kvcomm_p2p.reuse.rules import GUARD_PROBES
from kvcomm_p2p.settings import Settings
from kvcomm_p2p.store import BlockStore

KEY = b"costs".ljust(32, b".")
REPAIRED_TOKENS = 700
REPAIRED_TAILS = (40, 200, 500)
"""Tokens of the repaired run, and behind it."""

FREE = Costs(1e-2, 1e-3, 1e-7, 1e-6, 1e12, 1e12, 1)
"""Reusing costs nothing: whatever can be is."""

CHECKED_BLOCKS = 16
FORESEEN_TOKENS = 400
PUBLISHED_TOKENS = 512
REQUESTS_CHARACTERS = (200, 1500, 4000)

Rows = npt.NDArray[np.int64]


def repair_costs(runner: ModelRunner, costs: Costs, repeats: int, seed: int) -> tuple[float, float]:
    """Seconds that a forward over scattered tokens, watched by the guard, takes more than one over consecutive ones: in all,
    and per token."""
    rng = np.random.default_rng(seed)
    rules = ReuseRules(approximate=True, reason="", kl_target=1.0, kl_max=2.0, guard_probes=GUARD_PROBES)
    vocabulary, layers = runner.vocabulary_size, runner.spec.layout.layers
    more: list[tuple[int, float]] = []
    for tail in REPAIRED_TAILS:
        shared = rng.integers(0, vocabulary, REPAIRED_TOKENS, dtype=np.uint32)
        donor = donor_of(runner.spec, np.concatenate((rng.integers(0, vocabulary, 80, dtype=np.uint32), shared)))
        own = (rng.integers(0, vocabulary, count, dtype=np.uint32) for count in (90, tail))
        prompt = np.concatenate((next(own), shared, next(own)))
        plan = make_plan(prompt, [donor], Mode.BALANCED, rules, FREE, key=KEY)
        positions, ids = recompute_positions(plan), prompt.astype(np.int64)
        cache = runner.new_cache(len(ids))
        assert isinstance(cache, KVCache)
        runner.prefill(ids, cache)

        def repair(
            plan: Plan = plan, positions: Rows = positions, ids: Rows = ids, cache: KVCache = cache
        ) -> torch.Tensor:
            return runner.recompute(ids, positions, cache, repair=RepairWatch(plan, 0, layers))

        seconds = median_s(repair, repeats)
        more.append((len(positions), seconds - forward_s(costs, len(positions), float((positions + 1).sum()))))
    return _line(more)


def checks_bytes_per_s(runner: ModelRunner, repeats: int, seed: int) -> float:
    """Bytes of pulled blocks whose first layer and whose finiteness are checked per second."""
    tokens = CHECKED_BLOCKS * BLOCK_TOKENS
    ids = np.random.default_rng(seed).integers(0, runner.vocabulary_size, tokens).astype(np.uint32)
    cache = runner.new_cache(tokens)
    assert isinstance(cache, KVCache)
    runner.prefill(ids.astype(np.int64), cache)
    blocks = [
        PulledBlock(
            key=BlockKey(AnchorId(bytes(ANCHOR_ID_BYTES)), index),
            data=copy_block(cache, at, at + BLOCK_TOKENS),
            digest=b"",
            token_ids=ids[at : at + BLOCK_TOKENS],
            position=at,
        )
        for index in range(CHECKED_BLOCKS)
        for at in [index * BLOCK_TOKENS]
    ]

    def check() -> None:
        not_finite(blocks, runner.spec.layout)
        layer0_mismatches(runner, blocks)

    return sum(block.data.nbytes for block in blocks) / median_s(check, repeats)


def publish_bytes_per_s(runner: ModelRunner, repeats: int, seed: int) -> float:
    """Bytes of rows that are copied out of a cache, into memory that others can read, and hashed per second."""
    ids = np.random.default_rng(seed).integers(0, 2**15, PUBLISHED_TOKENS, dtype=np.uint32)
    cache = runner.new_cache(PUBLISHED_TOKENS)
    assert isinstance(cache, KVCache)
    runner.prefill(np.random.default_rng(seed).integers(0, runner.vocabulary_size, PUBLISHED_TOKENS), cache)
    spec = runner.spec
    (segment,) = cut_anchors(
        ids, hops=[(0, 0)], visibility=(), model_id=spec.model_id, layout=spec.layout, key=bytes(32)
    )
    store = BlockStore(SharedMemory())

    def publish() -> None:
        blocks, _ = copy_anchor(cache, segment.meta, store)
        for handle in blocks.put():
            store.drop(handle)

    return segment.meta.kv_bytes / median_s(publish, repeats)


def int8_bytes_per_s(runner: ModelRunner, repeats: int, seed: int) -> tuple[float, float]:
    """Bytes of KV that one thread encodes as int8 per second, and decodes."""
    cache = runner.new_cache(BLOCK_TOKENS)
    assert isinstance(cache, KVCache)
    runner.prefill(np.random.default_rng(seed).integers(0, runner.vocabulary_size, BLOCK_TOKENS), cache)
    block, layout = copy_block(cache, 0, BLOCK_TOKENS), runner.spec.layout
    encoded = memoryview(encode(block, layout))
    encode_s = median_s(lambda: encode(block, layout), 4 * repeats)
    decode_s = median_s(lambda: decode(encoded, layout, BLOCK_TOKENS), 4 * repeats)
    return block.nbytes / encode_s, block.nbytes / decode_s


def foresee_token_s(runner: ModelRunner, repeats: int, seed: int) -> float:
    """Seconds per token of a reused run for what the prefix predictor is asked before each repair."""
    predictor = Predictor()
    cache = runner.new_cache(FORESEEN_TOKENS)
    assert isinstance(cache, KVCache)
    runner.prefill(np.random.default_rng(seed).integers(0, runner.vocabulary_size, FORESEEN_TOKENS), cache)
    run = RunFeatures(100, 100, 0, 0.5, 0.5, 0.5, False, FORESEEN_TOKENS)
    rows = slice(0, FORESEEN_TOKENS)

    def foresee() -> object:
        return predictor.predict(features(run, cache.keys[0, 0][:, rows], cache.values[0, 0][:, rows]))

    return median_s(foresee, repeats) / FORESEEN_TOKENS


def request_costs(runner: ModelRunner, costs: Costs, repeats: int) -> tuple[float, float]:
    """Seconds in all and per token of an agent's requests that are neither lookup, plan nor forward: tokenizing, threads that
    wait for each other, memory for the cache, the report. Of an agent alone, so that nothing is reused."""
    return asyncio.run(_request_costs(runner, costs, repeats))


async def _request_costs(runner: ModelRunner, costs: Costs, repeats: int) -> tuple[float, float]:
    text = topic_text("execmodel", 4 * max(REQUESTS_CHARACTERS) * (repeats + 1))
    samples: list[tuple[int, float]] = []
    with tempfile.TemporaryDirectory(prefix="kvcomm-") as state:
        settings = replace(
            Settings.from_env(), state_dir=Path(state) / "state", cache_dir=Path(state), cluster=private_cluster()
        )
        async with Agent("costs", model=runner, settings=settings) as agent:
            at = 0
            for number in range(repeats + 1):
                for characters in REQUESTS_CHARACTERS:
                    piece, at = text[at : at + characters], at + characters
                    reply = await agent.generate(piece, sampling=Sampling(max_new_tokens=1))
                    await agent.settled()
                    report = reply.report
                    rest = reply.ttft_s - report.timings.find_s - report.timings.plan_s - report.timings.recompute_s
                    if number:
                        samples.append((report.prompt_tokens, rest))
    return _line(samples)


def donor_of(spec: ModelSpec, ids: np.ndarray[tuple[int], np.dtype[np.uint32]]) -> Donor:
    """A sequence of a peer, with these token ids."""
    segments = cut_anchors(ids, hops=[(0, 0)], visibility=(), model_id=spec.model_id, layout=spec.layout, key=KEY)
    anchors = tuple(segment.meta for segment in segments)
    return Donor(NodeId(bytes(NODE_ID_BYTES)), False, SequenceId(bytes(8)), 0, ids, anchors)


def _line(samples: list[tuple[int, float]]) -> tuple[float, float]:
    """(offset, slope), neither below 0, by least squares on the medians of each size."""
    sizes = sorted({size for size, _ in samples})
    medians = [median(value for each, value in samples if each == size) for size in sizes]
    slope = max(0.0, float(np.polyfit(sizes, medians, 1)[0])) if len(sizes) > 1 else 0.0
    return max(0.0, float(np.mean(medians)) - slope * float(np.mean(sizes))), slope


def median_s(call: Callable[[], object], repeats: int, *, warm_ups: int = 1) -> float:
    """Median seconds of `repeats` calls (at least one), after `warm_ups` that do not count."""
    seconds = []
    for _ in range(warm_ups + repeats):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return median(seconds[warm_ups:])
