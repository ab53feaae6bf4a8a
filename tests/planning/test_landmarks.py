"""Landmarks: equal runs meet at one, wherever they stand; how often short ones do."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcomm_p2p.planning.landmarks import LANDMARK_TOKENS_MIN, LANDMARK_WINDOW, landmarks, landmarks_of
from kvcomm_p2p.planning.segments import cut_anchors
from kvcomm_p2p.planning.winnow import KGRAM_TOKENS, _key_words, content_marks, fingerprints, kgram_hashes
from kvcomm_p2p.protocol.anchors import LANDMARKS_MAX, KVLayout
from kvcomm_p2p.protocol.ids import ModelId

KEY = b"k" * 32
LAYOUT = KVLayout(layers=1, kv_heads=1, key_dim=1, value_dim=1, dtype="float16")
Tokens = npt.NDArray[np.uint32]


def text(seed: int, tokens: int, words: int = 2000) -> Tokens:
    return np.random.default_rng(seed).integers(0, words, tokens).astype(np.uint32)


def of(tokens: Tokens) -> set[int]:
    values, positions = fingerprints(tokens, KEY)
    return set(values[landmarks(values, positions, len(tokens))].tolist())


def cut(tokens: Tokens, **more: Any) -> Any:
    return cut_anchors(
        tokens, hops=((0, 0),), visibility=(), model_id=ModelId(bytes(16)), layout=LAYOUT, key=KEY, **more
    )


@given(st.integers(0, 2**32), st.integers(63, 700), st.sampled_from([2, 5, 2000]))
@settings(max_examples=60, deadline=None)
def test_landmarks_are_the_minima_of_all_whole_windows(seed: int, count: int, words: int) -> None:
    """Against the definition, on k-grams rather than fingerprints, also where tokens repeat."""
    tokens = text(seed, count, words)
    hashes = (kgram_hashes(tokens, KGRAM_TOKENS, _key_words(KEY)) >> np.uint64(32)).tolist()
    window = min(LANDMARK_WINDOW, len(hashes))
    assert of(tokens) == {min(hashes[at : at + window]) for at in range(len(hashes) - window + 1)}


@given(st.integers(0, 2**32), st.integers(0, 900), st.integers(0, 900), st.sampled_from([3, 2000]))
@settings(max_examples=60, deadline=None)
def test_equal_runs_meet_at_a_landmark(seed: int, before: int, behind: int, words: int) -> None:
    """Of the prompt, and of some anchor of the donor, however both are cut."""
    run = text(seed, LANDMARK_TOKENS_MIN, words)
    donor = np.concatenate((text(seed + 1, before), run, text(seed + 2, 900 - behind)))
    prompt = np.concatenate((text(seed + 3, behind), run, text(seed + 4, before)))
    told = {value for segment in cut(donor) for value in segment.landmarks}
    assert of(prompt) & told & of(run)


def test_how_often_shorter_runs_meet() -> None:
    """The figures in the docstring of the module; random tokens, runs at random places of 700 and 900 tokens."""
    rng = np.random.default_rng(5)
    share = {}
    for length in (200, 128, 64):
        met = 0
        for seed in range(150):
            run = text(seed, length)
            prompt, donor = (
                np.concatenate((text(seed + salt, at), run, text(seed + salt + 500, 900 - length - at)))
                for salt, at in ((1000, int(rng.integers(100, 600))), (3000, int(rng.integers(100, 600))))
            )
            met += bool(of(prompt) & of(donor) & set(fingerprints(run, KEY)[0].tolist()))
        share[length] = met / 150
    assert share[200] >= 0.75 and share[128] >= 0.4 and share[64] >= 0.12, share
    assert share[200] > share[128] > share[64]


def test_anchors_have_few_and_names_are_among_them() -> None:
    tokens = text(1, 8192)
    segments = cut(tokens)
    assert 3 <= np.mean([len(segment.landmarks) for segment in segments]) <= 5
    assert all(set(segment.landmarks) <= set(np.frombuffer(segment.meta.fingerprints, "<u4")) for segment in segments)
    marks = content_marks(tokens[:100], [(20, 50)], KEY)
    named = cut(tokens[:100], marks=marks)[0]
    assert {mark.fingerprint for mark in marks} <= set(named.landmarks) and len(named.landmarks) <= LANDMARKS_MAX


def test_a_pulled_part_tells_its_landmarks_and_names() -> None:
    tokens = text(2, 512)
    told = np.union1d(fingerprints(tokens, KEY)[0], [7]).astype("<u4").tobytes()
    assert set(landmarks_of(tokens, KEY, told)) == of(tokens) | {7}
    assert landmarks_of(tokens[:40], KEY, b"") == ()
