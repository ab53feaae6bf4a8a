"""Limits and types of the fields that messages are made of."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvcomm_p2p.protocol.anchors import ANCHOR_TOKENS_MAX, BLOCK_TOKENS
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

PROTOCOL_VERSION = 2
"""What this code speaks. The frame's version byte is the oldest version that can read the frame."""

CLUSTER_ID_BYTES = 16
GROUP_TAG_BYTES = 8
GROUPS_MAX = 32
HOST_TAG_BYTES = 16
PUBLIC_KEY_BYTES = 32
SIGNATURE_BYTES = 64
REFERRALS_MAX = 8
RUMOURS_MAX = 32
NAME_CHARS_MAX = 64
ADDRESS_CHARS_MAX = 256
DETAIL_CHARS_MAX = 200
MEMBERS_PER_MESSAGE_MAX = 1024
DIGEST_ENTRIES_MAX = 4096
DELTA_ENTRIES_MAX = 4096
PULL_BLOCKS_MAX = 1024
CHUNK_BYTES_MIN = 64 * 1024
"""A puller may not ask for smaller chunks than this: each costs its holder a message."""

CHUNK_BYTES_MAX = 4 * 1024 * 1024
"""Longest payload that follows a Chunk header. The holder's driver splits blocks into pieces of at most this size."""

POSITION_MAX = 2**24
"""Longest sequence, in tokens."""
BLOCK_BYTES_MAX = 2**28
FINGERPRINT_BYTES = 4
SIMHASHES_BYTES = 3 * 8
SIMHASHES_BARE_BYTES = 8
"""Of an anchor that nothing precedes: its content's alone."""
ROW_BYTES = 6
"""Bytes of one origin in a `Dense` digest: max_seq (u32, at most 2 ** 32 - 1) and 16 bits of its state hash."""

ROWS_MAX = 16384
COUNTER_MAX = 2**63 - 1
HOPS_MAX = 255
RETRY_AFTER_S_MAX = 60.0
BLOCKS_PER_ANCHOR_MAX = ANCHOR_TOKENS_MAX // BLOCK_TOKENS
SHARED_BYTES_MAX = BLOCK_BYTES_MAX * BLOCKS_PER_ANCHOR_MAX

NodeIdField = Annotated[NodeId, Meta(min_length=NODE_ID_BYTES, max_length=NODE_ID_BYTES)]
ModelIdField = Annotated[ModelId, Meta(min_length=MODEL_ID_BYTES, max_length=MODEL_ID_BYTES)]
AnchorIdField = Annotated[AnchorId, Meta(min_length=ANCHOR_ID_BYTES, max_length=ANCHOR_ID_BYTES)]
SequenceIdField = Annotated[SequenceId, Meta(min_length=SEQUENCE_ID_BYTES, max_length=SEQUENCE_ID_BYTES)]
ChainField = Annotated[ChainHash, Meta(max_length=CHAIN_HASH_BYTES)]
SimHashesField = Annotated[bytes, Meta(min_length=SIMHASHES_BARE_BYTES, max_length=SIMHASHES_BYTES)]
GroupField = Annotated[bytes, Meta(max_length=GROUP_TAG_BYTES)]
GroupTagField = Annotated[bytes, Meta(min_length=GROUP_TAG_BYTES, max_length=GROUP_TAG_BYTES)]
DigestField = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
HostTagField = Annotated[bytes, Meta(max_length=HOST_TAG_BYTES)]
PublicKeyField = Annotated[bytes, Meta(max_length=PUBLIC_KEY_BYTES)]
SignatureField = Annotated[bytes, Meta(max_length=SIGNATURE_BYTES)]
NameField = Annotated[str, Meta(min_length=1, max_length=NAME_CHARS_MAX)]
AddressField = Annotated[str, Meta(min_length=1, max_length=ADDRESS_CHARS_MAX)]
DetailField = Annotated[str, Meta(max_length=DETAIL_CHARS_MAX)]
CounterField = Annotated[int, Meta(ge=0, le=COUNTER_MAX)]
SeqField = Annotated[int, Meta(ge=1, le=COUNTER_MAX)]
PositionField = Annotated[int, Meta(ge=0, le=POSITION_MAX)]
BlockBytesField = Annotated[int, Meta(ge=1, le=BLOCK_BYTES_MAX)]
KvBytesField = Annotated[int, Meta(ge=1, le=BLOCK_BYTES_MAX * BLOCKS_PER_ANCHOR_MAX)]
BlockIndexField = Annotated[int, Meta(ge=0, lt=BLOCKS_PER_ANCHOR_MAX)]
OrdinalField = Annotated[int, Meta(ge=0, lt=PULL_BLOCKS_MAX)]
VersionField = Annotated[int, Meta(ge=1, le=65535)]


def require(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(problem)
