"""Find donors: from a prompt's chain hashes and fingerprints to sequences of token ids that may hold equal runs."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcomm_p2p.model.spec import ModelSpec
from kvcomm_p2p.net.driver import Driver
from kvcomm_p2p.planning.chains import chain_hashes
from kvcomm_p2p.planning.types import Donor
from kvcomm_p2p.planning.winnow import fingerprints
from kvcomm_p2p.protocol.anchors import AnchorMeta, HeldAnchor, Miss, MissReason
from kvcomm_p2p.protocol.events import AnchorTokens
from kvcomm_p2p.protocol.ids import AnchorId, NodeId, SequenceId
from kvcomm_p2p.protocol.lookup import AnchorHit, Lookup, LookupResult
from kvcomm_p2p.reuse.lineage import Lineage

REMOTE_SEQUENCES_MAX = 6
"""Sequences of peers whose token ids are asked for per prompt, best first."""

TOKENS_CACHED_MAX = 512
"""Anchors of peers whose token ids are remembered (2 kB each)."""


@dataclass(frozen=True, slots=True)
class FoundDonors:
    """Donors with token ids. `details` holds, per (holder, anchor), ids and block digests as a peer stated them.

    `dropped`: holders (or None for the whole lookup) that yielded nothing, and why.
    """

    donors: tuple[Donor, ...]
    details: dict[tuple[NodeId, AnchorId], AnchorTokens]
    dropped: tuple[tuple[NodeId | None, Miss], ...]
    wait_lost_s: float


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Anchors of one sequence at one holder that follow each other without a gap."""

    holder: NodeId
    sequence_id: SequenceId
    anchors: tuple[AnchorMeta, ...]
    prefix_tokens: int


