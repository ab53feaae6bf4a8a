"""What aligned KV was off by, when the truth became known: kept to correct KV that nobody recomputes.

A deviation is `true - aligned`: what must be *added* to aligned KV. It is observed whenever a run that could have been
reused was prefilled in full. That of keys is un-rotated to position 0, the one frame in which rows compare. Layer 0
depends on no context, so its deviation is zero and is not kept. Deviations carry content of the prompt they were seen
in: `may_correct` says what they may flow into.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from kvcomm_p2p.kernels.rope_shift import rope_shift
from kvcomm_p2p.model.spec import RotaryGeometry
from kvcomm_p2p.protocol.anchors import Visibility
from kvcomm_p2p.protocol.ids import ModelId

FEATURE_DEPTHS = (0.0, 0.1, 8 / 30)
"""Depths of the layers whose content tells tokens apart: layers 0, 3 and 8 of 30."""


@dataclass(frozen=True, slots=True, eq=False)
class Deviation:
    """What n consecutive tokens were off by under one kind of prefix change.

    `features` [n, F] (see `features`), of the aligned KV. `keys` [L-1, H, n, Dk] and `values` [L-1, H, n, Dv]: true -
    aligned of layers 1 to L-1, what turns un-rotated to position 0; rows of one token lie together in memory. All in
    half precision, read-only by agreement. `edge`: digest of the kind of prefix change; free for the caller, compared
    for equality only. `group`: tag of the group for `Visibility.GROUP`, otherwise empty.
    """

    features: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    model_id: ModelId
    edge: bytes
    visibility: Visibility
    group: bytes

    @property
    def tokens(self) -> int:
        return self.features.shape[0]

    @property
    def kv_bytes(self) -> int:
        """Bytes that keeping it holds in memory."""
        return sum(part.untyped_storage().nbytes() for part in (self.features, self.keys, self.values))


def observe(
    aligned: tuple[torch.Tensor, torch.Tensor],
    true: tuple[torch.Tensor, torch.Tensor],
    start: int,
    rotary: RotaryGeometry | None,
    *,
    model_id: ModelId,
    edge: bytes,
    visibility: Visibility,
    group: bytes = b"",
) -> Deviation:
    """The deviation of a run at positions start, start + 1, ...: keys [L, H, n, Dk] and values [L, H, n, Dv] as they were
    aligned, and as full prefill gave them. Mutates nothing, copies what it keeps.

    Stored in float16, whose rounding is a thousandth of what is left uncorrected anyway; in bfloat16 what does not fit
    into its range. Raises ValueError for different shapes, or a difference that is not finite.
    """
    for name, one, other in zip(("keys", "values"), aligned, true, strict=True):
        if one.shape != other.shape or one.ndim != 4:
            raise ValueError(f"aligned {name} are {tuple(one.shape)}, true ones {tuple(other.shape)}")
    difference = [whole[1:].float() - part[1:].float() for part, whole in zip(aligned, true, strict=True)]
    if not all(bool(part.isfinite().all()) for part in difference):
        raise ValueError("aligned or true KV is not finite: nothing can be learned from it")
    turned, kept = (1, 0) if rotary and rotary.in_values else (0, 1)
    frequencies = rotary_frequencies(rotary)
    if frequencies.ndim == 2:
        frequencies = frequencies[1:]
    positions = torch.arange(start, start + aligned[0].shape[2], device=aligned[0].device)
    out = [torch.empty_like(part) for part in difference]
    interleaved = rotary is not None and rotary.interleaved
    rope_shift(difference[turned], difference[kept], None, -positions, frequencies, interleaved, out[turned], out[kept])
    seen = features(*aligned, rotary)
    return Deviation(_half(seen), _token_major(out[0]), _token_major(out[1]), model_id, edge, visibility, group)


def features(keys: torch.Tensor, values: torch.Tensor, rotary: RotaryGeometry | None) -> torch.Tensor:
    """What tokens are compared by, float32 [n, F]: the part of aligned KV (keys [L, H, n, Dk], values [L, H, n, Dv]) that
    does not turn, of a few early layers, each with a root mean square of 1 per token.

    So the distance of two tokens has a meaning of its own: 0 the same, sqrt(2) unrelated, 2 opposite.
    """
    part = keys if rotary and rotary.in_values else values
    layers = sorted({round(depth * part.shape[0]) for depth in FEATURE_DEPTHS if part.shape[0]})
    rows = [part[min(layer, part.shape[0] - 1)].float().permute(1, 0, 2).flatten(1) for layer in layers]
    return torch.cat([row / row.pow(2).mean(dim=1, keepdim=True).sqrt().clamp_min(1e-6) for row in rows], dim=1)


def distances(query: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """Root mean square difference of features, float32 [n, N], between tokens [n, F] and [N, F]: in [0, 2]."""
    return torch.cdist(query.float(), stored.float()) / math.sqrt(max(1, query.shape[1]))


@lru_cache(maxsize=8)
def rotary_frequencies(rotary: RotaryGeometry | None) -> torch.Tensor:
    """float64 [R/2], or [L, R/2] where layers differ; empty where nothing turns. Must not be written."""
    with torch.inference_mode(False):
        return torch.tensor((rotary.layers or rotary.inv_freq) if rotary else (), dtype=torch.float64)


def may_correct(deviation: Deviation, visibility: Visibility, group: bytes) -> bool:
    """Whether KV of this visibility may be corrected by it: what is corrected takes on content of the deviation, so it must
    be for nobody who might not see that.

    Public deviations correct everything; those of a group correct KV of the same group, and private KV of a request
    that names this group; private ones, which never leave the node, correct private KV.
    """
    if deviation.visibility is Visibility.PUBLIC:
        return True
    if deviation.visibility is Visibility.GROUP:
        return visibility is not Visibility.PUBLIC and deviation.group == group
    return visibility is Visibility.PRIVATE


def strictest(accesses: Iterable[tuple[Visibility, bytes]]) -> tuple[Visibility, bytes]:
    """(visibility, group) of what depends on all of these; public for none. Two groups have only "private" in common.

    Private KV keeps the tag of the one group that is named before it, as `may_correct` takes it.
    """
    named = tuple(accesses)
    groups = sorted({group for visibility, group in named if visibility is Visibility.GROUP})
    if len(groups) > 1:
        return Visibility.PRIVATE, b""
    return max((visibility for visibility, _ in named), default=Visibility.PUBLIC), b"".join(groups)


class DeviationMemory:
    """Deviations that were seen, within `bytes_max` (exactly, by `Deviation.kv_bytes`). Thread safe.

    Evicts what has corrected least per token it holds; every eviction raises where newcomers and uses count from, so that
    what was useful long ago goes too (least frequently used with dynamic ageing). Ties: the oldest first.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._held: list[_Held] = []
        self._bytes = 0
        self._floor = 0.0

    @property
    def bytes_max(self) -> int:
        """The budget; 0: nothing is ever kept."""
        return self._bytes_max

    @property
    def kv_bytes(self) -> int:
        """Bytes held now: at most `bytes_max`."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._held)

    def add(self, deviation: Deviation) -> bool:
        """Keep it, evicting others to make room. False when it is empty or alone larger than the budget."""
        size = deviation.kv_bytes
        if deviation.tokens == 0 or size > self._bytes_max:
            return False
        with self._lock:
            while self._bytes + size > self._bytes_max:
                index = min(range(len(self._held)), key=lambda i: self._held[i].priority)
                evicted = self._held.pop(index)
                self._bytes -= evicted.size
                self._floor = evicted.priority
            self._held.append(_Held(deviation, size, 1.0, self._floor + 1.0))
            self._bytes += size
        return True

    def candidates(self, model_id: ModelId, edge: bytes, visibility: Visibility, group: bytes) -> list[Deviation]:
        """What may correct KV of this model, kind of prefix change and visibility, oldest first. No use by itself: see
        `credit`."""
        with self._lock:
            return [
                held.deviation
                for held in self._held
                if held.deviation.model_id == model_id
                and held.deviation.edge == edge
                and may_correct(held.deviation, visibility, group)
            ]

    def tokens_by_edge(self, model_id: ModelId, visibility: Visibility, group: bytes) -> dict[bytes, int]:
        """Per kind of prefix change how many remembered tokens may correct KV of this model and visibility."""
        tokens: dict[bytes, int] = {}
        with self._lock:
            for held in self._held:
                deviation = held.deviation
                if deviation.model_id == model_id and may_correct(deviation, visibility, group):
                    tokens[deviation.edge] = tokens.get(deviation.edge, 0) + deviation.tokens
        return tokens

    def credit(self, deviations: Sequence[Deviation], tokens: Sequence[float]) -> None:
        """Each of these has corrected so many tokens (a share of each, where several did). Ignores what is held no more."""
        with self._lock:
            for deviation, corrected in zip(deviations, tokens, strict=True):
                held = next((held for held in self._held if held.deviation is deviation), None)
                if held is not None and corrected > 0:
                    held.uses += corrected / deviation.tokens
                    held.priority = self._floor + held.uses

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._held.clear()
            self._bytes = 0

    def discard(self, deviations: Sequence[Deviation]) -> None:
        """Forget these; ignores what is held no more."""
        with self._lock:
            for deviation in deviations:
                index = next((i for i, held in enumerate(self._held) if held.deviation is deviation), None)
                if index is not None:
                    self._bytes -= self._held.pop(index).size


@dataclass(slots=True)
class _Held:
    """`uses`: tokens corrected per own token, 1 to begin with."""

    deviation: Deviation
    size: int
    uses: float
    priority: float


def _half(tensor: torch.Tensor) -> torch.Tensor:
    half = tensor.half()
    return half if bool(half.isfinite().all()) else tensor.bfloat16()


def _token_major(tensor: torch.Tensor) -> torch.Tensor:
    """A half-precision copy of [L, H, n, D] whose rows of one token lie together, so that tokens are gathered fast."""
    return _half(tensor.permute(2, 0, 1, 3).contiguous()).permute(1, 2, 0, 3)
