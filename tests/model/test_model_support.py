"""The support table, proven on tiny random models of every kind: moving, recomputing, reusing in place, falling back."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from model_kinds import (
    CONTEXT,
    KINDS,
    PAGE,
    TABLE_BEGINS,
    TABLE_ENDS,
    WINDOW,
    Kind,
    build,
    page,
    runner,
    table,
)

from kvcomm_p2p.errors import UsageError
from kvcomm_p2p.model.cache import KVCache, OpaqueCache
from kvcomm_p2p.model.rotary import LayerKV
from kvcomm_p2p.model.runner import ModelRunner
from kvcomm_p2p.model.spec import Profile, RotaryGeometry
from kvcomm_p2p.planning.costs import CostTracker
from kvcomm_p2p.planning.divergence import DivergenceFit
from kvcomm_p2p.planning.plan import make_plan
from kvcomm_p2p.planning.types import Costs, Donor, Mode, Provenance, Repair, ReuseRules, Span, SpanKind
from kvcomm_p2p.protocol.anchors import BLOCK_TOKENS, AnchorMeta, BlockKey, KVLayout, Visibility
from kvcomm_p2p.protocol.ids import AnchorId, ChainHash, ModelId, NodeId, SequenceId
from kvcomm_p2p.reuse.align import align_span
from kvcomm_p2p.reuse.blocks import copy_block
from kvcomm_p2p.reuse.engine import ReuseEngine

FULL, EXACT_ONLY, REFUSED = (
    [kind for kind in KINDS if kind.support == support] for support in ("full", "exact only", "refused")
)
WINDOWED = [kind for kind in FULL if "window" in kind.traits]
SCALED = [kind for kind in FULL if "scale" in kind.traits]
POSITIONLESS = [kind for kind in FULL if kind.name.startswith("ALiBi")]

IDS = torch.tensor([(37 * i + 11) % 249 + 1 for i in range(70)])
BEFORE = torch.tensor([(53 * i + 5) % 249 + 1 for i in range(50)])
"""70 tokens to move, and 50 to move them behind: both several windows long."""


def each(kinds: list[Kind] | tuple[Kind, ...]) -> Any:
    return pytest.mark.parametrize("kind", kinds, ids=lambda kind: kind.name.replace(" ", "-"))


def slab(run: ModelRunner, rows: int) -> KVCache:
    cache = run.new_cache(rows)
    assert isinstance(cache, KVCache)
    # What nobody fills must not matter, and must show if it does.
    cache.keys.fill_(1e4)
    cache.values.fill_(1e4)
    return cache


def prefilled(run: ModelRunner, *parts: torch.Tensor) -> KVCache:
    ids = torch.cat(parts)
    cache = slab(run, len(ids))
    run.prefill(ids, cache)
    return cache


def donor_of(layout: KVLayout, ids: torch.Tensor) -> Donor:
    """A copy of the KV of a whole prompt, at some peer."""
    anchor = AnchorMeta(
        AnchorId(b"a" * 16), ModelId(b"m" * 16), SequenceId(b"s" * 8), 0, len(ids), ChainHash(b""), b"", 0,
        Visibility.PUBLIC, b"", layout.block_bytes(len(ids)),
    )  # fmt: skip
    return Donor(NodeId(b"h" * 16), False, anchor.sequence_id, 0, ids.numpy().astype(np.uint32), (anchor,))


def move(source: KVCache, start: int, target: KVCache, to: int, tokens: int, rotary: RotaryGeometry | None) -> None:
    """Puts KV of rows [start, start + tokens) into rows [to, ...) of another slab, block by block, as reuse does."""
    donor = donor_of(source.layout, torch.zeros(source.length, dtype=torch.int64))
    [anchor] = donor.anchors
    blocks = {
        BlockKey(anchor.anchor_id, i): copy_block(source, i * BLOCK_TOKENS, i * BLOCK_TOKENS + anchor.block_tokens(i))
        for i in range(anchor.blocks)
    }
    align_span(target, Span(to, to + tokens, SpanKind.REUSE, donor, start), blocks, rotary)


def rows(cache: KVCache, start: int, end: int) -> LayerKV:
    return [
        (keys[0, :, start:end], values[0, :, start:end]) for keys, values in zip(cache.keys, cache.values, strict=True)
    ]


def differences(found: LayerKV, expected: LayerKV) -> list[float]:
    """Per layer the largest difference of keys or values, relative to the largest value there."""
    return [
        max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(one, other, strict=True))
        for one, other in zip(found, expected, strict=True)
    ]


@each(KINDS)
def test_the_table_says_what_the_model_says(kind: Kind) -> None:
    spec = runner(kind.name).spec
    assert spec.share_refusal == (kind.reason if kind.support == "refused" else "")
    assert spec.exact_only_reason == kind.reason
    assert (spec.rotary is not None) is (kind.support == "full")
    if kind.support != "refused" or kind.context is not None:
        assert spec.context_tokens_max == (kind.context or CONTEXT)


def test_the_page_is_made_from_the_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert TABLE_BEGINS in text and TABLE_ENDS in text
    assert text == page(text), "the table is stale: python tests/model/model_kinds.py writes it"
    assert page(text.replace(table(), "stale")) == text


@each(KINDS)
def test_prefill_and_decoding_give_the_tokens_of_transformers(kind: Kind) -> None:
    run = runner(kind.name)
    run.model.generation_config.eos_token_id = None
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    expected = run.model.generate(IDS[None], attention_mask=torch.ones_like(IDS[None]), **options)
    for split in (0, 41) if "whole" not in kind.traits else (0,):
        cache = run.new_cache(len(IDS))
        assert isinstance(cache, OpaqueCache) is (kind.support == "refused")
        if split:
            run.prefill(IDS[:split], cache)
        logits = run.prefill(IDS[split:], cache, split, cancelled=lambda: False)
        answer: list[int] = []
        while len(answer) < 16:
            answer.append(int(logits.argmax()))
            logits = run.decode_step(answer[-1], cache)
        assert answer == expected[0, len(IDS) :].tolist(), f"prefill in two parts: {bool(split)}"


@each(REFUSED)
def test_a_long_prefill_of_a_running_state_is_one_forward(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcomm_p2p.model.runner.PREFILL_CHUNK_TOKENS", 16)
    run = runner(kind.name)
    logits = run.prefill(IDS, run.new_cache(70), cancelled=lambda: False)
    torch.testing.assert_close(logits, run._call.plain_logits(IDS), rtol=0, atol=1e-4)


@each(FULL)
@pytest.mark.parametrize("shift", [1, 50])
def test_moved_kv_is_that_of_a_prompt_that_begins_there(kind: Kind, shift: int) -> None:
    """In every layer, with nothing before: the same tokens at later positions. 50 is three windows away."""
    run = runner(kind.name)
    target = slab(run, len(IDS) + shift)
    move(prefilled(run, IDS), 0, target, shift, len(IDS), run.spec.rotary)
    expected = run._call.probe(IDS.tolist(), shift)
    assert max(differences(rows(target, shift, shift + len(IDS)), expected)) < 1e-4


@each(FULL)
@pytest.mark.parametrize(("start", "to"), [(0, 50), (50, 0), (50, 31)])
def test_moved_kv_of_layer_0_is_that_of_any_prompt(kind: Kind, start: int, to: int) -> None:
    """Layer 0 depends on token and position alone. The control: without rotation it differs."""
    run = runner(kind.name)
    source, true = prefilled(run, BEFORE[:start], IDS), prefilled(run, BEFORE[:to], IDS)
    expected = rows(true, to, to + len(IDS))[:1]
    for rotary in (run.spec.rotary, None):
        target = slab(run, to + len(IDS))
        move(source, start, target, to, len(IDS), rotary)
        [difference] = differences(rows(target, to, to + len(IDS))[:1], expected)
        if rotary is not None or kind in POSITIONLESS:
            assert difference < 1e-4
        else:
            assert difference > 1e-2


@each(FULL)
def test_recomputing_any_positions_gives_full_prefill(kind: Kind) -> None:
    run = runner(kind.name)
    ids = torch.cat((BEFORE, IDS))
    full = prefilled(run, ids)
    logits = run.prefill(ids, run.new_cache(len(ids)))
    rng = random.Random(kind.name)
    subsets = [[119], [*range(40, 60), *range(110, 120)], [*range(0, 119, 3), 119], list(range(120))]
    subsets += [sorted({*rng.sample(range(119), rng.randint(1, 100)), 119}) for _ in range(3)]
    for positions in subsets:
        cache = prefilled(run, ids)
        cache.keys[:, :, :, positions] = float("nan")
        cache.values[:, :, :, positions] = float("nan")
        again = run.recompute(ids, positions, cache)
        assert torch.allclose(again, logits, atol=2e-4), positions
        assert max(differences(rows(cache, 0, 120), rows(full, 0, 120))) < 1e-4, positions


@each(FULL)
def test_a_moved_run_is_repaired_by_recomputing_it(kind: Kind) -> None:
    """Behind other text deeper layers differ, which is what repair is for; repairing all of it gives full prefill."""
    run = runner(kind.name)
    ids = torch.cat((BEFORE, IDS))
    full = prefilled(run, ids)
    logits = run.prefill(ids, run.new_cache(len(ids)))
    source = prefilled(run, IDS)

    def repaired(head: int) -> tuple[torch.Tensor, list[float]]:
        cache = prefilled(run, BEFORE)
        cache.reserve(len(ids))
        move(source, 0, cache, 50, 70, run.spec.rotary)
        found = run.recompute(ids, [*range(50, 50 + head), *range(max(50 + head, 110), 120)], cache)
        return found, differences(rows(cache, 0, 120), rows(full, 0, 120))

    found, difference = repaired(head=70)
    assert torch.allclose(found, logits, atol=2e-4) and max(difference) < 1e-4
    found, difference = repaired(head=16)
    assert difference[0] < 1e-4 and max(difference[1:]) > 1e-3


@each([kind for kind in KINDS if kind.support != "refused"])
def test_reuse_in_place_is_exact_to_the_bit(kind: Kind) -> None:
    """Behind the same prefix, at the same positions, in calls of the same shapes."""
    run = runner(kind.name)
    source = prefilled(run, BEFORE, IDS)
    target = slab(run, 120)
    move(source, 0, target, 0, 64, None)
    target.length = 64
    source.truncate(64)
    ids = torch.cat((BEFORE, IDS))
    ours, theirs = run.prefill(ids[64:], target, 64), run.prefill(ids[64:], source, 64)
    assert torch.equal(ours, theirs)
    assert torch.equal(target.keys[:, :, :, :120], source.keys[:, :, :, :120])
    assert torch.equal(target.values[:, :, :, :120], source.values[:, :, :, :120])
    assert torch.allclose(ours, run.prefill(ids, run.new_cache(120)), atol=2e-4)
    assert int(ours.argmax()) == int(run.prefill(ids, run.new_cache(120)).argmax())


@each([kind for kind in KINDS if kind.support != "refused"])
def test_layer_0_of_sampled_tokens_is_that_of_prefill(kind: Kind) -> None:
    """What checks of pulled blocks rest on."""
    run = runner(kind.name)
    sample = torch.tensor([3, 17, 18, 64, 119])
    ids = torch.cat((BEFORE, IDS))
    cache = prefilled(run, ids)
    expected = [(cache.keys[0, 0, :, sample], cache.values[0, 0, :, sample])]
    assert max(differences([run.layer0(ids[sample], sample)], expected)) < 1e-4


@each(WINDOWED)
def test_nothing_outside_a_window_matters(kind: Kind) -> None:
    run = runner(kind.name)
    ids = torch.cat((BEFORE, IDS))
    cache = prefilled(run, ids)
    logits = run.recompute(ids, [119], cache)
    kinds = getattr(run.model.config, "layer_types", None) or ["sliding_attention"] * cache.layout.layers
    local = [layer for layer, one in enumerate(kinds) if one != "full_attention"]
    assert len(local) >= 2
    # Row 119 sees rows 104 to 119 through a window of 16, and 112 to 119 in its chunk of 16.
    first = 112 if "chunked_attention" in kinds else 120 - WINDOW
    cache.keys[local, :, :, :first] = 1e4
    cache.values[local, :, :, :first] = 1e4
    assert torch.equal(run.recompute(ids, [119], cache), logits)
    cache.values[local, :, :, first] += 1.0
    assert not torch.allclose(run.recompute(ids, [119], cache), logits, atol=1e-3)


@each(SCALED)
def test_the_scale_of_keys_is_not_applied_twice(kind: Kind) -> None:
    """YaRN and LongRoPE multiply cos and sin, so cached keys are longer; turning them must not make them longer still."""
    run = runner(kind.name)
    scales = [
        value
        for module in run.model.modules()
        for name, value in vars(module).items()
        if name.endswith("attention_scaling") and isinstance(value, float)
    ]
    assert max(scales) > 1.1
    source, target = prefilled(run, IDS), slab(run, 100)
    move(source, 0, target, 30, 70, run.spec.rotary)
    before, after = source.keys[:, 0, :, :70].norm(dim=-1), target.keys[:, 0, :, 30:100].norm(dim=-1)
    assert torch.allclose(after / before, torch.ones(()), atol=1e-4)


def test_longrope_ends_where_its_frequencies_change() -> None:
    """Beyond, transformers computes all tokens with other frequencies: a reused prefix would be wrong even in place."""
    [kind] = [kind for kind in KINDS if kind.name == "LongRoPE"]
    run, limit = runner(kind.name), runner(kind.name).spec.context_tokens_max
    assert limit == CONTEXT // 4
    near, far = run._call.probe([5, 9], limit - 2), run._call.probe([5, 9], limit - 1)
    target = slab(run, limit)
    source = slab(run, 2)
    for layer, (keys, values) in enumerate(near):
        source.keys[layer, 0, :, :2], source.values[layer, 0, :, :2] = keys, values
    source.length = 2
    move(source, 0, target, 1, 2, run.spec.rotary)
    assert max(differences(rows(target, 1, 3), far)) > 1e-2
    with pytest.raises(UsageError, match="exceed the context"):
        run.prefill([7] * (limit + 1), run.new_cache(limit))
    full = run.new_cache(limit)
    run.prefill([7] * limit, full)
    with pytest.raises(UsageError, match="exceed the context"):
        run.decode_step(7, full)


def test_dynamic_ntk_is_back_after_a_longer_forward_of_others() -> None:
    """The model may be used beyond its length behind our back; its frequencies change then, and ours must not."""
    [kind] = [kind for kind in KINDS if kind.name == "dynamic NTK"]
    run = ModelRunner.from_model(build(kind), None, kind.name)
    before = prefilled(run, IDS)
    with torch.no_grad():
        run.model(input_ids=torch.ones((1, CONTEXT + 200), dtype=torch.int64))
    after = prefilled(run, IDS)
    assert torch.equal(before.keys, after.keys) and torch.equal(before.values, after.values)


@each([kind for kind in FULL if kind.name in ("Cohere 2", "EXAONE 4", "SmolLM 3", "Llama 4 text", "Gemma 3")])
def test_layers_rotate_as_their_config_says(kind: Kind) -> None:
    run = runner(kind.name)
    rotary, config = run.spec.rotary, run.model.config
    assert rotary is not None and rotary.layers is not None
    if kind.name == "Gemma 3":
        base = [config.rope_parameters[one]["rope_theta"] for one in config.layer_types]
        assert base == [1e4, 1e4, 1e4, 1e6]
        for theta, layer in zip(base, rotary.layers, strict=True):
            assert layer == pytest.approx([theta ** (-i / 8) for i in range(8)], rel=1e-6)
        return
    turned = getattr(config, "no_rope_layers", None) or [one == "sliding_attention" for one in config.layer_types]
    assert [any(layer) for layer in rotary.layers] == [bool(one) for one in turned] == [True, True, True, False]


def plan_for(run: ModelRunner, rules: ReuseRules, prompt: torch.Tensor, donor_ids: torch.Tensor) -> list[SpanKind]:
    costs = Costs(1e-3, 1e-2, 1e-9, 1e-4, 1e10, 1e10, max(1, run.spec.layout.token_bytes))
    donor = donor_of(run.spec.layout, donor_ids)
    plan = make_plan(prompt.numpy().astype(np.uint32), [donor], Mode.BALANCED, rules, costs)
    return [span.kind for span in plan.spans]


@each([*EXACT_ONLY, FULL[0]])
def test_what_cannot_be_moved_is_never_approximated(kind: Kind) -> None:
    """Whatever profile somebody gives it. The control: with a kind that moves, the same plan reuses the run."""
    run = runner(kind.name)
    long = torch.cat((IDS, BEFORE, IDS + 1))
    approximate = ReuseRules(approximate=True, reason="")
    rules = approximate if kind.support == "full" else engine_rules(run)
    assert rules.approximate is (kind.support == "full")
    assert kind.reason in rules.reason
    found = plan_for(run, rules, torch.cat((BEFORE, long, IDS)), long)
    assert (SpanKind.REUSE in found) is (kind.support == "full")
    found = plan_for(run, rules, torch.cat((long, BEFORE)), long)
    assert found[0] is SpanKind.EXACT and SpanKind.REUSE not in found and SpanKind.CONTINUED not in found


ANYTHING_GOES = DivergenceFit(intercept=-20.0, body=0.0, head=0.0, entropy=0.0, spread=0.1, prompts=1)


def engine_rules(run: ModelRunner) -> ReuseRules:
    nothing: Any = None
    profile = Profile(1, {each: (Repair(1),) for each in Provenance}, ANYTHING_GOES, "anything goes")
    profiled = ModelRunner(run.model, None, replace(run.spec, profile=profile), run._call)
    costs = CostTracker(Costs(1e-3, 1e-4, 1e-9, 1e-3, 1e9, 1e9, 1))
    return ReuseEngine(profiled, nothing, nothing, costs, nothing, lambda node_id: "peer", b"key").rules(Mode.BALANCED)


@each(REFUSED)
def test_what_is_refused_says_so(kind: Kind) -> None:
    run = runner(kind.name)
    cache: Any = run.new_cache(len(IDS))
    run.prefill(IDS, cache)
    with pytest.raises(UsageError, match="cannot recompute single positions"):
        run.recompute(IDS, [69], cache)
    assert run.spec.rotary is None and run.spec.profile is None
