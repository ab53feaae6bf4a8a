"""Blocks as bytes, checks of pulled blocks, alignment, the guard, and repair of everything."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reuse_cases import LAYOUT, donor, meta, plan_of

from kvcomm_p2p.errors import CancelledByCaller
from kvcomm_p2p.model.cache import KVCache
from kvcomm_p2p.model.runner import ModelRunner
from kvcomm_p2p.model.spec import Profile
from kvcomm_p2p.planning.costs import CostTracker
from kvcomm_p2p.planning.divergence import DivergenceFit
from kvcomm_p2p.planning.spans import recompute_positions
from kvcomm_p2p.planning.types import Costs, Mode, Plan, Provenance, Repair, RunChoice, Span, SpanKind
from kvcomm_p2p.prompts import PreparedPrompt
from kvcomm_p2p.protocol.anchors import BlockKey, Miss, MissReason
from kvcomm_p2p.reuse.align import Aligner, align_span
from kvcomm_p2p.reuse.blocks import block_tensors, copy_block
from kvcomm_p2p.reuse.checks import LAYER0_ERROR_MAX, PulledBlock, layer0_mismatches, not_finite
from kvcomm_p2p.reuse.engine import ReuseEngine
from kvcomm_p2p.reuse.guard import RepairWatch, symptoms
from kvcomm_p2p.reuse.pulling import Pulled, donor_spans


def noise_cache(rows: int, dtype: str = "float32", seed: int = 0) -> KVCache:
    layout = replace(LAYOUT, dtype=dtype)
    cache = KVCache(layout, rows)
    generator = torch.Generator().manual_seed(seed)
    cache.keys.copy_(torch.randn(cache.keys.shape, generator=generator))
    cache.values.copy_(torch.randn(cache.values.shape, generator=generator))
    cache.length = rows
    return cache


# ---------------------------------------------------------------------------------------------------------------- blocks


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("start", "end"), [(0, 32), (32, 64), (64, 65), (5, 36)])
def test_blocks_round_trip(dtype: str, start: int, end: int) -> None:
    cache = noise_cache(70, dtype)
    block = copy_block(cache, start, end)
    assert block.nbytes == cache.layout.block_bytes(end - start)
    keys, values = block_tensors(block, cache.layout, end - start)
    assert torch.equal(keys, cache.keys[:, 0, :, start:end])
    assert torch.equal(values, cache.values[:, 0, :, start:end])
    # Keys come first, layers outermost, whatever the tensor library says.
    raw = np.frombuffer(block, dtype=np.uint8)
    first = cache.keys[0, 0, 0, start].contiguous().view(torch.uint8).numpy()
    assert (raw[: len(first)] == first).all()
    last = cache.values[-1, 0, -1, end - 1].contiguous().view(torch.uint8).numpy()
    assert (raw[-len(last) :] == last).all()


def test_blocks_are_views_that_keep_their_bytes_alive() -> None:
    block = copy_block(noise_cache(32), 0, 32)
    keys, values = block_tensors(block.toreadonly(), LAYOUT, 32)
    expected = keys.clone(), values.clone()
    del block
    junk = [np.random.default_rng(i).bytes(20_000) for i in range(50)]
    assert torch.equal(keys, expected[0]) and torch.equal(values, expected[1]) and junk


def test_copies_do_not_change_with_the_slab() -> None:
    cache = noise_cache(32)
    block = copy_block(cache, 0, 32)
    before = bytes(block)
    cache.keys.zero_()
    assert bytes(block) == before


@pytest.mark.parametrize("kv_bytes", [0, 31, LAYOUT.block_bytes(31), LAYOUT.block_bytes(33)])
def test_blocks_of_another_size_are_refused(kv_bytes: int) -> None:
    with pytest.raises(ValueError, match="32 tokens"):
        block_tensors(memoryview(bytes(kv_bytes)), LAYOUT, 32)


# ---------------------------------------------------------------------------------------------------------------- checks


@pytest.fixture(scope="module", params=["float32", "bfloat16", "float16"])
def runner(request: pytest.FixtureRequest, tiny_llama: Callable[..., Any]) -> ModelRunner:
    model = tiny_llama().to(getattr(torch, request.param))
    return ModelRunner.from_model(model, None, request.param)


@pytest.fixture(scope="module")
def float_runner(tiny_llama: Callable[..., Any]) -> ModelRunner:
    return ModelRunner.from_model(tiny_llama(), None, "float32")


IDS = np.random.default_rng(0).integers(3, 256, 100).astype(np.uint32)


def failed_blocks(runner: ModelRunner, blocks: Sequence[PulledBlock]) -> dict[BlockKey, Miss]:
    failed = not_finite(blocks, runner.spec.layout)
    return failed | layer0_mismatches(runner, [block for block in blocks if block.key not in failed])


def pulled_blocks(runner: ModelRunner, ids: Any = IDS) -> tuple[list[PulledBlock], KVCache]:
    """True blocks of a prompt, the last one partial."""
    cache = runner.new_cache(len(ids))
    assert isinstance(cache, KVCache)
    runner.prefill(ids.astype(np.int64), cache)
    blocks = []
    for index, start in enumerate(range(0, len(ids), 32)):
        end = min(start + 32, len(ids))
        key = BlockKey(meta(1, 0, len(ids)).anchor_id, index)
        blocks.append(PulledBlock(key, copy_block(cache, start, end), b"", ids[start:end], start))
    return blocks, cache


def test_true_blocks_pass_in_every_dtype(runner: ModelRunner) -> None:
    assert failed_blocks(runner, pulled_blocks(runner)[0]) == {}
    assert failed_blocks(runner, []) == {}


def test_true_blocks_pass_with_room_to_spare(float_runner: ModelRunner) -> None:
    """A block computed by another call shape, and rounded on the way, is the same block."""
    blocks, _ = pulled_blocks(float_runner)
    for block in blocks:
        keys, values = block_tensors(block.data, float_runner.spec.layout, len(block.token_ids))
        keys.mul_(1 + 0.3 * LAYER0_ERROR_MAX["float32"])
        values.mul_(1 - 0.3 * LAYER0_ERROR_MAX["float32"])
    assert failed_blocks(float_runner, blocks) == {}


@pytest.mark.parametrize("part", ["keys", "values"])
def test_small_differences_beyond_rounding_fail(float_runner: ModelRunner, part: str) -> None:
    blocks, _ = pulled_blocks(float_runner)
    keys, values = block_tensors(blocks[1].data, float_runner.spec.layout, 32)
    (keys if part == "keys" else values).mul_(1 + 3 * LAYER0_ERROR_MAX["float32"])
    failed = failed_blocks(float_runner, blocks)
    assert {key.index: miss.reason for key, miss in failed.items()} == {1: MissReason.LAYER0_MISMATCH}


def test_wrong_position_and_wrong_tokens_fail(runner: ModelRunner) -> None:
    blocks, _ = pulled_blocks(runner)
    moved = [replace(block, position=block.position + 1) for block in blocks]
    assert {miss.reason for miss in failed_blocks(runner, moved).values()} == {MissReason.LAYER0_MISMATCH}
    assert len(failed_blocks(runner, moved)) == len(blocks)
    swapped = [replace(blocks[0], token_ids=blocks[1].token_ids), blocks[1]]
    assert list(failed_blocks(runner, swapped)) == [blocks[0].key]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("part", ["keys", "values"])
def test_one_value_that_is_not_finite_fails(runner: ModelRunner, value: float, part: str) -> None:
    blocks, _ = pulled_blocks(runner)
    keys, values = block_tensors(blocks[2].data, runner.spec.layout, 32)
    (keys if part == "keys" else values)[-1, -1, -1, -1] = value
    failed = failed_blocks(runner, blocks)
    assert {key.index: miss.reason for key, miss in failed.items()} == {2: MissReason.NOT_FINITE}


def test_large_sums_are_not_mistaken_for_infinity(tiny_llama: Callable[..., Any]) -> None:
    """Keys with a bias add up to more than half precision can hold."""
    half = ModelRunner.from_model(tiny_llama().half(), None, "half")
    blocks, _ = pulled_blocks(half)
    for block in blocks:
        keys, values = block_tensors(block.data, half.spec.layout, len(block.token_ids))
        keys[1:] = 60.0
        values[1:] = 60.0
    assert failed_blocks(half, blocks) == {}


# ---------------------------------------------------------------------------------------------------------------- guard


def watching(layers: int = LAYOUT.layers) -> tuple[Plan, RepairWatch]:
    """A run of 40 tokens at prompt position 8: a head of 8, then 32 with 4 probes."""
    source = donor([meta(1, 0, 64)])
    spans = [
        Span(0, 8, SpanKind.RECOMPUTE, why="no donor"),
        Span(8, 16, SpanKind.RECOMPUTE, source, 0, "head", run=1),
        Span(16, 48, SpanKind.REUSE, source, 8, probes=4, run=1),
        Span(48, 50, SpanKind.RECOMPUTE, why="no donor"),
    ]
    choice = RunChoice(8, 48, source, Provenance.OTHER, 0.5, Repair(8), 0.01, 1.0)
    plan = replace(plan_of(spans), runs=(choice,))
    return plan, RepairWatch(plan, 0, layers)


def shown(
    cache: KVCache, plan: Plan, watch: RepairWatch, change: Callable[[torch.Tensor, torch.Tensor, int], None]
) -> Any:
    """Runs the watch as a forward would, over what `change(keys [H, R, D], values, layer)` makes of the aligned rows."""
    positions = torch.from_numpy(recompute_positions(plan))
    for layer in range(cache.layout.layers):
        keys, values = cache.keys[layer, 0], cache.values[layer, 0]
        new_keys, new_values = keys[:, positions].clone(), values[:, positions].clone()
        change(new_keys, new_values, layer)
        watch.layer(layer, keys, values, positions, new_keys, new_values)
    ((rows, deviation),) = watch.deviations()
    return rows, deviation


def test_deviations_are_mean_relative_differences_of_deeper_layers() -> None:
    plan, watch = watching()
    rows, deviation = shown(noise_cache(50), plan, watch, lambda keys, values, layer: None)
    assert rows.positions.tolist() == [*range(8, 16), 20, 28, 36, 44]
    assert rows.is_head.tolist() == [True] * 8 + [False] * 4
    assert deviation.tolist() == [0.0] * 12

    def change(keys: torch.Tensor, values: torch.Tensor, layer: int) -> None:
        if layer == 0:  # depends on no context: it does not count
            keys += 100.0
        elif layer == 1:
            keys[:, 8] *= 2  # the run's first token: aligned keys are off by half of what they should be
        keys[:, :8] += 100.0  # nor do rows that nobody aligned

    plan, watch = watching()
    _, deviation = shown(noise_cache(50), plan, watch, change)
    assert deviation[0] == pytest.approx(0.5 / (2 * 2)), "one of two deeper layers, keys alone"
    assert not deviation[1:].any()


def test_nan_is_never_small() -> None:
    def change(keys: torch.Tensor, values: torch.Tensor, layer: int) -> None:
        values[:, 12] = float("nan")

    plan, watch = watching()
    rows, deviation = shown(noise_cache(50), plan, watch, change)
    symptom = symptoms(plan, [(rows, deviation)], {}, torch.zeros(10))
    assert np.isnan(symptom.head)
    fit = DivergenceFit(-99.0, 1.0, 1.0, 0.0, 0.0, 1)
    assert not fit.kl(symptom) <= 1e9, "no bound admits NaN"


def test_a_zero_row_gives_no_division_by_zero() -> None:
    def change(keys: torch.Tensor, values: torch.Tensor, layer: int) -> None:
        keys.zero_()
        values.zero_()

    plan, watch = watching()
    _, deviation = shown(noise_cache(50), plan, watch, change)
    assert np.isfinite(deviation).all() and deviation.min() > 1e3


def test_one_layer_models_have_deviations_too() -> None:
    cache = KVCache(replace(LAYOUT, layers=1), 50)
    cache.keys.fill_(1.0)
    cache.values.fill_(1.0)

    def change(keys: torch.Tensor, values: torch.Tensor, layer: int) -> None:
        keys *= 2

    plan, watch = watching(layers=1)
    _, deviation = shown(cache, plan, watch, change)
    assert deviation == pytest.approx(0.25)


# -------------------------------------------------------------------------------------------------- alignment and repair


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 60), st.integers(1, 70), st.integers(0, 100), st.booleans())
def test_alignment_gathers_any_stretch_over_any_blocks(offset: int, tokens: int, start: int, cut: bool) -> None:
    """Without rotation the rows are the donor's, wherever block and anchor borders lie; other rows stay."""
    source = noise_cache(140)
    anchors = [meta(1, 0, 64), meta(2, 64, 140)] if cut else [meta(1, 0, 140)]
    blocks = {}
    for anchor in anchors:
        for index in range(anchor.blocks):
            low = anchor.start + index * 32
            blocks[BlockKey(anchor.anchor_id, index)] = copy_block(source, low, low + anchor.block_tokens(index))
    cache = noise_cache(start + tokens + 5, seed=1)
    untouched = cache.keys.clone()
    span = Span(start, start + tokens, SpanKind.REUSE, donor(anchors), offset)
    align_span(cache, span, blocks, None)
    again = noise_cache(start + tokens + 5, seed=1)
    aligner = Aligner(again, [span], None)
    for key in reversed(blocks):
        aligner.put({key: blocks[key]})
    assert torch.equal(again.keys, cache.keys) and torch.equal(again.values, cache.values)
    if start == offset:
        assert torch.equal(cache.keys[:, :, :, start : start + tokens], source.keys[:, :, :, offset : offset + tokens])
    assert torch.equal(cache.values[:, :, :, start : start + tokens], source.values[:, :, :, offset : offset + tokens])
    assert torch.equal(cache.keys[:, :, :, :start], untouched[:, :, :, :start])
    assert torch.equal(cache.keys[:, :, :, start + tokens :], untouched[:, :, :, start + tokens :])


