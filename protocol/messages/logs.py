"""Log entries and news of logs.

An entry is written once, by its origin, and its bytes travel unchanged: whoever passes it on keeps also what a newer
version appended to it.
"""

from __future__ import annotations

import struct
from dataclasses import fields
from functools import lru_cache
from hashlib import blake2b
from operator import attrgetter
from typing import Annotated, Any, NamedTuple, Union

from msgspec import Meta, Struct

from kvcomm_p2p.protocol.anchors import ANCHOR_TOKENS_MAX, BLOCK_TOKENS, CONTENT_TOKENS_MIN, AnchorMeta, Visibility
from kvcomm_p2p.protocol.ids import CHAIN_HASH_BYTES, MODEL_ID_BYTES, SAME_MODEL, AnchorId, ChainHash, ModelId, NodeId
from kvcomm_p2p.protocol.messages.fields import (
    BLOCK_BYTES_MAX,
    DELTA_ENTRIES_MAX,
    FINGERPRINT_BYTES,
    GROUP_TAG_BYTES,
    HOPS_MAX,
    SIGNATURE_BYTES,
    SIMHASHES_BARE_BYTES,
    SIMHASHES_BYTES,
    AnchorIdField,
    ChainField,
    CounterField,
    GroupField,
    KvBytesField,
    NodeIdField,
    PositionField,
    SeqField,
    SequenceIdField,
    SignatureField,
    SimHashesField,
    require,
)
from kvcomm_p2p.protocol.messages.members import MemberRecord
from kvcomm_p2p.protocol.messages.packing import pack, unpack

_META_FIELDS = tuple(field.name for field in fields(AnchorMeta))[:-3]
_META_OF = attrgetter(*_META_FIELDS)
_SIMHASHES = struct.Struct("<QQQ")
"""The last three fields of AnchorMeta: they travel in one, `Put.simhashes`."""

LOG_ENTRY_BYTES_MAX = 3072
"""Longest entry on the wire; the longest that this version writes has about 2,300 bytes."""

HASH_BYTES = 8
HashField = Annotated[bytes, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]


class Put(Struct, frozen=True, array_like=True, tag=1):
    """Log entry: the origin holds this anchor; never private. The fields are those of `AnchorMeta`, its three SimHashes
    (content, context_first, context_last) in one, as little-endian u64: their size does not depend on their value. Of an
    anchor that nothing precedes the first stands alone. `model_id`: SAME_MODEL, in a log only, is the model that the
    writer's member record names.
    """

    seq: SeqField
    anchor_id: AnchorIdField
    model_id: Annotated[ModelId, Meta(max_length=MODEL_ID_BYTES)]
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
        require(len(self.model_id) in (0, MODEL_ID_BYTES), "model_id has a wrong length")
        require(len(self.simhashes) in (SIMHASHES_BARE_BYTES, SIMHASHES_BYTES), "simhashes have a wrong length")
        content, *context = self._simhashes()
        require(tokens >= CONTENT_TOKENS_MIN or not content, "SimHash of too few tokens")
        require(self.start > 0 or not any(context), "context of an anchor that nothing precedes")
        require(self.visibility is not Visibility.PRIVATE, "private anchors are not gossiped")
        expected = GROUP_TAG_BYTES if self.visibility is Visibility.GROUP else 0
        require(len(self.group) == expected, "group does not fit the visibility")

    @classmethod
    def of(cls, seq: int, meta: AnchorMeta, writer_model: ModelId = SAME_MODEL) -> Put:
        """`writer_model`: the model of the log's writer, which is not named again. Raises ValueError if `meta` must not or
        cannot be gossiped."""
        try:
            simhashes = _SIMHASHES.pack(meta.content, meta.context_first, meta.context_last)
        except struct.error:
            raise ValueError("a SimHash is not a number below 2 ** 64") from None
        values = {name: getattr(meta, name) for name in _META_FIELDS}
        if meta.model_id == writer_model:
            values["model_id"] = SAME_MODEL
        if not meta.start and not any((meta.context_first, meta.context_last)):
            simhashes = simhashes[:SIMHASHES_BARE_BYTES]
        return cls(seq=seq, simhashes=simhashes, **values)

    def meta(self, writer_model: ModelId = SAME_MODEL) -> AnchorMeta:
        """Raises ValueError if this names no model and no writer's is given."""
        model_id = self.model_id or writer_model
        require(len(model_id) == MODEL_ID_BYTES, "an anchor of no model")
        anchor_id, _, *others = _META_OF(self)
        return AnchorMeta(anchor_id, model_id, *others, *self._simhashes())

    def _simhashes(self) -> tuple[int, ...]:
        return _SIMHASHES.unpack(self.simhashes.ljust(SIMHASHES_BYTES, b"\0"))


