"""What a node was told to erase, on disk: a file beside its state, so that a restarted node takes nothing of it back.

A head says by which secret things were named: under another one the names of erased content mean nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from pathlib import Path

from kvcomm_p2p.net.private_files import read_private, write_private
from kvcomm_p2p.protocol.erasure_memory import PACKED_BYTES_MAX, count_packed

MAGIC = b"kvcomm erasures 1\n"
MARK_BYTES = 8
DIGEST_BYTES = 32
HEAD_BYTES = len(MAGIC) + MARK_BYTES + DIGEST_BYTES
SUFFIX = ".erased"

log = logging.getLogger("kvcomm_p2p.net")


def read_erasures(path: Path, erasing_key: bytes) -> bytes:
    """What `write_erasures` was given; b"" if there is nothing, or nothing that can be used, which is logged. Raises OSError,
    and ConfigError for a file that others can read."""
    try:
        content = read_private(path, "list of erasures", HEAD_BYTES + PACKED_BYTES_MAX)
    except FileNotFoundError:
        return b""
    mark, digest = content[len(MAGIC) : HEAD_BYTES - DIGEST_BYTES], content[HEAD_BYTES - DIGEST_BYTES : HEAD_BYTES]
    packed = content[HEAD_BYTES:]
    try:
        if content[: len(MAGIC)] != MAGIC or hashlib.sha256(packed).digest() != digest:
            raise ValueError("it was cut or changed")
        count = count_packed(packed)
    except ValueError as error:
        log.error(
            "what was erased is not known any more: %s is damaged (%s). Running members tell of what was erased everywhere; "
            "what was erased on this node alone has to be erased again (kvcomm forget)",
            path,
            error,
        )
        return b""
    if mark != _mark(erasing_key):
        log.warning(
            "the cluster's secret was exchanged, and %d erasures named content by the old one: what comes back has to be "
            "erased again (kvcomm forget)",
            count,
        )
        return b""
    return packed


def write_erasures(path: Path, erasing_key: bytes, packed: bytes) -> None:
    """In place of what was there, on disk when this returns. Raises OSError."""
    content = MAGIC + _mark(erasing_key) + hashlib.sha256(packed).digest() + packed
    write_private(path, content, replace=True)


def _mark(erasing_key: bytes) -> bytes:
    """Tells secrets from each other, and nothing about them."""
    return hmac.digest(erasing_key, b"kvcomm erasures mark", "sha256")[:MARK_BYTES]
