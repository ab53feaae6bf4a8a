"""What the driver needs from a network: datagram-like frames to addresses, and bulk replies on the connection that
asked.

Addresses are "host:port"; where connections are encrypted they end in the key that the server must have
(`curve.dial_name`).

Frames are opaque here. Nothing blocks and nothing is retried: a frame is handed over or lost, and the protocol expects
loss. All methods are called, and all callbacks come, on the event loop that `start` ran on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType, Protocol

from kvcomm_p2p.protocol.messages import CHUNK_BYTES_MAX
from kvcomm_p2p.protocol.wire import CONTROL_FRAME_BYTES_MAX

FRAME_BYTES_MAX = CONTROL_FRAME_BYTES_MAX + 64
"""Longest frame that a transport carries (64 bytes are room for a seal)."""

PAYLOAD_BYTES_MAX = CHUNK_BYTES_MAX

Connection = NewType("Connection", bytes)
"""An inbound bulk connection, valid until it closes; never names another connection of this transport later."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """Each "host:port", under which peers reach this transport."""

    control: str
    bulk: str


class Receiver(Protocol):
    """Who is told. Must not raise. Frames and payloads are untrusted bytes of any content."""

    def on_control(self, frame: bytes, key: bytes = b"") -> None:
        """A control frame arrived. `key`, here and below: the CURVE key that the other end of the connection has proven to
        have; empty on connections that are not encrypted."""

    def on_bulk_request(self, connection: Connection, frame: bytes, key: bytes = b"") -> None:
        """A frame arrived on an inbound bulk connection. Replies to it go to `connection`."""

    def on_bulk_reply(self, frame: bytes, payload: memoryview | None, key: bytes = b"") -> None:
        """A reply arrived on a bulk connection that this transport opened. `payload` is read-only and never changes;
        it may be kept."""

    def on_unreachable(self, address: str) -> None:
        """The connection to this control or bulk address was refused, or was closed by the other side.

        What was sent to it and had not left is lost. The next send to the address tries a new connection.
        """

    def on_malformed(self) -> None:
        """Something arrived that has not the shape of any of the above; it was dropped."""


class Transport(Protocol):
    """Two planes of sockets, so that bulk bytes never delay control frames."""

    def start(self, receiver: Receiver) -> Addresses:
        """Bind, on the running event loop. Raises TransportError (port in use: names the port and the fix)."""

    def send_control(self, address: str, frame: bytes) -> bool:
        """Send to a peer's control address. False: the frame was lost at once (full queue, impossible address)."""

    def send_bulk_request(self, address: str, frame: bytes) -> bool:
        """Send to a peer's bulk address; replies come to `on_bulk_reply`. False as for `send_control`."""

    def send_bulk_reply(self, connection: Connection, frame: bytes, payload: memoryview | None = None) -> bool:
        """Reply on an inbound bulk connection, in order. `payload` must not change any more; it is not copied and is
        referred to until it has left. False: lost (the connection is gone, or too much waits for it already)."""

    def close_peer(self, address: str) -> None:
        """Forget the connection to this control or bulk address, with what waits for it. No callback follows."""

    def close(self, flush_s: float = 0.0) -> None:
        """Stop; control frames sent before get up to `flush_s` seconds to leave (blocking). No callback follows.
        Safe to call twice."""
