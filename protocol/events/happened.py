"""Events: what can happen to a node, in the past tense."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Union

from kvcomm_p2p.protocol.anchors import AnchorMeta, BlockHandle, BlockKey, HeldAnchor
from kvcomm_p2p.protocol.ids import AnchorId, NodeId
from kvcomm_p2p.protocol.lookup import Lookup
from kvcomm_p2p.protocol.member_table import KnownMembers
from kvcomm_p2p.protocol.messages import Erasure, MemberRecord, Message, PullFailedReason


@dataclass(frozen=True, slots=True)
class JoinRequested:
    """Join through any of `seeds` (control addresses "host:port"). Answered by JoinFinished; retried until one
    answers."""

    seeds: tuple[str, ...]
    deadline: float


@dataclass(frozen=True, slots=True)
class MembersKnown:
    """Before anything else: these are members, alive as far as is known (from a list that was saved, or because a
    simulation begins with them). `introduced`: they know this node in its present epoch, so it need not tell them who it is.
    Nobody is told anything; whom this is wrong about, probes and gossip will show. Join all the same if you were away."""

    members: KnownMembers
    introduced: bool = False


@dataclass(frozen=True, slots=True)
class LeaveRequested:
    """Say goodbye to everybody. The driver stops after carrying out the returned effects."""


@dataclass(frozen=True, slots=True)
class TimerExpired:
    """`next_deadline()` has passed."""


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """An authenticated, decoded message."""

    sender: NodeId
    message: Message


@dataclass(frozen=True, slots=True)
class ChunkReceived:
    """The header of a chunk of a pulled block; its `length` bytes of payload wait in the driver.

    Answered by StoreChunk when the node asked for exactly these bytes; otherwise the driver drops the payload.
    """

    sender: NodeId
    pull_id: int
    ordinal: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class PeerUnreachable:
    """The transport knows that this peer cannot be reached (refused or closed connection, no route)."""

    peer: NodeId


@dataclass(frozen=True, slots=True)
class IdentityRenewed:
    """Answer to RenewIdentity: this node's record with the higher epoch, signed if records are signed."""

    member: MemberRecord


@dataclass(frozen=True, slots=True)
class AnchorsPublished:
    """The store now holds these anchors; the node takes over one reference to each of their handles.

    Those of duplicates of held anchors, and of anchors for which there is no room, come back in DropBlock.
    """

    anchors: tuple[HeldAnchor, ...]


@dataclass(frozen=True, slots=True)
class AnchorsForgotten:
    """Remove these anchors from the pool at once."""

    anchor_ids: tuple[AnchorId, ...]


@dataclass(frozen=True, slots=True)
class AnchorsUsed:
    """These held anchors were just read by the engine (recency and frequency for eviction)."""

    anchor_ids: tuple[AnchorId, ...]


@dataclass(frozen=True, slots=True)
class LookupRequested:
    """Which anchors share something with a prompt? Answered once by FinishLookup, by `deadline`: within the same call
    where this node has a full index, after asking owners of shards (at most `lookup_timeout_s`) where it has not."""

    request_id: int
    lookup: Lookup
    deadline: float


@dataclass(frozen=True, slots=True)
class TokensRequested:
    """Bring token ids and block digests of one anchor of `holder`. Answered once by FinishTokens, by `deadline`."""

    request_id: int
    holder: NodeId
    anchor: AnchorMeta
    deadline: float


@dataclass(frozen=True, slots=True)
class Want:
    """One block to pull: its name, exact size, expected SHA-256 and the reserved handle to fill.

    `raw_bytes` above 0: `kv_bytes` of it as int8, of a block that has so many. Its first holder alone is asked, which also states
    the SHA-256 of what it sends; `digest` only says which block is meant.
    """

    key: BlockKey
    kv_bytes: int
    digest: bytes
    handle: BlockHandle
    raw_bytes: int = 0


@dataclass(frozen=True, slots=True)
class FetchRequested:
    """Pull `wants` from `holders`, best first. Answered once by FinishFetch, by `deadline`.

    The first holder stated the digests; what it does not deliver is asked of the next, whose copy may have other bytes if
    it computed its own (a miss there). Pieces of `wants` may be asked for in any order. A block that another fetch already
    has in flight is not asked for twice: this fetch waits for that one and reports the other's handle.

    `stall_s`: give up after this many seconds without progress in all, if that is sooner than the node's own
    `pull_stall_timeout_s` (a request that has lost time already has less left to lose). `busy_s`: the same for holders
    that answer, but are busy, and `pull_busy_wait_s`. `anchors`: metadata of what is wanted, as a holder announced it;
    blocks of these anchors are passed on to others for a while (see `onward`).
    """

    fetch_id: int
    holders: tuple[NodeId, ...]
    wants: tuple[Want, ...]
    deadline: float
    stall_s: float = math.inf
    busy_s: float = math.inf
    anchors: tuple[AnchorMeta, ...] = ()


@dataclass(frozen=True, slots=True)
class FetchCancelled:
    """The caller lost interest. Still answered by FinishFetch (missing blocks: CANCELLED)."""

    fetch_id: int


@dataclass(frozen=True, slots=True)
class BlockVerified:
    """Answer to VerifyBlock, and to AdoptShared."""

    handle: BlockHandle
    ok: bool


@dataclass(frozen=True, slots=True)
class BlockUnavailable:
    """A SendBlock could not be carried out: the store no longer has the handle, or (`reason`) it cannot be encoded."""

    to: NodeId
    pull_id: int
    ordinal: int
    reason: PullFailedReason = PullFailedReason.EVICTED


@dataclass(frozen=True, slots=True)
class EraseRequested:
    """Carry out these erasures here, and remember them; `everywhere`: tell all members, who do the same."""

    erasures: tuple[Erasure, ...]
    everywhere: bool


@dataclass(frozen=True, slots=True)
class HeadSigned:
    """Answer to SignHead. A driver without a key never answers: heads then stay unsigned."""

    head_bytes: bytes
    signature: bytes


@dataclass(frozen=True, slots=True)
class HeadVerified:
    """Answer to VerifyHead. `ok`: the signature over `head_bytes` was made with the key of the origin's member record."""

    origin: NodeId
    head_bytes: bytes
    ok: bool


Event = Union[
    JoinRequested,
    MembersKnown,
    LeaveRequested,
    TimerExpired,
    MessageReceived,
    ChunkReceived,
    PeerUnreachable,
    IdentityRenewed,
    AnchorsPublished,
    AnchorsForgotten,
    AnchorsUsed,
    LookupRequested,
    TokensRequested,
    FetchRequested,
    FetchCancelled,
    BlockVerified,
    BlockUnavailable,
    HeadSigned,
    HeadVerified,
    EraseRequested,
]
