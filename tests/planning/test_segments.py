"""Cutting a finished sequence into anchors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_cases import KEY, MODEL, Tokens, joined, words

from kvcomm_p2p.planning.chains import chain_hashes, group_tag
from kvcomm_p2p.planning.segments import Segment, VisibilityMark, cut_anchors
from kvcomm_p2p.planning.simhash import simhash
from kvcomm_p2p.planning.winnow import KGRAM_TOKENS, content_marks, fingerprints
from kvcomm_p2p.protocol.anchors import BlockHandle, HeldAnchor, KVLayout, Visibility
from kvcomm_p2p.protocol.pool import problem_of

LAYOUT = KVLayout(layers=2, kv_heads=1, key_dim=4, value_dim=4, dtype="float32")
HANDLE = BlockHandle(0, 0, 0)
PUBLIC, GROUP, PRIVATE = Visibility.PUBLIC, Visibility.GROUP, Visibility.PRIVATE


def cut(tokens: Tokens, hops: Sequence[tuple[int, int]] = ((0, 0),), marks: Any = (), **more: Any) -> list[Segment]:
    more.setdefault("variant", b"nonce")
    more["marks"] = more.pop("contents", ())
    return cut_anchors(tokens, hops=hops, visibility=marks, model_id=MODEL, layout=LAYOUT, key=KEY, **more)


def bounds(segments: list[Segment]) -> list[tuple[int, int]]:
    return [(s.meta.start, s.meta.end) for s in segments]


def values(segments: list[Segment]) -> set[int]:
    return {int(v) for s in segments for v in np.frombuffer(s.meta.fingerprints, "<u4")}


def test_an_exact_sequence() -> None:
    tokens = words(1, 1200)
    segments = cut(tokens)
    metas = [s.meta for s in segments]
    assert bounds(segments) == [(0, 512), (512, 1024), (1024, 1200)]
    hashes = chain_hashes(tokens, KEY, MODEL)
    assert [m.chain_end for m in metas] == [hashes[15], hashes[31], b""]
    assert len({m.sequence_id for m in metas}) == 1
    assert {(m.hops, m.visibility, m.group, m.model_id) for m in metas} == {(0, PUBLIC, b"", MODEL)}
    assert [m.kv_bytes for m in metas] == [m.tokens * 64 for m in metas]
    selected, positions = fingerprints(tokens, KEY)
    for segment in segments:
        meta = segment.meta
        assert np.array_equal(segment.token_ids, tokens[meta.start : meta.end])
        assert not segment.token_ids.flags.writeable
        inside = selected[(positions >= meta.start) & (positions < meta.end)]
        assert np.frombuffer(meta.fingerprints, "<u4").tolist() == sorted(set(inside.tolist()))


def test_exact_copies_have_equal_ids_whatever_follows() -> None:
    tokens = words(1, 1200)
    other = joined(tokens[:1100], words(2, 100))
    ours, theirs = cut(tokens, variant=b"a"), cut(other, variant=b"b")
    assert [a.meta.anchor_id == b.meta.anchor_id for a, b in zip(ours, theirs, strict=True)] == [True, True, False]
    assert [s.meta for s in cut(tokens, variant=b"b")] == [s.meta for s in ours]


def test_cut_where_exactness_ends() -> None:
    tokens = words(1, 1000)
    segments = cut(tokens, [(0, 0), (700, 1)])
    assert bounds(segments) == [(0, 512), (512, 672), (672, 1000)]
    assert [s.meta.hops for s in segments] == [0, 0, 1]
    assert [bool(s.meta.chain_end) for s in segments] == [True, True, False]
    again = cut(tokens, [(0, 0), (700, 1)], variant=b"another")
    same = [a.meta.anchor_id == b.meta.anchor_id for a, b in zip(segments, again, strict=True)]
    assert same == [True, True, False]
    assert segments[0].meta.sequence_id != again[0].meta.sequence_id
    assert bounds(cut(tokens, [(0, 0), (31, 1)])) == [(0, 512), (512, 1000)]


def test_too_many_repairs_become_private() -> None:
    segments = cut(words(1, 600), [(0, 0), (100, 1), (300, 2), (400, 1)])
    assert bounds(segments) == [(0, 96), (96, 288), (288, 600)]
    assert [(s.meta.hops, s.meta.visibility) for s in segments] == [(0, PUBLIC), (1, PUBLIC), (2, PRIVATE)]


def test_cut_where_visibility_gets_stricter() -> None:
    tag = group_tag("red", KEY)
    marks = [VisibilityMark(100, GROUP, tag), VisibilityMark(200, PUBLIC), VisibilityMark(300, PRIVATE)]
    segments = cut(words(1, 400), marks=marks)
    assert bounds(segments) == [(0, 96), (96, 288), (288, 384), (384, 400)]
    expected = [(PUBLIC, b""), (GROUP, tag), (PRIVATE, b""), (PRIVATE, b"")]
    assert [(s.meta.visibility, s.meta.group) for s in segments] == expected
    assert len({s.meta.sequence_id for s in segments}) == 3
    two = cut(words(1, 400), marks=[VisibilityMark(0, GROUP, tag), VisibilityMark(64, GROUP, b"b" * 8)])
    assert [(s.meta.start, s.meta.visibility) for s in two][:2] == [(0, GROUP), (64, PRIVATE)]


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 200), st.integers(0, 2**16), st.integers(0, 40))
def test_what_others_see_tells_nothing_of_stricter_tokens(public: int, private: int, seed: int, back: int) -> None:
    shared = words(seed, public)
    marks = [VisibilityMark(public, PRIVATE)]
    seen = []
    for i in (1, 2):
        tokens = joined(shared, words(seed + i, private))
        begin = max(0, public - back)
        contents = content_marks(tokens, [(begin, min(begin + 50, len(tokens))), (begin // 2, begin)], KEY)
        seen.append([s.meta for s in cut(tokens, marks=marks, contents=contents) if s.meta.visibility is PUBLIC])
    assert seen[0] == seen[1]
    assert all(meta.end <= public for meta in seen[0])


def test_where_anchors_were_computed() -> None:
    tokens = words(1, 1200)
    hashes = chain_hashes(tokens, KEY, MODEL)
    segments = cut(tokens, [(0, 0), (64, 1)], [VisibilityMark(700, GROUP, b"g" * 8)])
    assert bounds(segments) == [(0, 64), (64, 576), (576, 672), (672, 1184), (1184, 1200)]
    first, second, third, _, last = (s.meta for s in segments)
    assert (first.chain_start, first.context_first, first.context_last) == (b"", 0, 0)
    # What follows an exact prefix says so although it is not exact itself; what follows that does not.
    assert second.hops == 1
    assert second.chain_start == hashes[1] == first.chain_end
    assert third.chain_start == b""
    assert second.context_first == second.context_last == simhash(tokens[:64], KEY)
    assert third.context_first == simhash(tokens[:128], KEY)
    assert third.context_last == simhash(tokens[third.start - 128 : third.start], KEY)
    assert second.content == simhash(tokens[second.start : second.end], KEY)
    assert last.content == 0


def test_exact_anchors_hang_together_by_their_chain_hashes() -> None:
    tokens = words(1, 1250)
    prompt, answer = cut(tokens[:992]), cut(tokens, start=992)
    metas = [s.meta for s in (*prompt, *answer)]
    assert [m.chain_start for m in metas[1:]] == [m.chain_end for m in metas[:-1]]
    assert metas[0].chain_start == b""
    assert metas[2].sequence_id != metas[1].sequence_id


def test_marks_stand_in_the_anchor_in_which_their_content_begins() -> None:
    tokens = words(1, 1200)
    contents = [(10, 30), (500, 560), (1190, 1200)]
    marks = content_marks(tokens, contents, KEY)
    anchors = cut(tokens, contents=marks)
    plain = [values([s]) for s in cut(tokens)]
    added = [values([s]) - without for s, without in zip(anchors, plain, strict=True)]
    expected: list[set[int]] = [set(), set(), set()]
    for mark in marks:
        expected[mark.position // 512].add(mark.fingerprint)
    assert added == expected
    assert [len(each) for each in added] == [12, 0, 5]
    for segment in anchors:
        sent = np.frombuffer(segment.meta.fingerprints, "<u4")
        assert (np.diff(sent.astype(np.int64)) > 0).all()
    # A content that reaches over a border in visibility is told behind it, one that is cut off by the end not at all.
    over = {m.fingerprint for m in marks if 500 <= m.position < 512}
    stricter = cut(tokens, marks=[VisibilityMark(520, PRIVATE)], contents=marks)
    assert [values([s]) & over for s in stricter[:2]] == [set(), over]
    assert values(cut(tokens[:540], contents=marks)) & expected[0] == {m.fingerprint for m in marks if m.position < 30}


def test_an_exact_answer_is_published_behind_its_prompt() -> None:
    tokens = words(1, 1250)
    prompt, answer = cut(tokens[:992]), cut(tokens, start=992, sequence=None)
    assert bounds(answer) == [(992, 1248), (1248, 1250)]
    assert answer[0].meta.chain_end == chain_hashes(tokens, KEY, MODEL)[1248 // 32 - 1]
    assert answer[0].meta.sequence_id not in {s.meta.sequence_id for s in prompt}
    fork = joined(tokens[:992], words(2, 200))
    name = prompt[-1].meta.sequence_id
    ids = {cut(t, start=992, sequence=name)[0].meta.sequence_id for t in (tokens, fork)}
    assert len(ids | {name}) == 3


def test_an_inexact_answer_goes_on_with_the_prompts_sequence() -> None:
    tokens = words(1, 1250)
    hops = [(0, 0), (40, 1)]
    prompt = cut(tokens[:992], hops)
    answer = cut(tokens, hops, start=992, sequence=prompt[-1].meta.sequence_id)
    assert bounds(answer) == [(992, 1250)]
    assert answer[0].meta.sequence_id == prompt[-1].meta.sequence_id
    next_turn = cut(joined(tokens, words(2, 300)), hops)
    kept = {s.meta.anchor_id for s in prompt} & {s.meta.anchor_id for s in next_turn}
    assert kept == {s.meta.anchor_id for s in prompt if s.meta.end <= 544}
    stricter = cut(tokens, hops, [VisibilityMark(992, PRIVATE)], start=992, sequence=prompt[-1].meta.sequence_id)
    assert stricter[0].meta.sequence_id != prompt[-1].meta.sequence_id


@pytest.mark.parametrize("run_start", range(860, 1000, 7))
@pytest.mark.parametrize("marks", [(), [VisibilityMark(992, PRIVATE)]])
def test_runs_over_a_border_are_found(run_start: int, marks: Any) -> None:
    tokens = words(1, 1250)
    segments = cut(tokens[:992]) + cut(tokens, marks=marks, start=992)
    prompt = joined(words(2, 100), tokens[run_start : run_start + 64], words(3, 100))
    selected, positions = fingerprints(prompt, KEY)
    inside = (positions >= 100) & (positions + KGRAM_TOKENS <= 164)
    assert set(selected[inside].tolist()) & values(segments)


@pytest.mark.parametrize("seed", range(5))
def test_a_tiny_anchor_behind_a_border_is_no_contradiction(seed: int) -> None:
    """More windows reach into it than it has tokens; what is gossiped may not have more fingerprints than that."""
    last = cut(words(seed, 993), marks=[VisibilityMark(992, GROUP, b"g" * 8)])[-1]
    assert (last.meta.start, last.meta.tokens) == (992, 1)
    assert problem_of(HeldAnchor(last.meta, last.token_ids, (HANDLE,), (b"",))) == ""


@settings(deadline=None)
@given(
    st.integers(1, 1500),
    st.lists(st.tuples(st.integers(0, 1500), st.integers(0, 2)), max_size=4),
    st.lists(st.tuples(st.integers(0, 1500), st.sampled_from([PUBLIC, PRIVATE])), max_size=4),
    st.integers(0, 46),
    st.lists(st.tuples(st.integers(0, 1500), st.integers(0, 70)), max_size=20),
)
def test_every_cut_keeps_the_rules(total: int, hops: Any, marks: Any, start_block: int, contents: Any) -> None:
    tokens = words(total, total)
    start = min(32 * start_block, (total - 1) // 32 * 32)
    hops, marks = sorted(hops), [VisibilityMark(*mark) for mark in sorted(marks)]
    named = content_marks(tokens, [(a, min(a + n, total)) for a, n in contents if a < total], KEY)
    segments = cut(tokens, hops, marks, start=start, contents=named)
    at = start
    hashes = chain_hashes(tokens, KEY, MODEL)
    for meta, ids, _ in segments:
        assert meta.start == at
        assert meta.start % 32 == 0
        assert 0 < meta.tokens <= 512
        assert np.array_equal(ids, tokens[at : meta.end])
        at = meta.end
        repairs = max((n for p, n in hops if p < meta.end), default=0)
        assert meta.hops == repairs
        strictest = max((m.visibility for m in marks if m.start < meta.end), default=PUBLIC)
        assert meta.visibility == (PRIVATE if repairs > 1 else strictest)
        behind_exact = meta.start and not any(n for p, n in hops if p < meta.start)
        assert meta.chain_start == (hashes[meta.start // 32 - 1] if behind_exact else b"")
        held = HeldAnchor(meta, ids, (HANDLE,) * meta.blocks, (b"",) * meta.blocks)
        assert problem_of(held) == ""
        chained = repairs == 0 and meta.end % 32 == 0
        assert meta.chain_end == (hashes[meta.end // 32 - 1] if chained else b"")
    assert at == total


def test_mistakes_are_refused() -> None:
    for start in (-32, 5, 64):
        with pytest.raises(ValueError, match="block grid"):
            cut(words(1, 64), start=start)
    with pytest.raises(ValueError, match="block grid"):
        cut(words(1, 0))
    with pytest.raises(ValueError, match="nonce"):
        cut(words(1, 64), [(0, 0), (40, 1)], variant=b"")
