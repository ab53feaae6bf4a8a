"""Names for content: chain hashes, anchor ids, sequence ids and group tags.

All are BLAKE2b under the cluster's content key, so that nobody outside can test guesses of what is cached, and equal on
every machine: tokens are hashed as little-endian u32, integers as little-endian u64, and every use has its own
personalisation (domain).

The chain: h(0) = digest(model id), h(i + 1) = digest(h(i), tokens of block i). So h(i) stands for the model and all
tokens from position 0 to i * BLOCK_TOKENS.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from kvcomm_p2p.protocol.anchors import BLOCK_TOKENS, NO_CHAIN
from kvcomm_p2p.protocol.ids import (
    ANCHOR_ID_BYTES,
    CHAIN_HASH_BYTES,
    SEQUENCE_ID_BYTES,
    AnchorId,
    ChainHash,
    ModelId,
    SequenceId,
)

TokenIds = npt.NDArray[np.uint32]

GROUP_TAG_BYTES = 8
KEY_BYTES_MAX = 64

_BLOCK_BYTES = BLOCK_TOKENS * 4


def keyed_digest(domain: bytes, key: bytes, size: int, *parts: bytes) -> bytes:
    """BLAKE2b of `size` bytes over `parts` under `key` (1 to 64 bytes) in `domain` (up to 16 bytes).

    Parts are concatenated: give only parts of fixed length, except for the last. Raises ValueError for a bad key.
    """
    if not 1 <= len(key) <= KEY_BYTES_MAX:
        raise ValueError(f"content key must have 1 to {KEY_BYTES_MAX} bytes, not {len(key)}")
    digest = blake2b(digest_size=size, key=key, person=domain)
    for part in parts:
        digest.update(part)
    return digest.digest()


class ChainHasher:
    """Chain hashes of a sequence that grows. Holds the last hash and the tokens of the block that is not full yet."""

    def __init__(self, key: bytes, model_id: ModelId, *, behind: ChainHash = NO_CHAIN) -> None:
        """`key`: content key, 1 to 64 bytes. `behind`: the chain hash at a block boundary, to go on from there (`tokens`
        then counts from there). Raises ValueError for another length of the key.
        """
        self._key = key
        self._last: bytes = behind or keyed_digest(b"kvcomm root", key, CHAIN_HASH_BYTES, model_id)
        self._tail = b""
        self._tokens = 0

    @property
    def tokens(self) -> int:
        """Tokens seen so far."""
        return self._tokens

    def extend(self, token_ids: TokenIds) -> list[ChainHash]:
        """Append tokens (uint32 [n], any n) and return the hashes of the block boundaries that this reached,
        ascending.
        """
        data = self._tail + token_bytes(token_ids)
        whole = len(data) - len(data) % _BLOCK_BYTES
        hashes: list[ChainHash] = []
        last = self._last
        for at in range(0, whole, _BLOCK_BYTES):
            last = keyed_digest(b"kvcomm block", self._key, CHAIN_HASH_BYTES, last, data[at : at + _BLOCK_BYTES])
            hashes.append(ChainHash(last))
        self._last, self._tail = last, data[whole:]
        self._tokens += len(token_ids)
        return hashes

    def prefix_digest(self) -> bytes:
        """16 bytes that stand for all tokens seen: the chain hash on the block grid, else the tail hashed on top of
        it.
        """
        if not self._tail:
            return self._last
        return keyed_digest(b"kvcomm tail", self._key, CHAIN_HASH_BYTES, self._last, self._tail)

    def copy(self) -> ChainHasher:
        """An independent hasher in the same state."""
        twin = object.__new__(ChainHasher)
        twin._key, twin._last, twin._tail, twin._tokens = self._key, self._last, self._tail, self._tokens
        return twin


def chain_hashes(token_ids: TokenIds, key: bytes, model_id: ModelId) -> list[ChainHash]:
    """Chain hash at every block boundary 32, 64, ... <= T of `token_ids` (uint32 [T])."""
    return ChainHasher(key, model_id).extend(token_ids)


def prefix_digest(token_ids: TokenIds, key: bytes, model_id: ModelId) -> bytes:
    """16 bytes that stand for the model and exactly these tokens (uint32 [T], any T) from position 0."""
    hasher = ChainHasher(key, model_id)
    hasher.extend(token_ids)
    return hasher.prefix_digest()


def anchor_id(prefix: bytes, start: int, end: int, key: bytes, variant: bytes = b"") -> AnchorId:
    """Name of the KV of positions [start, end) behind the tokens that `prefix` (prefix_digest of [0, end)) stands for.

    `variant` is empty for exact KV, so that exact copies have one name everywhere. KV with repairs behind it depends on how
    it came about: its variant is a nonce of its maker's, kept as long as the same KV is continued.
    """
    return AnchorId(keyed_digest(b"kvcomm anchor", key, ANCHOR_ID_BYTES, prefix, _u64(start), _u64(end), variant))


def sequence_id(prefix: bytes, key: bytes, variant: bytes = b"") -> SequenceId:
    """Name of a sequence, from the prefix_digest of its tokens when it was first published. `variant`: the
    maker's nonce for KV that is not exact.
    """
    return SequenceId(keyed_digest(b"kvcomm sequence", key, SEQUENCE_ID_BYTES, prefix, variant))


def group_tag(name: str, key: bytes) -> bytes:
    """8 bytes by which members of a group know its anchors. Raises ValueError for an empty name."""
    if not name:
        raise ValueError("a group needs a name")
    return keyed_digest(b"kvcomm group", key, GROUP_TAG_BYTES, name.encode("utf-8", "surrogatepass"))


def token_bytes(token_ids: TokenIds) -> bytes:
    """Canonical bytes of token ids: little-endian u32."""
    return np.ascontiguousarray(token_ids, dtype="<u4").tobytes()


def _u64(value: int) -> bytes:
    return value.to_bytes(8, "little")
