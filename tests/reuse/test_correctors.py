"""The correctors against their definitions, written once more, slowly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from deviation_cases import (
    FREQUENCIES,
    GEOMETRIES,
    HEADS,
    KEY_DIM,
    KV,
    LAYERS,
    MODEL,
    PLAIN,
    VALUE_DIM,
    random_kv,
    turned,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcomm_p2p.model.spec import RotaryGeometry
from kvcomm_p2p.protocol.anchors import Visibility
from kvcomm_p2p.reuse.correctors import TEMPERATURE, ProbeShift, ShiftRun, kvcomm_average, nearest_tokens
from kvcomm_p2p.reuse.deviations import Deviation, distances, features, observe

KINDS = list(GEOMETRIES)


def seen(aligned: KV, missing: KV, start: int, rotary: RotaryGeometry | None) -> Deviation:
    """The deviation of a run that lacked `missing` (in the frame of position 0)."""
    there = turned(missing, torch.arange(start, start + aligned[0].shape[2]), rotary)
    true = aligned[0] + there[0], aligned[1] + there[1]
    return observe(aligned, true, start, rotary, model_id=MODEL, edge=b"", visibility=Visibility.PUBLIC)


def slab(kv: KV) -> KV:
    """The same KV as a strided view of something larger, full of NaN."""
    views = []
    for part in kv:
        whole = torch.full((LAYERS, HEADS, part.shape[2] + 5, part.shape[3]), float("nan"))
        view = whole[:, :, 2 : 2 + part.shape[2]]
        view.copy_(part)
        views.append(view)
    return views[0], views[1]


def part_of(kv: KV, rows: slice) -> KV:
    return kv[0][:, :, rows].clone(), kv[1][:, :, rows].clone()


def close(actual: KV, expected: KV, tolerance: float = 4e-3) -> None:
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_seen_before_is_put_right_wherever_it_stands(kind: str) -> None:
    rotary = GEOMETRIES[kind]
    aligned, missing = random_kv(0, 9), random_kv(1, 9)
    memory = [
        seen(part_of(aligned, slice(a, b)), part_of(missing, slice(a, b)), 30 * a, rotary) for a, b in ((0, 4), (4, 9))
    ]
    order = [8, 2, 2, 5, 0]
    keys, values = slab((aligned[0][:, :, order], aligned[1][:, :, order]))
    before = keys.clone(), values.clone()
    done = nearest_tokens(keys, values, 700, memory, rotary, neighbours=1)
    there = turned((missing[0][:, :, order], missing[1][:, :, order]), torch.arange(700, 705), rotary)
    close((keys[1:], values[1:]), (before[0][1:] + there[0][1:], before[1][1:] + there[1][1:]))
    assert torch.equal(keys[0], before[0][0]) and torch.equal(values[0], before[1][0]), "layer 0 has no context"
    assert done.corrected.tolist() == [True] * 5 and done.shares == (3.0, 2.0)
    assert float(done.distance.max()) < 2e-2


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 50), st.lists(st.integers(1, 7), min_size=1, max_size=4), st.integers(1, 20), st.integers(1, 12))
def test_nearest_tokens_is_the_softmax_mean_of_the_nearest(
    seed: int, lengths: list[int], neighbours: int, tokens: int
) -> None:
    stored = [(random_kv(seed + 10 * i, n), random_kv(seed + 10 * i + 1, n)) for i, n in enumerate(lengths)]
    memory = [seen(aligned, missing, 11, PLAIN) for aligned, missing in stored]
    run = random_kv(seed + 99, tokens)
    keys, values = slab(run)
    done = nearest_tokens(keys, values, 40, memory, PLAIN, distance_max=2.0, neighbours=neighbours)
    away = distances(features(*run, PLAIN), torch.cat([one.features.float() for one in memory]))
    missing = [torch.cat([one[1][part] for one in stored], dim=2) for part in (0, 1)]
    shift = [torch.zeros_like(part) for part in run]
    for token in range(tokens):
        nearest = away[token].argsort()[:neighbours]
        weights = torch.softmax(-away[token][nearest] / TEMPERATURE, dim=0)
        for part in (0, 1):
            shift[part][:, :, token] = sum(w * missing[part][:, :, i] for w, i in zip(weights, nearest, strict=True))
    there = turned((shift[0], shift[1]), torch.arange(40, 40 + tokens), PLAIN)
    close((keys[1:], values[1:]), (run[0][1:] + there[0][1:], run[1][1:] + there[1][1:]), 1e-2)
    assert sum(done.shares) == pytest.approx(tokens, abs=1e-4)


def test_a_stranger_is_left_alone_bit_for_bit_however_few_others_there_are() -> None:
    aligned = random_kv(0, 3)
    memory = [seen(aligned, random_kv(1, 3), 0, PLAIN)]
    run = tuple(torch.cat((part[:, :, 1:2], -part[:, :, 1:2], part[:, :, 2:3]), dim=2) for part in aligned)
    keys, values = slab((run[0], run[1]))
    before = keys.clone(), values.clone()
    done = nearest_tokens(keys, values, 0, memory, PLAIN, neighbours=1)
    assert done.corrected.tolist() == [True, False, True] and done.shares == (2.0,)
    assert torch.equal(keys[:, :, 1], before[0][:, :, 1]) and torch.equal(values[:, :, 1], before[1][:, :, 1])
    assert not torch.equal(keys[1:, :, 0], before[0][1:, :, 0])
    assert float(done.distance[1]) > 1.0
    done = nearest_tokens(keys, values, 0, memory, PLAIN, distance_max=-1.0)
    assert not done.corrected.any() and done.shares == (0.0,)


def test_long_runs_go_in_chunks() -> None:
    aligned, missing = random_kv(0, 300), random_kv(1, 300)
    memory = [seen(aligned, missing, 0, PLAIN)]
    for corrector, options in ((nearest_tokens, {"neighbours": 1}), (kvcomm_average, {})):
        keys, values = slab(aligned)
        corrector(keys, values, 64, memory, PLAIN, **options)  # type: ignore[operator]
        there = turned(missing, torch.arange(64, 364), PLAIN)
        close((keys[1:], values[1:]), (aligned[0][1:] + there[0][1:], aligned[1][1:] + there[1][1:]), 1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_kvcomm_averages_position_by_position(kind: str) -> None:
    rotary = GEOMETRIES[kind]
    stored = [(random_kv(10 * i, n), random_kv(10 * i + 1, n)) for i, n in enumerate((4, 6, 9, 3))]
    memory = [seen(aligned, missing, 5, rotary) for aligned, missing in stored]
    run = random_kv(77, 4)
    keys, values = slab(run)
    done = kvcomm_average(keys, values, 20, memory, rotary)
    query = features(*run, rotary)
    weights = torch.softmax(
        torch.stack([-(query - memory[i].features[:4].float()).abs().mean(dim=1) for i in (0, 1, 2)]), dim=0
    )
    shift = [sum(weights[i][None, None, :, None] * stored[i][1][part][:, :, :4] for i in range(3)) for part in (0, 1)]
    there = turned((shift[0], shift[1]), torch.arange(20, 24), rotary)  # type: ignore[arg-type]
    close((keys[1:], values[1:]), (run[0][1:] + there[0][1:], run[1][1:] + there[1][1:]))
    assert torch.equal(keys[0], run[0][0]) and torch.equal(values[0], run[1][0])
    assert done.shares[3] == 0.0 and sum(done.shares) == pytest.approx(4.0, abs=1e-5)


@pytest.mark.parametrize("corrector", [kvcomm_average, nearest_tokens])
def test_without_anything_to_go_by_nothing_changes(corrector: Any) -> None:
    memory = [seen(random_kv(0, 2), random_kv(1, 2), 0, PLAIN)] if corrector is kvcomm_average else []
    run = random_kv(5, 3)
    keys, values = slab(run)
    done = corrector(keys, values, 0, memory, PLAIN)
    assert torch.equal(keys, run[0]) and torch.equal(values, run[1])
    assert not done.corrected.any() and bool(done.distance.isinf().all()) and done.shares == (0.0,) * len(memory)


def forward(shift: ProbeShift, aligned: KV, true: KV, positions: Sequence[int]) -> KV:
    """What a forward does with a slab: per layer the hook, then the recomputed rows."""
    keys, values = slab(aligned)
    rows = torch.tensor(positions)
    for layer in range(LAYERS):
        new = true[0][layer][:, rows], true[1][layer][:, rows]
        shift.layer(layer, keys[layer], values[layer], rows, *new)
        keys[layer][:, rows], values[layer][:, rows] = new
    return keys, values


def shrunk_by_definition(residuals: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """alpha * mu and the residuals that are left, of residuals [n, D] in float64, probe by probe."""
    count = len(residuals)
    if count < 2:
        return torch.zeros(residuals.shape[1], dtype=torch.float64), residuals
    others = torch.stack([torch.cat((residuals[:i], residuals[i + 1 :])).mean(dim=0) for i in range(count)])
    alpha = float(((residuals * others).sum() / others.pow(2).sum()).clamp(0, 1))
    return alpha * residuals.mean(dim=0), residuals - alpha * others


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("common", [0.0, 0.5, 3.0])
def test_probes_shift_by_their_shrunk_mean(kind: str, common: float) -> None:
    rotary = GEOMETRIES[kind]
    runs = [ShiftRun(3, 20, 6, (7, 12, 18)), ShiftRun(20, 25, 22, (23,)), ShiftRun(28, 40, 28, (28, 30, 33, 36, 39))]
    aligned, noise, offset = random_kv(0, 44), random_kv(1, 44), random_kv(2, 1)
    missing = tuple(one + common * each for one, each in zip(noise, offset, strict=True))
    there = turned((missing[0], missing[1]), torch.arange(44), rotary)
    true = aligned[0] + there[0], aligned[1] + there[1]
    positions = [0, 3, 4, 5, 7, 12, 18, 20, 21, 23, 26, 28, 30, 33, 36, 39, 43]
    shift = ProbeShift(runs, rotary)
    assert shift.residuals() == [None] * 3
    result = forward(shift, aligned, true, positions)

    expected, left = [part.double() for part in aligned], np.zeros((3, LAYERS, 2))
    for number, run in enumerate(runs):
        for layer in range(1, LAYERS):
            for part in (0, 1):
                mean = torch.zeros(LAYERS, HEADS, 1, missing[part].shape[3], dtype=torch.float64)
                error = 0.0
                for head in range(HEADS):
                    probes = missing[part][layer, head][list(run.probes)].double()
                    mean[layer, head], rest = shrunk_by_definition(probes)
                    error += float(rest.pow(2).sum())
                size = float(true[part][layer][:, list(run.probes)].double().pow(2).sum())
                left[number, layer, part] = (error / size) ** 0.5
                zeros = [torch.zeros(LAYERS, HEADS, 44, dim) for dim in (KEY_DIM, VALUE_DIM)]
                zeros[part] = mean.float().expand(-1, -1, 44, -1).contiguous()
                moved = turned((zeros[0], zeros[1]), torch.arange(44), rotary)[part]
                rows = slice(run.head_end, run.end)
                expected[part][layer][:, rows] += moved[layer][:, rows]
    for part in (0, 1):
        expected[part][:, :, positions] = true[part][:, :, positions].double()
        torch.testing.assert_close(result[part].double(), expected[part], rtol=1e-4, atol=1e-4)
    assert shift.residuals() == pytest.approx(left[:, 1:].mean(axis=(1, 2)).tolist(), rel=1e-4)
    untouched = [
        row for row in range(44) if not any(run.head_end <= row < run.end for run in runs) and row not in positions
    ]
    assert untouched and torch.equal(result[0][:, :, untouched], aligned[0][:, :, untouched])
    assert torch.equal(result[0][0, :, 8], aligned[0][0, :, 8]), "layer 0 has no context"


def test_one_offset_of_all_rows_is_removed_wholly() -> None:
    aligned, offset = random_kv(0, 30), random_kv(1, 1)
    everywhere = offset[0].expand(-1, -1, 30, -1).contiguous(), offset[1].expand(-1, -1, 30, -1).contiguous()
    there = turned(everywhere, torch.arange(30), PLAIN)
    true = aligned[0] + there[0], aligned[1] + there[1]
    shift = ProbeShift([ShiftRun(0, 30, 4, (10, 20))], PLAIN)
    result = forward(shift, aligned, true, [0, 1, 2, 3, 10, 20])
    close((result[0][1:], result[1][1:]), (true[0][1:], true[1][1:]), 1e-4)
    [left] = shift.residuals()
    assert left is not None and left < 1e-3


def test_probes_that_disagree_move_nothing() -> None:
    aligned, missing = random_kv(0, 20), random_kv(1, 20)
    for part in missing:
        part[:, :, 15] = -part[:, :, 5]
    there = turned(missing, torch.arange(20), PLAIN)
    true = aligned[0] + there[0], aligned[1] + there[1]
    shift = ProbeShift([ShiftRun(0, 20, 0, (5, 15))], PLAIN)
    result = forward(shift, aligned, true, [5, 15])
    rest = [row for row in range(20) if row not in (5, 15)]
    close((result[0][:, :, rest], result[1][:, :, rest]), (aligned[0][:, :, rest], aligned[1][:, :, rest]), 1e-5)


def test_runs_without_probes_stay_as_they_are() -> None:
    aligned, true = random_kv(0, 12), random_kv(1, 12)
    shift = ProbeShift([ShiftRun(0, 6, 2, ()), ShiftRun(6, 12, 8, (9, 10))], PLAIN)
    result = forward(shift, aligned, true, [0, 1, 9, 10])
    assert torch.equal(result[0][:, :, 2:6], aligned[0][:, :, 2:6])
    nothing, left = shift.residuals()
    assert nothing is None and left is not None and left > 0
    empty = ProbeShift([], PLAIN)
    assert (
        torch.equal(forward(empty, aligned, true, [0])[0][:, :, 1:], aligned[0][:, :, 1:]) and empty.residuals() == []
    )


def test_poison_shows_in_the_residual() -> None:
    aligned, true = random_kv(0, 8), random_kv(1, 8)
    aligned[1][2, 1, 4, 0] = float("nan")
    shift = ProbeShift([ShiftRun(0, 8, 2, (4, 6))], PLAIN)
    forward(shift, aligned, true, [0, 1, 4, 6])
    [left] = shift.residuals()
    assert left != left


@pytest.mark.parametrize("probe", [1, 6])
def test_probes_lie_behind_the_head_of_their_run(probe: int) -> None:
    with pytest.raises(ValueError, match="must lie in"):
        ProbeShift([ShiftRun(0, 6, 2, (probe,))], PLAIN)


@pytest.mark.parametrize("positions", [[0, 4], [0, 3]])
def test_a_probe_that_is_not_recomputed_is_refused(positions: list[int]) -> None:
    aligned = random_kv(0, 6)
    with pytest.raises(ValueError, match="among the recomputed"):
        forward(ProbeShift([ShiftRun(0, 6, 0, (4, 5))], PLAIN), aligned, aligned, positions)


def test_half_precision_slabs_are_summed_in_float32() -> None:
    aligned, offset = random_kv(0, 30), random_kv(1, 1)
    shift = ProbeShift([ShiftRun(0, 30, 0, (10, 20))], PLAIN)
    keys, values = (part[1].bfloat16() for part in aligned)
    there = turned(tuple(part.expand(-1, -1, 30, -1).contiguous() for part in offset), torch.arange(30), PLAIN)  # type: ignore[arg-type]
    rows = torch.tensor([10, 20])
    new = [(part.float() + more[1])[:, rows].bfloat16() for part, more in zip((keys, values), there, strict=True)]
    expected = keys.float() + there[0][1]
    shift.layer(1, keys, values, rows, *new)
    torch.testing.assert_close(keys.float(), expected, rtol=2e-2, atol=5e-2)


def test_in_the_forward_of_a_model(tiny_runner: Any) -> None:
    ids = np.arange(40) * 7 % 250 + 3
    true = tiny_runner.new_cache(40)
    logits = tiny_runner.prefill(ids, true)
    kept = [0, 1, 2, 3, 9, 15, 21, 27, 33, 39]
    run = ShiftRun(0, 36, 4, (9, 15, 21, 27, 33))

    def filled(offset: float, repair: ProbeShift | None) -> torch.Tensor:
        cache = tiny_runner.new_cache(40)
        cache.keys.copy_(true.keys)
        cache.values.copy_(true.values)
        cache.values[1:] += offset
        return tiny_runner.recompute(ids, kept, cache, repair=repair)  # type: ignore[no-any-return]

    shift = ProbeShift([run], tiny_runner.spec.rotary)
    torch.testing.assert_close(filled(0.0, shift), logits, rtol=1e-4, atol=1e-4)
    assert max(left for left in shift.residuals() if left is not None) < 1e-4
    shift = ProbeShift([run], tiny_runner.spec.rotary)
    repaired, wrong = filled(0.5, shift), filled(0.5, None)
    assert float((repaired - logits).norm()) < 0.7 * float((wrong - logits).norm())


def test_the_geometry_of_the_tests_turns() -> None:
    moved = turned(random_kv(0, 3), torch.tensor([0, 1, 500]), PLAIN)[0]
    assert torch.equal(moved[:, :, 0], random_kv(0, 3)[0][:, :, 0]) and not torch.allclose(
        moved, random_kv(0, 3)[0], atol=0.1
    )
    assert 2 * len(FREQUENCIES) < KEY_DIM and 2 * len(FREQUENCIES) <= VALUE_DIM
