"""Which sequences are looked at: joined by chain hashes, one source per anchor, several contexts, few holders."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_cases import KEY, ME, MODEL, Tokens, joined, words

from kvcomm_p2p.planning.chains import chain_hashes
from kvcomm_p2p.planning.segments import Segment, cut_anchors
from kvcomm_p2p.planning.stretches import (
    Stretch,
    choose_stretches,
    known_prefix,
    led_back,
    prefix_of,
    without_gaps,
    without_repeated,
)
from kvcomm_p2p.planning.winnow import fingerprints
from kvcomm_p2p.protocol.anchors import AnchorMeta, KVLayout
from kvcomm_p2p.protocol.directory import Directory
from kvcomm_p2p.protocol.ids import AnchorId, NodeId
from kvcomm_p2p.protocol.lookup import AnchorHit, Lookup

LAYOUT = KVLayout(layers=1, kv_heads=1, key_dim=2, value_dim=2, dtype="float32")
ANN, BOB = NodeId(b"1" * 16), NodeId(b"8" * 16)
"""ME is all zeros in ASCII: ANN is nearer to it than BOB."""


def cut(tokens: Tokens, **more: Any) -> list[AnchorMeta]:
    segments: list[Segment] = cut_anchors(
        tokens,
        hops=more.pop("hops", ((0, 0),)),
        visibility=(),
        model_id=MODEL,
        layout=LAYOUT,
        key=KEY,
        variant=b"v",
        **more,
    )
    return [segment.meta for segment in segments]


def asking(prompt: Tokens) -> Lookup:
    return Lookup(MODEL, tuple(chain_hashes(prompt, KEY, MODEL)), np.unique(fingerprints(prompt, KEY)[0]))


def found(lookup: Lookup, held: dict[NodeId, list[AnchorMeta]]) -> tuple[AnchorHit, ...]:
    """What a real directory answers."""
    directory = Directory(ME)
    for holder, metas in held.items():
        for meta in metas:
            directory.add(holder, meta)
    return directory.find(lookup, lambda *_: True).hits


def chosen(prompt: Tokens, held: dict[NodeId, list[AnchorMeta]], sequences_max: int = 6) -> list[Stretch]:
    lookup = asking(prompt)
    return choose_stretches(found(lookup, held), (), lookup, ME, sequences_max)


def bounds(stretch: Stretch) -> list[tuple[int, int]]:
    return [(anchor.start, anchor.end) for anchor in stretch.anchors]


SHARED = words(1, 1024)
LEFT, RIGHT = joined(SHARED, words(2, 300)), joined(SHARED, words(3, 250))


def branches() -> list[AnchorMeta]:
    """Two prompts with the same beginning as one node holds them: what they share, under the first one's name."""
    return list({meta.anchor_id: meta for meta in (*cut(RIGHT), *cut(LEFT))}.values())


def test_a_branch_is_joined_with_the_beginning_that_was_published_under_another_name() -> None:
    metas = branches()
    assert len({meta.sequence_id for meta in metas}) == 2
    stretches = chosen(RIGHT, {ANN: metas})
    assert [bounds(s) for s in stretches] == [
        [(0, 512), (512, 1024), (1024, 1324)],
        [(0, 512), (512, 1024), (1024, 1274)],
    ]
    assert all(s.prefix_tokens == 1024 and s.holder == ANN for s in stretches)


def test_without_chain_hashes_branches_fall_apart() -> None:
    """Keeps the test above honest."""
    metas = [replace(meta, chain_start=b"") for meta in branches()]
    assert [(1024, 1274)] in [bounds(s) for s in chosen(RIGHT, {ANN: metas})]


def test_a_tail_whose_beginning_its_holder_lost_is_still_known_to_be_exact() -> None:
    *_, tail = cut(RIGHT)
    (stretch,) = chosen(RIGHT, {ANN: [tail]})
    assert (bounds(stretch), stretch.prefix_tokens) == ([(1024, 1274)], 1024)
    (moved,) = chosen(joined(words(9, 40), RIGHT), {ANN: [tail]})
    assert moved.prefix_tokens == 0


