"""Gossip between two nodes: do both know the same, where do they differ, who lacks what.

Syn carries two hashes. If they are equal, nothing more is said. Otherwise the other tells what it knows: in full where
the members differ, else one row per log (`Dense`), behind hashes of buckets of them where there are many. Whoever reads that
sends what is lacking if it is little, and asks (`Want`) for what it lacks itself.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.directory import Directory
from kvcomm_p2p.protocol.events import Effect, SendMessage
from kvcomm_p2p.protocol.gossip import Have, LogChange, Replicas, Verdict
from kvcomm_p2p.protocol.heads import Heads
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.membership import Membership, Peer, PeerChange
from kvcomm_p2p.protocol.messages import (
    BUCKET_HASH_BYTES,
    BUCKETS,
    COUNTER_MAX,
    HASH_BYTES,
    ROW_BYTES,
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
from kvcomm_p2p.protocol.news import FreshNews
from kvcomm_p2p.protocol.roster import Roster
from kvcomm_p2p.protocol.supply import Supply
from kvcomm_p2p.protocol.wants import Wants

DENSE_MEMBERS_MAX = 96
"""Up to so many members one message with a row for each is shorter than hashes of buckets and then rows."""

SPREAD_ENTRIES_MIN = 64
"""Who lacks more of a log than this asks its writer, so that what a newcomer needs comes from all at once."""

UNSUBSCRIBED = bytes(HASH_BYTES)
"""In place of a state: I keep nobody's log but my own."""

RENEWAL_S = 10.0
"""Seconds between two epochs that this node enters because others claim to know more of its log than it wrote."""

