"""What the choice among copies owes to their contexts: with it and without."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planning_cases import COSTS, RULES, donor, joined, words

from kvcomm_p2p.planning.plan import make_plan
from kvcomm_p2p.planning.spans import recompute_positions
from kvcomm_p2p.planning.types import Mode, Plan, Provenance, Repair
from kvcomm_p2p.protocol.ids import NodeId

FAR = NodeId(b"2" * 16)
DOCUMENT, CONTEXT, QUESTION = words(1, 600), words(2, 50), words(3, 60)
PROMPT = joined(CONTEXT, DOCUMENT, QUESTION)
# One stands behind nearly the same text, the other has more of the prompt behind unlike text of the same length.
ALIKE = donor(joined(CONTEXT[:46], words(4, 4), DOCUMENT), name=1, holder=FAR)
UNLIKE = donor(joined(words(5, 50), DOCUMENT, QUESTION), name=2)
CHEAP_WHERE_ALIKE = replace(
    RULES, repairs={each: (Repair(8 if each <= Provenance.NEAR else 128),) for each in Provenance}
)


def planned(*, by_context: bool, order: int = 1, rules: object = CHEAP_WHERE_ALIKE) -> Plan:
    donors = [UNLIKE, ALIKE][::order]
    return make_plan(PROMPT, donors, Mode.BALANCED, rules, COSTS, by_context=by_context)  # type: ignore[arg-type]


@pytest.mark.parametrize("order", [1, -1])
def test_the_choice_looks_at_the_context_unless_told_not_to(order: int) -> None:
    [seeing], [blind] = planned(by_context=True, order=order).runs, planned(by_context=False, order=order).runs
    assert seeing.donor is ALIKE and seeing.provenance is Provenance.NEAR
    assert blind.donor is UNLIKE


def test_what_was_chosen_blindly_is_repaired_as_its_context_demands() -> None:
    blind, seeing = planned(by_context=False), planned(by_context=True)
    assert blind.runs[0].provenance > Provenance.NEAR and blind.runs[0].repair == Repair(128)
    assert len(recompute_positions(blind)) == 4 + 128 + 1, "behind the 46 tokens that are equal from the beginning"
    assert len(recompute_positions(seeing)) < 128


def test_what_may_not_be_reused_is_not_chosen_blindly_either() -> None:
    only_near = replace(RULES, repairs={Provenance.SAME: (Repair(8),), Provenance.NEAR: (Repair(8),)})
    [run] = planned(by_context=False, rules=only_near).runs
    assert run.donor is ALIKE
