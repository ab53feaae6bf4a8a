"""Find donors: from a prompt's chain hashes and fingerprints to sequences of token ids that may hold equal runs.

No input or output: a search asks questions and is sent their answers, by the engine over a network and by the simulator in
virtual time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcomm_p2p.planning.chains import chain_hashes
from kvcomm_p2p.planning.landmarks import landmarks
from kvcomm_p2p.planning.lineage import Lineage
from kvcomm_p2p.planning.simhash import window_sketches
from kvcomm_p2p.planning.stretches import (
    Stretch,
    choose_stretches,
    led_back,
    prefix_of,
    without_gaps,
    without_repeated,
)
from kvcomm_p2p.planning.types import Donor
from kvcomm_p2p.planning.winnow import ContentMark, fingerprints
from kvcomm_p2p.protocol.anchors import AnchorMeta, HeldAnchor, KVLayout, Miss, MissReason
from kvcomm_p2p.protocol.events import AnchorTokens
from kvcomm_p2p.protocol.ids import AnchorId, ModelId, NodeId, SequenceId
from kvcomm_p2p.protocol.lookup import AnchorHit, Lookup, LookupResult

REMOTE_SEQUENCES_MAX = 6
"""Sequences of peers whose token ids are asked for per prompt, best first."""

TOKENS_CACHED_MAX = 512
"""Anchors of peers whose token ids are remembered (2 kB each)."""

DISTRUST_S = 120.0
"""How long a copy that the guard rejected is not offered again."""

DISTRUSTED_MAX = 1024
"""Rejections that are remembered: the latest."""


SKETCHED_BELOW = 0.5
"""Prompts of whose fingerprints less than this share is known anywhere are also looked up by SimHash."""


@dataclass(frozen=True, slots=True)
class FoundDonors:
    """Donors with token ids. `details` holds, per (holder, anchor), ids and block digests as a peer stated them.

    `dropped`: holders (or None for the whole lookup) that yielded nothing, and why. `holders`: peers that have an anchor,
    whoever was chosen as its donor, nearest first.
    """

    donors: tuple[Donor, ...]
    details: dict[tuple[NodeId, AnchorId], AnchorTokens]
    dropped: tuple[tuple[NodeId | None, Miss], ...]
    wait_lost_s: float
    holders: Mapping[AnchorId, tuple[NodeId, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Compute:
    """Call it, away from the event loop where there is one; the answer is what it returns."""

    call: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class AskDirectory:
    """The answer is a LookupResult."""

    lookup: Lookup


@dataclass(frozen=True, slots=True)
class AskTokens:
    """Token ids of all of these, asked at once; the answer is a list of (AnchorTokens or Miss, seconds lost waiting)."""

    wanted: tuple[tuple[NodeId, AnchorMeta], ...]


Question = Compute | AskDirectory | AskTokens
Search = Generator[Question, Any, FoundDonors]


class Finding:
    """What is remembered between searches: token ids that peers have stated, and copies that were rejected."""

    def __init__(
        self,
        lineage: Lineage,
        *,
        me: NodeId,
        model_id: ModelId,
        layout: KVLayout,
        context_tokens_max: int,
        vocabulary_size: int,
        content_key: bytes,
        held: Callable[[AnchorId], HeldAnchor | None],
        clock: Callable[[], float],
    ) -> None:
        """`held`: an anchor of the own pool. `clock`: seconds that only grow."""
        self._lineage = lineage
        self._me = me
        self._model_id = model_id
        self._layout = layout
        self._context_tokens_max = context_tokens_max
        self._vocabulary_size = vocabulary_size
        self._key = content_key
        self._held = held
        self._clock = clock
        self._known: OrderedDict[tuple[NodeId, AnchorId], AnchorTokens] = OrderedDict()
        self._rejected_at: OrderedDict[tuple[NodeId, AnchorId], float] = OrderedDict()

    def search(self, token_ids: npt.NDArray[np.uint32], marks: Sequence[ContentMark] = ()) -> Search:
        """Donors for a prompt (uint32 [T]) and the names of its short contents."""
        lookup: Lookup = yield Compute(lambda: self._lookup(token_ids, marks))
        result: LookupResult = yield AskDirectory(lookup)
        lost = result.wait_lost_s
        if _matched(result) < SKETCHED_BELOW * len(lookup.fingerprints):
            # Little is equal: perhaps much is nearly equal.
            sketches = yield Compute(lambda: window_sketches(token_ids, self._key))
            lookup = replace(lookup, sketches=sketches)
            result = yield AskDirectory(lookup)
            lost += result.wait_lost_s
        failed: dict[NodeId, Miss] = {}
        hits = self._sound((*result.hits, *self._own_beginnings(lookup, result)), failed)
        stretches = self._stretches(hits, lookup)
        # Branches of one holder share anchors: each is asked for once.
        every = {
            (stretch.holder, anchor.anchor_id): (stretch.holder, anchor)
            for stretch in stretches
            if stretch.holder != self._me
            for anchor in stretch.anchors
        }
        wanted = tuple(each for key, each in every.items() if key not in self._known)
        answers: list[tuple[AnchorTokens | Miss, float]] = (yield AskTokens(wanted)) if wanted else []
        lost_here = 0.0
        for (holder, anchor), (answer, lost_s) in zip(wanted, answers, strict=True):
            lost_here = max(lost_here, lost_s)
            miss = answer if isinstance(answer, Miss) else self._contradiction(anchor, answer)
            if miss is not None:
                failed.setdefault(holder, miss)
            elif isinstance(answer, AnchorTokens):
                self._remember(holder, anchor.anchor_id, answer)
        return self._assemble(stretches, result, failed, lost + lost_here)

    def forget(self, holder: NodeId, anchor_id: AnchorId) -> None:
        """What this holder said of this anchor turned out wrong."""
        self._known.pop((holder, anchor_id), None)

    def distrust(self, holder: NodeId, anchor_id: AnchorId) -> None:
        """The guard rejected what was made of this anchor: for DISTRUST_S the holder's copy is not offered.

        What is our own is still offered where chain hashes say that the prompt begins with it: there our bits are right,
        whatever came of moving them.
        """
        self._rejected_at[holder, anchor_id] = self._clock()
        self._rejected_at.move_to_end((holder, anchor_id))
        while len(self._rejected_at) > DISTRUSTED_MAX:
            self._rejected_at.popitem(last=False)

    def _distrusted(self, holder: NodeId, anchor: AnchorMeta, prefix_tokens: int) -> bool:
        rejected_at = self._rejected_at.get((holder, anchor.anchor_id))
        if rejected_at is None or self._clock() - rejected_at >= DISTRUST_S:
            return False
        return holder != self._me or prefix_tokens < anchor.end

    def _lookup(self, token_ids: npt.NDArray[np.uint32], marks: Sequence[ContentMark]) -> Lookup:
        values, positions = fingerprints(token_ids, self._key)
        named = np.array([mark.fingerprint for mark in marks], dtype=np.uint32)
        chains = tuple(chain_hashes(token_ids, self._key, self._model_id))
        chosen = np.union1d(values[landmarks(values, positions, len(token_ids))], named)
        everything = np.unique(np.concatenate((values, named)))
        return Lookup(self._model_id, chains, everything, landmarks=tuple(chosen.tolist()))

    def _own_beginnings(self, lookup: Lookup, result: LookupResult) -> list[AnchorHit]:
        """Own sequences that begin with the prompt's first block, whatever else they share with it."""
        found = {hit.meta.anchor_id for hit in result.hits if hit.holder == self._me}
        beginnings = self._lineage.beginnings(lookup.chains[0]) if lookup.chains else ()
        held = [self._held(anchor_id) for anchor_id in beginnings if anchor_id not in found]
        return [AnchorHit(anchor.meta, self._me, 0, 0) for anchor in held if anchor is not None]

    def _sound(self, hits: Sequence[AnchorHit], failed: dict[NodeId, Miss]) -> list[AnchorHit]:
        """Hits that may be offered and whose metadata this model's KV can have; `failed` gets what is wrong with others."""
        sound: list[AnchorHit] = []
        for hit in hits:
            meta = hit.meta
            if self._distrusted(hit.holder, meta, hit.prefix_tokens):
                failed.setdefault(hit.holder, Miss(MissReason.RESIDUAL, "its copy was rejected a little while ago"))
            elif meta.kv_bytes != self._layout.block_bytes(meta.tokens):
                detail = f"{meta.kv_bytes} bytes announced for {meta.tokens} tokens"
                failed.setdefault(hit.holder, Miss(MissReason.LENGTH_MISMATCH, detail))
            elif meta.end > self._context_tokens_max:
                detail = f"position {meta.end} announced, beyond the model's context"
                failed.setdefault(hit.holder, Miss(MissReason.TOKENS_MISMATCH, detail))
            else:
                sound.append(hit)
        return sound

    def _contradiction(self, anchor: AnchorMeta, tokens: AnchorTokens) -> Miss | None:
        """What is wrong with token ids that a peer sent for an anchor."""
        if int(tokens.token_ids.max()) >= self._vocabulary_size:
            return Miss(MissReason.TOKENS_MISMATCH, "token ids outside the vocabulary")
        # Windows that lie wholly inside the anchor select the same values whatever stands around it. It may have others:
        # of windows that reach over its borders, and names of contents.
        values, _ = fingerprints(tokens.token_ids, self._key)
        if not np.isin(values, np.frombuffer(anchor.fingerprints, "<u4")).all():
            return Miss(MissReason.TOKENS_MISMATCH, "token ids are not those that the anchor was announced with")
        return None

    def _stretches(self, hits: Sequence[AnchorHit], lookup: Lookup) -> list[Stretch]:
        """Own sequences first, then peers' best first, without what adds nothing to those before."""
        own = self._own_stretches([hit for hit in hits if hit.holder == self._me], lookup)
        return [*own, *choose_stretches(hits, own, lookup, self._me, REMOTE_SEQUENCES_MAX)]

    def _own_stretches(self, hits: Sequence[AnchorHit], lookup: Lookup) -> list[Stretch]:
        """Chains of own anchors back to where our sequences began, one per anchor that no other hit follows.

        Replicas of peers' anchors have no lineage of ours: those follow their sequence, and everything follows what its
        chain hash says stands before it.
        """
        chains: list[tuple[AnchorMeta, ...]] = []
        followed = {self._lineage.before(hit.meta.anchor_id) for hit in hits}
        for hit in hits:
            if hit.meta.anchor_id not in followed and self._lineage.known(hit.meta.anchor_id):
                chains.append(self._own_chain(hit.meta, hits, lookup))
        replicas: OrderedDict[SequenceId, list[AnchorMeta]] = OrderedDict()
        for hit in hits:
            if not self._lineage.known(hit.meta.anchor_id):
                replicas.setdefault(hit.meta.sequence_id, []).append(hit.meta)
        for group in replicas.values():
            chains += without_gaps(group)
        metas = [hit.meta for hit in hits]
        whole = [led_back(chain, metas) for chain in chains]
        return without_repeated(
            [Stretch(self._me, chain[-1].sequence_id, chain, prefix_of(chain, hits, lookup)) for chain in whole]
        )

    def _own_chain(self, last: AnchorMeta, hits: Sequence[AnchorHit], lookup: Lookup) -> tuple[AnchorMeta, ...]:
        """An anchor of our own behind what it followed when it was made, as far as that is held and not distrusted."""
        chain = [last]
        while (before := self._lineage.before(chain[0].anchor_id)) is not None:
            held = self._held(before)
            if held is None or held.meta.end != chain[0].start:
                break
            chain.insert(0, held.meta)
        prefix_tokens = prefix_of(chain, hits, lookup)
        first = max(
            (i + 1 for i, meta in enumerate(chain[:-1]) if self._distrusted(self._me, meta, prefix_tokens)), default=0
        )
        return tuple(chain[first:])

    def _assemble(
        self, stretches: Sequence[Stretch], result: LookupResult, failed: dict[NodeId, Miss], lost: float
    ) -> FoundDonors:
        donors: list[Donor] = []
        details: dict[tuple[NodeId, AnchorId], AnchorTokens] = {}
        for stretch in stretches:
            pieces: list[tuple[AnchorMeta, npt.NDArray[np.uint32]]] = []
            for anchor in stretch.anchors:
                ids = self._token_ids(stretch.holder, anchor, details)
                if ids is not None:
                    pieces.append((anchor, ids))
                elif pieces:
                    donors.append(self._donor(stretch, pieces))
                    pieces = []
            if pieces:
                donors.append(self._donor(stretch, pieces))
        dropped: list[tuple[NodeId | None, Miss]] = list(failed.items())
        if result.miss is not None and not donors:
            dropped.append((None, Miss(result.miss)))
        elif not donors and not dropped:
            dropped.append((None, Miss(MissReason.NOT_FOUND)))
        holders: dict[AnchorId, tuple[NodeId, ...]] = {}
        for hit in result.hits:
            if hit.holder != self._me and hit.holder not in failed:
                holders[hit.meta.anchor_id] = (*holders.get(hit.meta.anchor_id, ()), hit.holder)
        return FoundDonors(tuple(donors), details, tuple(dropped), lost, holders)

    def _token_ids(
        self, holder: NodeId, anchor: AnchorMeta, details: dict[tuple[NodeId, AnchorId], AnchorTokens]
    ) -> npt.NDArray[np.uint32] | None:
        if holder == self._me:
            held: HeldAnchor | None = self._held(anchor.anchor_id)
            return None if held is None else held.token_ids
        known = self._known.get((holder, anchor.anchor_id))
        if known is None:
            return None
        self._known.move_to_end((holder, anchor.anchor_id))
        details[holder, anchor.anchor_id] = known
        return known.token_ids

    def _donor(self, stretch: Stretch, pieces: list[tuple[AnchorMeta, npt.NDArray[np.uint32]]]) -> Donor:
        anchors = tuple(anchor for anchor, _ in pieces)
        return Donor(
            holder=stretch.holder,
            local=stretch.holder == self._me,
            sequence_id=stretch.sequence_id,
            start=anchors[0].start,
            token_ids=np.concatenate([ids for _, ids in pieces]),
            anchors=anchors,
            same_prefix_until=stretch.prefix_tokens,
            replica=any(anchor.hops and not self._lineage.known(anchor.anchor_id) for anchor in anchors),
        )

    def _remember(self, holder: NodeId, anchor_id: AnchorId, tokens: AnchorTokens) -> None:
        self._known[holder, anchor_id] = tokens
        while len(self._known) > TOKENS_CACHED_MAX:
            self._known.popitem(last=False)


def _matched(result: LookupResult) -> int:
    """At most so many of the prompt's fingerprints are known: copies of one content count once each."""
    best: dict[AnchorId, int] = {}
    for hit in result.hits:
        best[hit.meta.anchor_id] = max(hit.matches, best.get(hit.meta.anchor_id, 0))
    return sum(best.values())
