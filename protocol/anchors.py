"""What is shared: the shape of KV, blocks of it, and the metadata that tells peers who holds what.

Dims: `L` layers, `H` kv-heads, `T` tokens, `D` head dim.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcomm_p2p.protocol.ids import AnchorId, ChainHash, ModelId, SequenceId

BLOCK_TOKENS = 32
"""Tokens per block. Blocks lie on the 32-grid of their sequence; the last of a sequence may be partial."""

ANCHOR_TOKENS_MAX = 512
"""Longest anchor that is published; longer sequences become several anchors that follow each other on the block grid.
"""

CONTENT_TOKENS_MIN = 32
"""Shorter anchors have no SimHash of their content: so few tokens have no likeness that could be relied on."""

CONTEXT_TOKENS = 128
"""Tokens from the beginning of a sequence, and right before an anchor, whose SimHashes say where it was computed."""

HOPS_PUBLISHED_MAX = 1
"""KV with more repairs behind it than this is never published."""

LANDMARKS_DEFAULT = 4
LANDMARKS_MAX = 32
"""Landmarks of one anchor that are used: the smallest."""

NO_CHAIN = ChainHash(b"")
"""In place of a chain hash: none is advertised."""

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of the KV of one token: the same for all layers.

    A block of n tokens is `keys [L, H, n, key_dim]` followed by `values [L, H, n, value_dim]`, C-contiguous, in
    `dtype`, keys as the model caches them (after rotary embedding, at the positions where they were computed).
    """

    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: str

    @property
    def token_bytes(self) -> int:
        return self.layers * self.kv_heads * (self.key_dim + self.value_dim) * DTYPE_BYTES[self.dtype]

    def block_bytes(self, tokens: int) -> int:
        """Bytes of a block of `tokens` tokens (1 to BLOCK_TOKENS)."""
        return tokens * self.token_bytes

    def int8_bytes(self, tokens: int) -> int:
        """Bytes of a block of `tokens` tokens that travels as int8 (`net.encoding`): per layer and head two float32 scales, a
        byte for each key channel and for each token, and a byte for each number."""
        numbers = tokens * (self.key_dim + self.value_dim)
        return self.layers * self.kv_heads * (8 + self.key_dim + tokens + numbers)

    @property
    def int8_share(self) -> float:
        """What a whole block comes to as int8, of its own bytes."""
        return self.int8_bytes(BLOCK_TOKENS) / max(1, self.block_bytes(BLOCK_TOKENS))

    @property
    def int8_smaller(self) -> bool:
        """Whether every block becomes smaller so, the shortest too."""
        return self.int8_bytes(1) < self.block_bytes(1)


class Visibility(enum.IntEnum):
    """Who may learn of an anchor and pull it. A higher value is stricter; `max` gives the strictest."""

    PUBLIC = 0
    GROUP = 1
    PRIVATE = 2


class BlockHandle(NamedTuple):
    """Where a block's bytes are: opaque to the protocol. A recycled slot gets a new generation, so a stale handle is
    noticed.
    """

    store: int
    slot: int
    generation: int


class BlockKey(NamedTuple):
    """Names a block anywhere in the cluster: block `index` (0-based, within the anchor) of an anchor."""

    anchor_id: AnchorId
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here


