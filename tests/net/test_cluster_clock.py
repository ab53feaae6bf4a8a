"""Clocks that jump or stand still. A node has only the monotonic clock; a suspended machine makes even that one jump."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
from net_nodes import CONFIG, TestNode, make_anchor, wait_until, wants_of

from kvcomm_p2p.net.memory_transport import MemoryHub, MemoryTransport
from kvcomm_p2p.net.zmq_transport import ZmqTransport

HOUR_S = 3600.0


class Clock:
    """Takes over the clock of a driver's loop: its timers follow."""

    def __init__(self, node: TestNode) -> None:
        self._ahead_s = 0.0
        self._stands_at: float | None = None

        async def install() -> None:
            loop: Any = asyncio.get_running_loop()
            true = loop.time
            loop.time = lambda: true() + self._ahead_s if self._stands_at is None else self._stands_at
            self._true = true

        node.driver.run(install()).result(5)

    def jump(self, seconds: float) -> None:
        self._ahead_s += seconds

    def stand(self) -> None:
        self._stands_at = self._true() + self._ahead_s

    def go_on(self) -> None:
        """As if no time had passed meanwhile."""
        assert self._stands_at is not None
        self._ahead_s = self._stands_at - self._true()
        self._stands_at = None


Pair = tuple[TestNode, TestNode, Clock]


@pytest.fixture(params=["memory", "zmq"])
def transports(request: pytest.FixtureRequest) -> Callable[[], Any]:
    hub = MemoryHub()
    return (lambda: MemoryTransport(hub)) if request.param == "memory" else ZmqTransport


def sees_alive(node: TestNode) -> bool:
    return [peer.state for peer in node.ask(lambda driver: driver.peers())] == ["alive"]


def test_an_hour_that_passes_at_once_is_survived(transports: Callable[[], Any]) -> None:
    """As after a laptop's lid was closed: whatever has run out meanwhile, both find each other again and share."""
    with TestNode("steady", transports()) as steady, TestNode("jumping", transports()) as jumping:
        jumping.join(steady.driver.addresses.control)
        anchor = make_anchor(steady.store, 1, blocks=2, block_kv_bytes=1 << 16)
        steady.hold(anchor)
        clock = Clock(jumping)
        for _ in range(3):
            clock.jump(HOUR_S)
            assert wait_until(lambda: sees_alive(jumping) and sees_alive(steady), 30.0)
            assert wait_until(lambda: jumping.ask(lambda d: d.peers()[0].anchors) == 1, 10.0)
            fetching = jumping.driver.run(jumping.driver.fetch(steady.driver.node_id, wants_of(anchor), 5.0))
            result = fetching.result(10)
            if result.missed:  # the first one after the jump may be given up: its deadline lay in the hour that passed
                fetching = jumping.driver.run(jumping.driver.fetch(steady.driver.node_id, wants_of(anchor), 5.0))
            for handle in fetching.result(10).found.values():
                jumping.store.drop(handle)
        for node in (steady, jumping):
            stats = node.ask(lambda driver: driver.stats())
            assert (stats.wire.failures, stats.node.violations) == (0, 0)


def test_an_hour_back_is_an_hour_that_stands_still_for_the_node_not_for_others(transports: Callable[[], Any]) -> None:
    """The node takes time that runs backwards to stand still; messages are still handled."""
    with TestNode("steady", transports()) as steady, TestNode("jumping", transports()) as jumping:
        jumping.join(steady.driver.addresses.control)
        clock = Clock(jumping)
        clock.jump(-HOUR_S)
        anchor = make_anchor(jumping.store, 1, blocks=2, block_kv_bytes=1 << 16)
        jumping.hold(anchor)
        stats = jumping.ask(lambda driver: driver.stats())
        assert stats.wire.failures == 0
        clock.jump(HOUR_S)
        assert wait_until(lambda: steady.ask(lambda d: d.peers()[0].anchors) == 1, 10.0)
        assert wait_until(lambda: sees_alive(jumping) and sees_alive(steady), 10.0)


def test_a_clock_that_stands_still_for_a_while_loses_nothing(transports: Callable[[], Any]) -> None:
    with TestNode("steady", transports()) as steady, TestNode("standing", transports()) as standing:
        standing.join(steady.driver.addresses.control)
        clock = Clock(standing)
        clock.stand()
        anchor = make_anchor(steady.store, 1, blocks=2, block_kv_bytes=1 << 16)
        steady.hold(anchor)
        assert wait_until(lambda: standing.ask(lambda d: d.peers()[0].anchors) == 1, 5.0)
        clock.go_on()
        result = standing.driver.run(standing.driver.fetch(steady.driver.node_id, wants_of(anchor), 5.0)).result(10)
        assert len(result.found) == 2
        for handle in result.found.values():
            standing.store.drop(handle)
        assert wait_until(lambda: sees_alive(standing) and sees_alive(steady), 10.0)


def test_clocks_that_jump_at_random_lead_to_no_error(transports: Callable[[], Any]) -> None:
    rng = random.Random(3)
    with TestNode("a", transports(), config=CONFIG) as first, TestNode("b", transports(), config=CONFIG) as second:
        second.join(first.driver.addresses.control)
        clock = Clock(second)
        for number in range(30):
            clock.jump(rng.choice((0.1, 1.0, 10.0, 700.0, HOUR_S)))
            second.hold(make_anchor(second.store, number, blocks=1, block_kv_bytes=1 << 10))
        assert wait_until(lambda: sees_alive(first) and sees_alive(second), 30.0)
        assert wait_until(lambda: first.ask(lambda d: d.peers()[0].anchors) == 30, 10.0)
        for node in (first, second):
            stats = node.ask(lambda driver: driver.stats())
            assert (stats.wire.failures, stats.node.violations) == (0, 0)
