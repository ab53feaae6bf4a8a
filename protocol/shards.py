"""The directory as the rest of a node sees it: one question, answered from a full index or by the owners of shards.

`docs/decisions/0021-directory.md` says who registers, owns and asks, and why no lookup fails that could succeed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvcomm_p2p.protocol.anchors import AnchorMeta, MissReason
from kvcomm_p2p.protocol.community import Community
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.directory import Directory
from kvcomm_p2p.protocol.events import Effect, FinishLookup, LookupRequested, SendMessage
from kvcomm_p2p.protocol.ids import ChainHash, NodeId
from kvcomm_p2p.protocol.index_mode import INDEX_ROW_BYTES, LOG_ENTRY_BYTES, SETTLE_S, IndexMode, everybodys
from kvcomm_p2p.protocol.lookup import Lookup, LookupResult
from kvcomm_p2p.protocol.member_table import Peer
from kvcomm_p2p.protocol.messages import (
    ANSWER_ROWS_MAX,
    Message,
    Put,
    ShardAnswer,
    ShardAsk,
    ShardRegister,
    ShardResend,
    ShardRow,
    Status,
)
from kvcomm_p2p.protocol.penalties import PenaltyBox
from kvcomm_p2p.protocol.pool import Pool, PoolChange, is_shared, may_see
from kvcomm_p2p.protocol.registrar import Registrar, Told
from kvcomm_p2p.protocol.registry import Registry
from kvcomm_p2p.protocol.shard_lookups import ShardLookups
from kvcomm_p2p.protocol.shard_map import SHARDS, OwnerTable, owner_table

DECIDE_S = 1.0
"""Seconds between decisions about the mode."""

RATE_S = 10.0
"""Seconds over which the growth of the log is measured."""

MERGED_ABOVE = 0.1
"""Where more than this share of the members is new within SETTLE_S, two clusters have met (or a lone node has joined one):
an owner of either knows only what was registered on its side."""

EXPIRE_S = 5.0
ANSWER_BYTES_MAX = 128 * 1024
ROW_BYTES_MAX = 220
"""Upper bound of a ShardRow's encoding, without its fingerprints."""

Usable = Callable[[NodeId, AnchorMeta], bool]


