"""Both twins against the definition in float64, with poisoned outputs and canaries around them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvcomm_p2p.kernels.rope_shift import rope_shift

TWINS = ["reference", "triton"]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def frequencies(rotated: int) -> torch.Tensor:
    return 1.0 / 10_000.0 ** (torch.arange(0, rotated, 2, dtype=torch.float64) / max(rotated, 1))


def source(tokens: int, key_dim: int = 8, value_dim: int = 6, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((2, 3, tokens, key_dim), (2, 3, tokens, value_dim))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def poisoned(like: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A slab of NaN and a strided view of its middle [L, H, tokens, D]."""
    slab = torch.full((like.shape[0], like.shape[1], tokens + 7, like.shape[3] + 2), float("nan"), dtype=like.dtype)
    return slab, slab[:, :, 3 : 3 + tokens, 1:-1]


def truth(
    keys: torch.Tensor, position_map: torch.Tensor, shift: torch.Tensor, inv_freq: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """Rotation by complex numbers in float64."""
    picked = keys[:, :, position_map].double()
    rotated = 2 * len(inv_freq)
    turned = picked.clone()
    phase = torch.polar(torch.ones(len(shift), len(inv_freq), dtype=torch.float64), shift.double()[:, None] * inv_freq)
    if interleaved:
        first, second = picked[..., 0:rotated:2], picked[..., 1:rotated:2]
    else:
        first, second = picked[..., : rotated // 2], picked[..., rotated // 2 : rotated]
    product = torch.complex(first, second) * phase
    if interleaved:
        turned[..., 0:rotated:2], turned[..., 1:rotated:2] = product.real, product.imag
    else:
        turned[..., : rotated // 2], turned[..., rotated // 2 : rotated] = product.real, product.imag
    return turned


def run(twin: str, keys: torch.Tensor, values: torch.Tensor, position_map: torch.Tensor | None, tokens: int,
        shift: torch.Tensor | int, inv_freq: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Runs into poisoned views, checks that nothing around them was touched, returns the views."""
    key_slab, out_keys = poisoned(keys, tokens)
    value_slab, out_values = poisoned(values, tokens)
    rope_shift(keys, values, position_map, shift, inv_freq, interleaved, out_keys, out_values, twin)
    for slab, view in ((key_slab, out_keys), (value_slab, out_values)):
        copy = view.clone()
        view.fill_(float("nan"))
        assert bool(slab.isnan().all()), "something outside the output was written"
        view.copy_(copy)
    return out_keys, out_values


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [0, 2, 6, 8])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_gather_and_rotate(twin: str, interleaved: bool, rotated: int, dtype: torch.dtype) -> None:
    keys, values = source(11, dtype=dtype)
    position_map = torch.tensor([4, 4, 10, 0, 7])
    shift = torch.tensor([3, -2, 0, 5000, 1])
    out_keys, out_values = run(twin, keys, values, position_map, 5, shift, frequencies(rotated), interleaved)
    expected = truth(keys, position_map, shift, frequencies(rotated), interleaved)
    torch.testing.assert_close(out_keys.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(out_values, values[:, :, position_map])


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("tokens", [0, 1, 31, 32, 33])
@pytest.mark.parametrize("shift", [-7, 0, 1000])
def test_stretch_with_one_shift(twin: str, tokens: int, shift: int) -> None:
    keys, values = source(40)
    out_keys, out_values = run(twin, keys, values, None, tokens, shift, frequencies(8), False)
    everywhere = torch.arange(tokens)
    expected = truth(keys, everywhere, torch.full((tokens,), shift), frequencies(8), False)
    torch.testing.assert_close(out_keys.double(), expected, rtol=2e-6, atol=2e-6)
    assert torch.equal(out_values, values[:, :, :tokens])


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("shift", [9, None])
def test_unmapped_tokens_are_left_untouched(twin: str, shift: int | None) -> None:
    keys, values = source(9)
    position_map = torch.tensor([-1, 2, 3, -1, 8, -1])
    distance = torch.full((6,), 9) if shift is None else shift
    out_keys, out_values = run(twin, keys, values, position_map, 6, distance, frequencies(8), True)
    kept = position_map >= 0
    assert bool(out_keys[:, :, ~kept].isnan().all()) and bool(out_values[:, :, ~kept].isnan().all())
    expected = truth(keys, position_map[kept], torch.full((3,), 9), frequencies(8), True)
    torch.testing.assert_close(out_keys[:, :, kept].double(), expected, rtol=2e-6, atol=2e-6)
    assert torch.equal(out_values[:, :, kept], values[:, :, position_map[kept]])


@pytest.mark.parametrize("twin", TWINS)
def test_nothing_mapped_writes_nothing(twin: str) -> None:
    keys, values = source(4)
    out_keys, out_values = run(twin, keys, values, torch.full((3,), -1), 3, 1, frequencies(8), False)
    assert bool(out_keys.isnan().all()) and bool(out_values.isnan().all())


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_shift_zero_is_a_bit_exact_copy(twin: str, dtype: torch.dtype) -> None:
    keys, values = source(7, dtype=dtype)
    position_map = torch.tensor([6, 1, 2])
    for shift in (0, torch.zeros(3, dtype=torch.int64)):
        out_keys, out_values = run(twin, keys, values, position_map, 3, shift, frequencies(8), False)
        assert torch.equal(out_keys, keys[:, :, position_map])
        assert torch.equal(out_values, values[:, :, position_map])


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("interleaved", [False, True])
def test_shifts_add_up(twin: str, interleaved: bool) -> None:
    keys, values = source(5)
    once, _ = run(twin, keys, values, None, 5, 123, frequencies(6), interleaved)
    first, _ = run(twin, keys, values, None, 5, 200, frequencies(6), interleaved)
    twice, _ = run(twin, first, values, None, 5, -77, frequencies(6), interleaved)
    torch.testing.assert_close(twice, once, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(once, keys, atol=1e-2)


@pytest.mark.parametrize("twin", TWINS)
def test_sources_may_be_strided(twin: str) -> None:
    keys, values = (
        tensor.transpose(0, 1).transpose(2, 3).contiguous().transpose(2, 3).transpose(0, 1) for tensor in source(6)
    )
    assert not keys.is_contiguous()
    out_keys, out_values = run(twin, keys, values, torch.tensor([5, 0]), 2, 4, frequencies(8), False)
    expected = truth(keys, torch.tensor([5, 0]), torch.tensor([4, 4]), frequencies(8), False)
    torch.testing.assert_close(out_keys.double(), expected, rtol=2e-6, atol=2e-6)
    assert torch.equal(out_values, values[:, :, [5, 0]])


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shift", [61, torch.tensor([3, 0, -900, 7, 1])], ids=["one", "each"])
def test_frequencies_per_layer(twin: str, interleaved: bool, dtype: torch.dtype, shift: torch.Tensor | int) -> None:
    keys, values = source(5, dtype=dtype)
    per_layer = torch.stack((frequencies(6), torch.zeros(3, dtype=torch.float64)))
    out_keys, out_values = run(twin, keys, values, None, 5, shift, per_layer, interleaved)
    distances = torch.full((5,), shift) if isinstance(shift, int) else shift
    for layer in range(2):
        one = slice(layer, layer + 1)
        expected = truth(keys[one], torch.arange(5), distances, per_layer[layer], interleaved)
        torch.testing.assert_close(out_keys[one].double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(out_keys[1], keys[1]), "zero frequencies do not even round"
    assert torch.equal(out_values, values)


def test_groups_of_layers_take_their_own_frequencies() -> None:
    keys, values = torch.randn(40, 2, 300, 64), torch.randn(40, 2, 300, 4)
    per_layer = torch.stack([frequencies(64) / (1 + layer) for layer in range(40)])
    out_keys, _ = run("reference", keys, values, None, 300, 17, per_layer, False)
    for layer in (0, 1, 20, 39):
        one = slice(layer, layer + 1)
        expected = truth(keys[one], torch.arange(300), torch.full((300,), 17), per_layer[layer], False)
        torch.testing.assert_close(out_keys[one].double(), expected, rtol=1e-5, atol=1e-5)


def test_many_layers_are_worked_on_in_groups() -> None:
    keys, values = torch.randn(40, 2, 300, 64), torch.randn(40, 2, 300, 4)
    out_keys, _ = run("reference", keys, values, None, 300, 17, frequencies(64), False)
    expected = truth(keys, torch.arange(300), torch.full((300,), 17), frequencies(64), False)
    torch.testing.assert_close(out_keys.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": torch.zeros(2, 3, 4)}, "keys must have 4 dims"),
        ({"values": torch.zeros(2, 3, 5, 6)}, "values dim S"),
        ({"values": torch.zeros(2, 3, 4, 6, dtype=torch.float64)}, "values is torch.float64"),
        ({"out_values": torch.zeros(2, 3, 3, 6)}, "out_values dim T"),
        ({"out_keys": torch.zeros(2, 3, 2, 7)}, "out_keys dim Dk"),
        ({"out_values": torch.zeros(2, 3, 2, 7)}, "out_values dim Dv"),
        ({"out_keys": torch.zeros(1, 3, 2, 8)}, "out_keys dims L, H"),
        ({"inv_freq": frequencies(10)}, "dim Dk is 8"),
        ({"inv_freq": torch.ones(3, 2, dtype=torch.float64)}, "inv_freq dim L is 3"),
        ({"inv_freq": torch.ones(2, 1, 2, dtype=torch.float64)}, r"float64 \[R/2\] or \[L, R/2\]"),
        ({"inv_freq": frequencies(8).float()}, "inv_freq must be float64"),
        ({"position_map": torch.tensor([0, 4])}, r"outside \[-1, S = 4\)"),
        ({"position_map": torch.tensor([0, -2])}, r"outside \[-1, S = 4\)"),
        ({"position_map": torch.tensor([0])}, r"int64 \[T = 2\]"),
        ({"shift": torch.tensor([0, 1, 2])}, r"shift must be an int or int64 \[T = 2\]"),
        ({"backend": "cuda"}, "backend must be"),
    ],
)
def test_wrong_arguments_name_what_is_wrong(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "keys": torch.zeros(2, 3, 4, 8), "values": torch.zeros(2, 3, 4, 6), "position_map": torch.tensor([0, 1]), "shift": 1,
        "inv_freq": frequencies(8), "interleaved": False, "out_keys": torch.zeros(2, 3, 2, 8),
        "out_values": torch.zeros(2, 3, 2, 6),
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        rope_shift(**(arguments | change))  # type: ignore[arg-type]


def test_a_stretch_longer_than_its_source_is_refused() -> None:
    keys, values = source(4)
    with pytest.raises(ValueError, match="out_keys dim T is 5"):
        rope_shift(keys, values, None, 0, frequencies(8), False, torch.zeros(2, 3, 5, 8), torch.zeros(2, 3, 5, 6))


_COMPILE = """
import itertools, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvcomm_p2p.kernels.rope_shift.triton_kernel import rope_shift_kernel as kernel
names = kernel.arg_names
for kind, mapped, per_token in (("fp32", True, True), ("bf16", False, False)):
    constants = dict(HALF=32, KEY_DIM=80, VALUE_DIM=64, BLOCK_T=32, BLOCK_HALF=32, BLOCK_REST=16, BLOCK_VALUE=64,
                     INTERLEAVED=mapped, MAPPED=mapped, PER_TOKEN=per_token)
    pointers = dict(keys=f"*{kind}", values=f"*{kind}", out_keys=f"*{kind}", out_values=f"*{kind}",
                    position_map="*i64" if mapped else f"*{kind}", cos="*fp32", sin="*fp32")
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


@pytest.mark.parametrize("twin", TWINS)
def test_a_map_of_consecutive_positions(twin: str) -> None:
    keys, values = source(12)
    position_map = torch.arange(4, 9)
    out_keys, out_values = run(twin, keys, values, position_map, 5, -3, frequencies(8), False)
    expected = truth(keys, position_map, torch.full((5,), -3), frequencies(8), False)
    torch.testing.assert_close(out_keys.double(), expected, rtol=2e-6, atol=2e-6)
    assert torch.equal(out_values, values[:, :, 4:9])
