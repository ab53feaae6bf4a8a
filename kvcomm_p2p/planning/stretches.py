"""Which sequences to look at: from hits in the directory to stretches of anchors that follow each other.

Everybody may hold much of what a prompt needs, several times: the same anchor at several holders, the same text behind
several contexts. Token ids are asked for a few sequences only, so the choice is made by metadata.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvcomm_p2p.protocol.anchors import BLOCK_TOKENS, HOPS_PUBLISHED_MAX, AnchorMeta
from kvcomm_p2p.protocol.ids import AnchorId, ChainHash, NodeId, SequenceId
from kvcomm_p2p.protocol.lookup import AnchorHit, Lookup

OTHER_CONTEXT_BITS = 16
"""SimHashes that differ in so many bits are of contexts that have little in common; with fewer, partly the same."""

_SECOND_CONTEXT_WORTH = 0.25
"""What a further copy behind another context counts, against the first of its content."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Anchors at one holder, each beginning where the one before ends, all computed in one sequence.

    `sequence_id` is the last one's: what leads to it may have been published under other names. Positions [0,
    prefix_tokens) of the sequence are known to equal the prompt's.
    """

    holder: NodeId
    sequence_id: SequenceId
    anchors: tuple[AnchorMeta, ...]
    prefix_tokens: int


def without_gaps(anchors: Iterable[AnchorMeta]) -> list[tuple[AnchorMeta, ...]]:
    """Cut anchors of one sequence into stretches in which each begins where the one before ends.

    Of anchors that overlap (a longer one published later over the same tokens), the longer is kept.
    """
    chosen: list[AnchorMeta] = []
    for anchor in sorted(anchors, key=lambda a: (a.start, -a.end, a.anchor_id)):
        if not chosen or anchor.start >= chosen[-1].end:
            chosen.append(anchor)
    stretches: list[list[AnchorMeta]] = []
    for anchor in chosen:
        if stretches and stretches[-1][-1].end == anchor.start:
            stretches[-1].append(anchor)
        else:
            stretches.append([anchor])
    return [tuple(stretch) for stretch in stretches]


def led_back(stretch: tuple[AnchorMeta, ...], others: Iterable[AnchorMeta]) -> tuple[AnchorMeta, ...]:
    """The stretch with whatever of the same holder's `others` stands before it, as far back as they reach.

    Before an anchor stands one of the same sequence that ends where it begins, or one of any sequence whose `chain_end`
    is its `chain_start`: exact KV of the same tokens from position 0. Of several, the longest.
    """
    by_sequence: dict[tuple[SequenceId, int], AnchorMeta] = {}
    by_chain: dict[ChainHash, AnchorMeta] = {}
    for other in sorted(others, key=lambda a: (-a.start, a.anchor_id)):
        by_sequence[other.sequence_id, other.end] = other
        if other.chain_end:
            by_chain[other.chain_end] = other
    while stretch[0].start > 0:
        first = stretch[0]
        before = by_sequence.get((first.sequence_id, first.start))
        if before is None and first.chain_start:
            before = by_chain.get(first.chain_start)
        if before is None or before.end != first.start:
            break
        stretch = (before, *stretch)
    return stretch


def without_repeated(stretches: Sequence[Stretch]) -> list[Stretch]:
    """Without stretches that are the beginning of another one at the same holder; of equal ones the first stays."""
    kept: list[Stretch] = []
    for number, stretch in enumerate(stretches):
        length = len(stretch.anchors)
        repeated = any(
            other.holder == stretch.holder
            and other.anchors[:length] == stretch.anchors
            and (len(other.anchors) > length or index < number)
            for index, other in enumerate(stretches)
            if index != number
        )
        if not repeated:
            kept.append(stretch)
    return kept


def known_prefix(hit: AnchorHit, lookup: Lookup) -> int:
    """So many tokens of the hit's sequence are known to equal the prompt's, by its chain hashes at either end."""
    blocks = hit.meta.start // BLOCK_TOKENS
    same = 0 < blocks <= len(lookup.chains) and lookup.chains[blocks - 1] == hit.meta.chain_start
    return max(hit.prefix_tokens, hit.meta.start if same else 0)


def prefix_of(stretch: Sequence[AnchorMeta], hits: Iterable[AnchorHit], lookup: Lookup) -> int:
    """`Stretch.prefix_tokens`, from hits at its holder: a prefix is one of all anchors of a sequence."""
    inside = {anchor.anchor_id for anchor in stretch}
    return max(
        (
            known_prefix(hit, lookup)
            for hit in hits
            if hit.meta.anchor_id in inside or hit.meta.sequence_id == stretch[-1].sequence_id
        ),
        default=0,
    )


def choose_stretches(
    hits: Sequence[AnchorHit], own: Sequence[Stretch], lookup: Lookup, me: NodeId, sequences_max: int
) -> list[Stretch]:
    """Stretches of peers to look at, best first: of at most `sequences_max` sequences, beside our `own` stretches.

    First whatever brings most of an exact prefix, then whatever brings most that nothing chosen before has; a second
    copy of the same content counts less, and only as far as it was computed behind another context, so that several
    contexts are there to choose from. Of holders of equally good copies the one that holds most of what the prompt needs. Copies
    of one anchor differ in their bits from holder to holder: each is taken from one holder.
    """
    choice = _Choice(hits, own, lookup, me)
    queue = [(choice.rank(group), group) for group in choice.groups if choice.useful(group)]
    heapq.heapify(queue)
    chosen: list[Stretch] = []
    taken_sequences = 0
    while queue and taken_sequences < sequences_max:
        _, group = heapq.heappop(queue)
        if not choice.useful(group):
            continue
        rank = choice.rank(group)
        # Ranks only fall as more is chosen: what still is best now needs no comparison with the others.
        if queue and rank > queue[0][0]:
            heapq.heappush(queue, (rank, group))
            continue
        chosen += choice.take(group)
        taken_sequences += 1
    return without_repeated(chosen)


_Group = tuple[NodeId, SequenceId]
_Rank = tuple[int, float, int, int, int, int]


class _Choice:
    """What has been chosen so far, and what the others would add."""

    def __init__(self, hits: Sequence[AnchorHit], own: Sequence[Stretch], lookup: Lookup, me: NodeId) -> None:
        self._lookup = lookup
        self._me = me
        self.groups: dict[_Group, list[AnchorHit]] = {}
        self._of_holder: dict[NodeId, list[AnchorHit]] = {}
        for hit in hits:
            if hit.holder != me:
                self.groups.setdefault((hit.holder, hit.meta.sequence_id), []).append(hit)
                self._of_holder.setdefault(hit.holder, []).append(hit)
        self._names = _names(hits, lookup)
        self._taken: dict[AnchorId, NodeId] = {}
        self._exact = np.zeros(len(lookup.chains), dtype=bool)
        self._metas = {hit.meta.anchor_id: hit.meta for hit in hits}
        self._covered: dict[int, tuple[AnchorId, ...]] = {}
        self._novelties: dict[tuple[AnchorId, tuple[AnchorId, ...]], float] = {}
        self._needed = {
            holder: len(frozenset[int]().union(*(self._names[hit.meta.anchor_id] for hit in held)))
            for holder, held in self._of_holder.items()
        }
        for stretch in own:
            self._note(stretch)

    def useful(self, group: _Group) -> bool:
        """Whether any anchor of the group that was not chosen yet shares something with the prompt."""
        return any(
            (hit.matches or hit.prefix_tokens) and hit.meta.anchor_id not in self._taken for hit in self.groups[group]
        )

    def rank(self, group: _Group) -> _Rank:
        """The smallest first."""
        holder, sequence_id = group
        free = self._free(group)
        prefix = max(known_prefix(hit, self._lookup) for hit in self.groups[group])
        exact = np.zeros_like(self._exact)
        worth = 0.0
        for hit in free:
            if hit.meta.end <= prefix:
                exact[hit.meta.start // BLOCK_TOKENS : hit.meta.end // BLOCK_TOKENS] = True
            for name in self._names[hit.meta.anchor_id]:
                covering = self._covered.get(name)
                worth += _SECOND_CONTEXT_WORTH * self._novelty(hit.meta, covering) if covering else 1.0
        new = int(np.count_nonzero(exact & ~self._exact))
        distance = int.from_bytes(holder, "big") ^ int.from_bytes(self._me, "big")
        matches = sum(hit.matches for hit in free)
        return -new, -worth, -self._needed[holder], -matches, distance, int.from_bytes(sequence_id, "big")

    def take(self, group: _Group) -> list[Stretch]:
        """The group's stretches, led back as far as their holder can, and noted as chosen."""
        holder, sequence_id = group
        available = [hit for hit in self._of_holder[holder] if self._is_free(hit)]
        stretches: list[Stretch] = []
        for anchors in without_gaps(hit.meta for hit in self._free(group)):
            whole = led_back(anchors, (hit.meta for hit in available))
            prefix = prefix_of(whole, self._of_holder[holder], self._lookup)
            stretches.append(Stretch(holder, sequence_id, whole, prefix))
        for stretch in stretches:
            self._note(stretch)
        self.groups[group] = []
        return stretches

    def _novelty(self, anchor: AnchorMeta, covering: tuple[AnchorId, ...]) -> float:
        """How much its context differs from those of all copies chosen so far; names of one anchor have the same ones."""
        key = anchor.anchor_id, covering
        if key not in self._novelties:
            self._novelties[key] = min(_otherness(anchor, self._metas[other]) for other in covering)
        return self._novelties[key]

    def _free(self, group: _Group) -> list[AnchorHit]:
        return [hit for hit in self.groups[group] if self._is_free(hit)]

    def _is_free(self, hit: AnchorHit) -> bool:
        return self._taken.get(hit.meta.anchor_id, hit.holder) == hit.holder

    def _note(self, stretch: Stretch) -> None:
        for anchor in stretch.anchors:
            self._taken[anchor.anchor_id] = stretch.holder
            if anchor.end <= stretch.prefix_tokens:
                self._exact[anchor.start // BLOCK_TOKENS : anchor.end // BLOCK_TOKENS] = True
            if anchor.hops <= HOPS_PUBLISHED_MAX:
                for name in self._names.get(anchor.anchor_id, ()):
                    self._covered[name] = (*self._covered.get(name, ()), anchor.anchor_id)


def _names(hits: Iterable[AnchorHit], lookup: Lookup) -> dict[AnchorId, frozenset[int]]:
    """The prompt's fingerprints that each anchor has."""
    wanted = frozenset(lookup.fingerprints.tolist())
    names: dict[AnchorId, frozenset[int]] = {}
    for hit in hits:
        if hit.meta.anchor_id not in names:
            told = np.frombuffer(hit.meta.fingerprints, "<u4").tolist() if hit.matches else []
            names[hit.meta.anchor_id] = wanted.intersection(told)
    return names


def _otherness(a: AnchorMeta, b: AnchorMeta) -> float:
    """How much the contexts of two anchors differ, 0 to 1 in steps of 1 / OTHER_CONTEXT_BITS, by what they tell.

    An anchor that begins its sequence holds its context itself: there the content tells whether it is another one.
    """
    if a.anchor_id == b.anchor_id:
        return 0.0
    if a.hops != b.hops or (a.start == 0) != (b.start == 0):
        return 1.0
    if a.start == 0:
        pairs = [(a.content, b.content)]
    else:
        pairs = [(a.context_first, b.context_first), (a.context_last, b.context_last)]
    if not all(left and right for left, right in pairs):
        return 1.0
    bits = max((left ^ right).bit_count() for left, right in pairs)
    return min(bits, OTHER_CONTEXT_BITS) / OTHER_CONTEXT_BITS
