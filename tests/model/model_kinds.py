"""What each kind of model can do: tiny random ones of all kinds, and the table that says so.

test_model_support.py proves the table, and that docs/models.md has it; `python tests/model/model_kinds.py` puts it there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
import transformers as tf

from kvcomm_p2p.model.rotary import NO_ROTATION
from kvcomm_p2p.model.runner import ModelRunner

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
TABLE_BEGINS = "<!-- begin: written by tests/model/model_kinds.py -->"
TABLE_ENDS = "<!-- end -->"
CONTEXT = 512
WINDOW = 16

_STATE = "layers with a running state (Mamba, linear attention, convolution) cannot be cut into tokens"
_SHAPES = "its layers keep keys and values of different shapes"
_SHARED = "some of its layers keep no keys and values of their own"
_INDEXED = "its layers keep something else than one key and one value per token (ValueError)"

_COMMON: dict[str, Any] = {
    "vocab_size": 250,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    # Larger than usual, so that every layer and every mask matters to the logits.
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_HEAD = {"head_dim": 16}
_WINDOW = {"sliding_window": WINDOW}
_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 2}
_MOSTLY_SLIDING = {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "moe_intermediate_size": 32, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "first_k_dense_replace": 2, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
_PER_LAYER_INPUT = {"vocab_size_per_layer_input": 250, "hidden_size_per_layer_input": 8}
_NGPT: dict[str, Any] = {
    "vocab_size": 250, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": CONTEXT, "initializer_range": 0.15,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def _rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **settings}}


_YARN_IN_FULL_LAYERS = {
    "rope_parameters": {
        "full_attention": {
            "rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": CONTEXT // 8,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
    }
}  # fmt: skip
_YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=CONTEXT // 4)
_LONGROPE = _rope(
    "longrope", short_factor=[1.0 + i / 9 for i in range(8)], long_factor=[2.0 + i for i in range(8)],
    original_max_position_embeddings=CONTEXT // 4,
)  # fmt: skip

Support = Literal["full", "exact only", "refused"]


@dataclass(frozen=True)
class Kind:
    """A kind of model. `config` is a class of transformers and `settings` its arguments.

    For users: `note` says what is special about a kind that is supported in full, `reason`, word for word, why another one
    is not. `traits` name tests that concern it: "window" (sliding or chunked layers), "scale" (cos and sin are scaled),
    "whole" (transformers itself continues its cache otherwise than it prefills). `context`: its `context_tokens_max`,
    where that is not what its config says.
    """

    name: str
    examples: str
    support: Support
    config: str
    settings: dict[str, Any]
    note: str = ""
    reason: str = ""
    traits: tuple[str, ...] = ()
    context: int | None = None


def _full(
    name: str, examples: str, config: str, note: str, settings: dict[str, Any], *traits: str, **more: Any
) -> Kind:
    return Kind(name, examples, "full", config, settings, note, traits=traits, **more)


def _refused(name: str, examples: str, config: str, reason: str, settings: dict[str, Any], *traits: str) -> Kind:
    return Kind(name, examples, "refused", config, settings, reason=reason, traits=traits)


def _exact(name: str, examples: str, config: str, reason: str, settings: dict[str, Any]) -> Kind:
    return Kind(name, examples, "exact only", config, settings, reason=reason)


KINDS: tuple[Kind, ...] = (
    _full("Llama", "Llama 2, SmolLM2, TinyLlama, Yi", "LlamaConfig", "", _COMMON),
    _full("Llama 3 RoPE scaling", "Llama 3.1, 3.2, 3.3", "LlamaConfig", "frequencies scaled once and for all", _COMMON | _rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=CONTEXT // 4)),
    _full("YaRN", "whatever has it switched on", "LlamaConfig",
          "cached keys hold its scale once; moving them does not scale again", _COMMON | _YARN, "scale"),
    _full("linear RoPE scaling", "Vicuna 16k", "LlamaConfig", "", _COMMON | _rope("linear", factor=4.0)),
    _full("dynamic NTK", "whatever has it switched on", "LlamaConfig",
          "frequencies change beyond `max_position_embeddings` only, where prompts end here",
          _COMMON | _rope("dynamic", factor=4.0)),
    _full("LongRoPE", "Phi-3 128k, Phi-4-mini", "Phi3Config", "up to the original length, 4096 tokens in these models: "
          "[longer prompts are refused](#longrope)", _COMMON | _LONGROPE | {"original_max_position_embeddings": CONTEXT // 4},
          "scale", context=CONTEXT // 4),
    _full("Qwen 2", "Qwen2, Qwen2.5", "Qwen2Config", "biases on queries, keys and values", _COMMON),
    _full("Qwen 3", "Qwen3", "Qwen3Config", "normed queries and keys", _COMMON | _HEAD),
    _full("Mistral", "Mistral 7B, Ministral 8B", "MistralConfig", "all layers sliding", _COMMON | _WINDOW, "window"),
    _full("Gemma 2", "Gemma 2", "Gemma2Config", "soft-capped scores, every other layer sliding",
          _COMMON | _HEAD | _WINDOW | _ALTERNATING, "window"),
    _full("Gemma 3", "Gemma 3", "Gemma3TextConfig", "sliding layers with another theta: frequencies per layer",
          _COMMON | _HEAD | _WINDOW | _MOSTLY_SLIDING, "window"),
    _full("Phi-3", "Phi-3 4k", "Phi3Config", "", _COMMON),
    _full("partial rotary", "Phi-4-mini", "Phi3Config", "only the first dims of a head turn",
          _COMMON | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}}),
    _full("Phi", "Phi-1.5, Phi-2", "PhiConfig", "partial rotary, parallel layers", _COMMON),
    _full("StarCoder 2", "StarCoder2", "Starcoder2Config", "all layers sliding", _COMMON | _WINDOW, "window"),
    _full("ERNIE 4.5", "ERNIE 4.5", "Ernie4_5Config", "interleaved pairs", _COMMON | _HEAD),
    _full("GPT-NeoX", "Pythia, GPT-NeoX 20B", "GPTNeoXConfig", "partial rotary, parallel layers",
          {key: value for key, value in _COMMON.items() if key != "num_key_value_heads"}),
    _full("GPT-J", "GPT-J 6B", "GPTJConfig", "partial rotary, interleaved pairs", _NGPT | {"rotary_dim": 8}),
    _full("GLM", "GLM-4 9B", "GlmConfig", "partial rotary, interleaved pairs", _COMMON | _HEAD),
    _full("GLM 4", "GLM-4-0414, GLM-Z1", "Glm4Config", "partial rotary, interleaved pairs", _COMMON | _HEAD),
    _full("Cohere", "Command R", "CohereConfig", "interleaved pairs", _COMMON),
    _full("Cohere 2", "Command R7B, Command A", "Cohere2Config", "full layers have no positions: nothing turns there",
          _COMMON | _WINDOW | _MOSTLY_SLIDING, "window"),
    _full("OLMo 3", "OLMo 3", "Olmo3Config", "YaRN in its full layers only: frequencies per layer",
          _COMMON | _WINDOW | _MOSTLY_SLIDING | _YARN_IN_FULL_LAYERS, "window", "scale"),
    _full("Granite", "Granite 3", "GraniteConfig", "", _COMMON),
    _full("EXAONE 4", "EXAONE 4", "Exaone4Config", "full layers have no positions: nothing turns there",
          _COMMON | _WINDOW | _MOSTLY_SLIDING, "window"),
    _full("SmolLM 3", "SmolLM3", "SmolLM3Config", "every fourth layer has no positions: nothing turns there",
          _COMMON | {"no_rope_layer_interval": 4}),
    _full("Llama 4 text", "Llama 4 Scout, Maverick", "Llama4TextConfig",
          "layers without positions, chunked layers, interleaved pairs, experts",
          _COMMON | _HEAD | {"intermediate_size_mlp": 96, "num_local_experts": 2, "attention_chunk_size": WINDOW,
                             "no_rope_layers": [1, 1, 1, 0]}, "window"),
    _full("Mixtral", "Mixtral 8x7B, 8x22B", "MixtralConfig", "experts", _COMMON | {"num_local_experts": 4}),
    _full("Qwen 3 MoE", "Qwen3-30B-A3B, Qwen3-Coder", "Qwen3MoeConfig", "experts", _COMMON | _HEAD | _EXPERTS),
    _full("Qwen 2 MoE", "Qwen1.5-MoE, Qwen2-57B-A14B", "Qwen2MoeConfig", "experts",
          _COMMON | _EXPERTS | {"shared_expert_intermediate_size": 32}),
    _full("GLM 4 MoE", "GLM-4.5, GLM-4.6", "Glm4MoeConfig", "partial rotary, experts", _COMMON | _HEAD | {
          "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}),
    _full("gpt-oss", "gpt-oss-20b, gpt-oss-120b", "GptOssConfig", "attention sinks, YaRN, every other layer sliding, experts",
          _COMMON | _HEAD | _WINDOW | _ALTERNATING | _YARN | {"num_local_experts": 4, "num_experts_per_tok": 2},
          "window", "scale"),
    _full("DeepSeek V2, latent attention", "DeepSeek-V2, -Coder-V2", "DeepseekV2Config",
          "the part of the latent that has a position turns, the rest is copied", _COMMON | _LATENT),
    _full("DeepSeek V3, latent attention", "DeepSeek-V3, -R1, Kimi K2", "DeepseekV3Config",
          "the part of the latent that has a position turns, the rest is copied", _COMMON | _LATENT),
    _full("ALiBi, Bloom", "BLOOM, BLOOMZ", "BloomConfig", "keys hold no positions: copied as they are", {
          "vocab_size": 250, "hidden_size": 64, "n_layer": 4, "n_head": 4, "initializer_range": 0.15, "pad_token_id": 0},
          context=1 << 20),
    _full("ALiBi, MPT", "MPT-7B, MPT-30B", "MptConfig", "keys hold no positions: copied as they are", {
          "vocab_size": 250, "d_model": 64, "n_layers": 4, "n_heads": 4, "max_seq_len": CONTEXT, "initializer_range": 0.15}),
    _full("ALiBi, Falcon", "Falcon-RW", "FalconConfig", "keys hold no positions: copied as they are", _COMMON | {"alibi": True}),
    _full("Falcon", "Falcon-7B, -40B", "FalconConfig", "", _COMMON | {"alibi": False}),
    _exact("GPT-2", "GPT-2, GPT-SW3", "GPT2Config", NO_ROTATION, _NGPT),
    _exact("OPT", "OPT, Galactica", "OPTConfig", NO_ROTATION, {
          "vocab_size": 250, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
          "word_embed_proj_dim": 64, "max_position_embeddings": CONTEXT, "init_std": 0.15}),
    _refused("Mamba", "Mamba", "MambaConfig", _STATE, {
          "vocab_size": 250, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2, "pad_token_id": 0}),
    _refused("Mamba 2", "Mamba-Codestral", "Mamba2Config", _STATE, {
          "vocab_size": 250, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2, "pad_token_id": 0, "num_heads": 8,
          "head_dim": 8, "n_groups": 1}),
    _refused("Jamba", "Jamba 1.5", "JambaConfig", _STATE, _COMMON | {
          "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "num_experts_per_tok": 1, "mamba_d_state": 4,
          "mamba_dt_rank": 4}),
    _refused("Bamba", "Bamba 9B", "BambaConfig", _STATE, _COMMON | {
          "attn_layer_indices": [1, 3], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}),
    _refused("Falcon-H1", "Falcon-H1", "FalconH1Config", _STATE, _COMMON | _HEAD | {
          "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}),
    _refused("Qwen 3 Next", "Qwen3-Next", "Qwen3NextConfig", _STATE, _COMMON | _HEAD | _EXPERTS | _LINEAR | {
          "shared_expert_intermediate_size": 32}),
    _refused("LFM 2", "LFM2", "Lfm2Config", _STATE, _COMMON | {"layer_types": ["conv", "full_attention"] * 2}),
    _refused("Gemma 3n", "Gemma 3n", "Gemma3nTextConfig", _SHARED, _COMMON | _HEAD | _WINDOW | _PER_LAYER_INPUT | {
          "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
          "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 4}),
    _refused("Gemma 4", "Gemma 4", "Gemma4TextConfig", _SHAPES, _COMMON | _HEAD | _WINDOW | _ALTERNATING | _PER_LAYER_INPUT | {
          "global_head_dim": 32, "num_kv_shared_layers": 0}),
    _refused("DeepSeek V3.2, sparse attention", "DeepSeek-V3.2", "DeepseekV32Config", _INDEXED, _COMMON | _LATENT | {
          "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8}, "whole"),
)  # fmt: skip


def build(kind: Kind, seed: int = 0) -> Any:
    """A random model of a kind, in eval mode, float32."""
    torch.manual_seed(seed)
    config = getattr(tf, kind.config)(**kind.settings)
    return tf.AutoModelForCausalLM.from_config(config).eval()


@cache
def runner(kind_name: str) -> ModelRunner:
    """One runner per kind."""
    [kind] = [kind for kind in KINDS if kind.name == kind_name]
    return ModelRunner.from_model(build(kind), None, kind.name)


def table() -> str:
    """The table of docs/models.md."""
    lines = ["| kind | tested as | for example | support | |", "|---|---|---|---|---|"]
    for kind in KINDS:
        tested = kind.config.removesuffix("Config")
        lines.append(f"| {kind.name} | `{tested}` | {kind.examples} | {kind.support} | {kind.note or kind.reason} |")
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """docs/models.md with the table of today between its two marks."""
    before, _, rest = text.partition(TABLE_BEGINS)
    _, _, after = rest.partition(TABLE_ENDS)
    return f"{before}{TABLE_BEGINS}\n\n{table()}\n{TABLE_ENDS}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
