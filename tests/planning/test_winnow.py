"""The winnowing guarantee: equal stretches share a fingerprint inside the stretch, whatever surrounds it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcomm_p2p.planning.chains import keyed_digest, token_bytes
from kvcomm_p2p.planning.winnow import (
    EQUAL_TOKENS_MIN,
    KGRAM_TOKENS,
    MARK_TOKENS_MIN,
    WINDOW,
    content_marks,
    fingerprints,
)

Tokens = npt.NDArray[np.uint32]
KEY = b"content key"


def inside(tokens: Tokens, start: int, length: int) -> set[int]:
    """Values selected by k-grams that lie wholly inside the stretch."""
    values, positions = fingerprints(tokens, KEY)
    held = (positions >= start) & (positions + KGRAM_TOKENS <= start + length)
    return set(values[held].tolist())


@st.composite
def stretches(draw: st.DrawFn) -> Tokens:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    length = draw(st.integers(EQUAL_TOKENS_MIN, 200))
    kind = draw(st.sampled_from(["random", "binary", "constant", "periodic"]))
    if kind == "periodic":
        period = rng.integers(0, 50_000, draw(st.integers(1, 40)))
        return np.resize(period, length).astype(np.uint32)
    alphabet = {"random": 50_000, "binary": 2, "constant": 1}[kind]
    return rng.integers(0, alphabet, length).astype(np.uint32)


@settings(max_examples=300, deadline=None)
@given(stretches(), st.integers(0, 150), st.integers(0, 150), st.sampled_from([1, 2, 50_000]), st.integers(0, 2**32))
def test_equal_stretches_share_a_fingerprint(stretch: Tokens, a: int, b: int, alphabet: int, seed: int) -> None:
    rng = np.random.default_rng(seed)

    def noise(n: int) -> Tokens:
        return rng.integers(0, alphabet, n).astype(np.uint32)

    first = np.concatenate((noise(a), stretch, noise(b)))
    second = np.concatenate((noise(b), stretch, noise(a // 2)))
    assert inside(first, a, len(stretch)) & inside(second, b, len(stretch))


def test_shorter_stretches_are_not_always_found() -> None:
    """Keeps the test above honest: if everything were selected, it could not fail."""
    rng = np.random.default_rng(0)
    shared = 0
    for _ in range(200):
        stretch = rng.integers(0, 50_000, EQUAL_TOKENS_MIN // 2)
        texts = [
            np.concatenate((rng.integers(0, 50_000, 80), stretch, rng.integers(0, 50_000, 80))).astype(np.uint32)
            for _ in range(2)
        ]
        shared += bool(inside(texts[0], 80, len(stretch)) & inside(texts[1], 80, len(stretch)))
    assert 0 < shared < 200


@pytest.mark.parametrize("period", [1, 2, 5, 16, 47, 48, 49, 100])
def test_repetitive_text_selects_a_bounded_number(period: int) -> None:
    tokens = np.resize(np.arange(period), 4_000).astype(np.uint32)
    values, positions = fingerprints(tokens, KEY)
    assert len(np.unique(values)) <= 2 + period
    assert len(positions) <= 3 * 4_000 / WINDOW
    assert np.diff(positions).max() <= WINDOW


def test_density_in_random_text() -> None:
    tokens = np.random.default_rng(1).integers(0, 50_000, 50_000).astype(np.uint32)
    values, positions = fingerprints(tokens, KEY)
    assert 0.95 < len(positions) / (50_000 * 2 / (WINDOW + 1)) < 1.05
    assert np.all(np.diff(positions) > 0)
    assert values.dtype == np.uint32
    assert positions.dtype == np.int64


def test_values_depend_on_the_key() -> None:
    tokens = np.random.default_rng(1).integers(0, 50_000, 5_000).astype(np.uint32)
    ours, theirs = fingerprints(tokens, KEY)[0], fingerprints(tokens, b"another key")[0]
    assert len(np.intersect1d(ours, theirs)) <= 1


def test_values_are_the_same_on_every_machine() -> None:
    tokens = np.arange(200, dtype=np.uint32)
    values, positions = fingerprints(tokens, KEY)
    assert (values.tolist(), positions.tolist()) == (PINNED_VALUES, PINNED_POSITIONS)


def test_too_short_for_the_guarantee_is_empty() -> None:
    values, positions = fingerprints(np.arange(EQUAL_TOKENS_MIN - 1, dtype=np.uint32), KEY)
    assert len(values) == len(positions) == 0
    assert len(fingerprints(np.arange(EQUAL_TOKENS_MIN, dtype=np.uint32), KEY)[0]) == 1


def names(tokens: Tokens, *contents: tuple[int, int], key: bytes = KEY) -> set[int]:
    return {mark.fingerprint for mark in content_marks(tokens, contents, key)}


@settings(deadline=None)
@given(
    st.integers(MARK_TOKENS_MIN, 90),
    st.integers(0, 50),
    st.tuples(*[st.integers(0, n) for n in (2, 2, 1, 1)]),
    st.data(),
)
def test_short_contents_are_found_by_name_and_longer_ones_by_fingerprints(
    length: int, before: int, lost: tuple[int, int, int, int], data: st.DataObject
) -> None:
    """Whatever stands around, and although border tokens differ: up to two at the start and one at the end, of either."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    content = rng.integers(0, 50_000, length + 6).astype(np.uint32)
    first, other_first, last, other_last = lost
    ours, theirs = content[first : len(content) - last], content[other_first : len(content) - other_last]
    prompts = []
    for stretch, shift in ((ours, before), (theirs, before // 2 + 7)):
        around = rng.integers(0, 50_000, (2, shift)).astype(np.uint32)
        tokens = np.concatenate((around[0], stretch, around[1]))
        found, _ = fingerprints(tokens, KEY)
        prompts.append(names(tokens, (shift, shift + len(stretch))) | set(found.tolist()))
    assert prompts[0] & prompts[1]


def test_a_name_is_of_exactly_these_tokens() -> None:
    tokens = np.arange(100, dtype=np.uint32)
    marks = content_marks(tokens, [(10, 30), (10, 30), (50, 50), (60, 68)], KEY)
    assert [(mark.position, mark.length) for mark in marks] == [
        *[(10 + first, 20 - first - last) for first in (0, 1, 2) for last in (1, 0)],
        (60, 8),
    ]
    for mark in marks:
        exactly = tokens[mark.position : mark.position + mark.length]
        digest = keyed_digest(b"kvcomm content", KEY, 4, token_bytes(exactly))
        assert mark.fingerprint == int.from_bytes(digest, "little")
    changed = tokens.copy()
    changed[20] = 7
    assert not names(tokens, (10, 30)) & names(changed, (10, 30))
    assert not names(tokens, (10, 30)) & names(tokens, (10, 30), key=b"another key")
    assert names(changed, (40, 60)) == names(tokens, (40, 60))


def test_what_gets_no_name() -> None:
    tokens = np.arange(200, dtype=np.uint32)
    assert content_marks(tokens, [(0, 7), (0, 66), (0, 200)], KEY) == ()
    assert len(content_marks(tokens, [(0, 8), (0, 65)], KEY)) == 1 + 6
    for outside in ((-1, 20), (190, 201), (20, 10)):
        with pytest.raises(ValueError, match="outside"):
            content_marks(tokens, [outside], KEY)


PINNED_VALUES = [385745373, 100723683, 272874611, 11897965, 45525602, 412309642]
PINNED_POSITIONS = [19, 58, 85, 115, 122, 147]
