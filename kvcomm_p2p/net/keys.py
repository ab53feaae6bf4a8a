"""The cluster's key: made on first use, kept where only its owner can read it; every purpose gets its own derived
key."""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from kvcomm_p2p.errors import ConfigError

KEY_FILE = "cluster.key"
KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class ClusterKeys:
    """Independent 32-byte keys. Neither is ever logged or printed.

    `seal` authenticates frames; `content` keys everything derived from content (ids, fingerprints, group tags).
    """

    seal: bytes = field(repr=False)
    content: bytes = field(repr=False)

    @classmethod
    def derive(cls, secret: bytes) -> ClusterKeys:
        """HKDF-Expand (RFC 5869) of one block per purpose; the secret is uniform already, so there is no extract
        step."""
        return cls(seal=_expand(secret, b"kvcomm seal v1"), content=_expand(secret, b"kvcomm content v1"))


def load_cluster_keys(state_dir: Path) -> ClusterKeys:
    """Keys of the cluster whose secret is `state_dir`/cluster.key, which is made if it is missing.

    Processes that start at the same time agree on one key. Raises ConfigError, naming the fix, if the file cannot be
    made or read, is not ours, is readable by others, or does not hold a key.
    """
    path = state_dir / KEY_FILE
    try:
        private_dir(state_dir)
        if not path.exists():
            _make(path)
        return ClusterKeys.derive(_read(path))
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"cluster key {path}: {why}; set KVCOMM_STATE_DIR to a folder that you can write") from error


def private_dir(path: Path) -> Path:
    """Make a folder (mode 0700) if it is missing; returns it. Raises ConfigError if it is not a folder of ours,
    OSError."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    if status.st_uid != os.geteuid():
        raise ConfigError(f"{path} belongs to another user; choose a folder of your own")
    return path


def _make(path: Path) -> None:
    """Write the whole key under a private name, then link it: whoever links first wins, and nobody sees half a key."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _read(path: Path) -> bytes:
    """Checks are made on the open file, so that it cannot be exchanged between check and use."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid():
            raise ConfigError(
                f"cluster key {path} belongs to another user; set KVCOMM_STATE_DIR to a folder of your own"
            )
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise ConfigError(f"cluster key {path} can be read by other users; run: chmod 600 {path}")
        secret = file.read(KEY_BYTES + 1)
    if len(secret) != KEY_BYTES:
        raise ConfigError(f"cluster key {path} is damaged; delete it and restart all agents of this cluster")
    return secret


def _expand(secret: bytes, label: bytes) -> bytes:
    return hmac.digest(secret, label + b"\x01", "sha256")
