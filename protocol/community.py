"""Joining, leaving and gossip: keeps membership, the replicated logs and the directory in step with each other."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from kvcomm_p2p.protocol.anchors import Miss, MissReason
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.directory import Directory
from kvcomm_p2p.protocol.events import Effect, FinishJoin, JoinRequested, ReportPeer, SendMessage
from kvcomm_p2p.protocol.exchange import Exchange
from kvcomm_p2p.protocol.gossip import Replicas
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.membership import Membership, Peer, PeerChange, PeerState
from kvcomm_p2p.protocol.messages import (
    PROTOCOL_VERSION,
    Bye,
    Hello,
    MemberRecord,
    Message,
    Refused,
    RefusedReason,
    Welcome,
)
from kvcomm_p2p.protocol.pool import PoolChange, is_shared

JOIN_RETRY_S_MAX = 5.0
WELCOME_MEMBERS_MAX = 32
"""Members named in a Welcome; gossip brings the rest."""

LONELY_RECONTACT_S = 1.0
"""Mean seconds between attempts to reach a seed or an expired peer while nobody is alive."""

NEWS_FANOUT = 3
"""Peers that hear of a change of our own at once, so that a small cluster knows within a round trip."""

NEWS_DELAY_S = 0.01
"""Changes within this time are told together."""


@dataclass(slots=True)
class _Join:
    seeds: tuple[str, ...]
    deadline: float
    delay_s: float
    retry_at: float
    answered: bool = False


class Community:
    """What this node knows of the others. `gone` collects peers that just became unavailable, until it is drained."""

    def __init__(self, config: NodeConfig, me: MemberRecord, rng: random.Random, now: float) -> None:
        self._config = config
        self._me = me
        self._rng = rng
        self.members = Membership(config, me)
        self.replicas = Replicas(
            me.node_id,
            me.epoch,
            anchors_per_peer_max=config.anchors_per_peer_max,
            anchors_max=config.directory_anchors_max,
        )
        self.directory = Directory(me.node_id)
        self.gone: list[NodeId] = []
        self.forgotten: list[NodeId] = []
        self.exchange = Exchange(config, me, self.members, self.replicas, self.directory, self._carry_out)
        self._join: _Join | None = None
        self._seeds: tuple[str, ...] = ()
        self._round_at = now + rng.random() * config.gossip_interval_s
        self._recontact_at = now + self._jittered(config.recontact_s)
        self._news_at = math.inf
        self._told_at = -math.inf

    def _jittered(self, mean_s: float) -> float:
        return mean_s * (0.5 + self._rng.random())

    def next_deadline(self) -> float:
        deadline = min(self._round_at, self._news_at)
        if self._join is not None:
            deadline = min(deadline, self._join.retry_at)
            if not self._join.answered:
                deadline = min(deadline, self._join.deadline)
        return deadline

    def join(self, event: JoinRequested, now: float) -> list[Effect]:
        """Ask all seeds. An earlier join that was not answered yet ends as missed."""
        effects = self._join_missed("replaced by another join") if self._join is not None else []
        seeds = tuple(seed for seed in dict.fromkeys(event.seeds) if seed != self._me.control)
        self._seeds = seeds
        if not seeds:
            return [*effects, FinishJoin(len(self.members))]
        self._join = _Join(seeds, event.deadline, self._config.join_retry_s, now + self._config.join_retry_s)
        return [*effects, *self._ask_seeds(seeds)]

    def leave(self) -> list[Effect]:
        """Say goodbye to everybody alive."""
        effects = self._join_missed("left") if self._join is not None else []
        return effects + [self._to(peer, Bye(self._me.epoch)) for peer in self.members.alive()]

    def tick(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        join = self._join
        if join is not None:
            if not join.answered and join.deadline <= now:
                effects += self._join_missed("no seed answered")
            if join.retry_at <= now:
                join.delay_s = min(2 * join.delay_s, JOIN_RETRY_S_MAX)
                join.retry_at = now + join.delay_s
                effects += self._ask_seeds(join.seeds)
        if self._round_at <= now:
            effects += self._round(now)
        if self._news_at <= now:
            self._news_at = math.inf
            self._told_at = now
            alive = self.members.alive()
            chosen = self._rng.sample(alive, min(NEWS_FANOUT, len(alive)))
            effects += [self._contact(peer) for peer in chosen]
        return effects

    def announce(self, change: PoolChange, now: float) -> None:
        """The pool changed: tell the directory, and the log of what peers may know."""
        me, own = self._me.node_id, self.replicas.own
        before = own.max_seq
        added = {meta.anchor_id for meta in change.added if is_shared(meta)}
        for meta in change.removed:
            self.directory.remove(me, meta.anchor_id)
            if meta.anchor_id not in added:
                own.delete(meta.anchor_id, now)
        for meta in change.added:
            self.directory.add(me, meta)
            if is_shared(meta):
                own.put(meta)
        if own.max_seq != before and math.isinf(self._news_at):
            self._news_at = max(now + NEWS_DELAY_S, self._told_at + self._config.gossip_interval_s / 2)

    def unreachable(self, peer: NodeId, now: float) -> list[Effect]:
        return self._carry_out(self.members.expire(peer, now, "unreachable"))

    def hello(self, sender: NodeId, message: Hello, now: float) -> list[Effect]:
        """Somebody wants in. Raises ValueError if it speaks for somebody else."""
        record = message.member
        if record.node_id != sender:
            raise ValueError("Hello in the name of somebody else")
        if sender == self._me.node_id:
            return []
        displaced = self.members.displaced_by(record)
        effects: list[Effect] = []
        refusal = self._refusal(message, displaced)
        if refusal is not None:
            report = ReportPeer(sender, record.name, "refused", refusal.detail)
            return [report, SendMessage(sender, record.control, refusal)]
        if displaced is not None:
            changes = self.members.expire(displaced.node_id, now, "another node has its address")
            effects += self._carry_out(changes)
        effects += self._carry_out(self.members.learn(record, 0, now))
        others = [peer.record for peer in self.members.alive() if peer.node_id != sender]
        if len(others) > WELCOME_MEMBERS_MAX:
            others = sorted(self._rng.sample(others, WELCOME_MEMBERS_MAX), key=lambda member: member.node_id)
        return [*effects, SendMessage(sender, record.control, Welcome(self._me, tuple(others)))]

    def _refusal(self, message: Hello, displaced: Peer | None) -> Refused | None:
        record = message.member
        if message.cluster_id != self._config.cluster_id:
            return Refused(RefusedReason.WRONG_CLUSTER, "this node belongs to another cluster")
        if not message.oldest <= PROTOCOL_VERSION <= message.newest:
            return Refused(RefusedReason.WRONG_VERSION, f"this node speaks protocol version {PROTOCOL_VERSION}")
        if self.members.is_alive(record.node_id):
            return None  # in already; if two were let in with one name, both stay and the conflict is reported
        namesake = self.members.holder_of_name(record.name, but=record.node_id)
        if namesake is not None and (displaced is None or displaced.node_id != namesake):
            return Refused(RefusedReason.NAME_TAKEN, f"another live node is called {record.name}")
        if self.members.is_full_for(record.node_id):
            return Refused(RefusedReason.FULL, f"this node already knows {self._config.peers_max} peers")
        return None

    def welcome(self, sender: NodeId, message: Welcome, now: float) -> list[Effect]:
        """We are in. Raises ValueError if the sender speaks for somebody else."""
        if message.member.node_id != sender:
            raise ValueError("Welcome in the name of somebody else")
        effects: list[Effect] = []
        for record in (message.member, *message.members):
            effects += self._carry_out(self.members.learn(record, 0, now))
        join, self._join = self._join, None
        if join is not None and not join.answered:
            effects.append(FinishJoin(len(self.members)))
        peer = self.members.introduced(sender)
        if peer is not None and peer.state is not PeerState.LEFT:
            effects.append(self._contact(peer))
        return effects

    def refused(self, sender: NodeId, message: Refused) -> list[Effect]:
        peer = self.members.get(sender)
        name = peer.record.name if peer is not None else ""
        effects: list[Effect] = [ReportPeer(sender, name, "refused", f"{message.reason.name}: {message.detail}")]
        join, self._join = self._join, None
        if join is not None and not join.answered:
            miss = Miss(MissReason.UNREACHABLE, message.detail or message.reason.name.lower())
            effects.append(FinishJoin(miss, message.reason))
        return effects

    def bye(self, sender: NodeId, message: Bye, now: float) -> list[Effect]:
        return self._carry_out(self.members.leave(sender, message.epoch, now))

    def _round(self, now: float) -> list[Effect]:
        self._round_at = now + self._config.gossip_interval_s * (0.9 + 0.2 * self._rng.random())
        self.exchange.beat()
        self.replicas.collect(now, self._config.tombstone_s)
        effects = self._carry_out(self.members.tick(now))
        alive = self.members.alive()
        if alive:
            effects.append(self._contact(self._rng.choice(alive)))
        else:  # cut off, or just woken from a long pause: no reason to be patient
            self._recontact_at = min(self._recontact_at, now + self._jittered(LONELY_RECONTACT_S))
        if self._recontact_at <= now:
            self._recontact_at = now + self._jittered(self._config.recontact_s)
            effects += self._recontact()
        return effects

    def _recontact(self) -> list[Effect]:
        """Partitions merge because somebody asks a seed or an expired peer every now and then."""
        reached = {peer.record.control for peer in self.members.alive()}
        lost = [(seed, None) for seed in sorted(set(self._seeds)) if seed not in reached]
        candidates: list[tuple[str, Peer | None]] = [*lost, *((p.record.control, p) for p in self.members.expired())]
        if not candidates:
            return []
        address, peer = self._rng.choice(candidates)
        return [SendMessage(None, address, self._hello())] if peer is None else [self._to(peer, self._hello())]

    def _contact(self, peer: Peer) -> Effect:
        """A round of gossip, or first an introduction if it may not know our address."""
        return self.exchange.begin(peer) if peer.introduced else self.introduction(peer)

    def introduction(self, peer: Peer) -> SendMessage:
        """To be sent before a question to a peer that may not know us: it could not answer."""
        return self._to(peer, self._hello())

    def _hello(self) -> Hello:
        return Hello(PROTOCOL_VERSION, PROTOCOL_VERSION, self._config.cluster_id, self._me)

    def _ask_seeds(self, seeds: tuple[str, ...]) -> list[Effect]:
        return [SendMessage(None, seed, self._hello()) for seed in seeds]

    def _join_missed(self, detail: str) -> list[Effect]:
        if self._join is None or self._join.answered:
            return []
        self._join.answered = True
        return [FinishJoin(Miss(MissReason.UNREACHABLE, detail))]

    def _carry_out(self, changes: list[PeerChange]) -> list[Effect]:
        effects: list[Effect] = []
        for peer, kind, detail in changes:
            log = self.replicas.log(peer.node_id)
            outdated = log is not None and log.epoch < peer.record.epoch
            if kind in ("left", "forgotten") or outdated:
                self.directory.remove_holder(peer.node_id)
                self.replicas.forget(peer.node_id)
            if kind in ("left", "expired") or outdated:
                self.gone.append(peer.node_id)
            if kind == "forgotten":
                self.forgotten.append(peer.node_id)
            else:
                effects.append(ReportPeer(peer.node_id, peer.record.name, kind, detail))
        return effects

    def _to(self, peer: Peer, message: Message) -> SendMessage:
        return SendMessage(peer.node_id, peer.record.control, message)
