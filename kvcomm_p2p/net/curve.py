"""CurveZMQ on our sockets: encryption, and a doorman who lets in only whose key is on the list.

Every Context has one ZAP handler (RFC 27), which must listen before the first server socket binds. Ours lives on the
driver's loop, so that the list it asks is the one that everything else there sees.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import zmq

from kvcomm_p2p.net.zmq_sockets import Watch

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"kvcomm"
KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """Our CURVE keys (32 bytes each), and who may connect: `lets_in(public key)` is asked for every connection, on the loop.
    `refused(address, key)` hears who was not let in, `lost(dial name, monitor event)` how connections that we asked for end."""

    public: bytes
    secret: bytes = field(repr=False)
    lets_in: Callable[[bytes], bool]
    refused: Callable[[str, bytes], None] = lambda address, key: None
    lost: Callable[[str, int], None] = lambda name, event: None

    def serve(self, socket: zmq.Socket[bytes]) -> None:
        """Before `bind`: plain and unknown clients get no further than the handshake."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)

    def dial(self, socket: zmq.Socket[bytes], server_key: bytes) -> None:
        """Before `connect`: a server that has not the secret of `server_key` gets no further than the handshake."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, server_key)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)


class Doorman:
    """Answers libzmq's questions who may connect. Make it before any socket of the Context binds."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        context: zmq.Context[zmq.Socket[bytes]],
        keys: CurveKeys,
    ) -> None:
        self._keys = keys
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ZAP_ENDPOINT)
        self._watch = Watch(loop, self._socket, self._on_question)

    def close(self) -> None:
        """After the sockets that it guards."""
        self._watch.stop()
        self._socket.close(0)

    def _on_question(self, parts: list[bytes]) -> None:
        """envelope..., "", version, request id, domain, address, routing id, mechanism, credentials..."""
        empty = parts.index(b"") if b"" in parts else -1
        envelope, question = parts[: empty + 1], parts[empty + 1 :]
        if empty < 0 or len(question) < 6:
            return
        version, request_id, domain, address, _, mechanism, *credentials = question
        good = (
            (version, domain, mechanism) == (b"1.0", ZAP_DOMAIN, b"CURVE")
            and len(credentials) == 1
            and len(credentials[0]) == KEY_BYTES
            and self._keys.lets_in(credentials[0])
        )
        if not good and credentials:
            self._keys.refused(address.decode("ascii", "replace"), credentials[0][:KEY_BYTES])
        status = [b"200", b"OK", credentials[0].hex().encode()] if good else [b"400", b"not allowed", b""]
        with suppress(zmq.ZMQError):  # the connection has gone meanwhile
            self._socket.send_multipart([*envelope, version, request_id, *status, b""], zmq.NOBLOCK)
        self._watch.check()


def key_of(frame: zmq.Frame) -> bytes:
    """The CURVE key of the client that sent a frame, as the doorman saw it; empty on plain connections."""
    with suppress(zmq.ZMQError, ValueError, TypeError):
        return bytes.fromhex(str(frame.get("User-Id")))
    return b""


def dial_name(address: str, server_key: bytes) -> str:
    """What a transport is given to reach `address` where the server must prove that it has `server_key`."""
    return f"{address}#{server_key.hex()}"


def split_dial_name(name: str) -> tuple[str, bytes]:
    """Address and server key (empty: plain). Raises ValueError for a key that is none."""
    address, _, digits = name.partition("#")
    key = bytes.fromhex(digits)
    if len(key) not in (0, KEY_BYTES):
        raise ValueError("a server key has 32 bytes")
    return address, key
