"""Which node names this user runs on this machine: one locked file per live node, beside its socket.

The lock is the truth: the kernel drops it when its process dies, however it dies. Files that a dead process left behind
are taken over silently.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from kvcomm_p2p.errors import ConfigError, NameTakenError

SOCKET_PATH_BYTES_MAX = 107
"""`sun_path` holds 108 bytes with the final zero."""

NAME_BYTES_MAX = 64
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_CLAIM_RETRY_S = 0.02
_CLAIM_PATIENCE_S = 0.3


@dataclass(frozen=True, slots=True)
class RunningNode:
    """A live node process of this user. `pid` is 0 in the instant in which it has not yet written its own."""

    name: str
    pid: int
    socket: Path


class NameClaim:
    """Exclusive use of `name` in `directory` until `release()` or the end of the process."""

    def __init__(self, name: str, socket: Path, lock: Path, lock_fd: int) -> None:
        self.name = name
        self.socket = socket
        self._lock = lock
        self._lock_fd: int | None = lock_fd

    def release(self) -> None:
        """Removes the socket file and the lock. Calling it again does nothing."""
        if self._lock_fd is None:
            return
        self.socket.unlink(missing_ok=True)
        self._lock.unlink(missing_ok=True)
        os.close(self._lock_fd)
        self._lock_fd = None


def check_name(name: str) -> None:
    """Raises ConfigError unless `name` has 1 to 64 bytes, all printable, no slash, no spaces at its ends."""
    usable = 0 < len(name.encode()) <= NAME_BYTES_MAX and name.isprintable() and "/" not in name
    if not usable or name != name.strip():
        raise ConfigError(
            f"agent name {name!r} cannot be used: take 1 to {NAME_BYTES_MAX} bytes without slashes, control characters "
            "or spaces at the ends"
        )


def socket_path(directory: Path, name: str) -> Path:
    """Where the node `name` listens: NAME.sock, or a digest of the name where that is no file name or too long a path.

    Raises ConfigError for a name that cannot be used and for a directory in which no socket path fits.
    """
    check_name(name)
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    plain = [f"{name}.sock"] if _PLAIN_NAME.fullmatch(name) else []
    for file_name in [*plain, f"{digest}.sock"]:
        path = directory / file_name
        if len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX:
            return path
    raise ConfigError(
        f"the runtime directory {directory} is too long a path for a Unix socket: set KVCOMM_RUNTIME_DIR to one of at "
        f"most {SOCKET_PATH_BYTES_MAX - len(digest) - len('/.sock')} bytes"
    )


def claim_name(directory: Path, name: str) -> NameClaim:
    """Takes `name` for this process; makes `directory` (mode 0700) if there is none.

    Raises NameTakenError if a live process holds it (naming its pid), ConfigError if the directory cannot be trusted.
    """
    socket = socket_path(directory, name)
    make_private_directory(directory)
    lock = socket.with_suffix(".lock")
    patience_end = time.monotonic() + _CLAIM_PATIENCE_S
    while True:
        lock_fd = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
        if _try_lock(lock_fd, fcntl.LOCK_EX):
            if _is_still(lock_fd, lock):
                break
            os.close(lock_fd)
            continue
        holder = _read_holder(lock_fd)
        os.close(lock_fd)
        # Whoever lists the running nodes holds the lock for an instant; a node holds it for good.
        if time.monotonic() > patience_end:
            pid = holder[1] if holder else 0
            whom = f"process {pid}" if pid else "another process"
            raise NameTakenError(
                f"a node named {name!r} already runs here ({whom}): take another --name, or stop that one with Ctrl-C "
                f"or `kill {pid or 'PID'}`"
            )
        time.sleep(_CLAIM_RETRY_S)
    os.ftruncate(lock_fd, 0)
    os.pwrite(lock_fd, json.dumps({"name": name, "pid": os.getpid()}).encode(), 0)
    socket.unlink(missing_ok=True)
    return NameClaim(name, socket, lock, lock_fd)


def running_nodes(directory: Path) -> list[RunningNode]:
    """The live nodes of this user, by name. Frozen and still loading ones count as live."""
    nodes: list[RunningNode] = []
    for lock in sorted(directory.glob("*.lock")) if directory.is_dir() else []:
        with contextlib.suppress(OSError):
            lock_fd = os.open(lock, os.O_RDONLY)
            try:
                if _try_lock(lock_fd, fcntl.LOCK_SH):
                    continue
                holder = _read_holder(lock_fd)
            finally:
                os.close(lock_fd)
            name, pid = holder or (lock.stem, 0)
            nodes.append(RunningNode(name, pid, lock.with_suffix(".sock")))
    return sorted(nodes, key=lambda node: node.name)


def make_private_directory(directory: Path) -> None:
    """Makes `directory` with mode 0700. Raises ConfigError if it exists and others may enter it, or it is not ours."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.stat()
    except OSError as error:
        raise ConfigError(
            f"the runtime directory {directory} cannot be made ({error.strerror}): set KVCOMM_RUNTIME_DIR to a folder "
            "of yours"
        ) from error
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"the runtime directory {directory} belongs to another user: set KVCOMM_RUNTIME_DIR to one of yours"
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(
            f"other users may enter the runtime directory {directory}: run `chmod 700 {directory}`, or set "
            "KVCOMM_RUNTIME_DIR to a folder of its own"
        )


def _try_lock(lock_fd: int, kind: int) -> bool:
    try:
        fcntl.flock(lock_fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_still(lock_fd: int, lock: Path) -> bool:
    """False if the file was removed (by a node that ended) between our open and our lock."""
    try:
        return os.path.samestat(os.fstat(lock_fd), lock.stat())
    except FileNotFoundError:
        return False


def _read_holder(lock_fd: int) -> tuple[str, int] | None:
    try:
        holder = json.loads(os.pread(lock_fd, 4096, 0))
        return str(holder["name"]), int(holder["pid"])
    except (ValueError, KeyError, TypeError):
        return None
