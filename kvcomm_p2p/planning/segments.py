"""How a finished sequence is cut into anchors for publishing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcomm_p2p.planning.chains import ChainHasher, TokenIds, anchor_id, sequence_id
from kvcomm_p2p.planning.landmarks import landmarks
from kvcomm_p2p.planning.simhash import simhash
from kvcomm_p2p.planning.winnow import EQUAL_TOKENS_MIN, ContentMark, fingerprints
from kvcomm_p2p.protocol.anchors import (
    ANCHOR_TOKENS_MAX,
    BLOCK_TOKENS,
    CONTENT_TOKENS_MIN,
    CONTEXT_TOKENS,
    HOPS_PUBLISHED_MAX,
    AnchorMeta,
    KVLayout,
    Visibility,
)
from kvcomm_p2p.protocol.ids import ChainHash, ModelId, SequenceId


class VisibilityMark(NamedTuple):
    """From token `start` on, text is `visibility`; `group`: the group's tag for Visibility.GROUP, else empty."""

    start: int
    visibility: Visibility
    group: bytes = b""


class Segment(NamedTuple):
    """An anchor, its token ids (uint32 [meta.tokens], read-only, a copy) and its landmarks."""

    meta: AnchorMeta
    token_ids: TokenIds
    landmarks: tuple[int, ...] = ()


class _Region(NamedTuple):
    """Largest stretch of blocks with the same visibility."""

    start: int
    end: int
    visibility: Visibility
    group: bytes


class _Piece(NamedTuple):
    """[start, end) of an anchor, and the prefix_digest of what is before it and up to its end."""

    start: int
    end: int
    digest_before: bytes
    digest: bytes


def cut_anchors(
    token_ids: TokenIds,
    *,
    hops: Sequence[tuple[int, int]],
    visibility: Sequence[VisibilityMark],
    model_id: ModelId,
    layout: KVLayout,
    key: bytes,
    variant: bytes = b"",
    start: int = 0,
    sequence: SequenceId | None = None,
    marks: Sequence[ContentMark] = (),
) -> list[Segment]:
    """Anchors for [start, T) of a sequence (`token_ids` uint32 [T], from position 0), ascending, without gaps.

    `hops`: ascending (first position, repairs behind it), as `spans.hops_at` gives; what comes later never counts less.
    `visibility`: ascending marks; a token is as strict as the strictest before it (two different groups: private), a
    block as its strictest token. What has more repairs behind it than may be published becomes private, for our own
    next turn. Anchors have at most ANCHOR_TOKENS_MAX tokens and are cut at block boundaries, so that an exact one holds
    exact tokens only and one that others may see nothing stricter. `variant`: a nonce of the caller's (not empty if any
    hops > 0), part of the ids of KV that is not exact; exact anchors of equal tokens have equal ids on every node.

    A prompt is published up to a block boundary, and its answer later with `start` there. KV that is not exact then
    goes on with `sequence` = the sequence id of the anchor before `start` (two answers to one prompt never share it:
    the nonce differs), unless the visibility changes at `start`. Exact KV gets an id of its own, for the same reason,
    and ends on the grid but for a last anchor of less than a block, so that its chain hash ties it to what stands
    before.

    `marks`: names of contents. Each goes into the anchor in which it begins; those that end behind T are left out.

    Nothing that others may see depends on stricter tokens behind it: fingerprints, marks and sequence id of each stretch
    of equal visibility are computed from the tokens up to its end only. The first anchor behind such a border (and at
    `start`) also carries the fingerprints of the windows that reach over it, and the marks, so that runs across the
    border are found. What is told of the context depends on what stands before the anchor, which is never stricter.
    Raises ValueError for a start off the grid or beyond T, empty `token_ids`, or a missing variant.
    """
    tokens = np.asarray(token_ids, np.uint32)
    if not 0 <= start < len(tokens) or start % BLOCK_TOKENS:
        raise ValueError(f"start {start} must lie on the block grid inside {len(tokens)} tokens")
    steps = _on_grid(hops, len(tokens))
    if any(count > 0 for _, count in steps) and not variant:
        raise ValueError("KV with repairs behind it needs a variant nonce")
    cutter = _Cutter(tokens, steps, model_id, layout, key, variant, marks)
    segments: list[Segment] = []
    regions = [region for region in _regions(visibility, len(tokens)) if region.end > start]
    for number, region in enumerate(regions):
        begin = max(start, region.start)
        # A stricter stretch gets a name of its own, since names tell of all its tokens.
        segments += cutter.cut(region, begin, sequence if number == 0 and region.start < start else None)
    return segments


def content_simhash(token_ids: TokenIds, key: bytes) -> int:
    """`AnchorMeta.content` of an anchor with these tokens (uint32 [T])."""
    return simhash(token_ids, key) if len(token_ids) >= CONTENT_TOKENS_MIN else 0


def context_simhashes(before: TokenIds, key: bytes) -> tuple[int, int]:
    """`AnchorMeta.context_first` and `.context_last` of an anchor behind exactly these tokens (uint32 [start])."""
    first = simhash(before[:CONTEXT_TOKENS], key)
    return first, simhash(before[-CONTEXT_TOKENS:], key) if len(before) > CONTEXT_TOKENS else first


