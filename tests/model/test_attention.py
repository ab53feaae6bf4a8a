"""Bands of scattered queries: they cover every row, and their attention equals one dense masked call."""

from __future__ import annotations

import gc
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from kvcomm_p2p.model import attention
from kvcomm_p2p.model.threads import ForwardThread, helper_pool


@given(st.sets(st.integers(0, 20_000), min_size=1, max_size=400))
@settings(max_examples=60, deadline=None)
def test_bands_cover_all_rows_in_order(positions: set[int]) -> None:
    bands = attention.band_rows(sorted(positions))
    assert bands[0][0] == 0 and bands[-1][1] == len(positions)
    assert all(end == start for (_, end), (start, _) in pairwise(bands))
    assert all(start < end for start, end in bands)


def test_far_spans_are_separate_and_near_ones_together() -> None:
    assert attention.band_rows([*range(100, 132), *range(4000, 4040)]) == [(0, 32), (32, 72)]
    assert attention.band_rows([1, 3, 5, 7]) == [(0, 4)]
    assert len(attention.band_rows(list(range(600)))) == 3


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("positions", [[299], [0], [3, 4, 5, 150, 151, 298, 299], list(range(0, 300, 2))])
def test_equals_one_dense_call(positions: list[int], window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_CALL_COST_PAIRS", 16)
    rows, keys_total = len(positions), 300
    generator = torch.Generator().manual_seed(rows)
    query = torch.randn(1, 6, rows, 8, generator=generator)
    key, value = (torch.randn(1, 2, keys_total, 8, generator=generator) for _ in range(2))
    where = torch.tensor(positions)

    def visible(batch: Any, head: Any, q: Any, k: Any) -> Any:
        seen = k <= q
        return seen if window is None else seen & (k > q - window)

    mask = attention._mask(
        batch_size=1, q_length=rows, kv_length=keys_total, q_offset=where - torch.arange(rows), kv_offset=0,
        mask_function=visible, allow_is_causal_skip=True, local_size=window, dtype=torch.float32,
    )  # fmt: skip
    module = SimpleNamespace(num_key_value_groups=3, is_causal=True, training=False)
    out, _ = attention._attention(module, query, key, value, mask, scaling=0.3)  # type: ignore[arg-type]
    dense = visible(0, 0, where[:, None], torch.arange(keys_total)[None])
    repeated = [tensor.repeat_interleave(3, dim=1) for tensor in (key, value)]
    expected = scaled_dot_product_attention(query, *repeated, attn_mask=dense, scale=0.3).transpose(1, 2)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_the_forward_thread_serves_in_order_and_passes_errors_on() -> None:
    thread, served = ForwardThread(), []
    gate = threading.Event()
    callers = ThreadPoolExecutor(9)
    waiting = [callers.submit(thread.run, gate.wait)]
    while thread._pool._work_queue.qsize() or not thread._pool._threads:
        pass
    for number in range(8):
        waiting.append(callers.submit(thread.run, partial(served.append, number)))
        while thread._pool._work_queue.qsize() <= number:
            pass
    gate.set()
    for future in waiting:
        future.result(5)
    assert served == list(range(8))
    inner = thread.run(lambda: thread.run(threading.current_thread))
    assert inner is thread.run(threading.current_thread) is not threading.current_thread(), "a call within a call"
    with pytest.raises(ZeroDivisionError):
        thread.run(lambda: 1 // 0)


def test_the_forward_thread_ends_with_its_owner() -> None:
    thread = ForwardThread()
    worker = thread.run(threading.current_thread)
    del thread
    gc.collect()
    worker.join(5)
    assert not worker.is_alive()


def test_an_interrupt_is_raised_when_the_forward_has_ended() -> None:
    thread, ended = ForwardThread(), threading.Event()

    def interrupted() -> None:
        signal.raise_signal(signal.SIGINT)

    def forward() -> None:
        threading.Timer(0.05, interrupted).start()
        time.sleep(0.3)
        ended.set()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            thread.run(forward)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.is_set()


def test_waiting_does_not_count_as_computing() -> None:
    thread, gate = ForwardThread(), threading.Event()
    other = ThreadPoolExecutor(1).submit(thread.run, partial(gate.wait, 5))
    threading.Timer(0.2, gate.set).start()
    thread.run(lambda: None)
    assert thread.spent_s() < 0.1 and thread.spent_s() == 0.0
    assert other.result(5)


def test_helpers_compute_alone_and_leave_others_as_they_were() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        pool = helper_pool(2, "test")
        assert [pool.submit(torch.get_num_threads).result() for _ in range(4)] == [1] * 4
        assert torch.get_num_threads() == 3, "the thread that made the pool"
        assert ThreadPoolExecutor(1).submit(torch.get_num_threads).result() == 3, "threads to come"
    finally:
        torch.set_num_threads(before)


def test_forwards_from_many_threads_do_not_mix(tiny_runner: Any) -> None:
    prompts = [[(number * 31 + index * 7) % 250 for index in range(20 + number)] for number in range(6)]
    expected = [tiny_runner.prefill(prompt, tiny_runner.new_cache(40)) for prompt in prompts]
    found: dict[int, torch.Tensor] = {}

    def work(number: int) -> None:
        for _ in range(5):
            cache = tiny_runner.new_cache(40)
            tiny_runner.prefill(prompts[number][:10], cache)
            found[number] = tiny_runner.prefill(prompts[number][10:], cache, 10)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for number, logits in enumerate(expected):
        torch.testing.assert_close(found[number], logits, rtol=0, atol=1e-4)
