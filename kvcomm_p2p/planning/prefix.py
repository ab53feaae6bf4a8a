"""The beginning of a prompt that some donor holds at the same positions behind the same tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvcomm_p2p.planning.chains import TokenIds
from kvcomm_p2p.planning.types import Donor, Span, SpanKind

REMOTE_TOKENS_MIN = 16
"""Shorter exact pieces (two prompts of one chat template share a few tokens) do not pay a whole block from a peer."""


@dataclass(frozen=True, slots=True)
class PrefixPiece:
    """Prompt [start, end) from the same positions of the donor's sequence; kind is EXACT or CONTINUED."""

    start: int
    end: int
    donor: Donor
    kind: SpanKind

    def span(self) -> Span:
        """As part of a plan."""
        return Span(self.start, self.end, self.kind, self.donor, self.start)


def exact_prefix(prompt: TokenIds, donors: Sequence[Donor]) -> list[PrefixPiece]:
    """EXACT pieces of the prompt (uint32 [T]), ascending, from 0 as far as any donors reach.

    A donor counts as far as its anchors have hops 0 and its tokens equal the prompt's at the same positions, if what
    stands before its first token is known to equal the prompt's too. So a piece stays exact behind a gap that no donor
    covers: the gap is recomputed behind exact KV. Our own KV is preferred wherever it reaches; peers fill in. Of equal
    reach, the first donor given wins. What a peer has of fewer than REMOTE_TOKENS_MIN tokens is left to be recomputed.
    """
    reaches = [(donor.start, _exact_end(prompt, donor), donor) for donor in donors]
    reaches = [reach for reach in reaches if reach[0] < reach[1]]
    local = [reach for reach in reaches if reach[2].local]
    remote = [reach for reach in reaches if not reach[2].local]
    pieces: list[PrefixPiece] = []
    at = 0
    while at < len(prompt):
        reach = _farthest(local, at) or _farthest(remote, at)
        if reach is None:
            at = min((start for start, _, _ in reaches if start > at), default=len(prompt))
            continue
        end, donor = reach
        if not donor.local:
            end = min([end, *(start for start, _, _ in local if start > at)])
            if end - at < REMOTE_TOKENS_MIN:
                at = end
                continue
        pieces.append(PrefixPiece(at, end, donor, SpanKind.EXACT))
        at = end
    return pieces


def continued_prefix(prompt: TokenIds, donors: Iterable[Donor], done: int) -> list[PrefixPiece]:
    """At most one CONTINUED piece from `done` on: our own KV, with repairs behind it, of the same tokens from position
    0.

    Our own alone, no replica of a peer's: what it deviates by was already accepted when the earlier part of the
    conversation was filled here.
    """
    best: PrefixPiece | None = None
    for donor in donors:
        if donor.local and not donor.replica and donor.start <= done and _prefix_known(donor):
            end = donor.start + _equal_length(prompt[donor.start :], donor.token_ids)
            if end > max(done, best.end if best else 0):
                best = PrefixPiece(done, end, donor, SpanKind.CONTINUED)
    return [best] if best else []


def _farthest(reaches: Iterable[tuple[int, int, Donor]], at: int) -> tuple[int, Donor] | None:
    """(end, donor) of the reach that covers `at` and ends last."""
    covering = [(end, donor) for start, end, donor in reaches if start <= at < end]
    return max(covering, key=lambda reach: reach[0]) if covering else None


def _exact_end(prompt: TokenIds, donor: Donor) -> int:
    """Up to which position the donor's KV is what full prefill of the prompt gives; donor.start if not at all."""
    if not _prefix_known(donor) or donor.start >= len(prompt):
        return donor.start
    end = donor.start
    for anchor in donor.anchors:
        if anchor.hops > 0:
            break
        end = max(end, min(anchor.end, donor.end))
    return donor.start + _equal_length(prompt[donor.start :], donor.token_ids[: end - donor.start])


def _prefix_known(donor: Donor) -> bool:
    """Whether everything before the donor's first token is known to equal the prompt's."""
    return donor.start == 0 or donor.same_prefix_until >= donor.start


def _equal_length(a: TokenIds, b: TokenIds) -> int:
    """Length of the common prefix."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length
