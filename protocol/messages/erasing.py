"""Erasing: what is to be forgotten, named without saying it."""

from __future__ import annotations

import math
from typing import Annotated

from msgspec import Meta, Struct

from kvcomm_p2p.protocol.messages.fields import (
    PUBLIC_KEY_BYTES,
    SIGNATURE_BYTES,
    AnchorIdField,
    NodeIdField,
    PublicKeyField,
    SignatureField,
    require,
)

ERASURE_ID_BYTES = 16
ERASURE_HASHES_MAX = 512
ERASURE_ANCHORS_MAX = 64
ERASURES_PER_MESSAGE_MAX = 64
ERASURE_S = 7 * 86_400.0
"""How long content that was erased is kept from coming back, in seconds of the running of those who remember it."""

STRETCH_TOKENS = (4, 8, 16, 32)
_HASH_BYTES = 8
_ID_CHUNK_BYTES_MAX = 4096
_ID_CHUNKS_MAX = 16


class Erasure(Struct, frozen=True, array_like=True):
    """Forget every anchor that holds one of these stretches of tokens, or has one of these ids, and what was computed behind
    it; refuse them from now on.

    `hashes` are keyed 64-bit hashes, little-endian, ascending, of stretches of `tokens` tokens each. `origin` is the node that
    asked, `erasure_id` of its making. `age_s`: seconds since, as far as the sender knows. `public_key` and `signature` of the
    node's identity cover everything but the age; empty where members have no keys.
    """

    erasure_id: Annotated[bytes, Meta(min_length=ERASURE_ID_BYTES, max_length=ERASURE_ID_BYTES)]
    origin: NodeIdField
    age_s: Annotated[float, Meta(ge=0, le=ERASURE_S)]
    tokens: int
    hashes: Annotated[bytes, Meta(max_length=ERASURE_HASHES_MAX * _HASH_BYTES)] = b""
    anchor_ids: Annotated[tuple[AnchorIdField, ...], Meta(max_length=ERASURE_ANCHORS_MAX)] = ()
    public_key: PublicKeyField = b""
    signature: SignatureField = b""

    def __post_init__(self) -> None:
        require(math.isfinite(self.age_s), "age_s is not a number")
        require(self.tokens in STRETCH_TOKENS, "stretches of another length")
        require(len(self.hashes) % _HASH_BYTES == 0, "hashes are not whole")
        require(bool(self.hashes) or bool(self.anchor_ids), "nothing to be erased")
        require(len(self.public_key) in (0, PUBLIC_KEY_BYTES), "public key has a wrong length")
        require(len(self.signature) in (0, SIGNATURE_BYTES), "signature has a wrong length")
        require(
            bool(self.public_key) == bool(self.signature), "a key without a signature, or a signature without a key"
        )


class Forget(Struct, frozen=True, array_like=True, tag=25):
    """These erasures are to be carried out and remembered."""

    erasures: Annotated[tuple[Erasure, ...], Meta(max_length=ERASURES_PER_MESSAGE_MAX)]


class ErasuresKnown(Struct, frozen=True, array_like=True, tag=30):
    """The first 8 bytes of the ids of all erasures that I remember, in any order. Whoever knows others answers with Forget, and,
    unless this is an `answer` itself, whoever lacks some answers with what it knows."""

    ids: Annotated[tuple[Annotated[bytes, Meta(max_length=_ID_CHUNK_BYTES_MAX)], ...], Meta(max_length=_ID_CHUNKS_MAX)]
    answer: bool = False

    def __post_init__(self) -> None:
        require(all(len(chunk) % 8 == 0 for chunk in self.ids), "ids are not whole")
