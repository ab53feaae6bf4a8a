"""How the cluster's secret gets to another machine: encrypted to the identity that is invited, signed by the one that invites.

An invitation is worthless to everybody but the holder of the invited identity's CURVE secret (X25519 with a fresh key, HKDF,
ChaCha20-Poly1305).
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from kvcomm_p2p.errors import ConfigError
from kvcomm_p2p.net.identity import KEY_BYTES, Identity, PublicIdentity, load_identity
from kvcomm_p2p.net.keys import load_cluster_keys, read_secret

_PREFIX = "kvcomm-invite-1:"
_DOMAIN = b"kvcomm invitation v1\0"
_SEALED_BYTES = KEY_BYTES + 16
_SIGNATURE_BYTES = 64
_ALL_BYTES = 3 * KEY_BYTES + _SEALED_BYTES + _SIGNATURE_BYTES


@dataclass(frozen=True, slots=True)
class Invitation:
    """Opened: who invites, and the secret of the cluster."""

    inviter: PublicIdentity
    secret: bytes = field(repr=False)


def invite(state_dir: Path, invited: PublicIdentity) -> str:
    """One word that hands the cluster's secret to `invited`. Raises ConfigError without an identity of our own."""
    identity = require_identity(state_dir)
    load_cluster_keys(state_dir)  # makes the secret if there is none yet
    fresh = X25519PrivateKey.generate()
    public = fresh.public_key().public_bytes_raw()
    key = _key(fresh, invited.curve, public, invited.curve)
    own = identity.public.signing + identity.public.curve
    body = own + public + ChaCha20Poly1305(key).encrypt(bytes(12), read_secret(state_dir), own)
    signature = identity.sign(_DOMAIN + invited.signing + invited.curve + body)
    return _PREFIX + base64.urlsafe_b64encode(body + signature).decode().rstrip("=")


def open_invitation(state_dir: Path, word: str) -> Invitation:
    """Raises ConfigError for what is no invitation, is damaged, or is meant for somebody else. Changes nothing."""
    identity = require_identity(state_dir)
    word = word.strip()
    text = word.removeprefix(_PREFIX)
    try:
        content = base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True)
    except (binascii.Error, ValueError):
        content = b""
    if not word.startswith(_PREFIX) or len(content) != _ALL_BYTES:
        raise ConfigError("this is not an invitation that `kvcomm keys invite` printed: copy the whole word")
    body, signature = content[:-_SIGNATURE_BYTES], content[-_SIGNATURE_BYTES:]
    inviter = PublicIdentity(body[:KEY_BYTES], body[KEY_BYTES : 2 * KEY_BYTES])
    public, sealed = body[2 * KEY_BYTES : 3 * KEY_BYTES], body[3 * KEY_BYTES :]
    own = identity.public
    elsewhere = ConfigError(
        "this invitation is damaged, or was made for another line than `kvcomm keys show` prints here"
    )
    if not inviter.verifies(signature, _DOMAIN + own.signing + own.curve + body):
        raise elsewhere
    try:
        key = _key(X25519PrivateKey.from_private_bytes(identity.curve_secret), public, public, own.curve)
        secret = ChaCha20Poly1305(key).decrypt(bytes(12), sealed, inviter.signing + inviter.curve)
    except (InvalidTag, ValueError):
        raise elsewhere from None
    return Invitation(inviter, secret)


def require_identity(state_dir: Path) -> Identity:
    """The identity of `state_dir`. Raises ConfigError, naming the command, if it has none."""
    identity = load_identity(state_dir)
    if identity is None:
        raise ConfigError("this state directory has no identity yet: run `kvcomm keys new`")
    return identity


def _key(secret: X25519PrivateKey, other: bytes, fresh: bytes, invited: bytes) -> bytes:
    """Used once, so that the nonce may be constant. Raises ValueError for a key of low order."""
    shared = secret.exchange(X25519PublicKey.from_public_bytes(other))
    return HKDF(SHA256(), KEY_BYTES, None, _DOMAIN + fresh + invited).derive(shared)
