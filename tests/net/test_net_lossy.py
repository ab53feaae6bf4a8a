"""The transport that spoils others: each fault does what it says, and equal seeds do the same."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvcomm_p2p.net.lossy_transport import Faults, LossyTransport
from kvcomm_p2p.net.memory_transport import MemoryHub, MemoryTransport
from kvcomm_p2p.net.transport import Addresses, Connection

FRAMES = 2000


class Ear:
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []
        self.replies: list[bytes] = []
        self.asked: list[Connection] = []
        self.unreachable: list[str] = []

    def on_control(self, frame: bytes, key: bytes = b"") -> None:
        self.heard.append(frame)

    def on_bulk_request(self, connection: Connection, frame: bytes, key: bytes = b"") -> None:
        self.asked.append(connection)

    def on_bulk_reply(self, frame: bytes, payload: memoryview | None, key: bytes = b"") -> None:
        self.replies.append(frame)

    def on_unreachable(self, address: str) -> None:
        self.unreachable.append(address)

    def on_malformed(self) -> None:
        raise AssertionError("nothing here is malformed")


class Two:
    """Two transports that know each other; `run` gives them a loop."""

    def __init__(self, **faults: Any) -> None:
        hub = MemoryHub()
        self.sender = LossyTransport(MemoryTransport(hub), **faults)
        self.receiver = LossyTransport(MemoryTransport(hub))
        self.ears = (Ear(), Ear())

    def run(self, scene: Callable[[Two], Awaitable[None]]) -> Two:
        async def whole() -> None:
            self.here: Addresses = self.sender.start(self.ears[0])
            self.there: Addresses = self.receiver.start(self.ears[1])
            try:
                await scene(self)
            finally:
                self.sender.close()
                self.receiver.close()

        asyncio.run(whole())
        return self

    def send(self, count: int = FRAMES) -> None:
        for number in range(count):
            assert self.sender.send_control(self.there.control, number.to_bytes(4, "big"))

    @property
    def heard(self) -> list[int]:
        return [int.from_bytes(frame, "big") for frame in self.ears[1].heard]


async def say(two: Two, wait_s: float = 0.1) -> None:
    two.send()
    await asyncio.sleep(wait_s)


def test_without_faults_everything_arrives_in_order() -> None:
    two = Two().run(say)
    assert two.heard == list(range(FRAMES))
    assert (two.sender.traffic.control_frames, two.sender.traffic.control_bytes) == (FRAMES, 4 * FRAMES)


def test_loss_and_repetition_are_as_frequent_as_asked_for() -> None:
    lost = Two(control=Faults(loss=0.1)).run(say)
    assert 0.07 < lost.sender.traffic.lost / FRAMES < 0.13
    assert len(lost.heard) == FRAMES - lost.sender.traffic.lost
    repeated = Two(control=Faults(repeat=0.2)).run(say)
    assert 1.15 < len(repeated.heard) / FRAMES < 1.25
    assert set(repeated.heard) == set(range(FRAMES))


def test_reordered_frames_arrive_late_but_arrive() -> None:
    two = Two(control=Faults(reorder=0.1, reorder_s=0.02)).run(say)
    assert sorted(two.heard) == list(range(FRAMES))
    assert two.heard != list(range(FRAMES))


def test_equal_seeds_lose_the_same_frames() -> None:
    first, second, other = (Two(control=Faults(loss=0.3), seed=seed).run(say).heard for seed in (4, 4, 5))
    assert first == second != other


def test_delay_delays() -> None:
    async def scene(two: Two) -> None:
        two.send(1)
        await asyncio.sleep(0.02)
        assert two.heard == []
        await asyncio.sleep(0.1)
        assert two.heard == [0]

    Two(control=Faults(delay_s=0.05)).run(scene)


def test_a_cut_is_one_way_until_both_sides_cut() -> None:
    async def scene(two: Two) -> None:
        two.sender.cut([two.there.control, two.there.bulk])
        two.send(10)
        two.receiver.send_control(two.here.control, b"back")
        await asyncio.sleep(0.02)
        assert two.heard == []
        assert two.ears[0].heard == [b"back"]
        two.receiver.cut([two.here.control])
        two.receiver.send_control(two.here.control, b"back")
        await asyncio.sleep(0.02)
        assert two.ears[0].heard == [b"back"]
        two.sender.cut([])
        two.send(10)
        await asyncio.sleep(0.02)
        assert two.heard == list(range(10))
        assert two.ears[0].unreachable == []

    Two().run(scene)


def test_addresses_of_encrypted_connections_are_cut_too() -> None:
    async def scene(two: Two) -> None:
        two.sender.cut([two.there.control])
        assert two.sender.send_control(f"{two.there.control}#{'ab' * 32}", b"x")
        assert two.sender.traffic.cut == 1

    Two().run(scene)


def test_who_is_isolated_neither_speaks_nor_hears() -> None:
    async def scene(two: Two) -> None:
        two.receiver.isolate()
        two.send(3)
        two.receiver.send_control(two.here.control, b"x")
        await asyncio.sleep(0.02)
        assert (two.heard, two.ears[0].heard) == ([], [])
        two.receiver.isolate(False)
        two.send(3)
        await asyncio.sleep(0.02)
        assert two.heard == [0, 1, 2]

    Two().run(scene)


def test_replies_keep_their_order_whatever_their_delay() -> None:
    async def scene(two: Two) -> None:
        two.receiver.replies = Faults(jitter_s=0.02, repeat=1.0, reorder=1.0)
        assert two.sender.send_bulk_request(two.there.bulk, b"?")
        await asyncio.sleep(0.02)
        (connection,) = two.ears[1].asked
        frames = [bytes([number]) for number in range(100)]
        for frame in frames:
            assert two.receiver.send_bulk_reply(connection, frame)
        await asyncio.sleep(0.1)
        assert two.ears[0].replies == frames

    Two().run(scene)


@pytest.mark.parametrize("fault", [{"loss": 1.1}, {"repeat": -0.1}, {"delay_s": -1.0}])
def test_faults_that_cannot_be_are_refused(fault: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"probabilities|negative"):
        Faults(**fault)
