"""The wire vocabulary: every message a node can send, with the limits of each field.

A message is a frozen array-like Struct whose first wire element is its integer tag; fields that a newer version appends
are ignored by an older reader. Constructing one checks what holds between its fields (`ValueError`), so neither we nor
a peer can put an illegal message together. docs/protocol.md explains the exchanges; `wire` makes bytes of them.

Tags: 1-4 membership, 5-7 gossip, 8-10 token ids, 11-15 pulls. 16-19 are reserved for failure detection by probes (ping,
indirect ping and their answers).
"""

from __future__ import annotations

import enum
import struct
from dataclasses import fields
from typing import Annotated, Union

from msgspec import Meta, Struct

from kvcomm_p2p.protocol.anchors import ANCHOR_TOKENS_MAX, BLOCK_TOKENS, CONTENT_TOKENS_MIN, AnchorMeta, Visibility
from kvcomm_p2p.protocol.ids import (
    ANCHOR_ID_BYTES,
    CHAIN_HASH_BYTES,
    DIGEST_BYTES,
    MODEL_ID_BYTES,
    NODE_ID_BYTES,
    SEQUENCE_ID_BYTES,
    AnchorId,
    ChainHash,
    ModelId,
    NodeId,
    SequenceId,
)

PROTOCOL_VERSION = 1
"""What this code speaks. The frame's version byte is the oldest version that can read the frame."""

CLUSTER_ID_BYTES = 16
GROUP_TAG_BYTES = 8
GROUPS_MAX = 32
NAME_CHARS_MAX = 64
ADDRESS_CHARS_MAX = 256
DETAIL_CHARS_MAX = 200
MEMBERS_PER_MESSAGE_MAX = 1024
DIGEST_ENTRIES_MAX = 4096
DELTA_ENTRIES_MAX = 4096
PULL_BLOCKS_MAX = 1024
POSITION_MAX = 2**24
"""Longest sequence, in tokens."""
BLOCK_BYTES_MAX = 2**28
FINGERPRINT_BYTES = 4
SIMHASHES_BYTES = 3 * 8
COUNTER_MAX = 2**63 - 1
HOPS_MAX = 255
RETRY_AFTER_S_MAX = 60.0
BLOCKS_PER_ANCHOR_MAX = ANCHOR_TOKENS_MAX // BLOCK_TOKENS

_NodeId = Annotated[NodeId, Meta(min_length=NODE_ID_BYTES, max_length=NODE_ID_BYTES)]
_ModelId = Annotated[ModelId, Meta(min_length=MODEL_ID_BYTES, max_length=MODEL_ID_BYTES)]
_AnchorId = Annotated[AnchorId, Meta(min_length=ANCHOR_ID_BYTES, max_length=ANCHOR_ID_BYTES)]
_SequenceId = Annotated[SequenceId, Meta(min_length=SEQUENCE_ID_BYTES, max_length=SEQUENCE_ID_BYTES)]
_Chain = Annotated[ChainHash, Meta(max_length=CHAIN_HASH_BYTES)]
_SimHashes = Annotated[bytes, Meta(min_length=SIMHASHES_BYTES, max_length=SIMHASHES_BYTES)]
_Group = Annotated[bytes, Meta(max_length=GROUP_TAG_BYTES)]
_GroupTag = Annotated[bytes, Meta(min_length=GROUP_TAG_BYTES, max_length=GROUP_TAG_BYTES)]
_Digest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
_Name = Annotated[str, Meta(min_length=1, max_length=NAME_CHARS_MAX)]
_Address = Annotated[str, Meta(min_length=1, max_length=ADDRESS_CHARS_MAX)]
_Detail = Annotated[str, Meta(max_length=DETAIL_CHARS_MAX)]
_Counter = Annotated[int, Meta(ge=0, le=COUNTER_MAX)]
_Seq = Annotated[int, Meta(ge=1, le=COUNTER_MAX)]
_Position = Annotated[int, Meta(ge=0, le=POSITION_MAX)]
_BlockBytes = Annotated[int, Meta(ge=1, le=BLOCK_BYTES_MAX)]
_KvBytes = Annotated[int, Meta(ge=1, le=BLOCK_BYTES_MAX * BLOCKS_PER_ANCHOR_MAX)]
_BlockIndex = Annotated[int, Meta(ge=0, lt=BLOCKS_PER_ANCHOR_MAX)]
_Ordinal = Annotated[int, Meta(ge=0, lt=PULL_BLOCKS_MAX)]
_Version = Annotated[int, Meta(ge=1, le=65535)]


