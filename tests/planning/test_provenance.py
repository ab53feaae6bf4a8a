"""Of several copies of the same content, the one whose context is most like ours must win."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_cases import KEY, MODEL, PEER, Tokens, donor, joined, words

from kvcomm_p2p.planning.provenance import ALIKE_MIN, Context, context_likeness, kind
from kvcomm_p2p.planning.segments import cut_anchors
from kvcomm_p2p.planning.types import Donor, Provenance
from kvcomm_p2p.protocol.anchors import KVLayout

LAYOUT = KVLayout(layers=1, kv_heads=1, key_dim=2, value_dim=2, dtype="float32")
RUN = words(1, 300)
ROLE, OTHER_ROLE = words(2, 70), words(3, 80)
DOCUMENT, OTHER_DOCUMENT = words(4, 400), words(5, 380)


def edited(tokens: Tokens, count: int, seed: int = 9) -> Tokens:
    """With `count` tokens replaced, far enough from each other to spoil two pairs each."""
    changed = tokens.copy()
    changed[np.linspace(1, len(tokens) - 2, count).astype(int)] = words(seed, count)
    return changed


def computed_behind(context: Tokens) -> Donor:
    """A donor that is known from its first token on."""
    return donor(joined(context, RUN))


def known_from(context: Tokens, start: int) -> Donor:
    """The same copy, of which only what begins at `start` is held: what was before, its metadata tells."""
    tokens = joined(context, RUN)
    segments = cut_anchors(tokens, hops=((0, 0),), visibility=(), model_id=MODEL, layout=LAYOUT, key=KEY, start=start)
    metas = tuple(segment.meta for segment in segments)
    return Donor(PEER, False, metas[0].sequence_id, start, tokens[start:], metas)


def against(ours: Tokens, source: Donor, theirs: Tokens) -> Context:
    return context_likeness(joined(ours, RUN), len(ours), source, len(theirs), KEY)


def seen(ours: Tokens, theirs: Tokens) -> Context:
    return against(ours, computed_behind(theirs), theirs)


NOTHING = words(0, 0)
GLUE = words(6, 5)
"""What a chat template puts between a system prompt and the user's text: the run begins with it where both have it."""


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        (ROLE, ROLE, Provenance.SAME),
        (joined(ROLE, DOCUMENT), joined(ROLE, DOCUMENT), Provenance.SAME),
        (NOTHING, NOTHING, Provenance.SAME),
        (ROLE, edited(ROLE, 3), Provenance.NEAR),
        (ROLE, ROLE[2:], Provenance.NEAR),
        (joined(ROLE, DOCUMENT), joined(edited(ROLE, 3), DOCUMENT), Provenance.NEAR),
        (joined(ROLE, DOCUMENT), joined(ROLE, edited(DOCUMENT, 20)), Provenance.NEAR),
        (ROLE, OTHER_ROLE, Provenance.ROLE),
        (ROLE, edited(ROLE, 20), Provenance.ROLE),
        (ROLE, joined(OTHER_ROLE, ROLE[:40]), Provenance.ROLE),
        (joined(ROLE, DOCUMENT), joined(OTHER_ROLE, DOCUMENT), Provenance.ROLE),
        (joined(ROLE, GLUE, DOCUMENT), joined(ROLE, GLUE, OTHER_DOCUMENT), Provenance.TEXT),
        (joined(ROLE, GLUE, DOCUMENT), joined(OTHER_ROLE, GLUE, OTHER_DOCUMENT, DOCUMENT), Provenance.ROLE),
        (ROLE, NOTHING, Provenance.BARE),
        (ROLE, ROLE[-7:], Provenance.BARE),
        (ROLE, OTHER_ROLE[:20], Provenance.BARE),
        (joined(ROLE, DOCUMENT), NOTHING, Provenance.BARE),
        (joined(ROLE, GLUE, DOCUMENT), joined(ROLE, GLUE), Provenance.BARE),
        (joined(ROLE, GLUE, DOCUMENT[:60]), joined(OTHER_ROLE, GLUE), Provenance.BARE),
        (ROLE, joined(ROLE, DOCUMENT), Provenance.OTHER),
        (joined(ROLE, GLUE), joined(ROLE, GLUE, DOCUMENT[:50]), Provenance.OTHER),
        (joined(ROLE, GLUE), joined(OTHER_ROLE, GLUE, DOCUMENT[:50]), Provenance.OTHER),
        (ROLE, joined(OTHER_ROLE, DOCUMENT), Provenance.OTHER),
        (ROLE, DOCUMENT, Provenance.OTHER),
    ],
)
def test_classes(ours: Tokens, theirs: Tokens, expected: Provenance) -> None:
    context = seen(ours, theirs)
    assert kind(context) is expected
    assert context.bare is (len(theirs) < 8)
    assert context.moved == len(ours) - len(theirs)


def test_a_template_that_a_long_conversation_repeats_tells_nothing() -> None:
    turns = [joined(GLUE, words(20 + i, 60)) for i in range(12)]
    ours, theirs = joined(ROLE, *turns[:6], GLUE), joined(ROLE, *turns[6:])
    context = seen(ours, theirs)
    assert not context.more
    assert kind(context) is Provenance.TEXT
    alone = seen(joined(ROLE, GLUE), joined(ROLE, turns[0]))
    assert alone.more and not alone.less


