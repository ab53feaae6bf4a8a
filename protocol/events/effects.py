"""Effects: what a node asks for, in the imperative."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Union

import numpy as np
import numpy.typing as npt

from kvcomm_p2p.protocol.anchors import AnchorMeta, BlockHandle, BlockKey, Miss
from kvcomm_p2p.protocol.ids import AnchorId, NodeId
from kvcomm_p2p.protocol.lookup import LookupResult
from kvcomm_p2p.protocol.messages import CHUNK_BYTES_MAX, Message, RefusedReason, SharedBlock


class Plane(enum.Enum):
    """Which socket carries a message. Bulk replies go back on the connection that brought the request."""

    CONTROL = "control"
    BULK_REQUEST = "bulk_request"
    BULK_REPLY = "bulk_reply"


@dataclass(frozen=True, slots=True)
class SendMessage:
    """Send without blocking; a full queue or a dead connection loses the message (the protocol expects loss).

    `to` is None for a seed whose id is not known yet. `address` is the control address for Plane.CONTROL, the bulk
    address for Plane.BULK_REQUEST, and empty for Plane.BULK_REPLY.
    """

    to: NodeId | None
    address: str
    message: Message
    plane: Plane = Plane.CONTROL


@dataclass(frozen=True, slots=True)
class SendBlock:
    """Send the bytes of `handle` as chunks (each with a Chunk header) back to the peer that pulled.

    `shared`: if they stand in memory that the peer can read, say where (SharedBlocks) instead. `offset`: the peer has so
    many of its first bytes already, send the rest. `encoded_bytes` above 0: send it as int8, an EncodedBlock first; `offset`
    counts those bytes. BlockUnavailable where it does not come to so many. `chunk_bytes`: no chunk is larger.
    """

    to: NodeId
    pull_id: int
    ordinal: int
    handle: BlockHandle
    kv_bytes: int
    shared: bool = False
    offset: int = 0
    encoded_bytes: int = 0
    chunk_bytes: int = CHUNK_BYTES_MAX


@dataclass(frozen=True, slots=True)
class StoreChunk:
    """Write the payload of the ChunkReceived being handled at `offset` of a reserved handle of `kv_bytes` bytes."""

    handle: BlockHandle
    offset: int
    length: int
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class ResetBlock:
    """What was written to this handle is wrong: as reserved, without any bytes, so that it can be filled anew."""

    handle: BlockHandle


@dataclass(frozen=True, slots=True)
class VerifyBlock:
    """Compare the SHA-256 of a complete block with `digest`; report BlockVerified."""

    handle: BlockHandle
    digest: bytes


@dataclass(frozen=True, slots=True)
class AdoptShared:
    """Take the `kv_bytes` bytes that `source` of process `pid` points to as those of a reserved handle, if their SHA-256
    is `digest` and nobody can change them any more; report BlockVerified. Where that fails the handle stays as it was.
    """

    handle: BlockHandle
    kv_bytes: int
    digest: bytes
    pid: int
    source: SharedBlock


@dataclass(frozen=True, slots=True)
class DropBlock:
    """The node gives up one reference to this handle and will not name it again for the same purpose.

    May come while a VerifyBlock or an AdoptShared of the handle is still running; its BlockVerified is then ignored.
    """

    handle: BlockHandle


@dataclass(frozen=True, slots=True)
class RetainBlock:
    """This verified handle got one more owner: take one more reference to it.

    A second fetch that waited for the same block will report the same handle, and each caller lets go of its own
    reference when it likes. Emitted when the block is verified, before any FinishFetch that names the handle.
    """

    handle: BlockHandle


@dataclass(frozen=True, slots=True)
class FoundBlock:
    key: BlockKey
    handle: BlockHandle


@dataclass(frozen=True, slots=True)
class MissedBlock:
    """`by`: the holder that did not deliver it; None: nobody in particular."""

    key: BlockKey
    miss: Miss
    by: NodeId | None = None


@dataclass(frozen=True, slots=True)
class FinishFetch:
    """Terminal answer to FetchRequested: each wanted block is in exactly one of the two lists, in the order wanted.

    A verified block is handed to the caller, who owns one reference to `handle` from now on (the node keeps none). When
    two fetches share a block, both report the handle that the first reserved, and a RetainBlock for the second owner
    was emitted before; the handle that the second reserved comes back in DropBlock. Handles of missed blocks come back
    in DropBlock. `wait_lost_s`: seconds without progress before giving up (0 when nothing was lost).
    """

    fetch_id: int
    found: tuple[FoundBlock, ...]
    missed: tuple[MissedBlock, ...]
    wait_lost_s: float


@dataclass(frozen=True, slots=True)
class AnchorTokens:
    """Token ids (uint32 [tokens], read-only) and one SHA-256 digest per block of an anchor, as its holder states
    them."""

    anchor: AnchorMeta
    holder: NodeId
    token_ids: npt.NDArray[np.uint32]
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class FinishLookup:
    """Terminal answer to LookupRequested."""

    request_id: int
    result: LookupResult


@dataclass(frozen=True, slots=True)
class FinishTokens:
    """Terminal answer to TokensRequested."""

    request_id: int
    result: AnchorTokens | Miss
    wait_lost_s: float


@dataclass(frozen=True, slots=True)
class FinishJoin:
    """A seed answered (`result`: peers known now), refused us, or none answered before the deadline (the node goes on).

    `refused` is set when a seed turned us down; the node stops asking then.
    """

    result: int | Miss
    refused: RefusedReason | None = None


@dataclass(frozen=True, slots=True)
class SaveState:
    """Keep this for the next start, which must begin with a higher epoch. Losing it costs time, never correctness.

    `addresses`: control addresses of peers, at most 64, to find the cluster again; `holders`: whose they are, in the same order.
    """

    epoch: int
    incarnation: int
    addresses: tuple[str, ...]
    holders: tuple[NodeId, ...] = ()


@dataclass(frozen=True, slots=True)
class SaveErasures:
    """Keep this for the next start, in place of what was kept before: all erasures that this node remembers, and the names of
    what it has erased (`erasure_memory`). Losing it means to take erased content back, until others tell of it again."""

    packed: bytes


@dataclass(frozen=True, slots=True)
class RenewIdentity:
    """Others have seen this node in a later life than this: answer with IdentityRenewed, of this epoch."""

    epoch: int


@dataclass(frozen=True, slots=True)
class ReportPeer:
    """For logs and status: `change` is one of joined, suspect, dead, left, returned, refused, violation,
    name_conflict, twin (of this node itself: another process is this node, too)."""

    peer: NodeId
    name: str
    change: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ReportErased:
    """These anchors were just erased from the pool: whatever was learned from content must be forgotten, too."""

    anchor_ids: tuple[AnchorId, ...]


@dataclass(frozen=True, slots=True)
class SignHead:
    """Sign the canonical bytes of our own log's head (`messages.origin_head`); report HeadSigned.

    Asked only of nodes whose member record has a `public_key`, at most once a second, one at a time.
    """

    head_bytes: bytes


@dataclass(frozen=True, slots=True)
class VerifyHead:
    """Check `signature` over `head_bytes` with the public key of the origin's member record; report HeadVerified."""

    origin: NodeId
    head_bytes: bytes
    signature: bytes


Effect = Union[
    SendMessage,
    SendBlock,
    StoreChunk,
    ResetBlock,
    VerifyBlock,
    AdoptShared,
    DropBlock,
    RetainBlock,
    FinishFetch,
    FinishLookup,
    FinishTokens,
    FinishJoin,
    SaveState,
    SaveErasures,
    RenewIdentity,
    ReportPeer,
    SignHead,
    VerifyHead,
    ReportErased,
]