class DonorFinder:
    """Asks the directory and, for promising sequences, their holders. Lives on the driver's loop."""

    def __init__(
        self,
        driver: Driver,
        lineage: Lineage,
        *,
        me: NodeId,
        spec: ModelSpec,
        vocabulary_size: int,
        content_key: bytes,
    ) -> None:
        self._driver = driver
        self._lineage = lineage
        self._me = me
        self._spec = spec
        self._vocabulary_size = vocabulary_size
        self._key = content_key
        self._known: OrderedDict[tuple[NodeId, AnchorId], AnchorTokens] = OrderedDict()

    async def find(self, token_ids: npt.NDArray[np.uint32]) -> FoundDonors:
        """Donors for a prompt (uint32 [T]); waits for peers at most the protocol's tokens timeout."""
        loop = asyncio.get_running_loop()
        lookup = await loop.run_in_executor(None, self._lookup, token_ids)
        result = self._driver.find(lookup)
        failed: dict[NodeId, Miss] = {}
        hits = self._sound((*result.hits, *self._own_beginnings(lookup, result)), failed)
        stretches = self._stretches(hits)
        wanted = [
            (stretch.holder, anchor)
            for stretch in stretches
            if stretch.holder != self._me
            for anchor in stretch.anchors
            if (stretch.holder, anchor.anchor_id) not in self._known
        ]
        answers = await asyncio.gather(*(self._driver.tokens(holder, anchor) for holder, anchor in wanted))
        lost = 0.0
        for (holder, anchor), answer in zip(wanted, answers, strict=True):
            lost = max(lost, answer.wait_lost_s)
            miss = answer.result if isinstance(answer.result, Miss) else self._contradiction(anchor, answer.result)
            if miss is not None:
                failed.setdefault(holder, miss)
            elif isinstance(answer.result, AnchorTokens):
                self._remember(holder, anchor.anchor_id, answer.result)
        return self._assemble(stretches, result, failed, lost)

    def forget(self, holder: NodeId, anchor_id: AnchorId) -> None:
        """What this holder said of this anchor turned out wrong."""
        self._known.pop((holder, anchor_id), None)

    def _lookup(self, token_ids: npt.NDArray[np.uint32]) -> Lookup:
        values, _ = fingerprints(token_ids, self._key)
        chains = tuple(chain_hashes(token_ids, self._key, self._spec.model_id))
        return Lookup(model_id=self._spec.model_id, chains=chains, fingerprints=np.unique(values))

    def _own_beginnings(self, lookup: Lookup, result: LookupResult) -> list[AnchorHit]:
        """Own sequences that begin with the prompt's first block, whatever else they share with it."""
        found = {hit.meta.anchor_id for hit in result.hits if hit.holder == self._me}
        beginnings = self._lineage.beginnings(lookup.chains[0]) if lookup.chains else ()
        held = [self._driver.held(anchor_id) for anchor_id in beginnings if anchor_id not in found]
        return [AnchorHit(anchor.meta, self._me, 0, 0) for anchor in held if anchor is not None]

    def _sound(self, hits: Sequence[AnchorHit], failed: dict[NodeId, Miss]) -> list[AnchorHit]:
        """Hits whose metadata this model's KV can have; what is wrong with a peer's others goes into `failed`."""
        sound: list[AnchorHit] = []
        for hit in hits:
            meta = hit.meta
            if meta.kv_bytes != self._spec.layout.block_bytes(meta.tokens):
                detail = f"{meta.kv_bytes} bytes announced for {meta.tokens} tokens"
                failed.setdefault(hit.holder, Miss(MissReason.LENGTH_MISMATCH, detail))
            elif meta.end > self._spec.context_tokens_max:
                detail = f"position {meta.end} announced, beyond the model's context"
                failed.setdefault(hit.holder, Miss(MissReason.TOKENS_MISMATCH, detail))
            else:
                sound.append(hit)
        return sound

    def _contradiction(self, anchor: AnchorMeta, tokens: AnchorTokens) -> Miss | None:
        """What is wrong with token ids that a peer sent for an anchor."""
        if int(tokens.token_ids.max()) >= self._vocabulary_size:
            return Miss(MissReason.TOKENS_MISMATCH, "token ids outside the vocabulary")
        # Windows that lie wholly inside the anchor select the same values whatever stands around it.
        values, _ = fingerprints(tokens.token_ids, self._key)
        if not np.isin(values, np.frombuffer(anchor.fingerprints, "<u4")).all():
            return Miss(MissReason.TOKENS_MISMATCH, "token ids are not those that the anchor was announced with")
        return None

    def _stretches(self, hits: Sequence[AnchorHit]) -> list[_Stretch]:
        """Own sequences first, then peers' best first, without sequences that add nothing to those before."""
        groups: OrderedDict[tuple[NodeId, SequenceId], list[AnchorHit]] = OrderedDict()
        for hit in hits:
            groups.setdefault((hit.holder, hit.meta.sequence_id), []).append(hit)
        own = [hit for hit in hits if hit.holder == self._me]
        stretches = self._own_stretches(own)
        # Copies of one anchor differ in their bits from holder to holder: a plan takes each from one source only.
        taken = {anchor.anchor_id for stretch in stretches for anchor in stretch.anchors}
        remote = 0
        for (holder, sequence_id), group in groups.items():
            rest = [hit for hit in group if hit.meta.anchor_id not in taken]
            useful = any(hit.matches or hit.prefix_tokens for hit in rest)
            if holder == self._me or not useful or remote == REMOTE_SEQUENCES_MAX:
                continue
            remote += 1
            prefix_tokens = max(hit.prefix_tokens for hit in group)
            for anchors in _without_gaps([hit.meta for hit in rest]):
                stretches.append(_Stretch(holder, sequence_id, anchors, prefix_tokens))
                taken |= {anchor.anchor_id for anchor in anchors}
        return stretches

    def _own_stretches(self, hits: Sequence[AnchorHit]) -> list[_Stretch]:
        """Chains of own anchors back to where our sequences began, one per anchor that no other hit follows.

        Replicas of peers' anchors have no lineage of ours: those follow their sequence.
        """
        stretches: list[_Stretch] = []
        found = {hit.meta.anchor_id: hit for hit in hits}
        followed = {self._lineage.before(anchor_id) for anchor_id in found}
        for anchor_id, hit in found.items():
            if anchor_id in followed or not self._lineage.known(anchor_id):
                continue
            chain = [hit.meta]
            while (before := self._lineage.before(chain[0].anchor_id)) is not None:
                held = self._driver.held(before)
                if held is None or held.meta.end != chain[0].start:
                    break
                chain.insert(0, held.meta)
            stretches.append(_Stretch(self._me, hit.meta.sequence_id, tuple(chain), hit.prefix_tokens))
        replicas: OrderedDict[SequenceId, list[AnchorHit]] = OrderedDict()
        for hit in hits:
            if not self._lineage.known(hit.meta.anchor_id):
                replicas.setdefault(hit.meta.sequence_id, []).append(hit)
        for sequence_id, group in replicas.items():
            prefix_tokens = max(hit.prefix_tokens for hit in group)
            for anchors in _without_gaps([hit.meta for hit in group]):
                stretches.append(_Stretch(self._me, sequence_id, anchors, prefix_tokens))
        return stretches

    def _assemble(
        self, stretches: Sequence[_Stretch], result: LookupResult, failed: dict[NodeId, Miss], lost: float
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
        return FoundDonors(tuple(donors), details, tuple(dropped), lost)

    def _token_ids(
        self, holder: NodeId, anchor: AnchorMeta, details: dict[tuple[NodeId, AnchorId], AnchorTokens]
    ) -> npt.NDArray[np.uint32] | None:
        if holder == self._me:
            held: HeldAnchor | None = self._driver.held(anchor.anchor_id)
            return None if held is None else held.token_ids
        known = self._known.get((holder, anchor.anchor_id))
        if known is None:
            return None
        self._known.move_to_end((holder, anchor.anchor_id))
        details[holder, anchor.anchor_id] = known
        return known.token_ids

    def _donor(self, stretch: _Stretch, pieces: list[tuple[AnchorMeta, npt.NDArray[np.uint32]]]) -> Donor:
        anchors = tuple(anchor for anchor, _ in pieces)
        return Donor(
            holder=stretch.holder,
            local=stretch.holder == self._me,
            sequence_id=stretch.sequence_id,
            start=anchors[0].start,
            token_ids=np.concatenate([ids for _, ids in pieces]),
            anchors=anchors,
            same_prefix_until=stretch.prefix_tokens,
        )

    def _remember(self, holder: NodeId, anchor_id: AnchorId, tokens: AnchorTokens) -> None:
        self._known[holder, anchor_id] = tokens
        while len(self._known) > TOKENS_CACHED_MAX:
            self._known.popitem(last=False)


def _without_gaps(anchors: Sequence[AnchorMeta]) -> list[tuple[AnchorMeta, ...]]:
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