class Shards:
    """Answers lookups, decides the mode, and keeps this node's part of the sharded directory, as origin and as owner."""

    def __init__(
        self,
        config: NodeConfig,
        community: Community,
        pool: Pool,
        penalties: PenaltyBox,
        rng: random.Random,
        usable: Usable,
        now: float,
    ) -> None:
        self._config = config
        self._community = community
        self._members = community.members
        self._directory = community.directory
        self._pool = pool
        self._rng = rng
        self._usable = usable
        me = self._members.me.node_id
        self.mode = IndexMode(config, now)
        self.registry = Registry(me, config, self._members)
        self.lookups = ShardLookups(me, self._members, penalties, rng, self.local, self._send, config.lookup_timeout_s)
        self._registrar: Registrar | None = None
        self._seen: Sequence[Peer] = ()
        self._epochs: dict[NodeId, int] = {}
        self._table: OwnerTable | None = None
        self._owned = np.zeros(SHARDS, np.bool_)
        self._gained: dict[float, npt.NDArray[np.bool_]] = {}
        self._joined: dict[float, int] = {}
        self._decide_at = now
        self._expire_at = now
        self._rate_at = now
        self._added = 0
        self._own_added = 0
        self._counted = (0, 0)
        self._rates = (0.0, 0.0)
        self.unknown_senders = 0
        community.exchange.subscribed = self.mode.subscribed(now)

    # -------------------------------------------------------------------------------------------------------- questions

    def local(self, lookup: Lookup, more: Directory | None = None) -> LookupResult:
        """What is known here: own anchors, the index as far as it is kept, and what others registered."""
        also = [self.registry.rows] if more is None else [more, self.registry.rows]
        return self._directory.find(lookup, self._usable, also)

    def next_deadline(self) -> float:
        due = self.lookups.next_deadline()
        if self._registrar is not None:
            due = min(due, self._registrar.next_deadline())
        if self._config.directory == "auto" or self.mode.active(self._decide_at):
            due = min(due, self._decide_at)
        return due

    # ----------------------------------------------------------------------------------------------------------- events

    def requested(self, event: LookupRequested, now: float) -> list[Effect]:
        """Answer at once from a full index, or ask. Raises ValueError for a request id that is in use."""
        if not self.mode.active(now):
            return [FinishLookup(event.request_id, self.local(event.lookup))]
        self._look_around(now)
        assert self._table is not None
        known = self._owned.copy()
        for at, gained in self._gained.items():
            known &= ~gained if now - at < SETTLE_S else True
        return self.lookups.start(event, self._table, known, self.mode.age_s(now), now)

    def changed(self, change: PoolChange) -> None:
        """Own anchors came or went."""
        shared = [meta for meta in change.added if is_shared(meta)]
        self._own_added += len(shared)
        if self._registrar is None:
            return
        for meta in change.removed:
            self._registrar.delete(meta.anchor_id)
        for meta in shared:
            held = self._pool.get(meta.anchor_id)
            if held is not None:
                self._registrar.put(held)

    def tick(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if self._decide_at <= now:
            self._decide_at = now + DECIDE_S
            self._decide(now)
        if self._expire_at <= now:
            self._expire_at = now + EXPIRE_S
            self.registry.expire(now)
        if self.mode.active(now):
            self._look_around(now)
        if self._registrar is not None:
            for owner, message in self._registrar.flush(now, self._told(now)):
                effects += self._send(owner, message)
        return effects + self.lookups.tick(self.mode.age_s(now), now)

    def peer_gone(self, peer: NodeId, now: float) -> list[Effect]:
        return self.lookups.peer_gone(peer, self.mode.age_s(now), now)

    def register(self, sender: NodeId, message: ShardRegister, now: float) -> list[Effect]:
        """A member's own anchors. Others are not listened to."""
        peer = self._members.get(sender)
        if peer is None or peer.state is Status.LEFT or message.epoch < peer.record.epoch:
            self.unknown_senders += 1
            return []
        self._heard(message.sharded_age_s, now)
        if not self.registry.register(sender, message, now):
            return []
        return self._send(sender, ShardResend(message.epoch, self.mode.age_s(now)))

    def resend(self, sender: NodeId, message: ShardResend, now: float) -> list[Effect]:
        if not self._members.is_reachable(sender):
            self.unknown_senders += 1
            return []
        self._heard(message.sharded_age_s, now)
        if self._registrar is not None and message.epoch == self._members.me.epoch:
            self._registrar.resend(sender, now)
        return []

    def ask(self, sender: NodeId, message: ShardAsk, now: float) -> list[Effect]:
        """Say what this node knows to a member."""
        peer = self._members.get(sender)
        if peer is None or peer.is_gone:
            self.unknown_senders += 1
            return []
        self._heard(message.sharded_age_s, now)
        return self._send(sender, self._answer(peer, message, now))

    def answer(self, sender: NodeId, message: ShardAnswer, now: float) -> list[Effect]:
        return self.lookups.answered(sender, message, self.mode.age_s(now), now)

    # ----------------------------------------------------------------------------------------------------------- inside

    def _heard(self, age_s: int, now: float) -> None:
        self.mode.heard(age_s, now)
        if self.mode.active(now):
            self._look_around(now)

    def _answer(self, peer: Peer, message: ShardAsk, now: float) -> ShardAnswer:
        me, asker, groups = self._members.me.node_id, peer.node_id, peer.record.groups

        def usable(holder: NodeId, meta: AnchorMeta) -> bool:
            known = holder == me or (not message.own and holder != asker and self._members.is_alive(holder))
            return known and may_see(meta, groups)

        lookup = Lookup(
            message.model_id,
            tuple(ChainHash(chain) for chain in message.chains),
            np.frombuffer(message.fingerprints, "<u4").astype(np.uint32),
            message.anchors_max,
            tuple(np.frombuffer(message.sketches, "<u8").tolist()),
            message.sketch_bits_max,
        )
        found = self._directory.find(lookup, usable, () if message.own else (self.registry.rows,), asker)
        rows: list[ShardRow] = []
        left = ANSWER_BYTES_MAX
        for hit in found.hits[:ANSWER_ROWS_MAX]:
            left -= ROW_BYTES_MAX + len(hit.meta.fingerprints)
            holder = self._members.get(hit.holder)
            if left < 0:
                break
            epoch = self._members.me.epoch if holder is None else holder.record.epoch
            rows.append(ShardRow(hit.holder, epoch, Put.of(1, hit.meta)))
        shards = np.frombuffer(message.shards, "<u2")
        settled = message.own or self._is_settled(shards[shards < SHARDS].astype(np.int64), now)
        return ShardAnswer(message.ask_id, settled, found.miss is MissReason.MODEL_MISMATCH, tuple(rows))

    def _is_settled(self, shards: npt.NDArray[np.int64], now: float) -> bool:
        """Whether this node owns all of these, and has for SETTLE_S."""
        recent = [gained[shards].any() for at, gained in self._gained.items() if now - at < SETTLE_S]
        return bool(self._owned[shards].all()) and not any(recent)

    def _decide(self, now: float) -> None:
        """Look at the load, and follow what is decided."""
        if now - self._rate_at >= RATE_S:
            seconds, (added, own) = now - self._rate_at, self._counted
            self._rates = ((self._directory.added - added) / seconds, (self._own_added - own) / seconds)
            self._counted, self._rate_at = (self._directory.added, self._own_added), now
        me = self._members.me.node_id
        anchors, log_bytes_per_s = everybodys(self.registry.loads(), len(self._members.reachable()) + 1)
        indexed = len(self._directory) - self._directory.count(me)
        rate = max(self._rates[0] * LOG_ENTRY_BYTES, log_bytes_per_s)
        self.mode.update(max(indexed, anchors) * INDEX_ROW_BYTES, rate, now)
        if not self.mode.active(now):
            self._registrar, self._table, self._seen, self._epochs = None, None, (), {}
        if not self.mode.subscribed(now) and self._community.exchange.subscribed:
            self._community.unsubscribe()
        else:
            self._community.exchange.subscribed = self.mode.subscribed(now)

    def _look_around(self, now: float) -> None:
        """Take note of who is there; the first time, begin to register."""
        peers = self._members.reachable()
        if peers is self._seen and self._table is not None:
            return
        me = self._members.me.node_id
        epochs = {peer.node_id: peer.record.epoch for peer in peers}
        returned = [peer for peer, epoch in epochs.items() if self._epochs.get(peer, epoch) != epoch]
        table = owner_table(tuple(sorted((*epochs, me))), self._table)
        owned = table.owned_by(me)
        first = self._table is None
        if first:
            settled = self.mode.subscribed(now) and now - self.mode.since >= SETTLE_S
            self._gained = {} if settled else {now: owned}
        elif table is not self._table:
            self._joined = {at: count for at, count in self._joined.items() if now - at < SETTLE_S}
            self._joined[now] = self._joined.get(now, 0) + len(epochs.keys() - self._epochs.keys())
            merged = sum(self._joined.values()) > MERGED_ABOVE * len(epochs)
            self._gained = {at: gained for at, gained in self._gained.items() if now - at < SETTLE_S}
            self._gained[now] = self._gained.get(now, False) | (owned if merged else owned & ~self._owned)
        self._seen, self._epochs, self._table, self._owned = peers, epochs, table, owned
        if self._registrar is None:
            self._registrar = Registrar(me, self._rng, table, now)
            for meta in self._pool.metas():
                held = self._pool.get(meta.anchor_id)
                if held is not None and is_shared(meta):
                    self._registrar.put(held)
        else:
            self._registrar.view(table, returned)

    def _told(self, now: float) -> Told:
        anchors = len(self._registrar) if self._registrar is not None else 0
        rate = int(self._rates[1] * LOG_ENTRY_BYTES)
        return Told(self._members.me.epoch, anchors, rate, self.mode.age_s(now))

    def _send(self, to: NodeId, message: Message) -> list[Effect]:
        """To a member that is there; one that may not know us hears first who we are."""
        peer = self._members.get(to)
        if peer is None:
            return []
        effects: list[Effect] = [] if peer.introduced else [self._community.introduction(peer)]
        return [*effects, SendMessage(to, peer.record.control, message)]
