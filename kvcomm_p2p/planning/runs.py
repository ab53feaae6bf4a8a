"""Where a prompt and a donor hold the same tokens: maximal equal runs, at any offsets.

Seeds and extension: k-grams of the donor at every k-th position are looked up among all k-grams of the prompt; a run of
at least 2k - 1 tokens holds one of them. Seeds are joined along diagonals and extended by comparing ids. In very
repetitive text that would mean millions of seeds; there, a suffix array finds the same runs in bounded time.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvcomm_p2p.planning.chains import TokenIds
from kvcomm_p2p.planning.seeds import GramIndex, equal_ahead, seed_hashes
from kvcomm_p2p.planning.types import Run

_I64 = npt.NDArray[np.int64]

_SEEDS_PER_TOKEN_MAX = 0.5
"""More seed pairs than this go to the suffix array: about the number where that becomes cheaper."""


def find_runs(prompt: TokenIds, donor: TokenIds, *, donor_start: int = 0, length_min: int = 64) -> list[Run]:
    """Maximal equal runs of at least `length_min` tokens between `prompt` (uint32 [T]) and `donor` (uint32 [S]).

    `donor_start`: position of donor[0] in its sequence; runs are given in that sequence's positions. Ordered by
    prompt_start. A run whose prompt stretch lies inside another's is left out (the longest speaks for the stretch), so
    starts and ends both ascend strictly; runs may overlap. Of several donor stretches equal to one and the same prompt
    stretch, the one at the prompt's own position is taken, otherwise any one (always the same for the same input).
    Raises ValueError for length_min < 1.
    """
    return RunFinder(prompt, length_min=length_min).find(donor, donor_start)


class RunFinder:
    """`find_runs` of one prompt against many donors: the prompt is hashed once. Holds no state but the prompt's
    index.
    """

    def __init__(self, prompt: TokenIds, *, length_min: int = 64) -> None:
        """As `find_runs`."""
        if length_min < 1:
            raise ValueError("length_min must be at least 1")
        self._prompt = np.asarray(prompt, np.uint32)
        self._length_min = length_min
        self._k = 1 << (((length_min + 1) // 2).bit_length() - 1)
        self._index = GramIndex(seed_hashes(self._prompt, self._k))

    def find(self, donor: TokenIds, donor_start: int = 0) -> list[Run]:
        """As `find_runs`."""
        donor = np.asarray(donor, np.uint32)
        if min(len(self._prompt), len(donor)) < self._length_min:
            return []
        seeds = self._seeds(donor)
        if seeds is None:
            starts, donor_starts, lengths = _runs_by_suffixes(self._prompt, donor, donor_start)
        else:
            starts, donor_starts, lengths = _extended(self._prompt, donor, *seeds)
        long = lengths >= self._length_min
        starts, donor_starts, lengths = _undominated(starts[long], donor_starts[long], lengths[long], donor_start)
        return [
            Run(donor_start=donor_start + at, prompt_start=start, length=length)
            for start, at, length in zip(starts.tolist(), donor_starts.tolist(), lengths.tolist(), strict=True)
        ]

    def _seeds(self, donor: TokenIds) -> tuple[_I64, _I64] | None:
        """First seed (prompt position, donor position) of every row of seeds on a diagonal; None: too many seeds."""
        k = self._k
        low, counts = self._index.find(seed_hashes(donor, k)[::k])
        if int(counts.sum()) > _SEEDS_PER_TOKEN_MAX * (len(self._prompt) + len(donor)):
            return None
        grams, at_prompt = self._index.pairs(low, counts)
        at_donor = grams * k
        # A seed whose predecessor, k earlier on the diagonal, is a seed too belongs to the same run.
        width = len(donor) + k
        codes = at_prompt * width + at_donor
        first = ~np.isin(codes - k * width - k, codes) | (at_donor < k) | (at_prompt < k)
        return at_prompt[first], at_donor[first]


def _extended(prompt: TokenIds, donor: TokenIds, starts: _I64, donor_starts: _I64) -> tuple[_I64, _I64, _I64]:
    """Seeds grown to maximal runs: (prompt start, donor start, length). A seed by collision gives any length, also
    0.
    """
    forward = equal_ahead(prompt, donor, starts, donor_starts)
    backward = equal_ahead(prompt[::-1], donor[::-1], len(prompt) - starts, len(donor) - donor_starts)
    return starts - backward, donor_starts - backward, forward + backward


def _undominated(starts: _I64, donor_starts: _I64, lengths: _I64, donor_start: int) -> tuple[_I64, _I64, _I64]:
    """Without runs whose prompt stretch lies inside another's; ordered by start."""
    if not len(starts):
        return starts, donor_starts, lengths
    moved = donor_starts + donor_start != starts
    order = np.lexsort((donor_starts, moved, -lengths, starts))
    ends = (starts + lengths)[order]
    reached = np.maximum.accumulate(ends)
    keep = order[np.concatenate(([True], ends[1:] > reached[:-1]))]
    return starts[keep], donor_starts[keep], lengths[keep]


