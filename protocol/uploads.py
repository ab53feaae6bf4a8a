"""The holder's side: token ids and blocks for peers that ask, within limits.

An upload leases its anchors (they are not evicted) until the puller has everything, cancels, goes away, or gives no
credit for `upload_lease_s`. Blocks are of the pool, or were pulled a moment ago and are passed on (`onward`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from kvcomm_p2p.protocol.anchors import BLOCK_TOKENS, BlockHandle, BlockKey
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.events import BlockUnavailable, Effect, Plane, SendBlock, SendMessage
from kvcomm_p2p.protocol.ids import AnchorId, NodeId
from kvcomm_p2p.protocol.membership import Membership
from kvcomm_p2p.protocol.messages import (
    CancelPull,
    Capability,
    Credit,
    Encoding,
    GetTokens,
    Message,
    NoTokens,
    Pull,
    PullBlock,
    PullFailed,
    PullFailedReason,
    Tokens,
)
from kvcomm_p2p.protocol.onward import Onward
from kvcomm_p2p.protocol.pool import Lease, Pool, may_see
from kvcomm_p2p.protocol.rates import RequestLimit, TokenBucket
from kvcomm_p2p.protocol.referrals import Referrals
from kvcomm_p2p.protocol.shared_blocks import Sharing

BURST_S = 0.1
"""What an upload cap leaves unused can be made up for, as far as so many seconds of it."""

TOOK_WEIGHT = 0.25
"""Of the latest upload in the mean time that an upload takes, half of which is what a busy holder asks for."""

RETRY_MIN_S = 0.005

TOOK_KEPT_S = 1.0
"""After so long without the end of an upload, what earlier ones took says nothing of the next."""


@dataclass(slots=True)
class _Upload:
    """`next` is the ordinal to be sent next; `there`: ordinals that were held for this peer when the pull began, `failed`:
    those of them that could not be sent. `came`: the first ordinal that is not credited whole, `came_bytes`: those before."""

    peer: NodeId
    pull: Pull
    began_at: float
    expires_at: float
    leases: tuple[Lease, ...]
    there: frozenset[int]
    next: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    failed_bytes: int = 0
    came: int = 0
    came_bytes: int = 0
    failed: set[int] = field(default_factory=set)

    @property
    def under_way_bytes(self) -> int:
        return self.sent_bytes - self.failed_bytes - self.received_bytes

    @property
    def key(self) -> tuple[NodeId, int]:
        return self.peer, self.pull.pull_id

    def size(self, ordinal: int) -> int:
        """Bytes of a block that are wanted."""
        block = self.pull.blocks[ordinal]
        return block.wire_bytes - block.offset

    def take_came(self) -> list[BlockKey]:
        """Blocks that the peer has got as they are, and that it credited since the last call."""
        keys: list[BlockKey] = []
        while self.came < self.next:
            size = 0 if self.came in self.failed else self.size(self.came)
            if self.came_bytes + size > self.received_bytes:
                break
            block = self.pull.blocks[self.came]
            if size and not block.encoded_bytes:
                keys.append(BlockKey(block.anchor_id, block.index))
            self.came_bytes += size
            self.came += 1
        return keys


class Uploads:
    """Uploads in progress, at most `uploads_max` and at most half of them for one peer (so one cannot shut out all)."""

    def __init__(
        self, config: NodeConfig, pool: Pool, onward: Onward, membership: Membership, sharing: Sharing
    ) -> None:
        self._config = config
        self._sharing = sharing
        self._pool = pool
        self._onward = onward
        self._membership = membership
        self._per_peer_max = max(1, config.uploads_max // 2)
        self._running: dict[tuple[NodeId, int], _Upload] = {}
        self._took_s = 0.0
        self._took_at = -math.inf
        self._turns: dict[NodeId, int] = {}
        self._turn = 0
        rate = config.upload_bytes_per_s_max
        self._bucket = TokenBucket(rate, rate * BURST_S)
        self._paused_until = -math.inf
        self.requests = RequestLimit(config.requests_per_peer_s_max)
        self.referrals = Referrals(config.passing_on_s, membership.is_alive)
        self.sent_bytes = 0
        self.busy = 0

    def __len__(self) -> int:
        return len(self._running)

    def next_deadline(self) -> float:
        if not self._running:
            return math.inf
        expires_at = min(upload.expires_at for upload in self._running.values())
        paused = any(self._may_send(upload) for upload in self._running.values())
        return min(expires_at, self._paused_until) if paused else expires_at

    def tokens_for(self, peer: NodeId, request: GetTokens) -> Message:
        """Token ids and digests, or NoTokens whatever the reason."""
        held = self._pool.get(request.anchor_id)
        if held is None or not may_see(held.meta, self._groups(peer)):
            return NoTokens(request.request_id)
        if request.start < held.meta.start or request.end > held.meta.end:
            return NoTokens(request.request_id)
        first = request.start - held.meta.start
        last = request.end - held.meta.start
        token_ids = np.ascontiguousarray(held.token_ids[first:last], dtype="<u4").tobytes()
        return Tokens(request.request_id, token_ids, held.digests[first // BLOCK_TOKENS : -(-last // BLOCK_TOKENS)])

    def start(self, peer: NodeId, pull: Pull, now: float) -> list[Effect]:
        """A peer wants blocks. Raises ValueError if this pull is already running."""
        if (peer, pull.pull_id) in self._running:
            raise ValueError("pull id is in use")
        of_peer = sum(upload.peer == peer for upload in self._running.values())
        full = len(self._running) >= self._config.uploads_max or of_peer >= self._per_peer_max
        if not self.requests.admits(peer, now) or full:
            return [self._busy(peer, pull, now)]
        if pull.encoding is not Encoding.RAW and not self._membership.me.capabilities & Capability.INT8:
            return [_reply(peer, PullFailed(pull.pull_id, None, PullFailedReason.NOT_FOUND))]
        groups = self._groups(peer)
        handles = [self._handle(block, groups) for block in pull.blocks]
        there = frozenset(ordinal for ordinal, handle in enumerate(handles) if handle is not None)
        anchor_ids = dict.fromkeys(pull.blocks[ordinal].anchor_id for ordinal in sorted(there))
        leases = tuple(lease for lease in map(self._pool.lease, anchor_ids) if lease is not None)
        upload = _Upload(peer, pull, now, now + self._config.upload_lease_s, leases, there)
        self._running[upload.key] = upload
        return self._send(now)

    def credit(self, peer: NodeId, message: Credit, now: float) -> list[Effect]:
        """More may follow. Raises ValueError, and the upload ends, if more is credited than was sent."""
        upload = self._running.get((peer, message.pull_id))
        if upload is None:
            return []
        if message.received > upload.sent_bytes:
            self._end(upload)
            raise ValueError("credit for bytes that were not sent")
        upload.received_bytes = max(upload.received_bytes, message.received)
        upload.expires_at = now + self._config.upload_lease_s
        self.referrals.finished(peer, upload.take_came(), now)
        return self._send(now)

    def cancel(self, peer: NodeId, message: CancelPull, now: float) -> list[Effect]:
        """Ignored if the upload has ended already."""
        upload = self._running.get((peer, message.pull_id))
        if upload is None:
            return []
        self._end(upload)
        return self._send(now)

    def unavailable(self, event: BlockUnavailable, now: float) -> list[Effect]:
        """The driver could not read or encode a block that it was told to send."""
        upload = self._running.get((event.to, event.pull_id))
        if upload is None or event.ordinal >= upload.next or event.ordinal in upload.failed:
            return []
        upload.failed.add(event.ordinal)
        upload.failed_bytes += upload.size(event.ordinal)
        failed = PullFailed(event.pull_id, event.ordinal, event.reason)
        return [_reply(event.to, failed), *self._send(now)]

    def peer_gone(self, peer: NodeId) -> None:
        """The puller left, expired or cannot be reached."""
        for upload in [upload for upload in self._running.values() if upload.peer == peer]:
            self._end(upload)
        self._turns.pop(peer, None)
        self.referrals.forget(peer)

    def tick(self, now: float) -> list[Effect]:
        """End uploads whose puller gave no credit for too long; go on with those that an upload cap had stopped."""
        for upload in [upload for upload in self._running.values() if upload.expires_at <= now]:
            self._end(upload)
        return self._send(now)

    def _groups(self, peer: NodeId) -> tuple[bytes, ...]:
        known = self._membership.get(peer)
        return () if known is None else known.record.groups

    def _busy(self, peer: NodeId, pull: Pull, now: float) -> Effect:
        """The whole pull is refused; who has some of it is named as far as the asker may see that."""
        self.busy += 1
        groups = self._groups(peer)
        visible = [BlockKey(b.anchor_id, b.index) for b in pull.blocks if self._visible(b.anchor_id, groups)]
        named = self.referrals.named(peer, visible, now)
        return _reply(peer, PullFailed(pull.pull_id, None, PullFailedReason.BUSY, self._retry_after_s(now), named))

    def _retry_after_s(self, now: float) -> float:
        """Half of what an upload takes these days; before any ended, of what those that run have taken so far."""
        took_s = self._took_s
        if now - self._took_at > TOOK_KEPT_S:
            took_s = now - min((upload.began_at for upload in self._running.values()), default=now)
        return min(self._config.busy_retry_s, max(took_s / 2, RETRY_MIN_S))

    def _visible(self, anchor_id: AnchorId, groups: tuple[bytes, ...]) -> bool:
        held = self._pool.get(anchor_id)
        meta = self._onward.get(anchor_id) if held is None else held.meta
        return meta is not None and may_see(meta, groups)

    def _handle(self, block: PullBlock, groups: tuple[bytes, ...]) -> BlockHandle | None:
        """Where a block is, None if it is not here, not for such a peer, or not of that size."""
        held = self._pool.get(block.anchor_id)
        meta = self._onward.get(block.anchor_id) if held is None else held.meta
        if meta is None or block.index >= meta.blocks or not may_see(meta, groups):
            return None
        if block.kv_bytes != meta.block_bytes(block.index):
            return None
        if held is not None:
            return held.handles[block.index]
        return self._onward.handle(BlockKey(block.anchor_id, block.index))

    def _may_send(self, upload: _Upload) -> bool:
        """Whether the windows of an upload and of its peer have room. The block that crosses a limit is sent whole."""
        if upload.next == len(upload.pull.blocks) or upload.under_way_bytes >= upload.pull.credit_bytes:
            return False
        to_peer = sum(other.under_way_bytes for other in self._running.values() if other.peer == upload.peer)
        return to_peer < self._config.upload_bytes_in_flight_max

    def _send(self, now: float) -> list[Effect]:
        """Send what the windows and the upload cap allow, block by block, the peer first that was served longest ago."""
        effects: list[Effect] = []
        while ready := [upload for upload in self._running.values() if self._may_send(upload)]:
            self._paused_until = self._bucket.ready_at(now)
            if self._paused_until > now:
                break
            upload = min(ready, key=lambda upload: self._turns.get(upload.peer, 0))
            self._turn += 1
            self._turns[upload.peer] = self._turn
            effects.append(self._send_one(upload, now))
        for upload in [upload for upload in self._running.values() if upload.next == len(upload.pull.blocks)]:
            if upload.under_way_bytes <= 0:
                self._took(now - upload.began_at, now)
                self._end(upload)
        return effects

    def _took(self, seconds: float, now: float) -> None:
        """An upload is over, and took so long."""
        fresh = now - self._took_at > TOOK_KEPT_S
        self._took_s = seconds if fresh else self._took_s + TOOK_WEIGHT * (seconds - self._took_s)
        self._took_at = now

    def _send_one(self, upload: _Upload, now: float) -> Effect:
        """The next block, or that it does not come: it was never here (for this peer), or is gone."""
        ordinal, pull, peer = upload.next, upload.pull, upload.peer
        block = pull.blocks[ordinal]
        upload.next += 1
        handle = self._handle(block, self._groups(peer)) if ordinal in upload.there else None
        if handle is None:
            reason = PullFailedReason.EVICTED if ordinal in upload.there else PullFailedReason.NOT_FOUND
            upload.failed.add(ordinal)
            return _reply(peer, PullFailed(pull.pull_id, ordinal, reason))
        size = upload.size(ordinal)
        upload.sent_bytes += size
        self.sent_bytes += size
        self._bucket.take(size, now)
        shared = pull.shared and not block.offset and self._sharing.with_peer(peer)
        sizes = block.offset, block.encoded_bytes, pull.chunk_bytes
        return SendBlock(peer, pull.pull_id, ordinal, handle, block.kv_bytes, shared, *sizes)

    def _end(self, upload: _Upload) -> None:
        del self._running[upload.key]
        if self._membership.get(upload.peer) is None:
            self._turns.pop(upload.peer, None)
        for lease in upload.leases:
            lease.release()


def _reply(peer: NodeId, message: Message) -> SendMessage:
    return SendMessage(peer, "", message, Plane.BULK_REPLY)
