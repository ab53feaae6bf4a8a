"""Gossip between two nodes: do both know the same, where do they differ, who lacks what.

Syn carries two hashes. If they are equal, nothing more is said. Otherwise the other tells what it knows: in full where
the members differ, else one row per log (`Dense`). Where there are many members, hashes of buckets of them come first, and
only of buckets that differ is more said. Whoever reads that sends what is lacking if it is little, and asks (`Want`) for
what it lacks itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.digests import UNSUBSCRIBED, Digests
from kvcomm_p2p.protocol.directory import Directory
from kvcomm_p2p.protocol.events import Effect, SendMessage
from kvcomm_p2p.protocol.gossip import Have, LogChange, Replicas, Verdict
from kvcomm_p2p.protocol.heads import Heads
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.member_table import Peer
from kvcomm_p2p.protocol.membership import Membership, PeerChange
from kvcomm_p2p.protocol.messages import (
    COUNTER_MAX,
    WANTS_MAX,
    Ack,
    Buckets,
    Dense,
    DigestEntry,
    Message,
    OriginDelta,
    Rumour,
    Status,
    Syn,
    SynAck,
    Want,
)
from kvcomm_p2p.protocol.messages.exchanges import BUCKETS_ALL
from kvcomm_p2p.protocol.news import FreshNews
from kvcomm_p2p.protocol.roster import ROW_SEQ_MAX
from kvcomm_p2p.protocol.supply import Supply
from kvcomm_p2p.protocol.wants import Wants

DENSE_MEMBERS_MAX = 96
"""Up to so many members one message with a row for each is shorter than hashes of buckets and then rows."""

SPREAD_ENTRIES_MIN = 64
"""Who lacks more of a log than this asks its writer, so that what a newcomer needs comes from all at once."""

QUESTION_BYTES = 45
"""Of one log that is asked for. Who lacks so many that all rows are shorter tells its rows instead, and gets what it lacks."""

RENEWAL_S = 10.0
"""Seconds between two epochs that this node enters because others claim to know more of its log than it wrote."""


class _Lack(NamedTuple):
    """`entries`: how many numbers are lacking, at most. `via`: who told."""

    origin: NodeId
    entries: int
    via: Peer


class Exchange:
    """Keeps the replicated logs, and what they say about the directory, in step with peers.

    `carry_out` turns changes of membership into effects and takes their consequences; `introduce` makes the message that
    has to come before one to a peer that may not know us. `subscribed`: peers' logs are wanted; if not, this node seems to
    know everything, and what comes is used for its member records alone. `on_known` hears of each peer's own words on how long
    its log is and how much of ours it has.
    """

    def __init__(
        self,
        config: NodeConfig,
        members: Membership,
        replicas: Replicas,
        directory: Directory,
        carry_out: Callable[[list[PeerChange]], list[Effect]],
        introduce: Callable[[Peer], SendMessage],
        now: float,
    ) -> None:
        self._members = members
        self._replicas = replicas
        self._directory = directory
        self._carry_out = carry_out
        self._introduce = introduce
        self._wants = Wants()
        self.digests = Digests(members, replicas)
        self.heads = Heads(config, replicas)
        self.news = FreshNews(config, replicas)
        self.supply = Supply(config, members, replicas, now)
        self._renew_at = now
        self.on_message: dict[type, Callable[[NodeId, Any, float], list[Effect]]] = {
            Syn: self.syn,
            SynAck: self.syn_ack,
            Ack: self.ack,
            Want: self.want,
            Buckets: self.buckets,
            Dense: self.dense,
        }
        self.on_known: Callable[[NodeId, int, int, float], None] = lambda peer, told_seq, known_seq, now: None
        self.unknown_senders = 0
        self.quiet = 0

    @property
    def subscribed(self) -> bool:
        return self.digests.subscribed

    @subscribed.setter
    def subscribed(self, value: bool) -> None:
        self.digests.subscribed = value

    def begin(self, peer: Peer, now: float) -> SendMessage:
        """The first leg."""
        self.digests.refresh()
        return _to(peer, self.digests.syn())

    # ----------------------------------------------------------------------------------------------------------- messages

    def syn(self, sender: NodeId, message: Syn, now: float) -> list[Effect]:
        peer = self._reachable(sender)
        if peer is None:
            return []
        self.digests.refresh()
        mine = self.digests.syn()
        if message.view != mine.view:
            return [self._many(peer) or _to(peer, self.digests.full(BUCKETS_ALL, False, now))]
        if UNSUBSCRIBED in (message.state, mine.state):
            return self._one_log(peer, message.state, now)
        if message.state == mine.state:
            self.quiet += 1
            self.on_known(sender, self._replicas.states.seq_of(sender), self._replicas.own.max_seq, now)
            return []
        return [self._many(peer) or _to(peer, self.digests.dense(BUCKETS_ALL, False))]

    def _many(self, peer: Peer) -> SendMessage | None:
        """Hashes of buckets, if there are so many members that they come first."""
        return _to(peer, self.digests.buckets()) if len(self._replicas.states) > DENSE_MEMBERS_MAX else None

    def _one_log(self, peer: Peer, state: bytes, now: float) -> list[Effect]:
        """Of two of whom one keeps no peers' logs, the other may lack that one's own log, and nothing else."""
        if self.subscribed:
            return self._ask([_Lack(peer.node_id, 0, peer)], now)
        return [_to(peer, self.digests.syn())] if state != UNSUBSCRIBED else []

    def buckets(self, sender: NodeId, message: Buckets, now: float) -> list[Effect]:
        """Tell of the members and the logs in the buckets that differ."""
        peer = self._reachable(sender)
        if peer is None:
            return []
        self.digests.refresh()
        members, logs = self.digests.differing(message)
        effects: list[Effect] = [_to(peer, self.digests.full(members, False, now))] if members else []
        return [*effects, _to(peer, self.digests.dense(logs, False))] if logs else effects

    def dense(self, sender: NodeId, message: Dense, now: float) -> list[Effect]:
        """Compare row by row; send what is little, ask for what is lacking."""
        peer = self._reachable(sender)
        if peer is None:
            return []
        self.digests.refresh()
        if not self.subscribed:
            return []
        states = self._replicas.states
        mask = int.from_bytes(message.mask, "little")
        differing = self._replicas.differing(mask, message.rows)
        if differing is None or message.roster != states.roster(mask):
            return [_to(peer, self.digests.full(mask, False, now))]
        self._hear_rows(sender, mask, message.rows, now)
        lacking: list[_Lack] = []
        behind: list[tuple[NodeId, Have]] = []
        unsaid = False
        for origin, seq in differing:
            if self._replicas.is_muted(origin):
                continue
            told = min(states.seq_of(origin), ROW_SEQ_MAX)
            log = self._replicas.log(origin)
            if seq >= told:
                lacking.append(self._lack(origin, seq - told, peer, now))
            elif log is not None and log.gc_floor <= seq:
                behind.append((origin, Have(log.epoch, seq, log.gc_floor)))
            else:
                unsaid = True
        asked = message.answer and all(
            states.seq_of(origin) - have.max_seq < SPREAD_ENTRIES_MIN for origin, have in behind
        )
        effects, left_over = self.supply.push(peer, behind, now, asked=asked)
        little = all(lack.entries < SPREAD_ENTRIES_MIN for lack in lacking)
        many = little and len(lacking) * QUESTION_BYTES > len(message.rows)
        if (unsaid or left_over or many) and not message.answer:
            effects.append(_to(peer, self.digests.dense(mask, True)))
        return effects if many and not message.answer else effects + self._ask(lacking, now)

    def _hear_rows(self, sender: NodeId, mask: int, rows: bytes, now: float) -> None:
        states = self._replicas.states
        ours, theirs = (states.told_seq(mask, rows, node_id) for node_id in (self._members.me.node_id, sender))
        if ours is not None and theirs is not None:
            self.on_known(sender, theirs, ours, now)

    def _lack(self, origin: NodeId, entries: int, via: Peer, now: float) -> _Lack:
        if origin == self._members.me.node_id and entries:
            self._overtaken(now)
        return _Lack(origin, entries, via)

    def _overtaken(self, now: float) -> None:
        """Somebody knows more of our log than we wrote: our disk went back in time, or it is a lie. Go on in a higher
        epoch, but not more often than every RENEWAL_S."""
        if now >= self._renew_at:
            self._renew_at = now + RENEWAL_S
            self._members.epoch_wanted = max(self._members.epoch_wanted, self._members.me.epoch + 1)

    def syn_ack(self, sender: NodeId, message: SynAck, now: float) -> list[Effect]:
        """Everything a peer knows of some buckets: of members, and of logs."""
        effects = self._hear(sender, message.digest, now)
        peer = self._reachable(sender)
        if peer is None:
            return effects
        self.digests.refresh()
        mask = int.from_bytes(message.mask, "little")
        theirs = {entry.node_id: entry for entry in message.digest}
        lacking: list[_Lack] = []
        behind: list[tuple[NodeId, Have | None]] = []
        own = self._members.me.node_id
        if sender in theirs:
            ours = theirs.get(own)
            self.on_known(sender, theirs[sender].max_seq, 0 if ours is None else ours.max_seq, now)
        for origin, epoch in self._replicas.states.members(mask):
            entry = theirs.get(origin)
            if entry is None or entry.epoch < epoch:
                behind.append((origin, None))
            elif (
                entry.epoch == epoch
                and entry.max_seq != COUNTER_MAX
                and (self.subscribed or origin == own)
                and not self._replicas.is_muted(origin)
            ):
                mine, have = self._replicas.have(origin, epoch), Have.of(entry)
                if have.max_seq > mine.max_seq or have.gc_floor > mine.gc_floor:
                    lacking.append(self._lack(origin, have.max_seq - mine.max_seq, peer, now))
                elif self._replicas.lacks(origin, have):
                    behind.append((origin, have))
        effects += self.supply.push(peer, behind, now)[0]
        if not message.answer:
            effects.append(_to(peer, self.digests.full(mask, True, now)))
        return effects + self._ask(lacking, now)

    def want(self, sender: NodeId, message: Want, now: float) -> list[Effect]:
        """Send what is wanted, now or as soon as the budget allows."""
        peer = self._reachable(sender)
        if peer is None:
            return []
        self.digests.refresh()
        for entry in message.digest:
            self._replicas.learn_floor(entry)
        return self.supply.answer(peer, message.digest, now)

    def ack(self, sender: NodeId, message: Ack, now: float) -> list[Effect]:
        """Take in news; ask on at once where something is missing between or behind them."""
        effects: list[Effect] = []
        lacking: list[_Lack] = []
        for delta in message.deltas:
            effects += self._apply(sender, delta, now, lacking, message.fresh)
        if not message.answer:
            return effects + self._ask(lacking, now)
        for origin in self._wants.drop(sender):
            peer = self._reachable(sender) if message.more else None
            if peer is not None and all(lack.origin != origin for lack in lacking):
                lacking.append(_Lack(origin, 0, peer))
        return effects + self._ask(lacking, now)

    # ---------------------------------------------------------------------------------------------------------- carry out

    def _ask(self, lacking: list[_Lack], now: float) -> list[Effect]:
        """One question for each log that is lacking and was not asked for: to who told of it, or to its writer if that is
        the only one to know for sure or if it is much."""
        lacking.sort(key=lambda lack: (self._replicas.log(lack.origin) is not None, lack.entries, lack.origin))
        questions: dict[NodeId, list[DigestEntry]] = {}
        for origin, entries, via in lacking:
            epoch = self._replicas.states.epoch_of(origin)
            if origin == self._members.me.node_id or epoch is None or self._wants.is_open(origin, now):
                continue
            target = self._source(origin, entries, via)
            asked = questions.setdefault(target.node_id, [])
            if len(asked) < WANTS_MAX:
                asked.append(self.digests.entry(origin, epoch, 0, Status.ALIVE, compared=not entries))
                self._wants.ask(origin, target.node_id, now)
        effects: list[Effect] = []
        for target_id, asked in questions.items():
            peer = self._members.get(target_id)
            if peer is not None and asked:
                effects += [] if peer.introduced else [self._introduce(peer)]
                effects.append(_to(peer, Want(tuple(asked))))
        return effects

    def _source(self, origin: NodeId, entries: int, via: Peer) -> Peer:
        log = self._replicas.log(origin)
        unsure = entries == 0 and log is not None and log.head.seq != log.max_seq
        writer = self._members.get(origin)
        if (unsure or entries >= SPREAD_ENTRIES_MIN) and writer is not None and writer.state is Status.ALIVE:
            return writer
        return via

    def _hear(self, sender: NodeId, digest: tuple[DigestEntry, ...], now: float) -> list[Effect]:
        changes: list[PeerChange] = []
        for entry in digest:
            self._replicas.learn_floor(entry)
            if self._members.believes(entry.node_id, entry.epoch, entry.incarnation, entry.status):
                continue
            rumour = Rumour(entry.node_id, entry.epoch, entry.incarnation, entry.status)
            changes += self._members.hear(rumour, now)
        return self._carry_out(changes)

    def _apply(self, sender: NodeId, delta: OriginDelta, now: float, lacking: list[_Lack], fresh: bool) -> list[Effect]:
        effects: list[Effect] = []
        if delta.member is not None:
            effects += self._carry_out(self._members.learn(delta.member, delta.incarnation, now))
        origin = delta.node_id
        peer = self._members.get(origin)
        wanted = self.subscribed and peer is not None and peer.state is not Status.LEFT
        if not wanted or peer is None or peer.record.epoch != delta.epoch:
            return effects
        self.digests.refresh()
        if not self.heads.admits(sender, delta):
            return effects
        known = self._replicas.have(origin, delta.epoch).max_seq
        verdict, change = self._replicas.apply(delta, peer.record.model_id)
        if change is not None:
            self.change_directory(origin, change)
        mine = self._replicas.have(origin, delta.epoch).max_seq
        if verdict is Verdict.APPLIED:
            self.news.came(now)
            if fresh:
                self.news.relay(origin, known, now)
        via = self._members.get(sender)
        if via is not None and verdict is not Verdict.REFUSED and (delta.log_seq > mine or verdict is Verdict.DIVERGED):
            self._wants.answered(origin)
            lacking.append(_Lack(origin, delta.log_seq - mine, via))
        return effects + self.heads.heard(sender, delta)

    def change_directory(self, origin: NodeId, change: LogChange) -> None:
        """Carry over what changed in a log."""
        if change.reset:
            self._directory.remove_holder(origin)
        self._directory.add_all(origin, change.put)
        for anchor_id in change.deleted:
            self._directory.remove(origin, anchor_id)

    def _reachable(self, sender: NodeId) -> Peer | None:
        """The peer to answer, if it is alive. Whoever gossips with us knows us."""
        peer = self._members.introduced(sender)
        if peer is None:
            self.unknown_senders += 1
        return peer if peer is not None and not peer.is_gone else None


def _to(peer: Peer, message: Message) -> SendMessage:
    return SendMessage(peer.node_id, peer.record.control, message)