class Del(Struct, frozen=True, array_like=True, tag=2):
    """Log entry: the origin no longer holds this anchor."""

    seq: SeqField
    anchor_id: AnchorIdField


class LogEntry(NamedTuple):
    """An entry as it travels and as it is read. `meta` is None for a deletion. `digest`: 64-bit hash of `raw`, behind it the
    writer's model id where `raw` names none."""

    raw: bytes
    seq: int
    anchor_id: AnchorId
    meta: AnchorMeta | None
    digest: int

    @property
    def wire_bytes(self) -> int:
        """Upper bound of its bytes in a message."""
        return len(self.raw) + 3


_ENTRY: Any = Union[Put, Del]
ENTRIES_REMEMBERED = 8192
"""Entries read last: one that reaches this process again, from another peer or for another node of a simulation, is
neither read nor kept twice."""


def pack_entry(entry: Put | Del) -> bytes:
    """The bytes of an entry, as its origin writes them."""
    return pack(entry)


@lru_cache(maxsize=ENTRIES_REMEMBERED)
def unpack_entry(raw: bytes) -> Put | Del:
    """Raises ValueError for bytes that are no valid entry."""
    try:
        entry: Put | Del = unpack(raw, _ENTRY)
    except ValueError as error:
        raise ValueError(f"not a log entry: {error!s:.160}") from None
    return entry


@lru_cache(maxsize=ENTRIES_REMEMBERED)
def read_entry(raw: bytes, writer_model: ModelId) -> LogEntry:
    """An entry of the log of a writer with this model. Raises ValueError for bytes that are no valid entry."""
    entry = unpack_entry(raw)
    named = isinstance(entry, Del) or entry.model_id
    digest = blake2b(raw if named else raw + writer_model, digest_size=HASH_BYTES).digest()
    meta = entry.meta(writer_model) if isinstance(entry, Put) else None
    return LogEntry(raw, entry.seq, entry.anchor_id, meta, int.from_bytes(digest, "little"))


class Head(NamedTuple):
    """What a log's writer says of it: the `digest` is the exclusive or of the digests of the anchors that it lists when
    it ends at `seq`. `signature` by the writer's key over `origin_head`, or empty."""

    seq: int
    digest: int
    signature: bytes = b""


_HEAD = struct.Struct("<16sQQQ")


def origin_head(origin: NodeId, epoch: int, head: Head) -> bytes:
    """The bytes that a head's signature is made over: a label, then node id, epoch, seq and digest, little-endian."""
    return b"kvcomm log head 1" + _HEAD.pack(origin, epoch, head.seq, head.digest)


class OriginDelta(Struct, frozen=True, array_like=True):
    """News of one origin: its log in (from_seq, to_seq], entries ascending; superseded entries are left out.

    A receiver applies it only if it already has everything up to `from_seq` of this epoch: no gaps. `reset`: forget
    what you have of this origin first (`from_seq` is 0); sent to whom the deletions up to `gc_floor` can no longer be
    told. `log_seq`: what is superseded up to there is left out, so the log is as its writer had it only from there on;
    the sender has more unless it equals `to_seq`. `head_seq`, `head_digest` and `head_signature` are the newest `Head`
    that the sender knows. `member` is left out for those who know it already.
    """

    node_id: NodeIdField
    epoch: CounterField
    reset: bool
    from_seq: CounterField
    to_seq: CounterField
    gc_floor: CounterField
    entries: Annotated[
        tuple[Annotated[bytes, Meta(max_length=LOG_ENTRY_BYTES_MAX)], ...], Meta(max_length=DELTA_ENTRIES_MAX)
    ]
    log_seq: CounterField = 0
    head_seq: CounterField = 0
    head_digest: HashField = bytes(HASH_BYTES)
    head_signature: SignatureField = b""
    member: MemberRecord | None = None
    incarnation: CounterField = 0

    def __post_init__(self) -> None:
        last = self.from_seq
        require(self.from_seq == 0 or not self.reset, "a reset starts at 0")
        require(len(self.head_signature) in (0, SIGNATURE_BYTES), "head_signature has a wrong length")
        for raw in self.entries:
            seq = unpack_entry(raw).seq
            require(seq > last, "entries do not ascend")
            last = seq
        require(last <= self.to_seq, "to_seq is below the last entry")
        if self.member is not None:
            about = (self.member.node_id, self.member.epoch)
            require(about == (self.node_id, self.epoch), "member record of another node or epoch")

    @property
    def head(self) -> Head:
        return Head(self.head_seq, int.from_bytes(self.head_digest, "little"), self.head_signature)
