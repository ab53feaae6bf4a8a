"""Seeds: short equal stretches found by hash, and how they grow to maximal equal stretches. Shared by `runs` and
`alignment`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcomm_p2p.planning.chains import TokenIds
from kvcomm_p2p.protocol.kgrams import kgram_hashes

_I64 = npt.NDArray[np.int64]
_U64 = npt.NDArray[np.uint64]

SEED_TOKENS = 8
"""Grams at every 8th prompt position: an equal stretch of 15 tokens holds one of them."""

_LONG = 4 * SEED_TOKENS
_PLACES_MAX = 4
"""A gram that stands at more places of the donor than this says too little; four of them in a row are looked up as one, and
if that stands at too many places too, one of them is chosen.
"""

_REPETITIVE_MIN = 2 * SEED_TOKENS
"""With more than one match for so many prompt tokens the text is repetitive, and shorter ones stand anywhere: left out."""

_SEED_WORDS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F], dtype=np.uint64)


class Matches(NamedTuple):
    """Equal stretches: prompt[starts + i] == donor[donor_starts + i] for 0 <= i < lengths; int64 arrays of one length.

    Here `donor_starts` count from the donor's first token.
    """

    starts: _I64
    donor_starts: _I64
    lengths: _I64


def seed_hashes(tokens: TokenIds, k: int) -> _U64:
    """Hashes of all k-grams, uint64 [T - k + 1] (empty when T < k), k a power of two. Unkeyed: they stay in this process."""
    return kgram_hashes(tokens, k, _SEED_WORDS)


class GramIndex:
    """The places of every k-gram of a sequence, by hash. Read only after it is built.

    Sorted words of hash bits above position bits: one sort, and a gram's places ascend. What is found by hash may be a
    collision; compare ids.
    """

    def __init__(self, hashes: _U64) -> None:
        """`hashes`: `seed_hashes` of the sequence."""
        self._low_bits = np.uint64((1 << len(hashes).bit_length()) - 1)
        self._words = np.sort((hashes & ~self._low_bits) | np.arange(len(hashes), dtype=np.uint64))

    def find(self, hashes: _U64) -> tuple[_I64, _I64]:
        """For each hash: rank of its first place, and how many there are."""
        low = np.searchsorted(self._words, hashes & ~self._low_bits)
        return low, np.searchsorted(self._words, hashes | self._low_bits, side="right") - low

    def places(self, ranks: _I64) -> _I64:
        """Positions in the sequence of the places with these ranks."""
        return (self._words[ranks] & self._low_bits).astype(np.int64)

    def pairs(self, low: _I64, counts: _I64) -> tuple[_I64, _I64]:
        """All places of several grams, as found by `find`: index of the gram, position; ordered by both."""
        total = int(counts.sum())
        ranks = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.repeat(np.arange(len(counts)), counts), self.places(np.repeat(low, counts) + ranks)

    def following(self, gram: int, low: int, count: int, target: int) -> int:
        """The first place at or after `target` of a gram of this hash, which has `count` > 0 places from rank `low` on; the
        first of all if there is none.
        """
        wanted = np.uint64(min(max(target, 0), int(self._low_bits)))
        rank = int(np.searchsorted(self._words, (np.uint64(gram) & ~self._low_bits) | wanted))
        return int(self._words[rank if rank < low + count else low] & self._low_bits)


def equal_ahead(a: TokenIds, b: TokenIds, at_a: _I64, at_b: _I64, limits: _I64 | None = None) -> _I64:
    """For each pair of positions, how many tokens of `a` and `b` from there on are equal, at most `limits` (default: to
    the nearer end; limits beyond it are not allowed). Compares in growing windows: time follows the sum of the answers.
    """
    equal = np.zeros(len(at_a), dtype=np.int64)
    if limits is None:
        limits = np.minimum(len(a) - at_a, len(b) - at_b)
    alive, window = np.flatnonzero(limits > 0), 16
    while len(alive):
        offsets = equal[alive, None] + np.arange(window)
        inside = offsets < limits[alive, None]
        left = a[np.minimum(at_a[alive, None] + offsets, len(a) - 1)]
        right = b[np.minimum(at_b[alive, None] + offsets, len(b) - 1)]
        same = (left == right) & inside
        whole = same.all(axis=1)
        equal[alive] += np.where(whole, window, np.argmin(same, axis=1))
        alive = alive[whole]
        window = min(2 * window, max(16, (1 << 18) // max(1, len(alive))))
    return equal


class MatchFinder:
    """Maximal equal stretches of one prompt in many donors. Holds the prompt's hashes, no other state."""

    def __init__(self, prompt: TokenIds) -> None:
        """`prompt`: uint32 [T], kept, not copied."""
        self._prompt = prompt
        self._hashes = seed_hashes(prompt, SEED_TOKENS)[::SEED_TOKENS].copy()

    def find(self, donor: TokenIds, donor_start: int) -> Matches:
        """Maximal equal stretches, at most one of any prompt position and shift; no particular order.

        Every one of at least 15 tokens that holds a gram standing at few places of the donor. In repetitive text, where
        there would be too many, only those of at least 16 tokens; and where all grams stand at many places, only those of
        at least 63 tokens, with one place for each: where it continues what is before, else at the prompt's own position
        (`donor_start`: position of donor[0]). Time grows with T + S, whatever the text.
        """
        if min(len(self._prompt), len(donor)) < SEED_TOKENS:
            empty = np.empty(0, np.int64)
            return Matches(empty, empty, empty)
        found = self._find(donor, donor_start)
        if len(found.starts) * _REPETITIVE_MIN <= len(self._prompt):
            return found
        return _of_at_least(found, _REPETITIVE_MIN)

    def _find(self, donor: TokenIds, donor_start: int) -> Matches:
        index = GramIndex(seed_hashes(donor, SEED_TOKENS))
        low, counts = index.find(self._hashes)
        seeds = _seeds_of(index, np.arange(len(counts)), low, counts)
        rows = len(counts) // 4
        frequent = (counts[: rows * 4] > _PLACES_MAX).reshape(rows, 4).all(axis=1)
        if len(donor) < _LONG or not frequent.any():
            return grown(self._prompt, donor, *seeds)
        return self._with_frequent(donor, donor_start, seeds, np.flatnonzero(frequent))

    def _with_frequent(self, donor: TokenIds, donor_start: int, seeds: tuple[_I64, _I64], rows: _I64) -> Matches:
        """The matches of `seeds` and of the long grams at prompt positions rows * _LONG."""
        windows = self._prompt[(rows * _LONG)[:, None] + np.arange(_LONG)]
        ours = seed_hashes(windows.reshape(-1), _LONG)[::_LONG]
        theirs = seed_hashes(donor, _LONG)
        index = GramIndex(theirs)
        low, counts = index.find(ours)
        longer = _seeds_of(index, rows, low, counts, _LONG)
        found = grown(self._prompt, donor, *map(np.concatenate, zip(seeds, longer, strict=True)))
        left = np.flatnonzero((counts > _PLACES_MAX) & ~_covered(found, rows * _LONG))
        if not len(left):
            return found
        at = rows[left] * _LONG
        order = np.argsort(found.starts, kind="stable")
        before = np.append(-donor_start, (found.donor_starts - found.starts)[order])
        shifts = before[np.searchsorted(found.starts[order], at, side="right")]
        places = _followed(index, theirs, ours[left], low[left], counts[left], at, shifts, donor_start)
        extra = grown(self._prompt, donor, *_in_short(at, places, _LONG))
        return Matches(*map(np.concatenate, zip(found, extra, strict=True)))


