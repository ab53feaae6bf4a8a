"""Equal runs as candidates for reuse: found, chained over small holes, weighed against each other."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from kvcomm_p2p.planning.chains import TokenIds
from kvcomm_p2p.planning.runs import RunFinder
from kvcomm_p2p.planning.types import Donor, Provenance, Repair, Run, Span, SpanKind
from kvcomm_p2p.protocol.anchors import HOPS_PUBLISHED_MAX

HEAD_WHY = "head of a reused run"
HOLE_WHY = "differs from the donor"

GAP_MAX = 32
"""Most tokens, in the prompt and in the donor, between two equal pieces of one candidate: their context is nearly the same."""

_RUNS_PER_DONOR_MAX = 64


@dataclass(frozen=True, slots=True)
class Candidate:
    """Equal pieces of one donor that could be reused as one run: ascending in prompt and donor, with small holes between
    them, which are recomputed. Most have one piece. `provenance` and `likeness`: of what stands before the first."""

    donor: Donor
    pieces: tuple[Run, ...]
    provenance: Provenance = Provenance.OTHER
    likeness: float = 0.0

    @property
    def start(self) -> int:
        return self.pieces[0].prompt_start

    @property
    def end(self) -> int:
        return self.pieces[-1].prompt_end

    @property
    def tokens(self) -> int:
        """Equal tokens; holes do not count."""
        return sum(piece.length for piece in self.pieces)

    def clipped(self, start: int, end: int) -> Candidate | None:
        """The part inside prompt [start, end); None if there is none."""
        if start <= self.start and self.end <= end:
            return self
        pieces = []
        for piece in self.pieces:
            low, high = max(start, piece.prompt_start), min(end, piece.prompt_end)
            if low < high:
                pieces.append(Run(piece.donor_start + low - piece.prompt_start, low, high - low))
        return replace(self, pieces=tuple(pieces)) if pieces else None

    def whole(self) -> list[Span]:
        """All pieces as REUSE spans, nothing repaired."""
        return [self._span(piece, SpanKind.REUSE) for piece in self.pieces]

    def spans(self, repair: Repair, guard_probes: int, hole_head_tokens: int, run: int = 0) -> list[Span]:
        """The candidate repaired, from start to end without gaps.

        The head, the first tokens behind a hole and the holes are RECOMPUTE spans; the first two name the donor too, because
        their KV is pulled and aligned like the rest, for the guard to compare.
        """
        left = head_tokens(repair, self.tokens)
        body = self.tokens - left
        spans: list[Span] = []
        for index, piece in enumerate(self.pieces):
            if spans and spans[-1].end < piece.prompt_start:
                spans.append(Span(spans[-1].end, piece.prompt_start, SpanKind.RECOMPUTE, why=HOLE_WHY))
            behind_hole = min(hole_head_tokens, piece.length // 4) if index else 0
            head = min(piece.length, max(left, behind_hole))
            left -= min(left, head)
            if head:
                first = replace(piece, length=head)
                spans.append(replace(self._span(first, SpanKind.RECOMPUTE), why=HEAD_WHY, run=run))
            rest = Run(piece.donor_start + head, piece.prompt_start + head, piece.length - head)
            if rest.length:
                # Probes are spread over the body, so every piece gets its share; the first one at least what the guard needs.
                probes = round(repair.probe_share * rest.length)
                if guard_probes:
                    probes = max(probes, -(-guard_probes * rest.length // body))
                shift = repair.shift and probes > 1
                span = self._span(rest, SpanKind.REUSE)
                spans.append(replace(span, probes=min(probes, rest.length // 2), shift=shift, run=run))
        return spans

    def preference(self) -> tuple[int, float, bool, int, int]:
        """Among equally valuable ones the smallest first: by provenance, local, little moved."""
        first = self.pieces[0]
        moved = abs(first.donor_start - first.prompt_start)
        return self.provenance, -self.likeness, not self.donor.local, moved, self.start

    def _span(self, piece: Run, kind: SpanKind) -> Span:
        return Span(piece.prompt_start, piece.prompt_end, kind, self.donor, piece.donor_start)


def head_tokens(repair: Repair, tokens: int) -> int:
    """Length of the head of a run of `tokens` tokens."""
    return min(repair.head_tokens, tokens // 4)


def find_candidates(prompt: TokenIds, donors: Sequence[Donor], length_min: int) -> Iterable[Candidate]:
    """Equal runs of at least `length_min` tokens with every donor, those with small holes between them together, cut where
    hops become (un)publishable."""
    finder = RunFinder(prompt, length_min=length_min)
    for donor in donors:
        for start, end in _stretches(donor):
            runs = finder.find(donor.token_ids[start - donor.start : end - donor.start], start)
            for pieces in _chained(_thinned(runs)):
                yield Candidate(donor, pieces)


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


def _chained(runs: Sequence[Run]) -> Iterator[tuple[Run, ...]]:
    """Runs that follow each other in prompt and donor with at most GAP_MAX tokens between them, together.

    Where two of them overlap (repeated text at a border), the later one is shortened.
    """
    pieces: list[Run] = []
    for run in runs:
        if pieces:
            last = pieces[-1]
            over = max(0, last.prompt_end - run.prompt_start, last.donor_start + last.length - run.donor_start)
            gaps = (
                run.prompt_start + over - last.prompt_end,
                run.donor_start + over - last.donor_start - last.length,
            )
            if over < run.length // 2 and max(gaps) <= GAP_MAX:
                pieces.append(Run(run.donor_start + over, run.prompt_start + over, run.length - over))
                continue
            yield tuple(pieces)
        pieces = [run]
    if pieces:
        yield tuple(pieces)


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
            sides = part.clipped(0, taken.start), part.clipped(taken.end, part.end)
            cut += [side for side in sides if side is not None]
        parts = cut
    return parts
