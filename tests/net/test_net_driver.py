"""Drivers with real nodes, over memory and over ZeroMQ."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any

import pytest
from net_nodes import (
    CONFIG,
    TestNode,
    block_bytes,
    describe,
    make_anchor,
    wait_until,
    wants_of,
)

from kvcomm_p2p.errors import ConfigError, TransportError, UsageError
from kvcomm_p2p.net.driver import Driver, FetchResult
from kvcomm_p2p.net.keys import ClusterKeys
from kvcomm_p2p.net.memory_transport import MemoryHub, MemoryTransport
from kvcomm_p2p.net.transport import Transport
from kvcomm_p2p.net.zmq_transport import ZmqTransport
from kvcomm_p2p.protocol.anchors import BlockKey, Miss, MissReason
from kvcomm_p2p.protocol.events import AnchorTokens
from kvcomm_p2p.protocol.messages import CHUNK_BYTES_MAX
from kvcomm_p2p.store import BlockStore

Make = Callable[..., Transport]


@pytest.fixture(params=["memory", "zmq"])
def make(request: pytest.FixtureRequest) -> Make:
    if request.param == "zmq":
        return ZmqTransport
    hub = MemoryHub()
    return lambda: MemoryTransport(hub)


def fetch(
    node: TestNode, holder: TestNode, wants: list[tuple[BlockKey, int, bytes]], deadline_s: float = 5.0
) -> FetchResult:
    return node.driver.run(node.driver.fetch(holder.driver.node_id, wants, deadline_s)).result(deadline_s + 5)


def contents(node: TestNode, result: FetchResult) -> dict[int, bytes]:
    return {key.index: bytes(node.store.view(handle)) for key, handle in result.found.items()}


@pytest.mark.parametrize(
    "block_kv_bytes", [100, 1 << 20, CHUNK_BYTES_MAX + 32], ids=["tiny", "one chunk", "two chunks"]
)
def test_blocks_arrive_whole_and_right(make: Make, block_kv_bytes: int) -> None:
    block_kv_bytes -= block_kv_bytes % 32
    with TestNode("a", make()) as a, TestNode("b", make()) as b:
        assert b.join(a.driver.addresses.control).result == 1
        anchor = make_anchor(a.store, 7, blocks=3, block_kv_bytes=block_kv_bytes)
        a.hold(anchor)
        result = fetch(b, a, wants_of(anchor))
        assert (result.missed, result.wait_lost_s) == ({}, 0.0)
        assert contents(b, result) == {index: block_bytes(block_kv_bytes, 7, index) for index in range(3)}
        assert b.store.held_bytes == 3 * block_kv_bytes and b.store.reserved_bytes == 0
        stats = b.ask(lambda driver: driver.stats())
        assert stats.wire.verified_blocks == 3 and not stats.wire.dropped and not stats.wire.failures


def test_tokens_of_a_peer(make: Make) -> None:
    with TestNode("a", make()) as a, TestNode("b", make()) as b:
        b.join(a.driver.addresses.control)
        anchor = make_anchor(a.store, 7)
        a.hold(anchor)
        answer = b.driver.run(b.driver.tokens(a.driver.node_id, anchor.meta)).result(5)
        assert isinstance(answer.result, AnchorTokens)
        assert answer.result.token_ids.tolist() == anchor.token_ids.tolist()
        assert answer.result.digests == anchor.digests
        unknown = b.driver.run(b.driver.tokens(a.driver.node_id, describe(8, 4, 1 << 16).meta)).result(5)
        assert isinstance(unknown.result, Miss)


def test_metadata_spreads_to_everybody(make: Make) -> None:
    with TestNode("a", make()) as a, TestNode("b", make()) as b, TestNode("c", make()) as c:
        b.join(a.driver.addresses.control)
        c.join(b.driver.addresses.control)
        a.hold(make_anchor(a.store, 7))
        for node in (b, c):
            assert wait_until(lambda node=node: node.ask(lambda driver: driver.stats().node.peer_anchors) == 1)
        a.driver.run(a.driver.forget([describe(7, 4, 1 << 16).meta.anchor_id])).result(5)
        for node in (b, c):
            assert wait_until(lambda node=node: node.ask(lambda driver: driver.stats().node.peer_anchors) == 0)
        assert len(a.store) == 0


def test_two_fetches_of_one_block_pull_it_once_and_own_it_twice(make: Make) -> None:
    with TestNode("a", make()) as a, TestNode("b", make()) as b:
        b.join(a.driver.addresses.control)
        anchor = make_anchor(a.store, 7, blocks=4, block_kv_bytes=1 << 20)
        a.hold(anchor)

        async def both() -> list[FetchResult]:
            holder = a.driver.node_id
            return await asyncio.gather(*(b.driver.fetch(holder, wants_of(anchor), 5.0) for _ in range(2)))

        first, second = b.driver.run(both()).result(10)
        assert len(first.found) == len(second.found) == 4
        assert b.ask(lambda driver: driver.stats().wire.payload_bytes_received) == 4 << 20
        for handle in first.found.values():
            b.store.drop(handle)
        assert contents(b, second) == {index: block_bytes(1 << 20, 7, index) for index in range(4)}
        for handle in second.found.values():
            b.store.drop(handle)
        assert len(b.store) == 0


def test_pulled_blocks_can_be_published_again(make: Make) -> None:
    with TestNode("a", make()) as a, TestNode("b", make()) as b:
        b.join(a.driver.addresses.control)
        anchor = make_anchor(a.store, 7)
        a.hold(anchor)
        result = fetch(b, a, wants_of(anchor))
        b.hold(type(anchor)(anchor.meta, anchor.token_ids, tuple(result.found.values()), anchor.digests))
        held = b.ask(lambda driver: driver.held(anchor.meta.anchor_id))
        assert held is not None and held.handles == tuple(result.found.values())
        again = fetch(a, b, wants_of(anchor))
        assert contents(a, again) == contents(b, result)


def test_wrong_digest_is_a_miss_and_releases_everything(make: Make) -> None:
    with TestNode("a", make()) as a, TestNode("b", make()) as b:
        b.join(a.driver.addresses.control)
        anchor = make_anchor(a.store, 7)
        a.hold(anchor)
        wrong = [(key, size, bytes(32)) for key, size, _ in wants_of(anchor)]
        result = fetch(b, a, wrong)
        assert {miss.reason for miss in result.missed.values()} == {MissReason.DIGEST_MISMATCH}
        assert len(result.missed) == 4
        assert wait_until(lambda: len(b.store) == 0)
        assert b.store.held_bytes == b.store.reserved_bytes == 0


def test_block_that_vanished_from_the_store_is_evicted(make: Make) -> None:
    with TestNode("a", make()) as a, TestNode("b", make()) as b:
        b.join(a.driver.addresses.control)
        anchor = make_anchor(a.store, 7)
        a.hold(anchor)
        a.store.drop(anchor.handles[2])
        result = fetch(b, a, wants_of(anchor))
        assert {key.index: miss.reason for key, miss in result.missed.items()} == {2: MissReason.EVICTED}
        assert sorted(contents(b, result)) == [0, 1, 3]


def test_frozen_peer_is_a_stall() -> None:
    hub = MemoryHub()
    with TestNode("a", MemoryTransport(hub)) as a, TestNode("b", MemoryTransport(hub)) as b:
        b.join(a.driver.addresses.control)
        anchor = make_anchor(a.store, 7)
        a.hold(anchor)
        hub.freeze(a.driver.addresses.bulk)
        result = fetch(b, a, wants_of(anchor))
        assert {miss.reason for miss in result.missed.values()} == {MissReason.STALLED}
        assert 0.15 < result.wait_lost_s <= 0.25
        assert len(b.store) == 0


def test_cancelling_the_caller_cancels_the_fetch(make: Make) -> None:
    with TestNode("a", make()) as a, TestNode("b", make()) as b:
        b.join(a.driver.addresses.control)
        anchor = make_anchor(a.store, 7, blocks=8, block_kv_bytes=1 << 20)
        a.hold(anchor)

        async def impatient() -> None:
            task = asyncio.create_task(b.driver.fetch(a.driver.node_id, wants_of(anchor), 5.0))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        b.driver.run(impatient()).result(10)
        assert wait_until(lambda: len(b.store) == 0)
        assert wait_until(lambda: a.ask(lambda driver: driver.stats().node.uploads) == 0)
        assert len(fetch(b, a, wants_of(anchor)).found) == 8


def test_cancelling_at_any_moment_leaks_nothing(make: Make) -> None:
    with TestNode("a", make()) as a, TestNode("b", make()) as b:
        b.join(a.driver.addresses.control)
        anchor = make_anchor(a.store, 7, blocks=8, block_kv_bytes=1 << 18)
        a.hold(anchor)

        async def impatient(steps: int) -> None:
            task = asyncio.create_task(b.driver.fetch(a.driver.node_id, wants_of(anchor), 5.0))
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            outcome = (await asyncio.gather(task, return_exceptions=True))[0]
            if isinstance(outcome, FetchResult):
                for handle in outcome.found.values():
                    b.store.drop(handle)

        for steps in range(0, 120, 3):
            b.driver.run(impatient(steps)).result(10)
        assert wait_until(lambda: len(b.store) == 0)
        assert b.store.held_bytes == b.store.reserved_bytes == 0


def test_stopping_finishes_every_future() -> None:
    hub = MemoryHub()
    with TestNode("a", MemoryTransport(hub)) as a:
        b = TestNode("b", MemoryTransport(hub))
        b.driver.start()
        b.join(a.driver.addresses.control)
        hub.freeze(a.driver.addresses.bulk)
        hub.freeze(a.driver.addresses.control)
        pull = b.driver.run(b.driver.fetch(a.driver.node_id, wants_of(describe(7, 4, 1 << 16)), 30.0))
        ask = b.driver.run(b.driver.tokens(a.driver.node_id, describe(7, 4, 1 << 16).meta, 30.0))
        endless = b.driver.run(asyncio.sleep(3600))
        b.driver.stop()
        assert {miss.reason for miss in pull.result(0).missed.values()} == {MissReason.SHUTDOWN}
        assert ask.result(0).result == Miss(MissReason.SHUTDOWN)
        with pytest.raises(concurrent.futures.CancelledError):
            endless.result(0)
        assert len(b.store) == 0
        with pytest.raises(UsageError, match="not running"):
            b.driver.run(asyncio.sleep(0))
        b.driver.stop()


def test_goodbye_is_heard(make: Make) -> None:
    with TestNode("a", make()) as a:
        with TestNode("b", make()) as b:
            b.join(a.driver.addresses.control)
        assert wait_until(lambda: a.ask(lambda driver: driver.peers())[0].state == "left", 2.0)
    assert "kvcomm-driver" not in {thread.name for thread in threading.enumerate()}


def test_seed_may_start_later() -> None:
    hub = MemoryHub()
    with TestNode("b", MemoryTransport(hub)) as b:
        nobody = b.join("127.0.0.1:7000", 0.2)
        assert isinstance(nobody.result, Miss)
        with TestNode("a", MemoryTransport(hub, control_port=7000)) as a:
            assert wait_until(lambda: len(b.ask(lambda driver: driver.peers())) == 1)
            assert b.ask(lambda driver: driver.peers())[0].node_id == a.driver.node_id


@pytest.mark.parametrize("seed", ["127.0.0.1", "127.0.0.1:0", ":7000", "10.0.0.1:7000", "127.0.0.1:http", ""])
def test_impossible_seeds_are_refused(seed: str) -> None:
    with TestNode("b", MemoryTransport(MemoryHub())) as b, pytest.raises(ConfigError, match="join"):
        b.join(seed)


def test_foreign_keys_cannot_talk(make: Make) -> None:
    stranger_keys = ClusterKeys.derive(b"other" * 8)
    with TestNode("a", make()) as a, TestNode("x", make(), keys=stranger_keys) as x:
        assert isinstance(x.join(a.driver.addresses.control, 0.3).result, Miss)
        assert a.ask(lambda driver: driver.peers()) == ()
        assert a.ask(lambda driver: driver.stats().wire.dropped["bad_seal"]) >= 1


def test_contradictory_anchor_is_the_callers_error(make: Make) -> None:
    with TestNode("a", make()) as a:
        anchor = make_anchor(a.store, 7)
        bad = type(anchor)(anchor.meta, anchor.token_ids[:-1], anchor.handles, anchor.digests)
        with pytest.raises(ValueError, match="token_ids"):
            a.hold(bad)
        assert len(a.store) == 4
        a.hold(anchor)
        assert a.ask(lambda driver: driver.held(anchor.meta.anchor_id)) == anchor


def test_failing_start_is_reported_to_the_caller() -> None:
    hub = MemoryHub()
    with TestNode("a", MemoryTransport(hub, control_port=7000)):
        second = TestNode("b", MemoryTransport(hub, control_port=7000))
        with pytest.raises(TransportError, match="7000"):
            second.driver.start()
        second.driver.stop()

    def make_nothing(addresses: Any, now: float) -> Any:
        raise ConfigError("no node today")

    driver = Driver(make_nothing, MemoryTransport(hub, control_port=7000), BlockStore(), ClusterKeys.derive(bytes(32)))
    with pytest.raises(ConfigError, match="no node today"):
        driver.start()
    driver.stop()
    with TestNode("c", MemoryTransport(hub, control_port=7000)):
        pass


def outcomes(make: Make) -> dict[str, Any]:
    """One scenario, told in what its callers saw."""
    told: dict[str, Any] = {}
    with TestNode("a", make()) as a, TestNode("b", make()) as b, TestNode("c", make()) as c:
        told["join b"] = b.join(a.driver.addresses.control).result
        c.join(a.driver.addresses.control)
        good, bad = make_anchor(a.store, 1), make_anchor(a.store, 2)
        a.hold(good)
        a.hold(bad)
        for node in (b, c):
            told["anchors"] = wait_until(lambda node=node: node.ask(lambda d: d.stats().node.peer_anchors) == 2)
        first = fetch(b, a, wants_of(good))
        told["first"] = contents(b, first)
        b.hold(type(good)(good.meta, good.token_ids, tuple(first.found.values()), good.digests))
        told["replica"] = contents(c, fetch(c, b, wants_of(good)))
        a.store.drop(bad.handles[1])
        broken = fetch(c, a, wants_of(bad))
        told["broken"] = (sorted(contents(c, broken)), {k.index: m.reason for k, m in broken.missed.items()})
        unknown = fetch(c, b, wants_of(describe(9, 2, 1 << 16)))
        told["unknown"] = {k.index: m.reason for k, m in unknown.missed.items()}
        lying = fetch(c, a, [(key, size, bytes(32)) for key, size, _ in wants_of(good)])
        told["lying"] = {k.index: m.reason for k, m in lying.missed.items()}
        punished = fetch(c, a, wants_of(good))
        told["punished"] = {k.index: m.reason for k, m in punished.missed.items()}
        b.driver.stop()
        told["left"] = wait_until(lambda: "left" in {p.state for p in c.ask(lambda d: d.peers())})
        gone = fetch(c, b, wants_of(good))
        told["gone"] = {k.index: m.reason for k, m in gone.missed.items()}
    return told


def test_one_scenario_ends_the_same_on_both_transports() -> None:
    hub = MemoryHub()
    in_memory = outcomes(lambda: MemoryTransport(hub))
    over_zmq = outcomes(ZmqTransport)
    assert in_memory == over_zmq
    assert in_memory["broken"] == ([0, 2, 3], {1: MissReason.EVICTED})
    assert set(in_memory["gone"].values()) == {MissReason.UNREACHABLE}


def test_lossy_network_still_converges() -> None:
    hub = MemoryHub(loss=0.2, delay_s=0.002, seed=3)
    with TestNode("a", MemoryTransport(hub), config=CONFIG) as a, TestNode("b", MemoryTransport(hub)) as b:
        assert b.join(a.driver.addresses.control).result == 1
        a.hold(make_anchor(a.store, 7))
        assert wait_until(lambda: b.ask(lambda driver: driver.stats().node.peer_anchors) == 1)
