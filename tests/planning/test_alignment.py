"""The position map: its invariants on any text, what it must find, what it must choose, and that its time stays bounded."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_cases import Tokens, joined, words

from kvcomm_p2p.planning.alignment import Aligner, Alignment, Piece, align, chains
from kvcomm_p2p.planning.gaps import filled
from kvcomm_p2p.planning.runs import find_runs
from kvcomm_p2p.planning.seeds import Matches


def check(prompt: Tokens, donor: Tokens, alignment: Alignment, donor_start: int = 0) -> None:
    """Everything that `Alignment` promises."""
    positions, pieces = alignment.positions, alignment.pieces
    assert positions.shape == prompt.shape and positions.dtype == np.int64 and not positions.flags.writeable
    mapped = positions >= 0
    assert np.array_equal(prompt[mapped], donor[positions[mapped] - donor_start])
    drawn = np.full(len(prompt), -1)
    for number, piece in enumerate(pieces):
        assert piece.length >= 4 and piece.donor_start >= donor_start
        assert (drawn[piece.start : piece.end] == -1).all()
        drawn[piece.start : piece.end] = np.arange(piece.donor_start, piece.donor_end)
        for growing in (piece.end, piece.donor_end), (piece.start - 1, piece.donor_start - 1):
            assert not can_grow(prompt, donor, pieces, number, *growing, donor_start)
    assert np.array_equal(drawn, positions)
    assert [piece.start for piece in pieces] == sorted(piece.start for piece in pieces)
    assert alignment.matched == mapped.sum()


def can_grow(
    prompt: Tokens, donor: Tokens, pieces: tuple[Piece, ...], number: int, at: int, there: int, donor_start: int
) -> bool:
    """Whether piece `number` could take in prompt position `at`, to be filled from `there`."""
    if not (0 <= at < len(prompt) and 0 <= there - donor_start < len(donor)):
        return False
    piece = pieces[number]
    for other in (pieces[number - 1] if number else None, pieces[number + 1] if number + 1 < len(pieces) else None):
        if other is None:
            continue
        ascends = other.donor_start >= piece.donor_end or other.donor_end <= piece.donor_start
        if other.start <= at < other.end or (ascends and other.donor_start <= there < other.donor_end):
            return (other.end, other.donor_end) == (at + 1, there + 1) or (other.start, other.donor_start) == (
                at,
                there,
            )
    return bool(prompt[at] == donor[there - donor_start])


@st.composite
def related(draw: st.DrawFn) -> tuple[Tokens, Tokens]:
    """Two texts put together from the same pieces, some of them repetitive, with noise in between."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    alphabet = draw(st.sampled_from([1, 2, 3, 10, 50_000]))
    pieces = [rng.integers(0, alphabet, draw(st.integers(1, 90))) for _ in range(draw(st.integers(1, 4)))]
    pieces.append(np.tile(rng.integers(0, alphabet, draw(st.integers(1, 9))), draw(st.integers(1, 60))))

    def text() -> Tokens:
        parts = [np.empty(0, np.int64)]
        for index in draw(st.lists(st.integers(0, len(pieces) - 1), max_size=12)):
            parts += [pieces[index], rng.integers(0, alphabet, draw(st.sampled_from([0, 1, 7])))]
        return np.concatenate(parts).astype(np.uint32)

    return text(), text()


def edited(seed: int, donor: Tokens, keep: int = 72, burst: int = 8) -> tuple[Tokens, np.ndarray]:
    """`donor` with runs replaced, inserted and deleted, and each token's true donor position or -1."""
    rng = np.random.default_rng(seed)
    parts, truth, at = [], [], 0
    while at < len(donor):
        end = min(len(donor), at + int(rng.geometric(1 / keep)))
        parts.append(donor[at:end])
        truth.append(np.arange(at, end))
        length, kind = int(rng.geometric(1 / burst)), int(rng.integers(3))
        if kind != 1:
            parts.append(rng.integers(60_000, 90_000, length))
            truth.append(np.full(length, -1))
        at = end + (length if kind else 0)
    return joined(*parts), np.concatenate(truth)


@settings(max_examples=200, deadline=None)
@given(related(), st.sampled_from([0, 1, 40, 700]), st.sampled_from([1, 8, 20]), st.sampled_from([0, 5, 32]))
def test_invariants_hold_on_any_text(texts: tuple[Tokens, Tokens], donor_start: int, piece_min: int, gap: int) -> None:
    prompt, donor = texts
    alignment = align(prompt, donor, donor_start=donor_start, piece_min=piece_min, gap_max=gap)
    check(prompt, donor, alignment, donor_start)
    for chain in chains(alignment, gap_max=gap):
        assert max(piece.length for piece in chain.pieces) >= piece_min
    again = align(prompt.copy(), donor.copy(), donor_start=donor_start, piece_min=piece_min, gap_max=gap)
    assert again.pieces == alignment.pieces


