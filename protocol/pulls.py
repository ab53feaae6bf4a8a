"""The puller's side: fetches are answered by pulls, and a block that two fetches want is pulled once.

A *flight* is one block on its way: the fetch that asked first leads it, later ones follow and get the leader's handle
(each with a reference of its own, see `events.RetainBlock`). `flight_table.schedule` finds
holders for flights and packs them into *pulls*: requests of a piece each, so that a holder that many want can share its time
between them, and send some to peers that just got the piece (`sources`). What a pull does not bring goes back to waiting,
with the bytes that came, and the next holder is asked for the rest. If the leader loses a flight for a reason of its own
(deadline, cancellation, nobody left whom it knows), the next follower leads. Time without progress counts for everybody
who waited (`flights.LostTime`), and a fetch that has lost what it may lose waits for nobody any more.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from kvcomm_p2p.protocol import racing
from kvcomm_p2p.protocol.anchors import Miss, MissReason
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.events import (
    BlockVerified,
    ChunkReceived,
    Effect,
    FetchRequested,
    ResetBlock,
    StoreChunk,
    VerifyBlock,
)
from kvcomm_p2p.protocol.flight_table import FlightTable
from kvcomm_p2p.protocol.flights import FAILED_AS, Fetch, Flight, PullState, PullViolation, in_pieces, key_of
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.membership import Membership
from kvcomm_p2p.protocol.messages import (
    EncodedBlock,
    PullFailed,
    PullFailedReason,
    SharedBlocks,
)
from kvcomm_p2p.protocol.onward import Onward
from kvcomm_p2p.protocol.patience import Patience
from kvcomm_p2p.protocol.peer_stats import PeerCounts
from kvcomm_p2p.protocol.penalties import PenaltyBox
from kvcomm_p2p.protocol.shared_blocks import Sharing
from kvcomm_p2p.protocol.sources import Sources
from kvcomm_p2p.protocol.violations import NotAsked


class Pulls:
    """All fetches and pulls in progress. Methods return effects; a ValueError is a violation by the sender. `woke`,
    `next_deadline` and `tick` are those of `Patience`.

    `counts` says how often what happened: "hedged" (a second holder was asked), "hedge_won" (and was first), "resumed"
    (blocks of which a part was here), "referred" (times that a busy holder named a live peer for a block), "refetched"
    (blocks whose parts did not fit together), "late" (times that this node did not run although somebody was waiting).
    """

    def __init__(
        self,
        config: NodeConfig,
        membership: Membership,
        penalties: PenaltyBox,
        sharing: Sharing,
        onward: Onward,
        rng: random.Random,
        ping: Callable[[NodeId], list[Effect]],
        counted: Callable[[NodeId], PeerCounts],
    ) -> None:
        """`ping` asks a peer whether it lives; `counted`: what was exchanged with it otherwise."""
        self._config = config
        self._sharing = sharing
        self._penalties = penalties
        self._rng = rng
        self._sources = Sources(config, membership, penalties)
        self._table = FlightTable(config, membership, self._sources, sharing, onward, counted)
        self._patience = Patience(config, self._table, self._sources, penalties, ping)
        self.woke = self._patience.woke
        self.next_deadline = self._patience.next_deadline
        self.tick = self._patience.tick
        self.received_bytes = 0
        self.unasked_chunks = 0
        self._is_over = False

    def __len__(self) -> int:
        return len(self._table.fetches)

    @property
    def misses(self) -> dict[MissReason, int]:
        """Blocks that were wanted and did not come, by reason."""
        return self._table.misses

    @property
    def counts(self) -> Counter[str]:
        return self._table.counts

    @property
    def pulling(self) -> int:
        """Requests without a whole answer, and fetches that wait until they can make one."""
        return len(self._table.pulls) + len({flight.leader.event.fetch_id for flight in self._table.waiting.values()})

    # ------------------------------------------------------------------------------------------------ what is asked for

    def fetch(self, event: FetchRequested, now: float, refusal: Miss | None = None) -> list[Effect]:
        """Start a fetch, unless there is a refusal. Raises KeyError if its id is in use (our bug). After `shutdown` it is a
        miss at once."""
        if event.fetch_id in self._table.fetches:
            raise KeyError(f"fetch id {event.fetch_id} is in use")
        fetch = Fetch.of(event, self._config, now)
        self._table.fetches[event.fetch_id] = fetch
        if not event.wants:
            return self._table.finish(fetch)
        refusal = Miss(MissReason.SHUTDOWN) if self._is_over else refusal
        if refusal is not None:
            return self._table.refuse(fetch, refusal)
        for position in in_pieces(event, self._config.pull_piece_bytes, self._rng):
            want = event.wants[position]
            flight = self._table.flights.get(key_of(want))
            if flight is not None:
                flight.owners.append((fetch, position))
            else:
                flight = Flight(key_of(want), want, [(fetch, position)], want.handle)
                self._table.flights[flight.key] = self._table.waiting[flight.key] = flight
        return self._table.schedule(now)

    def cancel(self, fetch_id: int, now: float) -> list[Effect]:
        """Ignored if the fetch is finished already."""
        fetch = self._table.fetches.get(fetch_id)
        ended = [] if fetch is None else self._table.abandon(fetch, Miss(MissReason.CANCELLED), now)
        return ended + self._table.schedule(now)

    def shutdown(self, now: float) -> list[Effect]:
        self._is_over = True
        effects: list[Effect] = []
        for fetch in tuple(self._table.fetches.values()):
            effects += self._table.abandon(fetch, Miss(MissReason.SHUTDOWN), now)
        return effects

    # ------------------------------------------------------------------------------------------------ what holders send

    def chunk(self, event: ChunkReceived, now: float) -> list[Effect]:
        """Bytes arrived. Those nobody asked for are dropped silently (they were on the way when a pull ended)."""
        pull = self._table.pulls.get(event.pull_id)
        if pull is None:
            self.unasked_chunks += 1
            return []
        if event.sender != pull.holder:
            raise NotAsked("a chunk of a pull from", pull.holder)
        flight = pull.expects(event.ordinal, event.offset, event.length)
        if flight is None:
            detail = f"chunk at {event.ordinal}:{event.offset}+{event.length} does not continue the pull"
            raise self._violated(pull, MissReason.LENGTH_MISMATCH, detail, now)
        effects = self._win(pull, now)
        pull.arrives(event.ordinal, event.length, now)
        self._table.came_at[pull.holder] = self._table.spoke_at[pull.holder] = now
        for other in self._table.pulls.values():
            if other.holder == pull.holder:
                racing.holder_lives(other, now)
        self.received_bytes += event.length
        want = flight.want
        effects.append(StoreChunk(flight.handle, event.offset, event.length, want.kv_bytes))
        if flight.received == want.kv_bytes:
            flight.arrived, flight.pull = True, None
            self._table.verifying[flight.handle] = flight
            effects.append(VerifyBlock(flight.handle, flight.stated if flight.encoded else want.digest))
        return effects + self._credit(pull, now)

    def encoded(self, sender: NodeId, message: EncodedBlock, now: float) -> list[Effect]:
        """What the block that comes next will be, in an encoded pull. No sign of life: bytes are."""
        pull = self._table.pulls.get(message.pull_id)
        if pull is None:
            return []
        if sender != pull.holder:
            raise NotAsked("an encoded block of a pull from", pull.holder)
        if not pull.is_told(message.ordinal, message.digest):
            detail = f"the digest of block {message.ordinal} does not continue the pull"
            raise self._violated(pull, MissReason.LENGTH_MISMATCH, detail, now)
        return []

    def shared(self, sender: NodeId, message: SharedBlocks, now: float) -> list[Effect]:
        """Blocks are offered in shared memory. Dropped silently if nobody asked for it, as chunks are."""
        pull = self._table.pulls.get(message.pull_id)
        if pull is None:
            return []
        if sender != pull.holder:
            raise NotAsked("shared blocks of a pull from", pull.holder)
        offered = self._sharing.offered(pull, message)
        if offered is None:
            detail = f"shared blocks from {message.blocks[0].ordinal} on do not continue the pull"
            raise self._violated(pull, MissReason.LENGTH_MISMATCH, detail, now)
        effects = self._win(pull, now)
        pull.progressed(now)
        pull.current, pull.begun = message.blocks[-1].ordinal, 0
        for flight, adopt in offered:
            flight.arrived = flight.sharing = True
            flight.givers = [pull.holder]
            self._table.verifying[flight.handle] = flight
            effects.append(adopt)
        return effects + self._credit(pull, now)

    def failed(self, sender: NodeId, message: PullFailed, now: float) -> list[Effect]:
        """The holder says that a block, or the whole pull, does not come."""
        pull = self._table.pulls.get(message.pull_id)
        if pull is None:
            return []
        if sender != pull.holder:
            raise NotAsked("the end of a pull from", pull.holder)
        self._table.spoke_at[sender] = now
        miss = Miss(FAILED_AS[message.reason])
        if message.ordinal is None:
            if not pull.waits:
                return []
            if message.reason is PullFailedReason.BUSY:
                self._sources.busy(pull.holder, message.retry_after_s, now)
                self._table.pace.busy(pull.holder)
                for fetch in pull.waiting():
                    fetch.answered_at = now
                for flight in pull.owed:
                    self._table.counts["referred"] += self._sources.refer(flight, message.referrals)
            busy = message.reason is PullFailedReason.BUSY
            return self._table.end(pull, None if busy else miss, tell_holder=False) + self._table.schedule(now)
        if message.ordinal >= len(pull.flights) or pull.flights[message.ordinal].arrived:
            detail = f"block {message.ordinal} failed after it arrived, or was never asked for"
            raise self._violated(pull, MissReason.LENGTH_MISMATCH, detail, now)
        if not pull.owes(message.ordinal):
            return []
        effects = [] if pull.hedge else self._win(pull, now)
        flight = pull.flights[message.ordinal]
        pull.gives_up(message.ordinal, now)
        flight.failed_at[pull.holder] = miss
        if flight.pull is pull:
            self._table.wait(flight)
        return effects + self._credit(pull, now) + self._table.schedule(now)

    def verified(self, event: BlockVerified, now: float) -> list[Effect]:
        """The driver compared a block with its digest. Ignored if nobody wants it any more."""
        flight = self._table.verifying.pop(event.handle, None)
        if flight is None:
            return []
        if flight.sharing:
            return self._taken(flight, event.ok, now)
        if event.ok:
            for holder in flight.givers:
                self._sources.served(holder)
            return self._table.deliver(flight, now)
        return self._mismatched(flight, now)

    def _taken(self, flight: Flight, ok: bool, now: float) -> list[Effect]:
        """A block in shared memory was taken, or could not be and is to be sent. Either way its holder may let go of it."""
        pull, holder = flight.pull, flight.givers[0]
        flight.sharing, flight.pull = False, None
        self._sharing.read(holder, ok, now)
        effects: list[Effect] = []
        if ok:
            self.received_bytes += flight.want.kv_bytes
            self._sources.served(holder)
            effects += self._table.deliver(flight, now)
        else:
            flight.begin_again()
            self._table.wait(flight)
        if pull is not None:
            pull.received += flight.want.kv_bytes
            pull.progressed(now)
            effects += self._credit(pull, now)
        return effects + self._table.schedule(now)

    def _mismatched(self, flight: Flight, now: float) -> list[Effect]:
        """What came is not what was announced. Bytes of several holders may just not fit together: that is tried once more
        with one. A single holder lied if the digest was its own word; another may have computed its own copy.
        """
        givers, leader = flight.givers, flight.leader
        flight.begin_again()
        self._table.wait(flight)
        if len(givers) > 1:
            flight.anew = True
            self._table.counts["refetched"] += 1
            return [ResetBlock(flight.handle), *self._table.schedule(now)]
        (holder,) = givers
        key = flight.want.key
        detail = f"block {key.index} of anchor {key.anchor_id[:4].hex()} is not what was announced"
        miss = Miss(MissReason.DIGEST_MISMATCH, detail)
        flight.failed_at[holder] = leader.refused[holder] = miss
        effects: list[Effect] = [ResetBlock(flight.handle)]
        for pull in [pull for pull in self._table.pulls.values() if pull.holder == holder]:
            if any(owed.leader is leader for owed in pull.owed):
                effects += self._table.end(pull, miss)
        if holder != leader.event.holders[0] and not flight.want.raw_bytes:
            return effects + self._table.schedule(now)
        self._penalties.punish(holder, now)
        raise PullViolation(holder, detail, effects + self._table.schedule(now))

    # ------------------------------------------------------------------------------------------------------------- time

    def peer_gone(self, peer: NodeId, now: float) -> list[Effect]:
        """The holder left, expired or cannot be reached."""
        self._table.came_at.pop(peer, None)
        self._table.spoke_at.pop(peer, None)
        effects: list[Effect] = []
        for pull in [pull for pull in self._table.pulls.values() if pull.holder == peer]:
            lost = (pull.progress_at, now) if pull.waits else None
            effects += self._table.end(pull, Miss(MissReason.UNREACHABLE), lost=lost, tell_holder=False)
        self._table.chunks.forget(peer)
        return effects + self._table.schedule(now)

    # ---------------------------------------------------------------------------------------------------------- endings

    def _win(self, pull: PullState, now: float) -> list[Effect]:
        """A pull shows life: if it races, it has won. A holder that lost after so long a silence, and said nothing else
        lately either, is not asked for a while."""
        loser = pull.rival
        if loser is None:
            return []
        if pull.hedge:
            self._table.counts["hedge_won"] += 1
            half_way = (pull.progress_at + now) / 2
            if not self._sources.lived_since(loser.holder, half_way):
                self._sources.fell_silent(loser.holder, now, punish=True)
                self._table.chunks.stalled(loser.holder)
        effects, left = racing.win(pull, now)
        del self._table.pulls[loser.pull_id]
        for flight in left:
            self._table.wait(flight)
        return effects

    def _credit(self, pull: PullState, now: float) -> list[Effect]:
        """Credit what came; a pull of which everything is here is over, and its place at the holder is free."""
        effects = pull.credit(self._config.credit_bytes, self._config.pull_piece_bytes)
        if pull.is_over:
            if not pull.failed:
                self._table.pace.brought(pull.holder)
                if not pull.shared:
                    self._table.chunks.brought(pull.holder, pull.received, now - pull.began_at)
            effects += self._table.end(pull, None, tell_holder=False)
        return effects if pull.waits else effects + self._table.schedule(now)

    def _violated(self, pull: PullState, reason: MissReason, detail: str, now: float) -> PullViolation:
        """The holder broke the rules: it is punished, and what it still owes is asked of others, or missed."""
        self._penalties.punish(pull.holder, now)
        effects = self._table.end(pull, Miss(reason, detail)) + self._table.schedule(now)
        return PullViolation(pull.holder, detail, effects)
