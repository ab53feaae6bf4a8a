"""The exchange between two nodes: do we know the same, where do we differ, what do you lack."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.messages.fields import (
    DIGEST_ENTRIES_MAX,
    ROW_BYTES,
    ROWS_MAX,
    CounterField,
    NodeIdField,
    require,
)
from kvcomm_p2p.protocol.messages.logs import HASH_BYTES, HashField, OriginDelta
from kvcomm_p2p.protocol.messages.members import Status

BUCKETS = 64
"""Origins are dealt by the first six bits of their id."""

BUCKETS_ALL = (1 << BUCKETS) - 1

BUCKET_HASH_BYTES = 4
WANTS_MAX = 1024
DELTAS_MAX = 1024


def bucket_of(node_id: NodeId) -> int:
    """Its first six bits: members in ascending order are in order of their buckets."""
    return node_id[0] * BUCKETS >> 8


class DigestEntry(Struct, frozen=True, array_like=True):
    """What the sender knows of one origin: whether it lives, and its log up to `max_seq`, in which deletions up to
    `gc_floor` are forgotten.

    `gc_floor` is above `max_seq` while a snapshot taken above it is still arriving. `set_digest`: see `Head.digest`, of
    what the sender has; empty unless it wants that compared.
    """

    node_id: NodeIdField
    epoch: CounterField
    incarnation: CounterField
    max_seq: CounterField
    gc_floor: CounterField
    status: Status = Status.ALIVE
    set_digest: Annotated[bytes, Meta(max_length=HASH_BYTES)] = b""

    def __post_init__(self) -> None:
        require(len(self.set_digest) in (0, HASH_BYTES), "set_digest has a wrong length")


class Syn(Struct, frozen=True, array_like=True, tag=5):
    """First leg: hashes of the members as I know them, and of the state of all logs. Equal ones stay unanswered."""

    view: HashField
    state: HashField


class SynAck(Struct, frozen=True, array_like=True, tag=6):
    """What I know of the members in the buckets whose bit is set in `mask`, in full: for those who know other members there.
    `answer`: do not send yours, you did."""

    digest: Annotated[tuple[DigestEntry, ...], Meta(max_length=DIGEST_ENTRIES_MAX)]
    answer: bool = False
    mask: HashField = BUCKETS_ALL.to_bytes(HASH_BYTES, "little")


class Ack(Struct, frozen=True, array_like=True, tag=7):
    """News. `answer`: this is all that I send of what you wanted last; `more`: there was no room for the rest, ask again;
    `fresh`: they have just been written or told to me, tell them on."""

    deltas: Annotated[tuple[OriginDelta, ...], Meta(max_length=DELTAS_MAX)]
    answer: bool = False
    more: bool = False
    fresh: bool = False


class Want(Struct, frozen=True, array_like=True, tag=27):
    """Send me news of these logs; this is what I have of them."""

    digest: Annotated[tuple[DigestEntry, ...], Meta(min_length=1, max_length=WANTS_MAX)]


BucketsField = Annotated[bytes, Meta(min_length=BUCKETS * BUCKET_HASH_BYTES, max_length=BUCKETS * BUCKET_HASH_BYTES)]


class Buckets(Struct, frozen=True, array_like=True, tag=28):
    """Hashes (little-endian u32 for each bucket) of the members as I know them (see `Syn.view`), and of the state of
    their logs."""

    view: BucketsField
    hashes: BucketsField


class Dense(Struct, frozen=True, array_like=True, tag=29):
    """The state of all logs in the buckets whose bit is set in `mask`, ascending by node id, ROW_BYTES each.

    `roster`: hash of the ids and epochs of the live members there; only who has the same can read it. `answer`: do not
    send yours, you did.
    """

    roster: HashField
    mask: HashField
    rows: Annotated[bytes, Meta(max_length=ROWS_MAX * ROW_BYTES)]
    answer: bool = False

    def __post_init__(self) -> None:
        require(len(self.rows) % ROW_BYTES == 0, "rows are not whole")
