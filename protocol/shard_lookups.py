"""Lookups that ask the owners of shards, and then the holders that they name.

Every key of a lookup is asked of one owner; another is asked when that one does not answer within HEDGE_S, says that it is
new to the shard, or goes. What the owners name is confirmed by the holders themselves, which also tell what touches it:
owners know of anchors only under their own shards. A lookup ends when everything was answered, at the latest by its
deadline, with what has come; peers that stay silent are put into the penalty box.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcomm_p2p.protocol.anchors import AnchorMeta, MissReason
from kvcomm_p2p.protocol.directory import Directory
from kvcomm_p2p.protocol.events import Effect, FinishLookup, LookupRequested
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.lookup import LANDMARKS_ASKED_MAX, Lookup, LookupResult
from kvcomm_p2p.protocol.membership import Membership
from kvcomm_p2p.protocol.messages import (
    ASK_ANCHORS_MAX,
    ASK_CHAINS_MAX,
    ASK_FINGERPRINTS_MAX,
    ASK_SKETCHES_MAX,
    ShardAnswer,
    ShardAsk,
)
from kvcomm_p2p.protocol.penalties import PenaltyBox
from kvcomm_p2p.protocol.shard_map import BAND, CHAIN, LANDMARK, OwnerTable, band_values, chain_values, shards_of

HEDGE_S = 0.02
"""An owner that has not answered by then is joined by another."""

HOLDERS_ASKED_MAX = 8
"""Holders that are asked to confirm what was found, best first."""

BAND_KEYS_MAX = 512
"""Bands also differing in one bit are asked for while they are no more than these: prompts of up to 7 windows."""

Usable = Callable[[NodeId, AnchorMeta], bool]


class _Key(NamedTuple):
    """One thing that is asked of the owners of `shard`; `item` is its place in the lookup's tuple of its kind."""

    kind: int
    item: int
    shard: int


@dataclass(slots=True)
class _Question:
    """One ShardAsk on its way. `keys`: places in the lookup's keys; none for a holder's confirmation."""

    lookup: _Open
    peer: NodeId
    keys: tuple[int, ...]
    sent_at: float
    hedged: bool = False


@dataclass(slots=True)
class _Open:
    """A lookup that waits. Per key: `owners` that may still be asked, whether it is `answered`, and how many questions are
    `waiting` for an answer to it; `unanswered` counts keys that wait. `confirmed`: holders that spoke for themselves.
    """

    event: LookupRequested
    deadline: float
    progress_at: float
    keys: list[_Key] = field(default_factory=list)
    owners: list[list[NodeId]] = field(default_factory=list)
    answered: list[bool] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    unanswered: int = 0
    landmarks: list[int] = field(default_factory=list)
    open: dict[int, None] = field(default_factory=dict)
    rows: dict[NodeId, list[AnchorMeta]] = field(default_factory=dict)
    confirmed: dict[NodeId, None] = field(default_factory=dict)
    foreign: bool = False
    confirming: bool = False
    confirm_until: float = math.inf
    lost_s: float = 0.0
    silent: bool = False
    done: bool = False


