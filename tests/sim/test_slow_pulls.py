"""Pulls over slow links, in virtual time: blocks that take longer than the patience come in chunks that do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcomm_p2p.planning.types import ReuseRules
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.sim.cost_table import load_table
from kvcomm_p2p.sim.herd import HerdSeen
from kvcomm_p2p.sim.links import Links
from kvcomm_p2p.sim.scenario import load_scenario
from kvcomm_p2p.sim.simulation import Simulation

RULES = ReuseRules(approximate=False, reason="test")
STALL_S = NodeConfig().pull_stall_timeout_s
BLOCK_BYTES = 1_474_560
"""Of 32 tokens of 46 kB."""

FAR_S = 0.0125


def simulate(agents: int, mbit_per_s: float, **changes: Any) -> tuple[Simulation, list[HerdSeen]]:
    given = {
        "duration_s": 40.0,
        "agents": agents,
        "herd.times": 1,
        "herd.block_bytes": BLOCK_BYTES,
        "network.latency_s": FAR_S,
        "network.bytes_per_s": mbit_per_s * 125_000,
    }
    scenario = load_scenario("herd", {**given, **changes})
    simulation = Simulation(scenario, "peers", load_table(scenario.costs), RULES)
    return simulation, simulation.run().herds


@pytest.mark.parametrize(
    ("pullers", "mbit_per_s", "blocks"),
    [(1, 5, 4), (1, 25, 8), (1, 100, 16), (4, 100, 16)],
)
def test_everything_arrives_and_nothing_is_lost(pullers: int, mbit_per_s: float, blocks: int) -> None:
    _, (herd,) = simulate(pullers + 1, mbit_per_s, **{"herd.blocks": blocks})
    assert BLOCK_BYTES / (mbit_per_s * 125_000) > STALL_S / 2
    assert herd.pullers == pullers and not herd.missed and herd.wait_lost_s == 0.0
    assert herd.last_s < (1.1 if pullers == 1 else 2.5) * herd.alone_s


@pytest.mark.parametrize("latency_s", [0.0002, FAR_S])
def test_nobody_of_sixteen_misses_anything_over_a_hundred_megabits(latency_s: float) -> None:
    _, herds = simulate(16, 100, **{"network.latency_s": latency_s, "herd.times": 2, "herd.block_bytes": 1 << 20})
    for herd in herds:
        assert herd.pullers == 15 and not herd.missed and herd.wait_lost_s < STALL_S
        assert herd.last_s < 4 * herd.alone_s


def test_where_even_the_smallest_chunk_takes_too_long_it_is_a_miss_after_one_stall() -> None:
    _, (herd,) = simulate(2, 1, **{"herd.blocks": 2})
    assert set(herd.missed) == {"stalled"}
    assert herd.wait_lost_s == pytest.approx(STALL_S)


def test_a_link_that_is_slow_though_near_costs_the_first_request_and_no_later_one() -> None:
    near = {"network.latency_s": 0.0002, "herd.blocks": 2, "herd.times": 3}
    _, herds = simulate(2, 5, **near)
    # Origins take turns, so each of the two agents is a puller that knows nothing once.
    assert [bool(herd.missed) for herd in herds] == [True, True, False]
    assert max(herd.wait_lost_s for herd in herds) <= STALL_S + 1e-6


@pytest.mark.parametrize("inside", ["loopback", "lan", "fast"])
def test_fast_links_cost_a_few_chunks_more_once(inside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    enqueue = Links.enqueue

    def counting(self: Links, source: int, flow: tuple[int, int], chunk_bytes: int, arrive: Callable[[], None]) -> None:
        sizes.append(chunk_bytes)
        enqueue(self, source, flow, chunk_bytes, arrive)

    monkeypatch.setattr(Links, "enqueue", counting)
    given = {"duration_s": 20.0, "herd.blocks": 16, "herd.times": 6, "herd.block_bytes": BLOCK_BYTES, "agents": 2}
    scenario = load_scenario("herd", {**given, "network.inside": inside})
    herds = Simulation(scenario, "peers", load_table(scenario.costs), RULES).run().herds
    assert len(herds) == 6 and not any(herd.missed for herd in herds)
    # Each of the two begins with two pulls of a block each, in five chunks; from then on a block is one chunk.
    assert len(sizes) == 6 * 16 + 2 * 2 * 4
