"""The nouns of pulling: fetches, the blocks they are waiting for, and pulls in progress."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from kvcomm_p2p.protocol.anchors import AnchorMeta, BlockHandle, BlockKey, Miss, MissReason
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
from kvcomm_p2p.protocol.ids import AnchorId, NodeId
from kvcomm_p2p.protocol.messages import (
    CHUNK_BYTES_MAX,
    Credit,
    Encoding,
    Message,
    Pull,
    PullBlock,
    PullFailedReason,
)

FlightKey = tuple[BlockKey, int, bytes]
"""Block, size and digest: two fetches that were told different digests do not share a flight."""

SHARED_WINDOW_FACTOR = 4
"""How many times more bytes may be uncredited where the puller asks for shared memory."""

ROUNDING_S = 1e-9

FAILED_AS = {reason: MissReason[reason.name] for reason in PullFailedReason}


class LostTime:
    """Seconds that a fetch lost to holders: the length of a union of intervals, so that what two of them let pass at the
    same time is lost once."""

    def __init__(self) -> None:
        self._intervals: list[tuple[float, float]] = []

    def add(self, since: float, now: float) -> None:
        """[since, now) is lost; `now` never goes backwards from call to call."""
        while self._intervals and self._intervals[-1][1] >= since:
            since = min(since, self._intervals.pop()[0])
        if now > since:
            self._intervals.append((since, now))

    def before(self, moment: float) -> float:
        """Seconds lost before `moment`."""
        return sum(min(end, moment) - start for start, end in self._intervals if start < moment)

    @property
    def total_s(self) -> float:
        return self.before(math.inf)


@dataclass(slots=True, eq=False)
class Fetch:
    """A caller's request. `results` in the order wanted, `open` of them are missing still. `progress_at`: when anything
    of it last arrived; `answered_at`: when anybody last said BUSY, or lived though it was slow; `crowd_s`: how long such are
    worth waiting for; `forgiven_s`: lost time that no longer counts against its patience. `refused`: holders that it does
    not ask any more. `anchors`: what it said of what it wants.
    """

    event: FetchRequested
    started_at: float
    results: list[FoundBlock | MissedBlock | None]
    open: int
    progress_at: float
    crowd_s: float
    answered_at: float = -math.inf
    forgiven_s: float = 0.0
    lost: LostTime = field(default_factory=LostTime)
    refused: dict[NodeId, Miss] = field(default_factory=dict)
    anchors: dict[AnchorId, AnchorMeta] = field(default_factory=dict)

    @property
    def got_little(self) -> bool:
        """Whether less than half of its blocks are here and right."""
        return 2 * self.open > len(self.results)

    @classmethod
    def of(cls, event: FetchRequested, config: NodeConfig, now: float) -> Fetch:
        anchors = {anchor.anchor_id: anchor for anchor in event.anchors}
        crowd_s = min(config.pull_busy_wait_s, event.busy_s)
        return cls(event, now, [None] * len(event.wants), len(event.wants), now, crowd_s, anchors=anchors)

    @property
    def lived_at(self) -> float:
        """When there was a last sign that it will get something. Who is told BUSY is in a crowd, where one waits for its turn
        and not for somebody frozen; but no longer than a crowd is worth waiting in."""
        return max(self.progress_at, min(self.answered_at, self.progress_at + self.crowd_s))

    def is_patient(self, now: float) -> bool:
        """Whether it would still wait in a crowd."""
        return now < self.progress_at + self.crowd_s

    def patience_s(self, config: NodeConfig, since: float) -> float:
        """How long nothing may arrive from `since` on: what it has lost before is not there to be lost again."""
        lost_s = max(0.0, self.lost.before(since) - self.forgiven_s)
        return max(0.0, min(config.pull_stall_timeout_s, self.event.stall_s) - lost_s)

    def progressed(self, now: float) -> None:
        """Something of it came. In a crowd that makes good for silence before: who was waited for was slow, not frozen."""
        self.progress_at = now
        if self.answered_at > -math.inf:
            self.forgiven_s = self.lost.total_s

    def impatient_at(self, config: NodeConfig, since: float) -> float:
        """When it gives up on a holder that has been silent since then, unless anything else of it comes."""
        since = max(since, self.lived_at)
        return since + self.patience_s(config, since)

    def lose(self, since: float, now: float) -> None:
        """It waited in vain for somebody silent since then; not while something else of it came, or its turn was waited for."""
        self.lost.add(max(since, self.lived_at), now)

    def lose_turn(self, since: float, now: float) -> None:
        """It waited in vain for its turn since then."""
        self.lost.add(max(since, self.progress_at), now)

    def answer(self) -> FinishFetch:
        found = tuple(result for result in self.results if isinstance(result, FoundBlock))
        missed = tuple(result for result in self.results if isinstance(result, MissedBlock))
        return FinishFetch(self.event.fetch_id, found, missed, self.lost.total_s)


@dataclass(slots=True, eq=False)
class Flight:
    """A block on its way.

    `owners`: fetches that want it, with the position there; the first leads. `handle` is filled and is the leader's, the
    other owners have one of their own until they get this one. `pull` brings it now; None: it waits for a holder, or is
    here. `received`: its first bytes that are here, from `givers`. `referred`: peers that busy holders named. `failed_at`:
    holders that did not deliver it. `arrived`: whole, being checked; `sharing`: where it stands, in memory shared with the
    holder. `anew`: bytes of several holders did not fit together, so it comes from one. `queued`: its holder could be
    asked, but for own pulls there; `silent`: all that could be asked were given up for silence, it waits for a sign of
    life. `queued_until`: when pulls that it waited behind, and that are over, had last moved. `hopeless`: not to be tried again.
    `stated`: the digest of an encoded block, as its sender says; empty before that.
    """

    key: FlightKey
    want: Want
    owners: list[tuple[Fetch, int]]
    handle: BlockHandle
    pull: PullState | None = None
    received: int = 0
    givers: list[NodeId] = field(default_factory=list)
    referred: dict[NodeId, None] = field(default_factory=dict)
    failed_at: dict[NodeId, Miss] = field(default_factory=dict)
    arrived: bool = False
    sharing: bool = False
    anew: bool = False
    queued: bool = False
    silent: bool = False
    queued_until: float = -math.inf
    hopeless: Miss | None = None
    stated: bytes = b""

    @property
    def leader(self) -> Fetch:
        return self.owners[0][0]

    @property
    def encoded(self) -> bool:
        """Whether it travels as int8."""
        return self.want.raw_bytes > 0

    def begin_again(self) -> None:
        """Nothing of it is here."""
        self.received, self.arrived, self.givers, self.stated = 0, False, [], b""

    def got(self, holder: NodeId, length: int, now: float) -> None:
        """More of it is here."""
        self.received += length
        if holder not in self.givers:
            self.givers.append(holder)
        for fetch, _ in self.owners:
            fetch.progressed(now)


@dataclass(slots=True, eq=False)
class PullState:
    """One request to one holder for some blocks, in this order.

    `flights` are all encoded, or none is.

    `progress_at`: when something useful last arrived, or waiting began. `current`: ordinal that arrives now, `begun`: bytes
    of it from this pull. `failed`: ordinals that the holder does not deliver. `received`, `credited`: bytes. `shared`: asks
    for blocks in shared memory. `rival`: the other pull of a race for the same blocks; `hedge`: this one began later.
    `hedged`: since the last progress a rival was looked for. `began_at`: when it was opened. `chunk_bytes`: the largest chunk
    that it asks for.
    """

    pull_id: int
    holder: NodeId
    bulk: str
    flights: list[Flight]
    progress_at: float
    shared: bool = False
    current: int = 0
    begun: int = 0
    failed: set[int] = field(default_factory=set)
    received: int = 0
    credited: int = 0
    rival: PullState | None = None
    hedge: bool = False
    hedged: bool = False
    began_at: float = 0.0
    chunk_bytes: int = CHUNK_BYTES_MAX

    def owes(self, ordinal: int) -> bool:
        """Whether the holder still has to send this block."""
        flight = self.flights[ordinal]
        mine = flight.pull is self or (self.rival is not None and flight.pull is self.rival)
        return mine and not flight.arrived and ordinal not in self.failed

    @property
    def owed(self) -> list[Flight]:
        return [flight for ordinal, flight in enumerate(self.flights) if self.owes(ordinal)]

    @property
    def waits(self) -> bool:
        """Whether the holder still owes something."""
        return any(self.owes(ordinal) for ordinal in range(len(self.flights)))

    @property
    def is_over(self) -> bool:
        """Everything is here, and nothing stands in the holder's memory any more."""
        return not self.waits and not any(flight.sharing and flight.pull is self for flight in self.flights)

    def waiting(self) -> list[Fetch]:
        """Who waits for something that the holder owes, each once."""
        fetches = {fetch.event.fetch_id: fetch for flight in self.owed for fetch, _ in flight.owners}
        return list(fetches.values())

    def stalls_at(self, config: NodeConfig) -> float:
        """When it is given up unless something comes: nobody has any patience left, or it was silent for too long even if
        they have, because they get other things elsewhere."""
        patient_until = [fetch.impatient_at(config, self.progress_at) for fetch in self.waiting()]
        return min(self.progress_at + config.pull_stall_timeout_s, max(patient_until)) if patient_until else math.inf

    def hedges_at(self, config: NodeConfig) -> float:
        """When another holder is to be asked too unless something comes."""
        if self.hedged or self.rival is not None or not self.waits:
            return math.inf
        return (self.progress_at + self.stalls_at(config)) / 2

    def ask(self, credit_bytes: int) -> SendMessage:
        """The request to the holder."""
        blocks = tuple(_asked(flight) for flight in self.flights)
        encoding = Encoding.INT8 if self.flights[0].encoded else Encoding.RAW
        window = self._window(credit_bytes)
        return self.to_holder(Pull(self.pull_id, blocks, window, encoding, self.shared, self.chunk_bytes))

    def progressed(self, now: float) -> None:
        self.progress_at = now
        self.hedged = False

    def arrives(self, ordinal: int, length: int, now: float) -> None:
        """The next `length` bytes of block `ordinal` came."""
        self.begun = length + (self.begun if ordinal == self.current else 0)
        self.current = ordinal
        self.received += length
        self.progressed(now)
        self.flights[ordinal].got(self.holder, length, now)

    def gives_up(self, ordinal: int, now: float) -> None:
        """The holder says that this block does not come; its bytes so far do not count. In a race that is no sign
        of life of the later pull."""
        self.failed.add(ordinal)
        if ordinal == self.current:
            self.received -= self.begun
            self.begun = 0
        if not self.hedge:
            self.progressed(now)

    def credit(self, credit_bytes: int, piece_bytes: int) -> list[Effect]:
        """Credit for a piece, or a quarter of the window if that is less, at a time: then the holder can name this node for
        it. And for everything at the end, which ends the upload."""
        fresh = self.received - self.credited
        if fresh <= 0:
            return []
        step = self._window(credit_bytes) // 4
        if fresh < (step if self.shared else min(step, piece_bytes)) and not self.is_over:
            return []
        self.credited = self.received
        return [self.to_holder(Credit(self.pull_id, self.received))]

    def _window(self, credit_bytes: int) -> int:
        """What stands in shared memory is not on any way: a larger window costs nothing and saves waiting for credit."""
        return credit_bytes * (SHARED_WINDOW_FACTOR if self.shared else 1)

    def to_holder(self, message: Message) -> SendMessage:
        return SendMessage(self.holder, self.bulk, message, Plane.BULK_REQUEST)

    def expects(self, ordinal: int, offset: int, length: int) -> Flight | None:
        """The flight that these bytes continue, None if they are out of order or too many.

        Blocks come in order, each whole before the next. One that is skipped has failed at the holder, and the message
        that says so may come later. Of an encoded block the digest has to be known.
        """
        flight = self._next(ordinal)
        if flight is None or length <= 0 or offset != flight.received or (flight.encoded and not flight.stated):
            return None
        return flight if offset + length <= flight.want.kv_bytes else None

    def is_told(self, ordinal: int, digest: bytes) -> bool:
        """The holder states the digest of the encoded block that it sends next. False: that is no such block, or on its way."""
        flight = self._next(ordinal)
        if flight is None or not flight.encoded or (self.begun and ordinal == self.current):
            return False
        flight.stated = digest
        return True

    def _next(self, ordinal: int) -> Flight | None:
        """The flight at this place, if it may be what comes next."""
        if not self.current <= ordinal < len(self.flights) or not self.owes(ordinal):
            return None
        return None if ordinal != self.current and self.begun and self.owes(self.current) else self.flights[ordinal]


def in_pieces(event: FetchRequested, piece_bytes: int, rng: random.Random) -> list[int]:
    """Positions in pieces as large as a request, the pieces in random order: of several that fetch the same at the
    same time, each soon has something that another lacks."""
    pieces: list[list[int]] = []
    room = 0
    for position, want in enumerate(event.wants):
        if not pieces or want.kv_bytes > room:
            pieces.append([])
            room = piece_bytes
        pieces[-1].append(position)
        room -= want.kv_bytes
    rng.shuffle(pieces)
    return [position for piece in pieces for position in piece]


def _asked(flight: Flight) -> PullBlock:
    want = flight.want
    if flight.encoded:
        return PullBlock(*want.key, want.raw_bytes, flight.received, want.kv_bytes)
    return PullBlock(*want.key, want.kv_bytes, flight.received)


def key_of(want: Want) -> FlightKey:
    return want.key, want.kv_bytes, want.digest


class PullViolation(ValueError):
    """`holder` broke the rules of a pull; `effects` end it."""

    def __init__(self, holder: NodeId, detail: str, effects: list[Effect]) -> None:
        super().__init__(detail)
        self.holder = holder
        self.effects = effects