@pytest.mark.parametrize("start", [32, 64, 128, 256, 448])
@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        (joined(ROLE, DOCUMENT), joined(ROLE, DOCUMENT), Provenance.SAME),
        (joined(ROLE, DOCUMENT), joined(edited(ROLE, 2), DOCUMENT), Provenance.NEAR),
        (joined(ROLE, DOCUMENT), joined(OTHER_ROLE, DOCUMENT), Provenance.ROLE),
        (ROLE, joined(ROLE, DOCUMENT), Provenance.OTHER),
    ],
)
def test_classes_by_what_metadata_tells(ours: Tokens, theirs: Tokens, expected: Provenance, start: int) -> None:
    """Also where the holder has only what begins at `start`, at or before the run."""
    context = against(ours, known_from(theirs, start), theirs)
    assert kind(context) is expected
    exactly = seen(ours, theirs)
    assert abs(context.near - exactly.near) < 0.25
    assert abs(context.first - exactly.first) < 0.3


def test_the_run_may_begin_with_the_first_known_token() -> None:
    theirs = joined(OTHER_ROLE[:64], DOCUMENT[:384])
    ours = joined(ROLE, DOCUMENT[:384])
    told = against(ours, known_from(theirs, len(theirs)), theirs)
    assert kind(told) is Provenance.ROLE
    assert told.near > ALIKE_MIN > told.first


def test_what_is_not_told_counts_as_unlike() -> None:
    theirs = joined(ROLE, DOCUMENT)
    known = known_from(theirs, 448)
    silent = replace(known, anchors=tuple(replace(a, context_first=0, context_last=0) for a in known.anchors))
    context = against(theirs, silent, theirs)
    assert (context.same, context.first) == (False, 0.0)
    assert context.near == pytest.approx(22 / 128)
    assert kind(context) is not Provenance.SAME
    # Chain hashes say more than SimHashes: with them nothing need be told.
    assert kind(against(theirs, replace(silent, same_prefix_until=448), theirs)) is Provenance.SAME


def test_the_same_text_in_another_place_is_not_the_same_context() -> None:
    theirs = joined(words(7, 1), ROLE, DOCUMENT)
    assert kind(seen(joined(ROLE, DOCUMENT), theirs)) is Provenance.NEAR
    swapped = joined(ROLE, DOCUMENT[200:], DOCUMENT[:200])
    assert kind(seen(joined(ROLE, DOCUMENT), swapped)) is not Provenance.SAME


def best(ours: Tokens, *copies: Tokens) -> int:
    """Which of the copies planning prefers: by class, then by likeness."""
    contexts = [seen(ours, theirs) for theirs in copies]
    return min(range(len(copies)), key=lambda i: (kind(contexts[i]), -contexts[i].likeness))


def test_the_copy_whose_context_is_most_like_ours_wins() -> None:
    """In the order of the measured divergence."""
    ladder = [ROLE, edited(ROLE, 2), OTHER_ROLE, NOTHING, joined(OTHER_ROLE, DOCUMENT)]
    for first in range(len(ladder)):
        rest = ladder[first:]
        assert best(ROLE, *rest) == 0
        assert best(ROLE, *reversed(rest)) == len(rest) - 1


@settings(max_examples=60, deadline=None)
@given(st.integers(60, 250), st.integers(0, 10), st.integers(0, 10), st.booleans(), st.integers(0, 2**16))
def test_within_a_class_fewer_changes_win(length: int, few: int, more: int, told: bool, seed: int) -> None:
    ours = words(seed, length)
    # A change alone is two other pairs of tokens, changes side by side are hardly more than one each.
    fewer, changed = (edited(ours, n, seed + 1) for n in (few, 2 * few + 2 + more))
    if told and length > 64:
        likes = [against(ours, known_from(theirs, 32), theirs).likeness for theirs in (fewer, changed)]
        assert likes[0] >= likes[1] - 0.12  # what SimHashes tell of 32 tokens is rough
    else:
        assert seen(ours, fewer).likeness > seen(ours, changed).likeness


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 400), st.integers(0, 400), st.integers(0, 12), st.integers(0, 2**16))
def test_numbers_are_in_their_ranges(ours: int, theirs: int, start_block: int, seed: int) -> None:
    left, right = words(seed, ours), words(seed % 3, theirs)
    start = min(32 * start_block, theirs // 32 * 32)
    context = against(left, known_from(right, start), right)
    for value in (context.near, context.first, context.lengths, context.likeness):
        assert 0.0 <= value <= 1.0
    assert isinstance(kind(context), Provenance)
    assert context.lengths == (min(ours, theirs) / max(ours, theirs) if max(ours, theirs) else 1.0)


def test_positions_outside_are_refused() -> None:
    source = known_from(joined(ROLE, DOCUMENT), 64)
    for prompt_start, donor_start in ((0, 63), (0, 771), (-1, 64), (371, 64)):
        with pytest.raises(ValueError, match="no run can begin"):
            context_likeness(joined(ROLE, RUN), prompt_start, source, donor_start, KEY)
