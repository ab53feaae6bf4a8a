"""Copies that were not taken: which ones a plan tells, and what spoke against them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_cases import COSTS, EXACT_RULES, ME, PEER, RULES, Tokens, donor, joined, words

from kvcomm_p2p.planning.costs import PullCost
from kvcomm_p2p.planning.plan import make_plan
from kvcomm_p2p.planning.rivals import (
    LESS_ALIKE,
    NO_BETTER,
    REPAIRED,
    RIVAL_TOKENS_MIN,
    RIVALS_MAX,
    SHORTER,
    SLOWER,
    Weight,
)
from kvcomm_p2p.planning.types import Donor, Mode, Plan, Provenance, Repair, Rival
from kvcomm_p2p.protocol.ids import NodeId

DOCUMENT = words(1, 600)
CONTEXT = words(2, 50)
PROMPT = joined(CONTEXT, DOCUMENT, words(3, 20))
FAR = NodeId(b"2" * 16)
ALIKE = joined(CONTEXT[:46], words(4, 4), DOCUMENT)


def others(*donors: Donor, prompt: Tokens = PROMPT, rules: object = RULES, **options: object) -> tuple[Rival, ...]:
    """The rivals of the only run of the plan."""
    [run] = make_plan(prompt, donors, Mode.BALANCED, rules, COSTS, **options).runs  # type: ignore[arg-type]
    return run.others


def test_a_copy_from_a_less_alike_context() -> None:
    near, unlike = donor(ALIKE), donor(joined(words(5, 400), DOCUMENT), name=1, holder=FAR)
    [run] = make_plan(PROMPT, [unlike, near], Mode.BALANCED, RULES, COSTS).runs
    assert run.donor is near
    [other] = run.others
    assert other.donor is unlike
    assert (other.start, other.end, other.donor_start, other.why) == (50, 650, 400, LESS_ALIKE)
    assert other.provenance > run.provenance
    assert other.saved_s is not None and other.saved_s > 0


def test_a_copy_at_a_slow_peer() -> None:
    slow = {FAR: PullCost(latency_s=0.003, bytes_per_s=3e7)}
    [other] = others(donor(ALIKE), donor(ALIKE, holder=FAR, name=1), pulls=slow)
    assert (other.donor.holder, other.why) == (FAR, SLOWER)
    hopeless = {FAR: PullCost(latency_s=0.003, bytes_per_s=1e6)}
    [other] = others(donor(ALIKE), donor(ALIKE, holder=FAR, name=1), pulls=hopeless)
    assert other.why == SLOWER
    assert other.saved_s is not None and other.saved_s < 0


def test_a_shorter_copy_and_one_too_short_to_be_reused() -> None:
    half = donor(joined(CONTEXT[:46], words(4, 4), DOCUMENT[:300]), holder=FAR, name=1)
    bit = donor(joined(words(6, 8), DOCUMENT[500:540]), holder=FAR, name=2)
    shorter, refused = others(donor(ALIKE), bit, half)
    assert (shorter.start, shorter.end, shorter.why) == (50, 350, SHORTER)
    assert (refused.start, refused.end, refused.why, refused.saved_s) == (550, 590, SHORTER, None)


def test_a_copy_that_was_repaired_already_and_one_that_must_not_be_reused() -> None:
    once, often = donor(ALIKE, hops=1, name=1, holder=FAR), donor(ALIKE, hops=2, name=2, holder=FAR)
    repaired, refused = others(donor(ALIKE), often, once)
    assert (repaired.donor, repaired.why) == (once, REPAIRED)
    assert (refused.donor, refused.saved_s) == (often, None)
    assert refused.why == "the copy has 2 repairs behind it"


def test_a_copy_for_which_no_repair_was_measured() -> None:
    rules = replace(RULES, repairs={each: (Repair(32),) for each in Provenance if each is not Provenance.BARE})
    [other] = others(donor(ALIKE), donor(DOCUMENT, holder=FAR, name=1), rules=rules)
    assert (other.provenance, other.saved_s) == (Provenance.BARE, None)
    assert "no repair was measured" in other.why


def test_an_equal_copy_is_no_better() -> None:
    [other] = others(donor(ALIKE), donor(ALIKE, holder=FAR, name=1))
    assert other.why == NO_BETTER


def test_branches_of_one_copy_count_once() -> None:
    """Two conversations of one holder share their beginning, anchors and all; so does a replica, at another holder."""
    copy = donor(ALIKE)
    branch = replace(copy)
    assert others(copy, branch) == ()
    replica = replace(copy, holder=FAR)
    [other] = others(copy, branch, replica, replace(replica))
    assert other.donor.holder == FAR


def test_the_best_few_are_told_best_first() -> None:
    many = [
        donor(joined(words(20 + i, 300), DOCUMENT[: 200 + 50 * i]), name=i + 1, holder=NodeId(bytes([i + 1]) * 16))
        for i in range(RIVALS_MAX + 2)
    ]
    told = others(donor(ALIKE), *many)
    assert [other.donor for other in told] == [many[4], many[3], many[2]]


def test_each_run_has_its_own_rivals_cut_to_it() -> None:
    first, second = words(7, 200), words(8, 200)
    prompt = joined(CONTEXT, first, words(9, 60), second, words(3, 20))
    whole = donor(joined(words(11, 300), first, words(9, 60), second), holder=FAR, name=3)
    ours = [
        donor(joined(CONTEXT[:46], words(4, 4), first)),
        donor(joined(CONTEXT[:46], words(4, 4), first, words(9, 50), words(12, 10), second), name=1),
    ]
    for run in make_plan(prompt, [*ours, whole], Mode.BALANCED, RULES, COSTS).runs:
        for other in run.others:
            assert run.start <= other.start < other.end <= run.end


def test_nothing_reused_has_no_rivals_and_tells_the_budget() -> None:
    plan = make_plan(PROMPT, [donor(DOCUMENT)], Mode.BALANCED, EXACT_RULES, COSTS)
    assert (plan.runs, plan.kl_max, plan.exact_only) == ((), 0.0, EXACT_RULES.reason)
    exact = make_plan(PROMPT, [donor(DOCUMENT)], Mode.EXACT, EXACT_RULES, COSTS)
    assert (exact.kl_max, exact.exact_only) == (0.0, "")
    rules = replace(RULES, kl_max=0.02)
    assert make_plan(PROMPT, [donor(DOCUMENT)], Mode.BALANCED, rules, COSTS).kl_max == 0.02


def test_what_is_not_saved_is_not_worth_less() -> None:
    assert Weight(2.0, 0.5, 0.75).worth_s == 0.75
    assert Weight(-1.0, 0.5, 0.5).worth_s == -1.0


@st.composite
def copies(draw: st.DrawFn) -> list[Donor]:
    found = []
    for name in range(draw(st.integers(1, 6))):
        low = draw(st.integers(0, 300))
        text = joined(
            words(draw(st.integers(30, 33)), draw(st.integers(0, 200))),
            DOCUMENT[low : low + draw(st.integers(20, 600))],
        )
        local = draw(st.booleans())
        holder = ME if local else draw(st.sampled_from([PEER, FAR]))
        found.append(
            donor(text, name=name, local=local, holder=holder, hops=draw(st.integers(0, 2)), anchor_tokens=128)
        )
    return found


def check(plan: Plan, prompt: Tokens) -> None:
    for run in plan.runs:
        assert len(run.others) <= RIVALS_MAX
        for other in run.others:
            assert run.start <= other.start < other.end <= run.end
            assert other.end - other.start >= RIVAL_TOKENS_MIN
            at = other.donor_start - other.donor.start
            length = min(RIVAL_TOKENS_MIN // 2, other.end - other.start)
            assert np.array_equal(other.donor.token_ids[at : at + length], prompt[other.start : other.start + length])
            assert other.why
            assert other.saved_s is not None or other.why not in (LESS_ALIKE, SLOWER, REPAIRED, NO_BETTER)


@settings(max_examples=100, deadline=None)
@given(copies())
def test_every_rival_is_a_copy_of_its_run(donors: list[Donor]) -> None:
    plan = make_plan(PROMPT, donors, Mode.BALANCED, RULES, COSTS)
    check(plan, PROMPT)
    assert make_plan(PROMPT, donors, Mode.BALANCED, RULES, COSTS) == plan
