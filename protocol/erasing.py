"""Content that is to be forgotten everywhere, and kept from coming back.

Whoever asks names stretches of the text by keyed hashes, never by the text itself: four to 32 tokens long, many enough that
every copy of more than a few tokens holds one. A holder compares them with the token ids of its own pool, so nothing depends
on how the copy was published. It forgets every anchor that holds one, and what was computed behind it, in the same sequence
or where an exact prefix that holds one goes on (chain hashes say so); refuses to publish either again, to take token ids that
hold one, and to pull what was erased by name. Memory is bounded: per author, in all, and in time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from kvcomm_p2p.protocol.anchors import AnchorMeta, HeldAnchor
from kvcomm_p2p.protocol.erasure_memory import ErasureMemory, aged
from kvcomm_p2p.protocol.erasure_names import FindStretches, finder
from kvcomm_p2p.protocol.events import Effect, EraseRequested, ReportErased, SaveErasures, SendMessage
from kvcomm_p2p.protocol.ids import AnchorId, NodeId
from kvcomm_p2p.protocol.kgrams import TokenIds
from kvcomm_p2p.protocol.member_table import Peer
from kvcomm_p2p.protocol.membership import Membership
from kvcomm_p2p.protocol.messages import (
    ERASURES_PER_MESSAGE_MAX,
    Erasure,
    ErasuresKnown,
    Forget,
)
from kvcomm_p2p.protocol.pool import Pool

SCAN_TOKENS = 1 << 16
SCAN_PAUSE_S = 0.05
"""A pool is searched in pieces of a few milliseconds with pauses, so that nobody can keep a node busy with erasing."""

COMPARE_S = 10.0
GREETED_BY = 4
"""Members that a newcomer hears of erasures from, on average."""

MESSAGE_BYTES = 160 * 1024
MESSAGES_AT_ONCE_MAX = 8

SENDERS_COUNTED_MAX = 4096

ANSWER_PAUSE_S = 1.0
"""A member's comparisons are answered once in this time: each answer may come to a megabyte."""

SAVE_PAUSE_S = 1.0
SAVE_BYTES_PER_S = 256 * 1024
"""Seconds between savings of what others told, at least, and the bytes per second that these may cost the disk; what our own
user wants is saved at once."""

SAVE_AGES_S = 3600.0
"""Seconds after which the ages of erasures are saved anew: what a node that is killed adds to their time, at most."""

NEWS_PER_SENDER_MAX = 256
"""Erasures that are taken from one member within COMPARE_S; more are a violation (honest ones come again)."""


