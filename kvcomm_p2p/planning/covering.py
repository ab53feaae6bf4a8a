"""Which of many overlapping matches speaks for which prompt token: the cover that maps most tokens with fewest jumps."""

from __future__ import annotations

import numpy as np

from kvcomm_p2p.planning.seeds import Matches

CRUMB_TOKENS = 4
"""Shorter equal stretches are never mapped, not even inside a chain: a token or two among strangers saves nothing."""

_TOKEN = 1024
"""The score of a mapped token. What a change of shift costs is small change beside it: it only breaks ties."""

_NEVER = -(1 << 60)

_RECENT_MAX = 16
"""So many of the matches that are not over yet are kept as predecessors: the most promising ones."""


def cover(matches: Matches, *, own_shift: int, piece_min: int, gap_max: int) -> Matches:
    """Non-overlapping parts of `matches`, ascending in the prompt, each of at least CRUMB_TOKENS tokens.

    Maximises mapped tokens minus `piece_min` for every jump. No jump is the step to a match that lies ahead of the one
    before in prompt and donor with at most `gap_max` tokens between them on either side; of overlapping matches the
    later one loses its head. So a match that breaks into a chain must be worth two jumps. Ties go to the smaller change
    of shift (donor minus prompt position), and for the first match to the shift nearest to `own_shift`. Donor positions
    may be used more than once. Best up to _RECENT_MAX predecessors per match and the best that is over.
    """
    order = np.lexsort((matches.donor_starts, -matches.lengths, matches.starts))
    search = _Search(
        matches.starts[order].tolist(),
        matches.donor_starts[order].tolist(),
        matches.lengths[order].tolist(),
        own_shift,
        piece_min,
        gap_max,
    )
    chosen, trims = search.best()
    kept, cut = order[chosen], np.array(trims, dtype=np.int64)
    return Matches(matches.starts[kept] + cut, matches.donor_starts[kept] + cut, matches.lengths[kept] - cut)


class _Search:
    """Dynamic programming over matches ordered by start. `score[j]`: of the best cover that ends with match j."""

    def __init__(
        self,
        starts: list[int],
        donor_starts: list[int],
        lengths: list[int],
        own_shift: int,
        piece_min: int,
        gap_max: int,
    ) -> None:
        self._starts, self._lengths = starts, lengths
        self._ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        self._shifts = [at - start for at, start in zip(donor_starts, starts, strict=True)]
        self._own_shift, self._gap_max = own_shift, gap_max
        # Half a token less, so that the price of a tie never outweighs a piece of exactly piece_min tokens.
        self._jump = piece_min * _TOKEN - _TOKEN // 2
        self._score: list[int] = []

    def best(self) -> tuple[list[int], list[int]]:
        """The matches of the best cover, ascending, and how many tokens each loses at its head."""
        ends, score = self._ends, self._score
        befores: list[int] = []
        trims: list[int] = []
        recent: list[int] = []
        over = -1
        for j, start in enumerate(self._starts):
            still = []
            for i in recent:
                if ends[i] + self._gap_max >= start:
                    still.append(i)
                elif over < 0 or score[i] > score[over]:
                    over = i
            recent = still
            top, before, trim = self._begun(j)
            for i in (*recent, over) if over >= 0 else recent:
                gain, cut = self._link(i, j)
                if score[i] + gain > top:
                    top, before, trim = score[i] + gain, i, cut
            score.append(top)
            befores.append(before)
            trims.append(trim)
            recent.append(j)
            if len(recent) > _RECENT_MAX:
                recent = self._most_promising(recent, start)
        at = max(range(len(score)), key=score.__getitem__, default=-1)
        chosen = []
        while at >= 0:
            chosen.append(at)
            at = befores[at]
        chosen.reverse()
        return chosen, [trims[i] for i in chosen]

    def _begun(self, j: int) -> tuple[int, int, int]:
        """Score of a cover that begins with j."""
        return self._lengths[j] * _TOKEN - self._jump - _tie(self._shifts[j] - self._own_shift), -1, 0

    def _link(self, i: int, j: int) -> tuple[int, int]:
        """What j adds after i, and the tokens that j loses at its head."""
        change = self._shifts[j] - self._shifts[i]
        gap = self._starts[j] - self._ends[i]
        nearer, wider = (gap, gap + change) if change >= 0 else (gap + change, gap)
        cut = max(0, -nearer)
        left = self._lengths[j] - cut
        jumped = self._lengths[j] - max(0, -gap)
        if jumped < CRUMB_TOKENS:
            return _NEVER, 0
        if left >= CRUMB_TOKENS and wider + cut <= self._gap_max and left * _TOKEN >= jumped * _TOKEN - self._jump:
            return left * _TOKEN - _tie(change), cut
        return jumped * _TOKEN - self._jump - _tie(change), max(0, -gap)

    def _most_promising(self, recent: list[int], start: int) -> list[int]:
        """The _RECENT_MAX of `recent` that would score most if they ended at `start`, in their order."""
        worth = {i: self._score[i] - max(0, self._ends[i] - start) * _TOKEN for i in recent}
        kept = sorted(recent, key=lambda i: (-worth[i], i))[:_RECENT_MAX]
        return sorted(kept)


def _tie(change: int) -> int:
    return min(abs(change).bit_length(), 32)
