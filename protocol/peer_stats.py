"""What was exchanged with each peer, counted from what goes into a node and what comes out of it.

The node shows every event with its effects to `PeerStats.observe`, so that no other part has to count by peer. Bounded: of
more than PEERS_COUNTED_MAX peers, those with whom nothing was exchanged for longest are no longer told.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcomm_p2p.protocol.anchors import BlockHandle, Miss, MissReason
from kvcomm_p2p.protocol.events import (
    AdoptShared,
    BlockVerified,
    ChunkReceived,
    Effect,
    Event,
    FetchRequested,
    FinishFetch,
    FinishTokens,
    MessageReceived,
    SendBlock,
    SendMessage,
    StoreChunk,
    TokensRequested,
)
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.messages import (
    GetTokens,
    NoTokens,
    Ping,
    Pong,
    PullFailed,
    PullFailedReason,
    SharedBlocks,
    Tokens,
)

_ANSWERED: dict[type, type] = {Pong: Ping, Tokens: GetTokens, NoTokens: GetTokens}
"""Questions whose round trip is measured, by their answers."""

PEERS_COUNTED_MAX = 256
QUESTIONS_MAX = 4096
"""Fetches, probes and questions for tokens whose answer is waited for."""

ROUND_TRIP_WEIGHT = 0.125
"""Of the newest measurement in the mean, as in RFC 6298."""

SYNC_BOUNDS_S = (0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8)
"""Upper bounds of the classes in which times until peers know are counted; one more class has what is above."""

NEWS_TRACKED_MAX = 256
"""Own publications whose arrival at peers is timed, the latest ones."""


@dataclass(slots=True)
class PeerCounts:
    """One peer. `busy_told`: how often it was busy for us; `busy_given`: how often we were for it. `penalties`: how often
    it went to the penalty box. `round_trip_s`: smoothed, None before the first answer. `told_seq`: how long its log is, as
    it said itself; `known_seq`: up to where it knows ours."""

    pulled_bytes: int = 0
    uploaded_bytes: int = 0
    busy_told: int = 0
    busy_given: int = 0
    penalties: int = 0
    violations: int = 0
    round_trip_s: float | None = None
    told_seq: int = 0
    known_seq: int = 0
    penalised_until: float = -math.inf
    misses: dict[MissReason, int] = field(default_factory=dict)

    def round_trip(self, seconds: float) -> None:
        """One more measurement."""
        if self.round_trip_s is None:
            self.round_trip_s = seconds
        else:
            self.round_trip_s += ROUND_TRIP_WEIGHT * (seconds - self.round_trip_s)


@dataclass(slots=True)
class SyncTimes:
    """Seconds from a publication until a peer's own words show that it knows: `counts` per class of SYNC_BOUNDS_S."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(SYNC_BOUNDS_S) + 1))
    sum_s: float = 0.0

    def add(self, seconds: float) -> None:
        """One peer has learned of one publication."""
        self.counts[bisect_left(SYNC_BOUNDS_S, seconds)] += 1
        self.sum_s += seconds


