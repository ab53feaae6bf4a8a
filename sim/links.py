"""The simulated network: how long bytes take between two nodes, and which never arrive."""

from __future__ import annotations

import math
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kvcomm_p2p.errors import ConfigError

HEADER_BYTES = 66
"""Ethernet, IP and TCP headers that every frame pays for."""

RETRANSMIT_S = 0.2
"""After so long a connection sends a lost packet again (the least that Linux waits), then after twice as long each time."""

RETRANSMITS_MAX = 6
"""After so many in vain the packet is given up."""


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """One direction between two nodes.

    A frame takes `latency_s` plus up to `jitter_s` (uniform), and its bytes over `bytes_per_s`. Independently, it is lost
    with probability `loss`, arrives twice with `duplication`, and is held back by up to 10 latencies with `reordering`.
    Pulls travel over TCP: for them a lost packet costs a retransmission, not the bytes (see `bulk_bytes_per_s`).
    Raises ConfigError for values that no link has.
    """

    latency_s: float = 0.0002
    jitter_s: float = 0.00005
    bytes_per_s: float = 1.25e9
    loss: float = 0.0
    duplication: float = 0.0
    reordering: float = 0.0

    def __post_init__(self) -> None:
        for name in ("latency_s", "jitter_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name} must be 0 or more seconds, not {value}")
        if not (math.isfinite(self.bytes_per_s) and self.bytes_per_s > 0):
            raise ConfigError(f"bytes_per_s must be above 0, not {self.bytes_per_s}")
        for name in ("loss", "duplication", "reordering"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is a probability, 0 to 1, not {getattr(self, name)}")

    @property
    def bulk_bytes_per_s(self) -> float:
        """What a TCP stream gets: the link, or with loss p what Mathis et al. (1997) found for long transfers, segment / RTT *
        sqrt(3/2) / sqrt(p), whichever is less."""
        if self.loss == 0 or self.latency_s == 0:
            return self.bytes_per_s
        segment, round_trip_s = 1448, 2 * (self.latency_s + self.jitter_s / 2)
        return min(self.bytes_per_s, segment / round_trip_s * math.sqrt(1.5 / self.loss))


LOOPBACK = LinkProfile(latency_s=0.00005, jitter_s=0.00002, bytes_per_s=1e9)
LAN = LinkProfile()
WAN = LinkProfile(latency_s=0.025, jitter_s=0.002, bytes_per_s=1.25e8)
DSL = LinkProfile(latency_s=0.0125, jitter_s=0.001, bytes_per_s=1.25e7, loss=0.001)
FAST = LinkProfile(latency_s=0.00003, jitter_s=0.00001, bytes_per_s=1.25e10)
PROFILES = {"loopback": LOOPBACK, "lan": LAN, "wan": WAN, "dsl": DSL, "fast": FAST}
"""One machine, 10 GbE, 1 Gbit/s over 50 ms of round trip, 100 Mbit/s over 25 ms with losses, 100 GbE."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Frames from any of `sources` to any of `targets` (node numbers) do not arrive while it stands. One direction."""

    sources: frozenset[int]
    targets: frozenset[int]


@dataclass(slots=True)
class _Port:
    """A node's network interface. Bulk chunks of different flows take turns; control frames do not wait for them."""

    flows: OrderedDict[tuple[int, int], deque[tuple[int, Callable[[], None]]]] = field(default_factory=OrderedDict)
    sending: bool = False
    receives_at: float = 0.0
    sent_bytes: int = 0


class Links:
    """Profiles between nodes, cuts, and the interfaces' queues. Randomness comes from `rng` alone.

    Nodes live at sites: within one, `inside` holds, between two, `between`.
    """

    def __init__(self, rng: random.Random, inside: LinkProfile = LAN, between: LinkProfile = WAN) -> None:
        self._rng = rng
        self._inside = inside
        self._between = between
        self._first = inside, between
        self._sites: list[int] = []
        self._ports: list[_Port] = []
        self._special: dict[tuple[int, int], LinkProfile] = {}
        self._slowdown: dict[int, float] = {}
        self._stream_ends: dict[tuple[int, int], float] = {}
        self.cuts: list[Cut] = []

    def add(self, site: int = 0) -> int:
        """Connect one more node; returns its number."""
        self._sites.append(site)
        self._ports.append(_Port())
        return len(self._sites) - 1

    def profile(self, source: int, target: int) -> LinkProfile:
        special = self._special.get((source, target))
        if special is not None:
            return special
        return self._inside if self._sites[source] == self._sites[target] else self._between

    def set_profile(self, source: int, target: int, profile: LinkProfile) -> None:
        """From now on, in this direction."""
        self._special[source, target] = profile

    def slow_down(self, number: int, factor: float) -> None:
        """The node's interface gets 1/`factor` of its bandwidth, in both directions; 1 ends it."""
        self._slowdown[number] = factor

    def worsen(self, *, loss: float | None) -> None:
        """Set the loss of all ordinary links; None: as it was at first."""
        inside, between = self._first
        self._inside = replace(inside, loss=inside.loss if loss is None else loss)
        self._between = replace(between, loss=between.loss if loss is None else loss)

    def is_cut(self, source: int, target: int) -> bool:
        return any(source in cut.sources and target in cut.targets for cut in self.cuts)

    def delays_s(self, source: int, target: int, frame_bytes: int, in_order_at: float | None = None) -> list[float]:
        """After how many seconds a control frame arrives: never (empty), once, or more often.

        `in_order_at`: the time now, for a frame on the connection that pulls travel on, where nothing is doubled and nothing
        overtakes, and what is lost comes later.
        """
        if self.cuts and self.is_cut(source, target):
            return []
        profile = self.profile(source, target)
        rng = self._rng
        self._ports[source].sent_bytes += frame_bytes + HEADER_BYTES
        if in_order_at is not None:
            return self._stream_delay_s(source, target, frame_bytes, in_order_at)
        if profile.loss and rng.random() < profile.loss:
            return []
        copies = 2 if profile.duplication and rng.random() < profile.duplication else 1
        delays = []
        for _ in range(copies):
            delay_s = self._delay_s(source, target, frame_bytes)
            if profile.reordering and rng.random() < profile.reordering:
                delay_s += 10 * profile.latency_s * rng.random()
            delays.append(delay_s)
        return delays

    def _stream_delay_s(self, source: int, target: int, frame_bytes: int, now: float) -> list[float]:
        loss, delay_s = self.profile(source, target).loss, self._delay_s(source, target, frame_bytes)
        for attempt in range(RETRANSMITS_MAX + 1 if loss else 0):
            if self._rng.random() >= loss:
                break
            if attempt == RETRANSMITS_MAX:
                return []
            delay_s += RETRANSMIT_S * 2**attempt
        arrives_at = max(now + delay_s, self._stream_ends.get((source, target), 0.0))
        self._stream_ends[source, target] = arrives_at
        return [arrives_at - now]

    def _delay_s(self, source: int, target: int, frame_bytes: int) -> float:
        profile = self.profile(source, target)
        delay_s = profile.latency_s + profile.jitter_s * self._rng.random()
        return delay_s + (frame_bytes + HEADER_BYTES) / self._rate(source, target, profile.bytes_per_s)

    def _rate(self, source: int, target: int, bytes_per_s: float) -> float:
        if not self._slowdown:
            return bytes_per_s
        return bytes_per_s / max(self._slowdown.get(source, 1.0), self._slowdown.get(target, 1.0))

    # ------------------------------------------------------------------------------------------------------------ bulk

    def enqueue(self, source: int, flow: tuple[int, int], chunk_bytes: int, arrive: Callable[[], None]) -> None:
        """One chunk of the flow (target, id) waits for the interface; `arrive` is what to do when it is there."""
        self._ports[source].flows.setdefault(flow, deque()).append((chunk_bytes, arrive))

    def begin(self, source: int) -> bool:
        """Whether the interface was idle and now sends: the caller calls `send_next`."""
        port = self._ports[source]
        if port.sending or not port.flows:
            return False
        port.sending = True
        return True

    def send_next(self, source: int, now: float) -> tuple[float, float | None, Callable[[], None]] | None:
        """The next chunk, flows taking turns: when its last byte leaves, when it arrives (None: cut off), and what arrives.
        None when nothing waits."""
        port = self._ports[source]
        if not port.flows:
            port.sending = False
            return None
        flow, chunks = port.flows.popitem(last=False)
        chunk_bytes, arrive = chunks.popleft()
        if chunks:
            port.flows[flow] = chunks
        target = flow[0]
        profile = self.profile(source, target)
        seconds = (chunk_bytes + HEADER_BYTES) / self._rate(source, target, profile.bulk_bytes_per_s)
        left_at = now + seconds
        port.sent_bytes += chunk_bytes + HEADER_BYTES
        if self.cuts and self.is_cut(source, target):
            return left_at, None, arrive
        receiver = self._ports[target]
        arrives_at = max(
            left_at + profile.latency_s + profile.jitter_s * self._rng.random(), receiver.receives_at + seconds
        )
        receiver.receives_at = arrives_at
        return left_at, arrives_at, arrive

    def drop_flows(self, source: int) -> None:
        """What waits at this interface is lost (its node crashed)."""
        self._ports[source].flows.clear()

    def sent_bytes(self, number: int) -> int:
        """Bytes that left this node, headers included."""
        return self._ports[number].sent_bytes
