"""`ModelId`: 16 bytes that are equal exactly where KV can be exchanged, on every machine.

First 16 bytes of SHA-256 over canonical JSON (sorted keys, no spaces) of `{"version", "weights", "tokenizer",
"adapter", "kv_dtype", "config"}`. No `hash()`, no pickle, no names or paths: the same name is not the same weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from kvcomm_p2p.protocol.anchors import KVLayout
from kvcomm_p2p.protocol.ids import MODEL_ID_BYTES, ModelId

VERSION = 1

# What, besides the weights, changes the numbers in the cache. Names that an architecture lacks are left out.
_CONFIG_NAMES = (
    "model_type", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size",
    "intermediate_size", "hidden_act", "hidden_activation", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon",
    "rope_parameters", "partial_rotary_factor", "rope_interleaved", "max_position_embeddings", "layer_types",
    "sliding_window", "attention_chunk_size", "no_rope_layers", "attention_bias", "qk_norm", "use_qk_norm",
    "use_parallel_residual", "query_pre_attn_scalar", "attn_logit_softcapping", "embedding_multiplier",
    "residual_multiplier", "attention_multiplier", "num_experts_per_tok", "num_local_experts", "norm_topk_prob",
)  # fmt: skip

_ROTARY_NAMES = ("rope_parameters", "partial_rotary_factor", "rope_interleaved", "no_rope_layers")
_PART_DIGITS = 16
"""Of a part's digest: enough to compare, and short enough to read."""


def model_id(
    model: Any, tokenizer: Any, layout: KVLayout, *, files: Iterable[Path] = (), cache_dir: Path | None = None
) -> ModelId:
    """Identity of a loaded model. `files`: the weight files it came from; with `cache_dir`, the weights' digest is
    remembered there by their path, size and modification time, so that it is computed once."""
    return identity_of(model, tokenizer, layout, files=files, cache_dir=cache_dir)[0]


def identity_of(
    model: Any, tokenizer: Any, layout: KVLayout, *, files: Iterable[Path] = (), cache_dir: Path | None = None
) -> tuple[ModelId, dict[str, str]]:
    """`model_id`, and its parts: name -> what is equal where the part is (a digest, or a value that can be read)."""
    config = model.config.get_text_config(decoder=True)
    document = {
        "version": VERSION,
        "weights": _remembered_weights_digest(model, layout.dtype, list(files), cache_dir),
        "tokenizer": tokenizer_digest(tokenizer),
        "adapter": adapter_digest(model),
        "kv_dtype": layout.dtype,
        "kv_shape": [layout.layers, layout.kv_heads, layout.key_dim, layout.value_dim],
        "config": {name: value for name in _CONFIG_NAMES if (value := _setting(config, name)) is not None},
    }
    return ModelId(hashlib.sha256(_canonical(document)).digest()[:MODEL_ID_BYTES]), _parts(document)


def _parts(document: dict[str, Any]) -> dict[str, str]:
    settings = document["config"]
    rotary = {name: settings[name] for name in _ROTARY_NAMES if name in settings}
    other = {name: value for name, value in settings.items() if name not in _ROTARY_NAMES}
    readable = {name: str(document[name]) for name in ("version", "kv_dtype", "kv_shape")}
    digests = {name: document[name][:_PART_DIGITS] for name in ("weights", "tokenizer", "adapter")}
    config = {
        name: hashlib.sha256(_canonical(value)).hexdigest()[:_PART_DIGITS]
        for name, value in (("rotary", rotary), ("config", other))
    }
    return {**readable, **digests, **config}


def weights_digest(model: Any) -> str:
    """Hex SHA-256 over (name, dtype, shape, bytes) of all parameters and persistent buffers, sorted by name; tied ones
    once."""
    parameters = dict(model.named_parameters())
    persistent = set(model.state_dict().keys())
    tensors = {**parameters, **{name: value for name, value in model.named_buffers() if name in persistent}}
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        digest.update(_canonical([name, str(tensor.dtype), list(tensor.shape)]))
        flat = tensor.to("cpu").contiguous().reshape(-1).view(torch.uint8)
        digest.update(memoryview(flat.numpy()))
    return digest.hexdigest()


def tokenizer_digest(tokenizer: Any) -> str:
    """Hex SHA-256 of what maps text to ids ("" without a tokenizer). The chat template is text and does not count."""
    if tokenizer is None:
        return ""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        document = json.loads(backend.to_str())
        # Per-call settings that transformers leaves behind in the tokenizer.
        document.pop("truncation", None)
        document.pop("padding", None)
    else:
        document = {
            "class": type(tokenizer).__name__,
            "vocab": sorted(tokenizer.get_vocab().items()),
            "special": {name: str(token) for name, token in sorted(tokenizer.special_tokens_map.items())},
        }
    return hashlib.sha256(_canonical(document)).hexdigest()


def adapter_digest(model: Any) -> str:
    """Hex SHA-256 of the adapters' settings ("" without one). Their weights are among the model's parameters."""
    adapters = getattr(model, "peft_config", None)
    if not adapters:
        return ""
    settings = {name: str(config) for name, config in sorted(adapters.items())}
    active = getattr(model, "active_adapters", None)
    names = active() if callable(active) else active
    return hashlib.sha256(_canonical({"settings": settings, "active": str(names)})).hexdigest()


def _setting(config: Any, name: str) -> Any:
    """One value, or one per layer where layers differ (their config then refuses to give one); None where there is none."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return [getattr(layer, name, None) for layer in config.per_layer_config]


def _remembered_weights_digest(model: Any, dtype: str, files: list[Path], cache_dir: Path | None) -> str:
    if cache_dir is None or not files:
        return weights_digest(model)
    stamps = [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in sorted(files)]
    key = hashlib.sha256(_canonical([VERSION, dtype, adapter_digest(model), stamps])).hexdigest()
    remembered = cache_dir / "digests" / key
    try:
        stored = remembered.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        stored = ""
    if len(stored) == hashlib.sha256().digest_size * 2:
        return stored
    computed = weights_digest(model)
    try:
        remembered.parent.mkdir(parents=True, exist_ok=True)
        partial = remembered.with_suffix(".partial")
        partial.write_text(computed, encoding="ascii")
        partial.replace(remembered)
    except OSError:
        pass  # a read-only cache costs time, nothing else
    return computed


def _canonical(document: Any) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=str).encode("ascii")
