"""One preallocated KV slab per prompt, which transformers models fill and read as if it were their own cache.

Two ways in: *append* (prefill, decode: new rows follow the old ones) and *scatter* (recompute: the rows at given
positions are overwritten, all rows are returned). Sliding-window layers keep every row here; their window is in the
mask.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from kvcomm_p2p.errors import InternalError, UsageError
from kvcomm_p2p.model.slabs import slab_memory
from kvcomm_p2p.protocol.anchors import KVLayout


class LayerRepair(Protocol):
    """Something that corrects rows which are not recomputed, from those that are, layer by layer within one forward."""

    def layer(
        self,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        positions: torch.Tensor,
        new_keys: torch.Tensor,
        new_values: torch.Tensor,
    ) -> None:
        """Called before a layer's recomputed rows are written: keys [H, T, Dk] and values [H, T, Dv] (views of the slab, as
        aligned), `positions` int64 [R], and what the model computed there, [H, R, Dk] and [H, R, Dv]. May change rows of
        keys and values; those at `positions` are overwritten afterwards. What it leaves is what this layer attends to.
        """


class _SlabLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """What transformers sees of one layer of a `KVCache`; all state lives in the owner."""

    is_croppable = True
    is_sliding = False

    def __init__(self, owner: KVCache, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Weak, or a slab of hundreds of megabytes would wait for the garbage collector to find the cycle.
        self._owner_of = weakref.ref(owner)
        self._index = index
        self.is_initialized = True

    @property
    def _owner(self) -> KVCache:
        owner = self._owner_of()
        if owner is None:
            raise InternalError("a layer was used after its cache")
        return owner

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the slab exists."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes `[1, H, R, D]` states into the slab; returns views of all rows `[1, H, T, D]`."""
        return self._owner.write_layer(self._index, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._owner.rows_after(query_length), 0

    def get_seq_length(self) -> int:
        return self._owner.length

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        if self._index == 0:
            self._owner.truncate(self._owner.length - abs(tokens_to_remove))

    def reset(self) -> None:
        self._owner.truncate(0)


class KVCache(Cache):
    """Keys `[L, 1, H, capacity, Dk]` and values `[L, 1, H, capacity, Dv]` of one sequence; rows [0, length) are valid.

    The slab may be written directly (aligned blocks go into rows at or beyond `length`, which `ModelRunner.recompute`
    then makes valid). `length` grows when a forward has passed its last layer, so a forward that fails leaves it as it
    was. Growing reallocates: views taken before are then stale. Not thread safe; one forward at a time.
    """

    def __init__(self, layout: KVLayout, capacity: int, device: torch.device | str = "cpu") -> None:
        super().__init__(layers=[_SlabLayer(self, index) for index in range(layout.layers)])
        self.layout = layout
        self.length = 0
        self._positions: torch.Tensor | None = None
        self._scatter_rows = 0
        self._repair: LayerRepair | None = None
        self._dtype = getattr(torch, layout.dtype)
        self._device = torch.device(device)
        self.keys, self.values = self._allocate(max(capacity, 1))

    @property
    def capacity(self) -> int:
        """Rows that fit without reallocation."""
        return self.keys.shape[3]

    def reserve(self, rows: int) -> None:
        """Makes room for at least `rows` rows; keeps the contents of all rows, also of those beyond `length`."""
        if rows <= self.capacity:
            return
        old_keys, old_values = self.keys, self.values
        keys, values = self._allocate(max(rows, self.capacity + self.capacity // 2))
        keys[:, :, :, : old_keys.shape[3]].copy_(old_keys)
        values[:, :, :, : old_values.shape[3]].copy_(old_values)
        self.keys, self.values = keys, values

    def truncate(self, length: int) -> None:
        """Forgets rows at and beyond `length` (a larger value changes nothing)."""
        self.length = max(0, min(self.length, length))

    @contextmanager
    def scattering(self, positions: torch.Tensor, rows: int, repair: LayerRepair | None = None) -> Iterator[None]:
        """Within this context a forward over R tokens writes rows `positions` (int64 [R], ascending) and sees rows [0,
        rows), corrected by `repair`."""
        if rows > self.capacity:
            raise InternalError(f"recompute over {rows} rows, but the cache has {self.capacity}")
        self._positions, self._scatter_rows, self._repair = positions, rows, repair
        try:
            yield
        finally:
            self._positions = self._repair = None

    def rows_after(self, new_rows: int) -> int:
        """Rows that attention sees in a forward over `new_rows` tokens."""
        return self._scatter_rows if self._positions is not None else self.length + new_rows

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many rows there are besides those of the forward: some models add R to it to size a mask."""
        return self.length if self._positions is None else self._scatter_rows - self._positions.shape[0]

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """An int, or a tensor [R] when queries are scattered: what transformers adds to `arange(R)` to get
        the queries' positions."""
        if self._positions is None:
            return self.length
        return self._positions - torch.arange(self._positions.shape[0], device=self._positions.device)

    def write_layer(
        self, layer: int, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores one layer's new rows `[1, H, R, D]` and returns views `[1, H, T, D]` of all rows that attention may
        see."""
        if key_states.shape[0] != 1:
            raise InternalError("a KVCache holds one sequence; use to_dynamic() for batches")
        if self._positions is not None:
            rows = self._scatter_rows
            if self._repair is not None:
                keys, values = self.keys[layer, 0, :, :rows], self.values[layer, 0, :, :rows]
                self._repair.layer(layer, keys, values, self._positions, key_states[0], value_states[0])
            self.keys[layer, 0].index_copy_(1, self._positions, key_states[0])
            self.values[layer, 0].index_copy_(1, self._positions, value_states[0])
        else:
            rows = self.length + key_states.shape[2]
            self.reserve(rows)
            self.keys[layer, :, :, self.length : rows] = key_states
            self.values[layer, :, :, self.length : rows] = value_states
        if layer == self.layout.layers - 1:
            self.length = rows
        return self.keys[layer, :, :, :rows], self.values[layer, :, :, :rows]

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Not for beam search: raises `InternalError` naming `to_dynamic`."""
        raise InternalError("beam search needs a copy: use to_dynamic()")

    def __deepcopy__(self, memo: dict[int, Any]) -> KVCache:
        """An independent cache with the same rows."""
        copied = KVCache(self.layout, self.capacity, self._device)
        copied.keys.copy_(self.keys)
        copied.values.copy_(self.values)
        copied.length = self.length
        return copied

    def to_dynamic(self, config: PreTrainedConfig, rows: int | None = None) -> DynamicCache:
        """A transformers cache with copies of the first `rows` rows (default: all but the last), made as transformers
        would make it for this model, so that `model.generate(all ids, cache)` goes on from there."""
        rows = max(0, self.length - 1) if rows is None else rows
        cache = DynamicCache(config=config)
        if rows:
            for layer in range(self.layout.layers):
                cache.update(self.keys[layer, :, :, :rows].clone(), self.values[layer, :, :, :rows].clone(), layer)
        return cache

    def _allocate(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        # Never inference tensors: those could not be written outside inference mode, where blocks are aligned.
        with torch.inference_mode(False):
            shape = (self.layout.layers, 1, self.layout.kv_heads, rows)
            return self._empty((*shape, self.layout.key_dim)), self._empty((*shape, self.layout.value_dim))

    def _empty(self, shape: tuple[int, ...]) -> torch.Tensor:
        if self._device.type == "cpu":
            return slab_memory.empty(shape, self._dtype)
        return torch.empty(shape, dtype=self._dtype, device=self._device)


class OpaqueCache(DynamicCache):
    """The model's own cache, for models whose KV cannot be shared: supports prefill and decode only."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        self.length = 0

    def reserve(self, rows: int) -> None:
        """Grows by itself."""

    def truncate(self, length: int) -> None:
        """Forgets tokens at and beyond `length`. Raises `UsageError` when a layer's state cannot go back."""
        if length >= self.length:
            return
        if any(type(layer) is not DynamicLayer for layer in self.layers):
            raise UsageError("this model's layers keep a running state that cannot be taken back: use a new cache")
        self.crop(length - self.length)
        self.length = length

    def to_dynamic(self, config: PreTrainedConfig, rows: int | None = None) -> DynamicCache:
        """An empty transformers cache: `model.generate` then prefills for itself, which is right for every
        architecture."""
        return DynamicCache(config=config)


class CapturedLayer0(Exception):
    """Ends a forward once layer 0's keys and values `[H, n, D]` are known."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.keys = keys
        self.values = values


class Layer0Capture(Cache):
    """An empty cache whose first update raises `CapturedLayer0`."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise CapturedLayer0(key_states[0], value_states[0])
