"""Looks at a loaded model once, with a few tiny forwards, and says what can be done with its KV."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache

from kvcomm_p2p.model.cache import KVCache
from kvcomm_p2p.model.identity import identity_of
from kvcomm_p2p.model.profiles import load_profile
from kvcomm_p2p.model.rotary import LayerKV, find_rotary
from kvcomm_p2p.model.spec import ModelSpec
from kvcomm_p2p.protocol.anchors import DTYPE_BYTES, KVLayout

if TYPE_CHECKING:
    from kvcomm_p2p.model.call import ModelCall

_PROBE_TOKENS = 12
_CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length")
_CONTEXT_UNSTATED = 1 << 20
# Largest difference of logits, relative to their norm, between a recomputed and a plain prefill.
_AGREEMENT = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}


def inspect_model(
    model: Any,
    tokenizer: Any,
    name: str,
    call: ModelCall,
    *,
    files: Iterable[Path] = (),
    cache_dir: Path | None = None,
) -> ModelSpec:
    """Shape, identity, rotary geometry and profile of a model in memory. Never raises for an unusual architecture: what
    cannot be exchanged or moved becomes a reason in the spec."""
    config = model.config.get_text_config(decoder=True)
    context = _context_tokens(config)
    probe_ids = [(7 * index + 3) % int(config.vocab_size) for index in range(min(_PROBE_TOKENS, context))]
    layout, refusal = _find_layout(model, call, probe_ids, int(config.num_hidden_layers))
    if not refusal:
        refusal = _scatter_refusal(call, probe_ids, layout)
    rotary, exact_only = None, refusal
    if not refusal:
        rotary, exact_only = find_rotary(model, call.probe, probe_ids, context)
    identity, parts = identity_of(model, tokenizer, layout, files=files, cache_dir=cache_dir)
    profile_dirs = () if cache_dir is None else (cache_dir / "profiles",)
    return ModelSpec(
        name=name,
        model_id=identity,
        layout=layout,
        context_tokens_max=context,
        rotary=rotary,
        exact_only_reason=exact_only,
        share_refusal=refusal,
        profile=load_profile(identity, profile_dirs) if rotary is not None else None,
        identity_parts=parts,
    )


def _context_tokens(config: Any) -> int:
    """How many tokens a sequence may have: as many as the model takes without changing what the first ones mean.

    LongRoPE has one set of frequencies for sequences up to the original length and another beyond, for all of their
    tokens: KV from one side is wrong on the other, whether it is moved, reused in place or decoded across.
    """
    context = next((int(v) for n in _CONTEXT_NAMES if (v := getattr(config, n, None))), _CONTEXT_UNSTATED)
    parameters = getattr(config, "rope_parameters", None) or {}
    for one in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        if one.get("rope_type") == "longrope" and one.get("short_factor") != one.get("long_factor"):
            original = one.get("original_max_position_embeddings")
            original = original or getattr(config, "original_max_position_embeddings", None)
            context = min(context, int(original or context))
    return context


def _find_layout(model: Any, call: ModelCall, probe_ids: list[int], layers: int) -> tuple[KVLayout, str]:
    """The layout, and why this model's KV cannot be exchanged ("" if it can)."""
    nothing = KVLayout(layers, 0, 0, 0, "float32")
    if _keeps_running_states(model):
        return nothing, "layers with a running state (Mamba, linear attention, convolution) cannot be cut into tokens"
    try:
        found: LayerKV = call.probe(probe_ids, 0)
    except Exception as error:
        return nothing, f"its layers keep something else than one key and one value per token ({type(error).__name__})"
    if len(found) != layers:
        return nothing, "some of its layers keep no keys and values of their own"
    shapes = {(tuple(keys.shape), tuple(values.shape), keys.dtype, values.dtype) for keys, values in found}
    if len(shapes) != 1:
        return nothing, "its layers keep keys and values of different shapes"
    keys, values = found[0]
    dtype = str(keys.dtype).removeprefix("torch.")
    if keys.ndim != 3 or keys.shape[:2] != values.shape[:2] or keys.shape[1] != len(probe_ids):
        return nothing, "its layers do not keep one key and one value per token"
    if keys.dtype != values.dtype or dtype not in DTYPE_BYTES:
        return nothing, f"its keys and values are kept as {keys.dtype} and {values.dtype}"
    return KVLayout(layers, keys.shape[0], keys.shape[2], values.shape[2], dtype), ""


def _keeps_running_states(model: Any) -> bool:
    """Whether some layer of the model's own cache keeps a running state, alone or beside keys and values."""
    try:
        layers = DynamicCache(config=model.config).layers
    except Exception:
        return False  # what such a model keeps shows when it is probed
    return any(hasattr(layer, "update_recurrent_state") for layer in layers)


def _scatter_refusal(call: ModelCall, probe_ids: list[int], layout: KVLayout) -> str:
    """Runs a plain prefill, ours, and a recompute of some positions, which must agree."""
    ids = call.as_ids(probe_ids)
    total = len(probe_ids)
    rows = call.as_ids([row for row in range(total) if row % 3 == 1 or row == total - 1])
    try:
        plain = call.plain_logits(ids)
        cache = KVCache(layout, total, call.device)
        ours = call.append(ids, cache, 0)
        before = cache.keys.clone()
        cache.keys[:, :, :, rows] = 0
        cache.values[:, :, :, rows] = 0
        again = call.scatter(ids[rows], rows, cache, total)
    except Exception as error:
        return f"its forward does not accept positions out of order ({type(error).__name__})"
    limit = _AGREEMENT[layout.dtype]
    pairs = ((plain, ours), (plain, again), (before.float(), cache.keys.float()))
    for expected, actual in pairs:
        if not torch.linalg.vector_norm(expected - actual) <= limit * torch.linalg.vector_norm(expected):
            return "recomputing single positions does not give what a whole prefill gives"
    return ""
