"""Who is there: member records, joining, leaving."""

from __future__ import annotations

import enum
from typing import Annotated

from msgspec import Meta, Struct

from kvcomm_p2p.protocol.ids import NODE_ID_BYTES
from kvcomm_p2p.protocol.messages.fields import (
    CLUSTER_ID_BYTES,
    GROUPS_MAX,
    HOST_TAG_BYTES,
    MEMBERS_PER_MESSAGE_MAX,
    PROTOCOL_VERSION,
    PUBLIC_KEY_BYTES,
    RUMOURS_MAX,
    SIGNATURE_BYTES,
    AddressField,
    CounterField,
    DetailField,
    GroupTagField,
    HostTagField,
    ModelIdField,
    NameField,
    NodeIdField,
    PublicKeyField,
    SignatureField,
    VersionField,
    require,
)


class Capability(enum.IntFlag):
    """What a node can do besides what every node of its version does; unknown bits are ignored."""

    SHARED_MEMORY = 1
    """Offers blocks, and reads them, through memory shared with nodes of the same `MemberRecord.host`."""
    INT8 = 2
    """Sends blocks as int8 with scales where the puller asks for it."""


class MemberRecord(Struct, frozen=True, array_like=True):
    """Who a node is. Only the node itself writes it; a change needs a higher `epoch`.

    `control` and `bulk` are "host:port" as peers reach them. `groups` are the 8-byte keyed tags of the groups whose
    anchors the node may see, ascending. `host` is equal for nodes that can read each other's shared memory, empty for
    those that offer none. `capabilities`: what else the node can do, see `Capability`. `public_key` (Ed25519) and
    `curve_key` (CurveZMQ) are empty where frames are sealed by a shared key alone; otherwise the node id is a digest of
    `public_key`, and `signature` is made by it over the record with an empty signature.
    """

    node_id: NodeIdField
    epoch: CounterField
    name: NameField
    model_id: ModelIdField
    control: AddressField
    bulk: AddressField
    version: VersionField = PROTOCOL_VERSION
    groups: Annotated[tuple[GroupTagField, ...], Meta(max_length=GROUPS_MAX)] = ()
    host: HostTagField = b""
    capabilities: Annotated[int, Meta(ge=0, le=65535)] = 0
    public_key: PublicKeyField = b""
    curve_key: PublicKeyField = b""
    signature: SignatureField = b""

    def __post_init__(self) -> None:
        require(self.name.isprintable(), "name has characters that cannot be printed")
        for key in (self.public_key, self.curve_key):
            require(len(key) in (0, PUBLIC_KEY_BYTES), "a public key has a wrong length")
        require(len(self.signature) in (0, SIGNATURE_BYTES), "signature has a wrong length")
        require(len(self.host) in (0, HOST_TAG_BYTES), "host has a wrong length")
        for address in (self.control, self.bulk):
            host, colon, port = address.rpartition(":")
            require(bool(host) and bool(colon) and address.isprintable(), "address is not host:port")
            require(port.isascii() and port.isdigit() and int(port) < 65536, "port is not a number below 65536")
        require(all(a < b for a, b in zip(self.groups, self.groups[1:], strict=False)), "groups do not ascend")


class Status(enum.IntEnum):
    """What is believed of a peer. Of the same epoch and incarnation, the higher of the first three wins."""

    ALIVE = 0
    SUSPECT = 1
    DEAD = 2
    LEFT = 3
    """It said goodbye in this epoch; only a higher epoch undoes that."""

    @property
    def word(self) -> str:
        """As people read it: "alive", "suspect", "dead", "left"."""
        return self.name.lower()


class Rumour(Struct, frozen=True, array_like=True):
    """What somebody believes of a node. `accuser`: who found a SUSPECT silent by its own probe, empty where unknown."""

    node_id: NodeIdField
    epoch: CounterField
    incarnation: CounterField
    status: Status
    accuser: Annotated[bytes, Meta(max_length=NODE_ID_BYTES)] = b""

    def __post_init__(self) -> None:
        require(len(self.accuser) in (0, NODE_ID_BYTES), "accuser is not a node id")


RumoursField = Annotated[tuple[Rumour, ...], Meta(max_length=RUMOURS_MAX)]


class RefusedReason(enum.IntEnum):
    """Why a Hello was turned down. All but FULL are final: trying again later does not help by itself."""

    WRONG_CLUSTER = 1
    WRONG_VERSION = 2
    NAME_TAKEN = 3
    FULL = 4


class Hello(Struct, frozen=True, array_like=True, tag=1):
    """Let me in. Sent to a seed (and again until answered). The sender speaks versions `oldest` to `newest`."""

    oldest: VersionField
    newest: VersionField
    cluster_id: Annotated[bytes, Meta(min_length=CLUSTER_ID_BYTES, max_length=CLUSTER_ID_BYTES)]
    member: MemberRecord
    incarnation: CounterField = 0

    def __post_init__(self) -> None:
        require(self.oldest <= self.newest, "oldest version is above newest")


class Welcome(Struct, frozen=True, array_like=True, tag=2):
    """Answer to Hello: who I am, and others that are alive as far as I know (gossip brings the rest).

    `rumours`: what is believed here of the one who said Hello, if that is not that it lives.
    """

    member: MemberRecord
    members: Annotated[tuple[MemberRecord, ...], Meta(max_length=MEMBERS_PER_MESSAGE_MAX)]
    incarnation: CounterField = 0
    rumours: RumoursField = ()


class Refused(Struct, frozen=True, array_like=True, tag=3):
    """Answer to Hello: no."""

    reason: RefusedReason
    detail: DetailField = ""

    def __post_init__(self) -> None:
        require(self.detail.isprintable(), "detail has characters that cannot be printed")


class Bye(Struct, frozen=True, array_like=True, tag=4):
    """I leave now. Counts for this epoch of mine only."""

    epoch: CounterField
