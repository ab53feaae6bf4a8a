"""Reuse is never slower than computing everything, even where what is believed of this machine and its links is wrong.

What filling a prompt really takes is worked out here from the engine's order of work, with the true costs; the planner knows
only the believed ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_cases import COSTS, ME, PEER, RULES, Tokens, donor, joined, words

from kvcomm_p2p.planning import plan as planning
from kvcomm_p2p.planning.caution import COST_ERROR, SLOWER_MAX
from kvcomm_p2p.planning.costs import PullCost, align_s, attended, forward_s
from kvcomm_p2p.planning.plan import RISKY_WHY, make_plan
from kvcomm_p2p.planning.spans import lead_rows, probe_positions, pull_wait_s
from kvcomm_p2p.planning.types import Costs, Donor, Mode, Plan, ReuseRules, Span, SpanKind
from kvcomm_p2p.protocol.ids import NodeId

Pulls = Mapping[NodeId, PullCost]

GUARDED = replace(RULES, guard_probes=6)
OTHER_PEER = NodeId(b"2" * 16)


@dataclass(frozen=True)
class Scene:
    """A prompt, who holds parts of it, and what the planner believes of costs."""

    prompt: Tokens
    donors: list[Donor]
    costs: Costs
    pulls: dict[NodeId, PullCost]

    def plan(self, mode: Mode = Mode.BALANCED, rules: ReuseRules = GUARDED) -> Plan:
        return make_plan(self.prompt, self.donors, mode, rules, self.costs, pulls=self.pulls)


def logarithmic(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(np.log(low), np.log(high)).map(lambda value: float(np.exp(value)))


@st.composite
def all_costs(draw: st.DrawFn) -> Costs:
    """From a small GPU to a slow CPU, from a bad wireless link to shared memory."""
    token_s = draw(logarithmic(2e-5, 5e-3))
    return Costs(
        forward_s=token_s * draw(logarithmic(2, 200)),
        token_s=token_s,
        attention_s=token_s / draw(logarithmic(2_000, 50_000)),
        pull_latency_s=draw(logarithmic(1e-4, 5e-2)),
        pull_bytes_per_s=draw(logarithmic(2e6, 2e10)),
        align_bytes_per_s=draw(logarithmic(3e8, 2e10)),
        token_bytes=int(draw(logarithmic(1e4, 5e5))),
    )


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    """One to three runs of 64 to 2,000 tokens at any positions, held by peers or here, some as exact beginnings."""
    seed = draw(st.integers(0, 1_000))
    parts: list[Tokens] = []
    donors: list[Donor] = []
    at = 0
    for number in range(draw(st.integers(1, 3))):
        before = words(1000 * seed + 2 * number, draw(st.integers(0, 400)))
        run = words(1000 * seed + 2 * number + 1, int(draw(logarithmic(64, 2000))))
        holder = draw(st.sampled_from([ME, PEER, OTHER_PEER]))
        options = {"local": holder == ME, "holder": holder, "name": number}
        if draw(st.booleans()):
            held = joined(words(1000 * seed + 500 + number, draw(st.integers(0, 300))), run)
            donors.append(donor(held, **options))
        else:
            held = joined(*parts, before, run)
            donors.append(donor(held, same_prefix_until=len(held), **options))
        parts += [before, run]
        at += len(before) + len(run)
    parts.append(words(1000 * seed + 999, draw(st.integers(1, 100))))
    costs = draw(all_costs())
    pulls = {}
    if draw(st.booleans()):
        pulls[PEER] = PullCost(draw(logarithmic(1e-4, 5e-2)), draw(logarithmic(2e6, 2e10)))
    return Scene(joined(*parts), donors, costs, pulls)


def true_s(plan: Plan, scene: Scene, costs: Costs, pulls: Pulls) -> float:
    """Seconds that the engine takes to carry a plan out: blocks are pulled and aligned side by side; the prompt's own beginning
    is computed meanwhile where the plan's believed costs say so; the rest is one forward after that."""
    _, lead = lead_rows(plan, scene.costs, scene.pulls)
    first, rest = np.zeros(2), np.zeros(2)
    for span in plan.spans:
        if span.kind is SpanKind.RECOMPUTE:
            into = first if span.end <= lead else rest
            into += span.tokens, attended(span.tokens, span.start)
        else:
            rest += span.probes, float(probe_positions(span).sum())
    aligned = sum(span.tokens for span in plan.spans if span.donor is not None) * costs.token_bytes
    meanwhile = forward_s(costs, int(first[0]), first[1])
    wait = max(pull_wait_s(plan.spans, costs, pulls), align_s(costs, aligned), meanwhile)
    return wait + forward_s(costs, int(rest[0]), rest[1])


