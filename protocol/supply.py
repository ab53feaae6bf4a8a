"""What this node sends of logs: as much as the budget allows, to whom it helps most first."""

from __future__ import annotations

import math
from collections.abc import Iterable

from kvcomm_p2p.protocol.budget import Budget
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.events import Effect, SendMessage
from kvcomm_p2p.protocol.gossip import Cut, Have, Replicas
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.member_table import Peer
from kvcomm_p2p.protocol.membership import Membership
from kvcomm_p2p.protocol.messages import COUNTER_MAX, Ack, DigestEntry, OriginDelta

PUSH_BYTES_MAX = 16 * 1024
"""What a peer lacks is sent unasked up to this size; it asks for more, one peer for each log."""

ANSWER_BYTES_MIN = 8 * 1024
"""Answers wait until the budget allows this much: room for the largest entry."""

BURST_BYTES = 2**20
"""What may be sent at once after a quiet time."""


class Supply:
    """Answers what peers want, and pushes what they lack. Bounded: of each peer the last question waits."""

    def __init__(self, config: NodeConfig, members: Membership, replicas: Replicas, now: float) -> None:
        self._message_bytes_max = config.delta_bytes_max
        self._members = members
        self._replicas = replicas
        self._budget = Budget(config.gossip_bytes_per_s_max, max(config.delta_bytes_max, BURST_BYTES), now)
        self._waiting: dict[NodeId, tuple[DigestEntry, ...]] = {}

    def next_deadline(self, now: float) -> float:
        """When `tick` can answer somebody who waits; infinity if nobody does."""
        return self._budget.ready_at(ANSWER_BYTES_MIN, now) if self._waiting else math.inf

    def tick(self, now: float) -> list[Effect]:
        """Answer who waits, as far as the budget goes."""
        effects: list[Effect] = []
        while self._waiting and self._budget.left(now) >= ANSWER_BYTES_MIN:
            sender = next(iter(self._waiting))
            wanted = self._waiting.pop(sender)
            peer = self._members.get(sender)
            if peer is not None and not peer.is_gone:
                effects.append(self._answer(peer, wanted, now))
        return effects

    def answer(self, peer: Peer, wanted: tuple[DigestEntry, ...], now: float) -> list[Effect]:
        """Send what is wanted, now or as soon as the budget allows."""
        if not self._waiting and self._budget.left(now) >= ANSWER_BYTES_MIN:
            return [self._answer(peer, wanted, now)]
        self._waiting.pop(peer.node_id, None)
        self._waiting[peer.node_id] = wanted
        return []

    def push(
        self, peer: Peer, behind: Iterable[tuple[NodeId, Have | None]], now: float, *, asked: bool = False
    ) -> tuple[list[Effect], bool]:
        """Send what somebody lacks, if it is little or if it told its rows because of it (`asked`); None stands for members
        that it does not know. Also whether something was left out."""
        deltas, left_out = self._cuts(behind, COUNTER_MAX if asked else PUSH_BYTES_MAX, now)
        return ([_to(peer, Ack(deltas))] if deltas else []), left_out

    def affords(self, size: int, times: int, now: float) -> bool:
        """Whether news of `size` bytes may be told so many times; they are paid for then."""
        if self._budget.left(now) < size:
            return False
        self._budget.spend(size * times, now)
        return True

    def _answer(self, peer: Peer, wanted: Iterable[DigestEntry], now: float) -> SendMessage:
        asked: list[tuple[NodeId, Have | None]] = []
        for entry in wanted:
            epoch = self._replicas.states.epoch_of(entry.node_id)
            if epoch is not None:
                outdated = entry.epoch < epoch
                asked.append((entry.node_id, None if outdated else Have.of(entry)))
        deltas, more = self._cuts(asked, COUNTER_MAX, now)
        return _to(peer, Ack(deltas, True, more))

    def _cuts(
        self, behind: Iterable[tuple[NodeId, Have | None]], entries_room: int, now: float
    ) -> tuple[tuple[OriginDelta, ...], bool]:
        """News for somebody, unknown origins first, then those with the fewest; and whether something was left out.

        Past `entries_room` the unknown are only introduced.
        """
        order = [(have is not None, self._replicas.lacks(origin, have) or 0, origin, have) for origin, have in behind]
        order.sort(key=lambda item: item[:3])
        room = int(min(self._message_bytes_max, self._budget.left(now)))
        deltas: list[OriginDelta] = []
        left_out = False
        for _, _, origin, have in order:
            cut = self._cut(origin, have, room, entries_room)
            if cut is None:
                left_out = left_out or self._replicas.lacks(origin, have) is not None
                continue
            deltas.append(cut.delta)
            room -= cut.bytes
            entries_room -= cut.bytes if cut.delta.entries else 0
            left_out = left_out or not cut.whole
            self._budget.spend(cut.bytes, now)
        return tuple(deltas), left_out

    def _cut(self, origin: NodeId, have: Have | None, room: int, entries_room: int) -> Cut | None:
        if have is not None:
            return self._replicas.cut(origin, have, min(room, entries_room), None, 0)
        me = self._members.me
        if origin == me.node_id:
            return self._replicas.introduction(me, self._members.incarnation, room, entries_room)
        peer = self._members.get(origin)
        if peer is None:
            return None
        return self._replicas.introduction(peer.record, peer.incarnation, room, entries_room)


def _to(peer: Peer, message: Ack) -> SendMessage:
    return SendMessage(peer.node_id, peer.record.control, message)
