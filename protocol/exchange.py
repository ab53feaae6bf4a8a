"""Gossip between two nodes: one tells what it knows, the other answers with what is news, and gets the same back."""

from __future__ import annotations

from collections.abc import Callable

from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.directory import Directory
from kvcomm_p2p.protocol.events import Effect, SendMessage
from kvcomm_p2p.protocol.gossip import Known, Replicas
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.membership import Membership, Peer, PeerChange
from kvcomm_p2p.protocol.messages import (
    Ack,
    DigestEntry,
    Message,
    OriginDelta,
    Rumour,
    Status,
    Syn,
    SynAck,
)


class Exchange:
    """Keeps the replicated logs, and what they say about the directory, in step with peers.

    `carry_out` turns changes of membership into effects and takes their consequences. `subscribed`: peers' logs are wanted;
    if not, they look complete in digests, and what comes is used for its member records alone.
    """

    def __init__(
        self,
        config: NodeConfig,
        members: Membership,
        replicas: Replicas,
        directory: Directory,
        carry_out: Callable[[list[PeerChange]], list[Effect]],
    ) -> None:
        self._config = config
        self._members = members
        self._replicas = replicas
        self._directory = directory
        self._carry_out = carry_out
        self.unknown_senders = 0
        self.subscribed = True

    def begin(self, peer: Peer, now: float) -> SendMessage:
        """The first leg."""
        return _to(peer, Syn(self._replicas.digest(self._known(now))))

    def syn(self, sender: NodeId, message: Syn, now: float) -> list[Effect]:
        effects = self._read_digest(sender, message.digest, now)
        peer = self._reachable(sender)
        if peer is None:
            return effects
        known = self._known(now)
        deltas = self._deltas(known, message.digest)
        return [*effects, _to(peer, SynAck(self._replicas.digest(known), deltas))]

    def syn_ack(self, sender: NodeId, message: SynAck, now: float) -> list[Effect]:
        effects = self._read_digest(sender, message.digest, now)
        effects += self._apply(message.deltas, now)
        peer = self._reachable(sender)
        if peer is None:
            return effects
        deltas = self._deltas(self._known(now), message.digest)
        return [*effects, _to(peer, Ack(deltas))] if deltas else effects

    def ack(self, message: Ack, now: float) -> list[Effect]:
        return self._apply(message.deltas, now)

    def _known(self, now: float) -> list[Known]:
        """Everybody we tell of, this node among them, ascending by id."""
        members = self._members
        known = [Known(members.me, members.incarnation, True)]
        known += [
            Known(peer.record, peer.incarnation, self.subscribed and peer.state is not Status.LEFT, peer.state)
            for peer in members.told(now)
        ]
        known.sort(key=lambda item: item.member.node_id)
        return known

    def _deltas(self, known: list[Known], digest: tuple[DigestEntry, ...]) -> tuple[OriginDelta, ...]:
        living = [item for item in known if item.status in (Status.ALIVE, Status.SUSPECT)]
        return self._replicas.deltas(living, digest, self._config.delta_bytes_max)

    def _read_digest(self, sender: NodeId, digest: tuple[DigestEntry, ...], now: float) -> list[Effect]:
        changes: list[PeerChange] = []
        for entry in digest:
            if entry.node_id == self._members.me.node_id:
                self._members.introduced(sender)
            rumour = Rumour(entry.node_id, entry.epoch, entry.incarnation, entry.status)
            changes += self._members.hear(rumour, now)
            self._replicas.learn_floor(entry)
        return self._carry_out(changes)

    def _apply(self, deltas: tuple[OriginDelta, ...], now: float) -> list[Effect]:
        effects: list[Effect] = []
        for delta in deltas:
            effects += self._carry_out(self._members.learn(delta.member, delta.incarnation, now))
            origin = delta.member.node_id
            peer = self._members.get(origin)
            wanted = self.subscribed and peer is not None and peer.state is not Status.LEFT
            if not wanted or peer is None or peer.record.epoch != delta.member.epoch:
                continue
            change = self._replicas.apply(delta)
            if change is None:
                continue
            if change.reset:
                self._directory.remove_holder(origin)
            for meta in change.put:
                self._directory.add(origin, meta)
            for anchor_id in change.deleted:
                self._directory.remove(origin, anchor_id)
        return effects

    def _reachable(self, sender: NodeId) -> Peer | None:
        """The peer to answer, if it is there; one that is dead or left here hears so when it pings."""
        peer = self._members.get(sender)
        if peer is None:
            self.unknown_senders += 1
        return peer if peer is not None and not peer.is_gone else None


def _to(peer: Peer, message: Message) -> SendMessage:
    return SendMessage(peer.node_id, peer.record.control, message)
