"""Memory of slabs is used again, comes back at once, and what an earlier prompt left in it never matters."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from kvcomm_p2p.errors import InternalError
from kvcomm_p2p.model import cache as cache_module
from kvcomm_p2p.model import slabs
from kvcomm_p2p.model.cache import KVCache
from kvcomm_p2p.model.slabs import REUSED_BYTES_MIN, SlabMemory
from kvcomm_p2p.protocol.anchors import KVLayout

FLOATS = REUSED_BYTES_MIN // 4
LAYOUT = KVLayout(2, 2, 8, 8, "float32")


def test_memory_comes_back_with_the_last_view_and_is_used_again() -> None:
    memory = SlabMemory()
    slab = memory.empty((2, FLOATS), torch.float32)
    address, view = slab.data_ptr(), slab[1, 5:7]
    view.fill_(3.0)
    del slab
    assert memory.kept_bytes == 0 and view.tolist() == [3.0, 3.0]
    del view
    assert memory.kept_bytes >= 2 * REUSED_BYTES_MIN
    again = memory.empty((2, FLOATS - 100), torch.float32)  # nearly the same size
    assert again.data_ptr() == address and memory.kept_bytes == 0


def test_prompts_that_grow_a_little_stay_in_the_same_memory() -> None:
    memory = SlabMemory()
    first = memory.empty((FLOATS + 1,), torch.float32)
    address = first.data_ptr()
    del first
    for floats in range(FLOATS + 1, 2 * FLOATS + 1, FLOATS // 7):
        slab = memory.empty((floats,), torch.float32)
        assert slab.data_ptr() == address and memory.kept_bytes == 0
        del slab


def test_slabs_in_use_never_share_memory() -> None:
    memory = SlabMemory()
    tensors = [memory.empty((FLOATS,), torch.float32) for _ in range(4)]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    del tensors[1]
    tensors.append(memory.empty((FLOATS,), torch.float32).fill_(9))
    assert [float(tensor.min()) for tensor in tensors] == [float(tensor.max()) for tensor in tensors] == [0, 2, 3, 9]


def test_what_is_kept_is_bounded_and_the_oldest_goes_first() -> None:
    memory = SlabMemory(kept_bytes_max=3 * REUSED_BYTES_MIN)
    tensors = [memory.empty((FLOATS,), torch.float32) for _ in range(5)]
    newest = tensors[-1].data_ptr()
    while tensors:
        del tensors[0]
    assert memory.kept_bytes <= 3 * REUSED_BYTES_MIN
    kept = [memory.empty((FLOATS,), torch.float32) for _ in range(3)]
    assert newest in {tensor.data_ptr() for tensor in kept}


@pytest.mark.parametrize(("floats", "kept"), [(FLOATS - 1, 0), (FLOATS, 1)])
def test_small_slabs_come_from_the_c_library(floats: int, kept: int) -> None:
    memory = SlabMemory()
    slab = memory.empty((floats,), torch.float32)
    assert slab.shape == (floats,)
    del slab
    assert bool(memory.kept_bytes) == bool(kept)


def test_a_small_slab_does_not_take_the_memory_of_a_huge_one() -> None:
    memory = SlabMemory()
    huge = memory.empty((20 * FLOATS,), torch.float32)
    del huge
    kept = memory.kept_bytes
    small = memory.empty((FLOATS,), torch.float32)
    assert memory.kept_bytes == kept and small.numel() == FLOATS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types_and_shapes(dtype: torch.dtype) -> None:
    tensor = SlabMemory().empty((3, 1, 2, FLOATS, 4), dtype)
    assert (tensor.dtype, tuple(tensor.shape), tensor.is_contiguous()) == (dtype, (3, 1, 2, FLOATS, 4), True)


def test_threads_and_garbage_that_gives_memory_back_in_the_middle() -> None:
    """A finalizer may run inside the memory's own lock, when the collector happens to be triggered there."""
    memory = SlabMemory()
    problems: list[BaseException] = []

    class Cycle:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor, self.me = tensor, self

    def work(number: int) -> None:
        try:
            for turn in range(50):
                tensor = memory.empty((FLOATS + turn,), torch.float32)
                tensor[:10] = number
                Cycle(memory.empty((FLOATS,), torch.float32))
                gc.collect(0)
                assert float(tensor[:10].sum()) == 10 * number
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not problems and not any(thread.is_alive() for thread in threads)


# --------------------------------------------------------------------------------------------------------------- caches


def test_a_cache_goes_at_once_without_the_collector() -> None:
    gc.disable()
    try:
        cache = KVCache(LAYOUT, 8)
        gone = weakref.ref(cache)
        layer = cache.layers[0]
        assert layer.get_seq_length() == 0
        del cache
        assert gone() is None
    finally:
        gc.enable()
    with pytest.raises(InternalError, match="after its cache"):
        layer.get_seq_length()


def test_a_deep_copy_is_a_cache_of_its_own() -> None:
    cache = KVCache(LAYOUT, 8)
    for layer in range(2):
        cache.layers[layer].update(torch.full((1, 2, 3, 8), 1.0 + layer), torch.full((1, 2, 3, 8), -1.0))
    copied = copy.deepcopy(cache)
    copied.layers[0].update(torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8))
    copied.layers[1].update(torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8))
    assert (cache.length, copied.length) == (3, 4)
    assert torch.equal(copied.keys[:, :, :, :3], cache.keys[:, :, :, :3])
    cache.keys.zero_()
    assert float(copied.keys[1, 0, 0, 0, 0]) == 2.0


@pytest.mark.parametrize("left", [float("nan"), float("inf"), 1e30])
def test_what_an_earlier_prompt_left_does_not_matter(
    left: float, tiny_runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = np.arange(5, 75)
    clean = tiny_runner.new_cache(70)
    expected = tiny_runner.prefill(ids, clean)

    class Left(SlabMemory):
        def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return super().empty(shape, dtype).fill_(left)

    monkeypatch.setattr(slabs, "REUSED_BYTES_MIN", 0)
    monkeypatch.setattr(cache_module, "slab_memory", Left())
    cache = tiny_runner.new_cache(100)
    assert torch.equal(tiny_runner.prefill(ids, cache), expected)
    aligned = tiny_runner.new_cache(100)
    rows = torch.tensor([0, 1, 2, 40, 69])
    rest = [row for row in range(70) if row not in rows.tolist()]
    aligned.keys[:, :, :, rest] = clean.keys[:, :, :, rest]
    aligned.values[:, :, :, rest] = clean.values[:, :, :, rest]
    torch.testing.assert_close(tiny_runner.recompute(ids, rows, aligned), expected, rtol=0, atol=1e-4)
    grown = tiny_runner.new_cache(8)
    for begin, end in ((0, 8), (8, 70)):
        logits = tiny_runner.prefill(ids[begin:end], grown, begin) if begin else tiny_runner.prefill(ids[:end], grown)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
