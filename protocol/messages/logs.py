"""Gossip: digests of logs and what is news in them."""

from __future__ import annotations

import struct
from dataclasses import fields
from typing import Annotated, Union

from msgspec import Meta, Struct

from kvcomm_p2p.protocol.anchors import ANCHOR_TOKENS_MAX, BLOCK_TOKENS, CONTENT_TOKENS_MIN, AnchorMeta, Visibility
from kvcomm_p2p.protocol.ids import CHAIN_HASH_BYTES, ChainHash
from kvcomm_p2p.protocol.messages.fields import (
    BLOCK_BYTES_MAX,
    DELTA_ENTRIES_MAX,
    DIGEST_ENTRIES_MAX,
    FINGERPRINT_BYTES,
    GROUP_TAG_BYTES,
    HOPS_MAX,
    SIMHASHES_BYTES,
    AnchorIdField,
    ChainField,
    CounterField,
    GroupField,
    KvBytesField,
    ModelIdField,
    NodeIdField,
    PositionField,
    SeqField,
    SequenceIdField,
    SimHashesField,
    require,
)
from kvcomm_p2p.protocol.messages.members import MemberRecord, Status

_META_FIELDS = tuple(field.name for field in fields(AnchorMeta))[:-3]
_SIMHASHES = struct.Struct("<QQQ")
"""The last three fields of AnchorMeta: they travel in one, `Put.simhashes`."""


class DigestEntry(Struct, frozen=True, array_like=True):
    """What the sender knows of one origin: whether it lives, and its log up to `max_seq`, in which deletions up to
    `gc_floor` are forgotten.

    `gc_floor` is above `max_seq` while a snapshot taken above it is still arriving.
    """

    node_id: NodeIdField
    epoch: CounterField
    incarnation: CounterField
    max_seq: CounterField
    gc_floor: CounterField
    status: Status = Status.ALIVE


class Put(Struct, frozen=True, array_like=True, tag=1):
    """Log entry: the origin holds this anchor; never private. The fields are those of `AnchorMeta`, its three SimHashes
    (content, context_first, context_last) in one, as little-endian u64: their size does not depend on their value.
    """

    seq: SeqField
    anchor_id: AnchorIdField
    model_id: ModelIdField
    sequence_id: SequenceIdField
    start: PositionField
    end: PositionField
    chain_end: ChainField
    fingerprints: Annotated[bytes, Meta(max_length=ANCHOR_TOKENS_MAX * FINGERPRINT_BYTES)]
    hops: Annotated[int, Meta(ge=0, le=HOPS_MAX)]
    visibility: Visibility
    group: GroupField
    kv_bytes: KvBytesField
    chain_start: ChainField = ChainHash(b"")
    simhashes: SimHashesField = bytes(SIMHASHES_BYTES)

    def __post_init__(self) -> None:
        tokens = self.end - self.start
        require(0 < tokens <= ANCHOR_TOKENS_MAX, "anchor is empty or longer than ANCHOR_TOKENS_MAX")
        require(self.start % BLOCK_TOKENS == 0, "start is not on the block grid")
        require(self.kv_bytes % tokens == 0, "kv_bytes is not a multiple of the tokens")
        require(self.kv_bytes // tokens * min(tokens, BLOCK_TOKENS) <= BLOCK_BYTES_MAX, "block is too large")
        require(len(self.fingerprints) % FINGERPRINT_BYTES == 0, "fingerprints are not whole")
        require(len(self.fingerprints) <= tokens * FINGERPRINT_BYTES, "more fingerprints than tokens")
        if self.chain_end:
            require(len(self.chain_end) == CHAIN_HASH_BYTES, "chain_end has a wrong length")
            require(self.hops == 0 and self.end % BLOCK_TOKENS == 0, "chain_end of an inexact or unaligned anchor")
        if self.chain_start:
            require(len(self.chain_start) == CHAIN_HASH_BYTES, "chain_start has a wrong length")
            require(self.start > 0, "chain_start of an anchor that nothing precedes")
        content, *context = _SIMHASHES.unpack(self.simhashes)
        require(tokens >= CONTENT_TOKENS_MIN or not content, "SimHash of too few tokens")
        require(self.start > 0 or not any(context), "context of an anchor that nothing precedes")
        require(self.visibility is not Visibility.PRIVATE, "private anchors are not gossiped")
        expected = GROUP_TAG_BYTES if self.visibility is Visibility.GROUP else 0
        require(len(self.group) == expected, "group does not fit the visibility")

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

    seq: SeqField
    anchor_id: AnchorIdField


class OriginDelta(Struct, frozen=True, array_like=True):
    """News of one origin: its log in (from_seq, to_seq], entries ascending; superseded entries are left out.

    A receiver applies it only if it already has everything up to `from_seq` of this epoch: no gaps. `reset`: forget
    what you have of this origin first (`from_seq` is 0); sent to whom the deletions up to `gc_floor` can no longer be
    told.
    """

    member: MemberRecord
    incarnation: CounterField
    reset: bool
    from_seq: CounterField
    to_seq: CounterField
    gc_floor: CounterField
    entries: Annotated[tuple[Union[Put, Del], ...], Meta(max_length=DELTA_ENTRIES_MAX)]

    def __post_init__(self) -> None:
        last = self.from_seq
        require(self.from_seq == 0 or not self.reset, "a reset starts at 0")
        for entry in self.entries:
            require(entry.seq > last, "entries do not ascend")
            last = entry.seq
        require(last <= self.to_seq, "to_seq is below the last entry")


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
