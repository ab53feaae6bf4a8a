"""What one request costs on this machine, part by part: the constants that the simulator reckons with.

Every part is measured with the code that a request runs: forwards of the model (several lengths, behind nothing and behind a
cached prompt, and of scattered tokens as a repair computes them), aligning blocks into a cache, SHA-256 and the other checks of
a block, int8 and back, one more token of an answer, looking a prompt up, planning it, predicting deviations, a control frame
through the driver's codec and node, and whole requests of an agent that is alone, for what is left. `request_costs` measures
that.
"""

from __future__ import annotations

import hashlib
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvcomm_p2p.errors import UsageError
from kvcomm_p2p.evaluation.progress import stepping
from kvcomm_p2p.evaluation.request_costs import (
    KEY,
    checks_bytes_per_s,
    donor_of,
    foresee_token_s,
    int8_bytes_per_s,
    median_s,
    publish_bytes_per_s,
    repair_costs,
    request_costs,
)
from kvcomm_p2p.evaluation.results import Result, Row
from kvcomm_p2p.model.cache import KVCache
from kvcomm_p2p.model.runner import ModelRunner
from kvcomm_p2p.model.spec import ModelSpec
from kvcomm_p2p.net.seal import Sealer
from kvcomm_p2p.planning.chains import chain_hashes
from kvcomm_p2p.planning.costs import CostTracker
from kvcomm_p2p.planning.plan import make_plan
from kvcomm_p2p.planning.types import Costs, Mode, ReuseRules, Span, SpanKind
from kvcomm_p2p.planning.winnow import fingerprints
from kvcomm_p2p.protocol.anchors import BLOCK_TOKENS, BlockKey
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.events import MessageReceived
from kvcomm_p2p.protocol.ids import MODEL_ID_BYTES, ModelId, NodeId
from kvcomm_p2p.protocol.messages import PROTOCOL_VERSION, Hello, MemberRecord
from kvcomm_p2p.protocol.node import Node
from kvcomm_p2p.protocol.wire import decode, encode
from kvcomm_p2p.reuse.align import Aligner
from kvcomm_p2p.reuse.blocks import copy_block

if TYPE_CHECKING:
    from rich.console import Console

PREFILLS = (32, 64, 128, 256, 512, 1024, 2048)
RECOMPUTED = ((48, 1000), (128, 1000), (48, 3000))
"""Forwards of so many tokens behind so many cached ones."""

REPEATS = 5
ALIGNED_TOKENS = 1024
PLANNED_TOKENS = 1000
FRAMES = 2000
DECODED_BEHIND = 512
ANSWER_ROWS = 32
MODEL = ModelId(bytes(MODEL_ID_BYTES))


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """Constants as `planning.types.Costs` uses them, and what else a request takes, in seconds and bytes per second."""

    spec: ModelSpec
    costs: Costs
    digest_bytes_per_s: float
    decode_token_s: float
    find_s: float
    plan_s: float
    frame_s: float
    repair_s: float
    repair_token_s: float
    check_bytes_per_s: float
    publish_bytes_per_s: float
    foresee_token_s: float
    int8_encode_bytes_per_s: float
    int8_decode_bytes_per_s: float
    request_s: float
    request_token_s: float


def measure_costs(
    console: Console | None = None, *, model: str = "smollm2-135m", repeats: int = REPEATS, seed: int = 0
) -> tuple[MeasuredCosts, Result]:
    """Medians over `repeats`. Raises ModelError, and UsageError for a model whose KV cannot be taken apart."""
    runner = ModelRunner.load(model)
    cache = runner.new_cache(BLOCK_TOKENS)
    if not isinstance(cache, KVCache):
        raise UsageError(f"{model}: {runner.spec.share_refusal or 'its KV cannot be exchanged'}")
    lengths = [length for length in PREFILLS if length <= runner.spec.context_tokens_max]
    with stepping(console, "costs", len(lengths) + len(RECOMPUTED) + 9) as step:
        samples: list[tuple[int, int, float]] = []
        for tokens, cached in [*((length, 0) for length in lengths), *RECOMPUTED]:
            if tokens + cached <= runner.spec.context_tokens_max:
                seconds = timed_forward_s(runner, tokens, cached, repeats=repeats, seed=seed)
                samples.append((tokens, cached, seconds))
            step(f"{tokens} tokens behind {cached}")
        aligned_bytes, align_seconds = _align(runner, repeats, seed)
        step("align")
        digest = _digest_bytes_per_s(runner, repeats)
        step("digest")
        decode_s = _decode_s(runner, repeats, seed)
        step("decode")
        find_s, plan_s = _find_and_plan_s(runner.spec, repeats, seed)
        step("find and plan")
        frame_s = _frame_s()
        step("frames")
        costs = _fitted(runner.spec, samples, aligned_bytes, align_seconds)
        repair = repair_costs(runner, costs, repeats, seed)
        step("repairs")
        check, publish = checks_bytes_per_s(runner, repeats, seed), publish_bytes_per_s(runner, repeats, seed)
        foresee_s = foresee_token_s(runner, repeats, seed)
        step("checks")
        int8 = int8_bytes_per_s(runner, repeats, seed)
        step("int8")
        request = request_costs(runner, costs, repeats)
        step("requests")
    measured = MeasuredCosts(
        runner.spec,
        costs,
        digest,
        decode_s,
        find_s,
        plan_s,
        frame_s,
        *repair,
        check,
        publish,
        foresee_s,
        *int8,
        *request,
    )
    return measured, Result("bench costs", _rows(measured, samples, repeats), seed)


