"""Parts of anchors: what a node that pulled some blocks of one can say of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvcomm_p2p.planning.chains import ChainHasher, TokenIds, keyed_digest
from kvcomm_p2p.planning.landmarks import landmarks_of
from kvcomm_p2p.planning.segments import Segment, content_simhash, context_simhashes
from kvcomm_p2p.planning.simhash import simhash
from kvcomm_p2p.planning.winnow import fingerprints
from kvcomm_p2p.protocol.anchors import BLOCK_TOKENS, CONTEXT_TOKENS, NO_CHAIN, AnchorMeta
from kvcomm_p2p.protocol.ids import ANCHOR_ID_BYTES, AnchorId, ChainHash


def replica_of(anchor: AnchorMeta, token_ids: TokenIds, blocks: Sequence[int], key: bytes) -> Segment:
    """What is said of consecutive `blocks` (their numbers) of a peer's anchor whose tokens are `token_ids` (uint32
    [anchor.tokens]): an anchor of the same bytes, held by one more node. Raises ValueError as `part_of` does."""
    first, last = blocks[0] * BLOCK_TOKENS, min((blocks[-1] + 1) * BLOCK_TOKENS, anchor.tokens)
    inside = np.array(token_ids[first:last], np.uint32)
    inside.flags.writeable = False
    meta = part_of(anchor, token_ids, anchor.start + first, anchor.start + last, key)
    return Segment(meta, inside, landmarks_of(inside, key, meta.fingerprints))


def part_of(anchor: AnchorMeta, token_ids: TokenIds, start: int, end: int, key: bytes) -> AnchorMeta:
    """Metadata of the part [start, end) of an anchor whose tokens are `token_ids` (uint32 [anchor.tokens]); the anchor's
    own if that is all of it. Positions are the sequence's.

    Its id comes from the whole's id and the range, so that whoever holds the same part calls it the same. Chain hashes go
    on from the anchor's. What stands before the part is known as far as the anchor reaches: of a context that also
    needs tokens before that, nothing is told (0) rather than what was true of the whole. Which names of contents belong
    to the part cannot be seen: all are kept, at worst they nominate in vain. Raises ValueError unless the part begins
    and ends on blocks of the anchor.
    """
    if (start, end) == (anchor.start, anchor.end):
        return anchor
    first, last = start - anchor.start, end - anchor.start
    if not 0 <= first < last <= anchor.tokens or first % BLOCK_TOKENS or (end < anchor.end and last % BLOCK_TOKENS):
        raise ValueError(f"[{start}, {end}) is no part of [{anchor.start}, {anchor.end}) on its blocks")
    inside = token_ids[first:last]
    values = np.unique(fingerprints(inside, key)[0])[: last - first]
    unplaced = np.setdiff1d(np.frombuffer(anchor.fingerprints, "<u4"), fingerprints(token_ids, key)[0])
    unplaced = np.setdiff1d(unplaced, values)[: last - first - len(values)]
    span = start.to_bytes(8, "little") + end.to_bytes(8, "little")
    context_first, context_last = _context_of_part(anchor, token_ids[:first], key)
    chain_start, chain_end = _chains_of_part(anchor, token_ids, first, last, key)
    return replace(
        anchor,
        anchor_id=AnchorId(keyed_digest(b"kvcomm part", key, ANCHOR_ID_BYTES, anchor.anchor_id, span)),
        start=start,
        end=end,
        chain_end=chain_end,
        fingerprints=np.sort(np.concatenate((values, unplaced))).astype("<u4").tobytes(),
        kv_bytes=anchor.kv_bytes // anchor.tokens * (last - first),
        chain_start=chain_start,
        content=content_simhash(inside, key),
        context_first=context_first,
        context_last=context_last,
    )


def _context_of_part(anchor: AnchorMeta, before: TokenIds, key: bytes) -> tuple[int, int]:
    """Context SimHashes of a part behind the anchor's tokens `before`."""
    if not len(before):
        return anchor.context_first, anchor.context_last
    if anchor.start == 0:
        return context_simhashes(before, key)
    first = anchor.context_first if anchor.start >= CONTEXT_TOKENS else 0
    return first, simhash(before[-CONTEXT_TOKENS:], key) if len(before) >= CONTEXT_TOKENS else 0


def _chains_of_part(
    anchor: AnchorMeta, token_ids: TokenIds, first: int, last: int, key: bytes
) -> tuple[ChainHash, ChainHash]:
    """Chain hashes at the start and the end of the part token_ids[first:last]; NO_CHAIN where there is none."""
    at_start = NO_CHAIN if first else anchor.chain_start
    at_end = NO_CHAIN if last < anchor.tokens else anchor.chain_end
    if anchor.hops == 0 and (anchor.start == 0 or anchor.chain_start):
        hasher = ChainHasher(key, anchor.model_id, behind=anchor.chain_start)
        hashes = [anchor.chain_start, *hasher.extend(token_ids[: last - last % BLOCK_TOKENS])]
        at_start = hashes[first // BLOCK_TOKENS]
        if last % BLOCK_TOKENS == 0:
            at_end = hashes[-1]
    return at_start, at_end