@settings(max_examples=60, deadline=None)
@given(related(), st.integers(0, 64))
def test_chains_partition_the_pieces_and_are_maximal(texts: tuple[Tokens, Tokens], gap_max: int) -> None:
    alignment = align(*texts)
    found = chains(alignment, gap_max=gap_max)
    assert tuple(piece for chain in found for piece in chain.pieces) == alignment.pieces

    def linked(before: Piece, after: Piece) -> bool:
        gaps = after.start - before.end, after.donor_start - before.donor_end
        return min(gaps) >= 0 and max(gaps) <= gap_max

    for chain in found:
        assert all(linked(*pair) for pair in pairwise(chain.pieces))
        mapped = alignment.positions[chain.start : chain.end] >= 0
        assert chain.matched == mapped.sum()
        assert sum(end - start for start, end in chain.holes) == (~mapped).sum()
        assert (chain.donor_start, chain.donor_end) == (chain.pieces[0].donor_start, chain.pieces[-1].donor_end)
    assert not any(linked(a.pieces[-1], b.pieces[0]) for a, b in pairwise(found))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 300))
def test_everything_that_runs_find_is_mapped_in_text_that_does_not_repeat(seed: int, donor_start: int) -> None:
    rng = np.random.default_rng(seed)
    blocks = [words(seed + number, int(rng.integers(17, 120))) for number in range(6)]

    def text() -> Tokens:
        return joined(*(part for i in rng.permutation(6) for part in (blocks[i], rng.integers(0, 50_000, 3))))

    prompt, donor = text(), text()
    alignment = align(prompt, donor, donor_start=donor_start)
    check(prompt, donor, alignment, donor_start)
    for run in find_runs(prompt, donor, donor_start=donor_start, length_min=17):
        expected = np.arange(run.donor_start, run.donor_start + run.length)
        assert np.array_equal(alignment.positions[run.prompt_start : run.prompt_end], expected)


@pytest.mark.parametrize("donor_start", [0, 96])
@pytest.mark.parametrize("period", [1, 2, 3, 7, 100, None])
def test_a_prompt_equal_to_its_donor_maps_to_itself(period: int | None, donor_start: int) -> None:
    text = words(3, 700) if period is None else np.tile(words(3, period), 700)[:700]
    alignment = align(text, text, donor_start=donor_start)
    assert alignment.pieces == (Piece(0, donor_start, 700),)
    same_place = align(text[donor_start:], text)
    if period is None:
        assert same_place.pieces == (Piece(0, donor_start, 700 - donor_start),)
    else:
        assert same_place.matched == 700 - donor_start


def test_inserted_deleted_replaced_and_moved_blocks() -> None:
    a, b, c, d, e = (words(seed, 40) for seed in range(5))
    new = words(9, 20)
    donor = joined(a, b, c, d, e)
    alignment = align(joined(c, a, new, b, new[:9], e), donor, donor_start=1000)
    assert alignment.pieces == (
        Piece(0, 1080, 40),
        Piece(40, 1000, 40),
        Piece(100, 1040, 40),
        Piece(149, 1160, 40),
    )
    assert [(chain.start, chain.end, chain.holes) for chain in chains(alignment)] == [
        (0, 40, ()),
        (40, 140, ((80, 100),)),
        (149, 189, ()),
    ]
    assert len(chains(alignment, gap_max=19)) == 4
    assert [chain.matched for chain in chains(alignment, gap_max=80)] == [40, 120]


@pytest.mark.parametrize(("keep", "burst", "share"), [(72, 8, 0.99), (20, 8, 0.97), (18, 2, 0.96)])
def test_nearly_all_of_an_edit_script_is_recovered(keep: int, burst: int, share: float) -> None:
    donor = words(1, 8000)
    prompt, truth = edited(2, donor, keep, burst)
    third = len(prompt) // 3
    order = np.r_[third : 2 * third, 0:third, 2 * third : len(prompt)]
    prompt, truth = prompt[order], truth[order]
    alignment = align(prompt, donor)
    check(prompt, donor, alignment)
    mapped = alignment.positions >= 0
    assert (alignment.positions[mapped] == truth[mapped]).mean() > 0.999
    assert mapped.sum() >= share * (truth >= 0).sum()


def test_short_equal_stretches_are_found_in_gaps_and_nowhere_else() -> None:
    a, b, noise = words(1, 50), words(2, 50), [words(seed, 9) for seed in range(10, 18)]
    six, three = np.arange(90_000, 90_006), np.arange(91_000, 91_003)
    donor = joined(a, noise[0], six, noise[1], three, noise[2], b)
    prompt = joined(a, noise[3], six, noise[4], three, noise[5], b)
    assert [(piece.start, piece.length) for piece in align(prompt, donor).pieces] == [(0, 50), (59, 6), (86, 50)]
    outside = align(joined(six, noise[6], a), joined(six, noise[7], a))
    assert [(piece.start, piece.length) for piece in outside.pieces] == [(15, 50)]


