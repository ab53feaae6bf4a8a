"""What this node says of what it knows: hashes, rows, entries. Nothing here changes anything but what `refresh` follows."""

from __future__ import annotations

import struct

from kvcomm_p2p.protocol.gossip import Replicas
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.member_table import KnownMembers
from kvcomm_p2p.protocol.membership import Membership
from kvcomm_p2p.protocol.messages import (
    BUCKET_HASH_BYTES,
    BUCKETS,
    COUNTER_MAX,
    HASH_BYTES,
    Buckets,
    Dense,
    DigestEntry,
    Status,
    Syn,
    SynAck,
)
from kvcomm_p2p.protocol.messages.exchanges import bucket_of

UNSUBSCRIBED = bytes(HASH_BYTES)
"""In place of a state: I keep nobody's log but my own."""

ENTRIES_TOLD_MAX = 2048
"""Entries in one SynAck at most: as long as a frame may be. Buckets that do not fit wait for the next exchange."""

_BUCKET_HASHES = struct.Struct(f"<{BUCKETS}I")
_NO_HASHES = bytes(BUCKETS * BUCKET_HASH_BYTES)
assert _BUCKET_HASHES.size == BUCKETS * BUCKET_HASH_BYTES


class Digests:
    """`subscribed`: peers' logs are wanted; if not, this node seems to know everything, and tells of its own log alone."""

    def __init__(self, members: Membership, replicas: Replicas) -> None:
        self._members = members
        self._replicas = replicas
        self._epoch = members.me.epoch
        self._first = 0
        self.subscribed = True

    def begin(self, known: KnownMembers) -> None:
        """The membership has just begun with these."""
        self._members.turned = {}
        self._replicas.begin(known)

    def refresh(self) -> None:
        """Take notice of who came and went. Costs nothing if nobody did."""
        members, replicas = self._members, self._replicas
        if members.turned:
            turned, members.turned = members.turned, {}
            for node_id in turned:
                replicas.count(node_id, members.epoch_of(node_id))
        if members.me.epoch != self._epoch:
            self._epoch = members.me.epoch
            replicas.count(members.me.node_id, self._epoch)

    def syn(self) -> Syn:
        return Syn(self._members.view_hash(), self._replicas.state() if self.subscribed else UNSUBSCRIBED)

    def buckets(self) -> Buckets:
        return Buckets(_packed(self._members.view_hashes()), self._state_hashes())

    def differing(self, theirs: Buckets) -> tuple[int, int]:
        """Masks of the buckets in which we know other members, and of those where only the logs are in another state."""
        view = _differing(_packed(self._members.view_hashes()), theirs.view)
        mine = self._state_hashes()
        logs = 0 if _NO_HASHES in (mine, theirs.hashes) else _differing(mine, theirs.hashes)
        return view, logs & ~view

    def dense(self, mask: int, answer: bool) -> Dense:
        roster = self._replicas.states.roster(mask)
        return Dense(roster, mask.to_bytes(HASH_BYTES, "little"), self._replicas.rows(mask), answer)

    def full(self, mask: int, answer: bool, now: float) -> SynAck:
        """Of as many buckets of `mask` as fit, beginning with another one each time if they do not."""
        going = [peer for peer in self._members.going(now) if mask >> bucket_of(peer.node_id) & 1]
        entries: list[DigestEntry] = []
        covered = 0
        for bucket in [(self._first + step) % BUCKETS for step in range(BUCKETS)]:
            if not mask >> bucket & 1:
                continue
            ids = [node_id for node_id, _ in self._replicas.states.members(1 << bucket)]
            ids += [peer.node_id for peer in going if bucket_of(peer.node_id) == bucket]
            if covered and len(entries) + len(ids) > ENTRIES_TOLD_MAX:
                self._first = bucket
                break
            # A bucket that does not fit even alone is the work of somebody who makes up members; what fits is told.
            entries += [self._of(node_id) for node_id in ids[:ENTRIES_TOLD_MAX]]
            covered |= 1 << bucket
        entries.sort(key=lambda entry: entry.node_id)
        return SynAck(tuple(entries), answer, covered.to_bytes(HASH_BYTES, "little"))

    def entry(
        self, origin: NodeId, epoch: int, incarnation: int, status: Status, *, compared: bool = False
    ) -> DigestEntry:
        """Of the departed, and of those who are not listened to, we seem to know everything: tell us nothing. `compared`: what
        is listed is to be compared, not only how much."""
        unwanted = not self.subscribed and origin != self._members.me.node_id
        if unwanted or status in (Status.DEAD, Status.LEFT) or self._replicas.is_muted(origin):
            return DigestEntry(origin, epoch, incarnation, COUNTER_MAX, COUNTER_MAX, status)
        have = self._replicas.have(origin, epoch)
        digest = (have.set_digest or 0).to_bytes(HASH_BYTES, "little") if compared else b""
        return DigestEntry(origin, epoch, incarnation, have.max_seq, have.gc_floor, status, digest)

    def _of(self, node_id: NodeId) -> DigestEntry:
        members = self._members
        peer = members.get(node_id)
        if peer is None:
            return self.entry(node_id, members.me.epoch, members.incarnation, Status.ALIVE)
        return self.entry(node_id, *peer.standing)

    def _state_hashes(self) -> bytes:
        return _packed(self._replicas.bucket_hashes()) if self.subscribed else _NO_HASHES


def _packed(hashes: list[int]) -> bytes:
    return _BUCKET_HASHES.pack(*(hashed & 0xFFFFFFFF for hashed in hashes))


def _differing(mine: bytes, theirs: bytes) -> int:
    if mine == theirs:
        return 0
    pairs = zip(_BUCKET_HASHES.unpack(mine), _BUCKET_HASHES.unpack(theirs), strict=True)
    return sum(1 << bucket for bucket, (one, other) in enumerate(pairs) if one != other)