def _fitted(spec: ModelSpec, samples: list[tuple[int, int, float]], aligned_bytes: int, align_seconds: float) -> Costs:
    longest_s, tokens = max((seconds, tokens) for tokens, cached, seconds in samples if not cached)
    start = Costs(
        forward_s=samples[0][2] / 2,
        token_s=longest_s / tokens,
        attention_s=longest_s / tokens / 5000,
        pull_latency_s=1e-3,
        pull_bytes_per_s=1e9,
        align_bytes_per_s=aligned_bytes / align_seconds,
        token_bytes=spec.layout.token_bytes,
    )
    return CostTracker.measured(start, samples, [(aligned_bytes, align_seconds)]).costs


def _rows(measured: MeasuredCosts, samples: list[tuple[int, int, float]], repeats: int) -> list[Row]:
    costs = measured.costs
    rows = []
    for tokens, cached, seconds in samples:
        case = f"forward of {tokens:,} tokens" + (f" behind {cached:,}" if cached else "")
        fitted = costs.forward_s + tokens * costs.token_s + (tokens * cached + tokens**2 / 2) * costs.attention_s
        rows.append(Row(case, "seconds", seconds, "s", repeats))
        rows.append(Row(case, "fitted, over measured", fitted / seconds, "×", repeats))
    figures = (
        ("a forward, whatever its length", costs.forward_s, "s"),
        ("each token", costs.token_s, "s"),
        ("each query-key pair", costs.attention_s, "s"),
        ("aligning", costs.align_bytes_per_s / 1e6, "MB/s"),
        ("SHA-256", measured.digest_bytes_per_s / 1e6, "MB/s"),
        ("one more token of an answer", measured.decode_token_s, "s"),
        (f"looking up {PLANNED_TOKENS:,} tokens", measured.find_s, "s"),
        (f"planning {PLANNED_TOKENS:,} tokens", measured.plan_s, "s"),
        ("a control frame", measured.frame_s, "s"),
        ("a forward of scattered tokens, more", measured.repair_s, "s"),
        ("each scattered token, more", measured.repair_token_s, "s"),
        ("checks of pulled blocks", measured.check_bytes_per_s / 1e6, "MB/s"),
        ("copying and hashing for others", measured.publish_bytes_per_s / 1e6, "MB/s"),
        ("predicting a reused token's deviation", measured.foresee_token_s, "s"),
        ("encoding as int8", measured.int8_encode_bytes_per_s / 1e6, "MB/s of KV"),
        ("decoding int8", measured.int8_decode_bytes_per_s / 1e6, "MB/s of KV"),
        ("a request beside all that", measured.request_s, "s"),
        ("each of its tokens", measured.request_token_s, "s"),
    )
    return rows + [Row(case, "cost", value, unit, repeats) for case, value, unit in figures]


