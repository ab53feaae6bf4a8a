"""The holder's side: token ids and blocks for peers that ask, within limits.

An upload leases its anchors (they are not evicted) until the puller has everything, cancels, goes away, or gives no
credit for `upload_lease_s`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kvcomm_p2p.protocol.anchors import BLOCK_TOKENS, BlockHandle
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.events import BlockUnavailable, Effect, Plane, SendBlock, SendMessage
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.membership import Membership
from kvcomm_p2p.protocol.messages import (
    CancelPull,
    Credit,
    GetTokens,
    Message,
    NoTokens,
    Pull,
    PullBlock,
    PullFailed,
    PullFailedReason,
    Tokens,
)
from kvcomm_p2p.protocol.pool import Lease, Pool, may_see
from kvcomm_p2p.protocol.shared_blocks import Sharing


@dataclass(slots=True)
class _Upload:
    """`next` is the ordinal to be sent next."""

    peer: NodeId
    pull: Pull
    expires_at: float
    leases: tuple[Lease, ...]
    next: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    failed_bytes: int = 0

    @property
    def under_way_bytes(self) -> int:
        return self.sent_bytes - self.failed_bytes - self.received_bytes


class Uploads:
    """Uploads in progress, at most `uploads_max` and at most half of them for one peer (so one cannot shut out all)."""

    def __init__(self, config: NodeConfig, pool: Pool, membership: Membership, sharing: Sharing) -> None:
        self._config = config
        self._sharing = sharing
        self._pool = pool
        self._membership = membership
        self._per_peer_max = max(1, config.uploads_max // 2)
        self._running: dict[tuple[NodeId, int], _Upload] = {}
        self.sent_bytes = 0
        self.busy = 0

    def __len__(self) -> int:
        return len(self._running)

    def next_deadline(self) -> float:
        return min((upload.expires_at for upload in self._running.values()), default=math.inf)

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
        if len(self._running) >= self._config.uploads_max or of_peer >= self._per_peer_max:
            self.busy += 1
            failed = PullFailed(pull.pull_id, None, PullFailedReason.BUSY, self._config.busy_retry_s)
            return [_reply(peer, failed)]
        anchor_ids = dict.fromkeys(block.anchor_id for block in pull.blocks)
        leases = tuple(lease for lease in map(self._pool.lease, anchor_ids) if lease is not None)
        upload = _Upload(peer, pull, now + self._config.upload_lease_s, leases)
        self._running[peer, pull.pull_id] = upload
        return self._send(upload, PullFailedReason.NOT_FOUND)

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
        return self._send(upload, PullFailedReason.EVICTED)

    def cancel(self, peer: NodeId, message: CancelPull) -> None:
        """Ignored if the upload has ended already."""
        upload = self._running.get((peer, message.pull_id))
        if upload is not None:
            self._end(upload)

    def unavailable(self, event: BlockUnavailable) -> list[Effect]:
        """The driver could not read a block that it was told to send."""
        upload = self._running.get((event.to, event.pull_id))
        if upload is None or event.ordinal >= upload.next:
            return []
        upload.failed_bytes += upload.pull.blocks[event.ordinal].kv_bytes
        failed = PullFailed(event.pull_id, event.ordinal, PullFailedReason.EVICTED)
        return [_reply(event.to, failed), *self._send(upload, PullFailedReason.EVICTED)]

    def peer_gone(self, peer: NodeId) -> None:
        """The puller left, expired or cannot be reached."""
        for upload in [upload for upload in self._running.values() if upload.peer == peer]:
            self._end(upload)

    def tick(self, now: float) -> None:
        """End uploads whose puller gave no credit for too long."""
        for upload in [upload for upload in self._running.values() if upload.expires_at <= now]:
            self._end(upload)

    def _groups(self, peer: NodeId) -> tuple[bytes, ...]:
        known = self._membership.get(peer)
        return () if known is None else known.record.groups

    def _handle(self, peer: NodeId, block: PullBlock) -> BlockHandle | None:
        held = self._pool.get(block.anchor_id)
        if held is None or block.index >= held.meta.blocks or not may_see(held.meta, self._groups(peer)):
            return None
        meta = held.meta
        if block.kv_bytes != meta.kv_bytes // meta.tokens * meta.block_tokens(block.index):
            return None
        return held.handles[block.index]

    def _send(self, upload: _Upload, reason: PullFailedReason) -> list[Effect]:
        """Send while the window is open; blocks that are gone (or never were there) fail with `reason`."""
        effects: list[Effect] = []
        pull = upload.pull
        shared = pull.shared and self._sharing.with_peer(upload.peer)
        while upload.next < len(pull.blocks) and upload.under_way_bytes < pull.credit_bytes:
            block, ordinal = pull.blocks[upload.next], upload.next
            upload.next += 1
            handle = self._handle(upload.peer, block)
            if handle is not None:
                upload.sent_bytes += block.kv_bytes
                self.sent_bytes += block.kv_bytes
                effects.append(SendBlock(upload.peer, pull.pull_id, ordinal, handle, block.kv_bytes, shared))
            else:
                effects.append(_reply(upload.peer, PullFailed(pull.pull_id, ordinal, reason)))
        if upload.next == len(pull.blocks) and upload.under_way_bytes <= 0:
            self._end(upload)
        return effects

    def _end(self, upload: _Upload) -> None:
        del self._running[upload.peer, upload.pull.pull_id]
        for lease in upload.leases:
            lease.release()


def _reply(peer: NodeId, message: Message) -> SendMessage:
    return SendMessage(peer, "", message, Plane.BULK_REPLY)
