"""The nouns of pulling: fetches, flights and pulls in progress."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

from kvcomm_p2p.protocol.anchors import BlockKey, MissReason
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.events import (
    Effect,
    FetchRequested,
    FinishFetch,
    FoundBlock,
    MissedBlock,
    Plane,
    SendMessage,
    Want,
)
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.messages import Credit, Message, Pull, PullBlock, PullFailedReason

FlightKey = tuple[BlockKey, int, bytes]
"""Block, size and digest: two fetches that were told different digests do not share a flight."""


OWN_REASONS = (MissReason.CANCELLED, MissReason.DEADLINE)
"""Reasons that concern the leading fetch alone."""

SHARED_WINDOW_FACTOR = 4
"""How many times more bytes may be uncredited where the puller asks for shared memory."""

FAILED_AS = {
    PullFailedReason.NOT_FOUND: MissReason.NOT_FOUND,
    PullFailedReason.BUSY: MissReason.BUSY,
    PullFailedReason.EVICTED: MissReason.EVICTED,
}


@dataclass(slots=True, eq=False)
class Fetch:
    """A caller's request. `results` in the order wanted; `open` of them are missing still; `lost_s` so far."""

    event: FetchRequested
    started_at: float
    results: list[FoundBlock | MissedBlock | None]
    open: int
    lost_s: float = 0.0

    def answer(self) -> FinishFetch:
        found = tuple(result for result in self.results if isinstance(result, FoundBlock))
        missed = tuple(result for result in self.results if isinstance(result, MissedBlock))
        return FinishFetch(self.event.fetch_id, found, missed, self.lost_s)


@dataclass(slots=True, eq=False)
class Flight:
    """One block on its way. `position` in the leading fetch; `arrived`: whole, being verified; `settled`: decided.

    `sharing`: it arrived in shared memory and is being taken from there; `again`: that failed, it is to be sent.
    """

    key: FlightKey
    want: Want
    pull: PullState
    followers: list[tuple[Fetch, int]] = field(default_factory=list)
    position: int = 0
    received: int = 0
    arrived: bool = False
    settled: bool = False
    sharing: bool = False
    again: bool = False


class Phase(enum.Enum):
    """Where a pull stands with its holder."""

    QUEUED = 0
    """Waits until fewer pulls of its holder are active."""
    ACTIVE = 1
    BUSY = 2
    """The holder was busy; asks again at `retry_at`."""


@dataclass(slots=True, eq=False)
class PullState:
    """`progress_at`: when something useful last arrived, or waiting began. `current`: ordinal that arrives now.

    `waited`: it was queued for a while. `shared`: asks for blocks in shared memory.
    """

    pull_id: int
    fetch: Fetch
    holder: NodeId
    bulk: str
    progress_at: float
    phase: Phase = Phase.QUEUED
    flights: list[Flight] = field(default_factory=list)
    current: int = 0
    received: int = 0
    credited: int = 0
    waited: bool = False
    retry_at: float = math.inf
    shared: bool = False

    @property
    def waits(self) -> bool:
        """Whether the holder still owes something."""
        return any(not (flight.arrived or flight.settled) for flight in self.flights)

    def patience_s(self, config: NodeConfig) -> float:
        """How long nothing may arrive."""
        return min(config.pull_stall_timeout_s, self.fetch.event.stall_s)

    def ask(self, credit_bytes: int) -> SendMessage:
        """The request to the holder; the pull is active from now on."""
        self.phase = Phase.ACTIVE
        self.retry_at = math.inf
        blocks = tuple(PullBlock(*flight.want.key, flight.want.kv_bytes) for flight in self.flights)
        return self.to_holder(Pull(self.pull_id, blocks, self._window(credit_bytes), shared=self.shared))

    def credit(self, credit_bytes: int) -> list[Effect]:
        """Credit for a quarter of the window at a time, and for everything at the end, which ends the upload."""
        done = not self.waits and not any(flight.sharing for flight in self.flights)
        fresh = self.received - self.credited
        if fresh <= 0 or not (done or fresh >= self._window(credit_bytes) // 4):
            return []
        self.credited = self.received
        return [self.to_holder(Credit(self.pull_id, self.received))]

    def _window(self, credit_bytes: int) -> int:
        """What stands in shared memory is not on any way: a larger window costs nothing and saves waiting for credit."""
        return credit_bytes * (SHARED_WINDOW_FACTOR if self.shared else 1)

    def stalls_at(self, config: NodeConfig) -> float:
        """When it is given up unless something comes."""
        if self.phase is not Phase.ACTIVE or not self.waits:
            return math.inf
        return self.progress_at + self.patience_s(config)

    def retries(self, config: NodeConfig, retry_after_s: float, now: float) -> bool:
        """Whether there is time to ask a busy holder again. Asking does not count as progress."""
        retry_at = now + max(retry_after_s, 0.005)
        in_time = retry_at < min(self.progress_at + self.patience_s(config), self.fetch.event.deadline)
        if self.received or not in_time:
            return False
        self.phase = Phase.BUSY
        self.retry_at = retry_at
        return True

    def to_holder(self, message: Message) -> SendMessage:
        return SendMessage(self.holder, self.bulk, message, Plane.BULK_REQUEST)

    def expects(self, ordinal: int, offset: int, length: int) -> Flight | None:
        """The flight that these bytes continue, None if they are out of order or too many.

        Blocks come in order, each whole before the next. One that is skipped has failed at the holder, and the message
        that says so may come later.
        """
        if not self.current <= ordinal < len(self.flights) or length <= 0:
            return None
        current, flight = self.flights[self.current], self.flights[ordinal]
        if flight.settled or flight.arrived or offset != flight.received:
            return None
        if flight is not current and current.received and not (current.arrived or current.settled):
            return None
        return flight if offset + length <= flight.want.kv_bytes else None


def key_of(want: Want) -> FlightKey:
    return want.key, want.kv_bytes, want.digest


class PullViolation(ValueError):
    """`holder` broke the rules of a pull; `effects` end it."""

    def __init__(self, holder: NodeId, detail: str, effects: list[Effect]) -> None:
        super().__init__(detail)
        self.holder = holder
        self.effects = effects
