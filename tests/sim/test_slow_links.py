"""Slow links in simulations: KV as int8, a pool at another site, and looks at links believed too slow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvcomm_p2p.planning.types import ReuseRules
from kvcomm_p2p.protocol.anchors import BLOCK_TOKENS, BlockHandle, KVLayout
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.events import SendBlock
from kvcomm_p2p.protocol.ids import ModelId, NodeId
from kvcomm_p2p.protocol.messages import MemberRecord
from kvcomm_p2p.sim.central import Route
from kvcomm_p2p.sim.cost_table import load_table
from kvcomm_p2p.sim.encoding import CACHE_BYTES_MAX, Encoders
from kvcomm_p2p.sim.invariants import Invariants
from kvcomm_p2p.sim.links import LinkProfile
from kvcomm_p2p.sim.machine import SimNode
from kvcomm_p2p.sim.metrics import Observed, summarize
from kvcomm_p2p.sim.scenario import check_scenario
from kvcomm_p2p.sim.simulation import Simulation
from kvcomm_p2p.sim.world import World

RULES = ReuseRules(approximate=True, reason="", kl_target=1.0, kl_max=2.0, int8_kl=1e-4)
SLOW: dict[str, Any] = {
    "name": "slow",
    "agents": 4,
    "duration_s": 60.0,
    "updates": 0,
    "workload": {"kind": "rag", "tasks_per_s": 0.3, "documents": 4, "readers": 1},
    "network": {"inside": "dsl", "loss": 0.0},
}


def simulate(rules: ReuseRules = RULES, fabric: str = "peers", **changes: Any) -> tuple[Simulation, Observed]:
    chosen = check_scenario({**SLOW, **changes})
    simulation = Simulation(chosen, fabric, load_table(chosen.costs), rules)
    invariants = Invariants(simulation.world, every=50)
    observed = simulation.run()
    invariants.check_all()
    return simulation, observed


def int8_frames(simulation: Simulation) -> int:
    return simulation.world.frames["EncodedBlock"]


def test_on_slow_links_agents_ask_for_int8_where_raw_blocks_are_not_worth_their_way() -> None:
    auto, with_int8 = simulate()
    raw, without = simulate(wire_encoding="raw")
    assert int8_frames(auto) > 0 and int8_frames(raw) == 0
    assert with_int8.violations == without.violations == 0 and with_int8.unanswered == 0
    assert summarize(with_int8).reused > summarize(without).reused
    pairs = zip(with_int8.outcomes, without.outcomes, strict=True)
    helped = [(encoded, raw) for encoded, raw in pairs if encoded.reused and raw.covered and not raw.reused]
    assert helped and all(encoded.pulled_bytes and encoded.ttft_s < 0.7 * raw.ttft_s for encoded, raw in helped)


def test_nothing_travels_as_int8_where_links_are_fast_or_its_divergence_was_not_measured() -> None:
    assert int8_frames(simulate(network={"inside": "fast"})[0]) == 0
    assert int8_frames(simulate(replace(RULES, int8_kl=None))[0]) == 0
    assert int8_frames(simulate(network={"inside": "fast"}, wire_encoding="int8")[0]) > 0


@pytest.mark.parametrize("fabric", ["peers", "central"])
def test_what_travelled_as_int8_is_a_quarter_of_its_bytes(fabric: str) -> None:
    _, always = simulate(fabric=fabric, network={"inside": "fast"}, wire_encoding="int8")
    _, raw = simulate(fabric=fabric, network={"inside": "fast"}, wire_encoding="raw")
    assert 0 < summarize(always).pulled_bytes < 0.6 * summarize(raw).pulled_bytes


def test_a_pool_at_another_site_is_as_slow_as_the_link_to_it() -> None:
    sites = {"inside": "fast", "sites": 2}
    near, far = (simulate(fabric="central", network={**sites, "between": name})[1] for name in ("fast", "dsl"))
    slowed = [sum(outcome.ttft_s for outcome in each.outcomes if outcome.agent % 2) for each in (near, far)]
    kept = [sum(outcome.ttft_s for outcome in each.outcomes if not outcome.agent % 2) for each in (near, far)]
    assert slowed[1] > slowed[0] and kept[1] < 1.2 * kept[0]


def test_links_believed_too_slow_are_looked_at_and_used_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def reused() -> float:
        chosen = check_scenario({**SLOW, "network": {"inside": "fast"}, "wire_encoding": "raw"})
        simulation = Simulation(chosen, "peers", load_table(chosen.costs), RULES)
        simulation._believes = replace(simulation._believes, pull_latency_s=5.0, pull_bytes_per_s=1e3)
        return summarize(simulation.run()).reused

    looking = reused()
    monkeypatch.setattr("kvcomm_p2p.sim.agents.Scouting.look", lambda *_: None)
    assert looking > reused()


def test_nothing_that_travelled_as_int8_is_kept() -> None:
    simulation, _ = simulate(wire_encoding="int8")
    assert int8_frames(simulation) > 0
    layout = load_table(simulation.scenario.costs).layout
    sizes = {layout.int8_bytes(tokens) for tokens in range(1, BLOCK_TOKENS + 1)}
    assert all(sizes.isdisjoint(machine.filled.values()) for machine in simulation.world.nodes)


# ---------------------------------------------------------------------------------------------------------------- parts


def machine() -> tuple[World, SimNode]:
    world = World(1)
    record = MemberRecord(NodeId(b"a" * 16), 1, "a", ModelId(b"m" * 16), "10.0.0.1:1", "10.0.0.1:2")
    return world, world.add(record, NodeConfig())


def block(slot: int, kv_bytes: int = 1000, encoded_bytes: int = 250) -> SendBlock:
    return SendBlock(NodeId(b"b" * 16), 1, 0, BlockHandle(0, slot, 1), kv_bytes, False, 0, encoded_bytes)


def test_blocks_are_encoded_by_two_threads_once_and_sent_in_the_order_in_which_they_were_asked_for() -> None:
    _, holder = machine()
    encoders = Encoders(1000.0)
    assert encoders.ready_at(holder, block(1, 3000), 0.0) == 3.0
    assert encoders.ready_at(holder, block(2), 0.0) == 3.0, "ready after a second, but not before the first"
    assert encoders.ready_at(holder, block(1, 3000), 4.0) == 4.0, "kept"
    holder.generation += 1
    assert encoders.ready_at(holder, block(1, 3000), 10.0) == 13.0, (
        "what a machine encoded is gone when it starts again"
    )


def test_encoded_blocks_are_kept_within_a_bound_the_latest_asked_for() -> None:
    _, holder = machine()
    encoders = Encoders(1000.0)
    half = CACHE_BYTES_MAX // 2
    for slot in (1, 2, 1, 3):
        encoders.ready_at(holder, block(slot, 1, half), 0.0)
    assert encoders.ready_at(holder, block(1, 10_000, half), 100.0) == 100.0
    assert encoders.ready_at(holder, block(2, 10_000, half), 100.0) == 110.0, "asked for longest ago"


def test_a_route_takes_latency_and_what_its_link_is_slower_by() -> None:
    world, _ = machine()
    arrived: list[float] = []
    route = Route(world, LinkProfile(latency_s=0.5, jitter_s=0.0, bytes_per_s=1e5), 1e6)
    for way, size in ((route.up, 10**6), (route.down, 10**6), (route.down, 10**6), (route.down, 1000)):
        way(size, lambda: arrived.append(world.now))
    world.run(60.0)
    assert arrived == pytest.approx([0.509, 9.5, 9.5, 18.5]), "blocks one after the other, questions between them"
    none = Route(world, LinkProfile(latency_s=0.5, jitter_s=0.0, bytes_per_s=1e9), 1e6)
    none.down(10**6, lambda: arrived.append(world.now))
    world.run(1.0)
    assert arrived[-1] == pytest.approx(60.5)


def test_a_table_says_what_int8_takes_and_a_layout_whether_it_is_smaller() -> None:
    table = load_table("llama-3.1-8b-h100")
    assert table.costs(pull_latency_s=1e-3, pull_bytes_per_s=1e9).int8_share == pytest.approx(0.51, abs=0.01)
    assert table.layout.int8_smaller and not KVLayout(1, 1, 4, 4, "bfloat16").int8_smaller
