"""What a driver counted since it started. Written on the driver's loop only; reading it elsewhere gives a recent
picture."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class WireCounters:
    """`sent`, `received` and `lost` count frames by message type name; `lost` were refused by our own transport (full
    queue, no such connection); `sent_bytes` are those of the frames in `sent`, seals included,
    payloads not. `dropped` counts what came in and was not used, by reason: malformed, bad_seal,
    undecodable, unasked_payload, bad_write. `failures` counts errors of ours that were caught to keep the node alive
    (they are logged). `shared_bytes_adopted` were taken from a peer's shared memory instead of received;
    `shared_blocks_refused` could not be, and were asked for once more as chunks."""

    sent: Counter[str] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    unreachable: int = 0
    failures: int = 0
    payload_bytes_sent: int = 0
    payload_bytes_received: int = 0
    verified_blocks: int = 0
    mismatched_blocks: int = 0
    shared_bytes_adopted: int = 0
    shared_blocks_refused: int = 0
    sent_bytes: Counter[str] = field(default_factory=Counter)

    def copy(self) -> WireCounters:
        """An independent snapshot."""
        return WireCounters(
            Counter(self.sent),
            Counter(self.received),
            Counter(self.lost),
            Counter(self.dropped),
            self.unreachable,
            self.failures,
            self.payload_bytes_sent,
            self.payload_bytes_received,
            self.verified_blocks,
            self.mismatched_blocks,
            self.shared_bytes_adopted,
            self.shared_blocks_refused,
            Counter(self.sent_bytes),
        )
