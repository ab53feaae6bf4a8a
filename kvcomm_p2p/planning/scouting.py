"""Which links to have a look at: those believed too slow, over which nothing would ever be pulled again, and nothing be learned.

What an agent believes of transfers before it has seen one is on the side of slow; what it has seen may be long ago. So where
reuse was turned down for its cost, a few of those blocks are pulled in the background, after the answer, and placed into
scratch memory: the next plan knows. At most once per peer in SCOUT_EVERY_S.

No input or output: the engine looks over a network, the simulator in virtual time.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass

from kvcomm_p2p.planning.fetches import Limits, Wants
from kvcomm_p2p.planning.finding import FoundDonors
from kvcomm_p2p.planning.types import Donor, Plan, Span, SpanKind
from kvcomm_p2p.protocol.anchors import BLOCK_TOKENS, BlockKey, MissReason
from kvcomm_p2p.protocol.ids import NodeId

SCOUT_EVERY_S = 30.0
SCOUT_BLOCKS = 4
SCOUT_LIMITS = Limits(deadline_s=2.0, stall_s=float("inf"), busy_s=float("inf"))
"""Nobody waits for a look."""

SCOUTED_MAX = 1024
"""Peers whose last look is remembered."""


@dataclass(frozen=True, slots=True)
class Look:
    """A few blocks to pull from `donor.holder`, raw, and to place as if they were reused."""

    donor: Donor
    wants: Wants

    def span(self) -> Span:
        """Where they would stand in scratch memory: one position further than in their sequence from `donor.start` on, so
        that they are rotated as a reused run is."""
        tokens = min(len(self.wants) * BLOCK_TOKENS, self.donor.anchors[0].tokens)
        return Span(1, 1 + tokens, SpanKind.REUSE, self.donor, self.donor.start)


class Scouting:
    """Remembers who was looked at when. `now` are seconds of one clock that only grow."""

    def __init__(self) -> None:
        self._looked_at: OrderedDict[NodeId, float] = OrderedDict()

    def look(self, plan: Plan, found: FoundDonors, now: float) -> Look | None:
        """What to look at after a prompt was filled by this plan, if anything: at the peer that lost most tokens to its cost,
        of those that are due. Counts as done now, whatever comes of it."""
        donor = self._donor(plan, found, now)
        if donor is None:
            return None
        anchor = donor.anchors[0]
        if (donor.holder, anchor.anchor_id) not in found.details:
            return None
        self._looked_at[donor.holder] = now
        self._looked_at.move_to_end(donor.holder)
        while len(self._looked_at) > SCOUTED_MAX:
            self._looked_at.popitem(last=False)
        blocks = range(min(SCOUT_BLOCKS, anchor.blocks))
        return Look(donor, {BlockKey(anchor.anchor_id, index): (anchor, index) for index in blocks})

    def _donor(self, plan: Plan, found: FoundDonors, now: float) -> Donor | None:
        lost: Counter[NodeId] = Counter()
        for rejected in plan.rejected:
            if rejected.miss.reason is MissReason.COST:
                lost[rejected.holder] += rejected.end - rejected.start
        for holder, _ in sorted(lost.items(), key=lambda item: (-item[1], item[0])):
            looked_at = self._looked_at.get(holder)
            if looked_at is not None and now - looked_at < SCOUT_EVERY_S:
                continue
            for donor in found.donors:
                if donor.holder == holder and not donor.local:
                    return donor
        return None
