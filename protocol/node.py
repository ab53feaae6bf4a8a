"""The node: one entry for everything that happens, one exit for everything it asks for."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

from kvcomm_p2p.protocol import violations
from kvcomm_p2p.protocol.anchors import AnchorMeta, HeldAnchor, Miss, MissReason
from kvcomm_p2p.protocol.community import Community
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.custody import Custody
from kvcomm_p2p.protocol.erasure_names import FindStretches
from kvcomm_p2p.protocol.events import (
    AnchorsForgotten,
    AnchorsPublished,
    AnchorsUsed,
    AnchorTokens,
    BlockUnavailable,
    BlockVerified,
    ChunkReceived,
    Effect,
    EraseRequested,
    Event,
    FetchCancelled,
    FetchRequested,
    FinishLookup,
    LeaveRequested,
    LookupRequested,
    MessageReceived,
    PeerUnreachable,
    ReportPeer,
    SendMessage,
    TimerExpired,
    TokensRequested,
)
from kvcomm_p2p.protocol.flights import PullViolation
from kvcomm_p2p.protocol.ids import AnchorId, NodeId
from kvcomm_p2p.protocol.lookup import Lookup, LookupResult
from kvcomm_p2p.protocol.member_table import Peer
from kvcomm_p2p.protocol.messages import (
    Bye,
    CancelPull,
    Chunk,
    Credit,
    EncodedBlock,
    ErasuresKnown,
    Forget,
    GetTokens,
    Hello,
    MemberRecord,
    NoPong,
    NoTokens,
    Ping,
    PingRequest,
    Pong,
    Pull,
    PullFailed,
    Refused,
    ShardAnswer,
    ShardAsk,
    ShardRegister,
    ShardResend,
    SharedBlocks,
    Status,
    Tokens,
    Welcome,
)
from kvcomm_p2p.protocol.onward import Onward
from kvcomm_p2p.protocol.origin_log import OriginLog
from kvcomm_p2p.protocol.peer_stats import PeerStats
from kvcomm_p2p.protocol.penalties import PenaltyBox
from kvcomm_p2p.protocol.pool import Pool, PoolChange, may_see
from kvcomm_p2p.protocol.pulls import Pulls
from kvcomm_p2p.protocol.shards import Shards
from kvcomm_p2p.protocol.shared_blocks import Sharing
from kvcomm_p2p.protocol.token_requests import TokenRequests, finish
from kvcomm_p2p.protocol.uploads import Uploads
from kvcomm_p2p.protocol.views import NodeStats, PeerView, peer_view


class Node:
    """One member of the cluster, without I/O.

    `rng` must not be shared with other nodes. `now` is seconds of any monotonic clock, the same for all calls; time
    that runs backwards is taken to stand still. Methods other than `handle` are pure reads.
    """

    def __init__(
        self,
        config: NodeConfig,
        *,
        me: MemberRecord,
        rng: random.Random,
        now: float,
        incarnation: int = 0,
        addresses: tuple[str, ...] = (),
        erasures: bytes = b"",
        find_stretches: FindStretches | None = None,
    ) -> None:
        """`incarnation`, `addresses`, `erasures`: as the last SaveState and SaveErasures of this node had them (ValueError:
        they had not). `find_stretches`: how erased content is recognised; None: by `config.erasing_key`."""
        self._now = now
        self._left = False
        self._deadline: float | None = None
        self._community = Community(config, me, rng, now, incarnation, addresses)
        self._members = self._community.members
        self._pool = Pool(config.pool_bytes_max, config.pool_anchors_max)
        self._penalties = PenaltyBox(config.penalty_first_s, config.penalty_max_s)
        self._sharing = Sharing(me, self._members)
        self._onward = Onward(config)
        order = random.Random(me.node_id)
        ask = self._community.probes.ask
        self._counted = stats = PeerStats(
            lambda peer: self._members.get(peer) is not None,
            self._penalties.left_s,
            lambda: self._community.replicas.own.max_seq,
        )
        self._pulls = Pulls(config, self._members, self._penalties, self._sharing, self._onward, order, ask, stats.get)
        self._uploads = Uploads(config, self._pool, self._onward, self._members, self._sharing)
        self._tokens = TokenRequests(config, self._penalties)
        self._custody = Custody(config, me.node_id, rng, self._members, self._pool, self._onward, self._on_pool_change)
        self._custody.erasing.begin(erasures, find_stretches, now)
        self._shards = Shards(config, self._community, self._pool, self._penalties, rng, self._usable, now)
        self._community.exchange.on_known = self._counted.knows
        self._messages: dict[str, int] = {}
        self._violations = 0
        self._on_event: dict[type, Callable[[Any, float], list[Effect]]] = {
            LeaveRequested: self._on_leave,
            TimerExpired: self._on_timer,
            MessageReceived: self._on_message,
            ChunkReceived: self._on_chunk,
            PeerUnreachable: lambda event, now: self._community.unreachable(event.peer, now),
            AnchorsPublished: self._custody.publish,
            AnchorsForgotten: self._custody.forget,
            AnchorsUsed: self._custody.use,
            EraseRequested: self._custody.erase,
            LookupRequested: self._on_lookup,
            TokensRequested: self._on_tokens_requested,
            FetchRequested: self._on_fetch,
            FetchCancelled: lambda event, now: self._pulls.cancel(event.fetch_id, now),
            BlockVerified: self._on_verified,
            BlockUnavailable: self._uploads.unavailable,
            **self._community.on_event,
        }
        self._on_message_type = self._message_types()

    def _message_types(self) -> dict[type, Callable[[NodeId, Any, float], list[Effect]]]:
        """Who takes which message."""
        return {
            Hello: self._community.hello,
            Welcome: self._community.welcome,
            Refused: lambda sender, message, now: self._community.refused(sender, message),
            Bye: self._community.bye,
            Ping: self._community.ping,
            PingRequest: self._community.ping_request,
            Pong: self._community.pong,
            NoPong: self._community.no_pong,
            **self._community.exchange.on_message,
            GetTokens: self._on_get_tokens,
            Tokens: lambda sender, message, now: self._custody.screened(self._tokens.answered(sender, message)),
            NoTokens: lambda sender, message, now: self._tokens.answered(sender, message),
            Pull: self._uploads.start,
            Credit: self._uploads.credit,
            CancelPull: self._uploads.cancel,
            Chunk: self._on_stray_chunk,
            PullFailed: self._pulls.failed,
            SharedBlocks: self._pulls.shared,
            EncodedBlock: self._pulls.encoded,
            ShardRegister: self._shards.register,
            ShardResend: self._shards.resend,
            ShardAsk: self._shards.ask,
            ShardAnswer: self._shards.answer,
            Forget: self._custody.erase_told,
            ErasuresKnown: self._custody.erasing.compared,
        }

    @property
    def me(self) -> MemberRecord:
        return self._members.me

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in what happened at `now`; returns what to do, in this order.

        Messages of peers never raise, whatever is in them. Raises ValueError or KeyError for events of our own that
        break the contract in `events` (an anchor that contradicts itself, a fetch id in use).
        """
        self._now = now = max(now, self._now)
        self._deadline = None
        self._pulls.woke(now)
        if not self._left:
            self._community.woke(now)
        effects = self._on_event[type(event)](event, now)
        if not self._left:
            effects += self._community.settle(now)
            came = [e.peer for e in effects if isinstance(e, ReportPeer) and e.change in ("joined", "returned")]
            effects += [hint for peer in came for hint in self._custody.erasing.greet(peer)]
        effects = effects + self._after_peers_went(now)
        effects += self._community.metadata.observe(event, effects, self._penalties, now)
        self._counted.observe(event, effects, now)
        return effects

    def next_deadline(self) -> float:
        """When the node wants TimerExpired. May be in the past: then at once. Infinity after it has left."""
        if self._deadline is None:
            waits = self._pulls.next_deadline(), self._tokens.next_deadline(), self._uploads.next_deadline()
            self._deadline = min(waits)
            if not self._left:
                members = self._community.next_deadline(), self._shards.next_deadline(), self._custody.next_deadline()
                self._deadline = min(self._deadline, *members)
        return self._deadline

    def find(self, lookup: Lookup) -> LookupResult:
        """Anchors that share something with a prompt, as far as this node knows without asking: own, and of peers that
        are alive and not in the penalty box."""
        return self._shards.local(lookup)

    def log_of(self, origin: NodeId) -> OriginLog | None:
        """What is known here of a log, this node's own, too: to be read only. None of who is not known."""
        return self._community.replicas.log(origin)

    def known_of(self, holder: NodeId) -> frozenset[AnchorId]:
        """Anchors that the holder has, as far as its log is known here (this node's own log for itself)."""
        log = self.log_of(holder)
        return frozenset() if log is None else frozenset(log.anchor_ids())

    def knows(self, holder: NodeId, anchor_id: AnchorId) -> bool:
        """Whether the holder has this anchor, as far as its log is known here."""
        return (log := self.log_of(holder)) is not None and log.lists(anchor_id)

    def held(self, anchor_id: AnchorId) -> HeldAnchor | None:
        return self._pool.get(anchor_id)

    def pooled(self) -> frozenset[AnchorId]:
        """Ids of what the own pool holds, private anchors, too."""
        return frozenset(meta.anchor_id for meta in self._pool.metas())

    def encodes(self, holder: NodeId) -> bool:
        """See `Sharing.encodes`."""
        return self._sharing.encodes(holder)

    def peers(self, only: Iterable[NodeId] | None = None) -> tuple[PeerView, ...]:
        """All peers that are remembered, or those among `only`, ascending by node id."""
        peers = self._members if only is None else filter(None, map(self._members.get, only))
        return tuple(sorted(map(self._view, peers), key=lambda view: view.node_id))

    def _view(self, peer: Peer) -> PeerView:
        log = self._community.replicas.log(peer.node_id)
        return peer_view(
            peer,
            self._counted.get(peer.node_id),
            anchors=self._community.replicas.anchors_of(peer.node_id),
            heard_age_s=max(0.0, self._now - peer.heard_at),
            penalty_s=self._penalties.left_s(peer.node_id, self._now),
            log_seq=log.max_seq if log is not None and log.epoch == peer.record.epoch else 0,
        )

    def stats(self) -> NodeStats:
        replicas = self._community.replicas
        return NodeStats(
            pool_bytes=self._pool.bytes,
            pool_anchors=len(self._pool),
            peers_alive=len(self._members.alive()),
            peers_known=len(self._members),
            peer_anchors=len(self._community.directory) - self._community.directory.count(self.me.node_id),
            fetches=len(self._pulls),
            pulls=self._pulls.pulling,
            uploads=len(self._uploads),
            received_bytes=self._pulls.received_bytes,
            sent_bytes=self._uploads.sent_bytes,
            violations=self._violations,
            unknown_senders=self._community.exchange.unknown_senders,
            unasked_chunks=self._pulls.unasked_chunks,
            busy=self._uploads.busy,
            throttled=self._uploads.requests.refused,
            pull_counts=dict(self._pulls.counts),
            rejected_anchors=self._custody.rejected,
            refused_deltas=replicas.refused,
            messages=dict(self._messages),
            misses={reason.value: count for reason, count in self._pulls.misses.items()},
            invalidated=self._custody.invalidated,
            sync_counts=tuple(self._counted.sync.counts),
            sync_sum_s=self._counted.sync.sum_s,
            sharded=self._shards.mode.sharded,
            failed_probes=self._community.probes.failed,
            refutations=self._members.refutations,
            stalls=self._community.stalls,
            local_trouble=self._community.health.trouble,
            twin=self._community.twins.view,
        )

    def _usable(self, holder: NodeId, meta: AnchorMeta) -> bool:
        if holder == self.me.node_id:
            return True
        if not self._members.is_alive(holder) or not may_see(meta, self.me.groups):
            return False
        return not self._custody.erasing.is_erased(meta) and self._penalties.left_s(holder, self._now) == 0

    def _on_timer(self, event: TimerExpired, now: float) -> list[Effect]:
        effects = self._tokens.tick(now) + self._pulls.tick(now) + self._uploads.tick(now)
        if self._left:
            return effects
        return effects + self._community.tick(now) + self._shards.tick(now) + self._custody.tick(now)

    def _on_leave(self, event: LeaveRequested, now: float) -> list[Effect]:
        self._left = True
        ended = self._shards.lookups.shutdown() + self._tokens.shutdown(now) + self._pulls.shutdown(now)
        return ended + self._onward.shutdown() + self._custody.erasing.save(now) + self._community.leave()

    def _on_message(self, event: MessageReceived, now: float) -> list[Effect]:
        sender, message = event.sender, event.message
        name = type(message).__name__
        self._messages[name] = self._messages.get(name, 0) + 1
        if self._left or sender == self.me.node_id:
            return [] if self._left else self._community.of_ourselves(message, now)
        self._community.heard(sender, now)
        try:
            return self._on_message_type[type(message)](sender, message, now)
        except ValueError as violation:
            return self._violated(sender, violation)

    def _on_chunk(self, event: ChunkReceived, now: float) -> list[Effect]:
        self._community.heard(event.sender, now)
        try:
            return self._pulls.chunk(event, now)
        except ValueError as violation:
            return self._violated(event.sender, violation)

    def _on_verified(self, event: BlockVerified, now: float) -> list[Effect]:
        try:
            return self._pulls.verified(event, now)
        except PullViolation as violation:
            return self._violated(violation.holder, violation)

    def _violated(self, sender: NodeId, violation: ValueError) -> list[Effect]:
        """Count it, and end what it ends."""
        if violations.is_innocent(self._members, sender, violation):
            return []
        self._violations += 1
        self._counted.violated(sender)
        effects = list(violation.effects) if isinstance(violation, PullViolation) else []
        return effects + violations.counted(self._members, sender, violation)

    def _after_peers_went(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        while self._community.gone:
            peer = self._community.gone.pop(0)
            self._uploads.peer_gone(peer)
            effects += self._tokens.peer_gone(peer, now) + self._pulls.peer_gone(peer, now)
            effects += self._shards.peer_gone(peer, now)
        while self._community.forgotten:
            peer = self._community.forgotten.pop(0)
            self._penalties.forgive(peer)
            self._sharing.forget(peer)
            self._counted.forget(peer)
        return effects

    def _on_pool_change(self, change: PoolChange, now: float) -> None:
        self._community.announce(change, now)
        self._shards.changed(change)

    def _on_lookup(self, event: LookupRequested, now: float) -> list[Effect]:
        if self._left:
            return [FinishLookup(event.request_id, self.find(event.lookup))]
        return self._shards.requested(event, now)

    def _on_tokens_requested(self, event: TokensRequested, now: float) -> list[Effect]:
        if event.holder == self.me.node_id:
            held = self._pool.get(event.anchor.anchor_id)
            if held is None or (held.meta.start, held.meta.end) != (event.anchor.start, event.anchor.end):
                return [finish(event, Miss(MissReason.EVICTED))]
            return [finish(event, AnchorTokens(held.meta, self.me.node_id, held.token_ids, held.digests))]
        if self._left:
            return [finish(event, Miss(MissReason.SHUTDOWN))]
        peer = self._members.get(event.holder)
        if peer is None or not self._members.is_alive(event.holder):
            return [finish(event, Miss(MissReason.UNREACHABLE, "unknown" if peer is None else peer.state.word))]
        if self._penalties.left_s(event.holder, now) > 0:
            return [finish(event, Miss(MissReason.STALLED, "failed to deliver before"))]
        effects: list[Effect] = [] if peer.introduced else [self._community.introduction(peer)]
        return [*effects, SendMessage(peer.node_id, peer.record.control, self._tokens.ask(event, now))]

    def _on_get_tokens(self, sender: NodeId, message: GetTokens, now: float) -> list[Effect]:
        peer = self._members.get(sender)
        if peer is None or peer.state is Status.LEFT:
            self._community.exchange.unknown_senders += 1
            return []
        if not self._uploads.requests.admits(sender, now):
            return []
        return [SendMessage(sender, peer.record.control, self._uploads.tokens_for(sender, message))]

    def _on_fetch(self, event: FetchRequested, now: float) -> list[Effect]:
        return self._pulls.fetch(event, now, self._custody.refusal(event))

    def _on_stray_chunk(self, sender: NodeId, message: Chunk, now: float) -> list[Effect]:
        raise ValueError("a Chunk outside the bulk connection")
