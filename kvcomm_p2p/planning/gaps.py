"""Short equal stretches between two pieces that follow each other in prompt and donor, on a shortest edit path."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from rapidfuzz.distance import Indel

from kvcomm_p2p.planning.chains import TokenIds
from kvcomm_p2p.planning.covering import CRUMB_TOKENS
from kvcomm_p2p.planning.seeds import Matches

_I64 = npt.NDArray[np.int64]
_U64 = npt.NDArray[np.uint64]

_PATH_TOKENS_MAX = 2048
"""Longer gaps are left to the seeds: a path costs time with the product of both sides."""

_PATH_CELLS_PER_GRAM = 1 << 16
"""Cells of the edit matrix that one shared gram is worth; 65,536 cost about 10 µs, a recomputed token far more."""


def filled(prompt: TokenIds, donor: TokenIds, pieces: Matches) -> Matches:
    """`pieces` (disjoint and ascending in the prompt) and the equal stretches of at least CRUMB_TOKENS tokens that an
    edit path finds between two of them that ascend in the donor too. Gaps of more than 2,048 tokens on a side, and those
    where a path costs more than its tokens are worth, stay as they are. Inputs are not changed.
    """
    begins, ends = (pieces.starts + pieces.lengths)[:-1], pieces.starts[1:]
    donor_begins, donor_ends = (pieces.donor_starts + pieces.lengths)[:-1], pieces.donor_starts[1:]
    sizes, donor_sizes = ends - begins, donor_ends - donor_begins
    small = (np.minimum(sizes, donor_sizes) >= CRUMB_TOKENS) & (np.maximum(sizes, donor_sizes) <= _PATH_TOKENS_MAX)
    gaps = np.flatnonzero(small)
    shared = _shared_grams(prompt, donor, begins[gaps], sizes[gaps], donor_begins[gaps], donor_sizes[gaps])
    paying = gaps[(sizes * donor_sizes)[gaps] <= shared * _PATH_CELLS_PER_GRAM]
    more: list[tuple[int, int, int]] = []
    for gap in paying.tolist():
        begin, donor_begin = int(begins[gap]), int(donor_begins[gap])
        left = prompt[begin : int(ends[gap])].tolist()
        right = donor[donor_begin : int(donor_ends[gap])].tolist()
        more += [(begin + at, donor_begin + there, length) for at, there, length in _path(left, right)]
    if not more:
        return pieces
    added = np.array(more, dtype=np.int64).T
    starts = np.concatenate((pieces.starts, added[0]))
    order = np.argsort(starts, kind="stable")
    donor_starts = np.concatenate((pieces.donor_starts, added[1]))
    return Matches(starts[order], donor_starts[order], np.concatenate((pieces.lengths, added[2]))[order])


def _path(left: Sequence[int], right: Sequence[int]) -> list[tuple[int, int, int]]:
    """Equal stretches of at least CRUMB_TOKENS on a shortest edit path: (position in left, position in right, length).

    Without replacements, so that the path holds the most equal tokens: those are what a map gains.
    """
    return [
        (code.src_start, code.dest_start, code.src_end - code.src_start)
        for code in Indel.opcodes(left, right)
        if code.tag == "equal" and code.src_end - code.src_start >= CRUMB_TOKENS
    ]


def _shared_grams(
    prompt: TokenIds, donor: TokenIds, begins: _I64, sizes: _I64, donor_begins: _I64, donor_sizes: _I64
) -> _I64:
    """For each gap, how many of its CRUMB_TOKENS-grams in the prompt also stand in its donor side: without one, no path
    can give anything. By hash; a collision costs one path.
    """
    ours, gap_of = _gap_grams(prompt, begins, sizes)
    theirs, _ = _gap_grams(donor, donor_begins, donor_sizes)
    return np.bincount(gap_of[np.isin(ours, theirs)], minlength=len(begins))


def _gap_grams(tokens: TokenIds, begins: _I64, sizes: _I64) -> tuple[_U64, _I64]:
    """Hashes of the grams that lie inside each gap, different for different gaps, and the gap that each is in."""
    counts = sizes - CRUMB_TOKENS + 1
    gap_of = np.repeat(np.arange(len(begins)), counts)
    at = np.arange(len(gap_of)) + np.repeat(begins - (np.cumsum(counts) - counts), counts)
    hashes = gap_of.astype(np.uint64)
    for offset in range(CRUMB_TOKENS):
        hashes = (hashes ^ (hashes >> np.uint64(29))) * np.uint64(0xD6E8FEB86659FD93) + tokens[at + offset]
    return hashes, gap_of