class ShardLookups:
    """Lookups under way. `local` answers from what is known here and the rows given; `send` puts a message on its way."""

    def __init__(
        self,
        me: NodeId,
        members: Membership,
        penalties: PenaltyBox,
        rng: random.Random,
        local: Callable[[Lookup, Directory | None], LookupResult],
        send: Callable[[NodeId, ShardAsk], list[Effect]],
        timeout_s: float,
    ) -> None:
        self._me = me
        self._members = members
        self._penalties = penalties
        self._rng = rng
        self._local = local
        self._message = send
        self._timeout_s = timeout_s
        self._questions: dict[int, _Question] = {}
        self._open: dict[int, _Open] = {}
        self._next_id = 1
        self.unasked = 0

    def __len__(self) -> int:
        return len(self._open)

    def next_deadline(self) -> float:
        due = [min(each.deadline, each.confirm_until) for each in self._open.values()]
        due += [self._due(question) for question in self._questions.values()]
        return min(due, default=math.inf)

    def _due(self, question: _Question) -> float:
        return question.sent_at + (self._timeout_s if question.hedged or question.lookup.done else HEDGE_S)

    def start(
        self, event: LookupRequested, table: OwnerTable, known: npt.NDArray[np.bool_], age_s: int, now: float
    ) -> list[Effect]:
        """Ask. `known` (bool [SHARDS]): where this node knows everything itself. Raises ValueError for a request id that
        is in use."""
        if event.request_id in self._open:
            raise ValueError(f"lookup {event.request_id} is under way already")
        lookup = _Open(event, min(event.deadline, now + self._timeout_s), now)
        self._open[event.request_id] = lookup
        lookup.landmarks = landmarks_of(event.lookup)
        lookup.keys = _keys(event.lookup, lookup.landmarks)
        rank = self._ranking(table.members, now)
        for key in lookup.keys:
            owners = [table.members[place] for place in table.owners[key.shard].tolist() if place >= 0]
            mine = bool(known[key.shard])
            others = sorted((owner for owner in owners if owner != self._me), key=rank.__getitem__)
            lookup.owners.append(others)
            lookup.answered.append(mine or not others)
            lookup.waiting.append(0)
        return self._ask(lookup, range(len(lookup.keys)), age_s, now) + self._advance(lookup, age_s, now)

    def answered(self, sender: NodeId, message: ShardAnswer, age_s: int, now: float) -> list[Effect]:
        """An answer came. One that was not asked for, or comes after its deadline, changes nothing."""
        question = self._questions.get(message.ask_id)
        if question is None or question.peer != sender:
            self.unasked += 1
            return []
        lookup = self._close(message.ask_id, question)
        if self._penalties.left_s(sender, now) == 0:
            self._penalties.forgive(sender)
        if lookup.done:
            return []
        lookup.foreign = lookup.foreign or message.foreign
        lookup.progress_at = max(lookup.progress_at, now)
        if not question.keys:
            lookup.rows[sender] = [row.put.meta() for row in message.rows if row.holder == sender]
            lookup.confirmed[sender] = None
            return self._advance(lookup, age_s, now)
        for row in message.rows:
            peer = self._members.get(row.holder)
            known = peer is not None and peer.record.epoch <= row.epoch
            if known and row.holder != self._me and row.holder not in lookup.confirmed:
                lookup.rows.setdefault(row.holder, []).append(row.put.meta())
        if not message.settled:
            return self._ask(lookup, question.keys, age_s, now) + self._advance(lookup, age_s, now)
        for at in question.keys:
            lookup.unanswered -= not lookup.answered[at] and lookup.waiting[at] > 0
            lookup.answered[at] = True
        return self._advance(lookup, age_s, now)

    def peer_gone(self, peer: NodeId, age_s: int, now: float) -> list[Effect]:
        """It will not answer: ask others at once."""
        effects: list[Effect] = []
        for ask_id, question in [item for item in self._questions.items() if item[1].peer == peer]:
            lookup = self._close(ask_id, question)
            if not lookup.done:
                effects += self._ask(lookup, question.keys, age_s, now)
                effects += self._advance(lookup, age_s, now)
        return effects

    def tick(self, age_s: int, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for ask_id, question in tuple(self._questions.items()):
            if self._due(question) > now:
                continue
            lookup = question.lookup
            if question.hedged or lookup.done:
                self._close(ask_id, question)
                self._penalties.punish(question.peer, now)
                continue
            question.hedged = True
            if question.keys:
                lookup.silent = True
                lookup.lost_s += max(0.0, now - lookup.progress_at)
                lookup.progress_at = now
                effects += self._ask(lookup, question.keys, age_s, now)
        for lookup in tuple(self._open.values()):
            effects += self._advance(lookup, age_s, now)
        return effects

    def shutdown(self) -> list[Effect]:
        """Every lookup ends with what is known here."""
        effects: list[Effect] = [self._finish(lookup, lookup.progress_at) for lookup in tuple(self._open.values())]
        self._questions.clear()
        return effects

    def _ranking(self, members: Iterable[NodeId], now: float) -> dict[NodeId, tuple[bool, int]]:
        """A random order, one for all keys so that few owners are asked for many; suspects and those in the penalty box
        last."""
        order = list(members)
        self._rng.shuffle(order)
        doubtful = {peer for peer in order if self._penalties.left_s(peer, now) > 0 or not self._members.is_alive(peer)}
        return {peer: (peer in doubtful, at) for at, peer in enumerate(order)}

    def _ask(self, lookup: _Open, keys: Iterable[int], age_s: int, now: float) -> list[Effect]:
        """Ask the next owner of each of these keys that is not answered; those that have none left wait for whoever was
        asked before."""
        of_owner: dict[NodeId, list[int]] = {}
        for at in keys:
            while not lookup.answered[at] and lookup.owners[at]:
                owner = lookup.owners[at].pop(0)
                if self._members.is_reachable(owner):
                    of_owner.setdefault(owner, []).append(at)
                    break
        effects: list[Effect] = []
        for owner in sorted(of_owner):
            for part in _parts(of_owner[owner], lookup.keys):
                effects += self._send(lookup, owner, tuple(part), _part_of(lookup, part), age_s, now)
        return effects

    def _send(
        self, lookup: _Open, peer: NodeId, keys: tuple[int, ...], part: Lookup, age_s: int, now: float
    ) -> list[Effect]:
        ask_id, self._next_id = self._next_id, self._next_id + 1
        self._questions[ask_id] = _Question(lookup, peer, keys, now)
        lookup.open[ask_id] = None
        for at in keys:
            lookup.unanswered += not lookup.answered[at] and not lookup.waiting[at]
            lookup.waiting[at] += 1
        shards = sorted({lookup.keys[at].shard for at in keys})
        question = ShardAsk(
            ask_id=ask_id,
            model_id=part.model_id,
            chains=part.chains[:ASK_CHAINS_MAX],
            fingerprints=np.sort(part.fingerprints)[:ASK_FINGERPRINTS_MAX].astype("<u4").tobytes(),
            sketches=np.array(sorted(part.sketches)[:ASK_SKETCHES_MAX], "<u8").tobytes(),
            sketch_bits_max=part.sketch_bits_max,
            anchors_max=max(1, min(part.anchors_max, ASK_ANCHORS_MAX)),
            shards=np.array(shards, "<u2").tobytes(),
            own=not keys,
            sharded_age_s=age_s,
        )
        return self._message(peer, question)

    def _close(self, ask_id: int, question: _Question) -> _Open:
        del self._questions[ask_id]
        lookup = question.lookup
        lookup.open.pop(ask_id, None)
        for at in question.keys:
            lookup.waiting[at] -= 1
            lookup.unanswered -= not lookup.answered[at] and not lookup.waiting[at]
        return lookup

    def _advance(self, lookup: _Open, age_s: int, now: float) -> list[Effect]:
        """Go on to the holders, or finish, if it is time."""
        if lookup.done:
            return []
        if min(lookup.deadline, lookup.confirm_until) <= now:
            return [self._finish(lookup, now)]
        if not lookup.confirming:
            return [] if lookup.unanswered else self._confirm(lookup, age_s, now)
        confirmations = [ask_id for ask_id in lookup.open if not self._questions[ask_id].keys]
        return [] if confirmations else [self._finish(lookup, now)]

    def _confirm(self, lookup: _Open, age_s: int, now: float) -> list[Effect]:
        """Ask the best holders themselves."""
        lookup.confirming = True
        result = self._local(lookup.event.lookup, self._scratch(lookup))
        holders = list(dict.fromkeys(hit.holder for hit in result.hits if hit.holder in lookup.rows))
        effects: list[Effect] = []
        for holder in holders[:HOLDERS_ASKED_MAX]:
            effects += self._send(lookup, holder, (), lookup.event.lookup, age_s, now)
        if not effects:
            return [self._finish(lookup, now, result)]
        lookup.confirm_until = min(lookup.deadline, now + 2 * HEDGE_S)
        return effects

    def _scratch(self, lookup: _Open) -> Directory:
        """What peers said in answer to this lookup."""
        scratch = Directory(self._me)
        for holder, metas in lookup.rows.items():
            for meta in metas:
                scratch.add(holder, meta)
        return scratch

    def _finish(self, lookup: _Open, now: float, result: LookupResult | None = None) -> FinishLookup:
        """The answer. Questions that are still open stay until their time is over, to see who is silent."""
        lookup.done = True
        del self._open[lookup.event.request_id]
        lookup.silent = lookup.silent or bool(lookup.open)
        if lookup.open:
            lookup.lost_s += max(0.0, now - lookup.progress_at)
        if result is None:
            result = self._local(lookup.event.lookup, self._scratch(lookup))
        if result.miss is MissReason.NOT_FOUND and lookup.foreign:
            result = replace(result, miss=MissReason.MODEL_MISMATCH)
        elif result.miss is MissReason.NOT_FOUND and lookup.silent and not all(lookup.answered):
            result = replace(result, miss=MissReason.DEADLINE)
        return FinishLookup(lookup.event.request_id, replace(result, wait_lost_s=lookup.lost_s))


def _keys(lookup: Lookup, landmarks: list[int]) -> list[_Key]:
    """What is asked of owners: every chain hash (the last ASK_CHAINS_MAX), the landmarks, and bands of the sketches."""
    chains = lookup.chains[-ASK_CHAINS_MAX:]
    first = len(lookup.chains) - len(chains)
    keys = [_Key(CHAIN, first + at, shard) for at, shard in enumerate(shards_of(CHAIN, chain_values(chains)).tolist())]
    keys += [_Key(LANDMARK, at, shard) for at, shard in enumerate(shards_of(LANDMARK, landmarks).tolist())]
    sketches = lookup.sketches
    flipped = len(sketches) * len(band_values(0, flipped=True)) <= BAND_KEYS_MAX
    for at, sketch in enumerate(sketches):
        shards = np.unique(shards_of(BAND, band_values(sketch, flipped=flipped)))
        keys += [_Key(BAND, at, shard) for shard in shards.tolist()]
    return keys


def landmarks_of(lookup: Lookup) -> list[int]:
    """The fingerprints that owners are asked for."""
    chosen = np.array(lookup.landmarks or lookup.fingerprints, np.uint32)
    values: list[int] = np.sort(chosen)[:LANDMARKS_ASKED_MAX].tolist()
    return values


def _part_of(lookup: _Open, keys: Iterable[int]) -> Lookup:
    """The lookup as far as these keys go."""
    whole = lookup.event.lookup
    items: dict[int, dict[int, None]] = {CHAIN: {}, LANDMARK: {}, BAND: {}}
    for at in keys:
        key = lookup.keys[at]
        items[key.kind][key.item] = None
    return replace(
        whole,
        chains=tuple(whole.chains[item] for item in items[CHAIN]),
        fingerprints=np.array([lookup.landmarks[item] for item in items[LANDMARK]], np.uint32),
        sketches=tuple(whole.sketches[item] for item in items[BAND]),
    )


def _parts(keys: list[int], every: list[_Key]) -> list[list[int]]:
    """Keys in pieces that fit into one question each."""
    parts: list[list[int]] = [[]]
    sketches: set[int] = set()
    for at in keys:
        sketches |= {every[at].item} if every[at].kind == BAND else set()
        if len(sketches) > ASK_SKETCHES_MAX or len(parts[-1]) == ASK_CHAINS_MAX:
            parts.append([])
            sketches = {every[at].item} if every[at].kind == BAND else set()
        parts[-1].append(at)
    return parts
