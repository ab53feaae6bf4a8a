"""Seals: what tells frames of our own processes from anybody else's.

A sealed frame is the frame followed by the first 16 bytes of its HMAC-SHA256 under the cluster's seal key. 16 bytes
leave a forger a chance of 2^-128 per try, which is what the rest of the construction offers anyway (truncation to
half the output is the shortest that RFC 2104 recommends), and keep the smallest control frames small. A seal says "a
process with the cluster's key made this"; it hides nothing, and does not stop somebody who can read the loopback
device from replaying frames. Encrypted connections keep the seals: an allow-list says who may connect, a seal that the sender
belongs to this cluster and holds its current secret.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Iterable

SEAL_BYTES = 16


class Sealer:
    """Seals with one key, opens with that and with others that are accepted for a while. Any thread may use it."""

    def __init__(self, key: bytes) -> None:
        """Raises ValueError for a key shorter than 32 bytes."""
        self._key = _checked(key)
        self._others: tuple[tuple[bytes, float], ...] = ()

    def accept(self, others: Iterable[tuple[bytes, float]]) -> None:
        """From now on these keys open frames too, each up to a time of the monotonic clock (seconds). Replaces those before.

        Raises ValueError for a key shorter than 32 bytes.
        """
        self._others = tuple((_checked(key), until) for key, until in others if key != self._key)

    def seal(self, frame: bytes) -> bytes:
        """The frame with its seal."""
        return frame + hmac.digest(self._key, frame, "sha256")[:SEAL_BYTES]

    def open(self, sealed: bytes | memoryview) -> bytes | None:
        """The frame if its seal is good, otherwise None. Never raises."""
        raw = bytes(sealed)
        if len(raw) < SEAL_BYTES:
            return None
        frame, tag = raw[:-SEAL_BYTES], raw[-SEAL_BYTES:]
        if _matches(self._key, frame, tag):
            return frame
        for key, until in self._others:
            if _matches(key, frame, tag) and time.monotonic() < until:
                return frame
        return None


def _matches(key: bytes, frame: bytes, tag: bytes) -> bool:
    return hmac.compare_digest(hmac.digest(key, frame, "sha256")[:SEAL_BYTES], tag)


def _checked(key: bytes) -> bytes:
    if len(key) < 32:
        raise ValueError(f"a seal key has at least 32 bytes, not {len(key)}")
    return key
