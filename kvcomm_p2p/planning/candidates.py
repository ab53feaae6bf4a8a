"""Equal runs as candidates for reuse: found, cut to where they may be used, weighed against each other."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvcomm_p2p.planning.chains import TokenIds
from kvcomm_p2p.planning.runs import RunFinder
from kvcomm_p2p.planning.types import Donor, Run, Span, SpanKind
from kvcomm_p2p.protocol.anchors import HOPS_PUBLISHED_MAX

_RUNS_PER_DONOR_MAX = 64


@dataclass(frozen=True, slots=True)
class Candidate:
    """Part of a run that could be reused as one piece: prompt [start, end) from the donor at `donor_start`."""

    start: int
    end: int
    donor: Donor
    donor_start: int

    @property
    def tokens(self) -> int:
        return self.end - self.start

    def clipped(self, start: int, end: int) -> Candidate:
        """The part inside [start, end); `tokens` <= 0 if there is none."""
        start, end = max(start, self.start), min(end, self.end)
        return Candidate(start, end, self.donor, self.donor_start + start - self.start)

    def span(self) -> Span:
        """All of it as a REUSE span."""
        return Span(self.start, self.end, SpanKind.REUSE, self.donor, self.donor_start)

    def preference(self) -> tuple[bool, bool, int, int]:
        """Among equally valuable ones the smallest first: local, not computed behind nothing, little moved."""
        bare = self.donor_start == 0 and self.start > 0
        return not self.donor.local, bare, abs(self.donor_start - self.start), self.start


def find_candidates(prompt: TokenIds, donors: Sequence[Donor], length_min: int) -> Iterable[Candidate]:
    """Equal runs of at least `length_min` tokens with every donor, cut where its hops become (un)publishable."""
    finder = RunFinder(prompt, length_min=length_min)
    for donor in donors:
        for start, end in _stretches(donor):
            runs = finder.find(donor.token_ids[start - donor.start : end - donor.start], start)
            for run in _thinned(runs):
                yield Candidate(run.prompt_start, run.prompt_end, donor, run.donor_start)


def choose(candidates: Sequence[Candidate], worth_s: Callable[[Candidate], float], tokens_min: int) -> list[Candidate]:
    """Candidates, or parts of at least `tokens_min` tokens of them, that do not overlap, ascending.

    Greedy: the one worth most first; what it covers is cut from the others, which are weighed again. Only what is worth
    more than 0 seconds.
    """
    queue = [(-worth_s(c), c.preference(), serial, c) for serial, c in enumerate(candidates)]
    heapq.heapify(queue)
    serial = len(queue)
    chosen: list[Candidate] = []
    while queue and queue[0][0] < 0:
        best = heapq.heappop(queue)[-1]
        parts = _free_parts(best, chosen)
        if parts == [best]:
            chosen.append(best)
            continue
        for part in parts:
            if part.tokens >= tokens_min:
                heapq.heappush(queue, (-worth_s(part), part.preference(), serial, part))
                serial += 1
    return sorted(chosen, key=lambda candidate: candidate.start)


def _stretches(donor: Donor) -> list[tuple[int, int]]:
    """[start, end) of consecutive anchors that are all publishable, or all not."""
    stretches: list[tuple[int, int]] = []
    last: bool | None = None
    at = donor.start
    for anchor in donor.anchors:
        end = min(anchor.end, donor.end)
        if end <= at:
            continue
        publishable = anchor.hops <= HOPS_PUBLISHED_MAX
        if publishable is last:
            stretches[-1] = (stretches[-1][0], end)
        else:
            stretches.append((at, end))
        last, at = publishable, end
    return stretches


def _thinned(runs: list[Run]) -> list[Run]:
    """If there are too many (repetitive text): few of them that cover the same prompt positions."""
    if len(runs) <= _RUNS_PER_DONOR_MAX:
        return runs
    kept = [runs[0]]
    for run, following in zip(runs[1:], [*runs[2:], None], strict=True):
        # Starts and ends both ascend: this one is needed if the next begins too late to join what is kept.
        if following is None or following.prompt_start > kept[-1].prompt_end:
            kept.append(run)
    return kept


def _free_parts(candidate: Candidate, chosen: Sequence[Candidate]) -> list[Candidate]:
    """What the chosen ones leave of a candidate."""
    parts = [candidate]
    for taken in chosen:
        cut: list[Candidate] = []
        for part in parts:
            if taken.end <= part.start or part.end <= taken.start:
                cut.append(part)
                continue
            cut += [
                side for side in (part.clipped(0, taken.start), part.clipped(taken.end, part.end)) if side.tokens > 0
            ]
        parts = cut
    return parts