GOOD, BAD = -99.0, 99.0
"""Intercepts of fits that predict nothing, and very much, from any deviation that is a number."""


def engine_for(runner: ModelRunner, intercept: float = GOOD) -> ReuseEngine:
    """Only what `_complete` needs."""
    repairs = {each: (Repair(16),) for each in Provenance}
    fit = DivergenceFit(intercept, body=1.0, head=0.0, entropy=0.0, spread=0.0, prompts=1)
    spec = replace(runner.spec, profile=Profile(64, repairs, fit, "tests"))
    profiled = ModelRunner(runner.model, None, spec, runner._call)
    nothing: Any = None
    costs = CostTracker(Costs(1e-3, 1e-4, 1e-9, 1e-3, 1e9, 1e9, runner.spec.layout.token_bytes))
    return ReuseEngine(profiled, nothing, nothing, costs, nothing, lambda node_id: "peer", b"key")


def complete(
    runner: ModelRunner,
    prompt: PreparedPrompt,
    cache: KVCache,
    plan: Plan,
    lead: int,
    blocks: Mapping[BlockKey, memoryview],
    intercept: float = GOOD,
    cancelled: Callable[[], bool] | None = None,
) -> Any:
    engine = engine_for(runner, intercept)
    return engine._complete(prompt, cache, plan, blocks, engine.rules(Mode.BALANCED), lead, cancelled)


