"""Copies of a reused run that were not taken, and what spoke against them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from kvcomm_p2p.planning.candidates import Candidate
from kvcomm_p2p.planning.types import Rival
from kvcomm_p2p.protocol.anchors import MissReason
from kvcomm_p2p.protocol.ids import AnchorId, NodeId

RIVALS_MAX = 3
"""Copies that are told per run, the best ones."""

WEIGHED_MAX = 8
"""So many of them are weighed, the longest: a plan must not take longer for being explained."""

RIVAL_TOKENS_MIN = 16
"""Copies of fewer of the run's tokens are not worth a word."""

LESS_ALIKE = "less alike context"
SLOWER = "slower"
SHORTER = "shorter"
REPAIRED = "repaired once already"
NO_BETTER = "no better"


class Weight(NamedTuple):
    """What a run is worth: predicted seconds saved, and how much they count (0 to 1) for its context and for being exact."""

    saved_s: float
    context: float = 1.0
    exactness: float = 1.0

    @property
    def worth_s(self) -> float:
        return self.saved_s * self.context * self.exactness if self.saved_s > 0 else self.saved_s


def rivals(
    run: Candidate,
    found: Iterable[Candidate],
    weigh: Callable[[Candidate], Weight],
    refusal: Callable[[Candidate], tuple[MissReason, str] | None],
) -> tuple[Rival, ...]:
    """The best copies of `run`'s tokens among `found`, best first, without the run's own: at most RIVALS_MAX.

    `refusal`: why a copy may not be reused, if so; those come last.
    """
    taken = weigh(run)
    rated: list[tuple[float, Rival]] = []
    for part in _copies(run, found)[:WEIGHED_MAX]:
        refused = refusal(part)
        weight = Weight(0.0) if refused is not None else weigh(part)
        if refused is None:
            why = _why(part, weight, run, taken)
        else:
            why = SHORTER if refused[0] is MissReason.TOO_SHORT else refused[1]
        saved_s = None if refused is not None else weight.saved_s
        at = part.pieces[0].donor_start
        rival = Rival(part.start, part.end, part.donor, at, part.provenance, part.likeness, saved_s, why)
        rated.append((-math.inf if refused is not None else weight.worth_s, rival))
    rated.sort(key=lambda item: -item[0])
    return tuple(rival for _, rival in rated[:RIVALS_MAX])


def _copies(run: Candidate, found: Iterable[Candidate]) -> list[Candidate]:
    """What others have of the run's tokens, the most and the most alike first."""
    own = {anchor.anchor_id for anchor in run.donor.anchors}
    offsets = {piece.donor_start - piece.prompt_start for piece in run.pieces}
    # Branches of one holder's conversation share anchors: what is one copy counts once.
    copies: dict[tuple[NodeId, AnchorId, int], Candidate] = {}
    for each in found:
        part = each.clipped(run.start, run.end)
        if part is None or part.tokens < RIVAL_TOKENS_MIN:
            continue
        holder, anchor_id, offset = copy = _copy(part)
        if not (holder == run.donor.holder and anchor_id in own and offset in offsets):
            copies.setdefault(copy, part)
    return sorted(copies.values(), key=lambda part: (-part.tokens, part.preference()))


def _copy(part: Candidate) -> tuple[NodeId, AnchorId, int]:
    """Whose KV a candidate begins with: holder, anchor, and by how far it would be moved."""
    first = part.pieces[0]
    anchor = next(a for a in part.donor.anchors if a.start <= first.donor_start < a.end)
    return part.donor.holder, anchor.anchor_id, first.donor_start - first.prompt_start


def _why(part: Candidate, weight: Weight, run: Candidate, taken: Weight) -> str:
    """What costs the copy most against the one that was taken."""
    if weight.saved_s <= 0:
        return SLOWER
    length = part.tokens / run.tokens
    ratios = {
        LESS_ALIKE: weight.context / taken.context,
        REPAIRED: weight.exactness / taken.exactness,
        SHORTER: length,
        SLOWER: weight.saved_s / (taken.saved_s * length),
    }
    why = min(ratios, key=lambda name: ratios[name])
    return why if ratios[why] < 1 - 1e-9 else NO_BETTER
