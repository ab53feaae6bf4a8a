"""The wire vocabulary: every message a node can send, with the limits of each field.

A message is a frozen array-like Struct whose first wire element is its integer tag; fields that a newer version appends
are ignored by an older reader. Constructing one checks what holds between its fields (`ValueError`), so neither we nor
a peer can put an illegal message together. docs/protocol.md explains the exchanges; `wire` makes bytes of them.

Tags: 1-4 joining, 5-7 gossip, 8-10 token ids, 11-15 pulls, 16-19 failure detection by probes, 20-23 the sharded
directory, 24 and 26 further ways to deliver a block, 25 erasing.
"""

from __future__ import annotations

from typing import Union

from kvcomm_p2p.protocol.messages.fields import (
    ADDRESS_CHARS_MAX,
    BLOCK_BYTES_MAX,
    BLOCKS_PER_ANCHOR_MAX,
    CLUSTER_ID_BYTES,
    COUNTER_MAX,
    DELTA_ENTRIES_MAX,
    DETAIL_CHARS_MAX,
    DIGEST_ENTRIES_MAX,
    FINGERPRINT_BYTES,
    GROUP_TAG_BYTES,
    GROUPS_MAX,
    HOPS_MAX,
    HOST_TAG_BYTES,
    MEMBERS_PER_MESSAGE_MAX,
    NAME_CHARS_MAX,
    POSITION_MAX,
    PROTOCOL_VERSION,
    PUBLIC_KEY_BYTES,
    PULL_BLOCKS_MAX,
    REFERRALS_MAX,
    RETRY_AFTER_S_MAX,
    SHARED_BYTES_MAX,
    SIGNATURE_BYTES,
    SIMHASHES_BYTES,
)
from kvcomm_p2p.protocol.messages.logs import Ack, Del, DigestEntry, OriginDelta, Put, Syn, SynAck
from kvcomm_p2p.protocol.messages.members import (
    Bye,
    Capability,
    Hello,
    MemberRecord,
    Refused,
    RefusedReason,
    Status,
    Welcome,
)
from kvcomm_p2p.protocol.messages.pulls import (
    CancelPull,
    Chunk,
    Credit,
    Encoding,
    Pull,
    PullBlock,
    PullFailed,
    PullFailedReason,
    SharedBlock,
)
from kvcomm_p2p.protocol.messages.tokens import GetTokens, NoTokens, Tokens

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
    SharedBlock,
]

__all__ = [
    "ADDRESS_CHARS_MAX",
    "BLOCKS_PER_ANCHOR_MAX",
    "BLOCK_BYTES_MAX",
    "CLUSTER_ID_BYTES",
    "COUNTER_MAX",
    "DELTA_ENTRIES_MAX",
    "DETAIL_CHARS_MAX",
    "DIGEST_ENTRIES_MAX",
    "FINGERPRINT_BYTES",
    "GROUPS_MAX",
    "GROUP_TAG_BYTES",
    "HOPS_MAX",
    "HOST_TAG_BYTES",
    "MEMBERS_PER_MESSAGE_MAX",
    "NAME_CHARS_MAX",
    "POSITION_MAX",
    "PROTOCOL_VERSION",
    "PUBLIC_KEY_BYTES",
    "PULL_BLOCKS_MAX",
    "REFERRALS_MAX",
    "RETRY_AFTER_S_MAX",
    "SHARED_BYTES_MAX",
    "SIGNATURE_BYTES",
    "SIMHASHES_BYTES",
    "Ack",
    "Bye",
    "CancelPull",
    "Capability",
    "Chunk",
    "Credit",
    "Del",
    "DigestEntry",
    "Encoding",
    "GetTokens",
    "Hello",
    "MemberRecord",
    "Message",
    "NoTokens",
    "OriginDelta",
    "Pull",
    "PullBlock",
    "PullFailed",
    "PullFailedReason",
    "Put",
    "Refused",
    "RefusedReason",
    "SharedBlock",
    "Status",
    "Syn",
    "SynAck",
    "Tokens",
    "Welcome",
]
