"""Who we are to nodes of other people and machines, and whom we let in.

An *identity* belongs to a state directory: an Ed25519 key that signs and a CURVE key that encrypts. All nodes of the
directory share it; a node's id is a digest of the public signing key and the node's name, so nobody else can claim it. The
*allow-list* beside it names the identities of others that may connect; it can be changed while nodes run.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from kvcomm_p2p.errors import ConfigError
from kvcomm_p2p.net.private_files import locked, private_dir, read_private, write_private
from kvcomm_p2p.protocol.ids import NODE_ID_BYTES, NodeId

IDENTITY_FILE = "identity.key"
ALLOWED_FILE = "allowed.peers"
KEY_BYTES = 32
ALLOWED_MAX = 4096
ALLOWED_BYTES_MAX = 1 << 20
LABEL_CHARS_MAX = 64

_PREFIX = "kvcomm-peer-1:"
_CHECK_BYTES = 4


@dataclass(frozen=True, slots=True)
class PublicIdentity:
    """What others may know: the Ed25519 `signing` key and the CURVE `curve` key, 32 bytes each."""

    signing: bytes
    curve: bytes

    @property
    def fingerprint(self) -> str:
        """Sixteen hex digits that two people can compare."""
        digits = hashlib.sha256(self.signing + self.curve).hexdigest()[:16]
        return "-".join(digits[at : at + 4] for at in range(0, 16, 4))

    def line(self, label: str = "") -> str:
        """One word to hand to a colleague; `parse_line` reads it."""
        keys = self.signing + self.curve
        check = hashlib.sha256(keys).digest()[:_CHECK_BYTES]
        return _PREFIX + base64.urlsafe_b64encode(keys + check).decode().rstrip("=") + (f"#{label}" if label else "")

    def node_id(self, name: str) -> NodeId:
        """The id of this identity's node called `name`."""
        return node_id_of(self.signing, name)

    def verifies(self, signature: bytes, content: bytes) -> bool:
        """Whether the owner of `signing` made `signature` over `content`. Never raises."""
        return verifies(self.signing, signature, content)


@dataclass(frozen=True, slots=True)
class Allowed:
    """One line of the allow-list."""

    label: str
    public: PublicIdentity


