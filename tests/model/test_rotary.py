"""How keys move is found by moving them; what the config says, or leaves out, does not matter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf

from kvcomm_p2p.kernels.rope_shift import rope_shift
from kvcomm_p2p.model.rotary import NO_ROTATION, NOT_EXPLAINED, WIDTHS_DIFFER, LayerKV, find_rotary
from kvcomm_p2p.model.runner import ModelRunner

INTERLEAVED = ("glm", "gptj")
UNMOVABLE = ("opt",)
POSITIONLESS = ("bloom",)


def test_geometry_of_every_architecture(runner: ModelRunner) -> None:
    name, rotary = runner.spec.name, runner.spec.rotary
    assert runner.spec.share_refusal == ""
    assert (rotary is None) is (name in UNMOVABLE), runner.spec.exact_only_reason
    assert bool(runner.spec.exact_only_reason) is (name in UNMOVABLE)
    if rotary is not None:
        assert rotary.interleaved is (name in INTERLEAVED)
        assert (rotary.inv_freq == ()) is (name in POSITIONLESS)


def test_layer0_keys_move_by_rotation(runner: ModelRunner) -> None:
    rotary = runner.spec.rotary
    if rotary is None:
        assert runner.spec.exact_only_reason
        return
    tokens = [5, 9, 200]
    keys, values = runner.layer0(tokens, [3, 4, 5])
    expected_keys, expected_values = runner.layer0(tokens, [203, 204, 205])
    moved_keys, moved_values = torch.empty_like(keys[None]), torch.empty_like(values[None])
    frequencies = torch.tensor(rotary.inv_freq, dtype=torch.float64)
    rope_shift(keys[None], values[None], None, 200, frequencies, rotary.interleaved, moved_keys, moved_values)
    torch.testing.assert_close(moved_keys[0], expected_keys, rtol=1e-4, atol=1e-4)
    assert torch.equal(moved_values[0], expected_values)
    assert torch.allclose(keys, expected_keys, atol=1e-2) is (runner.spec.name in POSITIONLESS)


@pytest.mark.parametrize("name", ["gpt_neox", "glm", "gptj"])
def test_partial_rotary_is_seen(build_tiny: Callable[..., Any], name: str) -> None:
    spec = ModelRunner.from_model(build_tiny(name), None, name).spec
    assert spec.rotary is not None
    assert 2 * len(spec.rotary.inv_freq) < spec.layout.key_dim


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(build_tiny: Callable[..., Any], dtype: torch.dtype) -> None:
    gemma, opt = (
        ModelRunner.from_model(build_tiny(name).to(dtype), None, name).spec.rotary for name in ("gemma3", "opt")
    )
    assert gemma is not None and gemma.layers is not None and len(set(gemma.layers)) == 2
    assert opt is None


def longrope(long: float) -> dict[str, Any]:
    return {
        "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "short_factor": [1.0 + i / 9 for i in range(8)],
        "long_factor": [long + i / 9 for i in range(8)], "original_max_position_embeddings": 128,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("parameters", "context"),
    [
        ({"rope_type": "default", "rope_theta": 5e5}, 512),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, 512),
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, 512),
        (longrope(2.0), 128),
        (longrope(1.0), 512),
    ],
    ids=["default", "linear", "yarn", "llama3", "dynamic", "longrope", "longrope-with-one-set"],
)  # fmt: skip
def test_scaled_frequencies(tiny_llama: Callable[..., Any], parameters: dict[str, Any], context: int) -> None:
    spec = ModelRunner.from_model(tiny_llama(rope_parameters=parameters), None, "scaled").spec
    assert spec.rotary is not None and spec.rotary.layers is None, spec.exact_only_reason
    assert spec.context_tokens_max == context


def test_frequencies_that_change_with_the_length_are_caught(tiny_llama: Callable[..., Any]) -> None:
    """Whatever the config calls them: the end of the context is tried."""
    model = tiny_llama(rope_parameters=longrope(2.0))
    hidden = ModelRunner.from_model(model, None, "longrope")._call
    ids = [3, 10, 17, 24]
    found, reason = find_rotary(model, hidden.probe, ids, 512)
    assert found is None and reason == NOT_EXPLAINED
    found, reason = find_rotary(model, hidden.probe, ids, 128)
    assert found is not None and reason == ""


def test_layers_without_positions_are_found() -> None:
    torch.manual_seed(0)
    config = tf.SmolLM3Config(
        vocab_size=250, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.15, no_rope_layer_interval=4, pad_token_id=0,
    )  # fmt: skip
    rotary = ModelRunner.from_model(tf.SmolLM3ForCausalLM(config).eval(), None, "smollm3").spec.rotary
    assert rotary is not None and rotary.layers is not None
    assert [any(layer) for layer in rotary.layers] == [True, True, True, False]
    assert rotary.layers[0] == rotary.inv_freq and len(rotary.layers[3]) == len(rotary.inv_freq)


def patched_last_layer(model: Any, change: Callable[[torch.Tensor, torch.Tensor], tuple[Any, Any]]) -> Any:
    """The model, with the cos and sin of its last layer changed behind its config's back."""
    last = model.model.layers[-1].self_attn
    plain = last.forward

    def forward(hidden_states: torch.Tensor, position_embeddings: Any = None, **options: Any) -> Any:
        return plain(hidden_states, position_embeddings=change(*position_embeddings), **options)

    last.forward = forward
    return model


