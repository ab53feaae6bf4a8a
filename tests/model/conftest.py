"""Tiny random models of many architectures. Large weights, so that every layer and every mask matters to the logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf

from kvcomm_p2p.model.runner import ModelRunner

_COMMON: dict[str, Any] = {
    "vocab_size": 250,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED = _COMMON | {"num_key_value_heads": 2}
_WINDOW = {"sliding_window": 16}
_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}

ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_GROUPED)),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**_GROUPED, head_dim=16)),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**_GROUPED, **_WINDOW)),
    "gemma2": lambda: tf.Gemma2ForCausalLM(tf.Gemma2Config(**_GROUPED, **_WINDOW, **_ALTERNATING, head_dim=16)),
    "gemma3": lambda: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**_GROUPED, **_WINDOW, **_ALTERNATING, head_dim=16)),
    "phi3": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**_GROUPED)),
    "gpt_neox": lambda: tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**_COMMON)),
    "gptj": lambda: tf.GPTJForCausalLM(
        tf.GPTJConfig(vocab_size=250, n_embd=64, n_layer=3, n_head=4, n_positions=512, rotary_dim=8, initializer_range=0.15)
    ),
    "glm": lambda: tf.GlmForCausalLM(tf.GlmConfig(**_GROUPED, head_dim=16)),
    "qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**_GROUPED)),
    "bloom": lambda: tf.BloomForCausalLM(
        tf.BloomConfig(vocab_size=250, hidden_size=64, n_layer=3, n_head=4, initializer_range=0.15, pad_token_id=0)
    ),
    "opt": lambda: tf.OPTForCausalLM(
        tf.OPTConfig(
            vocab_size=250, hidden_size=64, ffn_dim=96, num_hidden_layers=3, num_attention_heads=4, word_embed_proj_dim=64,
            max_position_embeddings=512, init_std=0.15, do_layer_norm_before=True,
        )
    ),
}  # fmt: skip


def build(name: str, seed: int = 0) -> Any:
    """A random model in eval mode, float32."""
    torch.manual_seed(seed)
    return ARCHITECTURES[name]().eval()


@pytest.fixture(scope="session")
def build_tiny() -> Callable[..., Any]:
    """`build_tiny(architecture, seed=0)`: see `ARCHITECTURES`."""
    return build


@pytest.fixture(scope="module", params=sorted(ARCHITECTURES))
def runner(request: pytest.FixtureRequest) -> ModelRunner:
    """One runner per architecture."""
    return ModelRunner.from_model(build(request.param), None, request.param)
