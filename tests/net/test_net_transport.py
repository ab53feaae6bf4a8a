"""One contract, two transports."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvcomm_p2p.errors import ConfigError, TransportError
from kvcomm_p2p.net.memory_transport import MemoryHub, MemoryTransport
from kvcomm_p2p.net.transport import FRAME_BYTES_MAX, Addresses, Connection, Transport
from kvcomm_p2p.net.zmq_transport import ZmqTransport

Make = Callable[..., Transport]


class Inbox:
    """Remembers what arrived, in order."""

    def __init__(self) -> None:
        self.control: list[bytes] = []
        self.requests: list[tuple[Connection, bytes]] = []
        self.replies: list[tuple[bytes, memoryview | None]] = []
        self.unreachable: list[str] = []
        self.malformed = 0

    def on_control(self, frame: bytes) -> None:
        self.control.append(frame)

    def on_bulk_request(self, connection: Connection, frame: bytes) -> None:
        self.requests.append((connection, frame))

    def on_bulk_reply(self, frame: bytes, payload: memoryview | None) -> None:
        self.replies.append((frame, payload))

    def on_unreachable(self, address: str) -> None:
        self.unreachable.append(address)

    def on_malformed(self) -> None:
        self.malformed += 1


class End:
    """A started transport with its inbox."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.inbox = Inbox()
        self.addresses: Addresses = transport.start(self.inbox)


@pytest.fixture(params=["memory", "zmq"])
def make(request: pytest.FixtureRequest) -> Make:
    if request.param == "zmq":
        return lambda **ports: ZmqTransport(keep_freed_bytes=0, **ports)
    hub = MemoryHub()
    return lambda **ports: MemoryTransport(hub, **ports)


def between(make: Make, scenario: Callable[[End, End], Awaitable[None]]) -> None:
    """Run a scenario between two started transports and close them."""

    async def run() -> None:
        ends = [End(make()), End(make())]
        try:
            await asyncio.wait_for(scenario(*ends), 10)
        finally:
            for end in ends:
                end.transport.close()

    asyncio.run(run())


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_control_frames_arrive_in_order(make: Make) -> None:
    async def scenario(a: End, b: End) -> None:
        frames = [bytes([i]) * i for i in range(200)]
        for frame in frames:
            assert a.transport.send_control(b.addresses.control, frame)
        await until(lambda: len(b.inbox.control) == len(frames))
        assert b.inbox.control == frames
        assert a.inbox.malformed == b.inbox.malformed == 0

    between(make, scenario)


def test_bulk_replies_come_back_on_the_connection_that_asked(make: Make) -> None:
    payload = bytes(range(256)) * 8192  # 2 MiB

    async def scenario(a: End, b: End) -> None:
        assert a.transport.send_bulk_request(b.addresses.bulk, b"pull")
        await until(lambda: b.inbox.requests)
        connection, frame = b.inbox.requests[0]
        assert frame == b"pull"
        for header in (b"one", b"two", b"three"):
            assert b.transport.send_bulk_reply(connection, header, memoryview(payload))
        assert b.transport.send_bulk_reply(connection, b"done")
        await until(lambda: len(a.inbox.replies) == 4)
        assert [header for header, _ in a.inbox.replies] == [b"one", b"two", b"three", b"done"]
        for _, received in a.inbox.replies[:3]:
            assert received is not None and received.readonly and received == payload
        assert a.inbox.replies[3][1] is None

    between(make, scenario)


def test_two_pullers_get_their_own_replies(make: Make) -> None:
    async def scenario(a: End, b: End) -> None:
        c = End(make())
        try:
            a.transport.send_bulk_request(b.addresses.bulk, b"a")
            c.transport.send_bulk_request(b.addresses.bulk, b"c")
            await until(lambda: len(b.inbox.requests) == 2)
            for connection, frame in b.inbox.requests:
                b.transport.send_bulk_reply(connection, b"for " + frame)
            await until(lambda: a.inbox.replies and c.inbox.replies)
            assert (a.inbox.replies, c.inbox.replies) == ([(b"for a", None)], [(b"for c", None)])
        finally:
            c.transport.close()

    between(make, scenario)


def test_more_replies_than_a_pipe_holds_all_arrive(make: Make) -> None:
    payload = bytes(100_000)

    async def scenario(a: End, b: End) -> None:
        a.transport.send_bulk_request(b.addresses.bulk, b"pull")
        await until(lambda: b.inbox.requests)
        sent = [
            b.transport.send_bulk_reply(b.inbox.requests[0][0], str(i).encode(), memoryview(payload))
            for i in range(400)
        ]
        assert all(sent)
        await until(lambda: len(a.inbox.replies) == 400)
        assert [header for header, _ in a.inbox.replies] == [str(i).encode() for i in range(400)]

    between(make, scenario)


def test_refused_address_is_unreachable(make: Make) -> None:
    async def scenario(a: End, b: End) -> None:
        gone = End(make())
        gone.transport.close()
        a.transport.send_control(gone.addresses.control, b"hello")
        a.transport.send_bulk_request(gone.addresses.bulk, b"pull")
        await until(lambda: len(a.inbox.unreachable) == 2)
        assert sorted(a.inbox.unreachable) == sorted([gone.addresses.control, gone.addresses.bulk])

    between(make, scenario)