def dense_s(scene: Scene, costs: Costs) -> float:
    return forward_s(costs, len(scene.prompt), attended(len(scene.prompt), 0))


def truths(scene: Scene, error: float = COST_ERROR) -> Iterator[tuple[Costs, dict[NodeId, PullCost]]]:
    """All corners of what may be true if every cost (seconds, not rates) is off by `error`. Times are ratios of sums and maxima
    of these, so they are largest in a corner."""
    costs = scene.costs
    for forward, token, pair, latency, byte, align in product((1 - error, 1 + error), repeat=6):
        true = replace(
            costs,
            forward_s=costs.forward_s * forward,
            token_s=costs.token_s * token,
            attention_s=costs.attention_s * pair,
            pull_latency_s=costs.pull_latency_s * latency,
            pull_bytes_per_s=costs.pull_bytes_per_s / byte,
            align_bytes_per_s=costs.align_bytes_per_s / align,
        )
        pulls = {
            peer: PullCost(cost.latency_s * latency, cost.bytes_per_s / byte) for peer, cost in scene.pulls.items()
        }
        yield true, pulls


def slowest(scene: Scene, plan: Plan) -> float:
    """The largest ratio to computing everything that may come of a plan."""
    return max(true_s(plan, scene, costs, pulls) / dense_s(scene, costs) for costs, pulls in truths(scene))


def reuses(plan: Plan) -> bool:
    return any(span.donor is not None for span in plan.spans)


@given(scenes(), st.sampled_from([Mode.BALANCED, Mode.FAST, Mode.EXACT]))
@settings(max_examples=200, deadline=None)
def test_no_plan_is_expected_to_be_slower(scene: Scene, mode: Mode) -> None:
    plan = scene.plan(mode)
    assert plan.dense_s == pytest.approx(dense_s(scene, scene.costs))
    assert plan.planned_s <= plan.dense_s
    if not reuses(plan):
        assert plan.planned_s == plan.dense_s
        assert plan.spans == (Span(0, len(scene.prompt), SpanKind.RECOMPUTE, why=plan.spans[0].why),)


@given(scenes())
@settings(max_examples=200, deadline=None)
def test_what_is_expected_is_what_the_engines_order_of_work_takes(scene: Scene) -> None:
    plan = scene.plan()
    assert plan.planned_s == pytest.approx(true_s(plan, scene, scene.costs, scene.pulls), rel=1e-3)


@given(scenes(), st.sampled_from([Mode.BALANCED, Mode.EXACT]))
@settings(max_examples=300, deadline=None)
def test_no_plan_is_slower_than_promised_though_every_cost_is_off(scene: Scene, mode: Mode) -> None:
    assert slowest(scene, scene.plan(mode)) <= SLOWER_MAX + 1e-6


def document_behind(tokens: int, bytes_per_s: float) -> Scene:
    """A document that a peer holds, behind and before something else."""
    document = words(1, tokens)
    prompt = joined(words(2, 90), document, words(3, 20))
    costs = replace(COSTS, pull_bytes_per_s=bytes_per_s)
    return Scene(prompt, [donor(joined(words(4, 70), document))], costs, {})


def test_what_is_not_sure_to_be_faster_is_recomputed_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = document_behind(1000, 25e6)
    plan = scene.plan()
    assert not reuses(plan)
    assert plan.spans[0].why == RISKY_WHY
    assert [rejected.miss.detail for rejected in plan.rejected] == [RISKY_WHY]
    assert document_behind(1000, 15e6).plan().spans[0].why != RISKY_WHY
    monkeypatch.setattr(planning, "is_safe", lambda *_: True)
    rash = scene.plan()
    assert reuses(rash)
    assert rash.planned_s < rash.dense_s
    assert slowest(scene, rash) > 1.3


def test_caution_gives_up_little(monkeypatch: pytest.MonkeyPatch) -> None:
    scenes = [
        document_behind(tokens, bytes_per_s)
        for tokens in (64, 128, 256, 512, 1024, 2000)
        for bytes_per_s in np.logspace(6, 10, 17)
    ]

    def saved() -> float:
        return sum(1 - plan.planned_s / plan.dense_s for plan in (scene.plan() for scene in scenes))

    cautious = saved()
    monkeypatch.setattr(planning, "is_safe", lambda *_: True)
    assert 0.95 * saved() < cautious < saved()
