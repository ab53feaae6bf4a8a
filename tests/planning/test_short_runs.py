"""Runs too short to be repaired: reused where memory can correct them, recomputed everywhere else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_cases import COSTS, EXACT_RULES, RULES, Tokens, donor, joined, words

from kvcomm_p2p.planning.candidates import Candidate
from kvcomm_p2p.planning.edges import EDGE_TOKENS, edge_of
from kvcomm_p2p.planning.plan import make_plan
from kvcomm_p2p.planning.repairs import allowed_repairs
from kvcomm_p2p.planning.spans import exact_until, recompute_positions
from kvcomm_p2p.planning.types import Donor, Mode, Plan, Provenance, Repair, ReuseRules, Run, SpanKind
from kvcomm_p2p.protocol.anchors import MissReason

BEFORE, AFTER = words(101, 50), words(102, 40)


def behind_other_text(content: Tokens, **options: object) -> Donor:
    return donor(joined(words(103, 37), content, words(104, 20)), local=True, **options)  # type: ignore[arg-type]


MEMORY = Repair(0, kl=0.006, memory=True)
EVERY = dict.fromkeys(Provenance, MEMORY)
EDGE = edge_of(BEFORE, behind_other_text(words(0, 1)), Provenance.ROLE)
SHORT = replace(RULES, short=EVERY, short_from={EDGE: 0}, guard_probes=6, kl_max=0.02)


def planned(content: Tokens, rules: ReuseRules, mode: Mode = Mode.BALANCED, **options: object) -> Plan:
    return make_plan(joined(BEFORE, content, AFTER), [behind_other_text(content, **options)], mode, rules, COSTS)


def shape(plan: Plan) -> list[tuple[int, int, str]]:
    return [(span.start, span.end, span.kind.value) for span in plan.spans]


@pytest.mark.parametrize("tokens", [16, 40, 63])
def test_a_short_run_is_reused_whole_with_few_probes(tokens: int) -> None:
    plan = planned(words(1, tokens), SHORT)
    assert shape(plan) == [(0, 50, "recompute"), (50, 50 + tokens, "reuse"), (50 + tokens, 90 + tokens, "recompute")]
    assert plan.spans[1].probes == min(6, tokens // 8)
    assert len(recompute_positions(plan)) == 90 + tokens // 8 - (tokens == 63)
    assert [run.repair for run in plan.runs] == [MEMORY]
    assert plan.kl == pytest.approx(0.006 * tokens / (90 + tokens))
    assert exact_until(plan) == 50
    assert plan.rejected == ()


def test_longer_runs_are_repaired_as_ever() -> None:
    content = words(1, 64)
    plans = [planned(content, rules) for rules in (SHORT, replace(SHORT, short={}))]
    assert shape(plans[0]) == shape(plans[1])
    assert [run.repair for plan in plans for run in plan.runs] == [Repair(32), Repair(32)]


@pytest.mark.parametrize(
    ("rules", "mode", "hops", "reason"),
    [
        (replace(SHORT, short={}), Mode.BALANCED, 0, MissReason.TOO_SHORT),
        (replace(SHORT, short={Provenance.NEAR: MEMORY}), Mode.BALANCED, 0, MissReason.TOO_SHORT),
        (replace(SHORT, short_from={b"another": 0}), Mode.BALANCED, 0, MissReason.TOO_SHORT),
        (replace(SHORT, short_tokens_min=41), Mode.BALANCED, 0, MissReason.TOO_SHORT),
        (SHORT, Mode.EXACT, 0, MissReason.TOO_SHORT),
        (replace(EXACT_RULES, short=EVERY, short_from={EDGE: 0}), Mode.BALANCED, 0, MissReason.TOO_SHORT),
        (SHORT, Mode.BALANCED, 2, MissReason.EXACT_ONLY),
        (replace(SHORT, kl_max=0.001), Mode.BALANCED, 0, MissReason.DIVERGENCE),
    ],
)
def test_a_short_run_is_recomputed_where_it_is_not_allowed(
    rules: ReuseRules, mode: Mode, hops: int, reason: MissReason
) -> None:
    content = words(1, 40)
    plan = planned(content, rules, mode, hops=hops)
    assert shape(plan) == [(0, 130, "recompute")]
    assert [(item.start, item.end, item.miss.reason) for item in plan.rejected] == [(50, 90, reason)]
    unused = plan.rejected[0].run
    assert unused is not None and unused.donor.holder == plan.rejected[0].holder
    assert unused.pieces == (Run(37, 50, 40),)
    assert (unused.provenance, unused.edge) == (Provenance.ROLE, EDGE)


def test_the_budget_holds_for_short_runs_together_with_others() -> None:
    document, content = words(1, 200), words(2, 40)
    repairs = {each: (Repair(16, kl=0.01), Repair(64, kl=0.002)) for each in Provenance}
    prompt = joined(BEFORE, document, words(3, 30), content, AFTER)
    source = donor(joined(words(4, 37), document, words(5, 64), content), local=True)
    edges = dict.fromkeys([edge_of(prompt, source, kind) for kind in Provenance], 0)
    rules = replace(SHORT, repairs=repairs, kl_target=0.004, short_from=edges)
    plan = make_plan(prompt, [source], Mode.BALANCED, rules, COSTS)
    assert [run.repair.memory for run in plan.runs] == [False, True]
    assert plan.runs[0].repair.head_tokens == 64, "the short run's share is not left out of the sum"
    assert plan.kl == pytest.approx((200 * 0.002 + 40 * 0.006) / len(prompt))
    assert plan.kl <= 0.004


@pytest.mark.parametrize(("first", "reused"), [(50, True), (51, False), (90, False)])
def test_what_is_behind_a_border_alone_may_use_what_is_allowed_there(first: int, reused: bool) -> None:
    """A run that reaches over the border counts as what it begins as."""
    plan = planned(words(1, 40), replace(SHORT, short_from={EDGE: first}))
    assert any(span.kind is SpanKind.REUSE for span in plan.spans) == reused


def test_nothing_is_corrected_at_position_0() -> None:
    content = words(1, 40)
    plan = make_plan(joined(content, AFTER), [behind_other_text(content)], Mode.BALANCED, SHORT, COSTS)
    assert shape(plan) == [(0, 80, "recompute")]


def test_correcting_costs_time_that_may_not_pay() -> None:
    slow = replace(COSTS, align_bytes_per_s=COSTS.token_bytes * 17 / COSTS.token_s * 0.9)
    content = words(1, 40)
    prompt = joined(BEFORE, content, AFTER)
    plans = [make_plan(prompt, [behind_other_text(content)], Mode.BALANCED, SHORT, costs) for costs in (COSTS, slow)]
    assert [len(plan.runs) for plan in plans] == [1, 0]
    assert plans[1].rejected[0].miss.reason is MissReason.COST
    assert plans[1].rejected[0].run is not None


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_short_runs_are_options_only_within_their_rules(data: st.DataObject) -> None:
    rules = replace(
        SHORT,
        short=dict.fromkeys(data.draw(st.sets(st.sampled_from(Provenance))), MEMORY),
        short_from=data.draw(st.dictionaries(st.sampled_from([EDGE, b"other"]), st.integers(0, 200))),
        short_tokens_min=data.draw(st.integers(1, 64)),
    )
    at, tokens, kind = (
        data.draw(st.integers(0, 200)),
        data.draw(st.integers(1, 100)),
        data.draw(st.sampled_from(Provenance)),
    )
    run = Candidate(behind_other_text(words(1, 100)), (Run(37, at, tokens),), kind, edge=EDGE)
    allowed = allowed_repairs(run, rules, 1000)
    if tokens >= rules.run_tokens_min:
        assert not any(repair.memory for repair in allowed)
    else:
        inside = tokens >= rules.short_tokens_min and at > 0 and at >= rules.short_from.get(EDGE, 1000)
        assert allowed == ([MEMORY] if inside and kind in rules.short else [])


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(8, 30), min_size=1, max_size=3).filter(lambda each: 16 <= sum(each) < 64), st.integers(1, 12)
)
def test_every_piece_of_a_short_run_has_few_probes(lengths: list[int], guard_probes: int) -> None:
    pieces, at = [], 50
    for length in lengths:
        pieces.append(Run(at - 10, at, length))
        at += length + 3
    run = Candidate(behind_other_text(words(1, 120)), tuple(pieces), Provenance.ROLE)
    rules = replace(SHORT, guard_probes=guard_probes, hole_head_tokens=0)
    reused = [span for span in run.spans(MEMORY, rules, 1) if span.kind is SpanKind.REUSE]
    assert [(span.start, span.tokens) for span in reused] == [(piece.prompt_start, piece.length) for piece in pieces]
    assert all(1 <= span.probes <= max(1, span.tokens // 8) for span in reused)


def test_an_edge_is_named_by_both_beginnings_and_the_provenance() -> None:
    ours, theirs = joined(words(1, EDGE_TOKENS), words(2, 20)), joined(words(3, EDGE_TOKENS), words(4, 20))
    same = joined(words(1, EDGE_TOKENS), words(5, 30))
    edge = edge_of(ours, donor(theirs), Provenance.ROLE)
    assert edge == edge_of(same, donor(joined(words(3, EDGE_TOKENS), words(6, 9)), name=7), Provenance.ROLE)
    other = joined(ours[: EDGE_TOKENS - 1], words(9, 1), ours[EDGE_TOKENS:])
    assert (
        len(
            {
                edge,
                *(
                    edge_of(*changed)
                    for changed in (
                        (other, donor(theirs), Provenance.ROLE),
                        (ours, donor(other), Provenance.ROLE),
                        (theirs, donor(ours), Provenance.ROLE),
                        (ours, donor(theirs), Provenance.NEAR),
                        (ours[:5], donor(theirs), Provenance.ROLE),
                        (ours, donor(theirs, start=32), Provenance.ROLE),
                    )
                ),
            }
        )
        == 7
    )
