"""What this node tells of its own anchors: at once if it is news, later or never if it would be told wrong soon.

A pool that is full puts and evicts all the time. While it does, an anchor is announced only after ANNOUNCE_DELAY_S in the
pool, so that what comes and goes is never heard of; what made room for it is told with it, that is as much later at most.
All in all no more than WRITES_PER_S are written, averaged; what waits is told in its last state only.
"""

from __future__ import annotations

import math

from kvcomm_p2p.protocol.anchors import AnchorMeta
from kvcomm_p2p.protocol.budget import Budget
from kvcomm_p2p.protocol.ids import AnchorId
from kvcomm_p2p.protocol.origin_log import OwnLog
from kvcomm_p2p.protocol.pool import PoolChange, is_shared

ANNOUNCE_DELAY_S = 0.2
"""How long an anchor has to be in a pool that evicts until it is announced."""

CHURN_S = 10.0
"""How long a pool counts as one that evicts after it did."""

WRITES_PER_S = 200.0
WRITES_TOGETHER = 10.0
"""Where the rate limits, so many are written at a time."""

WRITES_BURST = 4096.0
"""Log entries written at once at most: what a pool holds when it comes back from disk should not have to wait long."""


class Announcer:
    """Writes the own log. What is to be told waits, by anchor; deletions come first."""

    def __init__(self, now: float) -> None:
        self._puts: dict[AnchorId, tuple[AnchorMeta, float]] = {}
        self._deletions: dict[AnchorId, None] = {}
        self._delete_at = math.inf
        self._evicted_at = -math.inf
        self._writes = Budget(WRITES_PER_S, WRITES_BURST, now)
        self.due_at = math.inf
        self.unspoken = 0

    def __len__(self) -> int:
        return len(self._puts) + len(self._deletions)

    def change(self, change: PoolChange, own: OwnLog, now: float) -> None:
        """The pool changed."""
        added = {meta.anchor_id for meta in change.added if is_shared(meta)}
        for meta in change.removed:
            anchor_id = meta.anchor_id
            if self._puts.pop(anchor_id, None) is not None and anchor_id not in added:
                self.unspoken += 1
            if anchor_id not in added:
                self._evicted_at = now
                if own.lists(anchor_id):
                    self._deletions[anchor_id] = None
        ready_at = now + (ANNOUNCE_DELAY_S if now - self._evicted_at < CHURN_S else 0.0)
        for meta in change.added:
            if is_shared(meta):
                self._deletions.pop(meta.anchor_id, None)
                self._puts[meta.anchor_id] = (meta, ready_at)
                self.due_at = min(self.due_at, ready_at)
        if self._deletions:
            self._delete_at = min(self._delete_at, max(now, self._replaced_at(now)))
            self.due_at = min(self.due_at, self._delete_at)

    def write(self, own: OwnLog, now: float) -> None:
        """Write down what is due."""
        left = int(self._writes.left(now))
        before = own.max_seq
        due = left if self._delete_at <= now else 0
        for anchor_id in [anchor_id for anchor_id, _ in zip(self._deletions, range(due), strict=False)]:
            del self._deletions[anchor_id]
            own.delete(anchor_id, now)
        if not self._deletions:
            self._delete_at = math.inf
        left -= own.max_seq - before
        ready = [anchor_id for anchor_id, (_, ready_at) in self._puts.items() if ready_at <= now][: max(left, 0)]
        for anchor_id in ready:
            own.put(self._puts.pop(anchor_id)[0])
        self._writes.spend(own.max_seq - before, now)
        self.due_at = math.inf
        if len(self):
            first = min((ready_at for _, ready_at in self._puts.values()), default=math.inf)
            self.due_at = max(min(first, self._delete_at), self._writes.ready_at(WRITES_TOGETHER, now))

    def start_again(self) -> None:
        """The log begins anew, in a higher epoch: what it listed is put again by whoever renews it."""
        self._deletions.clear()
        self._delete_at = math.inf

    def _replaced_at(self, now: float) -> float:
        """When the newcomer that has waited longest is told, which is soon; now if nobody waits."""
        return next((ready_at for _, ready_at in self._puts.values()), now)