def _seeds_of(index: GramIndex, grams: _I64, low: _I64, counts: _I64, tokens: int = SEED_TOKENS) -> tuple[_I64, _I64]:
    """Seeds (prompt position, donor position) of the grams, of `tokens` tokens each, that stand at few places; the prompt has
    them at grams * tokens.
    """
    which, places = index.pairs(low, np.where(counts <= _PLACES_MAX, counts, 0))
    return _in_short(grams[which] * tokens, places, tokens)


def _in_short(at_prompt: _I64, at_donor: _I64, tokens: int) -> tuple[_I64, _I64]:
    """Seeds of `tokens` tokens as rows of seeds of SEED_TOKENS tokens."""
    steps = np.arange(0, tokens, SEED_TOKENS)
    return (at_prompt[:, None] + steps).reshape(-1), (at_donor[:, None] + steps).reshape(-1)


def _followed(
    index: GramIndex, theirs: _U64, ours: _U64, low: _I64, counts: _I64, at: _I64, before: _I64, donor_start: int
) -> _I64:
    """One donor place for each frequent gram: on the diagonal of the gram before it or, where a row of grams begins, of the
    match before it (`before`: shifts); else at the prompt's own position; else the next place behind that diagonal.
    """
    donor_hashes, places = theirs.tolist(), []
    position, shift = -2 * _LONG, 0
    for gram, first, count, here, other in zip(
        ours.tolist(), low.tolist(), counts.tolist(), at.tolist(), before.tolist(), strict=True
    ):
        if here != position + _LONG:
            shift = other
        position = here
        for there in (here + shift, here - donor_start):
            if 0 <= there < len(donor_hashes) and donor_hashes[there] == gram:
                break
        else:
            there = index.following(gram, first, count, here + shift)
        shift = there - here
        places.append(there)
    return np.array(places, dtype=np.int64)


