"""Equal runs as candidates for reuse: found, chained over small holes, weighed against each other."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvcomm_p2p.planning.alignment import Aligner, Chain, chains
from kvcomm_p2p.planning.chains import TokenIds
from kvcomm_p2p.planning.provenance import Context
from kvcomm_p2p.planning.types import Donor, Provenance, Repair, ReuseRules, Run, Span, SpanKind
from kvcomm_p2p.protocol.anchors import HOPS_PUBLISHED_MAX

HEAD_WHY = "head of a reused run"
HOLE_WHY = "differs from the donor"
INTERPOLATED_WHY = "differs from the donor: interpolated"

GAP_MAX = 32
"""Most tokens, in the prompt and in the donor, between two equal pieces of one candidate: their context is nearly the same."""

PIECE_TOKENS_MIN = 12
"""Shorter pieces between two holes are part of the hole: what stands behind a hole is recomputed for a few tokens anyway."""


MEMORY_PROBE_TOKENS = 8
"""Of so many tokens of a run that is corrected from memory at most one is a probe: more would cost what it saves."""


class _Part(NamedTuple):
    """How one piece is repaired: its first `head` tokens are recomputed, and `probes` of the others. `bridged`: the hole
    before it is interpolated."""

    piece: Run
    head: int
    probes: int
    bridged: bool


@dataclass(frozen=True, slots=True)
class Candidate:
    """Equal pieces of one donor that could be reused as one run: ascending in prompt and donor, with small holes between
    them, which are recomputed. Most have one piece. `provenance` and `likeness`: of what stands before it (`plan.placed`
    says before which piece); `context`: all that is known of that, None before `plan.placed`; `edge`: the kind of prefix
    change (`edges.edge_of`), empty before `plan.placed`. `encoded`: it travels as int8, which adds `wire_kl` to its
    divergence (nats per token of a prompt that is wholly reused)."""

    donor: Donor
    pieces: tuple[Run, ...]
    provenance: Provenance = Provenance.OTHER
    likeness: float = 0.0
    context: Context | None = None
    edge: bytes = b""
    encoded: bool = False
    wire_kl: float = 0.0

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

    def spans(self, repair: Repair, rules: ReuseRules, run: int = 0) -> list[Span]:
        """The candidate repaired, from start to end without gaps.

        The head, the first tokens behind a hole and the holes are RECOMPUTE spans; the first two name the donor too, because
        their KV is pulled and aligned like the rest, for the guard to compare. A hole that the rules allow to interpolate is
        a REUSE span without a donor.
        """
        spans: list[Span] = []
        for piece, head, probes, bridged in self._parts(repair, rules):
            if spans and spans[-1].end < piece.prompt_start:
                hole = Span(spans[-1].end, piece.prompt_start, SpanKind.RECOMPUTE, why=HOLE_WHY)
                spans.append(replace(hole, kind=SpanKind.REUSE, why=INTERPOLATED_WHY, run=run) if bridged else hole)
            if head:
                first = replace(piece, length=head)
                spans.append(replace(self._span(first, SpanKind.RECOMPUTE), why=HEAD_WHY, run=run))
            if head < piece.length:
                rest = Run(piece.donor_start + head, piece.prompt_start + head, piece.length - head)
                shift = repair.shift and probes > 1
                spans.append(replace(self._span(rest, SpanKind.REUSE), probes=probes, shift=shift, run=run))
        return spans

    def recomputed(self, repair: Repair, rules: ReuseRules) -> int:
        """How many of the run's tokens are recomputed all the same: heads and probes in `spans`, without holes."""
        return sum(part.head + part.probes for part in self._parts(repair, rules))

    def _parts(self, repair: Repair, rules: ReuseRules) -> Iterator[_Part]:
        left = head_tokens(repair, self.tokens)
        body = self.tokens - left
        end = self.start
        for index, piece in enumerate(self.pieces):
            bridged = 0 < piece.prompt_start - end <= rules.interpolated_tokens
            behind_hole = hole_head(piece, rules) if index and not bridged else 0
            head = min(piece.length, max(left, behind_hole))
            left -= min(left, head)
            # Probes are spread over the body: every piece gets its share, of what the guard needs rounded up.
            rest = piece.length - head
            probes = round(repair.probe_share * rest)
            if rules.guard_probes and rest:
                probes = max(probes, -(-rules.guard_probes * rest // body))
            most = rest // 2 if not repair.memory else min(rest // 2, max(1, rest // MEMORY_PROBE_TOKENS))
            yield _Part(piece, head, min(probes, most), bridged)
            end = piece.prompt_end

    def preference(self) -> tuple[int, float, bool, int, int]:
        """Among equally valuable ones the smallest first: by provenance, local, little moved."""
        first = self.pieces[0]
        moved = abs(first.donor_start - first.prompt_start)
        return self.provenance, -self.likeness, not self.donor.local, moved, self.start

    def _span(self, piece: Run, kind: SpanKind) -> Span:
        return Span(piece.prompt_start, piece.prompt_end, kind, self.donor, piece.donor_start, encoded=self.encoded)


def hole_head(piece: Run, rules: ReuseRules) -> int:
    """How many of a piece's first tokens are recomputed because a hole stands before it."""
    return min(rules.hole_head_tokens, piece.length // 4)


def head_tokens(repair: Repair, tokens: int) -> int:
    """Length of the head of a run of `tokens` tokens."""
    return min(repair.head_tokens, tokens // 4)


def find_candidates(prompt: TokenIds, donors: Sequence[Donor], length_min: int) -> Iterable[Candidate]:
    """Stretches of at least `length_min` tokens equal with some donor, those with small holes between them together, cut
    where hops become (un)publishable."""
    aligner = Aligner(prompt, piece_min=length_min, gap_max=GAP_MAX)
    for donor in donors:
        for start, end in _stretches(donor):
            ids = donor.token_ids[start - donor.start : end - donor.start]
            for chain in chains(aligner.align(ids, donor_start=start), gap_max=GAP_MAX):
                for pieces in _without_crumbs(chain):
                    if sum(piece.length for piece in pieces) >= length_min:
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


def _without_crumbs(chain: Chain) -> Iterator[tuple[Run, ...]]:
    """The pieces of a chain that count, apart where without the others a hole is too large."""
    pieces: list[Run] = []
    for piece in chain.pieces:
        if piece.length < PIECE_TOKENS_MIN and len(chain.pieces) > 1:
            continue
        if pieces:
            hole = piece.start - pieces[-1].prompt_end
            if max(hole, piece.donor_start - pieces[-1].donor_start - pieces[-1].length) > GAP_MAX:
                yield tuple(pieces)
                pieces = []
        pieces.append(Run(piece.donor_start, piece.start, piece.length))
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
