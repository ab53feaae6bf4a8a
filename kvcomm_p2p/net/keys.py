"""The cluster's secret: made on first use, kept where only its owner can read it, exchanged without stopping everybody;
every purpose gets its own derived key."""

from __future__ import annotations

import hmac
import secrets
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path

from kvcomm_p2p.errors import ConfigError
from kvcomm_p2p.net.private_files import locked, private_dir, read_private, write_private

KEY_FILE = "cluster.key"
OLD_KEY_FILE = "cluster.key.old"
"""The secret before the last rotation, followed by the time (Unix seconds, little-endian u64) up to which it opens."""

KEY_BYTES = 32
MARK_BYTES = 8
GRACE_S = 3600.0
"""How long an exchanged secret still opens frames."""

_UNTIL = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class ClusterKeys:
    """Independent 32-byte keys. Neither is ever logged or printed.

    `seal` authenticates frames; `content` keys everything derived from content (ids, fingerprints, group tags). `erasing`
    keys what is said about content that is to be forgotten; the protocol holds it, so it opens nothing else.
    """

    seal: bytes = field(repr=False)
    content: bytes = field(repr=False)

    @classmethod
    def derive(cls, secret: bytes) -> ClusterKeys:
        """HKDF-Expand (RFC 5869) of one block per purpose; the secret is uniform already, so there is no extract
        step."""
        return cls(seal=_expand(secret, b"kvcomm seal v1"), content=_expand(secret, b"kvcomm content v1"))

    @property
    def erasing(self) -> bytes:
        """16 bytes, derived from `content`."""
        return _expand(self.content, b"kvcomm erasing v1")[:16]


@dataclass(frozen=True, slots=True)
class OldSeal:
    """The seal key of an exchanged secret, and until when (Unix seconds) it may open frames. It never seals any."""

    key: bytes = field(repr=False)
    until: float


def cluster_mark(content_key: bytes) -> str:
    """Equal for nodes whose cluster keys are, in hex; tells nothing about the key."""
    return hmac.digest(content_key, b"kvcomm cluster mark", "sha256")[:MARK_BYTES].hex()


def load_cluster_keys(state_dir: Path) -> ClusterKeys:
    """Keys of the cluster whose secret is `state_dir`/cluster.key, which is made if it is missing.

    Processes that start at the same time agree on one key. Raises ConfigError, naming the fix, if the file cannot be
    made or read, is not ours, is readable by others, or does not hold a key.
    """
    path = state_dir / KEY_FILE
    try:
        private_dir(state_dir)
        if not path.exists():
            write_private(path, secrets.token_bytes(KEY_BYTES), replace=False)
        return ClusterKeys.derive(_read(path))
    except OSError as error:
        raise _unusable(path, error) from error


def load_old_seal(state_dir: Path, now: float) -> OldSeal | None:
    """The seal key before the last rotation, if it still counts at `now` (Unix seconds). Raises ConfigError."""
    path = state_dir / OLD_KEY_FILE
    try:
        content = read_private(path, "old cluster key", KEY_BYTES + _UNTIL.size)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable(path, error) from error
    if len(content) != KEY_BYTES + _UNTIL.size:
        raise ConfigError(f"old cluster key {path} is damaged; delete it")
    (until,) = _UNTIL.unpack_from(content, KEY_BYTES)
    return OldSeal(ClusterKeys.derive(content[:KEY_BYTES]).seal, float(until)) if now < until else None


def rotate_cluster_key(state_dir: Path, grace_s: float = GRACE_S, new_secret: bytes | None = None) -> float:
    """Exchange the secret for a new random one (or `new_secret`); returns the Unix time up to which the old one still opens.

    Running nodes take both for opening and go on sealing with the old; nodes that start from now on seal with the new.
    Whatever is derived from content is derived from the new secret, so restarted nodes find nothing of those that are still
    to be restarted. Raises ConfigError.
    """
    until = time.time() + grace_s
    path = state_dir / KEY_FILE
    try:
        private_dir(state_dir)
        with locked(state_dir):
            if path.exists():
                old = _read(path) + _UNTIL.pack(int(until))
                write_private(state_dir / OLD_KEY_FILE, old, replace=True)
            write_private(path, new_secret or secrets.token_bytes(KEY_BYTES), replace=True)
    except OSError as error:
        raise _unusable(path, error) from error
    return until


def read_secret(state_dir: Path) -> bytes:
    """The secret itself, to hand it to another machine under encryption. Raises ConfigError."""
    path = state_dir / KEY_FILE
    try:
        return _read(path)
    except OSError as error:
        raise _unusable(path, error) from error


def _read(path: Path) -> bytes:
    secret = read_private(path, "cluster key", KEY_BYTES)
    if len(secret) != KEY_BYTES:
        raise ConfigError(f"cluster key {path} is damaged; delete it and restart all agents of this cluster")
    return secret


def _unusable(path: Path, error: OSError) -> ConfigError:
    why = error.strerror or error
    return ConfigError(f"cluster key {path}: {why}; set KVCOMM_STATE_DIR to a folder that you can write")


def _expand(secret: bytes, label: bytes) -> bytes:
    return hmac.digest(secret, label + b"\x01", "sha256")
