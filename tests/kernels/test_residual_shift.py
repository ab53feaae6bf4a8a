"""Both twins against the definition in float64, in slabs whose surroundings are poisoned."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcomm_p2p.kernels.residual_shift import residual_shift, row_angles

TWINS = ["reference", "triton"]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def frequencies(rotated: int) -> torch.Tensor:
    return 1.0 / 10_000.0 ** (torch.arange(0, rotated, 2, dtype=torch.float64) / max(rotated, 1))


def numbers(seed: int, rows: int, dim: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn((2, 3, rows, dim), generator=torch.Generator().manual_seed(seed)).to(dtype)


def poisoned(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A slab of NaN and a strided view of its middle that holds what `like` holds."""
    layers, heads, rows, dim = like.shape
    slab = torch.full((layers, heads, rows + 7, dim + 2), float("nan"), dtype=like.dtype)
    view = slab[:, :, 3 : 3 + rows, 1:-1]
    view.copy_(like)
    return slab, view


def turned(shift: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """The correction of every row, in float64, by complex numbers."""
    wide = shift.double().expand(-1, -1, len(positions), -1).clone()
    rotated = 2 * inv_freq.shape[-1]
    angle = positions[:, None] * (inv_freq if inv_freq.ndim == 1 else inv_freq[:, None, None])
    phase = torch.polar(torch.ones_like(angle), angle)
    if interleaved:
        first, second = wide[..., 0:rotated:2].clone(), wide[..., 1:rotated:2].clone()
    else:
        first, second = wide[..., : rotated // 2].clone(), wide[..., rotated // 2 : rotated].clone()
    product = torch.complex(first, second) * phase
    if interleaved:
        wide[..., 0:rotated:2], wide[..., 1:rotated:2] = product.real, product.imag
    else:
        wide[..., : rotated // 2], wide[..., rotated // 2 : rotated] = product.real, product.imag
    return wide


def run(twin: str, keys: torch.Tensor, values: torch.Tensor, shift_keys: torch.Tensor, shift_values: torch.Tensor,
        positions: torch.Tensor, inv_freq: torch.Tensor, interleaved: bool,
        skip: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Runs on copies in poisoned slabs, checks that nothing around them was touched and that no poison was read."""
    (key_slab, key_view), (value_slab, value_view) = poisoned(keys), poisoned(values)
    shifts = poisoned(shift_keys)[1], poisoned(shift_values)[1]
    cos, sin = row_angles(positions, inv_freq, interleaved)
    residual_shift(key_view, value_view, *shifts, cos, sin, interleaved, skip, twin)
    results = key_view.clone(), value_view.clone()
    assert all(bool(result.isfinite().all()) for result in results)
    for slab, view in ((key_slab, key_view), (value_slab, value_view)):
        view.fill_(float("nan"))
        assert bool(slab.isnan().all()), "something outside the rows was written"
    return results


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [0, 2, 6, 8])
@pytest.mark.parametrize("one", [True, False])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_turned_to_each_row_and_added(
    twin: str, interleaved: bool, rotated: int, one: bool, dtype: torch.dtype
) -> None:
    keys, values = numbers(0, 5, 8, dtype), numbers(1, 5, 6, dtype)
    shift_keys, shift_values = numbers(2, 1 if one else 5, 8), numbers(3, 1 if one else 5, 6)
    positions = torch.tensor([3, -2, 0, 5000, 1])
    inv_freq = frequencies(rotated)
    new_keys, new_values = run(twin, keys, values, shift_keys, shift_values, positions, inv_freq, interleaved)
    expected = keys.double() + turned(shift_keys, positions, inv_freq, interleaved)
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(new_keys.double(), expected, **tolerance)
    torch.testing.assert_close(new_values.double(), values.double() + shift_values.double(), **tolerance)


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("stored", list(TOLERANCE))
def test_a_row_is_rounded_once_whatever_the_dtypes(twin: str, dtype: torch.dtype, stored: torch.dtype) -> None:
    keys, values = numbers(0, 33, 8, dtype), numbers(1, 33, 6, dtype)
    shift_keys, shift_values = numbers(2, 33, 8, stored), numbers(3, 33, 6, stored)
    positions = torch.arange(33)
    new_keys, new_values = run(twin, keys, values, shift_keys, shift_values, positions, frequencies(8), False)
    exact = (
        keys.double() + turned(shift_keys, positions, frequencies(8), False),
        values.double() + shift_values.double(),
    )
    # Triton's interpreter truncates where GPUs round to the nearest bfloat16.
    ulps = 1.0 if twin == "triton" and dtype == torch.bfloat16 else 0.5
    for result, expected in zip((new_keys, new_values), exact, strict=True):
        error = (result.double() - expected).abs()
        assert bool((error <= ulps * torch.finfo(dtype).eps * expected.abs() + 2e-6).all())


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("rows", [0, 1, 31, 32, 33, 70])
@pytest.mark.parametrize("one", [True, False])
def test_any_number_of_rows_with_some_skipped(twin: str, rows: int, one: bool) -> None:
    keys, values = numbers(0, rows, 8), numbers(1, rows, 6)
    shift_keys, shift_values = numbers(2, 1 if one else rows, 8), numbers(3, 1 if one else rows, 6)
    positions, skip = torch.arange(rows) * 7, torch.arange(rows) % 3 == 1
    new_keys, new_values = run(twin, keys, values, shift_keys, shift_values, positions, frequencies(6), True, skip=skip)
    expected = keys.double() + turned(shift_keys, positions, frequencies(6), True)
    torch.testing.assert_close(new_keys[:, :, ~skip].double(), expected[:, :, ~skip], rtol=2e-6, atol=2e-6)
    assert torch.equal(new_values[:, :, ~skip], (values + shift_values)[:, :, ~skip])
    assert torch.equal(new_keys[:, :, skip], keys[:, :, skip]) and torch.equal(
        new_values[:, :, skip], values[:, :, skip]
    )


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("one", [True, False])
@pytest.mark.parametrize("skipping", [True, False])
def test_layers_may_rotate_differently(twin: str, interleaved: bool, one: bool, skipping: bool) -> None:
    keys, values = numbers(0, 6, 8), numbers(1, 6, 6)
    shift_keys, shift_values = numbers(2, 1 if one else 6, 8), numbers(3, 1 if one else 6, 6)
    positions, inv_freq = torch.arange(6) + 40, torch.stack((frequencies(6), torch.zeros(3, dtype=torch.float64)))
    skip = torch.tensor([True, False, False, True, False, False]) if skipping else None
    new_keys, _ = run(twin, keys, values, shift_keys, shift_values, positions, inv_freq, interleaved, skip)
    expected = keys.double() + turned(shift_keys, positions, inv_freq, interleaved)
    if skip is not None:
        expected[:, :, skip] = keys[:, :, skip].double()
    torch.testing.assert_close(new_keys.double(), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("twin", TWINS)
def test_skipping_everything_changes_nothing(twin: str) -> None:
    keys, values = numbers(0, 4, 8), numbers(1, 4, 6)
    shifts = numbers(2, 1, 8), numbers(3, 1, 6)
    done = run(twin, keys, values, *shifts, torch.arange(4), frequencies(8), False, torch.ones(4, dtype=torch.bool))
    assert torch.equal(done[0], keys) and torch.equal(done[1], values)


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_a_shift_of_zero_keeps_the_bits(twin: str, dtype: torch.dtype) -> None:
    keys, values = numbers(0, 9, 8, dtype), numbers(1, 9, 6, dtype)
    zeros = torch.zeros(2, 3, 1, 8), torch.zeros(2, 3, 1, 6)
    done = run(twin, keys, values, *zeros, torch.arange(9) + 100, frequencies(8), False)
    assert torch.equal(done[0], keys) and torch.equal(done[1], values)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 3000), st.booleans(), st.sampled_from([2, 4, 8]), st.integers(1, 6))
def test_turning_back_undoes_turning(start: int, interleaved: bool, rotated: int, rows: int) -> None:
    """A residual that is un-rotated to the common frame and shifted in again is the residual."""
    positions = torch.arange(start, start + rows)
    residual, nothing = numbers(start, rows, 8), torch.zeros(2, 3, rows, 6)
    common, back = torch.zeros(2, 3, rows, 8), torch.zeros(2, 3, rows, 8)
    inv_freq = frequencies(rotated)
    cos, sin = row_angles(positions, inv_freq, interleaved)
    residual_shift(common, nothing, residual, nothing.clone(), cos, -sin, interleaved)
    residual_shift(back, nothing, common, nothing.clone(), cos, sin, interleaved)
    torch.testing.assert_close(back, residual, rtol=1e-5, atol=1e-5)
    assert torch.equal(row_angles(-positions, inv_freq, interleaved)[1], -sin)


def test_angles_are_made_in_float64() -> None:
    positions = torch.tensor([1_000_003])
    cos, sin = row_angles(positions, frequencies(8), False)
    exact = positions.double()[:, None] * frequencies(8)
    torch.testing.assert_close(cos.double(), exact.cos().repeat(1, 2), rtol=0, atol=1e-7)
    torch.testing.assert_close(sin.double(), torch.cat((-exact.sin(), exact.sin()), 1), rtol=0, atol=1e-7)
    assert not torch.allclose((exact.half().double()).cos(), exact.cos(), atol=1e-2)


def test_many_layers_are_worked_on_in_groups() -> None:
    keys, values = torch.randn(40, 2, 300, 64), torch.randn(40, 2, 300, 4)
    shift_keys, shift_values = torch.randn(40, 2, 300, 64), torch.randn(40, 2, 300, 4)
    positions = torch.arange(300)
    new_keys, _ = run("reference", keys, values, shift_keys, shift_values, positions, frequencies(64), False)
    expected = keys.double() + turned(shift_keys, positions, frequencies(64), False)
    torch.testing.assert_close(new_keys.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": torch.zeros(2, 3, 4)}, "keys must have 4 dims"),
        ({"keys": torch.zeros(2, 3, 4, 8, dtype=torch.float64)}, "keys is torch.float64"),
        ({"values": torch.zeros(2, 3, 5, 6)}, "values dim T is 5"),
        ({"values": torch.zeros(2, 3, 4, 6, dtype=torch.float16)}, "values is torch.float16, keys torch.float32"),
        ({"shift_keys": torch.zeros(2, 3, 2, 8)}, "shift_keys dim M is 2"),
        ({"shift_keys": torch.zeros(2, 3, 4, 8)}, "shift_values dim M is 1, that of shift_keys 4"),
        ({"shift_keys": torch.zeros(2, 3, 1, 7)}, "shift_keys dim D is 7"),
        ({"shift_values": torch.zeros(1, 3, 1, 6)}, "shift_values dims L, H"),
        ({"cos": torch.zeros(3, 8)}, r"cos must be float32 \[T = 4"),
        ({"sin": torch.zeros(4, 3)}, r"sin must be float32 \[T = 4"),
        ({"cos": torch.zeros(3, 4, 8), "sin": torch.zeros(3, 4, 8)}, r"cos must be float32 \[T = 4"),
        ({"cos": torch.zeros(4, 10), "sin": torch.zeros(4, 10)}, "cos rotates R = 10 dims"),
        ({"cos": torch.zeros(4, 5), "sin": torch.zeros(4, 5)}, "must be even"),
        ({"cos": torch.zeros(8, 4).T, "sin": torch.zeros(4, 8)}, "cos must be contiguous"),
        ({"skip": torch.zeros(4)}, r"skip must be bool \[T = 4\]"),
        ({"skip": torch.zeros(3, dtype=torch.bool)}, r"skip must be bool \[T = 4\]"),
        ({"backend": "cuda"}, "backend must be"),
    ],
)
def test_wrong_arguments_name_what_is_wrong(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "keys": torch.zeros(2, 3, 4, 8), "values": torch.zeros(2, 3, 4, 6), "shift_keys": torch.zeros(2, 3, 1, 8),
        "shift_values": torch.zeros(2, 3, 1, 6), "cos": torch.zeros(4, 8), "sin": torch.zeros(4, 8), "interleaved": False,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        residual_shift(**(arguments | change))  # type: ignore[arg-type]


def test_angles_of_wrong_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="positions must be int64"):
        row_angles(torch.zeros(3), frequencies(8), False)
    with pytest.raises(ValueError, match="inv_freq must be float64"):
        row_angles(torch.arange(3), frequencies(8).float(), False)


_COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvcomm_p2p.kernels.residual_shift.triton_kernel import residual_shift_kernel as kernel
names = kernel.arg_names
for kind, stored, both in (("fp32", "fp16", True), ("bf16", "fp32", False)):
    constants = dict(HALF=32, KEY_DIM=80, VALUE_DIM=64, BLOCK_T=32, BLOCK_HALF=32, BLOCK_REST=16, BLOCK_VALUE=64,
                     INTERLEAVED=both, PER_ROW=both, SKIPPING=both)
    pointers = dict(keys=f"*{kind}", values=f"*{kind}", shift_keys=f"*{stored}", shift_values=f"*{stored}",
                    skip="*i1" if both else "*fp32", cos="*fp32", sin="*fp32")
    signature = {n: "constexpr" if n in constants else pointers.get(n, "i64" if "_" in n else "i32") for n in names}
    source = ASTSource(kernel, signature, {(names.index(n),): v for n, v in constants.items()})
    compiled = triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32))
    print(kind, len(compiled.asm["cubin"]))
"""


@pytest.mark.parametrize("capability", ["80", "90"])
def test_compiles_ahead_of_time_without_a_gpu(capability: str, tmp_path: Path) -> None:
    environment = {"TRITON_CACHE_DIR": str(tmp_path), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE, capability],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    sizes = [int(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(sizes) == 2 and min(sizes) > 1000
