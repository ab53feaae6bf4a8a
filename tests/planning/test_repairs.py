"""How much of each run is recomputed: what a repair costs, which are allowed, and how a budget is spent."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import MappingProxyType

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from planning_cases import COSTS, RULES
from repair_cases import DONOR, candidates, repairs, rules

from kvcomm_p2p.planning.candidates import Candidate
from kvcomm_p2p.planning.repairs import allowed_repairs, choose_repairs, expected_kl, repair_s, repaired_tokens
from kvcomm_p2p.planning.types import Provenance, Repair, ReuseRules, Run, SpanKind

runs_of_a_prompt = st.lists(candidates(pieces_max=2), min_size=1, max_size=4)


def run(tokens: int, provenance: Provenance = Provenance.ROLE) -> Candidate:
    return Candidate(DONOR, (Run(0, 100, tokens),), provenance)


def measured(*options: Repair, **changes: float) -> ReuseRules:
    return replace(RULES, repairs=MappingProxyType({Provenance.ROLE: options}), **changes)


@settings(deadline=None)
@given(candidates(), repairs, rules())
def test_a_repair_recomputes_what_it_says(each: Candidate, repair: Repair, allowed: ReuseRules) -> None:
    spans = [span for span in each.spans(repair, allowed) if span.donor is not None]
    recomputed = sum(span.tokens if span.kind is SpanKind.RECOMPUTE else span.probes for span in spans)
    assert repaired_tokens(each, repair, allowed) == recomputed <= each.tokens


@settings(deadline=None)
@given(candidates(), repairs, rules())
def test_a_longer_head_and_more_probes_never_cost_less(each: Candidate, repair: Repair, allowed: ReuseRules) -> None:
    longer = replace(repair, head_tokens=2 * repair.head_tokens)
    more = replace(repair, probe_share=min(0.5, 2 * repair.probe_share))
    for costly in (longer, more):
        # Probes stand in what the head leaves: a share of less, and they are rounded piece by piece.
        slack = 0 if costly is more else len(each.pieces) * (1 + allowed.guard_probes)
        assert repaired_tokens(each, costly, allowed) >= repaired_tokens(each, repair, allowed) - slack


def test_nothing_recomputed_costs_nothing_beyond_the_forward() -> None:
    assert repair_s(run(400), Repair(0), RULES, COSTS) == 0.0
    assert 0.0 < repair_s(run(400), Repair(8), RULES, COSTS) < repair_s(run(400), Repair(64), RULES, COSTS)


@settings(deadline=None)
@given(candidates(), repairs, st.integers(4000, 20_000))
def test_a_run_brings_its_share_of_the_divergence(each: Candidate, repair: Repair, prompt_tokens: int) -> None:
    expected = repair.kl * each.tokens / prompt_tokens
    assert expected_kl(each, repair, prompt_tokens) == pytest.approx(expected)
    assert expected_kl(each, repair, each.tokens) == pytest.approx(repair.kl)


@settings(deadline=None)
@given(candidates(), rules(), st.integers(4000, 20_000))
def test_what_is_allowed_was_measured_and_keeps_the_budget(
    each: Candidate, allowed: ReuseRules, prompt_tokens: int
) -> None:
    options = allowed.options(each.provenance, each.start, each.tokens)
    found = allowed_repairs(each, allowed, prompt_tokens)
    assert [option for option in dict.fromkeys(options) if option in found] == found
    assert all(expected_kl(each, repair, prompt_tokens) <= allowed.kl_max for repair in found)
    same = {(min(r.head_tokens, each.tokens // 4), r.probe_share, r.shift, r.memory) for r in found}
    assert len(same) == len(found), "of repairs that come to the same only one is allowed"


def test_of_repairs_that_a_short_run_cuts_to_the_same_the_cheapest_counts() -> None:
    options = (Repair(8, kl=0.03), Repair(32, kl=0.02), Repair(64, kl=0.01), Repair(32, 0.1, True, 0.005))
    assert allowed_repairs(run(400), measured(*options), 1000) == list(options)
    assert allowed_repairs(run(120), measured(*options), 1000) == [options[0], options[1], options[3]]
    assert allowed_repairs(run(120), measured(*options, kl_max=0.0015), 1000) == [options[3]]


@settings(deadline=None)
@given(runs_of_a_prompt, rules(), st.integers(4000, 20_000))
def test_a_run_without_an_allowed_repair_cannot_be_chosen_for(
    runs: list[Candidate], allowed: ReuseRules, prompt_tokens: int
) -> None:
    possible = all(allowed_repairs(each, allowed, prompt_tokens) for each in runs)
    if possible:
        assert len(choose_repairs(runs, allowed, COSTS, prompt_tokens)) == len(runs)
    else:
        with pytest.raises(ValueError, match="no repair of the run"):
            choose_repairs(runs, allowed, COSTS, prompt_tokens)


@settings(deadline=None)
@given(runs_of_a_prompt, rules(), st.integers(4000, 20_000))
def test_the_budget_is_kept_if_anything_allowed_keeps_it(
    runs: list[Candidate], allowed: ReuseRules, prompt_tokens: int
) -> None:
    options = [allowed_repairs(each, allowed, prompt_tokens) for each in runs]
    assume(all(options))
    chosen = choose_repairs(runs, allowed, COSTS, prompt_tokens)
    assert all(repair in each for repair, each in zip(chosen, options, strict=True))
    kl = sum(expected_kl(each, repair, prompt_tokens) for each, repair in zip(runs, chosen, strict=True))
    least = sum(
        min(expected_kl(each, repair, prompt_tokens) for repair in possible)
        for each, possible in zip(runs, options, strict=True)
    )
    assert kl <= max(allowed.kl_target, least) * (1 + 1e-9)


@settings(deadline=None)
@given(runs_of_a_prompt, rules(), st.integers(4000, 20_000), st.floats(0.0, 0.05))
def test_a_larger_budget_never_costs_more(
    runs: list[Candidate], allowed: ReuseRules, prompt_tokens: int, more: float
) -> None:
    assume(all(allowed_repairs(each, allowed, prompt_tokens) for each in runs))
    strict, lax = (
        sum(
            repair_s(each, repair, allowed, COSTS)
            for each, repair in zip(runs, choose_repairs(runs, spending, COSTS, prompt_tokens), strict=True)
        )
        for spending in (allowed, replace(allowed, kl_target=allowed.kl_target + more))
    )
    assert lax <= strict * (1 + 1e-12)


def test_without_pressure_the_cheapest_is_taken_and_then_what_saves_most_per_second() -> None:
    options = (Repair(8, kl=0.04), Repair(16, kl=0.01), Repair(96, kl=0.002))
    runs = [run(400), Candidate(DONOR, (Run(0, 600, 400),), Provenance.ROLE)]
    expected = {0.05: "8 8", 0.021: "16 8", 0.01: "16 16", 0.007: "96 16", 0.0001: "96 96"}
    for target, heads in expected.items():
        chosen = choose_repairs(runs, measured(*options, kl_target=target), COSTS, 1000)
        assert " ".join(str(repair.head_tokens) for repair in chosen) == heads, target


def test_what_another_repair_beats_on_this_run_is_never_taken() -> None:
    # On a run of 100 tokens a head of 64 is cut to 25, less than 8 and probes: cheaper here than the first, and better.
    options = (Repair(8, 0.3, kl=0.02), Repair(64, kl=0.01), Repair(16, kl=0.03))
    for target, kl_max in product((0.0, 0.0015, 0.1), (0.1, 0.0025)):
        [chosen] = choose_repairs([run(100)], measured(*options, kl_target=target, kl_max=kl_max), COSTS, 1000)
        assert chosen is not options[0]
