"""Which link is looked at after reuse was turned down for its cost, and how often."""

from __future__ import annotations

from dataclasses import replace

from planning_cases import COSTS, PEER, RULES, TOKEN_BYTES, donor, joined, words

from kvcomm_p2p.planning.finding import FoundDonors
from kvcomm_p2p.planning.plan import make_plan
from kvcomm_p2p.planning.scouting import SCOUT_BLOCKS, SCOUT_EVERY_S, SCOUTED_MAX, Look, Scouting
from kvcomm_p2p.planning.types import Costs, Donor, Mode, Plan
from kvcomm_p2p.protocol.anchors import BLOCK_TOKENS
from kvcomm_p2p.protocol.events import AnchorTokens
from kvcomm_p2p.protocol.ids import NodeId

LONG, SHORT = words(1, 512), words(2, 200)
PROMPT = joined(words(3, 40), LONG, words(4, 40), SHORT, words(5, 9))
SLOW = replace(COSTS, pull_latency_s=5.0)
OTHER = NodeId(b"2" * 16)
AT_PEER, AT_OTHER = donor(SHORT, name=1), donor(LONG, name=2, holder=OTHER)


def found(*donors: Donor) -> FoundDonors:
    details = {
        (each.holder, anchor.anchor_id): AnchorTokens(
            anchor, each.holder, each.token_ids[: anchor.tokens], (b"d" * 32,) * anchor.blocks
        )
        for each in donors
        if not each.local
        for anchor in each.anchors
    }
    return FoundDonors(donors, details, (), 0.0)


def planned(*donors: Donor, costs: Costs = SLOW) -> Plan:
    return make_plan(PROMPT, donors, Mode.BALANCED, RULES, costs)


def looked(scouting: Scouting, *donors: Donor, now: float = 0.0, costs: Costs = SLOW) -> Look | None:
    return scouting.look(planned(*donors, costs=costs), found(*donors), now)


def holder_of(look: Look | None) -> NodeId | None:
    return None if look is None else look.donor.holder


def test_who_lost_most_to_its_cost_is_looked_at_first_and_nobody_again_for_a_while() -> None:
    scouting = Scouting()
    both = AT_PEER, AT_OTHER
    assert [holder_of(looked(scouting, *both, now=at)) for at in (0.0, 1.0, 2.0)] == [OTHER, PEER, None]
    assert holder_of(looked(scouting, *both, now=SCOUT_EVERY_S)) == OTHER
    assert holder_of(looked(scouting, *both, now=SCOUT_EVERY_S)) is None, "the other was looked at a second later"


def test_nothing_is_looked_at_that_is_used_ours_or_unknown() -> None:
    scouting = Scouting()
    assert looked(scouting, AT_OTHER, costs=COSTS) is None, "reuse pays"
    assert looked(scouting) is None
    assert looked(scouting, donor(LONG, local=True), costs=replace(COSTS, align_bytes_per_s=1e3)) is None
    assert scouting.look(planned(AT_OTHER), replace(found(AT_OTHER), details={}), 0.0) is None
    assert holder_of(looked(scouting, AT_OTHER)) == OTHER, "what could not be looked at does not count as a look"


def test_a_look_is_a_few_blocks_one_position_further() -> None:
    look = looked(Scouting(), AT_OTHER)
    assert look is not None
    assert [index for _, index in look.wants.values()] == list(range(SCOUT_BLOCKS))
    span = look.span()
    assert (span.start, span.tokens, span.donor_start) == (1, SCOUT_BLOCKS * BLOCK_TOKENS, 0)
    assert sum(anchor.block_bytes(index) for anchor, index in look.wants.values()) == span.tokens * TOKEN_BYTES
    short = donor(SHORT[:80], name=3)
    prompt = joined(words(3, 40), SHORT[:80], words(5, 9))
    brief = Scouting().look(make_plan(prompt, [short], Mode.BALANCED, RULES, SLOW), found(short), 0.0)
    assert brief is not None and len(brief.wants) == 3 and brief.span().tokens == 80


def test_what_is_remembered_is_bounded() -> None:
    scouting = Scouting()
    for number in range(SCOUTED_MAX + 1):
        assert looked(scouting, replace(AT_OTHER, holder=NodeId(number.to_bytes(16, "big")))) is not None
    assert looked(scouting, replace(AT_OTHER, holder=NodeId(bytes(16)))) is not None, "the first one is forgotten"
    assert looked(scouting, replace(AT_OTHER, holder=NodeId(SCOUTED_MAX.to_bytes(16, "big")))) is None
