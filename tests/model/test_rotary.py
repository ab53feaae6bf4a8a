"""Which models' keys can be moved, found out and proven; the others are refused with a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf

from kvcomm_p2p.kernels.rope_shift import rope_shift
from kvcomm_p2p.model.runner import ModelRunner

MOVABLE = {"llama": False, "qwen3": False, "qwen2": False, "mistral": False, "gemma2": False, "phi3": False,
           "gpt_neox": False, "glm": True, "gptj": True}  # fmt: skip


def test_geometry_of_every_architecture(runner: ModelRunner) -> None:
    if runner.spec.name in MOVABLE:
        assert runner.spec.rotary is not None, runner.spec.exact_only_reason
        assert runner.spec.rotary.interleaved is MOVABLE[runner.spec.name]
        assert runner.spec.exact_only_reason == ""
    else:
        assert runner.spec.rotary is None
        assert runner.spec.exact_only_reason != ""
    assert runner.spec.share_refusal == ""


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
    assert not torch.allclose(keys, expected_keys, atol=1e-2)


@pytest.mark.parametrize("name", ["gpt_neox", "glm", "gptj"])
def test_partial_rotary_is_seen(build_tiny: Callable[..., Any], name: str) -> None:
    spec = ModelRunner.from_model(build_tiny(name), None, name).spec
    assert spec.rotary is not None
    assert 2 * len(spec.rotary.inv_freq) < spec.layout.key_dim


@pytest.mark.parametrize(
    ("parameters", "movable"),
    [
        ({"rope_type": "default", "rope_theta": 5e5}, True),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, True),
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}, True),
        ({"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 128}, True),
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, False),
        ({"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
          "original_max_position_embeddings": 128}, False),
    ],
    ids=lambda value: value["rope_type"] if isinstance(value, dict) else "",
)  # fmt: skip
def test_scaled_frequencies(tiny_llama: Callable[..., Any], parameters: dict[str, Any], movable: bool) -> None:
    spec = ModelRunner.from_model(tiny_llama(rope_parameters=parameters), None, "scaled").spec
    assert (spec.rotary is not None) is movable, spec.exact_only_reason
    assert bool(spec.exact_only_reason) is not movable


def test_layers_without_positions_are_noticed() -> None:
    torch.manual_seed(0)
    config = tf.SmolLM3Config(
        vocab_size=250, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.15, no_rope_layer_interval=4, pad_token_id=0,
    )  # fmt: skip
    spec = ModelRunner.from_model(tf.SmolLM3ForCausalLM(config).eval(), None, "smollm3").spec
    assert spec.rotary is None and "no positions" in spec.exact_only_reason
    assert spec.share_refusal == ""


def test_a_lying_config_is_caught_by_the_probe(tiny_llama: Callable[..., Any]) -> None:
    model = tiny_llama()
    last = model.model.layers[-1].self_attn
    plain = last.forward

    def without_positions(hidden_states: torch.Tensor, position_embeddings: Any = None, **options: Any) -> Any:
        cos, sin = position_embeddings
        return plain(hidden_states, position_embeddings=(torch.ones_like(cos), torch.zeros_like(sin)), **options)

    last.forward = without_positions
    spec = ModelRunner.from_model(model, None, "liar").spec
    assert spec.rotary is None and "not a rotation" in spec.exact_only_reason


def test_running_state_cannot_be_shared_but_runs() -> None:
    torch.manual_seed(0)
    config = tf.MambaConfig(vocab_size=250, hidden_size=32, state_size=4, num_hidden_layers=2, pad_token_id=0)
    runner = ModelRunner.from_model(tf.MambaForCausalLM(config).eval(), None, "mamba")
    assert runner.spec.share_refusal and runner.spec.rotary is None


def test_latent_attention_is_exact_only() -> None:
    torch.manual_seed(0)
    config = tf.DeepseekV2Config(
        vocab_size=250, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2,
        first_k_dense_replace=2, kv_lora_rank=16, q_lora_rank=None, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16,
        max_position_embeddings=512, n_group=1, topk_group=1, pad_token_id=0,
    )  # fmt: skip
    spec = ModelRunner.from_model(tf.DeepseekV2ForCausalLM(config).eval(), None, "deepseek").spec
    assert spec.rotary is None and "latent" in spec.exact_only_reason + spec.share_refusal
