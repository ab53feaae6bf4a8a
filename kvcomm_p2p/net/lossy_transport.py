"""A bad network around a good transport: loss, repetition, reordering, delay and cut links, for tests and measurements.

Faults apply to what is sent. A connection's replies keep their order, as TCP does; they may be late or lost.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvcomm_p2p.net.transport import Addresses, Connection, Receiver, Transport


@dataclass(frozen=True, slots=True)
class Faults:
    """What happens to each frame, independently. `loss`, `repeat` and `reorder` are probabilities.

    A frame takes `delay_s` plus up to `jitter_s`; one that is reordered takes up to `reorder_s` more, so that later ones
    overtake it. Replies on bulk connections are never repeated or reordered: no connection does that.
    """

    loss: float = 0.0
    repeat: float = 0.0
    reorder: float = 0.0
    delay_s: float = 0.0
    jitter_s: float = 0.0
    reorder_s: float = 0.05

    def __post_init__(self) -> None:
        """Raises ValueError for what is no probability or no time."""
        if not all(0.0 <= share <= 1.0 for share in (self.loss, self.repeat, self.reorder)):
            raise ValueError("loss, repeat and reorder are probabilities")
        if min(self.delay_s, self.jitter_s, self.reorder_s) < 0.0:
            raise ValueError("times are not negative")


NO_FAULTS = Faults()

ORDER_S = 1e-6
"""Between late replies of one connection: timers of equal time would run in any order."""


@dataclass(slots=True)
class Traffic:
    """Counts since the transport was made. `*_bytes` are frames and payloads handed to the network below; frames that the
    faults swallowed are in `lost`, those to addresses that are cut off in `cut`."""

    control_bytes: int = 0
    bulk_bytes: int = 0
    control_frames: int = 0
    bulk_frames: int = 0
    lost: int = 0
    cut: int = 0


class LossyTransport:
    """See `transport.Transport`; `inner` carries what survives. Faults and cuts may be changed at any time, on the loop.

    `on_delivered`, if set, is called after the receiver has taken in a frame (and once whatever it scheduled at once ran).
    """

    def __init__(
        self,
        inner: Transport,
        *,
        control: Faults = NO_FAULTS,
        requests: Faults = NO_FAULTS,
        replies: Faults = NO_FAULTS,
        reply_bytes_per_s: float = math.inf,
        seed: int = 0,
    ) -> None:
        """Faults of control frames, of bulk requests, and of replies on bulk connections; and how many bytes a second each
        of these connections carries."""
        self.reply_bytes_per_s = reply_bytes_per_s
        self.control, self.requests, self.replies = control, requests, replies
        self.traffic = Traffic()
        self.on_delivered: Callable[[], None] | None = None
        self._inner = inner
        self._rng = random.Random(seed)
        self._cut: frozenset[str] = frozenset()
        self._isolated = False
        self._closed = False
        self._reply_at: dict[Connection, float] = {}
        self._dialled: set[str] = set()

    # ---------------------------------------------------------------------------------------------------------- faults

    def cut(self, addresses: Iterable[str]) -> None:
        """From now on nothing is sent to exactly these control and bulk addresses, and their connections are closed with
        what waits in them; nobody is told. One way: the others cut too, or their frames still arrive."""
        self._cut = frozenset(addresses)
        for name in sorted(self._dialled):
            if self._is_cut(name):
                self._inner.close_peer(name)

    def isolate(self, isolated: bool = True) -> None:
        """Nothing goes out and nothing comes in, silently: a machine that lost its cable, or (False) has it back."""
        self._isolated = isolated

    # ------------------------------------------------------------------------------------------------------- transport

    def start(self, receiver: Receiver) -> Addresses:
        self._loop = asyncio.get_running_loop()
        self._receiver = receiver
        return self._inner.start(self)

    def send_control(self, address: str, frame: bytes) -> bool:
        return self._send(self.control, address, lambda: self._control_now(address, frame))

    def send_bulk_request(self, address: str, frame: bytes) -> bool:
        return self._send(self.requests, address, lambda: self._request_now(address, frame))

    def send_bulk_reply(self, connection: Connection, frame: bytes, payload: memoryview | None = None) -> bool:
        if self._isolated:
            self.traffic.cut += 1
            return True
        faults = self.replies
        if self._rng.random() < faults.loss:
            self.traffic.lost += 1
            return True
        delay_s = faults.delay_s + faults.jitter_s * self._rng.random()
        takes_s = (len(frame) + (0 if payload is None else payload.nbytes)) / self.reply_bytes_per_s
        due = self._reply_at.get(connection, 0.0)
        if not delay_s and not takes_s and due <= self._loop.time():
            return self._reply_now(connection, frame, payload)
        self._reply_at[connection] = due = max(due + ORDER_S, self._loop.time() + delay_s) + takes_s
        self._loop.call_at(due, self._reply_late, connection, due, frame, payload)
        return True

    def close_peer(self, address: str) -> None:
        self._inner.close_peer(address)

    def close(self, flush_s: float = 0.0) -> None:
        self._closed = True
        self._inner.close(0.0 if self._isolated else flush_s)

    # -------------------------------------------------------------------------------------------------------- receiver

    def on_control(self, frame: bytes, key: bytes = b"") -> None:
        if not self._isolated:
            self._receiver.on_control(frame, *_given(key))
            self._delivered()

    def on_bulk_request(self, connection: Connection, frame: bytes, key: bytes = b"") -> None:
        if not self._isolated:
            self._receiver.on_bulk_request(connection, frame, *_given(key))
            self._delivered()

    def on_bulk_reply(self, frame: bytes, payload: memoryview | None, key: bytes = b"") -> None:
        if not self._isolated:
            self._receiver.on_bulk_reply(frame, payload, *_given(key))
            self._delivered()

    def on_unreachable(self, address: str) -> None:
        if not (self._isolated or self._is_cut(address)):
            self._receiver.on_unreachable(address)

    def on_malformed(self) -> None:
        self._receiver.on_malformed()

    # ---------------------------------------------------------------------------------------------------------- inside

    def _send(self, faults: Faults, address: str, send: Callable[[], bool]) -> bool:
        if self._isolated or self._is_cut(address):
            self.traffic.cut += 1
            return True
        self._dialled.add(address)
        sent = True
        for _ in range(2 if self._rng.random() < faults.repeat else 1):
            if self._rng.random() < faults.loss:
                self.traffic.lost += 1
                continue
            delay_s = faults.delay_s + faults.jitter_s * self._rng.random()
            if self._rng.random() < faults.reorder:
                delay_s += faults.reorder_s * self._rng.random()
            if delay_s:
                self._loop.call_later(delay_s, self._send_late, address, send)
            else:
                sent = send() and sent
        return sent

    def _is_cut(self, name: str) -> bool:
        return name.partition("#")[0] in self._cut  # behind it stands the key of an encrypted connection

    def _send_late(self, address: str, send: Callable[[], bool]) -> None:
        if self._isolated or self._is_cut(address):
            self.traffic.cut += 1
        elif not self._closed:
            send()

    def _control_now(self, address: str, frame: bytes) -> bool:
        self.traffic.control_bytes += len(frame)
        self.traffic.control_frames += 1
        return self._inner.send_control(address, frame)

    def _request_now(self, address: str, frame: bytes) -> bool:
        self.traffic.bulk_bytes += len(frame)
        self.traffic.bulk_frames += 1
        return self._inner.send_bulk_request(address, frame)

    def _reply_now(self, connection: Connection, frame: bytes, payload: memoryview | None) -> bool:
        self.traffic.bulk_bytes += len(frame) + (0 if payload is None else payload.nbytes)
        self.traffic.bulk_frames += 1
        return self._inner.send_bulk_reply(connection, frame, payload)

    def _reply_late(self, connection: Connection, due: float, frame: bytes, payload: memoryview | None) -> None:
        if self._reply_at.get(connection) == due:
            del self._reply_at[connection]
        if not (self._closed or self._isolated):
            self._reply_now(connection, frame, payload)

    def _delivered(self) -> None:
        if self.on_delivered is not None:
            self._loop.call_soon(self.on_delivered)


def _given(key: bytes) -> tuple[bytes, ...]:
    return (key,) if key else ()