def test_a_beginning_can_come_from_one_holder_and_the_tail_from_another() -> None:
    first, second, tail = cut(RIGHT)
    stretches = chosen(RIGHT, {ANN: [first, second], BOB: [tail]})
    assert sorted((s.holder, bounds(s), s.prefix_tokens >= s.anchors[0].start) for s in stretches) == [
        (ANN, [(0, 512), (512, 1024)], True),
        (BOB, [(1024, 1274)], True),
    ]


def test_repaired_tails_are_joined_with_the_exact_part_before_them() -> None:
    exact = cut(SHARED)
    repaired = cut(RIGHT, hops=((0, 0), (1024, 1)))[-1]
    assert (repaired.start, repaired.hops) == (1024, 1)
    assert repaired.sequence_id != exact[0].sequence_id
    stretches = chosen(joined(words(9, 40), RIGHT), {ANN: [*exact, repaired]})
    assert [(0, 512), (512, 1024), (1024, 1274)] in [bounds(s) for s in stretches]


def test_each_anchor_has_one_source_and_the_holder_of_most_is_preferred() -> None:
    one, other = words(1, 400), words(2, 400)
    prompt = joined(words(3, 40), one, words(4, 40), other)
    x, y = cut(joined(words(5, 40), one)), cut(joined(words(6, 40), other))
    alone = chosen(prompt, {ANN: x, BOB: x})
    assert [s.holder for s in alone] == [ANN]
    both = chosen(prompt, {ANN: x, BOB: [*x, *y]})
    assert [s.holder for s in both] == [BOB, BOB]


def test_what_we_hold_ourselves_is_not_taken_from_peers() -> None:
    metas = cut(LEFT)
    lookup = asking(LEFT)
    own = [Stretch(ME, metas[0].sequence_id, tuple(metas), len(LEFT))]
    assert choose_stretches(found(lookup, {ME: metas, ANN: metas}), own, lookup, ME, 6) == []
    assert choose_stretches(
        found(lookup, {ME: metas[:2], ANN: metas}), [replace(own[0], anchors=tuple(metas[:2]))], lookup, ME, 6
    )


def crowd(context: Tokens, seed: int, tail: int) -> list[AnchorMeta]:
    """Anchors of a prompt: a context, the document, and a question of its own."""
    return cut(joined(context, DOCUMENT, words(seed, tail)))


DOCUMENT = words(1, 800)


def test_several_contexts_of_one_content_are_looked_at() -> None:
    """Eight copies behind one context share more with the prompt than the single one behind another context."""
    popular, rare = words(2, 100), words(3, 100)
    prompt = joined(popular[50:], DOCUMENT, words(4, 40))
    held = {NodeId(bytes([i]) * 16): crowd(popular, 100 + i, 40 + i) for i in range(1, 9)}
    held[NodeId(b"z" * 16)] = [meta for meta in crowd(rare, 200, 40) if meta.start > 0]
    for sequences_max in (2, 6):
        stretches = chosen(prompt, held, sequences_max)
        contexts = {anchor.context_first for s in stretches for anchor in s.anchors if anchor.start == 512}
        assert len(contexts) == 2, sequences_max


def test_several_contexts_inside_one_anchor_are_told_apart_by_content() -> None:
    popular, rare = words(2, 100), words(3, 100)
    document = words(1, 300)
    prompt = joined(popular[30:], document, words(4, 40))
    held = {NodeId(bytes([i]) * 16): cut(joined(popular, document, words(100 + i, 10))) for i in range(1, 9)}
    held[NodeId(b"z" * 16)] = cut(joined(rare, document, words(200, 10)))
    assert NodeId(b"z" * 16) in {s.holder for s in chosen(prompt, held, 2)}
    blind = {holder: [replace(meta, content=0) for meta in metas] for holder, metas in held.items()}
    assert NodeId(b"z" * 16) not in {s.holder for s in chosen(prompt, blind, 2)}