def test_a_short_stretch_far_from_its_neighbours_is_dropped() -> None:
    a, b, six = words(1, 50), words(2, 50), np.arange(90_000, 90_006)
    donor = joined(a, words(3, 40), six, words(4, 40), b)
    prompt = joined(a, words(5, 40), six, words(6, 40), b)
    assert [piece.length for piece in align(prompt, donor).pieces] == [50, 50]
    assert [piece.length for piece in align(prompt, donor, gap_max=40).pieces] == [50, 6, 50]
    assert [piece.length for piece in align(prompt, donor, piece_min=6).pieces] == [50, 6, 50]


def test_a_path_is_walked_only_where_it_pays() -> None:
    """A gap too large for the six tokens that it may give stays; the same six in a smaller gap are taken."""
    six = np.arange(90_000, 90_006)

    def pieces_of(size: int) -> int:
        prompt, donor = joined(words(1, size), six, words(2, size)), joined(words(3, size), six, words(4, size))
        ends = Matches(np.array([-1, len(prompt)]), np.array([-1, len(donor)]), np.array([1, 1]))
        return len(filled(prompt, donor, ends).starts)

    assert (pieces_of(100), pieces_of(400), pieces_of(1100)) == (3, 2, 2)


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_of_equal_copies_the_one_between_the_neighbours_is_taken(wanted: int) -> None:
    copy, parts = words(1, 30), [words(seed, 40) for seed in range(2, 6)]
    donor = joined(parts[0], copy, parts[1], copy, parts[2], copy, parts[3])
    before, after = parts[wanted], parts[wanted + 1]
    prompt = joined(before, words(7, 5), copy, words(8, 5), after)
    start = 70 * wanted
    assert align(prompt, donor).pieces == (Piece(0, start, 40), Piece(45, start + 40, 30), Piece(80, start + 70, 40))


def test_of_equal_copies_without_neighbours_the_one_at_the_own_position_is_taken() -> None:
    copy = words(1, 60)
    donor = joined(words(2, 100), copy, words(3, 140), copy)
    prompt = joined(words(4, 300), copy)
    assert align(prompt, donor, donor_start=200).pieces == (Piece(300, 300, 60),)
    assert align(prompt, donor).pieces == (Piece(300, 300, 60),)
    assert align(prompt, donor, donor_start=190).pieces == (Piece(300, 290, 60),)


def test_of_copies_close_by_the_one_at_the_neighbours_shift_is_taken() -> None:
    before, copy, noise = words(1, 60), words(2, 20), words(3, 4)
    donor = joined(before, copy, noise, copy, words(4, 50))
    assert align(joined(before, words(5, 24), copy), donor).pieces == (Piece(0, 0, 60), Piece(84, 84, 20))


def test_a_slightly_longer_copy_elsewhere_does_not_break_a_chain() -> None:
    before, copy, after, tail = words(1, 60), words(2, 20), words(3, 60), words(4, 6)
    donor = joined(before, copy, after, words(5, 10), copy, tail, words(6, 10))
    prompt = joined(before, copy, tail, after)
    alignment = align(prompt, donor)
    assert alignment.pieces[0] == Piece(0, 0, 80)
    assert len(chains(alignment)) == 1


def test_a_foreign_block_in_a_hole_must_be_worth_two_jumps() -> None:
    before, after, noise = words(1, 60), words(2, 60), words(3, 50)
    for tokens, pieces in ((15, 2), (17, 3)):
        block = words(4, tokens)
        donor = joined(before, words(5, 4), after, noise, block)
        assert len(align(joined(before, block, after), donor).pieces) == pieces
        apart = joined(before, words(6, 20), block, words(7, 20), after)
        assert len(align(apart, donor).pieces) == 3


def test_a_much_longer_copy_elsewhere_does() -> None:
    before, copy, after, tail = words(1, 60), words(2, 20), words(3, 60), words(4, 60)
    donor = joined(before, copy, after, words(5, 10), copy, tail, words(6, 10))
    alignment = align(joined(before, copy, tail, after), donor)
    assert alignment.matched == 200
    assert [(chain.donor_start, chain.donor_end) for chain in chains(alignment)] == [(0, 80), (170, 230), (80, 140)]


def test_donor_positions_serve_every_copy_in_the_prompt() -> None:
    text = words(1, 50)
    prompt = joined(*[text] * 30)
    alignment = align(prompt, text, donor_start=7)
    assert alignment.pieces == tuple(Piece(50 * copy, 7, 50) for copy in range(30))
    assert len(chains(alignment)) == 30


