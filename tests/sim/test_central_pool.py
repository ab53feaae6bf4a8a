"""The server of the central pool: a lock that all take in turn, and an interface on which questions do not wait for blocks."""

from __future__ import annotations

import pytest

from kvcomm_p2p.sim.central import SMALL_BYTES, CentralPool, Interface, Line
from kvcomm_p2p.sim.links import LinkProfile
from kvcomm_p2p.sim.scenario import CentralSpec
from kvcomm_p2p.sim.world import World

BLOCK = 1_000_000
LINK = LinkProfile(latency_s=0.01, jitter_s=0.0, bytes_per_s=1e6)


def test_a_lock_is_taken_in_turn() -> None:
    world, done = World(), []
    line = Line(world)
    for _ in range(3):
        line.serve(0.5, lambda: done.append(world.now))
    world.run(10.0)
    assert done == [0.5, 1.0, 1.5] and line.busy_s == 1.5


def test_blocks_wait_for_blocks_and_questions_pass_between_their_packets() -> None:
    """What passes takes its share all the same: the next block comes so much later."""
    world, done = World(), {}
    interface = Interface(world)
    for name, size in (("block", BLOCK), ("question", 1000), ("next block", BLOCK)):
        interface.transfer(size, 1e-6, lambda name=name: done.setdefault(name, world.now))  # type: ignore[misc]
    world.run(10.0)
    assert done == pytest.approx({"question": 0.001, "block": 1.0, "next block": 2.001})
    assert SMALL_BYTES < BLOCK and interface.busy_s == pytest.approx(2.001)


@pytest.mark.parametrize(("interfaces", "seconds"), [(1.0, 1.02), (4.0, 1.02), (0.5, 2.02)])
def test_a_pull_takes_the_slower_of_the_servers_interface_and_the_agents_link(
    interfaces: float, seconds: float
) -> None:
    world, done = World(), []
    pool = CentralPool(world, CentralSpec(interfaces=interfaces, lock_s=0.0), LINK)
    pool.call(pool.route(LINK), 0, lambda: BLOCK, lambda: done.append(world.now))
    world.run(10.0)
    assert done == [pytest.approx(seconds)]
