"""Forwards through the unmodified model: appending to a cache, scattered into a slab, or only as far as layer 0."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache

from kvcomm_p2p.errors import UsageError
from kvcomm_p2p.model import attention
from kvcomm_p2p.model.cache import CapturedLayer0, KVCache, Layer0Capture, LayerRepair, OpaqueCache
from kvcomm_p2p.model.rotary import LayerKV
from kvcomm_p2p.model.threads import ForwardThread

TokenIds = Sequence[int] | npt.NDArray[Any] | torch.Tensor
"""Token ids or positions: anything that becomes an int64 tensor [n]."""


def cache_argument(model: Any) -> str:
    """What this model's `forward` and `generate` call their cache: "cache", or in older releases "past_key_values", which
    newer ones warn about."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class ModelCall:
    """Forwards through the unmodified model, one at a time, in one thread. Knows torch and transformers, nothing of prompts."""

    def __init__(self, model: Any) -> None:
        attention.register()
        self.model = model
        self.device = next(model.parameters()).device
        self.thread = ForwardThread()
        parameters = inspect.signature(model.forward).parameters
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self._takes_positions = "position_ids" in parameters
        # The model without its head: for KV alone the head (often the largest matrix) is not needed.
        body = getattr(model, "base_model", model)
        self._body = body if "inputs_embeds" in inspect.signature(body.forward).parameters else model
        self._cache_names = {id(module): cache_argument(module) for module in (model, self._body)}
        # Models on eager attention have a reason (soft-capped scores, sinks, ALiBi): they keep it, with a dense mask. So do
        # models whose code looks up no registered attention: they take a name that they do not know for eager (Falcon).
        looks_up = any(hasattr(inspect.getmodule(type(m)), "ALL_ATTENTION_FUNCTIONS") for m in model.modules())
        configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config") and looks_up}
        self._configs = [c for c in configs.values() if getattr(c, "_attn_implementation", None) == "sdpa"]

    def as_ids(self, values: TokenIds) -> torch.Tensor:
        """An int64 tensor [n] on the model's device."""
        if not isinstance(values, torch.Tensor):
            # A copy: arrays of token ids are read-only, which torch warns about.
            values = torch.from_numpy(np.array(values, dtype=np.int64))
        return values.to(self.device, torch.int64)

    def append(self, ids: torch.Tensor, cache: Any, start: int) -> torch.Tensor:
        """Forward over tokens [n] behind `start` cached ones; logits [V] of the last."""
        if start > 0 and ids.shape[0] > 1 and isinstance(cache, KVCache):
            positions = torch.arange(start, start + ids.shape[0], device=self.device)
            cache.reserve(start + ids.shape[0])
            return self.scatter(ids, positions, cache, start + ids.shape[0])
        positions = torch.arange(start, start + ids.shape[0], device=self.device)
        logits = self.thread.run(lambda: self._forward(ids, positions, cache))
        if isinstance(cache, OpaqueCache):
            cache.length = start + ids.shape[0]
        return logits

    def scatter(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        cache: KVCache,
        rows: int,
        repair: LayerRepair | None = None,
    ) -> torch.Tensor:
        """Forward over tokens [R] at positions [R] into a slab of `rows` rows; logits [V] of the last."""

        def forward() -> torch.Tensor:
            with cache.scattering(positions, rows, repair), self._own_attention():
                return self._forward(ids, positions, cache)

        return self.thread.run(forward)

    def extend(self, ids: torch.Tensor, cache: KVCache, start: int) -> None:
        """Like `append`, for the KV alone."""
        positions = torch.arange(start, start + ids.shape[0], device=self.device)

        def forward() -> None:
            with ExitStack() as stack:
                if start > 0:
                    stack.enter_context(cache.scattering(positions, start + ids.shape[0]))
                    stack.enter_context(self._own_attention())
                stack.enter_context(torch.inference_mode())
                self._body(input_ids=ids[None], **self._arguments(self._body, positions, cache))

        self.thread.run(forward)

    def layer0(self, ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Layer 0's keys [H, n, Dk] and values [H, n, Dv]."""
        try:
            self.thread.run(lambda: self._forward(ids, positions, Layer0Capture()))
        except CapturedLayer0 as captured:
            return captured.keys.clone(), captured.values.clone()
        raise UsageError("this model's forward never touched its cache")

    def probe(self, token_ids: list[int], offset: int) -> LayerKV:
        """Per layer keys [H, n, Dk] and values [H, n, Dv] of tokens at offset, offset + 1, ... with nothing before
        them.

        Raises whatever the model raises when its layers keep something else than plain keys and values.
        """
        cache = DynamicCache()
        ids = self.as_ids(token_ids)
        positions = torch.arange(offset, offset + ids.shape[0], device=self.device)
        self.thread.run(lambda: self._forward(ids, positions, cache))
        layers: list[Any] = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
        return [(layer.keys[0].clone(), layer.values[0].clone()) for layer in layers]

    def plain_logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Next-token logits [V] of a prompt [n], with nothing of ours involved."""

        def forward() -> torch.Tensor:
            with torch.inference_mode():
                logits = self.model(input_ids=ids[None]).logits
            return logits[0, -1].to(torch.float32, copy=True)  # type: ignore[no-any-return]

        return self.thread.run(forward)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, cache: Any) -> torch.Tensor:
        arguments = self._arguments(self.model, positions, cache)
        with torch.inference_mode():
            logits = self.model(input_ids=ids[None], **arguments, **self._last_only).logits
        # A copy outside inference mode: callers may edit it, and it does not keep [1, n, V] alive.
        return logits[0, -1].to(torch.float32, copy=True)  # type: ignore[no-any-return]

    def _arguments(self, module: Any, positions: torch.Tensor, cache: Any) -> dict[str, Any]:
        arguments: dict[str, Any] = {self._cache_names[id(module)]: cache, "use_cache": True}
        if self._takes_positions:
            arguments["position_ids"] = positions[None]
        return arguments

    @contextmanager
    def _own_attention(self) -> Iterator[None]:
        for config in self._configs:
            config._attn_implementation = attention.IMPLEMENTATION
        try:
            yield
        finally:
            for config in self._configs:
                config._attn_implementation = "sdpa"
