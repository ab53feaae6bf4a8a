"""The fabric peers without one of its parts: what is taken away is away, and all else is the same."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
from sim_cases import RULES

from kvcomm_p2p.errors import ConfigError
from kvcomm_p2p.protocol import events as ev
from kvcomm_p2p.protocol import messages as m
from kvcomm_p2p.sim import study
from kvcomm_p2p.sim.ablations import ABLATIONS, ablation
from kvcomm_p2p.sim.cost_table import load_table
from kvcomm_p2p.sim.metrics import Observed
from kvcomm_p2p.sim.scenario import Scenario, check_scenario
from kvcomm_p2p.sim.simulation import Simulation
from kvcomm_p2p.sim.worth import worth

WRITTEN: dict[str, Any] = {
    "name": "crowd",
    "agents": 5,
    "duration_s": 6.0,
    "costs": "llama-3.1-8b-h100",
    "updates": 0,
    "fabrics": ["peers"],
    # Everybody is asked about the same documents at the same time, and holders serve one at a time.
    "workload": {"kind": "rag", "tasks_per_s": 0.6, "documents": 4, "readers": 5},
    "network": {"inside": "fast"},
    "protocol": {"uploads_max": 1},
}


def crowd(**changes: Any) -> Scenario:
    return check_scenario({**WRITTEN, **changes})


class Watch:
    """What nodes asked for in one run."""

    def __init__(self, name: str | None) -> None:
        chosen = crowd()
        without = None if name is None else ablation(name)
        simulation = Simulation(chosen, "peers", load_table(chosen.costs), RULES, ablation=without)
        self.simulation = simulation
        self.sent: Counter[str] = Counter()
        self.named = self.retained = self.replicas = 0
        self._fetched: set[object] = set()
        simulation.world.observers.append(self._watch)
        self.observed: Observed = simulation.run()

    def _watch(self, number: int, event: ev.Event, now: float, effects: list[ev.Effect]) -> None:
        if isinstance(event, ev.AnchorsPublished):
            self.replicas += sum(not self._fetched.isdisjoint(anchor.handles) for anchor in event.anchors)
        for effect in effects:
            if isinstance(effect, ev.SendMessage):
                self.sent[type(effect.message).__name__] += 1
                if isinstance(effect.message, m.PullFailed):
                    self.named += len(effect.message.referrals)
            self.retained += isinstance(effect, ev.RetainBlock)
            if isinstance(effect, ev.FinishFetch):
                self._fetched.update(block.handle for block in effect.found)


@cache
def watched(name: str | None) -> Watch:
    """Each run once for all tests."""
    return Watch(name)


@pytest.fixture(scope="module")
def whole() -> Watch:
    return watched(None)


def test_the_whole_has_all_parts(whole: Watch) -> None:
    assert whole.named > 0 and whole.retained > 0 and whole.replicas > 0
    assert not whole.sent["ShardAsk"]
    assert whole.observed.fabric == "peers"


def test_without_referrals_nobody_is_named_and_nothing_passed_on(whole: Watch) -> None:
    without = watched("referrals")
    assert without.named == without.retained == 0 and without.replicas > 0
    assert without.observed.fabric == "peers, without referrals"


def test_without_replication_nobody_publishes_what_it_pulled(whole: Watch) -> None:
    without = watched("replication")
    assert without.replicas == 0 and without.named > 0
    both = watched("referrals and replication")
    assert both.replicas == both.named == both.retained == 0


def test_prompts_are_the_same_whatever_is_taken_away(whole: Watch) -> None:
    asked = [(each.agent, each.tokens) for each in whole.observed.outcomes]
    for name in ("replication", "provenance", "sharded directory"):
        observed = watched(name).observed
        assert sorted(asked) == sorted((each.agent, each.tokens) for each in observed.outcomes)
        assert observed.unanswered == 0


def test_a_sharded_directory_asks_owners_and_a_full_index_nobody(whole: Watch) -> None:
    assert watched("sharded directory").sent["ShardAsk"] > 0
    assert watched("full index").sent == whole.sent, "five nodes have a full index anyway"


def test_a_study_tells_of_each(whole: Watch) -> None:
    chosen = crowd(fabrics=["own", "peers"], ablations=["replication", "provenance"])
    done = study.run_study(chosen, RULES)
    assert [each.fabric for each in done.observed] == [
        "own",
        "peers",
        "peers, without replication",
        "peers, without provenance",
    ]
    cases = {row.case for row in study.figures(done)}
    assert "crowd: peers, without replication" in cases and "crowd: peers (this protocol)" in cases
    rows = {(row.case, row.metric): row for row in worth([done, done])}
    first = rows["crowd: peers, without replication", "first token, mean"]
    assert first.n == 2 * len(whole.observed.outcomes) and first.baseline is not None
    assert first.ratio == pytest.approx(first.baseline / first.value)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"ablations": ["gossip"]}, "'gossip' is unknown: choose of referrals"),
        ({"ablations": ["replication", "replication"]}, "named twice"),
        ({"ablations": ["replication"], "fabrics": ["own"]}, "add it to fabrics"),
    ],
)
def test_ablations_that_cannot_be_are_refused(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        crowd(**change)


def test_every_ablation_is_a_scenario() -> None:
    names = [each.name for each in ABLATIONS]
    assert len(crowd(ablations=names).runs()) == 1 + len(names)
    assert len({each.title for each in ABLATIONS}) == len(names)
