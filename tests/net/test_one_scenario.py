"""One scenario comes to the same on every network. Whoever can carry out single steps can play (see `PLAYERS`)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import pytest
from net_nodes import TestNode, wait_until
from scenario import Die, Fetch, Forget, Join, Leave, Outcome, Player, Publish, Settle, Step, Truth, play
from scenario_world import WorldPlayer

from kvcomm_p2p.evaluation.cluster_anchors import AnchorMaker, Shape, lookup, number_of
from kvcomm_p2p.net.driver import Driver
from kvcomm_p2p.net.lossy_transport import LossyTransport
from kvcomm_p2p.net.memory_transport import MemoryHub, MemoryTransport
from kvcomm_p2p.net.transport import Transport
from kvcomm_p2p.net.zmq_transport import ZmqTransport
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.ids import AnchorId

SHAPE = Shape(blocks=2, block_kv_bytes=1 << 14)
CONFIG = NodeConfig(gossip_interval_s=0.05, join_retry_s=0.05, probe_interval_s=0.2, probe_timeout_s=0.1)

LIFE: tuple[Step, ...] = (
    Join("bert", "anna"),
    Publish("anna", (1, 2, 3)),
    Join("cleo", "bert"),
    Join("dora", "anna"),
    Publish("dora", (4,)),
    Settle(),
    Fetch("cleo", "anna", 1),
    Fetch("bert", "dora", 4),
    Forget("anna", (2,)),
    Settle(),
    Fetch("dora", "anna", 2),
    Leave("bert"),
    Settle(),
    Fetch("dora", "bert", 4),
    Die("anna"),
    Settle(),
    Fetch("dora", "cleo", 1),
    Fetch("dora", "anna", 3),
    Publish("cleo", (5,)),
    Settle(),
)
EXPECTED_FETCHES = ("found", "found", "not_found", "unreachable", "found", "unreachable")


class DriverPlayer:
    """Real drivers, each on a transport of its own that can be isolated."""

    def __init__(self, make: Callable[[], Transport], stack: ExitStack) -> None:
        self._make = make
        self._stack = stack
        self._nodes: dict[str, TestNode] = {}
        self._transports: dict[str, LossyTransport] = {}
        self._makers: dict[str, AnchorMaker] = {}

    def join(self, name: str, seed: str) -> None:
        for each in (seed, name):
            if each not in self._nodes:
                self._transports[each] = LossyTransport(self._make())
                self._nodes[each] = self._stack.enter_context(TestNode(each, self._transports[each], config=CONFIG))
                self._makers[each] = AnchorMaker(self._nodes[each].store)
        assert isinstance(self._nodes[name].join(self._nodes[seed].driver.addresses.control).result, int)

    def publish(self, name: str, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._nodes[name].hold(self._makers[name].make(number, SHAPE))

    def forget(self, name: str, numbers: Sequence[int]) -> None:
        driver = self._nodes[name].driver
        driver.run(driver.forget([AnchorId(number.to_bytes(16, "big")) for number in numbers])).result(5)

    def fetch(self, name: str, holder: str, number: int) -> str:
        driver = self._nodes[name].driver
        wants = self._makers[name].wants(number, SHAPE)
        result = driver.run(driver.fetch(self._nodes[holder].driver.node_id, wants, 5.0)).result(10)
        for handle in result.found.values():
            self._nodes[name].store.drop(handle)
        if result.missed:
            (reason,) = {miss.reason.value for miss in result.missed.values()}
            return str(reason)
        self.publish(name, [number])
        return "found"

    def leave(self, name: str) -> None:
        self._nodes[name].driver.stop()

    def die(self, name: str) -> None:
        async def isolate() -> None:
            self._transports[name].isolate()

        self._nodes[name].driver.run(isolate()).result(5)

    def states(self, name: str) -> dict[str, str]:
        return {peer.name: peer.state for peer in self._nodes[name].ask(lambda driver: driver.peers())}

    def holders(self, name: str, numbers: Sequence[int]) -> dict[int, tuple[str, ...]]:
        driver = self._nodes[name].driver
        names = {node.driver.node_id: each for each, node in self._nodes.items()}
        found: dict[int, tuple[str, ...]] = {}
        for number in numbers:
            hits = [
                hit for hit in driver.run(_find(driver, number)).result(5) if number_of(hit.meta.anchor_id) == number
            ]
            found[number] = tuple(sorted(names[hit.holder] for hit in hits))
        return found

    def settle(self, done: Callable[[], bool]) -> bool:
        return wait_until(done, 20.0)


async def _find(driver: Driver, number: int) -> tuple[Any, ...]:
    result: Any = driver.find(lookup(number))
    if inspect.isawaitable(result):
        result = await result
    hits: tuple[Any, ...] = result.hits
    return hits


@contextmanager
def on_memory() -> Iterator[Player]:
    hub = MemoryHub()
    with ExitStack() as stack:
        yield DriverPlayer(lambda: MemoryTransport(hub), stack)


@contextmanager
def on_zmq() -> Iterator[Player]:
    with ExitStack() as stack:
        yield DriverPlayer(ZmqTransport, stack)


@contextmanager
def in_the_world() -> Iterator[Player]:
    yield WorldPlayer(CONFIG, SHAPE)


PLAYERS: dict[str, Callable[[], AbstractContextManager[Player]]] = {
    "world": in_the_world,
    "memory": on_memory,
    "zmq": on_zmq,
}


@pytest.mark.parametrize("kind", PLAYERS)
def test_a_life_together_comes_to_what_it_should(kind: str) -> None:
    with PLAYERS[kind]() as player:
        outcome, truth = play(LIFE, player)
    check(outcome, truth)


def check(outcome: Outcome, truth: Truth) -> None:
    """What is left: cleo (1 pulled from anna, 5) and dora (4, and 1 pulled from cleo)."""
    assert outcome.settled
    assert outcome.fetches == EXPECTED_FETCHES
    assert truth.here == ["cleo", "dora"]
    assert outcome.states == {name: truth.states(name) for name in truth.here}
    assert truth.holders() == {1: ("cleo", "dora"), 2: (), 3: (), 4: ("dora",), 5: ("cleo",)}
    assert outcome.holders == {name: truth.holders() for name in truth.here}


def test_all_networks_come_to_the_same() -> None:
    outcomes = []
    for make in PLAYERS.values():
        with make() as player:
            outcomes.append(play(LIFE, player)[0])
    assert all(outcome == outcomes[0] for outcome in outcomes)


def test_the_check_sees_a_player_that_forgets_to_tell() -> None:
    with on_memory() as player:
        forgetful: Any = player
        forgetful.forget = lambda name, numbers: None
        forgetful.settle = lambda done: wait_until(done, 1.0)
        outcome, truth = play(LIFE[:10], player)
    assert not outcome.settled
    assert outcome.holders["cleo"] != truth.holders()
