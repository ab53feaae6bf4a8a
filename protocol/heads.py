"""Signed heads: the writer of a log vouches for what is in it.

Entries are used as soon as they come. A head says what the log lists when it ends at some number; a replica that is just so
long compares, and has the signature verified. What a wrong signature came with is thrown away, and whoever sent it is not
listened to for a while (not the origin that it spoke of: else any member could silence any other).
"""

from __future__ import annotations

import math

from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.events import Effect, HeadSigned, HeadVerified, SignHead, VerifyHead
from kvcomm_p2p.protocol.gossip import Replicas, Verdict
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.messages import Head, MemberRecord, OriginDelta, origin_head

SIGN_INTERVAL_S = 1.0
"""Seconds between two signatures of our own head."""

MUTED_SENDER_ROUNDS = 50
"""Gossip rounds for which somebody who passed on a forged head is not listened to."""


class Heads:
    """Signs our own head when it has changed, and has those of others verified."""

    def __init__(self, config: NodeConfig, replicas: Replicas) -> None:
        self._required = config.require_signatures
        self._replicas = replicas
        self._signing: Head | None = None
        self._sign_at = -math.inf
        self._due_at = math.inf
        self._verifying: dict[NodeId, tuple[bytes, Head, NodeId]] = {}
        self._muted: dict[NodeId, int] = {}
        self.unsigned = 0
        self.forged = 0

    @property
    def due_at(self) -> float:
        """When `sign` is to be called for a change that came too soon after the last signature."""
        return self._due_at

    def signs_soon(self, now: float) -> bool:
        """Whether a signature was asked for, or will be by the next call of `sign`."""
        return self._signing is not None or now >= self._sign_at

    def round(self) -> None:
        """Once per gossip round: listen again to the muted some day."""
        if self._muted:
            self._muted = {sender: rounds - 1 for sender, rounds in self._muted.items() if rounds > 1}

    def sign(self, me: MemberRecord, now: float) -> list[Effect]:
        """Ask for a signature if there is a key, our head has changed, and the last signature is old enough."""
        own = self._replicas.own
        head = Head(own.max_seq, own.set_digest)
        self._due_at = math.inf
        if not me.public_key or (own.head[:2] == head[:2] and own.head.signature):
            return []
        if now < self._sign_at:
            self._due_at = self._sign_at
            return []
        self._signing, self._sign_at = head, now + SIGN_INTERVAL_S
        return [SignHead(origin_head(me.node_id, me.epoch, head))]

    def signed(self, me: MemberRecord, event: HeadSigned) -> bool:
        """Our head has a signature now. False for one that nobody asked for."""
        head = self._signing
        if head is None or event.head_bytes != origin_head(me.node_id, me.epoch, head):
            return False
        self._signing = None
        self._replicas.own.head = head._replace(signature=event.signature)
        return True

    def admits(self, sender: NodeId, delta: OriginDelta) -> bool:
        """Whether to look at what somebody sends of a log."""
        if sender in self._muted:
            return False
        if self._required and not delta.head_signature and delta.to_seq:
            self.unsigned += 1
            return False
        return True

    def heard(self, sender: NodeId, delta: OriginDelta) -> list[Effect]:
        """A delta was looked at: have its head verified if it is about the log as it is now."""
        log = self._replicas.log(delta.node_id)
        head = delta.head
        if log is None or not head.signature or log.epoch != delta.epoch or log.max_seq != head.seq or not log.whole:
            return []
        if log.head == head and log.set_digest == head.digest:
            return []
        signed = origin_head(delta.node_id, delta.epoch, head)
        if self._verifying.get(delta.node_id, (b"",))[0] == signed:
            return []
        self._verifying[delta.node_id] = (signed, head, sender)
        return [VerifyHead(delta.node_id, signed, head.signature)]

    def verified(self, event: HeadVerified) -> Verdict | None:
        """DIVERGED if what is known here has to go; None if nobody asked for this."""
        signed, head, sender = self._verifying.get(event.origin, (b"", Head(0, 0), event.origin))
        if signed != event.head_bytes:
            return None
        del self._verifying[event.origin]
        log = self._replicas.log(event.origin)
        if log is None:
            return Verdict.KNOWN
        if not event.ok:
            self.forged += 1
            self._muted[sender] = MUTED_SENDER_ROUNDS
            return Verdict.DIVERGED if not log.head.signature or log.max_seq > log.head.seq else Verdict.KNOWN
        self._replicas.accept_head(event.origin, head)
        return Verdict.DIVERGED if log.contradicts_head else Verdict.APPLIED

    def forget(self, node_id: NodeId) -> None:
        """This node is remembered no longer."""
        self._verifying.pop(node_id, None)
        self._muted.pop(node_id, None)