def test_exact_prefixes_come_first() -> None:
    prompt = joined(SHARED, words(5, 600))
    elsewhere = cut(joined(words(6, 64), prompt))
    stretches = chosen(prompt, {ANN: elsewhere, BOB: cut(SHARED[:512])})
    assert [s.holder for s in stretches] == [BOB, ANN]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 700)), max_size=10), st.integers(0, 6))
def test_whatever_is_held_the_choice_keeps_the_rules(copies: list[tuple[int, int, int]], sequences_max: int) -> None:
    texts = [words(10 + i, 700) for i in range(6)]
    prompt = joined(*texts[:3], words(9, 20))
    held: dict[NodeId, list[AnchorMeta]] = {}
    for holder, text, tail in copies:
        tokens = joined(*texts[: text % 4], words(20 + text, 1 + tail))
        held.setdefault(NodeId(bytes([holder + 1]) * 16), []).extend(cut(tokens))
    stretches = chosen(prompt, held, sequences_max)
    sources: dict[AnchorId, NodeId] = {}
    for stretch in stretches:
        assert all(a.end == b.start for a, b in itertools.pairwise(stretch.anchors))
        for anchor in stretch.anchors:
            assert anchor in held[stretch.holder]
            assert sources.setdefault(anchor.anchor_id, stretch.holder) == stretch.holder
    assert len({(s.holder, s.sequence_id) for s in stretches}) <= sequences_max
    assert stretches == without_repeated(stretches) == chosen(prompt, held, sequences_max)


def test_led_back_takes_the_longest_and_stops_at_gaps() -> None:
    first, second, tail = cut(RIGHT)
    assert led_back((tail,), [second, first]) == (first, second, tail)
    assert led_back((tail,), [first]) == (tail,)
    assert led_back((tail,), []) == (tail,)
    short = replace(second, anchor_id=AnchorId(b"p" * 16), start=768)
    assert (
        led_back((tail,), [short, second, first]) == led_back((tail,), [second, short, first]) == (first, second, tail)
    )


def test_repeated_stretches_go() -> None:
    first, second, tail = cut(RIGHT)
    short, long = Stretch(ANN, first.sequence_id, (first,), 0), Stretch(ANN, first.sequence_id, (first, second), 0)
    assert without_repeated([short, long, long]) == [long]
    assert without_repeated([short, replace(long, holder=BOB)]) == [short, replace(long, holder=BOB)]
    assert without_repeated([short, Stretch(ANN, first.sequence_id, (tail,), 0)])[0] == short


def test_prefixes_are_known_by_either_end() -> None:
    first, second, tail = cut(RIGHT)
    lookup = asking(RIGHT)
    assert known_prefix(AnchorHit(tail, ANN, 1, 0), lookup) == 1024
    assert known_prefix(AnchorHit(first, ANN, 1, 512), lookup) == 512
    assert known_prefix(AnchorHit(tail, ANN, 1, 0), asking(RIGHT[:1000])) == 0
    assert known_prefix(AnchorHit(tail, ANN, 1, 0), asking(words(5, 1200))) == 0
    other = replace(tail, sequence_id=cut(LEFT)[0].sequence_id)
    hits = [AnchorHit(first, ANN, 0, 512), AnchorHit(other, ANN, 0, 0)]
    assert prefix_of((first, second), hits, lookup) == 512
    assert prefix_of((second,), hits[1:], lookup) == 0


def test_of_anchors_that_begin_together_the_longest_is_kept() -> None:
    first, second, _ = cut(RIGHT)
    short = replace(first, anchor_id=AnchorId(b"p" * 16), end=64)
    assert without_gaps([short, first, second]) == [(first, second)]
