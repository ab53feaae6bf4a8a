"""What a node says of the part of an anchor that it pulled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_cases import KEY, MODEL, words

from kvcomm_p2p.planning.chains import ChainHasher, chain_hashes
from kvcomm_p2p.planning.parts import part_of
from kvcomm_p2p.planning.segments import Segment, cut_anchors
from kvcomm_p2p.planning.simhash import simhash
from kvcomm_p2p.planning.winnow import content_marks, fingerprints
from kvcomm_p2p.protocol.anchors import BlockHandle, HeldAnchor, KVLayout
from kvcomm_p2p.protocol.pool import problem_of

LAYOUT = KVLayout(layers=2, kv_heads=1, key_dim=4, value_dim=4, dtype="float32")
TOKENS = words(1, 1300)
HASHES = chain_hashes(TOKENS, KEY, MODEL)
MARKS = content_marks(TOKENS, [(600, 640)], KEY)


def cut(hops: Any = ((0, 0),)) -> list[Segment]:
    return cut_anchors(
        TOKENS, hops=hops, visibility=(), model_id=MODEL, layout=LAYOUT, key=KEY, variant=b"v", marks=MARKS
    )


def sent(fingerprint_bytes: bytes) -> set[int]:
    return set(np.frombuffer(fingerprint_bytes, "<u4").tolist())


@settings(deadline=None)
@given(st.integers(0, 2), st.data(), st.sampled_from([[(0, 0)], [(0, 0), (96, 1)]]))
def test_parts_tell_what_is_true_of_them_or_nothing(number: int, data: st.DataObject, hops: Any) -> None:
    whole, ids, _ = cut(hops)[number]
    first = data.draw(st.integers(0, whole.blocks - 1))
    last = data.draw(st.integers(first + 1, whole.blocks))
    start, end = whole.start + 32 * first, min(whole.start + 32 * last, whole.end)
    part = part_of(whole, ids, start, end, KEY)
    if (start, end) == (whole.start, whole.end):
        assert part is whole
        return
    assert (part.start, part.end, part.kv_bytes, part.hops) == (start, end, 64 * (end - start), whole.hops)
    assert part.anchor_id != whole.anchor_id
    tokens = TOKENS[start:end]
    assert problem_of(HeldAnchor(part, tokens, (BlockHandle(0, 0, 0),) * part.blocks, (b"",) * part.blocks)) == ""
    assert part.content == (simhash(tokens, KEY) if end - start >= 32 else 0)
    assert set(np.unique(fingerprints(tokens, KEY)[0]).tolist()) <= sent(part.fingerprints)
    exact = whole.hops == 0
    behind_exact = exact or start == whole.start == 96
    assert part.chain_start == (HASHES[start // 32 - 1] if start and behind_exact else b"")
    assert part.chain_end == (HASHES[end // 32 - 1] if exact and end % 32 == 0 else b"")
    told = part.context_first, part.context_last
    true = simhash(TOKENS[: min(128, start)], KEY), simhash(TOKENS[max(0, start - 128) : start], KEY)
    assert all(one in (right, 0) for one, right in zip(told, true, strict=True))
    if whole.start == 0 or start == whole.start or start - whole.start >= 128 <= whole.start:
        assert told == true


def test_a_context_that_cannot_be_seen_is_not_told() -> None:
    whole, ids, _ = cut()[1]
    assert whole.start == 512
    near = part_of(whole, ids, 544, 1024, KEY)
    assert (near.context_first, near.context_last) == (whole.context_first, 0)
    early, early_ids, _ = cut([(0, 0), (96, 1)])[1]
    assert early.start == 96
    later = part_of(early, early_ids, 256, 512, KEY)
    assert (later.context_first, later.context_last) == (0, simhash(TOKENS[128:256], KEY))


def test_names_of_contents_stay() -> None:
    whole, ids, _ = cut()[1]
    names = {mark.fingerprint for mark in MARKS}
    assert names <= sent(whole.fingerprints)
    assert names <= sent(part_of(whole, ids, 576, 672, KEY).fingerprints)


def test_equal_parts_have_equal_ids_and_others_are_refused() -> None:
    whole, ids, _ = cut()[0]
    parts = [part_of(whole, ids, *bounds, KEY) for bounds in ((32, 96), (32, 96), (32, 128), (0, 96))]
    assert parts[0] == parts[1]
    assert len({part.anchor_id for part in parts}) == 3
    for bounds in ((16, 96), (32, 100), (96, 96), (480, 544), (-32, 64)):
        with pytest.raises(ValueError, match="no part"):
            part_of(whole, ids, *bounds, KEY)


def test_a_chain_goes_on_from_any_boundary() -> None:
    hasher = ChainHasher(KEY, MODEL, behind=HASHES[4])
    assert hasher.extend(TOKENS[160:400]) == HASHES[5:12]
    assert hasher.tokens == 240