def moved_plan(runner: ModelRunner, head: int) -> tuple[Any, Pulled, PreparedPrompt]:
    """Ten tokens of our own, then a run of 100 (IDS computed behind something else), of which `head` are recomputed."""
    behind = np.concatenate([np.arange(3, 35), IDS]).astype(np.uint32)
    blocks, _ = pulled_blocks(runner, behind)
    anchor = meta(1, 0, len(behind), kv_bytes=runner.spec.layout.block_bytes(len(behind)))
    source = donor([anchor], ids=behind)
    prompt = PreparedPrompt(np.concatenate([np.arange(100, 110), IDS, [7, 8]]).astype(np.uint32))
    spans = [Span(0, 10, SpanKind.RECOMPUTE, why="no donor")]
    if head:
        spans.append(Span(10, 10 + head, SpanKind.RECOMPUTE, source, 32, "head of a reused run", run=1))
    if head < 100:
        spans.append(Span(10 + head, 110, SpanKind.REUSE, source, 32 + head, run=1))
    spans.append(Span(110, 112, SpanKind.RECOMPUTE, why="no donor"))
    run = RunChoice(10, 110, source, Provenance.OTHER, 0.5, Repair(head), 0.01, 1.0)
    return replace(plan_of(spans), runs=(run,)), Pulled(blocks={block.key: block.data for block in blocks}), prompt


