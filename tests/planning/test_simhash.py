"""SimHash: the definition, the same everywhere, near for edited texts and far for others."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcomm_p2p.planning.simhash import SHINGLE_TOKENS, SIMHASH_BITS, VOTES_MAX, _key_words, simhash, similarity
from kvcomm_p2p.protocol.kgrams import kgram_hashes

Tokens = npt.NDArray[np.uint32]
KEY = b"content key"


def text(rng: np.random.Generator, length: int) -> Tokens:
    """Token ids with the long tail of natural text: a few are everywhere."""
    return np.minimum(rng.zipf(1.3, length), 49_151).astype(np.uint32)


def edited(tokens: Tokens, share: float, run_mean: float, rng: np.random.Generator) -> Tokens:
    """Runs of tokens inserted, replaced or deleted until their lengths make up `share` of the text."""
    words, left = tokens.tolist(), round(share * len(tokens))
    while left > 0:
        length = min(left, int(rng.geometric(1 / run_mean)))
        at, kind = int(rng.integers(0, len(words) - length)), int(rng.integers(3))
        words[at : at + (length if kind else 0)] = text(rng, length).tolist() if kind < 2 else []
        left -= length
    return np.array(words, np.uint32)


def distance(a: Tokens, b: Tokens) -> int:
    return (simhash(a, KEY) ^ simhash(b, KEY)).bit_count()


@given(st.lists(st.integers(0, 3) | st.integers(0, 2**32 - 1), max_size=600))
def test_every_bit_is_the_majority_of_capped_votes(token_ids: list[int]) -> None:
    tokens = np.array(token_ids, np.uint32)
    k = min(len(tokens), SHINGLE_TOKENS)
    hashes = kgram_hashes(tokens, k, _key_words(KEY)).tolist() if k else []
    votes = [value for value, count in Counter(hashes).items() for _ in range(min(count, VOTES_MAX))]
    expected = sum(1 << bit for bit in range(SIMHASH_BITS) if 2 * sum(v >> bit & 1 for v in votes) > len(votes))
    assert simhash(tokens, KEY) == expected


@pytest.mark.parametrize("length", [128, 512])
@pytest.mark.parametrize(
    ("share", "run_mean", "mean_max", "within_9_min", "within_16_min"),
    [
        (0.05, 8.0, 7.0, 0.8, 1.0),
        (0.10, 8.0, 9.5, 0.45, 0.95),
        (0.20, 8.0, 13.0, 0.1, 0.8),
        (0.05, 1.0, 9.5, 0.5, 0.95),
    ],
)
def test_edited_texts_are_near(
    length: int, share: float, run_mean: float, mean_max: float, within_9_min: float, within_16_min: float
) -> None:
    rng = np.random.default_rng(7)
    originals = [text(rng, length) for _ in range(60)]
    distances = np.array([distance(each, edited(each, share, run_mean, rng)) for each in originals])
    assert 0 < distances.mean() <= mean_max
    assert np.mean(distances <= 9) >= within_9_min
    assert np.mean(distances <= 16) >= within_16_min


@pytest.mark.parametrize("length", [128, 512])
def test_unrelated_texts_are_near_a_half(length: int) -> None:
    rng = np.random.default_rng(8)
    values = [simhash(rng.integers(0, 49_152, length).astype(np.uint32), KEY) for _ in range(80)]
    similarities = np.array([similarity(a, b) for at, a in enumerate(values) for b in values[:at]])
    assert abs(similarities.mean() - 0.5) < 0.01
    assert abs(similarities.std() - 0.5 / np.sqrt(SIMHASH_BITS)) < 0.01


def test_one_pair_everywhere_does_not_decide() -> None:
    rng = np.random.default_rng(9)
    blank = np.zeros(300, np.uint32)
    a, b = (np.concatenate((blank, rng.integers(1, 49_152, 200).astype(np.uint32))) for _ in range(2))
    assert distance(a, b) > 16


def test_similarity() -> None:
    assert similarity(5, 5) == 1.0
    assert similarity(0, 2**64 - 1) == 0.0
    assert similarity(0b1011, 0b0001) == 1 - 2 / 64


def test_values_depend_on_the_key() -> None:
    tokens = text(np.random.default_rng(1), 500)
    distances = [(simhash(tokens, KEY) ^ simhash(tokens, b"key %d" % number)).bit_count() for number in range(50)]
    assert min(distances) > 9
    assert abs(np.mean(distances) - 32) < 3
    with pytest.raises(ValueError, match="content key"):
        simhash(tokens, b"")


def test_values_are_the_same_on_every_machine() -> None:
    assert [simhash(np.arange(n, dtype=np.uint32), KEY) for n in (0, 1, 2, 3, 512, 2_000)] == PINNED


PINNED = [
    0,
    18396736332163492947,
    1317995052212849029,
    164381403857455361,
    15058864107304065959,
    11739579480113765728,
]