_META_FIELDS = tuple(field.name for field in fields(AnchorMeta))[:-3]
_SIMHASHES = struct.Struct("<QQQ")
"""The last three fields of AnchorMeta: they travel in one, `Put.simhashes`."""


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(problem)


class MemberRecord(Struct, frozen=True, array_like=True):
    """Who a node is. Only the node itself writes it; a change needs a higher `epoch`.

    `control` and `bulk` are "host:port" as peers reach them. `groups` are the 8-byte keyed tags of the groups whose
    anchors the node may see, ascending.
    """

    node_id: _NodeId
    epoch: _Counter
    name: _Name
    model_id: _ModelId
    control: _Address
    bulk: _Address
    version: _Version = PROTOCOL_VERSION
    groups: Annotated[tuple[_GroupTag, ...], Meta(max_length=GROUPS_MAX)] = ()

    def __post_init__(self) -> None:
        _require(self.name.isprintable(), "name has characters that cannot be printed")
        for address in (self.control, self.bulk):
            host, colon, port = address.rpartition(":")
            _require(bool(host) and bool(colon) and address.isprintable(), "address is not host:port")
            _require(port.isascii() and port.isdigit() and int(port) < 65536, "port is not a number below 65536")
        _require(all(a < b for a, b in zip(self.groups, self.groups[1:], strict=False)), "groups do not ascend")


class RefusedReason(enum.IntEnum):
    """Why a Hello was turned down. All but FULL are final: trying again later does not help by itself."""

    WRONG_CLUSTER = 1
    WRONG_VERSION = 2
    NAME_TAKEN = 3
    FULL = 4


class Hello(Struct, frozen=True, array_like=True, tag=1):
    """Let me in. Sent to a seed (and again until answered). The sender speaks versions `oldest` to `newest`."""

    oldest: _Version
    newest: _Version
    cluster_id: Annotated[bytes, Meta(min_length=CLUSTER_ID_BYTES, max_length=CLUSTER_ID_BYTES)]
    member: MemberRecord

    def __post_init__(self) -> None:
        _require(self.oldest <= self.newest, "oldest version is above newest")


class Welcome(Struct, frozen=True, array_like=True, tag=2):
    """Answer to Hello: who I am, and others that are alive as far as I know (gossip brings the rest)."""

    member: MemberRecord
    members: Annotated[tuple[MemberRecord, ...], Meta(max_length=MEMBERS_PER_MESSAGE_MAX)]


class Refused(Struct, frozen=True, array_like=True, tag=3):
    """Answer to Hello: no."""

    reason: RefusedReason
    detail: _Detail = ""


class Bye(Struct, frozen=True, array_like=True, tag=4):
    """I leave now. Counts for this epoch of mine only."""

    epoch: _Counter


class DigestEntry(Struct, frozen=True, array_like=True):
    """What the sender knows of one origin: its log up to `max_seq`, in which deletions up to `gc_floor` are forgotten.

    `gc_floor` is above `max_seq` while a snapshot taken above it is still arriving.
    """

    node_id: _NodeId
    epoch: _Counter
    heartbeat: _Counter
    max_seq: _Counter
    gc_floor: _Counter


