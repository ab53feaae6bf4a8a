"""Files that only their owner may read or change: secrets, and lists that decide who is let in."""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvcomm_p2p.errors import ConfigError


def private_dir(path: Path) -> Path:
    """Make a folder (mode 0700) if it is missing; returns it. Raises ConfigError if it is not a folder of ours,
    OSError."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    if status.st_uid != os.geteuid():
        raise ConfigError(f"{path} belongs to another user; choose a folder of your own")
    return path


def read_private(path: Path, what: str, bytes_max: int) -> bytes:
    """At most `bytes_max` + 1 bytes of a file of ours that no other user can read.

    Checks are made on the open file, so that it cannot be exchanged between check and use; a symbolic link is not followed.
    Raises ConfigError naming the fix (`what` is what people call the file), OSError.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{what} {path} is not a file; remove it")
        if status.st_uid != os.geteuid():
            raise ConfigError(f"{what} {path} belongs to another user; set KVCOMM_STATE_DIR to a folder of your own")
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise ConfigError(f"{what} {path} can be read by other users; run: chmod 600 {path}")
        return file.read(bytes_max + 1)


def write_private(path: Path, content: bytes, *, replace: bool) -> bool:
    """Write a whole file (mode 0600) under a private name, then put it in its place: nobody ever sees half of it, and it
    is on disk when this returns.

    False, and nothing changes, if it exists and is not to be replaced (whoever comes first wins). Raises OSError.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    written = True
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if replace:
            partial.replace(path)
        else:
            try:
                os.link(partial, path)
            except FileExistsError:
                written = False
    finally:
        partial.unlink(missing_ok=True)
    _sync_folder(path.parent)
    return written


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Nobody else (process or thread) is inside for the same folder. The lock ends with its holder's process."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def version_of(path: Path) -> tuple[int, int, int]:
    """Changes when the file is replaced or written; zeros while it is missing."""
    with suppress(OSError):
        status = path.stat(follow_symlinks=False)
        return status.st_ino, status.st_mtime_ns, status.st_size
    return 0, 0, 0


def _sync_folder(folder: Path) -> None:
    """A new name is durable once its folder is."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # some file systems cannot
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