def _runs_by_suffixes(prompt: TokenIds, donor: TokenIds, donor_start: int) -> tuple[_I64, _I64, _I64]:
    """For every prompt position the longest match in the donor that begins there, if it is not the rest of the one
    before.

    Suffixes are sorted by doubling; the longest match of a suffix is with its nearest donor suffix above or below.
    """
    # Two different end marks, so that no match runs over an end.
    text = np.concatenate((prompt.astype(np.int64) + 2, [0], donor.astype(np.int64) + 2, [1]))
    offset = len(prompt) + 1
    levels = _doubled_ranks(text)
    order = np.argsort(levels[-1], kind="stable")
    is_donor = (order >= offset) & (order < len(text) - 1)
    above = np.maximum.accumulate(np.where(is_donor, np.arange(len(order)), -1))
    below = np.minimum.accumulate(np.where(is_donor, np.arange(len(order)), len(order))[::-1])[::-1]
    where = np.empty(len(order), dtype=np.int64)
    where[order] = np.arange(len(order))
    places = where[: len(prompt)]
    positions = np.arange(len(prompt))
    best, length = np.full(len(prompt), offset), np.zeros(len(prompt), dtype=np.int64)
    same_position = np.clip(positions - donor_start, 0, len(donor) - 1) + offset
    for candidate in (
        same_position,
        order[np.maximum(above[places], 0)],
        order[np.minimum(below[places], len(order) - 1)],
    ):
        valid = (candidate >= offset) & (candidate < len(text) - 1)
        matched = np.where(valid, _common_prefix(levels, positions, candidate), 0)
        better = matched > length
        best, length = np.where(better, candidate, best), np.where(better, matched, length)
    fresh = np.concatenate(([True], length[1:] != length[:-1] - 1))
    return positions[fresh], best[fresh] - offset, length[fresh]


def _doubled_ranks(text: _I64) -> list[_I64]:
    """Level j: lexicographic rank of the 2^j tokens at each position (equal exactly when the tokens are)."""
    ranks = _ranks(text)
    levels = [ranks]
    while ranks.max() + 1 < len(text):
        step = 1 << (len(levels) - 1)
        ahead = np.concatenate((ranks[step:] + 1, np.zeros(min(step, len(text)), dtype=np.int64)))
        ranks = _ranks(ranks * (len(text) + 1) + ahead)
        levels.append(ranks)
    return levels


def _ranks(keys: _I64) -> _I64:
    """Rank of each key among the different keys. A stable sort, which is fast on the long ascents of repetitive text."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    ranks = np.empty(len(keys), dtype=np.int64)
    ranks[order] = np.concatenate(([0], np.cumsum(ordered[1:] != ordered[:-1])))
    return ranks


def _common_prefix(levels: list[_I64], a: _I64, b: _I64) -> _I64:
    """Length of the common prefix of the suffixes at `a` and `b`, by descending through the levels."""
    last = len(levels[0]) - 1
    length = np.zeros(len(a), dtype=np.int64)
    for level in range(len(levels) - 1, -1, -1):
        ranks = levels[level]
        equal = ranks[np.minimum(a + length, last)] == ranks[np.minimum(b + length, last)]
        length += np.where(equal, 1 << level, 0)
    return length
