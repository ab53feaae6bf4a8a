"""Where each prompt token stands in a donor: the position map of two token sequences, with its pieces and chains.

Seeds and extension find equal stretches wherever they stand (`seeds`), a cover decides which of them speaks for which
token (`covering`), and between two that follow each other in prompt and donor an edit-distance path finds the short
ones (`gaps`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvcomm_p2p.planning.chains import TokenIds
from kvcomm_p2p.planning.covering import cover
from kvcomm_p2p.planning.gaps import filled
from kvcomm_p2p.planning.seeds import Matches, MatchFinder, equal_ahead

_I64 = npt.NDArray[np.int64]

GAP_TOKENS_MAX = 32
"""Pieces with at most this many tokens between them, in prompt and in donor, belong to one chain."""

PIECE_TOKENS_MIN = 8
"""Shorter pieces count only in a chain with a longer one."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Equal tokens: prompt position start + i holds the token of the donor sequence's position donor_start + i, for
    0 <= i < length.
    """

    start: int
    donor_start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def donor_end(self) -> int:
        return self.donor_start + self.length

    @property
    def shift(self) -> int:
        """Donor position minus prompt position."""
        return self.donor_start - self.start


@dataclass(frozen=True)
class Alignment:
    """The outcome of `align`, for a prompt of T tokens. Immutable.

    `positions` (int64 [T], read only): the position in the donor's sequence that holds the same token, or -1. `pieces`: the
    same map as stretches, ascending in the prompt and disjoint there; donor positions may occur in several. They are
    maximal: where a piece ends the tokens differ, or a sequence ends, or its neighbour begins, in the prompt or (if it
    ascends there too) in the donor. Neighbours never continue each other.
    """

    positions: _I64
    pieces: tuple[Piece, ...]

    @cached_property
    def matched(self) -> int:
        """How many prompt tokens have a donor position."""
        return sum(piece.length for piece in self.pieces)


@dataclass(frozen=True)
class Chain:
    """Pieces that ascend in prompt and donor with small gaps: one reused run with holes. At least one piece."""

    pieces: tuple[Piece, ...]

    @property
    def start(self) -> int:
        """First prompt position."""
        return self.pieces[0].start

    @property
    def end(self) -> int:
        """Prompt position after the last."""
        return self.pieces[-1].end

    @property
    def donor_start(self) -> int:
        return self.pieces[0].donor_start

    @property
    def donor_end(self) -> int:
        return self.pieces[-1].donor_end

    @cached_property
    def matched(self) -> int:
        """Prompt tokens of [start, end) that have a donor position."""
        return sum(piece.length for piece in self.pieces)

    @property
    def holes(self) -> tuple[tuple[int, int], ...]:
        """Prompt stretches [start, end) between the pieces, none empty."""
        pairs = zip(self.pieces, self.pieces[1:], strict=False)
        return tuple((before.end, after.start) for before, after in pairs if before.end < after.start)


def align(
    prompt_ids: TokenIds,
    donor_ids: TokenIds,
    *,
    donor_start: int = 0,
    piece_min: int = PIECE_TOKENS_MIN,
    gap_max: int = GAP_TOKENS_MAX,
) -> Alignment:
    """Maps `prompt_ids` (uint32 [T]) to `donor_ids` (uint32 [S]), whose first token stands at position `donor_start` of its
    sequence. Inputs are not changed.

    Found are stretches of at least 15 equal tokens wherever they stand (moved, repeated), and of 4 or more between two
    others that follow each other in both sequences. Of several donor stretches for one prompt token, the longer wins
    unless the other continues a chain: to break into a chain costs 2 * piece_min tokens, also where it would only fill a
    hole (`covering`). Then the one nearest to the shift of what is before wins, at last to the prompt's own position. Equal
    stretches shorter than `piece_min` are mapped only where they are in one chain, with gaps up to `gap_max`, with a
    longer one. Text that repeats itself endlessly is mapped in bounded time, not in the best way.
    The same input gives the same map everywhere. Raises ValueError for piece_min < 1, gap_max < 0 or donor_start < 0.
    """
    return Aligner(prompt_ids, piece_min=piece_min, gap_max=gap_max).align(donor_ids, donor_start=donor_start)


class Aligner:
    """`align` of one prompt to many donors; holds the prompt and its seeds, no other state."""

    def __init__(
        self, prompt_ids: TokenIds, *, piece_min: int = PIECE_TOKENS_MIN, gap_max: int = GAP_TOKENS_MAX
    ) -> None:
        """As `align`."""
        if piece_min < 1 or gap_max < 0:
            raise ValueError("piece_min must be at least 1 and gap_max at least 0")
        self._prompt = np.ascontiguousarray(prompt_ids, np.uint32)
        self._finder = MatchFinder(self._prompt)
        self._piece_min, self._gap_max = piece_min, gap_max

    def align(self, donor_ids: TokenIds, *, donor_start: int = 0) -> Alignment:
        """As the function."""
        if donor_start < 0:
            raise ValueError("donor_start must not be negative")
        donor = np.ascontiguousarray(donor_ids, np.uint32)
        found = self._finder.find(donor, donor_start)
        # In positions of `donor`, the prompt's own position p is p - donor_start.
        pieces = cover(found, own_shift=-donor_start, piece_min=self._piece_min, gap_max=self._gap_max)
        pieces = self._worthwhile(filled(self._prompt, donor, pieces))
        pieces = _extended(self._prompt, donor, pieces)
        return _mapped(len(self._prompt), pieces, donor_start)

    def _worthwhile(self, pieces: Matches) -> Matches:
        """Without chains in which every piece is shorter than piece_min."""
        if not len(pieces.starts):
            return pieces
        heads = np.flatnonzero(_breaks(pieces, self._gap_max))
        longest = np.maximum.reduceat(pieces.lengths, heads)
        keep = np.repeat(longest >= self._piece_min, np.diff(heads, append=len(pieces.starts)))
        return Matches(pieces.starts[keep], pieces.donor_starts[keep], pieces.lengths[keep])


def chains(alignment: Alignment, *, gap_max: int = GAP_TOKENS_MAX) -> tuple[Chain, ...]:
    """The alignment's pieces as maximal chains, ascending and disjoint in the prompt; every piece is in one.

    Neighbours in a chain ascend in the donor too, with at most `gap_max` tokens between them on either side.
    """
    pieces = alignment.pieces
    if not pieces:
        return ()
    columns = np.array([(piece.start, piece.donor_start, piece.length) for piece in pieces], dtype=np.int64).T
    heads = np.flatnonzero(_breaks(Matches(*columns), gap_max)).tolist()
    return tuple(Chain(pieces[head:after]) for head, after in zip(heads, [*heads[1:], len(pieces)], strict=True))


def _breaks(pieces: Matches, gap_max: int) -> npt.NDArray[np.bool_]:
    """For each piece, whether a chain begins with it."""
    gaps = pieces.starts[1:] - (pieces.starts + pieces.lengths)[:-1]
    donor_gaps = pieces.donor_starts[1:] - (pieces.donor_starts + pieces.lengths)[:-1]
    linked = (donor_gaps >= 0) & (np.maximum(gaps, donor_gaps) <= gap_max)
    return np.append(True, ~linked)


def _extended(prompt: TokenIds, donor: TokenIds, pieces: Matches) -> Matches:
    """Every piece as long as its tokens agree: up to its neighbours in the prompt, and in the donor up to one that it
    follows or that follows it there. (Pieces that lost their heads to others which were then dropped can grow.)
    """
    starts, donor_starts, lengths = pieces
    if not len(starts):
        return pieces
    ends, donor_ends = starts + lengths, donor_starts + lengths
    donor_room = donor_starts[1:] - donor_ends[:-1]
    donor_room = np.append(np.where(donor_room >= 0, donor_room, len(donor)), len(donor))
    room = np.minimum(np.append(starts[1:], len(prompt)) - ends, np.minimum(donor_room, len(donor) - donor_ends))
    forward = equal_ahead(prompt, donor, ends, donor_ends, room)
    ends, donor_ends = ends + forward, donor_ends + forward
    donor_room = donor_starts[1:] - donor_ends[:-1]
    donor_room = np.append(len(donor), np.where(donor_room >= 0, donor_room, len(donor)))
    room = np.minimum(starts - np.append(0, ends[:-1]), np.minimum(donor_room, donor_starts))
    backward = equal_ahead(prompt[::-1], donor[::-1], len(prompt) - starts, len(donor) - donor_starts, room)
    return Matches(starts - backward, donor_starts - backward, ends - starts + backward)


def _mapped(tokens: int, pieces: Matches, donor_start: int) -> Alignment:
    """The map and its pieces; stretches that continue each other on both sides become one."""
    starts, donor_starts, lengths = pieces
    positions = np.full(tokens, -1, dtype=np.int64)
    if len(starts):
        ends, shifts = starts + lengths, donor_starts - starts
        continues = (starts[1:] == ends[:-1]) & (shifts[1:] == shifts[:-1])
        fresh, last = np.append(True, ~continues), np.append(~continues, True)
        starts, donor_starts, lengths = starts[fresh], donor_starts[fresh] + donor_start, ends[last] - starts[fresh]
        at = np.arange(int(lengths.sum())) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
        positions[at] = at + np.repeat(donor_starts - starts, lengths)
    positions.flags.writeable = False
    return Alignment(positions, tuple(map(Piece, starts.tolist(), donor_starts.tolist(), lengths.tolist())))
