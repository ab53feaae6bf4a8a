"""Runs one unmodified transformers model over KV slabs: prefill, recompute any subset of positions, decode.

`recompute` is what makes reuse possible: one forward over any subset of a prompt's positions, at their true positions,
attending to everything before them in the slab, whether that was computed here or aligned from a peer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from kvcomm_p2p.errors import CancelledByCaller, UsageError
from kvcomm_p2p.model.cache import KVCache, LayerRepair, OpaqueCache
from kvcomm_p2p.model.call import ModelCall, TokenIds
from kvcomm_p2p.model.inspection import inspect_model
from kvcomm_p2p.model.registry import load_model
from kvcomm_p2p.model.spec import ModelSpec

T = TypeVar("T")

PREFILL_CHUNK_TOKENS = 1024
"""About how often a long prefill asks whether it was cancelled."""


class ModelRunner:
    """One loaded model. Thread safe: forwards run one at a time, in the order in which they were asked for.

    Caches belong to their caller: two threads must not use the same cache at once. Logits are float32 `[V]` on the
    model's device. Token ids and positions are lists, numpy arrays or tensors of integers.
    """

    def __init__(self, model: Any, tokenizer: Any, spec: ModelSpec, call: ModelCall) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.spec = spec
        self._call = call

    @property
    def vocabulary_size(self) -> int:
        """Token ids lie in [0, vocabulary_size)."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @classmethod
    def load(
        cls, ref: str | Path, *, dtype: str = "float32", device: str = "cpu", cache_dir: Path | None = None
    ) -> ModelRunner:
        """Loads a model by reference ("smollm2-135m", a folder, a hub id). Never downloads the default model by itself.

        Raises `ModelError` naming the fix when it cannot be found or loaded.
        """
        loaded = load_model(ref, dtype=dtype, device=device, cache_dir=cache_dir)
        return cls._wrap(loaded.model, loaded.tokenizer, loaded.name, loaded.files, loaded.cache_dir)

    @classmethod
    def from_model(cls, model: Any, tokenizer: Any, name: str, *, cache_dir: Path | None = None) -> ModelRunner:
        """Wraps a model that is already in memory (a causal language model of transformers). Puts it in eval mode."""
        return cls._wrap(model, tokenizer, name, (), cache_dir)

    @classmethod
    def _wrap(cls, model: Any, tokenizer: Any, name: str, files: Sequence[Path], cache_dir: Path | None) -> ModelRunner:
        model.eval()
        call = ModelCall(model)
        spec = inspect_model(model, tokenizer, name, call, files=files, cache_dir=cache_dir)
        return cls(model, tokenizer, spec, call)

    def new_cache(self, capacity: int) -> KVCache | OpaqueCache:
        """An empty cache for `capacity` tokens (it grows). `OpaqueCache` iff `spec.share_refusal`."""
        if self.spec.share_refusal:
            return OpaqueCache(self.model.config)
        return KVCache(self.spec.layout, capacity, self._call.device)

    def prefill(
        self,
        token_ids: TokenIds,
        cache: KVCache | OpaqueCache,
        start: int = 0,
        *,
        cancelled: Callable[[], bool] | None = None,
    ) -> torch.Tensor:
        """Appends `token_ids` to a cache that holds `start` tokens; returns the next-token logits [V] after the last
        one.

        Mutates the cache. With `cancelled`, a long prefill into a `KVCache` runs in chunks and raises `CancelledByCaller`
        between two of them when it returns True (the cache then holds whole chunks). Raises `UsageError` for no tokens,
        or a cache of another length.
        """
        ids = self._call.as_ids(token_ids)
        if ids.shape[0] == 0:
            raise UsageError("cannot prefill an empty list of tokens")
        if cache.length != start:
            raise UsageError(f"the cache holds {cache.length} tokens, but prefill was asked to start at {start}")
        self._check_context(start + ids.shape[0])
        cache.reserve(start + ids.shape[0])
        # Chunks of equal length: a short last one would read all weights for few tokens. Running states are made in one
        # forward and continued token by token: transformers begins some of them (Jamba's) anew for longer pieces.
        whole = cancelled is None or isinstance(cache, OpaqueCache)
        chunks = 1 if whole else max(1, round(ids.shape[0] / PREFILL_CHUNK_TOKENS))
        if start and isinstance(cache, OpaqueCache):
            chunks = ids.shape[0]
        step = -(-ids.shape[0] // chunks)
        logits: torch.Tensor | None = None
        for begin in range(0, ids.shape[0], step):
            if cancelled is not None and cancelled():
                raise CancelledByCaller("prefill was cancelled")
            logits = self._call.append(ids[begin : begin + step], cache, start + begin)
        assert logits is not None
        return logits

    def extend(self, token_ids: TokenIds, cache: KVCache, start: int = 0) -> None:
        """Like `prefill`, for the KV alone: the model's head is not run. Mutates the cache. Raises `UsageError` likewise."""
        ids = self._call.as_ids(token_ids)
        if ids.shape[0] == 0 or cache.length != start:
            raise UsageError(f"cannot extend a cache of {cache.length} tokens from {start} by {ids.shape[0]} tokens")
        self._check_context(start + ids.shape[0])
        cache.reserve(start + ids.shape[0])
        self._call.extend(ids, cache, start)

    def recompute(
        self, token_ids: TokenIds, positions: TokenIds, cache: KVCache, *, repair: LayerRepair | None = None
    ) -> torch.Tensor:
        """Recomputes the KV of `positions` (R, strictly ascending, the last one T - 1) of a prompt of T tokens in one
        forward.

        The slab must hold valid keys and values in all other rows of [0, T) (`reserve` it and write them there;
        `length` does not matter). Overwrites the rows at `positions`, leaves all others to `repair` (without one, alone),
        sets `cache.length` to T and returns the next-token logits [V]. Raises `UsageError` when positions are unordered,
        out of range or do not end at T - 1, or when this model's KV cannot be exchanged.
        """
        if self.spec.share_refusal:
            raise UsageError(f"{self.spec.name} cannot recompute single positions: {self.spec.share_refusal}")
        ids, rows = self._call.as_ids(token_ids), self._call.as_ids(positions)
        total = ids.shape[0]
        self._check_context(total)
        if rows.shape[0] == 0 or int(rows[-1]) != total - 1 or int(rows[0]) < 0:
            raise UsageError(f"positions must lie in [0, {total}) and end with the last token")
        if rows.shape[0] > 1 and not bool((rows[1:] > rows[:-1]).all()):
            raise UsageError("positions must be strictly ascending")
        if cache.capacity < total:
            raise UsageError(
                f"the cache has {cache.capacity} rows, the prompt {total} tokens: reserve and fill it first"
            )
        return self._call.scatter(ids[rows], rows, cache, total, repair)

    def decode_step(self, token_id: int, cache: KVCache | OpaqueCache) -> torch.Tensor:
        """Appends one token and returns the next-token logits [V]. Mutates the cache."""
        self._check_context(cache.length + 1)
        return self._call.append(self._call.as_ids([token_id]), cache, cache.length)

    def in_forward_thread(self, call: Callable[[], T]) -> T:
        """Result of a call that uses `model` directly, run where forwards run: between two of them, as fast as they run."""
        return self._call.thread.run(call)

    def spent_s(self) -> float:
        """Seconds of forwards that the calling thread has asked for since it last asked this; waiting does not count."""
        return self._call.thread.spent_s()

    def layer0(self, token_ids: TokenIds, positions: TokenIds) -> tuple[torch.Tensor, torch.Tensor]:
        """Layer 0's keys [H, n, Dk] and values [H, n, Dv] of tokens at positions: they depend on nothing else."""
        return self._call.layer0(self._call.as_ids(token_ids), self._call.as_ids(positions))

    def _check_context(self, tokens: int) -> None:
        if tokens > self.spec.context_tokens_max:
            raise UsageError(
                f"{tokens} tokens exceed the context of {self.spec.name} ({self.spec.context_tokens_max}): shorten the prompt"
            )