@dataclass(frozen=True, slots=True)
class AnchorMeta:
    """What gossip spreads about one anchor: about 190 bytes for 512 tokens. Never holds tokens or KV.

    `start` and `end` are positions in the sequence in which the KV was computed; `start` lies on the block grid.
    `chain_end` is the chain hash at `end`, empty unless every token of [0, end) is exact (`hops == 0`) and `end` lies
    on the block grid: chain hashes are advertised for wholly exact prefixes only. `fingerprints` are the winnowed
    32-bit keyed fingerprints whose k-gram begins inside [start, end), and those of short contents that begin there,
    ascending, as little-endian u32 bytes. `hops` counts repairs behind this KV: 0 exact, 1 repaired once. `group` is
    the 8-byte keyed tag of the group for `Visibility.GROUP`, otherwise empty.

    Where it was computed: `chain_start` is the chain hash at `start`, empty for start 0 and unless every token of
    [0, start) is exact, so it equals the `chain_end` of whatever may stand before. `context_first` and `context_last`
    are 64-bit keyed SimHashes of the first and of the last min(CONTEXT_TOKENS, start) tokens before `start`; 0 for
    start 0 (computed behind nothing: bare), and where it is not known. `content` is the SimHash of the anchor's own
    tokens, 0 for fewer than CONTENT_TOKENS_MIN.
    """

    anchor_id: AnchorId
    model_id: ModelId
    sequence_id: SequenceId
    start: int
    end: int
    chain_end: ChainHash
    fingerprints: bytes
    hops: int
    visibility: Visibility
    group: bytes
    kv_bytes: int
    chain_start: ChainHash = NO_CHAIN
    content: int = 0
    context_first: int = 0
    context_last: int = 0

    @property
    def tokens(self) -> int:
        return self.end - self.start

    @property
    def blocks(self) -> int:
        return -(-self.tokens // BLOCK_TOKENS)

    def block_tokens(self, index: int) -> int:
        """Number of tokens in block `index` (the last block may be partial)."""
        return min(BLOCK_TOKENS, self.tokens - index * BLOCK_TOKENS)

    def block_bytes(self, index: int) -> int:
        """Bytes of block `index`."""
        return self.kv_bytes // self.tokens * self.block_tokens(index)


@dataclass(frozen=True, slots=True)
class HeldAnchor:
    """An anchor that this node holds: metadata, its token ids, and one handle and SHA-256 digest per block.

    `token_ids` is uint32 of shape [end - start] and read-only. `landmarks` are the few fingerprints by which others find
    it where no node knows all anchors (`planning.landmarks`): the minimum of every stretch, and names of contents. Empty:
    the smallest LANDMARKS_DEFAULT of its fingerprints stand in.
    """

    meta: AnchorMeta
    token_ids: npt.NDArray[np.uint32]
    handles: tuple[BlockHandle, ...]
    digests: tuple[bytes, ...]
    landmarks: tuple[int, ...] = ()


class MissReason(str, enum.Enum):
    """Why something was not reused. Shown to users; every reason is explained in docs/troubleshooting.md."""

    NOT_FOUND = "not_found"
    """No reachable holder has it (or may show it: private and foreign anchors answer the same)."""
    MODEL_MISMATCH = "model_mismatch"
    """Peers hold anchors, but for a different ModelId (weights, dtype, tokenizer, rotary parameters, adapter)."""
    BUSY = "busy"
    """The holder serves its maximum of uploads."""
    STALLED = "stalled"
    """No progress for `pull_stall_timeout_s`."""
    DEADLINE = "deadline"
    """The overall deadline passed."""
    UNREACHABLE = "unreachable"
    """The holder left, was declared dead, or refused the connection."""
    DIGEST_MISMATCH = "digest_mismatch"
    """Bytes arrived whole but are not what the holder announced."""
    LENGTH_MISMATCH = "length_mismatch"
    """The holder sent too few, too many or misplaced bytes."""
    LAYER0_MISMATCH = "layer0_mismatch"
    """Layer-0 KV differs from what the token ids give: wrong model, position, tokens or poisoned bytes."""
    NOT_FINITE = "not_finite"
    """The block holds NaN or infinity."""
    TOKENS_MISMATCH = "tokens_mismatch"
    """The token ids the holder sent do not match the metadata."""
    RESIDUAL = "residual"
    """The guard: recomputed tokens differ from the aligned ones by more than the model's profile allows."""
    DIVERGENCE = "divergence"
    """The copy was computed in a context so different that no measured repair keeps the divergence budget."""
    TOO_SHORT = "too_short"
    """The run is shorter than the minimum, or recomputing it is cheaper than pulling it."""
    COST = "cost"
    """The cost model expects recomputing to be faster."""
    EXACT_ONLY = "exact_only"
    """The mode, the role or the model allows exact reuse only, and this run is not behind the same prefix."""
    CANCELLED = "cancelled"
    EVICTED = "evicted"
    """Held when asked, gone when read."""
    SHUTDOWN = "shutdown"


@dataclass(frozen=True, slots=True)
class Miss:
    """A normal outcome: nothing was found, and why."""

    reason: MissReason
    detail: str = ""