@pytest.mark.parametrize("lead", [0, 10])
@pytest.mark.parametrize("head", [100, 99, 16, 0])
def test_recomputing_all_gives_full_prefill_whatever_was_aligned(
    float_runner: ModelRunner, head: int, lead: int
) -> None:
    plan, pulled, prompt = moved_plan(float_runner, head)
    ids = prompt.token_ids.astype(np.int64)
    cache, full = float_runner.new_cache(len(ids)), float_runner.new_cache(len(ids))
    assert isinstance(cache, KVCache) and isinstance(full, KVCache)
    true = float_runner.prefill(ids, full)
    if lead:
        float_runner.prefill(ids[:lead], cache)
    Aligner(cache, donor_spans(plan), float_runner.spec.rotary).put(pulled.blocks)
    outcome = complete(float_runner, prompt, cache, plan, lead, pulled.blocks)
    assert cache.length == len(ids)
    exact = 10 + head
    assert torch.allclose(cache.keys[:, :, :, :exact], full.keys[:, :, :, :exact], atol=1e-4)
    assert torch.allclose(cache.values[:, :, :, :exact], full.values[:, :, :, :exact], atol=1e-4)
    assert torch.allclose(cache.keys[0], full.keys[0], atol=1e-4), "layer 0 depends on token and position alone"
    assert torch.allclose(outcome.repaired.logits, true, atol=1e-4) is (head == 100)
    assert (outcome.repaired.predicted_kl is None) is (head in (0, 100)), "nothing to compare, or nothing reused"
    assert outcome.fallback == "" and outcome.plan is plan


