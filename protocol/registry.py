"""An owner's side of the sharded directory: what origins registered here, each for itself.

An origin's rows are soft state. It says how many there should be and what their digests xor to; where that does not
agree it is asked for everything again. Rows go when the origin says so, leaves, restarts or falls silent for
REGISTERED_S; an origin that is merely not alive keeps them, hidden, since it may be falsely accused.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from kvcomm_p2p.protocol.announcer import WRITES_PER_S
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.directory import Directory
from kvcomm_p2p.protocol.ids import AnchorId, NodeId
from kvcomm_p2p.protocol.index_mode import LOG_ENTRY_BYTES
from kvcomm_p2p.protocol.membership import Membership
from kvcomm_p2p.protocol.messages import SHARD_DIGEST_BYTES, ShardRegister, Status

REGISTERED_S = 900.0
"""Rows of an origin that was not heard of for so long are dropped."""

RESEND_S = 2.0
"""An origin is asked to register again at most once in so many seconds, ..."""

OVERFULL_S = 300.0
"""... and one whose rows found no room, once in so many."""


def row_digest(anchor_id: AnchorId, seq: int) -> int:
    """64 bits that stand for one version of one anchor; those of a set are combined by exclusive or."""
    return int.from_bytes(hashlib.blake2b(anchor_id + seq.to_bytes(8, "little"), digest_size=8).digest(), "little")


@dataclass(slots=True)
class _Origin:
    epoch: int
    heard_at: float
    digest: int = 0
    seqs: dict[AnchorId, int] = field(default_factory=dict)
    anchors: int = 0
    bytes_per_s: int = 0
    resend_at: float = 0.0
    """Not asked for everything before this."""


class Registry:
    """Rows that origins registered with this node. Bounded per origin and in all."""

    def __init__(self, me: NodeId, config: NodeConfig, members: Membership) -> None:
        self._config = config
        self._members = members
        self._origins: dict[NodeId, _Origin] = {}
        self.rows = Directory(me)
        self.refused = 0

    def epoch(self, origin: NodeId) -> int | None:
        """In which epoch an origin registered, None if it did not."""
        known = self._origins.get(origin)
        return None if known is None else known.epoch

    def register(self, sender: NodeId, message: ShardRegister, now: float) -> bool:
        """Take in what an origin says of itself. Returns whether to ask it for everything again."""
        known = self._origins.get(sender)
        if known is not None and known.epoch > message.epoch:
            return False
        if known is None or known.epoch < message.epoch or message.reset:
            self.forget(sender)
            resend_at = known.resend_at if known is not None else 0.0
            known = self._origins[sender] = _Origin(message.epoch, now, resend_at=resend_at)
        known.heard_at, known.anchors, known.bytes_per_s = now, message.anchors, message.bytes_per_s
        for anchor_id in message.deleted:
            self._drop(sender, known, anchor_id)
        full = not self._put_all(sender, known, message)
        digest = known.digest.to_bytes(SHARD_DIGEST_BYTES, "little")
        agreed = (len(known.seqs), digest) == (message.count, message.digest)
        if agreed or not message.last or now < known.resend_at:
            return False
        known.resend_at = now + (OVERFULL_S if full else RESEND_S)
        return not full

    def loads(self) -> list[tuple[int, int]]:
        """(anchors, log bytes per second) as every origin tells them, but no more than it can honestly have: one origin must
        not talk everybody into giving up their index."""
        told: list[tuple[int, int]] = []
        for origin in self._origins.values():
            anchors = min(origin.anchors, self._config.anchors_per_peer_max)
            entries_per_s = min(WRITES_PER_S, max(1, anchors))
            told.append((anchors, min(origin.bytes_per_s, int(entries_per_s * LOG_ENTRY_BYTES))))
        return told

    def forget(self, origin: NodeId) -> None:
        if self._origins.pop(origin, None) is not None:
            self.rows.remove_holder(origin)

    def expire(self, now: float) -> None:
        """Drop what belongs to nobody any more."""
        for origin, known in tuple(self._origins.items()):
            peer = self._members.get(origin)
            gone = peer is None or peer.state is Status.LEFT or peer.record.epoch > known.epoch
            if gone or now - known.heard_at >= REGISTERED_S:
                self.forget(origin)

    def _put_all(self, sender: NodeId, known: _Origin, message: ShardRegister) -> bool:
        """False if there was no room for some."""
        room = True
        for put in message.puts:
            self._drop(sender, known, put.anchor_id)
            if (
                len(known.seqs) >= self._config.anchors_per_peer_max
                or len(self.rows) >= self._config.directory_anchors_max
            ):
                self.refused += 1
                room = False
                continue
            self.rows.add(sender, put.meta())
            known.seqs[put.anchor_id] = put.seq
            known.digest ^= row_digest(put.anchor_id, put.seq)
        return room

    def _drop(self, sender: NodeId, known: _Origin, anchor_id: AnchorId) -> None:
        seq = known.seqs.pop(anchor_id, None)
        if seq is not None:
            known.digest ^= row_digest(anchor_id, seq)
            self.rows.remove(sender, anchor_id)