class PeerStats:
    """Counts by peer. `is_known` says whether a node is a peer (strangers are not
    counted), `penalty_left_s` how much longer it is not asked, `own_seq` how long our own log is."""

    def __init__(
        self,
        is_known: Callable[[NodeId], bool],
        penalty_left_s: Callable[[NodeId, float], float],
        own_seq: Callable[[], int],
    ) -> None:
        self._is_known = is_known
        self._penalty_left_s = penalty_left_s
        self._own_seq = own_seq
        self._peers: dict[NodeId, PeerCounts] = {}
        self._holders: dict[tuple[type, int], NodeId] = {}
        self._adopting: dict[BlockHandle, tuple[NodeId, int]] = {}
        self._asked_at: dict[tuple[NodeId, type, int], float] = {}
        self._news: deque[tuple[int, float]] = deque(maxlen=NEWS_TRACKED_MAX)
        self._seq = own_seq()
        self.sync = SyncTimes()
        self._on_event: dict[type, Callable[[Any, Sequence[Effect], float], None]] = {
            MessageReceived: self._message,
            ChunkReceived: self._chunk,
            BlockVerified: self._adopted,
            FetchRequested: lambda event, _, now: self._remember(FinishFetch, event.fetch_id, event.holders[0]),
            TokensRequested: lambda event, _, now: self._remember(FinishTokens, event.request_id, event.holder),
        }
        self._on_effect: dict[type, Callable[[Any, float], None]] = {
            SendMessage: self._sent,
            SendBlock: self._uploaded,
            FinishFetch: self._fetched,
            FinishTokens: self._brought,
        }

    def __len__(self) -> int:
        return len(self._peers)

    def get(self, peer: NodeId) -> PeerCounts:
        """What was counted of a peer; zeros if nothing was. Not to be changed."""
        return self._peers.get(peer) or PeerCounts()

    def violated(self, peer: NodeId) -> None:
        """It broke the rules."""
        counts = self._of(peer)
        if counts is not None:
            counts.violations += 1

    def forget(self, peer: NodeId) -> None:
        """It is remembered no longer."""
        self._peers.pop(peer, None)

    def observe(self, event: Event, effects: Sequence[Effect], now: float) -> None:
        """What went in at `now` and what came out. Changes neither."""
        seq = self._own_seq()
        if seq != self._seq:
            self._seq = seq
            self._news.append((seq, now))
        on_event = self._on_event.get(type(event))
        if on_event is not None:
            on_event(event, effects, now)
        for effect in effects:
            on_effect = self._on_effect.get(type(effect))
            if on_effect is not None:
                on_effect(effect, now)

    def _of(self, peer: NodeId) -> PeerCounts | None:
        """The counts of a peer, now the most recent ones; None for strangers."""
        counts = self._peers.pop(peer, None)
        if counts is None:
            if not self._is_known(peer):
                return None
            counts = PeerCounts()
            if len(self._peers) >= PEERS_COUNTED_MAX:
                del self._peers[next(iter(self._peers))]
        self._peers[peer] = counts
        return counts

    def _remember(self, answer: type, number: int, holder: NodeId) -> None:
        self._holders[answer, number] = holder
        if len(self._holders) > QUESTIONS_MAX:
            del self._holders[next(iter(self._holders))]

    def _sent(self, effect: SendMessage, now: float) -> None:
        message = effect.message
        if effect.to is None:
            return
        if isinstance(message, Ping | GetTokens):
            self._asked_at[effect.to, type(message), _number(message)] = now
            if len(self._asked_at) > QUESTIONS_MAX:
                del self._asked_at[next(iter(self._asked_at))]
        elif isinstance(message, PullFailed) and message.reason is PullFailedReason.BUSY:
            counts = self._of(effect.to)
            if counts is not None:
                counts.busy_given += 1

    def _message(self, event: MessageReceived, effects: Sequence[Effect], now: float) -> None:
        sender, message = event.sender, event.message
        question = _ANSWERED.get(type(message))
        if question is not None:
            asked_at = self._asked_at.pop((sender, question, _number(message)), None)
            counts = None if asked_at is None else self._of(sender)
            if counts is not None and asked_at is not None:
                counts.round_trip(now - asked_at)
        elif isinstance(message, PullFailed) and message.reason is PullFailedReason.BUSY:
            counts = self._of(sender)
            if counts is not None:
                counts.busy_told += 1
        elif isinstance(message, SharedBlocks):
            for effect in effects:
                if isinstance(effect, AdoptShared):
                    self._adopting[effect.handle] = (sender, effect.kv_bytes)
            while len(self._adopting) > QUESTIONS_MAX:
                del self._adopting[next(iter(self._adopting))]

    def knows(self, peer: NodeId, told_seq: int, known_seq: int, now: float) -> None:
        """A peer's own words show how long its log is, and how much of ours it has."""
        counts = self._of(peer)
        if counts is None:
            return
        counts.told_seq = told_seq
        if counts.known_seq < known_seq <= self._seq:
            before, counts.known_seq = counts.known_seq, known_seq
            for seq, at in self._news:
                if before < seq <= known_seq:
                    self.sync.add(now - at)

    def _chunk(self, event: ChunkReceived, effects: Sequence[Effect], now: float) -> None:
        if any(isinstance(effect, StoreChunk) for effect in effects):
            counts = self._of(event.sender)
            if counts is not None:
                counts.pulled_bytes += event.length

    def _adopted(self, event: BlockVerified, effects: Sequence[Effect], now: float) -> None:
        """A block of a pull was checked; if it stood in shared memory, its bytes are here only now."""
        sender, kv_bytes = self._adopting.pop(event.handle, (None, 0))
        counts = self._of(sender) if sender is not None and event.ok else None
        if counts is not None:
            counts.pulled_bytes += kv_bytes

    def _uploaded(self, effect: SendBlock, now: float) -> None:
        counts = self._of(effect.to)
        if counts is not None:
            counts.uploaded_bytes += effect.encoded_bytes or effect.kv_bytes

    def _fetched(self, effect: FinishFetch, now: float) -> None:
        """What did not come is counted for who did not deliver it, or else for the fetch's first holder."""
        first = self._holders.pop((FinishFetch, effect.fetch_id), None)
        by: dict[NodeId, list[Miss]] = {}
        for block in effect.missed:
            holder = block.by or first
            if holder is not None:
                by.setdefault(holder, []).append(block.miss)
        for holder, misses in by.items():
            self._missed(holder, misses, now)

    def _brought(self, effect: FinishTokens, now: float) -> None:
        holder = self._holders.pop((FinishTokens, effect.request_id), None)
        if holder is not None and isinstance(effect.result, Miss):
            self._missed(holder, [effect.result], now)

    def _missed(self, holder: NodeId, misses: Sequence[Miss], now: float) -> None:
        counts = self._of(holder) if misses else None
        if counts is None:
            return
        for miss in misses:
            counts.misses[miss.reason] = counts.misses.get(miss.reason, 0) + 1
        left_s = self._penalty_left_s(holder, now)
        if left_s > 0 and now + left_s > counts.penalised_until + 1e-6:
            counts.penalties += 1
            counts.penalised_until = now + left_s


def _number(message: Any) -> int:
    """Of a question or answer: what tells it from others of its type."""
    return int(message.request_id) if hasattr(message, "request_id") else int(message.seq)
