"""find_runs against a brute-force oracle."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcomm_p2p.planning.runs import find_runs

Tokens = npt.NDArray[np.uint32]


def oracle(prompt: Tokens, donor: Tokens, donor_start: int, length_min: int) -> dict[tuple[int, int], set[int]]:
    """(prompt start, length) of every undominated maximal run -> all donor positions where it stands."""
    ahead = np.zeros((len(prompt) + 1, len(donor) + 1), dtype=np.int64)
    for i in range(len(prompt) - 1, -1, -1):
        ahead[i, :-1] = np.where(donor == prompt[i], ahead[i + 1, 1:] + 1, 0)
    runs: dict[tuple[int, int], set[int]] = {}
    reached = 0
    for i in range(len(prompt)):
        longest = int(ahead[i].max())
        if longest >= length_min and i + longest > reached:
            runs[i, longest] = {donor_start + int(j) for j in np.flatnonzero(ahead[i] == longest)}
        reached = max(reached, i + longest)
    return runs


def check(prompt: Tokens, donor: Tokens, donor_start: int, length_min: int) -> int:
    expected = oracle(prompt, donor, donor_start, length_min)
    runs = find_runs(prompt, donor, donor_start=donor_start, length_min=length_min)
    assert [(run.prompt_start, run.length) for run in runs] == sorted(expected)
    for run in runs:
        places = expected[run.prompt_start, run.length]
        assert run.donor_start in places
        if run.prompt_start in places:
            assert run.donor_start == run.prompt_start
    return len(runs)


@st.composite
def related(draw: st.DrawFn) -> tuple[Tokens, Tokens]:
    """Two texts put together from the same pieces, some of them repetitive, with noise in between."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    alphabet = draw(st.sampled_from([1, 2, 3, 10, 50_000]))
    pieces = [rng.integers(0, alphabet, draw(st.integers(1, 90))) for _ in range(draw(st.integers(1, 4)))]
    pieces.append(np.tile(rng.integers(0, alphabet, draw(st.integers(1, 9))), draw(st.integers(1, 30))))

    def text() -> Tokens:
        parts = [np.empty(0, np.int64)]
        for index in draw(st.lists(st.integers(0, len(pieces) - 1), max_size=5)):
            parts += [pieces[index], rng.integers(0, 50_000, draw(st.sampled_from([0, 1, 7])))]
        return np.concatenate(parts).astype(np.uint32)

    return text(), text()


@settings(max_examples=150, deadline=None)
@given(related(), st.integers(0, 40), st.sampled_from([1, 2, 5, 31, 64, 65]))
def test_equals_the_oracle(texts: tuple[Tokens, Tokens], donor_start: int, length_min: int) -> None:
    check(*texts, donor_start, length_min)


@pytest.mark.parametrize("length", [64, 65, 100])
@pytest.mark.parametrize("at_prompt", [0, 1, 31, 32, 300])
@pytest.mark.parametrize("at_donor", [0, 1, 31, 32, 33, 300])
def test_every_run_of_the_minimum_length_is_found(length: int, at_prompt: int, at_donor: int) -> None:
    rng = np.random.default_rng(length * 1000 + at_prompt * 7 + at_donor)
    prompt = rng.integers(0, 1000, 500).astype(np.uint32)
    donor = rng.integers(1000, 2000, 500).astype(np.uint32)
    donor[at_donor : at_donor + length] = prompt[at_prompt : at_prompt + length]
    runs = find_runs(prompt, donor, donor_start=64)
    assert [(run.prompt_start, run.donor_start, run.length) for run in runs] == [(at_prompt, at_donor + 64, length)]
    short = donor.copy()
    short[at_donor + 63 : at_donor + length] = 9999
    assert find_runs(prompt, short) == []


@pytest.mark.parametrize("prompt_tokens,donor_tokens", [(600, 600), (600, 100), (100, 600)])
@pytest.mark.parametrize("period", [1, 2, 7, 33])
def test_repetitive_text(prompt_tokens: int, donor_tokens: int, period: int) -> None:
    text = np.tile(np.arange(period), 600 // period + 1).astype(np.uint32)
    assert check(text[:prompt_tokens], text[:donor_tokens], 0, 64) >= 1


def test_many_copies_of_one_paragraph() -> None:
    rng = np.random.default_rng(5)
    paragraph = rng.integers(0, 1000, 70)

    def copies() -> Tokens:
        return np.concatenate([np.append(paragraph, rng.integers(0, 1000, 5)) for _ in range(20)]).astype(np.uint32)

    assert check(copies(), copies(), 0, 64) >= 20


def test_16k_repeated_tokens_stay_cheap_and_right() -> None:
    text = np.full(16_000, 7, np.uint32)
    runs = find_runs(text, text, donor_start=0)
    assert [(run.prompt_start, run.donor_start, run.length) for run in runs] == [(0, 0, 16_000)]


def test_empty_and_short_inputs_hold_no_runs() -> None:
    empty, short = np.empty(0, np.uint32), np.arange(63, dtype=np.uint32)
    assert find_runs(empty, short) == []
    assert find_runs(short, empty) == []
    assert find_runs(short, short) == []
    assert len(find_runs(short, short, length_min=63)) == 1


def test_a_minimum_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        find_runs(np.zeros(1, np.uint32), np.zeros(1, np.uint32), length_min=0)
