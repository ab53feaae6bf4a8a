"""ZeroMQ sockets on an asyncio loop: options, reading in batches, and DEALERs that know when their connection is lost."""

from __future__ import annotations

import asyncio
import itertools
import struct
from collections.abc import Callable
from typing import Any

import zmq

from kvcomm_p2p.net.transport import FRAME_BYTES_MAX, PAYLOAD_BYTES_MAX

CONTROL_HWM = 256
BULK_HWM = 64
"""Frames in a pipe; the bytes on the way are bounded by the credit of each pull."""

BATCH = 32
BULK_BATCH = 4
"""Messages taken from one socket before the loop gets to do something else: a chunk takes as long as many control frames."""

IO_THREADS = 3
_CONTROL_AFFINITY, _BULK_AFFINITY = 0b001, 0b110
"""Control frames have an I/O thread to themselves: they never wait for one that is moving (or encrypting) chunks."""

BULK_BUFFER_BYTES = 1024 * 1024
HANDSHAKE_MS = 3000

LOST = (
    zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_monitor_numbers = itertools.count()


class Watch:
    """Calls `on_message` with the parts of every message of a socket.

    The descriptor is edge-triggered: a send may swallow its signal, so after one `check` must be called.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        socket: zmq.Socket[bytes],
        on_message: Callable[[list[Any]], None],
        copy: bool = True,
        batch: int = BATCH,
    ) -> None:
        self._loop = loop
        self._socket = socket
        self._on_message = on_message
        self._copy = copy
        self._batch = batch
        self._scheduled = False
        self._fd: int = socket.fileno()
        loop.add_reader(self._fd, self._drain)
        self.check()

    def check(self) -> None:
        """Look for messages whose signal may be gone."""
        if not self._scheduled and not self._socket.closed and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._scheduled = True
            self._loop.call_soon(self._drain)

    def stop(self) -> None:
        """Call before the socket is closed."""
        self._loop.remove_reader(self._fd)

    def _drain(self) -> None:
        self._scheduled = False
        for _ in range(self._batch):
            if self._socket.closed:
                return
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=self._copy)
            except zmq.ZMQError as error:
                if error.errno in (zmq.EAGAIN, zmq.ETERM):
                    return
                raise
            self._on_message(parts)
        self.check()


class Dealer:
    """A DEALER to one address, with a monitor. Raises ZMQError if the address is impossible.

    `on_lost` is called once, with the monitor's event, when the connection is refused or closed; the owner then closes the
    Dealer.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        *,
        bulk: bool,
        on_message: Callable[[list[zmq.Frame]], None],
        on_lost: Callable[[int], None],
        secure: Callable[[zmq.Socket[bytes]], None] | None = None,
    ) -> None:
        """`secure` sets what encryption needs, before the socket connects."""
        self.used_at = loop.time()
        self._on_lost = on_lost
        self._lost = False
        self._socket = context.socket(zmq.DEALER)
        configure(self._socket, PAYLOAD_BYTES_MAX if bulk else FRAME_BYTES_MAX, bulk=bulk)
        if bulk:
            self._socket.setsockopt(zmq.RCVBUF, BULK_BUFFER_BYTES)
        if secure is not None:
            secure(self._socket)
        # A name of its own: pyzmq's default reuses names while the monitor before is still being torn down.
        endpoint = f"inproc://kvcomm-monitor-{next(_monitor_numbers)}"
        try:
            self._monitor = context.socket(zmq.PAIR)
        except zmq.ZMQError:  # no descriptor left
            self._socket.close(0)
            raise
        try:
            self._socket.monitor(endpoint, LOST)
            self._monitor.connect(endpoint)
            self._socket.connect(f"tcp://{address}")
        except zmq.ZMQError:
            self._socket.close(0)
            self._monitor.close(0)
            raise
        self._watches = (
            Watch(loop, self._socket, on_message, copy=False, batch=BULK_BATCH if bulk else BATCH),
            Watch(loop, self._monitor, self._on_event),
        )

    def send(self, frame: bytes, now: float) -> bool:
        """False if the pipe is full."""
        self.used_at = now
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        self._watches[0].check()
        return True

    def close(self, linger_ms: int = 0) -> None:
        """What is queued gets `linger_ms` to leave, in the background."""
        for watch in self._watches:
            watch.stop()
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(linger_ms)

    def _on_event(self, parts: list[bytes]) -> None:
        (event,) = struct.unpack_from("=H", parts[0])
        if event & LOST and not self._lost:
            self._lost = True
            self._on_lost(event)


def configure(socket: zmq.Socket[bytes], frame_bytes_max: int, *, bulk: bool) -> None:
    """Options that every socket has. RECONNECT_IVL -1: a lost connection is reported, not dialled again."""
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.SNDHWM, BULK_HWM if bulk else CONTROL_HWM),
        (zmq.RCVHWM, BULK_HWM if bulk else CONTROL_HWM),
        (zmq.AFFINITY, _BULK_AFFINITY if bulk else _CONTROL_AFFINITY),
        (zmq.MAXMSGSIZE, frame_bytes_max),
        (zmq.HANDSHAKE_IVL, HANDSHAKE_MS),
        (zmq.RECONNECT_IVL, -1),
        (zmq.IMMEDIATE, 0),
    ):
        socket.setsockopt(option, value)