def _ids(runner: ModelRunner, tokens: int, seed: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.random.default_rng(seed).integers(0, runner.vocabulary_size, tokens)


def timed_forward_s(
    runner: ModelRunner, tokens: int, cached: int = 0, *, repeats: int, seed: int, warm_ups: int = 1
) -> float:
    """Median seconds of a forward over `tokens` random tokens behind `cached` ones, after `warm_ups` that do not count; behind
    nothing into a cache of its own, as every prompt has one. Raises UsageError beyond the model's context."""
    ids = _ids(runner, tokens + cached, seed)
    if not cached:
        return median_s(lambda: runner.prefill(ids, runner.new_cache(tokens + ANSWER_ROWS)), repeats, warm_ups=warm_ups)
    cache = runner.new_cache(tokens + cached)
    assert isinstance(cache, KVCache)
    runner.prefill(ids[:cached], cache)

    def forward() -> None:
        cache.truncate(cached)
        runner.prefill(ids[cached:], cache, cached)

    return median_s(forward, repeats, warm_ups=warm_ups)


def _align(runner: ModelRunner, repeats: int, seed: int) -> tuple[int, float]:
    """Bytes, and seconds for placing them at another position."""
    spec = runner.spec
    source = runner.new_cache(ALIGNED_TOKENS)
    assert isinstance(source, KVCache)
    ids = _ids(runner, ALIGNED_TOKENS, seed)
    runner.prefill(ids, source)
    donor = donor_of(spec, ids.astype(np.uint32))
    blocks = {
        BlockKey(anchor.anchor_id, index): copy_block(source, at, at + anchor.block_tokens(index))
        for anchor in donor.anchors
        for index in range(anchor.blocks)
        for at in [anchor.start + index * BLOCK_TOKENS]
    }
    shift = 100
    span = Span(shift, shift + ALIGNED_TOKENS, SpanKind.REUSE, donor, 0)
    target = runner.new_cache(shift + ALIGNED_TOKENS)
    assert isinstance(target, KVCache)
    target.reserve(shift + ALIGNED_TOKENS)
    seconds = median_s(lambda: Aligner(target, [span], spec.rotary).put(blocks), repeats)
    return ALIGNED_TOKENS * spec.layout.token_bytes, seconds


def _digest_bytes_per_s(runner: ModelRunner, repeats: int) -> float:
    block = bytes(runner.spec.layout.block_bytes(BLOCK_TOKENS))
    return len(block) / median_s(lambda: hashlib.sha256(block).digest(), 4 * repeats)


def _decode_s(runner: ModelRunner, repeats: int, seed: int) -> float:
    cache = runner.new_cache(DECODED_BEHIND + 4 * repeats + 8)
    ids = _ids(runner, DECODED_BEHIND, seed)
    runner.prefill(ids, cache)
    return median_s(lambda: runner.decode_step(int(ids[0]), cache), 4 * repeats)


def _find_and_plan_s(spec: ModelSpec, repeats: int, seed: int) -> tuple[float, float]:
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, 2**15, PLANNED_TOKENS, dtype=np.uint32)
    donor = donor_of(spec, np.concatenate((rng.integers(0, 2**15, 80, dtype=np.uint32), shared)))
    prompt = np.concatenate((rng.integers(0, 2**15, 90, dtype=np.uint32), shared, shared[:30]))
    costs = Costs(1e-2, 1e-3, 1e-7, 1e-3, 1e9, 1e9, spec.layout.token_bytes)
    rules = ReuseRules(approximate=True, reason="")

    def find() -> None:
        chain_hashes(prompt, KEY, spec.model_id)
        fingerprints(prompt, KEY)

    def plan() -> None:
        make_plan(prompt, [donor], Mode.BALANCED, rules, costs, key=KEY)

    return median_s(find, repeats), median_s(plan, repeats)


def _frame_s() -> float:
    """Opening, decoding and handling one control frame, and making, encoding and sealing the answer."""
    record = MemberRecord(NodeId(b"a" * 16), 1, "a", MODEL, "127.0.0.1:1", "127.0.0.1:2")
    other = MemberRecord(NodeId(b"b" * 16), 1, "b", MODEL, "127.0.0.1:3", "127.0.0.1:4")
    node = Node(NodeConfig(), me=record, rng=random.Random(0), now=0.0)
    sealer = Sealer(KEY)
    hello = Hello(PROTOCOL_VERSION, PROTOCOL_VERSION, NodeConfig().cluster_id, other)
    frame = sealer.seal(encode(other.node_id, hello))
    started = time.perf_counter()
    for number in range(FRAMES):
        opened = sealer.open(frame)
        assert opened is not None
        sender, message = decode(opened)
        for effect in node.handle(MessageReceived(sender, message), number * 1e-4):
            if hasattr(effect, "message"):
                sealer.seal(encode(record.node_id, effect.message))
    return (time.perf_counter() - started) / FRAMES