class Put(Struct, frozen=True, array_like=True, tag=1):
    """Log entry: the origin holds this anchor; never private. The fields are those of `AnchorMeta`, its three SimHashes
    (content, context_first, context_last) in one, as little-endian u64: their size does not depend on their value.
    """

    seq: _Seq
    anchor_id: _AnchorId
    model_id: _ModelId
    sequence_id: _SequenceId
    start: _Position
    end: _Position
    chain_end: _Chain
    fingerprints: Annotated[bytes, Meta(max_length=ANCHOR_TOKENS_MAX * FINGERPRINT_BYTES)]
    hops: Annotated[int, Meta(ge=0, le=HOPS_MAX)]
    visibility: Visibility
    group: _Group
    kv_bytes: _KvBytes
    chain_start: _Chain = ChainHash(b"")
    simhashes: _SimHashes = bytes(SIMHASHES_BYTES)

    def __post_init__(self) -> None:
        tokens = self.end - self.start
        _require(0 < tokens <= ANCHOR_TOKENS_MAX, "anchor is empty or longer than ANCHOR_TOKENS_MAX")
        _require(self.start % BLOCK_TOKENS == 0, "start is not on the block grid")
        _require(self.kv_bytes % tokens == 0, "kv_bytes is not a multiple of the tokens")
        _require(self.kv_bytes // tokens * min(tokens, BLOCK_TOKENS) <= BLOCK_BYTES_MAX, "block is too large")
        _require(len(self.fingerprints) % FINGERPRINT_BYTES == 0, "fingerprints are not whole")
        _require(len(self.fingerprints) <= tokens * FINGERPRINT_BYTES, "more fingerprints than tokens")
        if self.chain_end:
            _require(len(self.chain_end) == CHAIN_HASH_BYTES, "chain_end has a wrong length")
            _require(self.hops == 0 and self.end % BLOCK_TOKENS == 0, "chain_end of an inexact or unaligned anchor")
        if self.chain_start:
            _require(len(self.chain_start) == CHAIN_HASH_BYTES, "chain_start has a wrong length")
            _require(self.start > 0, "chain_start of an anchor that nothing precedes")
        content, *context = _SIMHASHES.unpack(self.simhashes)
        _require(tokens >= CONTENT_TOKENS_MIN or not content, "SimHash of too few tokens")
        _require(self.start > 0 or not any(context), "context of an anchor that nothing precedes")
        _require(self.visibility is not Visibility.PRIVATE, "private anchors are not gossiped")
        expected = GROUP_TAG_BYTES if self.visibility is Visibility.GROUP else 0
        _require(len(self.group) == expected, "group does not fit the visibility")

    @classmethod
    def of(cls, seq: int, meta: AnchorMeta) -> Put:
        """Raises ValueError if `meta` must not or cannot be gossiped."""
        try:
            simhashes = _SIMHASHES.pack(meta.content, meta.context_first, meta.context_last)
        except struct.error:
            raise ValueError("a SimHash is not a number below 2 ** 64") from None
        return cls(seq=seq, simhashes=simhashes, **{name: getattr(meta, name) for name in _META_FIELDS})

    def meta(self) -> AnchorMeta:
        simhashes = _SIMHASHES.unpack(self.simhashes)
        return AnchorMeta(*(getattr(self, name) for name in _META_FIELDS), *simhashes)


class Del(Struct, frozen=True, array_like=True, tag=2):
    """Log entry: the origin no longer holds this anchor."""

    seq: _Seq
    anchor_id: _AnchorId


class OriginDelta(Struct, frozen=True, array_like=True):
    """News of one origin: its log in (from_seq, to_seq], entries ascending; superseded entries are left out.

    A receiver applies it only if it already has everything up to `from_seq` of this epoch: no gaps. `reset`: forget
    what you have of this origin first (`from_seq` is 0); sent to whom the deletions up to `gc_floor` can no longer be
    told.
    """

    member: MemberRecord
    heartbeat: _Counter
    reset: bool
    from_seq: _Counter
    to_seq: _Counter
    gc_floor: _Counter
    entries: Annotated[tuple[Union[Put, Del], ...], Meta(max_length=DELTA_ENTRIES_MAX)]

    def __post_init__(self) -> None:
        last = self.from_seq
        _require(self.from_seq == 0 or not self.reset, "a reset starts at 0")
        for entry in self.entries:
            _require(entry.seq > last, "entries do not ascend")
            last = entry.seq
        _require(last <= self.to_seq, "to_seq is below the last entry")


_DigestEntries = Annotated[tuple[DigestEntry, ...], Meta(max_length=DIGEST_ENTRIES_MAX)]
_Deltas = Annotated[tuple[OriginDelta, ...], Meta(max_length=DIGEST_ENTRIES_MAX)]


class Syn(Struct, frozen=True, array_like=True, tag=5):
    """First leg of an exchange: what I know."""

    digest: _DigestEntries


class SynAck(Struct, frozen=True, array_like=True, tag=6):
    """Second leg: what I know, and what I know better than you."""

    digest: _DigestEntries
    deltas: _Deltas


class Ack(Struct, frozen=True, array_like=True, tag=7):
    """Third leg: what I know better than you."""

    deltas: _Deltas


class GetTokens(Struct, frozen=True, array_like=True, tag=8):
    """Send me the token ids of positions [start, end) of an anchor you hold (`start` on the block grid)."""

    request_id: _Counter
    anchor_id: _AnchorId
    start: _Position
    end: _Position

    def __post_init__(self) -> None:
        _require(0 < self.end - self.start <= ANCHOR_TOKENS_MAX, "range is empty or too long")
        _require(self.start % BLOCK_TOKENS == 0, "start is not on the block grid")


class Tokens(Struct, frozen=True, array_like=True, tag=9):
    """Answer to GetTokens: token ids as little-endian u32, and the SHA-256 of each block they touch."""

    request_id: _Counter
    token_ids: Annotated[bytes, Meta(min_length=4, max_length=4 * ANCHOR_TOKENS_MAX)]
    digests: Annotated[tuple[_Digest, ...], Meta(max_length=BLOCKS_PER_ANCHOR_MAX)]

    def __post_init__(self) -> None:
        _require(len(self.token_ids) % 4 == 0, "token ids are not whole")
        blocks = -(-(len(self.token_ids) // 4) // BLOCK_TOKENS)
        _require(len(self.digests) == blocks, "not one digest per block")


class NoTokens(Struct, frozen=True, array_like=True, tag=10):
    """Answer to GetTokens: not held, or not for you; the two look the same."""

    request_id: _Counter


class PullBlock(Struct, frozen=True, array_like=True):
    """A block to pull and the size that the puller expects."""

    anchor_id: _AnchorId
    index: _BlockIndex
    kv_bytes: _BlockBytes


class Pull(Struct, frozen=True, array_like=True, tag=11):
    """Send me these blocks, in this order. `credit_bytes`: how much may be on the way before I say Credit.

    The block that crosses the limit is still sent whole, so a window smaller than a block cannot lock up.
    """

    pull_id: _Counter
    blocks: Annotated[tuple[PullBlock, ...], Meta(min_length=1, max_length=PULL_BLOCKS_MAX)]
    credit_bytes: _Seq


class Credit(Struct, frozen=True, array_like=True, tag=12):
    """`received` bytes of this pull arrived in all: that many more may follow. Covers everything: the pull is over."""

    pull_id: _Counter
    received: _Seq


class CancelPull(Struct, frozen=True, array_like=True, tag=13):
    """Stop sending, I am no longer interested."""

    pull_id: _Counter


class Chunk(Struct, frozen=True, array_like=True, tag=14):
    """Header of a bulk frame: bytes [offset, offset + length) of the block at position `ordinal` of the pull follow.

    The driver turns it into `ChunkReceived`; it never reaches a node as a message.
    """

    pull_id: _Counter
    ordinal: _Ordinal
    offset: Annotated[int, Meta(ge=0, lt=BLOCK_BYTES_MAX)]
    length: _BlockBytes

    def __post_init__(self) -> None:
        _require(self.offset + self.length <= BLOCK_BYTES_MAX, "chunk ends behind the largest block")


class PullFailedReason(enum.IntEnum):
    """Why blocks do not come."""

    NOT_FOUND = 1
    """Not held, not for you, or not of that size; they look the same."""
    BUSY = 2
    """The maximum of uploads is running; the whole pull is refused."""
    EVICTED = 3
    """Held when the pull began, gone when it was to be read."""


class PullFailed(Struct, frozen=True, array_like=True, tag=15):
    """The block at position `ordinal` does not come; None: nor does anything else of this pull.

    `retry_after_s` (seconds, 0: no advice) comes with BUSY.
    """

    pull_id: _Counter
    ordinal: Union[_Ordinal, None]
    reason: PullFailedReason
    retry_after_s: Annotated[float, Meta(ge=0.0, le=RETRY_AFTER_S_MAX)] = 0.0


Message = Union[
    Hello,
    Welcome,
    Refused,
    Bye,
    Syn,
    SynAck,
    Ack,
    GetTokens,
    Tokens,
    NoTokens,
    Pull,
    Credit,
    CancelPull,
    Chunk,
    PullFailed,
]
