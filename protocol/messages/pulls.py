"""Pulling blocks."""

from __future__ import annotations

import enum
from typing import Annotated, Union

from msgspec import Meta, Struct

from kvcomm_p2p.protocol.messages.fields import (
    BLOCK_BYTES_MAX,
    CHUNK_BYTES_MAX,
    CHUNK_BYTES_MIN,
    PULL_BLOCKS_MAX,
    REFERRALS_MAX,
    RETRY_AFTER_S_MAX,
    SHARED_BYTES_MAX,
    AnchorIdField,
    BlockBytesField,
    BlockIndexField,
    CounterField,
    DigestField,
    NodeIdField,
    OrdinalField,
    SeqField,
    require,
)


class Encoding(enum.IntEnum):
    """How the bytes of pulled blocks travel."""

    RAW = 0
    INT8 = 1
    """As a quarter of float32, approximately (`net.encoding`); each block after an `EncodedBlock`."""


class PullBlock(Struct, frozen=True, array_like=True):
    """A block to pull and the size that the puller expects. `offset`: its first bytes are there already (an earlier
    pull was cut off), send the rest. `encoded_bytes`: what it must come to as INT8, 0 for RAW; `offset` counts what travels.
    """

    anchor_id: AnchorIdField
    index: BlockIndexField
    kv_bytes: BlockBytesField
    offset: Annotated[int, Meta(ge=0, lt=BLOCK_BYTES_MAX)] = 0
    encoded_bytes: Annotated[int, Meta(ge=0, lt=BLOCK_BYTES_MAX)] = 0

    def __post_init__(self) -> None:
        require(self.encoded_bytes < self.kv_bytes, "a block does not become smaller")
        require(self.offset < self.wire_bytes, "offset is behind the block")

    @property
    def wire_bytes(self) -> int:
        """Bytes of all of it, as it travels."""
        return self.encoded_bytes or self.kv_bytes


class Pull(Struct, frozen=True, array_like=True, tag=11):
    """Send me these blocks, in this order. `credit_bytes`: how much may be on the way before I say Credit. `shared`: the
    holder may hand blocks over in shared memory instead of sending them. `chunk_bytes`: no chunk is to be larger, so that I
    see them coming over a slow link.

    The block that crosses the limit is still sent whole, so a window smaller than a block cannot lock up.
    """

    pull_id: CounterField
    blocks: Annotated[tuple[PullBlock, ...], Meta(min_length=1, max_length=PULL_BLOCKS_MAX)]
    credit_bytes: SeqField
    encoding: Encoding = Encoding.RAW
    shared: bool = False
    chunk_bytes: Annotated[int, Meta(ge=CHUNK_BYTES_MIN, le=CHUNK_BYTES_MAX)] = CHUNK_BYTES_MAX

    def __post_init__(self) -> None:
        encoded = self.encoding is not Encoding.RAW
        require(all(bool(block.encoded_bytes) is encoded for block in self.blocks), "blocks do not fit the encoding")
        require(not (encoded and self.shared), "what stands in shared memory is not encoded")


class Credit(Struct, frozen=True, array_like=True, tag=12):
    """`received` bytes of this pull arrived in all: that many more may follow. Covers everything: the pull is over."""

    pull_id: CounterField
    received: SeqField


class CancelPull(Struct, frozen=True, array_like=True, tag=13):
    """Stop sending, I am no longer interested."""

    pull_id: CounterField


class Chunk(Struct, frozen=True, array_like=True, tag=14):
    """Header of a bulk frame: bytes [offset, offset + length) of the block at position `ordinal` of the pull follow.

    The driver turns it into `ChunkReceived`; it never reaches a node as a message.
    """

    pull_id: CounterField
    ordinal: OrdinalField
    offset: Annotated[int, Meta(ge=0, lt=BLOCK_BYTES_MAX)]
    length: BlockBytesField

    def __post_init__(self) -> None:
        require(self.offset + self.length <= BLOCK_BYTES_MAX, "chunk ends behind the largest block")


class EncodedBlock(Struct, frozen=True, array_like=True, tag=26):
    """The block at position `ordinal` of an encoded pull follows; `digest` is the SHA-256 of all of it as it travels."""

    pull_id: CounterField
    ordinal: OrdinalField
    digest: DigestField


class SharedBlock(Struct, frozen=True, array_like=True):
    """All `length` bytes of the block at position `ordinal` of a pull stand at `offset` of sealed memory that the holder
    has open as `descriptor`. `file_id` (the inode) names the memory itself, because numbers of descriptors are used again.
    """

    ordinal: OrdinalField
    descriptor: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    file_id: CounterField
    offset: Annotated[int, Meta(ge=0, le=SHARED_BYTES_MAX)]
    length: BlockBytesField

    def __post_init__(self) -> None:
        require(self.offset + self.length <= SHARED_BYTES_MAX, "block ends behind the largest shared memory")


class SharedBlocks(Struct, frozen=True, array_like=True, tag=24):
    """In place of their chunks: where these blocks stand in the memory of process `pid` (as the holder's process table
    numbers it). They stay there until they are credited."""

    pull_id: CounterField
    pid: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    blocks: Annotated[tuple[SharedBlock, ...], Meta(min_length=1, max_length=PULL_BLOCKS_MAX)]


class PullFailedReason(enum.IntEnum):
    """Why blocks do not come."""

    NOT_FOUND = 1
    """Not held, not for you, or not of that size; they look the same."""
    BUSY = 2
    """The maximum of uploads is running; the whole pull is refused."""
    EVICTED = 3
    """Held when the pull began, gone when it was to be read."""
    NOT_FINITE = 4
    """Cannot be encoded, since it holds NaN or infinity."""


class PullFailed(Struct, frozen=True, array_like=True, tag=15):
    """The block at position `ordinal` does not come; None: nor does anything else of this pull.

    `retry_after_s` (seconds, 0: no advice) comes with BUSY, and so do `referrals`: peers that got it here lately.
    """

    pull_id: CounterField
    ordinal: Union[OrdinalField, None]
    reason: PullFailedReason
    retry_after_s: Annotated[float, Meta(ge=0.0, le=RETRY_AFTER_S_MAX)] = 0.0
    referrals: Annotated[tuple[NodeIdField, ...], Meta(max_length=REFERRALS_MAX)] = ()
