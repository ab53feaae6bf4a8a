"""Joining, leaving and gossip: keeps membership, the replicated logs and the directory in step with each other."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.directory import Directory
from kvcomm_p2p.protocol.events import (
    Effect,
    IdentityRenewed,
    JoinRequested,
    MembersKnown,
    RenewIdentity,
    ReportPeer,
    SendMessage,
)
from kvcomm_p2p.protocol.exchange import RENEWAL_S, Exchange
from kvcomm_p2p.protocol.gossip import Replicas
from kvcomm_p2p.protocol.health import LocalHealth
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.joining import Joining
from kvcomm_p2p.protocol.member_table import Peer
from kvcomm_p2p.protocol.membership import Membership, PeerChange
from kvcomm_p2p.protocol.messages import (
    PROTOCOL_VERSION,
    Bye,
    Hello,
    MemberRecord,
    Message,
    NoPong,
    Ping,
    PingRequest,
    Pong,
    Refused,
    RefusedReason,
    Rumour,
    Status,
    Welcome,
)
from kvcomm_p2p.protocol.metadata import Metadata
from kvcomm_p2p.protocol.pool import PoolChange
from kvcomm_p2p.protocol.probes import Probes
from kvcomm_p2p.protocol.reunion import Reunion
from kvcomm_p2p.protocol.twins import Twins

WELCOME_MEMBERS_MAX = 32
"""Members named in a Welcome; gossip brings the rest."""

SETTLED_S = 5.0
"""So long after a node began, everybody has heard of it by gossip (1,000 nodes: in less than 2 s)."""

REINTRODUCED_SHARE = 1 / 16
"""After that, in this share of contacts with a peer that has not shown that it knows us, we say who we are."""


class Community:
    """What this node knows of the others. `gone` collects peers that just became unavailable, until it is drained."""

    def __init__(
        self,
        config: NodeConfig,
        me: MemberRecord,
        rng: random.Random,
        now: float,
        incarnation: int = 0,
        addresses: tuple[str, ...] = (),
    ) -> None:
        self._config = config
        self._rng = rng
        self.members = Membership(config, me, incarnation)
        self.health = LocalHealth()
        self.probes = Probes(config, self.members, self.health, rng, now)
        self.replicas = Replicas(
            me.node_id,
            me.epoch,
            me.model_id,
            anchors_per_peer_max=config.anchors_per_peer_max,
            anchors_max=config.directory_anchors_max,
        )
        self.directory = Directory(me.node_id)
        self.gone: list[NodeId] = []
        self.forgotten: list[NodeId] = []
        self.stalls = 0
        self.exchange = Exchange(
            config, self.members, self.replicas, self.directory, self._carry_out, self.introduction, now
        )
        self.metadata = Metadata(
            config, self.members, self.replicas, self.directory, self.exchange, self.introduction, rng, now
        )
        self._joining = Joining(config, me.control, self._hello)
        self.on_event: dict[type, Callable[[Any, float], list[Effect]]] = {
            JoinRequested: self.join,
            MembersKnown: self.know,
            IdentityRenewed: self.renewed,
            **self.metadata.on_event,
        }
        self._refuted = 0
        self._round_at = now + rng.random() * config.gossip_interval_s
        self._settled_at = now + SETTLED_S
        self._renew_at = now
        self._deadline: float | None = None
        self._reunion = Reunion(config, self.members, self._joining, rng, self._hello, now, addresses)
        self.twins = Twins(self.members, self._hello)
        self.members.on_own_record = self.twins.heard_of

    @property
    def me(self) -> MemberRecord:
        return self.members.me

    def next_deadline(self) -> float:
        """Computed once after each event."""
        if self._deadline is None:
            waiting = self.metadata.next_deadline(), self.probes.next_deadline(), self._joining.next_deadline()
            self._deadline = min(self._round_at, *waiting)
        return self._deadline

    def woke(self, now: float) -> None:
        """Before anything else at `now`, which may change what there is to wait for. If we come late to what was due, the time
        between was no time to judge others by (the process was stopped, the machine slept, or others had the processors).
        """
        late_s = now - self.next_deadline()
        self._deadline = None
        if late_s > self._config.probe_timeout_s / 2:
            self.stalls += 1
            self.health.worse()
            self.members.stalled(late_s)
            self.probes.stalled(late_s)

    def unsubscribe(self) -> None:
        """Keep no index of peers' anchors from now on."""
        self.exchange.subscribed = False
        for peer in self.members:
            self.replicas.forget(peer.node_id)
            self.directory.remove_holder(peer.node_id)

    def heard(self, sender: NodeId, now: float) -> None:
        """An authenticated message of `sender` is here: it lives."""
        self.members.heard(sender, now)
        self.probes.heard(sender)

    def settle(self, now: float) -> list[Effect]:
        """After everything else at `now`: what follows from what others believe of us."""
        effects: list[Effect] = []
        members = self.members
        if members.refutations != self._refuted:
            self._refuted = members.refutations
            self.health.worse()
        while members.doubted:
            effects += self.probes.ping(members.doubted.pop())
        effects += self.twins.settle(now)
        if members.epoch_wanted > members.me.epoch and now >= self._renew_at and self.twins.may_renew(now):
            self._renew_at = now + RENEWAL_S
            effects.append(RenewIdentity(members.epoch_wanted))
            members.epoch_wanted = members.me.epoch
        return effects + self._reunion.save_incarnation()

    def renewed(self, event: IdentityRenewed, now: float) -> list[Effect]:
        """Go on in a higher epoch: everything of ours is announced anew. Ignored for another node or a lower epoch."""
        member = event.member
        if member.node_id != self.me.node_id or member.epoch <= self.me.epoch:
            return []
        self._settled_at = now + SETTLED_S
        self.members.renew(member)
        self.replicas.renew(member.epoch, member.model_id)
        self.metadata.renewed()
        return [self._reunion.save(), *[self.introduction(peer) for peer in self.members.reachable()]]

    def join(self, event: JoinRequested, now: float) -> list[Effect]:
        """Ask all seeds. An earlier join that was not answered yet ends as missed."""
        return self._joining.begin(event, len(self.members), now)

    def know(self, event: MembersKnown, now: float) -> list[Effect]:
        """Begin with members that are known from elsewhere. Ignored if somebody is known already, or if they are too
        many."""
        if self.members.begin(event.members, now, introduced=event.introduced):
            self.exchange.digests.begin(event.members)
        return []

    def leave(self) -> list[Effect]:
        """Say goodbye to everybody who is there."""
        return self._joining.missed("left") + [self._to(peer, Bye(self.me.epoch)) for peer in self.members.reachable()]

    def tick(self, now: float) -> list[Effect]:
        effects = self._joining.tick(now)
        if self._round_at <= now:
            effects += self._round(now)
        changes, asked = self.probes.tick(now)
        effects += self._carry_out(changes) + asked
        return effects + self.metadata.tick(now)

    def announce(self, change: PoolChange, now: float) -> None:
        """The pool changed: tell the directory, and the log of what peers may know."""
        self.metadata.announce(change, now)

    def unreachable(self, node_id: NodeId, now: float) -> list[Effect]:
        """Its connection was refused or broke: suspect, and nobody here waits for it any longer."""
        changes = self.members.accuse(node_id, now, "unreachable")
        peer = self.members.get(node_id)
        if peer is None:
            return []
        self.gone.append(node_id)
        # If it is there after all, it hears of it at once, and contradicts.
        return self._carry_out(changes) + (self.probes.ping(peer) if changes else [])

    # ------------------------------------------------------------------------------------------------- joining, leaving

    def hello(self, sender: NodeId, message: Hello, now: float) -> list[Effect]:
        """Somebody wants in. Raises ValueError if it speaks for somebody else."""
        record = message.member
        if record.node_id != sender:
            raise ValueError("Hello in the name of somebody else")
        displaced = self.members.displaced_by(record)
        effects: list[Effect] = []
        refusal = self._refusal(message, displaced)
        if refusal is not None:
            report = ReportPeer(sender, record.name, "refused", refusal.detail)
            return [report, SendMessage(sender, record.control, refusal)]
        if displaced is not None:
            effects += self._carry_out(self.members.bury(displaced.node_id, now, "another node has its address"))
        known_before = self.members.get(sender)
        is_new = known_before is None or known_before.record != record or known_before.is_gone
        lives = () if known_before is None else self._other_lives(known_before, record)
        effects += self._carry_out(self.members.learn(record, message.incarnation, now))
        # Who is in already has others to hear of everybody from.
        others = [peer.record for peer in self.members.alive() if peer.node_id != sender] if is_new else []
        if len(others) > WELCOME_MEMBERS_MAX - len(lives):
            others = sorted(
                self._rng.sample(others, WELCOME_MEMBERS_MAX - len(lives)), key=lambda member: member.node_id
            )
        known = self.members.standing(sender)
        doubt = self.members.doubt(sender)
        if doubt is None and known is not None and known.epoch > record.epoch:
            doubt = Rumour(sender, *known)
        answer = Welcome(self.me, (*lives, *others), self.members.incarnation, () if doubt is None else (doubt,))
        return [*effects, SendMessage(sender, record.control, answer)]

    @staticmethod
    def _other_lives(known: Peer, record: MemberRecord) -> tuple[MemberRecord, ...]:
        """The life of this node that was known here, for it to find out whether that is over (`twins`)."""
        elsewhere = known.record.control != record.control
        return (known.record,) if elsewhere and (not known.is_gone or known.record.epoch >= record.epoch) else ()

    def _refusal(self, message: Hello, displaced: Peer | None) -> Refused | None:
        record = message.member
        if message.cluster_id != self._config.cluster_id:
            return Refused(RefusedReason.WRONG_CLUSTER, "this node belongs to another cluster")
        if not message.oldest <= PROTOCOL_VERSION <= message.newest:
            theirs = f"you speak {message.oldest} to {message.newest}"
            return Refused(
                RefusedReason.WRONG_VERSION, f"this node speaks protocol version {PROTOCOL_VERSION}; {theirs}"
            )
        if self.members.is_alive(record.node_id):
            return None  # in already; if two were let in with one name, both stay and the conflict is reported
        namesake = self.members.holder_of_name(record.name, but=record.node_id)
        if namesake is not None and (displaced is None or displaced.node_id != namesake):
            return Refused(RefusedReason.NAME_TAKEN, f"another live node is called {record.name}")
        if self.members.is_full_for(record.node_id):
            return Refused(RefusedReason.FULL, f"this node already knows {self._config.peers_max} peers")
        return None

    def of_ourselves(self, message: Message, now: float) -> list[Effect]:
        """Something comes in this node's own name."""
        return self.twins.hello(message, now) if isinstance(message, Hello) else []

    def welcome(self, sender: NodeId, message: Welcome, now: float) -> list[Effect]:
        """We are in. Raises ValueError if the sender speaks for somebody else."""
        if message.member.node_id != sender:
            raise ValueError("Welcome in the name of somebody else")
        effects = self._carry_out(self.members.learn(message.member, message.incarnation, now))
        for record in message.members:
            effects += self._carry_out(self.members.learn(record, 0, now))
        effects += self._joining.answered(len(self.members))
        before = self.members.incarnation
        effects += self._hear(message.rumours, now)
        peer = self.members.introduced(sender)
        if peer is None:
            return effects
        if self.members.incarnation != before:
            effects.append(self.introduction(peer))  # it does not take our word for it before it has our new number
        if peer.is_gone:
            return effects + self.probes.ping(peer)  # it lives: it should contradict what we believe of it
        return [*effects, self._contact(peer, now)]

    def refused(self, sender: NodeId, message: Refused) -> list[Effect]:
        peer = self.members.get(sender)
        name = peer.record.name if peer is not None else ""
        report = ReportPeer(sender, name, "refused", f"{message.reason.name}: {message.detail}")
        return [report, *self._joining.refused(message)]

    def bye(self, sender: NodeId, message: Bye, now: float) -> list[Effect]:
        return self._hear([Rumour(sender, message.epoch, 0, Status.LEFT)], now)

    # ---------------------------------------------------------------------------------------------------------- probes

    def ping(self, sender: NodeId, message: Ping, now: float) -> list[Effect]:
        return self._hear(message.rumours, now) + self.probes.on_ping(sender, message)

    def ping_request(self, sender: NodeId, message: PingRequest, now: float) -> list[Effect]:
        return self._hear(message.rumours, now) + self.probes.on_ping_request(sender, message, now)

    def pong(self, sender: NodeId, message: Pong, now: float) -> list[Effect]:
        lives = Rumour(message.node_id, message.epoch, message.incarnation, Status.ALIVE)
        self.members.introduced(sender)
        return self._hear([lives, *message.rumours], now) + self.probes.on_pong(sender, message)

    def no_pong(self, sender: NodeId, message: NoPong, now: float) -> list[Effect]:
        self.probes.on_no_pong(message)
        return []

    def _hear(self, rumours: Iterable[Rumour], now: float) -> list[Effect]:
        effects: list[Effect] = []
        for rumour in rumours:
            effects += self._carry_out(self.members.hear(rumour, now))
        return effects

    # ---------------------------------------------------------------------------------------------------------- rounds

    def _round(self, now: float) -> list[Effect]:
        self._round_at = now + self._config.gossip_interval_s * (0.9 + 0.2 * self._rng.random())
        self.metadata.round(now)
        effects = self._carry_out(self.members.tick(now))
        reachable = self.members.reachable()
        if reachable:
            effects.append(self._contact(self._rng.choice(reachable), now))
        return effects + self._reunion.recontact(now) + self._reunion.save_addresses(now)

    def _contact(self, peer: Peer, now: float) -> Effect:
        """A round of gossip, or first an introduction if it may not know our address.

        Once we have been in for a while, everybody has heard of us from others. Who has not (a loss, a partition) ignores the
        gossip of a stranger, so now and then we introduce ourselves all the same.
        """
        if not peer.introduced and (now < self._settled_at or self._rng.random() < REINTRODUCED_SHARE):
            return self.introduction(peer)
        return self.exchange.begin(peer, now)

    def introduction(self, peer: Peer) -> SendMessage:
        """To be sent before a question to a peer that may not know us: it could not answer."""
        return self._to(peer, self._hello())

    def _hello(self) -> Hello:
        return Hello(PROTOCOL_VERSION, PROTOCOL_VERSION, self._config.cluster_id, self.me, self.members.incarnation)

    def _carry_out(self, changes: list[PeerChange]) -> list[Effect]:
        effects: list[Effect] = []
        for peer, kind, detail in changes:
            log = self.replicas.log(peer.node_id)
            outdated = log is not None and log.epoch < peer.record.epoch
            if kind in ("left", "forgotten") or outdated:
                self.directory.remove_holder(peer.node_id)
                self.replicas.forget(peer.node_id)
            if kind in ("left", "dead") or outdated:
                self.gone.append(peer.node_id)
            if kind == "joined":
                self.probes.joined(peer.node_id)
            if kind == "forgotten":
                self.forgotten.append(peer.node_id)
                self.metadata.forget(peer.node_id)
            else:
                effects.append(ReportPeer(peer.node_id, peer.record.name, kind, detail))
        return effects

    def _to(self, peer: Peer, message: Message) -> SendMessage:
        return SendMessage(peer.node_id, peer.record.control, message)