def grown(prompt: TokenIds, donor: TokenIds, at_prompt: _I64, at_donor: _I64) -> Matches:
    """Seeds of SEED_TOKENS tokens, at prompt positions that are multiples of it, grown to maximal matches, each once.

    Pairs whose tokens differ (collisions) are dropped. A seed grows only to the next one on its diagonal, where both
    become one, so nothing is compared twice.
    """
    offsets = np.arange(SEED_TOKENS)
    same = (prompt[at_prompt[:, None] + offsets] == donor[at_donor[:, None] + offsets]).all(axis=1)
    bits = len(prompt).bit_length()
    codes = np.unique(((at_donor - at_prompt + len(prompt))[same] << bits) | at_prompt[same])
    fresh = np.diff(codes, prepend=-1, append=-1) != SEED_TOKENS
    begins, lasts = codes[fresh[:-1]], codes[fresh[1:]]
    shifts = (begins >> bits) - len(prompt)
    starts = begins & ((1 << bits) - 1)
    ends = (lasts & ((1 << bits) - 1)) + SEED_TOKENS
    if not len(starts):
        return Matches(starts, starts, starts)
    follows = np.append(shifts[1:] == shifts[:-1], False)
    room = np.minimum(len(prompt) - ends, len(donor) - ends - shifts)
    ahead = np.where(follows, np.append(starts[1:], 0) - ends, room)
    forward = equal_ahead(prompt, donor, ends, ends + shifts, ahead)
    joined = follows & (forward == ahead)
    leads = np.flatnonzero(~np.append(False, joined[:-1]))
    behind = np.minimum(starts, starts + shifts)[leads]
    backward = equal_ahead(
        prompt[::-1], donor[::-1], len(prompt) - starts[leads], len(donor) - (starts + shifts)[leads], behind
    )
    first = starts[leads] - backward
    return Matches(first, first + shifts[leads], (ends + forward)[~joined] - first)


def _of_at_least(found: Matches, length_min: int) -> Matches:
    long = found.lengths >= length_min
    return Matches(found.starts[long], found.donor_starts[long], found.lengths[long])


def _covered(found: Matches, at: _I64) -> npt.NDArray[np.bool_]:
    """Whether the long gram at each prompt position lies wholly in one of the matches."""
    if not len(found.starts):
        return np.zeros(len(at), dtype=np.bool_)
    order = np.argsort(found.starts, kind="stable")
    reached = np.maximum.accumulate((found.starts + found.lengths)[order])
    before = np.searchsorted(found.starts[order], at, side="right") - 1
    covered: npt.NDArray[np.bool_] = (before >= 0) & (reached[np.maximum(before, 0)] >= at + _LONG)
    return covered
