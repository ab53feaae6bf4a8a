"""Content that is to be forgotten everywhere, and kept from coming back.

Whoever asks names stretches of the text by keyed hashes, never by the text itself: four to 32 tokens long, many enough that
every copy of more than a few tokens holds one. A holder compares them with the token ids of its own pool, so nothing depends
on how the copy was published. It forgets every anchor that holds one, and what was computed behind it in the same sequence;
refuses to publish either again, to take token ids that hold one, and to pull what was erased by name. Memory is bounded: per
author, in all, and in time.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from kvcomm_p2p.protocol.anchors import AnchorMeta, HeldAnchor
from kvcomm_p2p.protocol.erasure_names import key_words
from kvcomm_p2p.protocol.events import Effect, EraseRequested, ReportErased, SendMessage
from kvcomm_p2p.protocol.ids import AnchorId, NodeId, SequenceId
from kvcomm_p2p.protocol.kgrams import U64, TokenIds, kgram_hashes
from kvcomm_p2p.protocol.member_table import Peer
from kvcomm_p2p.protocol.membership import Membership
from kvcomm_p2p.protocol.messages import (
    ERASURE_S,
    ERASURES_PER_MESSAGE_MAX,
    Erasure,
    ErasuresKnown,
    Forget,
)
from kvcomm_p2p.protocol.pool import Pool

ERASURES_MAX = 4096
ERASURES_PER_AUTHOR_MAX = 512
"""Older ones of an author make room for its newer ones, and those of who has most for those of others."""

HASHES_MAX = 1 << 18
NAMES_MAX = 16_384
"""Anchors and sequences that are remembered as erased."""

SCAN_TOKENS = 1 << 16
SCAN_PAUSE_S = 0.05
"""A pool is searched in pieces of a few milliseconds with pauses, so that nobody can keep a node busy with erasing."""

COMPARE_S = 10.0
GREETED_BY = 4
"""Members that a newcomer hears of erasures from, on average."""

MESSAGE_BYTES = 160 * 1024
MESSAGES_AT_ONCE_MAX = 8

NEWS_PER_SENDER_MAX = 256
"""Erasures that are taken from one member within COMPARE_S; more are a violation (honest ones come again)."""


@dataclass(slots=True)
class _Remembered:
    """`told`: it is for everybody, not for this node alone."""

    erasure: Erasure
    born: float
    told: bool


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
        self._key = key_words(key)
        self._me = me
        self._rng = rng
        self._members = members
        self._pool = pool
        self._forget = forget
        self._known: OrderedDict[bytes, _Remembered] = OrderedDict()
        self._tables: dict[int, U64] = {}
        self._erased: OrderedDict[AnchorId, None] = OrderedDict()
        self._cut: OrderedDict[SequenceId, int] = OrderedDict()
        self._scan: list[list[HeldAnchor]] = []
        self._scan_again = False
        self._counts: dict[bytes, int] = {}
        self._hashes = 0
        self._news: dict[NodeId, tuple[float, int]] = {}
        self._scan_at = math.inf
        self._compare_at = math.inf
        self.anchors_erased = 0

    def __len__(self) -> int:
        return len(self._known)

    def next_deadline(self) -> float:
        """When `tick` has something to do."""
        return min(self._scan_at, self._compare_at)

    # ------------------------------------------------------------------------------------------------------------ asking

    def requested(self, event: EraseRequested, now: float) -> list[Effect]:
        """Our own user wants it: here at once, and everywhere if asked for."""
        for erasure in event.erasures:
            self._remember(erasure, now, told=event.everywhere)
        self._scan, self._scan_again = [], False
        effects = self._carry_out(now)
        while self._scan:
            effects += self._scan_some(now)
        if event.everywhere:
            for peer in self._members.alive():
                effects += self._tell(peer, event.erasures, now)
        return effects

    def told(self, sender: NodeId, message: Forget, now: float) -> list[Effect]:
        """A member passes erasures on. Those that are known, or have had their time, change nothing. Raises ValueError for
        more than one may tell."""
        if self._members.get(sender) is None:
            return []
        news = [erasure for erasure in message.erasures if erasure.erasure_id not in self._known]
        self._count_news(sender, len(news), now)
        for erasure in news:
            self._remember(erasure, now, told=True)
        return self._carry_out(now) if news else []

    def compared(self, sender: NodeId, message: ErasuresKnown, now: float) -> list[Effect]:
        """A member tells which erasures it knows."""
        peer = self._members.get(sender)
        if peer is None:
            return []
        self._expire(now)
        theirs = {chunk[at : at + 8] for chunk in message.ids for at in range(0, len(chunk), 8)}
        mine = {identity[:8]: item.erasure for identity, item in self._known.items() if item.told}
        effects = self._tell(peer, [erasure for short, erasure in mine.items() if short not in theirs], now)
        if not message.answer and theirs - mine.keys():
            effects.append(self._summary(peer, answer=True))
        return effects

    def greet(self, node_id: NodeId) -> list[Effect]:
        """Somebody has joined or come back: a few of us tell it what is to stay forgotten."""
        peer = self._members.get(node_id)
        if peer is None or not self._known or self._rng.random() * len(self._members.alive()) > GREETED_BY:
            return []
        return [self._summary(peer, answer=False)]

    # ---------------------------------------------------------------------------------------------------------- refusing

    def refused(self, anchors: Sequence[HeldAnchor]) -> frozenset[AnchorId]:
        """Those of the anchors about to be published that must not be: they hold erased content, or were computed behind it.
        Remembers what it refuses."""
        if not self._known:
            return frozenset()
        found: set[AnchorId] = set()
        for run in _joined(anchors):
            found |= self._matches(run)
        for anchor in anchors:
            cut = self._cut.get(anchor.meta.sequence_id)
            if anchor.meta.anchor_id in self._erased or (cut is not None and anchor.meta.end > cut):
                found.add(anchor.meta.anchor_id)
        return frozenset(found)

    def is_erased(self, meta: AnchorMeta) -> bool:
        """Whether an anchor was erased by name."""
        cut = self._cut.get(meta.sequence_id)
        return meta.anchor_id in self._erased or (cut is not None and meta.end > cut)

    def is_erased_id(self, anchor_id: AnchorId) -> bool:
        """Whether an anchor of this id was erased."""
        return anchor_id in self._erased

    def holds_erased(self, token_ids: TokenIds) -> bool:
        """Whether these token ids hold a stretch that was erased."""
        return any(len(self._positions(token_ids, tokens)) for tokens in self._tables)

    # ------------------------------------------------------------------------------------------------------------- timer

    def tick(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if self._scan_at <= now:
            effects += self._scan_some(now)
            if not self._scan and self._scan_again:
                self._begin_scan(now)
            self._scan_at = now + SCAN_PAUSE_S if self._scan else math.inf
        if self._compare_at <= now:
            self._expire(now)
            self._compare_at = now + COMPARE_S * (0.5 + self._rng.random()) if self._known else math.inf
            alive = self._members.alive()
            if self._known and alive:
                effects.append(self._summary(self._rng.choice(alive), answer=False))
        return effects

    # ------------------------------------------------------------------------------------------------------------ inside

    def _count_news(self, sender: NodeId, count: int, now: float) -> None:
        since, before = self._news.get(sender, (now, 0))
        if now - since >= COMPARE_S:
            since, before = now, 0
        if before + count > NEWS_PER_SENDER_MAX:
            raise ValueError("more erasures than one member may tell")
        self._news[sender] = (since, before + count)
        if len(self._news) > ERASURES_MAX:
            self._news = {sender: self._news[sender]}

    def _carry_out(self, now: float) -> list[Effect]:
        """What is erased by name goes at once; content is looked for in the whole pool, and once more if a search is on."""
        self._rebuild()
        named = [meta for meta in self._pool.metas() if self.is_erased(meta)]
        effects = self._drop([meta.anchor_id for meta in named], now)
        if self._scan:
            self._scan_again = True
        else:
            self._begin_scan(now)
        if self._known and math.isinf(self._compare_at):
            self._compare_at = now + COMPARE_S * (0.5 + self._rng.random())
        return effects

    def _begin_scan(self, now: float) -> None:
        held = [anchor for meta in self._pool.metas() if (anchor := self._pool.get(meta.anchor_id)) is not None]
        self._scan = _joined(held) if self._tables else []
        self._scan_at = now if self._scan else math.inf
        self._scan_again = False

    def _scan_some(self, now: float) -> list[Effect]:
        found: set[AnchorId] = set()
        tokens = 0
        while self._scan and tokens < SCAN_TOKENS:
            run = self._scan.pop()
            tokens += sum(anchor.meta.tokens for anchor in run)
            found |= self._matches(run)
        return self._drop(sorted(found), now)

    def _matches(self, run: Sequence[HeldAnchor]) -> set[AnchorId]:
        """Anchors of a run (one after the other in one sequence) that hold a stretch, or stand behind one that does."""
        token_ids = np.concatenate([anchor.token_ids for anchor in run])
        firsts = [int(places[0]) for tokens in self._tables if len(places := self._positions(token_ids, tokens))]
        if not firsts:
            return set()
        first = run[0].meta.start + min(firsts)
        behind = [anchor.meta for anchor in run if anchor.meta.end > first]
        self._remember_cut(run[0].meta.sequence_id, first)
        for meta in behind:
            self._remember_name(meta.anchor_id)
        return {meta.anchor_id for meta in behind}

    def _positions(self, token_ids: TokenIds, tokens: int) -> npt.NDArray[np.intp]:
        table = self._tables[tokens]
        hashes = kgram_hashes(token_ids, tokens, self._key)
        at = np.minimum(np.searchsorted(table, hashes), len(table) - 1)
        return np.flatnonzero(table[at] == hashes)

    def _drop(self, anchor_ids: Sequence[AnchorId], now: float) -> list[Effect]:
        held = tuple(anchor_id for anchor_id in anchor_ids if self._pool.get(anchor_id) is not None)
        if not held:
            return []
        self.anchors_erased += len(held)
        return [*self._forget(held, now), ReportErased(held)]

    def _remember(self, erasure: Erasure, now: float, *, told: bool) -> None:
        if erasure.erasure_id in self._known or erasure.age_s >= ERASURE_S:
            return
        self._expire(now)
        self._make_room(erasure)
        self._known[erasure.erasure_id] = _Remembered(erasure, now - erasure.age_s, told)
        self._counts[_author(erasure)] = self._counts.get(_author(erasure), 0) + 1
        self._hashes += len(erasure.hashes) // 8
        for anchor_id in erasure.anchor_ids:
            self._remember_name(anchor_id)
            held = self._pool.get(anchor_id)
            if held is not None:
                self._remember_cut(held.meta.sequence_id, held.meta.start)

    def _make_room(self, erasure: Erasure) -> None:
        author = _author(erasure)
        if self._counts.get(author, 0) >= ERASURES_PER_AUTHOR_MAX:
            self._evict(author)
        while len(self._known) >= ERASURES_MAX or self._hashes + len(erasure.hashes) // 8 > HASHES_MAX:
            self._evict(max(self._counts, key=lambda each: (self._counts[each], each)))

    def _evict(self, author: bytes) -> None:
        """The oldest of an author."""
        self._let_go(next(identity for identity, item in self._known.items() if _author(item.erasure) == author))

    def _let_go(self, identity: bytes) -> None:
        erasure = self._known.pop(identity).erasure
        author = _author(erasure)
        self._counts[author] -= 1
        if not self._counts[author]:
            del self._counts[author]
        self._hashes -= len(erasure.hashes) // 8

    def _expire(self, now: float) -> None:
        old = [identity for identity, item in self._known.items() if now - item.born >= ERASURE_S]
        for identity in old:
            self._let_go(identity)
        if old:
            self._rebuild()
        if not self._known:
            self._erased.clear()
            self._cut.clear()

    def _rebuild(self) -> None:
        parts: dict[int, list[U64]] = {}
        for item in self._known.values():
            if item.erasure.hashes:
                parts.setdefault(item.erasure.tokens, []).append(
                    np.frombuffer(item.erasure.hashes, "<u8").astype(np.uint64)
                )
        self._tables = {tokens: np.unique(np.concatenate(parts[tokens])) for tokens in sorted(parts)}

    def _remember_name(self, anchor_id: AnchorId) -> None:
        self._erased[anchor_id] = None
        if len(self._erased) > NAMES_MAX:
            self._erased.popitem(last=False)

    def _remember_cut(self, sequence_id: SequenceId, start: int) -> None:
        self._cut[sequence_id] = min(start, self._cut.get(sequence_id, start))
        if len(self._cut) > NAMES_MAX:
            self._cut.popitem(last=False)

    def _summary(self, peer: Peer, *, answer: bool) -> SendMessage:
        ids = b"".join(identity[:8] for identity, item in self._known.items() if item.told)
        chunks = tuple(ids[at : at + 4096] for at in range(0, len(ids), 4096))
        return SendMessage(peer.node_id, peer.record.control, ErasuresKnown(chunks, answer))

    def _tell(self, peer: Peer, erasures: Sequence[Erasure], now: float) -> list[Effect]:
        """As many as fit into a few messages; the next comparison brings the rest."""
        batches: list[list[Erasure]] = []
        size = MESSAGE_BYTES
        for erasure in erasures:
            item = self._known.get(erasure.erasure_id)
            if item is None:
                continue
            size += 256 + len(erasure.hashes) + 18 * len(erasure.anchor_ids)
            if size > MESSAGE_BYTES or len(batches[-1]) == ERASURES_PER_MESSAGE_MAX:
                if len(batches) == MESSAGES_AT_ONCE_MAX:
                    break
                batches.append([])
                size = 0
            batches[-1].append(replace(erasure, age_s=min(max(0.0, now - item.born), ERASURE_S)))
        return [SendMessage(peer.node_id, peer.record.control, Forget(tuple(batch))) for batch in batches]


def _author(erasure: Erasure) -> bytes:
    return erasure.public_key or erasure.origin


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
