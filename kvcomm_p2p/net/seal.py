"""Seals: what tells frames of our own processes from anybody else's.

A sealed frame is the frame followed by the first 16 bytes of its HMAC-SHA256 under the cluster's seal key. 16 bytes
leave a forger a chance of 2^-128 per try, which is what the rest of the construction offers anyway (truncation to
half the output is the shortest that RFC 2104 recommends), and keep the smallest control frames small. A seal says "a
process with the cluster's key made this"; it hides nothing, and does not stop somebody who can read the loopback
device from replaying frames.
"""

from __future__ import annotations

import hmac

SEAL_BYTES = 16


class Sealer:
    """Seals and opens frames. Stateless apart from the key; any thread may use it."""

    def __init__(self, key: bytes) -> None:
        """Raises ValueError for a key shorter than 32 bytes."""
        if len(key) < 32:
            raise ValueError(f"a seal key has at least 32 bytes, not {len(key)}")
        self._key = key

    def seal(self, frame: bytes) -> bytes:
        """The frame with its seal."""
        return frame + hmac.digest(self._key, frame, "sha256")[:SEAL_BYTES]

    def open(self, sealed: bytes | memoryview) -> bytes | None:
        """The frame if its seal is good, otherwise None. Never raises."""
        raw = bytes(sealed)
        if len(raw) < SEAL_BYTES:
            return None
        frame, tag = raw[:-SEAL_BYTES], raw[-SEAL_BYTES:]
        good = hmac.digest(self._key, frame, "sha256")[:SEAL_BYTES]
        return frame if hmac.compare_digest(good, tag) else None
