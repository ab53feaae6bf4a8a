"""A transport inside one process, for tests: ZeroMQ's contract, plus loss, delay and freezing on request."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from kvcomm_p2p.errors import TransportError
from kvcomm_p2p.net.transport import FRAME_BYTES_MAX, PAYLOAD_BYTES_MAX, Addresses, Connection, Receiver


class MemoryHub:
    """The network. `loss` is the probability that a frame vanishes, `delay_s` how long it travels. Thread safe."""

    def __init__(self, *, loss: float = 0.0, delay_s: float = 0.0, seed: int = 0) -> None:
        self.loss = loss
        self.delay_s = delay_s
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self._homes: dict[str, MemoryTransport] = {}
        self._frozen: set[str] = set()
        self._next_port = 1
        self._next_connection = 1

    def freeze(self, address: str) -> None:
        """From now on whatever is sent to this address vanishes, as with a stopped process."""
        with self._lock:
            self._frozen.add(address)

    def _register(self, transport: MemoryTransport, port: int) -> str:
        with self._lock:
            if port == 0:
                port, self._next_port = self._next_port, self._next_port + 1
            address = f"127.0.0.1:{port}"
            if address in self._homes:
                raise TransportError(f"port {port} is in use; choose another one, or 0 for any free port")
            self._homes[address] = transport
            return address

    def _unregister(self, transport: MemoryTransport) -> None:
        with self._lock:
            self._homes = {address: home for address, home in self._homes.items() if home is not transport}

    def _find(self, address: str) -> MemoryTransport | None:
        with self._lock:
            return self._homes.get(address)

    def _travels(self, address: str) -> bool:
        with self._lock:
            return address not in self._frozen and self._rng.random() >= self.loss

    def _connection(self) -> Connection:
        with self._lock:
            number, self._next_connection = self._next_connection, self._next_connection + 1
            return Connection(number.to_bytes(8, "big"))


class MemoryTransport:
    """See `transport.Transport`."""

    def __init__(self, hub: MemoryHub, *, control_port: int = 0, bulk_port: int = 0) -> None:
        self._hub = hub
        self._ports = (control_port, bulk_port)
        self._receiver: Receiver | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._linked: dict[str, MemoryTransport] = {}
        self._inbound: dict[Connection, tuple[MemoryTransport, str]] = {}
        self._outbound: dict[str, Connection] = {}

    def start(self, receiver: Receiver) -> Addresses:
        self._loop = asyncio.get_running_loop()
        control = self._hub._register(self, self._ports[0])
        try:
            self._addresses = Addresses(control, self._hub._register(self, self._ports[1]))
        except TransportError:
            self._hub._unregister(self)
            raise
        self._receiver = receiver
        return self._addresses

    def send_control(self, address: str, frame: bytes) -> bool:
        peer = self._link(address)
        if peer is None or len(frame) > FRAME_BYTES_MAX:
            return False
        if self._hub._travels(address):
            peer._post(lambda receiver: receiver.on_control(frame))
        return True

    def send_bulk_request(self, address: str, frame: bytes) -> bool:
        peer = self._link(address)
        if peer is None or len(frame) > FRAME_BYTES_MAX:
            return False
        if address not in self._outbound:
            self._outbound[address] = self._hub._connection()
            peer._inbound[self._outbound[address]] = (self, address)
        connection = self._outbound[address]
        if self._hub._travels(address):
            peer._post(lambda receiver: receiver.on_bulk_request(connection, frame))
        return True

    def send_bulk_reply(self, connection: Connection, frame: bytes, payload: memoryview | None = None) -> bool:
        puller, address = self._inbound.get(connection, (None, ""))
        if puller is None or puller._receiver is None or puller._outbound.get(address) != connection:
            self._inbound.pop(connection, None)
            return False
        if len(frame) > FRAME_BYTES_MAX or (payload is not None and len(payload) > PAYLOAD_BYTES_MAX):
            return False
        if self._hub._travels(puller._addresses.bulk):
            shown = None if payload is None else payload.toreadonly()
            puller._post(lambda receiver: receiver.on_bulk_reply(frame, shown))
        return True

    def close_peer(self, address: str) -> None:
        self._linked.pop(address, None)
        self._outbound.pop(address, None)

    def close(self, flush_s: float = 0.0) -> None:
        if self._receiver is None:
            return
        self._receiver = None
        self._hub._unregister(self)
        for peer in {*self._hub._homes.values()}:
            peer._on_loop(lambda peer=peer: peer._lost(self))  # type: ignore[misc]

    def _link(self, address: str) -> MemoryTransport | None:
        peer = self._hub._find(address)
        if self._receiver is None:
            return None
        if peer is None:
            self._post(lambda receiver: receiver.on_unreachable(address))
        else:
            self._linked[address] = peer
        return peer

    def _lost(self, peer: MemoryTransport) -> None:
        for address in [address for address, linked in self._linked.items() if linked is peer]:
            self.close_peer(address)
            if self._receiver is not None:
                self._receiver.on_unreachable(address)

    def _post(self, call: Callable[[Receiver], Any]) -> None:
        def arrive() -> None:
            if self._receiver is not None:
                call(self._receiver)

        self._on_loop(arrive)

    def _on_loop(self, call: Callable[[], Any]) -> None:
        loop, delay_s = self._loop, self._hub.delay_s
        if loop is None:
            return
        with suppress(RuntimeError):  # the other side's loop has ended
            if delay_s:
                loop.call_soon_threadsafe(loop.call_later, delay_s, call)
            else:
                loop.call_soon_threadsafe(call)