class Erasing:
    """Erasures that this node remembers, and their consequences. `forget` removes anchors from the pool and tells everybody."""

    def __init__(
        self,
        key: bytes,
        me: NodeId,
        rng: random.Random,
        members: Membership,
        pool: Pool,
        forget: Callable[[Iterable[AnchorId], float], list[Effect]],
    ) -> None:
        self._find: FindStretches = finder(key)
        self._me = me
        self._rng = rng
        self._members = members
        self._pool = pool
        self._forget = forget
        self._memory = ErasureMemory()
        self._scan: list[list[HeldAnchor]] = []
        self._scan_again = False
        self._news: dict[NodeId, tuple[float, int]] = {}
        self._answered: dict[NodeId, float] = {}
        self._scan_at = math.inf
        self._compare_at = math.inf
        self._saved_at = -math.inf
        self._saved_bytes = 0
        self.anchors_erased = 0

    def __len__(self) -> int:
        return len(self._memory)

    def __contains__(self, erasure_id: bytes) -> bool:
        return erasure_id in self._memory

    def begin(self, packed: bytes, find: FindStretches | None, now: float) -> None:
        """Before anything is held: with what the last SaveErasures of this node had, if there was one (raises ValueError for
        other bytes), and with another way to recognise erased content than by the key, if one is given."""
        self._find = find or self._find
        if packed:
            self._memory.restore(packed, now)
            self._saved_at, self._saved_bytes = now, len(packed)
            self._compare_soon(now)

    def next_deadline(self) -> float:
        """When `tick` has something to do."""
        return min(self._scan_at, self._compare_at, self._save_at())

    # ------------------------------------------------------------------------------------------------------------ asking

    def requested(self, event: EraseRequested, now: float) -> list[Effect]:
        """Our own user wants it: here at once, and everywhere if asked for."""
        for erasure in event.erasures:
            self._remember(erasure, now, told=event.everywhere)
        self._scan, self._scan_again = [], False
        effects = self._carry_out(now)
        while self._scan:
            effects += self._scan_some(now)
        effects += self.save(now)
        if event.everywhere:
            for peer in self._members.alive():
                effects += self._tell(peer, event.erasures, now)
        return effects

    def told(self, sender: NodeId, message: Forget, now: float) -> list[Effect]:
        """A member passes erasures on. Those that are known, or have had their time, change nothing. Raises ValueError for
        more than one may tell."""
        if self._members.get(sender) is None:
            return []
        news = [erasure for erasure in message.erasures if erasure.erasure_id not in self._memory]
        self._count_news(sender, len(news), now)
        for erasure in news:
            self._remember(erasure, now, told=True)
        return self._carry_out(now) + self._save_if_due(now) if news else []

    def compared(self, sender: NodeId, message: ErasuresKnown, now: float) -> list[Effect]:
        """A member tells which erasures it knows."""
        peer = self._members.get(sender)
        if peer is None or now - self._answered.get(sender, -math.inf) < ANSWER_PAUSE_S:
            return []
        if len(self._answered) >= SENDERS_COUNTED_MAX:
            self._answered.clear()
        self._answered[sender] = now
        self._memory.expire(now)
        theirs = {chunk[at : at + 8] for chunk in message.ids for at in range(0, len(chunk), 8)}
        mine = {identity[:8]: erasure for identity, erasure in self._memory.told()}
        effects = self._tell(peer, [erasure for short, erasure in mine.items() if short not in theirs], now)
        if not message.answer and theirs - mine.keys():
            effects.append(self._summary(peer, answer=True))
        return effects

    def greet(self, node_id: NodeId) -> list[Effect]:
        """Somebody has joined or come back: a few of us tell it what is to stay forgotten."""
        peer = self._members.get(node_id)
        if peer is None or not len(self) or self._rng.random() * len(self._members.alive()) > GREETED_BY:
            return []
        return [self._summary(peer, answer=False)]

    # ---------------------------------------------------------------------------------------------------------- refusing

    def refused(self, anchors: Sequence[HeldAnchor]) -> frozenset[AnchorId]:
        """Those of the anchors about to be published that must not be: they hold erased content, or were computed behind it.
        Remembers what it refuses."""
        if not len(self):
            return frozenset()
        found: set[AnchorId] = set()
        for run in _joined(anchors):
            found |= self._matches(run)
        return frozenset(found.union(self._named(anchor.meta for anchor in anchors)))

    def is_erased(self, meta: AnchorMeta) -> bool:
        """Whether an anchor was erased by name, or stands behind one that was."""
        memory = self._memory
        if memory.has_name(meta.anchor_id) or memory.is_behind(meta.sequence_id, meta.end):
            return True
        return bool(meta.chain_start) and memory.has_name(meta.chain_start)

    def is_erased_id(self, anchor_id: AnchorId) -> bool:
        """Whether an anchor of this id was erased."""
        return self._memory.has_name(anchor_id)

    def holds_erased(self, token_ids: TokenIds) -> bool:
        """Whether these token ids hold a stretch that was erased."""
        return any(len(self._find(token_ids, tokens, table)) for tokens, table in self._memory.tables().items())

    # ------------------------------------------------------------------------------------------------------------- timer

    def tick(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if self._scan_at <= now:
            effects += self._scan_some(now)
            if not self._scan and self._scan_again:
                self._begin_scan(now)
            self._scan_at = now + SCAN_PAUSE_S if self._scan else math.inf
        if self._compare_at <= now:
            self._memory.expire(now)
            self._compare_at = math.inf
            self._compare_soon(now)
            alive = self._members.alive()
            if len(self) and alive:
                effects.append(self._summary(self._rng.choice(alive), answer=False))
        return effects + self._save_if_due(now)

    def save(self, now: float) -> list[Effect]:
        """What the next life of this node should begin with, if there is anything that it should know."""
        if not len(self) and not self._memory.changed:
            return []
        packed = self._memory.pack(now)
        self._saved_at, self._saved_bytes = now, len(packed)
        return [SaveErasures(packed)]

    # ------------------------------------------------------------------------------------------------------------ inside

    def _count_news(self, sender: NodeId, count: int, now: float) -> None:
        since, before = self._news.get(sender, (now, 0))
        if now - since >= COMPARE_S:
            since, before = now, 0
        if before + count > NEWS_PER_SENDER_MAX:
            raise ValueError("more erasures than one member may tell")
        self._news[sender] = (since, before + count)
        if len(self._news) > SENDERS_COUNTED_MAX:
            self._news = {sender: self._news[sender]}

    def _save_at(self) -> float:
        if self._memory.changed:
            return self._saved_at + max(SAVE_PAUSE_S, self._saved_bytes / SAVE_BYTES_PER_S)
        return self._saved_at + SAVE_AGES_S if len(self) else math.inf

    def _save_if_due(self, now: float) -> list[Effect]:
        return self.save(now) if self._save_at() <= now else []

    def _compare_soon(self, now: float) -> None:
        if len(self) and math.isinf(self._compare_at):
            self._compare_at = now + COMPARE_S * (0.5 + self._rng.random())

    def _carry_out(self, now: float) -> list[Effect]:
        """What is erased by name goes at once; content is looked for in the whole pool, and once more if a search is on."""
        effects = self._drop(self._named(self._pool.metas()), now)
        if self._scan:
            self._scan_again = True
        else:
            self._begin_scan(now)
        self._compare_soon(now)
        return effects

    def _begin_scan(self, now: float) -> None:
        held = [anchor for meta in self._pool.metas() if (anchor := self._pool.get(meta.anchor_id)) is not None]
        self._scan = _joined(held) if self._memory.tables() else []
        self._scan_at = now if self._scan else math.inf
        self._scan_again = False

    def _scan_some(self, now: float) -> list[Effect]:
        found: set[AnchorId] = set()
        tokens = 0
        while self._scan and tokens < SCAN_TOKENS:
            run = self._scan.pop()
            tokens += sum(anchor.meta.tokens for anchor in run)
            found |= self._matches(run)
        effects = self._drop(sorted(found), now)
        return effects if self._scan else effects + self._drop(self._named(self._pool.metas()), now)

    def _named(self, metas: Iterable[AnchorMeta]) -> list[AnchorId]:
        """Those that are erased by name; where they end is remembered, so what stands behind them is, too."""
        named: list[AnchorId] = []
        for meta in sorted(metas, key=lambda meta: meta.start):
            if self.is_erased(meta):
                named.append(meta.anchor_id)
                self._memory.add_name(meta.chain_end)
        return named

    def _matches(self, run: Sequence[HeldAnchor]) -> set[AnchorId]:
        """Anchors of a run (one after the other in one sequence) that hold a stretch, or stand behind one that does."""
        token_ids = np.concatenate([anchor.token_ids for anchor in run])
        found = [self._find(token_ids, tokens, table) for tokens, table in self._memory.tables().items()]
        firsts = [int(places[0]) for places in found if len(places)]
        if not firsts:
            return set()
        first = run[0].meta.start + min(firsts)
        behind = [anchor.meta for anchor in run if anchor.meta.end > first]
        self._memory.add_cut(run[0].meta.sequence_id, first)
        for meta in behind:
            self._memory.add_name(meta.anchor_id)
            self._memory.add_name(meta.chain_end)
        return {meta.anchor_id for meta in behind}

    def _drop(self, anchor_ids: Sequence[AnchorId], now: float) -> list[Effect]:
        held = tuple(anchor_id for anchor_id in anchor_ids if self._pool.get(anchor_id) is not None)
        if not held:
            return []
        self.anchors_erased += len(held)
        return [*self._forget(held, now), ReportErased(held)]

    def _remember(self, erasure: Erasure, now: float, *, told: bool) -> None:
        if self._memory.add(erasure, now, told=told):
            for anchor_id in erasure.anchor_ids:
                held = self._pool.get(anchor_id)
                if held is not None:
                    self._memory.add_cut(held.meta.sequence_id, held.meta.start)

    def _summary(self, peer: Peer, *, answer: bool) -> SendMessage:
        ids = b"".join(identity[:8] for identity, _ in self._memory.told())
        chunks = tuple(ids[at : at + 4096] for at in range(0, len(ids), 4096))
        return SendMessage(peer.node_id, peer.record.control, ErasuresKnown(chunks, answer))

    def _tell(self, peer: Peer, erasures: Sequence[Erasure], now: float) -> list[Effect]:
        """As many as fit into a few messages; the next comparison brings the rest."""
        batches: list[list[Erasure]] = []
        size = MESSAGE_BYTES
        for erasure in erasures:
            item = self._memory.get(erasure.erasure_id)
            if item is None:
                continue
            size += 256 + len(erasure.hashes) + 18 * len(erasure.anchor_ids)
            if size > MESSAGE_BYTES or len(batches[-1]) == ERASURES_PER_MESSAGE_MAX:
                if len(batches) == MESSAGES_AT_ONCE_MAX:
                    break
                batches.append([])
                size = 0
            batches[-1].append(aged(item, now))
        return [SendMessage(peer.node_id, peer.record.control, Forget(tuple(batch))) for batch in batches]


def _joined(anchors: Iterable[HeldAnchor]) -> list[list[HeldAnchor]]:
    """Anchors that follow each other in one sequence, together: a stretch may stand across their border."""
    ordered = sorted(anchors, key=lambda a: (a.meta.sequence_id, a.meta.start, a.meta.end))
    runs: list[list[HeldAnchor]] = []
    for anchor in ordered:
        last = runs[-1][-1].meta if runs else None
        if last is not None and last.sequence_id == anchor.meta.sequence_id and last.end == anchor.meta.start:
            runs[-1].append(anchor)
        else:
            runs.append([anchor])
    return runs