def test_peer_that_closes_becomes_unreachable_and_can_come_back(make: Make) -> None:
    async def scenario(a: End, b: End) -> None:
        assert a.transport.send_control(b.addresses.control, b"1")
        assert a.transport.send_bulk_request(b.addresses.bulk, b"2")
        await until(lambda: b.inbox.control and b.inbox.requests)
        b.transport.close()
        await until(lambda: len(a.inbox.unreachable) == 2)
        ports = [int(address.rpartition(":")[2]) for address in (b.addresses.control, b.addresses.bulk)]
        again = End(make(control_port=ports[0], bulk_port=ports[1]))
        try:
            assert again.addresses == b.addresses
            assert a.transport.send_control(b.addresses.control, b"3")
            await until(lambda: again.inbox.control == [b"3"])
        finally:
            again.transport.close()

    between(make, scenario)


def test_reply_to_a_connection_that_is_gone_is_lost(make: Make) -> None:
    async def scenario(a: End, b: End) -> None:
        a.transport.send_bulk_request(b.addresses.bulk, b"pull")
        await until(lambda: b.inbox.requests)
        connection = b.inbox.requests[0][0]
        a.transport.close()
        await until(lambda: not b.transport.send_bulk_reply(connection, b"late"))
        assert not b.transport.send_bulk_reply(Connection(b"never seen"), b"stray")

    between(make, scenario)


def test_closing_a_peer_is_silent(make: Make) -> None:
    async def scenario(a: End, b: End) -> None:
        a.transport.send_control(b.addresses.control, b"1")
        await until(lambda: b.inbox.control)
        a.transport.close_peer(b.addresses.control)
        a.transport.close_peer("127.0.0.1:1")
        a.transport.send_control(b.addresses.control, b"2")
        await until(lambda: len(b.inbox.control) == 2)
        assert a.inbox.unreachable == []

    between(make, scenario)


def test_oversize_frames_are_not_sent(make: Make) -> None:
    async def scenario(a: End, b: End) -> None:
        assert not a.transport.send_control(b.addresses.control, bytes(FRAME_BYTES_MAX + 1))
        assert not a.transport.send_bulk_request(b.addresses.bulk, bytes(FRAME_BYTES_MAX + 1))
        assert a.transport.send_control(b.addresses.control, bytes(FRAME_BYTES_MAX))
        await until(lambda: b.inbox.control)
        assert [len(frame) for frame in b.inbox.control] == [FRAME_BYTES_MAX]

    between(make, scenario)


def test_port_in_use_names_port_and_fix(make: Make) -> None:
    async def scenario(a: End, b: End) -> None:
        for name, address in (("control_port", a.addresses.control), ("bulk_port", a.addresses.bulk)):
            port = int(address.rpartition(":")[2])
            with pytest.raises(TransportError, match=rf"port {port} is in use.*0 for any free port"):
                make(**{name: port}).start(Inbox())

    between(make, scenario)


def test_closing_twice_and_sending_after(make: Make) -> None:
    async def scenario(a: End, b: End) -> None:
        a.transport.close()
        a.transport.close()
        assert not a.transport.send_control(b.addresses.control, b"late")
        assert not a.transport.send_bulk_request(b.addresses.bulk, b"late")
        assert not a.transport.send_bulk_reply(Connection(b"x"), b"late")

    between(make, scenario)


def test_goodbyes_leave_before_closing(make: Make) -> None:
    async def scenario(a: End, b: End) -> None:
        a.transport.send_control(b.addresses.control, b"bye")
        a.transport.close(flush_s=1.0)
        await until(lambda: b.inbox.control == [b"bye"])

    between(make, scenario)


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "example.org"])
def test_only_loopback_is_bound_or_advertised(host: str) -> None:
    for names in ({"bind_host": host}, {"advertise_host": host}):
        with pytest.raises(ConfigError, match="not a loopback address"):
            ZmqTransport(**names)


def test_only_loopback_is_dialled() -> None:
    async def scenario(a: End, b: End) -> None:
        for address in ("192.0.2.1:5000", "nonsense", "127.0.0.1:notaport", ""):
            assert not a.transport.send_control(address, b"x")

    between(lambda **ports: ZmqTransport(keep_freed_bytes=0, **ports), scenario)


def test_advertised_host_differs_from_bound() -> None:
    async def run() -> None:
        end = End(ZmqTransport(bind_host="127.0.0.1", advertise_host="localhost", keep_freed_bytes=0))
        assert end.addresses.control.startswith("localhost:")
        with socket.create_connection(("127.0.0.1", int(end.addresses.control.rpartition(":")[2])), 2):
            pass
        end.transport.close()

    asyncio.run(run())


def test_memory_hub_loses_and_freezes() -> None:
    hub = MemoryHub(loss=0.5, seed=1)

    async def scenario(a: End, b: End) -> None:
        for _ in range(100):
            assert a.transport.send_control(b.addresses.control, b"x")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert 20 < len(b.inbox.control) < 80
        hub.freeze(b.addresses.control)
        arrived = len(b.inbox.control)
        assert a.transport.send_control(b.addresses.control, b"x")
        await asyncio.sleep(0.01)
        assert len(b.inbox.control) == arrived

    between(lambda **ports: MemoryTransport(hub, **ports), scenario)