ALL_BUCKETS = (1 << BUCKETS) - 1
_ROW = struct.Struct("<IH")
_ROW_SEQ_MAX = 2**32 - 1
_BUCKET_HASHES = struct.Struct(f"<{BUCKETS}I")
assert _ROW.size == ROW_BYTES and _BUCKET_HASHES.size == BUCKETS * BUCKET_HASH_BYTES


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
        self._alive: tuple[Peer, ...] = ()
        self._epoch = members.me.epoch
        self._wants = Wants()
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
        self.subscribed = True
        self.unknown_senders = 0
        self.quiet = 0

    # ------------------------------------------------------------------------------------------------------- what we know

    def _view(self) -> bytes:
        return self._members.view_hash()

    def _refresh(self) -> None:
        """Take notice of who came and went. Costs nothing if nobody did."""
        alive = self._members.reachable()
        me = self._members.me
        if alive is not self._alive or me.epoch != self._epoch:
            self._alive, self._epoch = alive, me.epoch
            pairs = [(peer.node_id, peer.record.epoch) for peer in alive]
            self._replicas.count(Roster([(me.node_id, me.epoch), *pairs]))

    def begin(self, peer: Peer, now: float) -> SendMessage:
        """The first leg."""
        self._refresh()
        return self._syn(peer)

    def _syn(self, peer: Peer) -> SendMessage:
        return _to(peer, Syn(self._view(), self._replicas.state() if self.subscribed else UNSUBSCRIBED))

    def _dense(self, mask: int, answer: bool) -> Dense:
        roster, rows = self._replicas.roster, bytearray()
        for origin in roster.in_buckets(mask):
            seq, state = self._replicas.row(origin)
            rows += _ROW.pack(min(seq, _ROW_SEQ_MAX), state & 0xFFFF)
        return Dense(roster.hash, mask.to_bytes(HASH_BYTES, "little"), bytes(rows), answer)

    def _full(self, answer: bool, now: float) -> SynAck:
        entries = [
            self._entry(self._members.me.node_id, self._members.me.epoch, self._members.incarnation, Status.ALIVE)
        ]
        for peer in self._members.told(now):
            entries.append(self._entry(peer.node_id, peer.record.epoch, peer.incarnation, peer.state))
        entries.sort(key=lambda entry: entry.node_id)
        return SynAck(tuple(entries), answer)

    def _entry(self, origin: NodeId, epoch: int, incarnation: int, status: Status) -> DigestEntry:
        """Of the departed, and of those who are not listened to, we seem to know everything: tell us nothing."""
        unwanted = not self.subscribed and origin != self._members.me.node_id
        if unwanted or status in (Status.DEAD, Status.LEFT) or self._replicas.is_muted(origin):
            return DigestEntry(origin, epoch, incarnation, COUNTER_MAX, COUNTER_MAX, status)
        have = self._replicas.have(origin, epoch)
        digest = (have.set_digest or 0).to_bytes(HASH_BYTES, "little")
        return DigestEntry(origin, epoch, incarnation, have.max_seq, have.gc_floor, status, digest)

    # ----------------------------------------------------------------------------------------------------------- messages

    def syn(self, sender: NodeId, message: Syn, now: float) -> list[Effect]:
        peer = self._reachable(sender)
        if peer is None:
            return []
        self._refresh()
        if message.view != self._view():
            return [_to(peer, self._full(False, now))]
        if UNSUBSCRIBED in (message.state, b"" if self.subscribed else UNSUBSCRIBED):
            return self._one_log(peer, message.state, now)
        if message.state == self._replicas.state():
            self.quiet += 1
            self.on_known(sender, self._replicas.row(sender)[0], self._replicas.own.max_seq, now)
            return []
        roster = self._replicas.roster
        if len(roster) <= DENSE_MEMBERS_MAX:
            return [_to(peer, self._dense(ALL_BUCKETS, False))]
        return [_to(peer, Buckets(roster.hash, self._bucket_hashes()))]

    def _one_log(self, peer: Peer, state: bytes, now: float) -> list[Effect]:
        """Of two of whom one keeps no peers' logs, the other may lack that one's own log, and nothing else."""
        if self.subscribed:
            return self._ask([_Lack(peer.node_id, 0, peer)], now)
        return [self._syn(peer)] if state != UNSUBSCRIBED else []

    def _bucket_hashes(self) -> bytes:
        return _BUCKET_HASHES.pack(*(hashed & 0xFFFFFFFF for hashed in self._replicas.bucket_hashes()))

    def buckets(self, sender: NodeId, message: Buckets, now: float) -> list[Effect]:
        """Tell the rows of the buckets that differ."""
        peer = self._reachable(sender)
        if peer is None:
            return []
        self._refresh()
        if not self.subscribed:
            return []
        if message.roster != self._replicas.roster.hash:
            return [_to(peer, self._full(False, now))]
        mine, theirs = (_BUCKET_HASHES.unpack(hashes) for hashes in (self._bucket_hashes(), message.hashes))
        mask = sum(1 << bucket for bucket in range(BUCKETS) if mine[bucket] != theirs[bucket])
        return [_to(peer, self._dense(mask, False))] if mask else []

    def dense(self, sender: NodeId, message: Dense, now: float) -> list[Effect]:
        """Compare row by row; send what is little, ask for what is lacking."""
        peer = self._reachable(sender)
        if peer is None:
            return []
        self._refresh()
        if not self.subscribed:
            return []
        roster = self._replicas.roster
        mask = int.from_bytes(message.mask, "little")
        origins = roster.in_buckets(mask)
        if message.roster != roster.hash or len(message.rows) != len(origins) * ROW_BYTES:
            return [_to(peer, self._full(False, now))]
        self._hear_rows(sender, dict(zip(origins, _ROW.iter_unpack(message.rows), strict=True)), now)
        lacking: list[_Lack] = []
        behind: list[tuple[NodeId, Have]] = []
        unsaid = False
        for origin, (seq, check) in zip(origins, _ROW.iter_unpack(message.rows), strict=True):
            mine, state = self._replicas.row(origin)
            told = min(mine, _ROW_SEQ_MAX)
            if (seq, check) == (told, state & 0xFFFF) or self._replicas.is_muted(origin):
                continue
            log = self._replicas.log(origin)
            if seq >= told:
                lacking.append(self._lack(origin, seq - told, peer, now))
            elif log is not None and log.gc_floor <= seq:
                behind.append((origin, Have(roster.epochs[origin], seq, log.gc_floor)))
            else:
                unsaid = True
        effects, left_over = self.supply.push(peer, behind, now)
        if (unsaid or left_over) and not message.answer:
            effects.append(_to(peer, self._dense(mask, True)))
        return effects + self._ask(lacking, now)

    def _hear_rows(self, sender: NodeId, rows: dict[NodeId, tuple[int, int]], now: float) -> None:
        ours, theirs = rows.get(self._members.me.node_id), rows.get(sender)
        if ours is not None and theirs is not None:
            self.on_known(sender, theirs[0], ours[0], now)

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
        """Everything a peer knows: of members, and of logs."""
        effects = self._hear(sender, message.digest, now)
        peer = self._reachable(sender)
        if peer is None:
            return effects
        self._refresh()
        theirs = {entry.node_id: entry for entry in message.digest}
        lacking: list[_Lack] = []
        behind: list[tuple[NodeId, Have | None]] = []
        own = self._members.me.node_id
        if sender in theirs:
            ours = theirs.get(own)
            self.on_known(sender, theirs[sender].max_seq, 0 if ours is None else ours.max_seq, now)
        for origin, epoch in self._replicas.roster.epochs.items():
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
            effects.append(_to(peer, self._full(True, now)))
        return effects + self._ask(lacking, now)

    def want(self, sender: NodeId, message: Want, now: float) -> list[Effect]:
        """Send what is wanted, now or as soon as the budget allows."""
        peer = self._reachable(sender)
        if peer is None:
            return []
        self._refresh()
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
            epoch = self._replicas.roster.epochs.get(origin)
            if origin == self._members.me.node_id or epoch is None or self._wants.is_open(origin, now):
                continue
            target = self._source(origin, entries, via)
            asked = questions.setdefault(target.node_id, [])
            if len(asked) < WANTS_MAX:
                asked.append(self._entry(origin, epoch, 0, Status.ALIVE))
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
            rumour = Rumour(entry.node_id, entry.epoch, entry.incarnation, entry.status)
            changes += self._members.hear(rumour, now)
            self._replicas.learn_floor(entry)
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
        self._refresh()
        if not self.heads.admits(sender, delta):
            return effects
        known = self._replicas.have(origin, delta.epoch).max_seq
        verdict, change = self._replicas.apply(delta)
        if change is not None:
            self.change_directory(origin, change)
        mine = self._replicas.have(origin, delta.epoch).max_seq
        if verdict is Verdict.APPLIED and fresh:
            self.news.add(origin, known, now)
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
