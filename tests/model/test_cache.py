"""The slab, and handing it over to transformers' own generate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf

from kvcomm_p2p.errors import InternalError, UsageError
from kvcomm_p2p.model.cache import KVCache, OpaqueCache
from kvcomm_p2p.model.call import cache_argument
from kvcomm_p2p.model.runner import ModelRunner
from kvcomm_p2p.protocol.anchors import KVLayout

LAYOUT = KVLayout(layers=2, kv_heads=3, key_dim=4, value_dim=5, dtype="float32")
IDS = torch.tensor([[(37 * i + 11) % 250 for i in range(40)]])


def states(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(1, 3, tokens, 4), torch.randn(1, 3, tokens, 5)


def test_growing_keeps_every_row() -> None:
    cache = KVCache(LAYOUT, 4)
    keys, values = states(3)
    for layer in range(2):
        cache.update(keys, values, layer)
    cache.keys[:, :, :, 3] = 7.0
    cache.reserve(50)
    assert cache.capacity >= 50 and cache.length == 3
    assert torch.equal(cache.keys[1, :, :, :3], keys) and torch.equal(cache.values[0, :, :, :3], values)
    assert bool((cache.keys[:, :, :, 3] == 7.0).all())


def test_length_grows_with_the_last_layer_only() -> None:
    cache = KVCache(LAYOUT, 8)
    cache.update(*states(5), 0)
    assert cache.length == 0
    seen, _ = cache.update(*states(5), 1)
    assert cache.length == 5 and seen.shape == (1, 3, 5, 4)
    cache.truncate(2)
    assert cache.get_seq_length() == 2
    cache.truncate(4)
    assert cache.length == 2


def test_scatter_writes_the_given_rows_and_returns_all() -> None:
    cache = KVCache(LAYOUT, 8)
    cache.keys.zero_()
    rows = torch.tensor([1, 4])
    keys, values = states(2)
    with cache.scattering(rows, 6):
        seen, _ = cache.update(keys, values, 0)
        assert cache.get_mask_sizes(2, 0) == (6, 0)
        assert (cache.get_query_offset() + torch.arange(2)).tolist() == [1, 4]
    assert torch.equal(seen[:, :, rows], keys)
    assert int((seen != 0).any(-1).sum()) == 2 * 3
    assert cache.length == 0
    with pytest.raises(InternalError, match="9 rows"), cache.scattering(rows, 9):
        pass


def test_batches_are_refused() -> None:
    cache = KVCache(LAYOUT, 8)
    with pytest.raises(InternalError, match="to_dynamic"):
        cache.update(torch.zeros(2, 3, 1, 4), torch.zeros(2, 3, 1, 5), 0)
    with pytest.raises(InternalError, match="to_dynamic"):
        cache.reorder_cache(torch.tensor([0]))


@pytest.mark.parametrize(
    "options",
    [{"do_sample": False}, {"do_sample": True, "top_k": 20}, {"do_sample": False, "num_beams": 3}],
    ids=["greedy", "sampling", "beams"],
)
def test_generate_goes_on_as_without_us(runner: ModelRunner, options: dict[str, Any]) -> None:
    settings = options | {"max_new_tokens": 12, "attention_mask": torch.ones_like(IDS), "pad_token_id": 0}
    torch.manual_seed(5)
    expected = runner.model.generate(IDS, **settings)
    cache = runner.new_cache(40)
    runner.prefill(IDS[0], cache)
    handed = cache.to_dynamic(runner.model.config)
    assert handed.get_seq_length() == 39
    handed.batch_repeat_interleave(options.get("num_beams", 1))
    torch.manual_seed(5)
    actual = runner.model.generate(IDS, **{cache_argument(runner.model): handed}, **settings)
    assert actual.tolist() == expected.tolist()
    assert cache.length == 40


def test_the_slab_itself_works_in_generate(tiny_runner: Any) -> None:
    expected = tiny_runner.model.generate(IDS, max_new_tokens=8, do_sample=False)
    cache = tiny_runner.new_cache(10)
    tiny_runner.prefill(IDS[0, :-1], cache)
    argument = {cache_argument(tiny_runner.model): cache}
    actual = tiny_runner.model.generate(IDS, **argument, max_new_tokens=8, do_sample=False)
    assert actual.tolist() == expected.tolist()


def test_handing_over_copies(tiny_runner: Any) -> None:
    cache = tiny_runner.new_cache(40)
    tiny_runner.prefill(IDS[0], cache)
    before = cache.keys.clone()
    handed = cache.to_dynamic(tiny_runner.model.config, rows=7)
    assert handed.get_seq_length() == 7
    handed.layers[0].keys.zero_()
    assert torch.equal(cache.keys, before)


def test_opaque_cache_truncates_and_hands_over_nothing(tiny_runner: Any) -> None:
    cache = OpaqueCache(tiny_runner.model.config)
    whole = tiny_runner.prefill(IDS[0], cache)
    assert cache.length == 40
    cache.truncate(30)
    again = tiny_runner.prefill(IDS[0, 30:], cache, 30)
    torch.testing.assert_close(again, whole, rtol=0, atol=1e-4)
    assert cache.to_dynamic(tiny_runner.model.config).get_seq_length() == 0


@pytest.mark.parametrize(
    "config",
    [
        tf.MistralConfig(num_hidden_layers=1, sliding_window=4),
        tf.Qwen3NextConfig(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]),
    ],
    ids=["window", "linear"],
)
def test_opaque_cache_refuses_to_take_back_what_is_gone(config: Any) -> None:
    cache = OpaqueCache(config)
    cache.length = 5
    with pytest.raises(UsageError, match="new cache"):
        cache.truncate(3)
