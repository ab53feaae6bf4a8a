"""What is signed, by whom, over which bytes. Ed25519 (sign 55 us, verify 158 us); every use has its own domain."""

from __future__ import annotations

from msgspec.structs import replace

from kvcomm_p2p.net.identity import Identity, node_id_of, verifies
from kvcomm_p2p.protocol.messages import SIGNATURE_BYTES, Erasure, MemberRecord
from kvcomm_p2p.protocol.messages.packing import pack

_MEMBER = b"kvcomm member v1\0"
_HEAD = b"kvcomm head v1\0"
_ERASURE = b"kvcomm erasure v1\0"

Claim = MemberRecord | Erasure
"""What a message says in somebody's name."""


def signed_record(identity: Identity, record: MemberRecord) -> MemberRecord:
    """The record with the identity's public keys and its signature. Raises ValueError if its node id is not the identity's
    for its name."""
    public = identity.public
    if record.node_id != public.node_id(record.name):
        raise ValueError("the node id is not that of this identity and name")
    bare = replace(record, public_key=public.signing, curve_key=public.curve, signature=b"")
    return replace(bare, signature=identity.sign(_MEMBER + pack(bare)))


def signed_erasure(identity: Identity, erasure: Erasure) -> Erasure:
    """The erasure with the identity's public key and its signature, which covers all but the age."""
    bare = replace(erasure, public_key=identity.public.signing, signature=b"\0" * SIGNATURE_BYTES)
    return replace(bare, signature=identity.sign(_ERASURE + _ageless(bare)))


def is_genuine(claim: Claim) -> bool:
    """Whether the owner of the claim's public key signed exactly this; a record's node id must be the key's for its name."""
    return _record_is_genuine(claim) if isinstance(claim, MemberRecord) else _erasure_is_genuine(claim)


def _erasure_is_genuine(erasure: Erasure) -> bool:
    return bool(erasure.public_key) and verifies(erasure.public_key, erasure.signature, _ERASURE + _ageless(erasure))


def _ageless(erasure: Erasure) -> bytes:
    return pack(replace(erasure, age_s=0.0, signature=b"\0" * SIGNATURE_BYTES))


def _record_is_genuine(record: MemberRecord) -> bool:
    if not record.public_key or record.node_id != node_id_of(record.public_key, record.name):
        return False
    return verifies(record.public_key, record.signature, _MEMBER + pack(replace(record, signature=b"")))


def sign_head(identity: Identity, head_bytes: bytes) -> bytes:
    """64 bytes over the canonical bytes of our own log's head."""
    return identity.sign(_HEAD + head_bytes)


def head_is_genuine(signing: bytes, head_bytes: bytes, signature: bytes) -> bool:
    """Whether the owner of the Ed25519 key `signing` signed this head."""
    return verifies(signing, signature, _HEAD + head_bytes)