class _Cutter:
    """Cuts one sequence region by region, front to back."""

    def __init__(
        self,
        tokens: TokenIds,
        steps: Sequence[tuple[int, int]],
        model_id: ModelId,
        layout: KVLayout,
        key: bytes,
        variant: bytes,
        marks: Sequence[ContentMark],
    ) -> None:
        self._tokens, self._steps, self._marks = tokens, steps, marks
        self._model_id, self._layout, self._key, self._variant = model_id, layout, key, variant
        self._hasher = ChainHasher(key, model_id)

    def cut(self, region: _Region, begin: int, name: SequenceId | None) -> list[Segment]:
        """Anchors of [begin, region.end)."""
        repaired = self._hops(region.end - 1) > 0
        last_boundary = region.end - region.end % BLOCK_TOKENS
        cuts = {at for at, _ in self._steps if begin < at < region.end}
        if begin and not repaired and begin < last_boundary:
            cuts.add(last_boundary)
        borders = [begin, *sorted(cuts - {region.end}), region.end]
        bounds = [
            (at, min(at + ANCHOR_TOKENS_MAX, stop))
            for first, stop in pairwise(borders)
            for at in range(first, stop, ANCHOR_TOKENS_MAX)
        ]
        before, *ends = self._prefix_digests([begin, *(end for _, end in bounds)])
        if name is None or not repaired:
            name = sequence_id(ends[-1], self._key, self._variant if repaired else b"")
        values, positions = fingerprints(self._tokens[: region.end], self._key)
        marked = landmarks(values, positions, region.end)
        segments: list[Segment] = []
        for (at, end), digest in zip(bounds, ends, strict=True):
            since = at if segments else max(0, at - EQUAL_TOKENS_MIN + 1)
            winnowed = np.unique(values[(positions >= since) & (positions < end)])
            told = self._fingerprints(winnowed, at, end, region.end, first=not segments)
            names = np.setdiff1d(np.frombuffer(told, "<u4"), winnowed)
            chosen = np.union1d(values[marked & (positions >= since) & (positions < end)], names)
            segment = self._segment(region, _Piece(at, end, before, digest), name, told)
            segments.append(segment._replace(landmarks=tuple(chosen.tolist())))
            before = digest
        return segments

    def _segment(self, region: _Region, piece: _Piece, name: SequenceId, values: bytes) -> Segment:
        start, end = piece.start, piece.end
        hops = self._hops(start)
        visibility, group = region.visibility, region.group
        if hops > HOPS_PUBLISHED_MAX:
            visibility, group = Visibility.PRIVATE, b""
        chained = hops == 0 and end % BLOCK_TOKENS == 0
        behind_exact = start > 0 and self._hops(start - 1) == 0
        context_first, context_last = context_simhashes(self._tokens[:start], self._key)
        token_ids = self._tokens[start:end].copy()
        token_ids.flags.writeable = False
        meta = AnchorMeta(
            anchor_id=anchor_id(piece.digest, start, end, self._key, self._variant if hops else b""),
            model_id=self._model_id,
            sequence_id=name,
            start=start,
            end=end,
            chain_end=ChainHash(piece.digest if chained else b""),
            fingerprints=values,
            hops=hops,
            visibility=visibility,
            group=group,
            kv_bytes=self._layout.block_bytes(end - start),
            chain_start=ChainHash(piece.digest_before if behind_exact else b""),
            content=content_simhash(token_ids, self._key),
            context_first=context_first,
            context_last=context_last,
        )
        return Segment(meta, token_ids)

    def _fingerprints(
        self, winnowed: npt.NDArray[np.uint32], start: int, end: int, region_end: int, *, first: bool
    ) -> bytes:
        """The winnowed values and those of the marks. No more than tokens: a tiny anchor behind a border may have more."""
        winnowed = winnowed[: end - start]
        begun = [
            mark.fingerprint
            for mark in self._marks
            if (start <= mark.position or (first and start < mark.position + mark.length))
            and mark.position < end
            and mark.position + mark.length <= region_end
        ]
        named = np.setdiff1d(np.array(begun, np.uint32), winnowed)[: end - start - len(winnowed)]
        return np.sort(np.concatenate((winnowed, named))).astype("<u4").tobytes()

    def _hops(self, position: int) -> int:
        return max(count for at, count in self._steps if at <= position)

    def _prefix_digests(self, ends: Iterable[int]) -> list[bytes]:
        """prefix_digest of [0, end) for each of the ascending `ends`."""
        digests = []
        for end in ends:
            self._hasher.extend(self._tokens[self._hasher.tokens : end])
            digests.append(self._hasher.prefix_digest())
        return digests


def _on_grid(hops: Iterable[tuple[int, int]], total: int) -> list[tuple[int, int]]:
    """Steps before `total` of the largest hops so far, moved to the block boundary at or below, beginning with (0, ...)."""
    steps = [(0, 0)]
    for at, count in hops:
        if count > steps[-1][1] and at < total:
            at -= at % BLOCK_TOKENS
            if at == steps[-1][0]:
                steps.pop()
            steps.append((at, count))
    return steps


def _regions(marks: Iterable[VisibilityMark], total: int) -> list[_Region]:
    """Stretches of equal visibility, ever stricter, on the block grid, covering [0, total)."""
    steps: list[tuple[int, Visibility, bytes]] = [(0, Visibility.PUBLIC, b"")]
    for mark in marks:
        if mark.start >= total:
            break
        _, level, group = steps[-1]
        wanted = max(level, mark.visibility)
        if level is Visibility.GROUP and mark.visibility is Visibility.GROUP and mark.group != group:
            wanted = Visibility.PRIVATE
        if wanted == level:
            continue
        at = mark.start - mark.start % BLOCK_TOKENS
        if at == steps[-1][0]:
            steps.pop()
        steps.append((at, wanted, mark.group if wanted is Visibility.GROUP else b""))
    ends = [*(at for at, _, _ in steps[1:]), total]
    return [_Region(at, end, level, group) for (at, level, group), end in zip(steps, ends, strict=True)]
