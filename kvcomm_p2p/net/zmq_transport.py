"""ZeroMQ over TCP: plain on loopback, encrypted (`curve`) anywhere else.

Control plane: a ROUTER that only receives, and a DEALER per peer that only sends. Bulk plane: a ROUTER that answers
on the connection that asked, and a DEALER per holder that asks and receives. Plain sockets driven by the loop's
readers: received in batches, with no future per message, and no receive that a cancellation could eat.

DEALERs keep IMMEDIATE off, so that a frame sent before the connection stands waits in its (bounded) pipe; and a
DEALER never outlives its connection: when the monitor says refused or closed it is closed with what waits in it, and
the next send opens a new one. So nothing is ever queued for the dead, and nobody is dialled who is not being talked
to.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from functools import partial
from typing import Any, TypeAlias

import zmq

from kvcomm_p2p.errors import ConfigError, TransportError
from kvcomm_p2p.net.allocator import KEEP_BYTES, keep_freed_memory
from kvcomm_p2p.net.curve import CurveKeys, Doorman, key_of, split_dial_name
from kvcomm_p2p.net.transport import FRAME_BYTES_MAX, Addresses, Connection, Receiver
from kvcomm_p2p.net.zmq_sockets import BULK_BUFFER_BYTES, IO_THREADS, Dealer, Watch, configure
from kvcomm_p2p.settings import is_loopback

REPLIES_WAITING_MAX = 1024
"""Frames that may wait for one inbound bulk connection whose pipe is full."""

RETRY_S = 0.001

PEER_SOCKETS_MAX = 64
"""Open DEALERs per plane (four file descriptors each); the one that is idle for longest makes room."""

IDLE_S = 60.0

_Waiting: TypeAlias = "deque[tuple[bytes, memoryview | None]]"


class ZmqTransport:
    """See `transport.Transport`. One Context of its own. Raises ConfigError for a host that is not loopback, unless there
    are keys to encrypt with."""

    def __init__(
        self,
        *,
        bind_host: str = "127.0.0.1",
        advertise_host: str = "",
        control_port: int = 0,
        bulk_port: int = 0,
        keep_freed_bytes: int = KEEP_BYTES,
        curve: CurveKeys | None = None,
    ) -> None:
        """Ports: 0 is any free one. `keep_freed_bytes`: see `allocator`; 0 leaves the process's allocator alone. `curve`:
        encrypt everything, and let in only whom it names."""
        self._curve = curve
        if curve is None:
            for host in (bind_host, advertise_host or bind_host):
                _require_loopback(host)
        self._bind_host = "127.0.0.1" if bind_host == "localhost" else bind_host
        self._advertise_host = advertise_host or self._bind_host
        self._ports = (control_port, bulk_port)
        self._keep_freed_bytes = keep_freed_bytes
        self._receiver: Receiver | None = None
        self._control: OrderedDict[str, Dealer] = OrderedDict()
        self._bulk: OrderedDict[str, Dealer] = OrderedDict()
        self._waiting: dict[Connection, _Waiting] = {}
        self._retry: asyncio.TimerHandle | None = None
        self._sweeper: asyncio.TimerHandle | None = None

    def start(self, receiver: Receiver) -> Addresses:
        self._loop = asyncio.get_running_loop()
        if self._keep_freed_bytes:
            keep_freed_memory(self._keep_freed_bytes)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(IO_THREADS)
        self._context.set(zmq.MAX_SOCKETS, 4096)
        self._receiver = receiver
        curve = self._curve
        self._doorman = None if curve is None else Doorman(self._loop, self._context, curve)
        try:
            self._control_router, control_port = self._bind(self._ports[0], bulk=False)
            self._bulk_router, bulk_port = self._bind(self._ports[1], bulk=True)
        except TransportError:
            if self._doorman is not None:
                self._doorman.close()
            self._context.destroy(linger=0)
            self._receiver = None
            raise
        self._control_watch = Watch(self._loop, self._control_router, self._on_control, copy=curve is None)
        self._bulk_watch = Watch(self._loop, self._bulk_router, self._on_bulk_request, copy=curve is None)
        self._sweeper = self._loop.call_later(IDLE_S, self._sweep)
        return Addresses(f"{self._advertise_host}:{control_port}", f"{self._advertise_host}:{bulk_port}")

    def send_control(self, address: str, frame: bytes) -> bool:
        return self._send(self._control, address, frame)

    def send_bulk_request(self, address: str, frame: bytes) -> bool:
        return self._send(self._bulk, address, frame)

    def send_bulk_reply(self, connection: Connection, frame: bytes, payload: memoryview | None = None) -> bool:
        if self._receiver is None:
            return False
        waiting = self._waiting.get(connection)
        if waiting is None:
            sent = self._try_reply(connection, frame, payload)
            if sent is not None:
                return sent
            waiting = self._waiting[connection] = deque()
        if len(waiting) >= REPLIES_WAITING_MAX:
            return False
        waiting.append((frame, payload))
        self._schedule_retry()
        return True

    def close_peer(self, address: str) -> None:
        for plane in (self._control, self._bulk):
            dealer = plane.pop(address, None)
            if dealer is not None:
                dealer.close(0)

    def close(self, flush_s: float = 0.0) -> None:
        if self._receiver is None:
            return
        self._receiver = None
        for timer in (self._retry, self._sweeper):
            if timer is not None:
                timer.cancel()
        self._waiting.clear()
        for dealer in self._control.values():
            dealer.close(int(flush_s * 1000))
        for dealer in self._bulk.values():
            dealer.close(0)
        self._control.clear()
        self._bulk.clear()
        for watch, router in ((self._control_watch, self._control_router), (self._bulk_watch, self._bulk_router)):
            watch.stop()
            router.close(0)
        if self._doorman is not None:
            self._doorman.close()
        self._context.term()

    # ---------------------------------------------------------------------------------------------------------- inside

    def _bind(self, port: int, *, bulk: bool) -> tuple[zmq.Socket[bytes], int]:
        router = self._context.socket(zmq.ROUTER)
        configure(router, FRAME_BYTES_MAX, bulk=bulk)
        if bulk:
            router.setsockopt(zmq.SNDBUF, BULK_BUFFER_BYTES)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.BACKLOG, 512)
        if self._curve is not None:
            self._curve.serve(router)
        try:
            router.bind(f"tcp://{self._bind_host}:{port or '*'}")
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE:
                raise TransportError(f"port {port} is in use; choose another one, or 0 for any free port") from error
            raise TransportError(f"cannot listen on {self._bind_host}:{port}: {error}; try port 0") from error
        endpoint = router.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return router, int(endpoint.rstrip(b"\0").rpartition(b":")[2])

    def _send(self, plane: OrderedDict[str, Dealer], address: str, frame: bytes) -> bool:
        if self._receiver is None or len(frame) > FRAME_BYTES_MAX:
            return False
        dealer = plane.get(address)
        if dealer is None:
            try:
                dealer = self._open(plane, address)
            except (ConfigError, ValueError, zmq.ZMQError):
                return False
        plane.move_to_end(address)
        return dealer.send(frame, self._loop.time())

    def _open(self, plane: OrderedDict[str, Dealer], name: str) -> Dealer:
        """Raises ConfigError for a plain address that is not loopback, ValueError for a bad key, ZMQError."""
        address, server_key = split_dial_name(name)
        curve = self._curve
        if curve is None or not server_key:
            if curve is not None:
                raise ConfigError(f"{address!r} cannot be dialled without the key of who listens there")
            _require_loopback(address.rpartition(":")[0])
        if len(plane) >= PEER_SOCKETS_MAX:
            self._close_one(plane, next(iter(plane)))
        bulk = plane is self._bulk
        dealer = Dealer(
            self._loop,
            self._context,
            address,
            bulk=bulk,
            on_message=partial(self._on_bulk_reply, server_key) if bulk else self._on_stray,
            on_lost=lambda event: self._on_lost(plane, name, event),
            secure=None if curve is None else partial(curve.dial, server_key=server_key),
        )
        plane[name] = dealer
        return dealer

    def _close_one(self, plane: OrderedDict[str, Dealer], address: str) -> None:
        plane.pop(address).close(0)

    def _on_control(self, parts: list[Any]) -> None:
        if self._receiver is None:
            return
        if len(parts) == 2:
            self._receiver.on_control(*self._opened(parts[1]))
        else:
            self._receiver.on_malformed()

    def _on_bulk_request(self, parts: list[Any]) -> None:
        if self._receiver is None:
            return
        if len(parts) == 2:
            connection = parts[0] if self._curve is None else parts[0].bytes
            self._receiver.on_bulk_request(Connection(connection), *self._opened(parts[1]))
        else:
            self._receiver.on_malformed()

    def _opened(self, frame: Any) -> tuple[bytes, ...]:
        """What came and, where that is known, whose connection it came on."""
        return (frame,) if self._curve is None else (frame.bytes, key_of(frame))

    def _on_bulk_reply(self, server_key: bytes, parts: list[zmq.Frame]) -> None:
        if self._receiver is None:
            return
        if len(parts) in (1, 2) and len(parts[0]) <= FRAME_BYTES_MAX:
            payload = parts[1].buffer.toreadonly() if len(parts) == 2 else None
            self._receiver.on_bulk_reply(parts[0].bytes, payload, *((server_key,) if server_key else ()))
        else:
            self._receiver.on_malformed()

    def _on_stray(self, parts: list[zmq.Frame]) -> None:
        if self._receiver is not None:
            self._receiver.on_malformed()

    def _on_lost(self, plane: OrderedDict[str, Dealer], address: str, event: int) -> None:
        if self._receiver is not None:
            if self._curve is not None:
                self._curve.lost(address, event)
            self._close_one(plane, address)
            self._receiver.on_unreachable(address)

    def _try_reply(self, connection: Connection, frame: bytes, payload: memoryview | None) -> bool | None:
        """True: handed over; False: no such connection; None: its pipe is full."""
        try:
            self._bulk_router.send(connection, zmq.SNDMORE | zmq.NOBLOCK)
            if payload is None:
                self._bulk_router.send(frame, zmq.NOBLOCK)
            else:
                self._bulk_router.send(frame, zmq.SNDMORE | zmq.NOBLOCK)
                self._bulk_router.send(payload, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        except zmq.ZMQError:
            return False
        self._bulk_watch.check()
        return True

    def _schedule_retry(self) -> None:
        if self._retry is None:
            self._retry = self._loop.call_later(RETRY_S, self._retry_replies)

    def _retry_replies(self) -> None:
        """A ROUTER cannot say which of its pipes has room again, so whoever waits is tried now and then."""
        self._retry = None
        for connection, waiting in list(self._waiting.items()):
            while waiting:
                sent = self._try_reply(connection, *waiting[0])
                if sent is None:
                    break
                if not sent:
                    waiting.clear()
                    break
                waiting.popleft()
            if not waiting:
                del self._waiting[connection]
        if self._waiting:
            self._schedule_retry()

    def _sweep(self) -> None:
        now = self._loop.time()
        for plane in (self._control, self._bulk):
            for address in [address for address, dealer in plane.items() if now - dealer.used_at > IDLE_S]:
                self._close_one(plane, address)
        self._sweeper = self._loop.call_later(IDLE_S, self._sweep)


def _require_loopback(host: str) -> None:
    if not is_loopback(host):
        raise ConfigError(
            f"{host!r} is not a loopback address, and this node has no keys to encrypt with: use 127.0.0.1, or run "
            "`kvcomm keys new` and `kvcomm keys allow`"
        )
