"""Deviations: what is stored, whom it may flow to, and what fits."""

from __future__ import annotations

import itertools

import pytest
import torch
from deviation_cases import GEOMETRIES, HEADS, KEY_DIM, LAYERS, MODEL, PLAIN, VALUE_DIM, random_kv, turned
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcomm_p2p.protocol.anchors import Visibility
from kvcomm_p2p.protocol.ids import ModelId
from kvcomm_p2p.reuse.deviations import Deviation, DeviationMemory, distances, features, may_correct, observe


def deviation(tokens: int = 3, seed: int = 0, **changes: object) -> Deviation:
    aligned, true = random_kv(2 * seed, tokens), random_kv(2 * seed + 1, tokens)
    arguments: dict[str, object] = {"model_id": MODEL, "edge": b"edge", "visibility": Visibility.PUBLIC, "group": b""}
    return observe(aligned, true, 5, PLAIN, **(arguments | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", list(GEOMETRIES))
@pytest.mark.parametrize("start", [0, 7, 900])
def test_it_is_what_must_be_added_in_the_frame_of_position_0(kind: str, start: int) -> None:
    rotary = GEOMETRIES[kind]
    aligned, missing = random_kv(1, 6), random_kv(2, 6)
    there = turned(missing, torch.arange(start, start + 6), rotary)
    true = aligned[0] + there[0], aligned[1] + there[1]
    seen = observe(aligned, true, start, rotary, model_id=MODEL, edge=b"e", visibility=Visibility.PUBLIC)
    assert seen.keys.shape == (LAYERS - 1, HEADS, 6, KEY_DIM) and seen.values.shape == (LAYERS - 1, HEADS, 6, VALUE_DIM)
    torch.testing.assert_close(seen.keys.float(), missing[0][1:], rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(seen.values.float(), missing[1][1:], rtol=2e-3, atol=2e-3)


def test_it_is_kept_in_half_precision_by_token_and_counted_to_the_byte() -> None:
    one = deviation(tokens=5)
    numbers = 5 * (LAYERS - 1) * HEADS * (KEY_DIM + VALUE_DIM) + one.features.numel()
    assert {part.dtype for part in (one.features, one.keys, one.values)} == {torch.float16}
    assert one.kv_bytes == 2 * numbers
    assert one.keys.permute(2, 0, 1, 3).is_contiguous() and one.values.permute(2, 0, 1, 3).is_contiguous()


def test_what_float16_cannot_hold_is_kept_in_bfloat16() -> None:
    aligned, true = random_kv(0, 3), random_kv(1, 3)
    true[0][2, 0, 1] = 1e6
    seen = observe(aligned, true, 0, PLAIN, model_id=MODEL, edge=b"", visibility=Visibility.PUBLIC)
    assert seen.keys.dtype is torch.bfloat16 and seen.values.dtype is torch.float16
    assert bool(seen.keys.isfinite().all())


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_nothing_is_learned_from_what_is_not_finite(poison: float) -> None:
    aligned, true = random_kv(0, 3), random_kv(1, 3)
    aligned[1][1, 0, 0, 0] = poison
    with pytest.raises(ValueError, match="not finite"):
        observe(aligned, true, 0, PLAIN, model_id=MODEL, edge=b"", visibility=Visibility.PUBLIC)


def test_different_runs_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="aligned keys"):
        observe(random_kv(0, 3), random_kv(1, 4), 0, PLAIN, model_id=MODEL, edge=b"", visibility=Visibility.PUBLIC)


def test_observing_copies() -> None:
    aligned, true = random_kv(0, 3), random_kv(1, 3)
    seen = observe(aligned, true, 0, None, model_id=MODEL, edge=b"", visibility=Visibility.PUBLIC)
    before = seen.keys.clone()
    true[0].zero_()
    assert torch.equal(seen.keys, before)


def test_distances_have_a_meaning_of_their_own() -> None:
    keys, values = random_kv(3, 4)
    seen = features(keys, values, PLAIN)
    assert seen.pow(2).mean(dim=1).sqrt().tolist() == pytest.approx([1.0] * 4, abs=1e-5)
    louder = features(keys, 17 * values, PLAIN)
    assert distances(seen, louder).diag().tolist() == pytest.approx([0.0] * 4, abs=1e-2)
    assert distances(seen, features(keys, -values, PLAIN)).diag().tolist() == pytest.approx([2.0] * 4, abs=1e-3)
    wide = features(
        torch.zeros(30, 1, 2, 4), torch.randn(30, 1, 2, 4000, generator=torch.Generator().manual_seed(0)), None
    )
    assert float(distances(wide[:1], wide[1:])) == pytest.approx(2**0.5, abs=0.05)


def test_features_are_of_the_part_that_does_not_turn() -> None:
    keys, values = random_kv(3, 4)
    moved = turned((keys, values), torch.arange(4) + 9, PLAIN)
    assert torch.equal(features(*moved, PLAIN), features(keys, values, PLAIN))
    latent = GEOMETRIES["in values"]
    moved = turned((keys, values), torch.arange(4) + 9, latent)
    assert torch.equal(features(*moved, latent), features(keys, values, latent))


ALLOWED = {
    # (deviation's visibility, its group) -> visibility and group of what it may correct
    (Visibility.PUBLIC, b""): {
        (Visibility.PUBLIC, b""), (Visibility.GROUP, b"a"), (Visibility.GROUP, b"b"), (Visibility.PRIVATE, b""),
        (Visibility.PRIVATE, b"a"), (Visibility.PRIVATE, b"b"),
    },
    (Visibility.GROUP, b"a"): {(Visibility.GROUP, b"a"), (Visibility.PRIVATE, b"a")},
    (Visibility.GROUP, b"b"): {(Visibility.GROUP, b"b"), (Visibility.PRIVATE, b"b")},
    (Visibility.PRIVATE, b""): {(Visibility.PRIVATE, b""), (Visibility.PRIVATE, b"a"), (Visibility.PRIVATE, b"b")},
}  # fmt: skip


def test_no_deviation_crosses_a_border() -> None:
    targets = sorted(ALLOWED[(Visibility.PUBLIC, b"")])
    memory = DeviationMemory(1 << 20)
    held = {}
    for seed, (visibility, group) in enumerate(ALLOWED):
        one = deviation(seed=seed, visibility=visibility, group=group)
        held[visibility, group] = one
        assert memory.add(one)
    for (source, one), target in itertools.product(held.items(), targets):
        allowed = target in ALLOWED[source]
        assert may_correct(one, *target) is allowed, (source, target)
        assert any(each is one for each in memory.candidates(MODEL, b"edge", *target)) is allowed


def test_candidates_are_of_the_same_model_and_kind_of_change() -> None:
    memory = DeviationMemory(1 << 20)
    wanted = [deviation(seed=seed) for seed in range(3)]
    others = [deviation(edge=b"other"), deviation(model_id=ModelId(b"x" * 16))]
    for one in (wanted[0], others[0], wanted[1], others[1], wanted[2]):
        memory.add(one)
    found = memory.candidates(MODEL, b"edge", Visibility.PUBLIC, b"")
    assert [id(each) for each in found] == [id(each) for each in wanted]
    assert memory.candidates(MODEL, b"nothing", Visibility.PRIVATE, b"") == []


def test_what_corrects_stays_and_what_once_did_goes() -> None:
    size = deviation().kv_bytes
    memory = DeviationMemory(3 * size)
    old, idle, fresh = (deviation(seed=seed) for seed in range(3))
    for one in (old, idle, fresh):
        assert memory.add(one)
    memory.credit([old, idle], [30.0, 0.0])

    def held() -> list[Deviation]:
        return memory.candidates(MODEL, b"edge", Visibility.PUBLIC, b"")

    assert memory.add(deviation(seed=3))
    assert any(each is old for each in held()) and not any(each is idle for each in held())
    for seed in range(4, 40):
        memory.add(deviation(seed=seed))
    assert not any(each is old for each in held()), "uses of long ago must not count for ever"
    memory.credit([old], [1e9])
    assert len(memory) == 3 and memory.kv_bytes == 3 * size


def test_what_does_not_fit_at_all_evicts_nothing() -> None:
    small = deviation(tokens=2)
    memory = DeviationMemory(small.kv_bytes)
    assert memory.add(small)
    assert not memory.add(deviation(tokens=3))
    assert not memory.add(deviation(tokens=0))
    assert len(memory) == 1 and memory.kv_bytes == small.kv_bytes


STEPS = st.lists(st.tuples(st.booleans(), st.integers(1, 9), st.floats(0, 50)), max_size=40)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 3000), STEPS)
def test_the_budget_is_kept_to_the_byte_and_the_order_is_repeatable(
    bytes_max: int, steps: list[tuple[bool, int, float]]
) -> None:
    remembered = []
    for _ in range(2):
        memory = DeviationMemory(bytes_max)
        for add, tokens, uses in steps:
            held = memory.candidates(MODEL, b"edge", Visibility.PUBLIC, b"")
            if add:
                one = deviation(tokens=tokens, seed=tokens)
                assert memory.add(one) == (one.kv_bytes <= bytes_max)
            elif held:
                memory.credit([held[tokens % len(held)]], [uses])
            held = memory.candidates(MODEL, b"edge", Visibility.PUBLIC, b"")
            assert memory.kv_bytes == sum(each.kv_bytes for each in held) <= bytes_max
            assert len(memory) == len(held)
        remembered.append([each.tokens for each in held] if steps else [])
    assert remembered[0] == remembered[1]