@pytest.mark.parametrize("lead", [0, 10])
@pytest.mark.parametrize("poison", [False, True])
def test_the_guards_fallback_is_full_prefill(float_runner: ModelRunner, poison: bool, lead: int) -> None:
    plan, pulled, prompt = moved_plan(float_runner, 16)
    ids = prompt.token_ids.astype(np.int64)
    if poison:
        for data in pulled.blocks.values():
            block_tensors(data, float_runner.spec.layout, len(data) // float_runner.spec.layout.token_bytes)[0][1:] = (
                float("nan")
            )
    cache, full = float_runner.new_cache(len(ids)), float_runner.new_cache(len(ids))
    if lead:
        float_runner.prefill(ids[:lead], cache)
    assert isinstance(cache, KVCache) and isinstance(full, KVCache)
    true = float_runner.prefill(ids, full)
    Aligner(cache, donor_spans(plan), float_runner.spec.rotary).put(pulled.blocks)
    outcome = complete(float_runner, prompt, cache, plan, lead, pulled.blocks, GOOD if poison else BAD)
    assert outcome.fallback
    assert {span.kind for span in outcome.plan.spans} == {SpanKind.RECOMPUTE} and not outcome.plan.runs
    assert torch.allclose(outcome.repaired.logits, true, atol=1e-4)
    assert torch.allclose(cache.keys, full.keys, atol=1e-4) and torch.allclose(cache.values, full.values, atol=1e-4)


def test_a_cancelled_completion_stops(float_runner: ModelRunner) -> None:
    _, _, prompt = moved_plan(float_runner, 0)
    cache = float_runner.new_cache(len(prompt.token_ids))
    assert isinstance(cache, KVCache)
    spans = [Span(0, 64, SpanKind.EXACT, donor([meta(1, 0, 132)]), 0), Span(64, 112, SpanKind.RECOMPUTE)]
    with pytest.raises(CancelledByCaller):
        complete(float_runner, prompt, cache, plan_of(spans), 0, {}, cancelled=lambda: True)
