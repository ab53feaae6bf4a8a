"""This node's part in keeping everybody's logs: what it tells, when, and what it makes of broken promises."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from kvcomm_p2p.protocol.announcer import Announcer
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.directory import Directory
from kvcomm_p2p.protocol.events import Effect, Event, HeadSigned, HeadVerified, SendMessage
from kvcomm_p2p.protocol.exchange import Exchange
from kvcomm_p2p.protocol.gossip import LogChange, Replicas, Verdict
from kvcomm_p2p.protocol.ids import AnchorId, NodeId
from kvcomm_p2p.protocol.member_table import Peer
from kvcomm_p2p.protocol.membership import Membership
from kvcomm_p2p.protocol.messages import Ack
from kvcomm_p2p.protocol.news import NEWS_FANOUT
from kvcomm_p2p.protocol.penalties import PenaltyBox
from kvcomm_p2p.protocol.pool import PoolChange
from kvcomm_p2p.protocol.promises import Promises

SIGNATURE_WAIT_S = 0.25
"""News of a node with a key wait this long for their signature; a driver that does not sign must not silence it."""


class Metadata:
    """Announces own anchors, tells fresh news, and reacts to what turns out to be wrong."""

    def __init__(
        self,
        config: NodeConfig,
        members: Membership,
        replicas: Replicas,
        directory: Directory,
        exchange: Exchange,
        introduce: Callable[[Peer], SendMessage],
        rng: random.Random,
        now: float,
    ) -> None:
        self._config = config
        self._members = members
        self._replicas = replicas
        self._directory = directory
        self._exchange = exchange
        self._introduce = introduce
        self._rng = rng
        self._announcer = Announcer(now)
        self._promises = Promises()
        self._now = now
        self._told_seq = 0
        self._signature_due_at = math.inf
        self.on_event: dict[type, Callable[[Any, float], list[Effect]]] = {
            HeadSigned: self.head_signed,
            HeadVerified: self.head_verified,
        }

    def next_deadline(self) -> float:
        """When `tick` has something to do."""
        return min(
            self._announcer.due_at,
            self._exchange.news.due_at,
            self._exchange.supply.next_deadline(self._now),
            self._exchange.heads.due_at,
            self._signature_due_at,
        )

    def round(self, now: float) -> None:
        """Once per gossip round: let limits and mutings run out."""
        self._replicas.collect(now, self._config.tombstone_s)
        self._exchange.heads.round()

    def announce(self, change: PoolChange, now: float) -> None:
        """The pool changed: tell the directory at once, and by and by the log of what peers may know."""
        me = self._members.me.node_id
        for meta in change.removed:
            self._directory.remove(me, meta.anchor_id)
        for meta in change.added:
            self._directory.add(me, meta)
        self._announcer.change(change, self._replicas.own, now)

    def tick(self, now: float) -> list[Effect]:
        self._now = now
        own, effects = self._replicas.own, self._exchange.supply.tick(now)
        if self._announcer.due_at <= now:
            before = own.max_seq
            self._announcer.write(own, now)
            if own.max_seq != before and not self._waits_for_signature(now):
                self._tell_own(now)
        if self._signature_due_at <= now:
            self._signature_due_at = math.inf
            self._tell_own(now)
        effects += self._exchange.heads.sign(self._members.me, now)
        if self._exchange.news.due_at <= now:
            effects += self._tell(now)
        return effects

    def renewed(self) -> None:
        """Our log began anew in a higher epoch."""
        self._told_seq = 0
        self._announcer.start_again()

    def _waits_for_signature(self, now: float) -> bool:
        if not self._members.me.public_key or not self._exchange.heads.signs_soon(now):
            return False
        self._signature_due_at = min(self._signature_due_at, now + SIGNATURE_WAIT_S)
        return True

    def _tell_own(self, now: float) -> None:
        self._exchange.news.add(self._members.me.node_id, self._told_seq, now)
        self._told_seq = self._replicas.own.max_seq

    def _tell(self, now: float) -> list[Effect]:
        alive = self._members.alive()
        deltas, size = self._exchange.news.take(now)
        if not deltas or not self._exchange.supply.affords(size, NEWS_FANOUT, now):
            return []
        effects: list[Effect] = []
        everything = Ack(deltas, fresh=True)
        for peer in self._rng.sample(alive, min(NEWS_FANOUT, len(alive))):
            told = tuple(delta for delta in deltas if delta.node_id != peer.node_id)
            if told:
                effects += [] if peer.introduced else [self._introduce(peer)]
                message = everything if len(told) == len(deltas) else Ack(told, fresh=True)
                effects.append(SendMessage(peer.node_id, peer.record.control, message))
        return effects

    def head_signed(self, event: HeadSigned, now: float) -> list[Effect]:
        """Tell it: with what it is about, if that was not told yet."""
        if self._exchange.heads.signed(self._members.me, event):
            self._signature_due_at = math.inf
            self._tell_own(now)
        return []

    def head_verified(self, event: HeadVerified, now: float) -> list[Effect]:
        """A log that its writer does not vouch for goes, with what the directory has of it; it is asked for anew."""
        if self._exchange.heads.verified(event) is not Verdict.DIVERGED:
            return []
        _, change = self._replicas.discard(event.origin)
        return self._anew(event.origin, change, now)

    def _anew(self, origin: NodeId, change: LogChange, now: float) -> list[Effect]:
        self._exchange.change_directory(origin, change)
        peer = self._members.get(origin)
        return [] if peer is None or peer.is_gone else [self._exchange.begin(peer, now)]

    def observe(self, event: Event, effects: Sequence[Effect], penalties: PenaltyBox, now: float) -> list[Effect]:
        """What went into the node and came out of it: react to holders that do not have what they announce."""
        more: list[Effect] = []
        for holder, anchor_id in self._promises.observe(event, effects):
            if holder != self._members.me.node_id:
                more += self.announced_but_gone(holder, anchor_id, penalties, now)
        return more

    def announced_but_gone(
        self, holder: NodeId, anchor_id: AnchorId, penalties: PenaltyBox, now: float
    ) -> list[Effect]:
        """A holder does not have, or not for us, what its log lists: that is not found there any more, and its news are
        asked for. If this happens with it often, it is not asked for a while."""
        log = self._replicas.log(holder)
        entry = log.latest(anchor_id) if log is not None else None
        self._directory.remove(holder, anchor_id)
        if entry is not None and entry.meta is not None and self._promises.broken(holder):
            penalties.punish(holder, now)
        peer = self._members.get(holder)
        return [] if peer is None or peer.is_gone else [self._exchange.begin(peer, now)]

    def forget(self, node_id: NodeId) -> None:
        """This node is remembered no longer."""
        self._promises.forget(node_id)
        self._exchange.heads.forget(node_id)