def test_the_model_counts_not_its_config(tiny_llama: Callable[..., Any]) -> None:
    without = patched_last_layer(tiny_llama(), lambda cos, sin: (torch.ones_like(cos), torch.zeros_like(sin)))
    rotary = ModelRunner.from_model(without, None, "liar").spec.rotary
    assert rotary is not None and rotary.layers is not None
    assert [any(layer) for layer in rotary.layers] == [True, True, False]


@pytest.mark.parametrize(
    "change",
    [
        lambda cos, sin: (cos * cos - sin * sin, 2 * sin * cos),
        lambda cos, sin: (cos, cos),
        lambda cos, sin: (cos, -sin),
    ],
    ids=["twice as far", "no rotation", "backwards"],
)
def test_other_movements_are_refused(tiny_llama: Callable[..., Any], change: Any) -> None:
    spec = ModelRunner.from_model(patched_last_layer(tiny_llama(), change), None, "liar").spec
    assert spec.rotary is None and spec.exact_only_reason == NOT_EXPLAINED


def still(tokens: list[int], offset: int) -> LayerKV:
    """KV of a model that ignores the positions that it is given, and has others of its own."""
    position = torch.arange(len(tokens), dtype=torch.float32)[None, :, None]
    return [(position.expand(2, -1, 8) + 1, torch.ones(2, len(tokens), 8))] * 2


class _Nothing(torch.nn.Module):
    config = None


def test_ignored_positions_are_not_taken_for_none() -> None:
    found, reason = find_rotary(_Nothing(), still, [3, 4, 5], 512)
    assert found is None and reason == NO_ROTATION


def test_a_forward_that_refuses_positions_is_exact_only() -> None:
    def probe(tokens: list[int], offset: int) -> LayerKV:
        if offset > 100:
            raise IndexError("position table")
        return still(tokens, offset)

    found, reason = find_rotary(_Nothing(), probe, [3, 4, 5], 512)
    assert found is None and "IndexError" in reason


def test_layers_that_rotate_different_numbers_of_dims_are_refused() -> None:
    model = _Nothing()
    model.register_buffer("a_inv_freq", torch.tensor([1.0, 0.1]))
    model.register_buffer("b_inv_freq", torch.tensor([0.5, 0.2, 0.1, 0.05]))
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 1, 2, 3, 8, generator=generator)

    def probe(tokens: list[int], offset: int) -> LayerKV:
        layers = []
        for name in ("a_inv_freq", "b_inv_freq"):
            moved, kept = torch.empty_like(keys), torch.empty_like(values)
            rope_shift(keys, values, None, offset, getattr(model, name).double(), False, moved, kept)
            layers.append((moved[0], kept[0]))
        return layers

    found, reason = find_rotary(model, probe, [3, 4, 5], 512)
    assert found is None and reason == WIDTHS_DIFFER


@pytest.mark.parametrize(("config", "interleaved"), [(tf.DeepseekV2Config, True), (tf.DeepseekV3Config, False)])
def test_latent_attention_turns_what_is_cached_as_values(config: Any, interleaved: bool) -> None:
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(
        config(
            vocab_size=250, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2,
            first_k_dense_replace=2, kv_lora_rank=16, q_lora_rank=None, qk_rope_head_dim=8, qk_nope_head_dim=16,
            v_head_dim=16, max_position_embeddings=512, n_group=1, topk_group=1, pad_token_id=0,
        )
    ).eval()  # fmt: skip
    spec = ModelRunner.from_model(model, None, "deepseek").spec
    assert spec.rotary is not None and spec.rotary.in_values and spec.rotary.interleaved is interleaved
    assert (spec.layout.kv_heads, spec.layout.key_dim, spec.layout.value_dim) == (1, 16, 8)
