"""Blocks as int8 between real drivers: what comes is what the codec makes of the holder's block, whatever happens meanwhile."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from net_nodes import CONFIG, TestNode, describe, wait_until
from test_net_driver import contents

from kvcomm_p2p.net import encoded_uploads
from kvcomm_p2p.net.driver import FetchResult
from kvcomm_p2p.net.encoding import encode
from kvcomm_p2p.net.lossy_transport import LossyTransport
from kvcomm_p2p.net.memory_transport import MemoryHub, MemoryTransport
from kvcomm_p2p.net.transport import Transport
from kvcomm_p2p.net.zmq_transport import ZmqTransport
from kvcomm_p2p.protocol.anchors import BLOCK_TOKENS, BlockKey, HeldAnchor, KVLayout, MissReason

LAYOUT = KVLayout(layers=4, kv_heads=2, key_dim=32, value_dim=16, dtype="float32")
RAW, ENCODED = LAYOUT.block_bytes(BLOCK_TOKENS), LAYOUT.int8_bytes(BLOCK_TOKENS)
Make = Callable[..., Transport]


@pytest.fixture(params=["memory", "zmq"])
def make(request: pytest.FixtureRequest) -> Make:
    if request.param == "zmq":
        return ZmqTransport
    hub = MemoryHub()
    return lambda: MemoryTransport(hub)


def numbers(number: int, index: int) -> bytes:
    """A block of real numbers."""
    rng = np.random.default_rng([number, index])
    return rng.standard_normal(RAW // 4).astype("<f4").tobytes()


def hold(node: TestNode, number: int = 7, blocks: int = 3, spoil: dict[int, bytes] | None = None) -> HeldAnchor:
    data = [(spoil or {}).get(index, numbers(number, index)) for index in range(blocks)]
    anchor = replace(describe(number, blocks, RAW, data), handles=tuple(node.store.put(block) for block in data))
    node.hold(anchor)
    return anchor


def fetch(node: TestNode, holder: TestNode, anchor: HeldAnchor, *, size: int = ENCODED, **more: Any) -> FetchResult:
    keys = [BlockKey(anchor.meta.anchor_id, index) for index in range(anchor.meta.blocks)]
    wants = [(key, size, digest) for key, digest in zip(keys, anchor.digests, strict=True)]
    raw_bytes = dict.fromkeys(keys, RAW)
    call = node.driver.fetch(holder.driver.node_id, wants, 5.0, raw_bytes=raw_bytes, **more)
    return node.driver.run(call).result(10)


def joined_pair(a: TestNode, b: TestNode) -> None:
    assert b.join(a.driver.addresses.control).result == 1
    assert wait_until(lambda: b.ask(lambda driver: driver.peers()[0].state == "alive"))


def test_what_comes_is_the_holders_block_as_int8(make: Make) -> None:
    with TestNode("a", make(), layout=LAYOUT) as a, TestNode("b", make(), layout=LAYOUT) as b:
        joined_pair(a, b)
        assert b.ask(lambda driver: driver.encodes(a.driver.node_id))
        result = fetch(b, a, hold(a))
        assert (result.missed, result.wait_lost_s) == ({}, 0.0)
        assert contents(b, result) == {i: bytes(encode(memoryview(numbers(7, i)), LAYOUT)) for i in range(3)}
        assert b.store.held_bytes == 3 * ENCODED and b.store.reserved_bytes == 0
        wire = b.ask(lambda driver: driver.stats()).wire
        assert wire.payload_bytes_received == 3 * ENCODED and wire.received["EncodedBlock"] == 3
        assert a.ask(lambda driver: driver.stats()).node.uploads == 0, "what travelled was credited"


def test_blocks_that_are_asked_for_again_are_not_encoded_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []

    def counting(block: memoryview, layout: KVLayout) -> bytearray:
        encoded.append(block.nbytes)
        return encode(block, layout)

    monkeypatch.setattr(encoded_uploads, "encode", counting)
    with TestNode("a", make(), layout=LAYOUT) as a, TestNode("b", make(), layout=LAYOUT) as b:
        joined_pair(a, b)
        anchor = hold(a)
        first, second = fetch(b, a, anchor), fetch(b, a, anchor)
        assert contents(b, first) == contents(b, second) and len(encoded) == 3
        cache = a.driver._interpreter._mover._encoded
        assert cache.cached_bytes == 3 * ENCODED
        a.driver.run(a.driver.forget([anchor.meta.anchor_id])).result(5)
        assert cache.cached_bytes == 0, "what is forgotten is not kept in another form"
        assert {miss.reason for miss in fetch(b, a, anchor).missed.values()} == {MissReason.NOT_FOUND}


def test_a_block_that_is_not_finite_is_missed_with_that_reason_and_the_others_come(make: Make) -> None:
    wrong = np.frombuffer(numbers(7, 1), "<f4").copy()
    wrong[5] = np.nan
    with TestNode("a", make(), layout=LAYOUT) as a, TestNode("b", make(), layout=LAYOUT) as b:
        joined_pair(a, b)
        result = fetch(b, a, hold(a, spoil={1: wrong.tobytes()}))
        assert [key.index for key in result.found] == [0, 2]
        assert [(key.index, miss.reason) for key, miss in result.missed.items()] == [(1, MissReason.NOT_FINITE)]


def test_a_length_that_it_does_not_come_to_is_not_found(make: Make) -> None:
    with TestNode("a", make(), layout=LAYOUT) as a, TestNode("b", make(), layout=LAYOUT) as b:
        joined_pair(a, b)
        result = fetch(b, a, hold(a), size=ENCODED - 1)
        assert {miss.reason for miss in result.missed.values()} == {MissReason.NOT_FOUND}
        assert not b.ask(lambda driver: driver.stats()).node.violations


def test_a_holder_that_does_not_encode_is_not_asked_and_sends_the_block_itself(make: Make) -> None:
    with TestNode("a", make()) as a, TestNode("b", make(), layout=LAYOUT) as b:
        joined_pair(a, b)
        anchor = hold(a)
        assert not b.ask(lambda driver: driver.encodes(a.driver.node_id))
        assert {miss.reason for miss in fetch(b, a, anchor).missed.values()} == {MissReason.NOT_FOUND}
        assert a.ask(lambda driver: driver.stats()).wire.received["Pull"] == 0
        wants = [(BlockKey(anchor.meta.anchor_id, i), RAW, digest) for i, digest in enumerate(anchor.digests)]
        raw = b.driver.run(b.driver.fetch(a.driver.node_id, wants, 5.0)).result(10)
        assert contents(b, raw) == {index: numbers(7, index) for index in range(3)}


def test_bytes_that_are_not_what_was_stated_are_a_mismatch(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    class Lying:
        def __getattr__(self, name: str) -> Any:
            return getattr(hashlib, name)

        def sha256(self, data: bytes) -> Any:
            return hashlib.sha256(b"something else")

    monkeypatch.setattr(encoded_uploads, "hashlib", Lying())
    with TestNode("a", make(), layout=LAYOUT) as a, TestNode("b", make(), layout=LAYOUT) as b:
        joined_pair(a, b)
        result = fetch(b, a, hold(a))
        assert {miss.reason for miss in result.missed.values()} == {MissReason.DIGEST_MISMATCH}
        assert b.ask(lambda driver: driver.stats()).node.violations >= 1
        assert b.store.held_bytes == b.store.reserved_bytes == 0


def test_many_pulls_at_once_get_their_blocks_in_order(make: Make) -> None:
    config = replace(CONFIG, pull_piece_bytes=2 * ENCODED, pulls_per_peer_max=4, uploads_max=16)
    with (
        TestNode("a", make(), layout=LAYOUT, config=config) as a,
        TestNode("b", make(), layout=LAYOUT, config=config) as b,
    ):
        joined_pair(a, b)
        anchors = [hold(a, number, blocks=8) for number in range(1, 5)]

        async def all_at_once() -> list[FetchResult]:
            import asyncio

            calls = []
            for anchor in anchors:
                keys = [BlockKey(anchor.meta.anchor_id, index) for index in range(8)]
                wants = [(key, ENCODED, digest) for key, digest in zip(keys, anchor.digests, strict=True)]
                calls.append(b.driver.fetch(a.driver.node_id, wants, 5.0, raw_bytes=dict.fromkeys(keys, RAW)))
            return await asyncio.gather(*calls)

        for number, result in enumerate(b.driver.run(all_at_once()).result(15), start=1):
            expected = {index: bytes(encode(memoryview(numbers(number, index)), LAYOUT)) for index in range(8)}
            assert contents(b, result) == expected and not result.missed
        assert not b.ask(lambda driver: driver.stats()).node.violations


def test_on_a_slow_link_a_quarter_of_the_bytes_takes_a_quarter_of_the_time() -> None:
    hub = MemoryHub()
    slow = LossyTransport(MemoryTransport(hub), reply_bytes_per_s=2e6)
    with TestNode("a", slow, layout=LAYOUT) as a, TestNode("b", MemoryTransport(hub), layout=LAYOUT) as b:
        joined_pair(a, b)
        anchor = hold(a, blocks=6)
        wants = [(BlockKey(anchor.meta.anchor_id, i), RAW, digest) for i, digest in enumerate(anchor.digests)]
        seconds = []
        for pull in (
            lambda: fetch(b, a, anchor),
            lambda: b.driver.run(b.driver.fetch(a.driver.node_id, wants, 5.0)).result(10),
        ):
            started = time.perf_counter()
            assert len(pull().found) == 6
            seconds.append(time.perf_counter() - started)
        assert 2 < seconds[1] / seconds[0] < 6, seconds