@dataclass(frozen=True)
class Identity:
    """The secret half. Neither is ever logged or printed."""

    signing_secret: bytes = field(repr=False)
    curve_secret: bytes = field(repr=False)

    @cached_property
    def _signer(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(self.signing_secret)

    @cached_property
    def public(self) -> PublicIdentity:
        curve = X25519PrivateKey.from_private_bytes(self.curve_secret).public_key().public_bytes_raw()
        return PublicIdentity(self._signer.public_key().public_bytes_raw(), curve)

    def sign(self, content: bytes) -> bytes:
        """64 bytes. Any thread may call it."""
        return self._signer.sign(content)

    @classmethod
    def new(cls) -> Identity:
        """From the system's random numbers."""
        curve = X25519PrivateKey.generate().private_bytes_raw()
        return cls(Ed25519PrivateKey.generate().private_bytes_raw(), curve)


def node_id_of(signing: bytes, name: str) -> NodeId:
    """First 16 bytes of SHA-256 over a domain, the public signing key and the node's name."""
    return NodeId(hashlib.sha256(b"kvcomm node v1\0" + signing + name.encode()).digest()[:NODE_ID_BYTES])


def verifies(signing: bytes, signature: bytes, content: bytes) -> bool:
    """Whether the owner of the Ed25519 key `signing` made `signature` over `content`. Never raises."""
    try:
        Ed25519PublicKey.from_public_bytes(signing).verify(signature, content)
    except (InvalidSignature, ValueError):
        return False
    return True


def load_identity(state_dir: Path) -> Identity | None:
    """The identity of `state_dir`, None if it has none. Raises ConfigError, naming the fix."""
    path = state_dir / IDENTITY_FILE
    try:
        content = read_private(path, "identity key", 2 * KEY_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable(path, error) from error
    if len(content) != 2 * KEY_BYTES:
        raise ConfigError(f"identity key {path} is damaged; delete it and run: kvcomm keys new")
    return Identity(content[:KEY_BYTES], content[KEY_BYTES:])


def make_identity(state_dir: Path) -> Identity:
    """A new identity for `state_dir`. Raises ConfigError if it has one, or the file cannot be made."""
    identity = Identity.new()
    path = state_dir / IDENTITY_FILE
    try:
        private_dir(state_dir)
        if not write_private(path, identity.signing_secret + identity.curve_secret, replace=False):
            raise ConfigError(f"{path} exists: this state directory has an identity (kvcomm keys show prints it)")
    except OSError as error:
        raise _unusable(path, error) from error
    return identity


def load_allowed(state_dir: Path) -> tuple[Allowed, ...]:
    """The allow-list of `state_dir`, in its order; empty if there is none. Raises ConfigError naming line and fix."""
    path = state_dir / ALLOWED_FILE
    try:
        content = read_private(path, "allow-list", ALLOWED_BYTES_MAX)
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise _unusable(path, error) from error
    allowed: list[Allowed] = []
    try:
        lines = content.decode().splitlines()
    except UnicodeDecodeError:
        raise ConfigError(f"allow-list {path} is not text; delete it and allow your peers again") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                allowed.append(parse_line(line))
            except ConfigError as error:
                raise ConfigError(f"allow-list {path}, line {number}: {error}") from None
    if len(content) > ALLOWED_BYTES_MAX or len(allowed) > ALLOWED_MAX:
        raise ConfigError(f"allow-list {path} is too long: at most {ALLOWED_MAX:,} peers")
    return tuple(allowed)


def allow(state_dir: Path, line: str, label: str = "") -> Allowed:
    """Let the owner of a line in, under `label`; without one, under the name that it has here already, or the line's own.
    Allowing somebody again with a `label` renames. Running nodes notice within seconds. Raises ConfigError.
    """
    new = parse_line(line, label)
    own = load_identity(state_dir)
    if own is not None and own.public == new.public:
        raise ConfigError(
            "this is the line of this state directory itself, which needs no permission: paste your peer's"
        )
    with _changing(state_dir):
        allowed = load_allowed(state_dir)
        if not label:
            new = next((peer for peer in allowed if peer.public == new.public), new)
        others = [peer for peer in allowed if peer.public != new.public]
        if any(peer.label == new.label for peer in others):
            raise ConfigError(f"{new.label!r} is the name of another peer: choose one with --name")
        if len(others) >= ALLOWED_MAX:
            raise ConfigError(f"at most {ALLOWED_MAX:,} peers can be allowed: revoke some first")
        _write_allowed(state_dir, [*others, new])
    return new


def revoke(state_dir: Path, who: str) -> Allowed:
    """Let somebody in no longer: `who` is a name, a fingerprint or a line. Running nodes cut it off within seconds. Raises
    ConfigError if nobody is meant.
    """
    with _changing(state_dir):
        allowed = load_allowed(state_dir)
        for peer in allowed:
            if who in (peer.label, peer.public.fingerprint) or who.partition("#")[0] == peer.public.line():
                _write_allowed(state_dir, [other for other in allowed if other != peer])
                return peer
    names = ", ".join(peer.label for peer in allowed) or "nobody"
    raise ConfigError(f"{who!r} is not in the allow-list (allowed: {names})")


def parse_line(line: str, label: str = "") -> Allowed:
    """What `PublicIdentity.line` wrote. Raises ConfigError for anything else."""
    word, _, own = line.strip().partition("#")
    label = label or own
    problem = "is not a line that `kvcomm keys show` prints: copy the whole line"
    if not word.startswith(_PREFIX):
        raise ConfigError(f"{word[:24]!r} {problem}")
    try:
        content = base64.b64decode(word[len(_PREFIX) :] + "=" * (-len(word[len(_PREFIX) :]) % 4), b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise ConfigError(f"{word[:24]!r} {problem}") from None
    keys, check = content[: 2 * KEY_BYTES], content[2 * KEY_BYTES :]
    if len(keys) != 2 * KEY_BYTES or check != hashlib.sha256(keys).digest()[:_CHECK_BYTES]:
        raise ConfigError(f"{word[:24]!r} {problem}")
    public = PublicIdentity(keys[:KEY_BYTES], keys[KEY_BYTES:])
    label = label or public.fingerprint[:9]
    if (
        len(label) > LABEL_CHARS_MAX
        or not label.isprintable()
        or any(c.isspace() or c in "#:/" for c in label)
        or label == "me"
    ):
        raise ConfigError(
            f"{label!r} cannot be a peer's name: not 'me', no blanks, '#', ':', '/', at most {LABEL_CHARS_MAX}"
        )
    return Allowed(label, public)


@contextmanager
def _changing(state_dir: Path) -> Iterator[None]:
    """One change of the allow-list at a time."""
    try:
        with locked(private_dir(state_dir)):
            yield
    except OSError as error:
        raise _unusable(state_dir, error) from error


def _write_allowed(state_dir: Path, allowed: Iterable[Allowed]) -> None:
    text = "".join(f"{peer.public.line(peer.label)}\n" for peer in allowed)
    path = state_dir / ALLOWED_FILE
    try:
        write_private(path, text.encode(), replace=True)
    except OSError as error:
        raise _unusable(path, error) from error


def _unusable(path: Path, error: OSError) -> ConfigError:
    why = error.strerror or error
    return ConfigError(f"{path}: {why}; set KVCOMM_STATE_DIR to a folder that you can write")
