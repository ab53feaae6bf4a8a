"""Anchors that need no model: contents, ids and digests follow from a number, so every process can check what it gets.

Importing this module loads no torch.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcomm_p2p.protocol.anchors import BLOCK_TOKENS, AnchorMeta, BlockHandle, BlockKey, HeldAnchor, Visibility
from kvcomm_p2p.protocol.ids import AnchorId, ChainHash, ModelId, SequenceId
from kvcomm_p2p.protocol.lookup import Lookup
from kvcomm_p2p.store import BlockStore

MODEL = ModelId(b"cluster-no-model")
FINGERPRINTS = 21
"""As winnowing selects from 512 tokens on average."""

DIGESTS_KEPT_MAX = 1000


@dataclass(frozen=True, slots=True)
class Shape:
    """`blocks` whole blocks of `block_kv_bytes` bytes (a multiple of BLOCK_TOKENS). The default weighs as much in gossip as
    512 tokens and next to nothing in memory."""

    blocks: int = 16
    block_kv_bytes: int = BLOCK_TOKENS

    @property
    def kv_bytes(self) -> int:
        return self.blocks * self.block_kv_bytes


def content(number: int, index: int, shape: Shape) -> bytes:
    """The bytes of a block."""
    return np.random.default_rng([number, index]).bytes(shape.block_kv_bytes)


def describe(number: int, shape: Shape) -> AnchorMeta:
    """What is gossiped about anchor `number`."""
    digest = hashlib.blake2b(number.to_bytes(16, "big"), digest_size=64).digest()
    more = np.random.default_rng([number, shape.blocks]).integers(0, 2**32, FINGERPRINTS - 1, dtype=np.uint32)
    fingerprints = np.sort(np.append(more, fingerprint(number))).astype("<u4")
    return AnchorMeta(
        anchor_id=AnchorId(number.to_bytes(16, "big")),
        model_id=MODEL,
        sequence_id=SequenceId(digest[:8]),
        start=0,
        end=shape.blocks * BLOCK_TOKENS,
        chain_end=ChainHash(digest[8:24]),
        fingerprints=fingerprints.tobytes(),
        hops=0,
        visibility=Visibility.PUBLIC,
        group=b"",
        kv_bytes=shape.kv_bytes,
    )


def number_of(anchor_id: AnchorId) -> int:
    return int.from_bytes(anchor_id, "big")


def fingerprint(number: int) -> np.uint32:
    """One that this anchor has, and hardly any other."""
    digest = hashlib.blake2b(number.to_bytes(16, "big"), digest_size=4, person=b"fingerprint").digest()
    return np.uint32(int.from_bytes(digest, "little"))


def lookup(number: int) -> Lookup:
    """The question that finds anchor `number`."""
    return Lookup(MODEL, (), np.array([fingerprint(number)], dtype=np.uint32))


def token_ids(shape: Shape) -> npt.NDArray[np.uint32]:
    ids = np.arange(shape.blocks * BLOCK_TOKENS, dtype=np.uint32)
    ids.flags.writeable = False
    return ids


class AnchorMaker:
    """Makes anchors whose blocks lie in `store`. Anchors of the default shape share one block among all."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._small = store.put(bytes(BLOCK_TOKENS))
        self._known: dict[tuple[int, Shape], tuple[bytes, ...]] = {}
        self._small_digest = hashlib.sha256(bytes(BLOCK_TOKENS)).digest()

    def make(self, number: int, shape: Shape) -> HeldAnchor:
        """To be published: whoever does owns one reference to each handle."""
        if shape == Shape():
            for _ in range(shape.blocks):
                self._store.retain(self._small)
            handles, digests = (self._small,) * shape.blocks, (self._small_digest,) * shape.blocks
        else:
            contents = [content(number, index, shape) for index in range(shape.blocks)]
            composed = self._store.compose([shape.block_kv_bytes] * shape.blocks)
            for buffer, each in zip(composed.buffers, contents, strict=True):
                buffer[:] = each
            composed.finish()
            handles = composed.put()
            digests = tuple(hashlib.sha256(each).digest() for each in contents)
        return HeldAnchor(describe(number, shape), token_ids(shape), handles, digests)

    def wants(self, number: int, shape: Shape) -> list[tuple[BlockKey, int, bytes]]:
        """What `Driver.fetch` takes, for the whole anchor. Costs a moment for large ones the first time."""
        anchor_id = AnchorId(number.to_bytes(16, "big"))
        return [(BlockKey(anchor_id, i), shape.block_kv_bytes, d) for i, d in enumerate(self._digests(number, shape))]

    def pulled(self, number: int, shape: Shape, handles: tuple[BlockHandle, ...]) -> HeldAnchor:
        """The anchor of blocks that were pulled; whoever publishes it takes over their references."""
        return HeldAnchor(describe(number, shape), token_ids(shape), handles, self._digests(number, shape))

    def _digests(self, number: int, shape: Shape) -> tuple[bytes, ...]:
        if shape == Shape():
            return (self._small_digest,) * shape.blocks
        if (number, shape) not in self._known:
            if len(self._known) >= DIGESTS_KEPT_MAX:
                self._known.clear()
            digests = tuple(hashlib.sha256(content(number, index, shape)).digest() for index in range(shape.blocks))
            self._known[number, shape] = digests
        return self._known[number, shape]