@pytest.mark.parametrize("copies", [3, 6, 20])
def test_paragraphs_that_stand_often_on_both_sides_are_all_mapped(copies: int) -> None:
    rng = np.random.default_rng(1)
    paragraphs = [words(seed, 70) for seed in range(5)]

    def text() -> Tokens:
        return joined(*(paragraphs[i] for i in rng.permutation(np.repeat(np.arange(5), copies))))

    prompt, donor = text(), text()
    alignment = align(prompt, donor)
    check(prompt, donor, alignment)
    assert alignment.matched >= 0.99 * len(prompt)


def test_an_aligner_serves_many_donors() -> None:
    prompt, donors = words(1, 500), [joined(words(seed, 100), words(1, 500)[seed : seed + 200]) for seed in range(5)]
    aligner = Aligner(prompt)
    for donor in donors:
        assert aligner.align(donor, donor_start=3).pieces == align(prompt, donor, donor_start=3).pieces != ()


@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_less_than_a_seed_maps_nothing(tokens: int) -> None:
    short, long = words(1, tokens), joined(words(1, tokens), words(2, 100))
    for prompt, donor in ((short, short), (short, long), (long, short)):
        alignment = align(prompt, donor)
        assert alignment.pieces == () == chains(alignment)
        assert (alignment.positions == np.full(len(prompt), -1)).all()


def test_impossible_arguments_are_refused() -> None:
    text = words(1, 10)
    for call in (
        lambda: align(text, text, piece_min=0),
        lambda: align(text, text, gap_max=-1),
        lambda: align(text, text, donor_start=-1),
    ):
        with pytest.raises(ValueError, match="must"):
            call()


def repetitive_cases(tokens: int) -> dict[str, tuple[Tokens, Tokens, int]]:
    """Prompt, donor and donor_start of texts that hold seeds in quadratic number, or none."""
    rng = np.random.default_rng(4)
    one = np.full(tokens, 7, np.uint32)
    two = np.tile(np.array([1, 2], np.uint32), tokens // 2)
    text = words(5, tokens)
    paragraph = words(6, 70)

    def alphabet(size: int) -> Tokens:
        return rng.integers(0, size, tokens).astype(np.uint32)

    def islands() -> Tokens:
        sizes = rng.integers(20, 400, tokens // 200)
        return joined(*(np.append(one[:size], rng.integers(100, 40_000, 3)) for size in sizes.tolist()))

    def often() -> Tokens:
        return joined(*(np.append(paragraph, rng.integers(0, 1000, 5)) for _ in range(tokens // 75)))

    return {
        "one token": (one, one, 0),
        "one token, far away": (one, one, tokens),
        "one token, short donor": (one, one[:100], 0),
        "one token, short prompt": (one[:100], one, 0),
        "period 2": (two, two, 0),
        "period 2, out of phase": (two, two[1:], 0),
        "period 1000": (np.tile(text[:1000], tokens // 1000), np.tile(text[:1000], tokens // 1000), 0),
        "equal": (text, text, 0),
        "different": (text, text + 50_000, 0),
        "two letters": (alphabet(2), alphabet(2), 0),
        "three letters": (alphabet(3), alphabet(3), 0),
        "four letters": (alphabet(4), alphabet(4), 0),
        "islands": (islands(), islands(), 0),
        "one paragraph": (often(), often(), 0),
        "empty": (one[:0], text, 0),
        "one": (one[:1], text, 0),
    }


def best_cpu_s(work: Callable[[], object], tries: int = 5) -> float:
    """The least processor time of this thread that one call took."""
    times = []
    for _ in range(tries):
        started = time.thread_time()
        work()
        times.append(time.thread_time() - started)
    return min(times)


@pytest.mark.parametrize("name", sorted(repetitive_cases(2000)))
def test_time_stays_bounded_on_repetitive_text(name: str) -> None:
    tokens = 32_000
    donor = words(1, tokens)
    prompt, _ = edited(2, donor)
    normal_s = best_cpu_s(lambda: align(prompt, donor))
    text, other, donor_start = repetitive_cases(tokens)[name]
    alignment = align(text, other, donor_start=donor_start)
    mapped = alignment.positions >= 0
    assert np.array_equal(text[mapped], other[alignment.positions[mapped] - donor_start])
    assert best_cpu_s(lambda: align(text, other, donor_start=donor_start)) <= 6 * normal_s


@pytest.mark.parametrize("name", ["one token", "period 2", "islands", "one paragraph", "equal"])
def test_repetitive_text_is_mapped_where_it_can_be(name: str) -> None:
    text, other, donor_start = repetitive_cases(8000)[name]
    alignment = align(text, other, donor_start=donor_start)
    check(text, other, alignment, donor_start)
    assert alignment.matched >= 0.9 * len(text)
