"""What is on its way: fetches, their flights, and the pulls that bring them; who gets a block, and who does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kvcomm_p2p.protocol import racing
from kvcomm_p2p.protocol.anchors import BlockHandle, Miss, MissReason
from kvcomm_p2p.protocol.chunk_sizes import ChunkSizes
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.events import DropBlock, Effect, FoundBlock, MissedBlock, RetainBlock
from kvcomm_p2p.protocol.flights import Fetch, Flight, FlightKey, PullState
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.membership import Membership
from kvcomm_p2p.protocol.messages import BLOCK_BYTES_MAX, PULL_BLOCKS_MAX, CancelPull
from kvcomm_p2p.protocol.onward import Onward
from kvcomm_p2p.protocol.pace import Pace
from kvcomm_p2p.protocol.peer_stats import PeerCounts
from kvcomm_p2p.protocol.shared_blocks import Sharing
from kvcomm_p2p.protocol.sources import Sources

SHARED_PIECE_BYTES_MAX = PULL_BLOCKS_MAX * BLOCK_BYTES_MAX


class FlightTable:
    """Every flight is carried by a pull, or in `waiting`, or arrived (and then in `verifying`). Methods return effects.

    `came_at`: when bytes of a holder last came, `spoke_at`: when it last answered a pull at all.

    Reading the tables is everybody's; what moves a flight from one to another is here, except that `Pulls` marks what
    arrived."""

    def __init__(
        self,
        config: NodeConfig,
        membership: Membership,
        sources: Sources,
        sharing: Sharing,
        onward: Onward,
        counted: Callable[[NodeId], PeerCounts],
    ) -> None:
        self._config = config
        self._membership = membership
        self._sources = sources
        self._sharing = sharing
        self._onward = onward
        self._next_pull_id = 1
        self.pace = Pace(config.pull_piece_bytes)
        self.chunks = ChunkSizes(config.pull_stall_timeout_s, counted)
        self.fetches: dict[int, Fetch] = {}
        self.pulls: dict[int, PullState] = {}
        self.flights: dict[FlightKey, Flight] = {}
        self.waiting: dict[FlightKey, Flight] = {}
        self.verifying: dict[BlockHandle, Flight] = {}
        self.came_at: dict[NodeId, float] = {}
        self.spoke_at: dict[NodeId, float] = {}
        self.misses: dict[MissReason, int] = {}
        self.counts: Counter[str] = Counter()

    def active(self, holder: NodeId) -> int:
        """Own pulls that wait for something of this holder."""
        return sum(pull.holder == holder and pull.waits for pull in self.pulls.values())

    def schedule(self, now: float) -> list[Effect]:
        """Ask for what waits, as far as holders and the limit per holder allow; miss what nobody can be asked for."""
        if not self.waiting:
            self.pace.forget_but(pull.holder for pull in self.pulls.values())
            return []
        effects: list[Effect] = []
        open_pulls: dict[tuple[NodeId, int, bool], tuple[PullState, int]] = {}
        free: dict[NodeId, int] = {}
        fresh: list[PullState] = []
        for flight in tuple(self.waiting.values()):
            choice = self._sources.choose(flight, now)
            while choice.miss is not None and flight.key in self.waiting:
                effects += self._lose_leader(flight, choice.miss, choice.by)
                if flight.owners:
                    choice = self._sources.choose(flight, now)
            if flight.silent and choice.holders:  # it waited for life in vain so far
                flight.leader.lose(self.waits_since(flight), now)
            flight.queued, flight.silent = bool(choice.holders), choice.silent
            for holder in choice.holders:
                slot = holder, flight.leader.event.fetch_id, flight.encoded
                pull, room = open_pulls.get(slot, (None, 0))
                if pull is None or room < flight.want.kv_bytes or len(pull.flights) == PULL_BLOCKS_MAX:
                    if holder not in free:
                        free[holder] = self._config.pulls_per_peer_max - self.active(holder)
                    if free[holder] <= 0:
                        continue
                    free[holder] -= 1
                    pull = self.open(holder, [], now, encoded=flight.encoded)
                    # What stands in shared memory costs its holder nothing: no need to take turns.
                    piece_bytes = min(self.pace.piece_bytes(holder), self.chunks.piece_bytes_max(holder))
                    room = piece_bytes if not pull.shared else SHARED_PIECE_BYTES_MAX
                    fresh.append(pull)
                open_pulls[slot] = pull, room - flight.want.kv_bytes
                pull.flights.append(flight)
                flight.pull = pull
                del self.waiting[flight.key]
                break
        for pull in fresh:
            self.counts["resumed"] += sum(flight.received > 0 for flight in pull.flights)
            effects.append(pull.ask(self._config.credit_bytes))
        return effects

    def open(self, holder: NodeId, flights: list[Flight], now: float, *, encoded: bool = False) -> PullState:
        """A new pull, not asked for yet. Raises KeyError for an unknown holder."""
        peer = self._membership.get(holder)
        if peer is None:
            raise KeyError("a pull from an unknown holder")
        shared = not encoded and self._sharing.asks(holder, now)
        pull = PullState(self._next_pull_id, holder, peer.record.bulk, flights, now, shared, began_at=now)
        pull.chunk_bytes = self.chunks.of(holder)
        self._next_pull_id += 1
        self.pulls[pull.pull_id] = pull
        return pull

    def wait(self, flight: Flight) -> None:
        """Nobody brings this flight now."""
        flight.pull = None
        if not flight.owners:
            return
        if flight.anew and flight.received:
            # Begun again with one holder, which failed: what is here may not be mixed with another's.
            flight.hopeless = next(reversed(flight.failed_at.values()), Miss(MissReason.DIGEST_MISMATCH))
        self.waiting[flight.key] = flight

    def end(
        self,
        pull: PullState,
        miss: Miss | None,
        *,
        lost: tuple[float, float] | None = None,
        tell_holder: bool = True,
    ) -> list[Effect]:
        """A pull is over. What it still owed goes on with its rival, or waits; `miss`: its holder is not asked for that
        again. `lost`: the time that everybody who waited for it lost."""
        del self.pulls[pull.pull_id]
        for flight in self.waiting.values():
            if flight.queued and pull.holder in self._sought(flight):
                flight.queued_until = max(flight.queued_until, pull.progress_at)
        effects: list[Effect] = [pull.to_holder(CancelPull(pull.pull_id))] if tell_holder else []
        owed = pull.owed
        if miss is not None:
            for flight in owed:
                flight.failed_at[pull.holder] = miss
        if pull.rival is not None:
            racing.leave(pull)
        for flight in pull.flights:
            if flight.pull is not pull:
                continue
            if flight.arrived:  # it stands in shared memory and is being taken
                flight.pull = None
                continue
            self.wait(flight)
            if lost is not None:
                for fetch, _ in flight.owners:
                    fetch.lose(*lost)
        return effects

    def deliver(self, flight: Flight, now: float) -> list[Effect]:
        """A block is here and right: the leader and every follower get one reference to its handle."""
        del self.flights[flight.key]
        want = flight.want
        effects: list[Effect] = [RetainBlock(flight.handle) for _ in flight.owners[1:]]
        effects += [DropBlock(fetch.event.wants[position].handle) for fetch, position in flight.owners[1:]]
        for fetch, _ in flight.owners:
            meta = fetch.anchors.get(want.key.anchor_id)
            if meta is not None and not flight.encoded:
                effects += self._onward.keep(meta, want.key.index, flight.handle, want.kv_bytes, now)
        for fetch, position in flight.owners:
            fetch.results[position] = FoundBlock(fetch.event.wants[position].key, flight.handle)
            fetch.open -= 1
            if not fetch.open:
                effects += self.finish(fetch)
        return effects

    def _lose_leader(self, flight: Flight, miss: Miss, by: NodeId | None) -> list[Effect]:
        """The leader does not get this block; the next owner leads, without what concerned only the one before it."""
        fetch, position = flight.owners[0]
        effects = self._disown(flight, fetch, position, miss, by)
        if flight.owners and flight.hopeless is not None and not flight.anew:
            flight.hopeless = None
        return effects

    def _disown(
        self, flight: Flight, fetch: Fetch, position: int, miss: Miss, by: NodeId | None = None
    ) -> list[Effect]:
        """One owner less, by the fault of `by` (None: of who carries it, or of the holder that the fetch named first). The
        handle that is being filled stays with the flight while anybody wants it."""
        if by is None and flight.pull is not None:
            by = flight.pull.holder
        was_first = flight.owners[0] == (fetch, position)
        flight.owners.remove((fetch, position))
        want = fetch.event.wants[position]
        spare = want.handle
        if was_first and flight.owners:
            next_fetch, next_position = flight.owners[0]
            spare = next_fetch.event.wants[next_position].handle
        elif not flight.owners:
            spare = flight.handle
            self.waiting.pop(flight.key, None)
            self.verifying.pop(flight.handle, None)
            del self.flights[flight.key]
        fetch.results[position] = MissedBlock(want.key, miss, by)
        fetch.open -= 1
        self.misses[miss.reason] = self.misses.get(miss.reason, 0) + 1
        effects: list[Effect] = [DropBlock(spare)]
        return effects if fetch.open else effects + self.finish(fetch)

    def abandon(self, fetch: Fetch, miss: Miss, now: float) -> list[Effect]:
        """Finish a fetch now. A pull that brings something nobody wants any more ends; others pull the rest of it anew."""
        mine = [
            (flight, position)
            for flight in self.flights.values()
            for owner, position in flight.owners
            if owner is fetch
        ]
        coming = [flight for flight, _ in mine if not flight.arrived]
        if miss.reason is MissReason.DEADLINE and coming:
            since = [flight.pull.progress_at for flight in coming if flight.pull is not None]
            since += [self.waits_since(flight) for flight in coming if flight.pull is None]
            fetch.lose(max(fetch.progress_at, *since), now)
        effects: list[Effect] = []
        for flight, position in mine:
            effects += self._disown(flight, fetch, position, miss)
        return effects + self._end_unwanted()

    def lose_patience(self, fetch: Fetch, pull: PullState, miss: Miss, now: float) -> list[Effect]:
        """A fetch does not wait any more for what a pull owes; others may."""
        lost = pull.progress_at, now
        fetch.lose(*lost)
        mine = [(flight, place) for flight in pull.owed for owner, place in flight.owners if owner is fetch]
        effects = [effect for flight, place in mine for effect in self._disown(flight, fetch, place, miss)]
        return effects + self._end_unwanted(lost)

    def _end_unwanted(self, lost: tuple[float, float] | None = None) -> list[Effect]:
        """End pulls that bring something that nobody wants any more. `lost`: see `end`."""
        effects: list[Effect] = []
        for pull in tuple(self.pulls.values()):
            if pull.pull_id in self.pulls and any(flight.pull is pull and not flight.owners for flight in pull.flights):
                if pull.rival is not None:
                    effects += self.end(pull.rival, None)
                effects += self.end(pull, None, lost=lost)
        return effects

    def refuse(self, fetch: Fetch, miss: Miss) -> list[Effect]:
        """Finish a fetch that has no flights."""
        fetch.results = [MissedBlock(want.key, miss) for want in fetch.event.wants]
        return [*(DropBlock(want.handle) for want in fetch.event.wants), *self.finish(fetch)]

    def finish(self, fetch: Fetch) -> list[Effect]:
        """The answer to a fetch of which everything is decided."""
        del self.fetches[fetch.event.fetch_id]
        return [fetch.answer()]

    def waits_since(self, flight: Flight) -> float:
        """When anything last came from where a waiting flight may come from, or to its fetch."""
        holders = self._sought(flight)
        came = [self.came_at.get(holder, 0.0) for holder in holders]
        if flight.queued:  # behind pulls that have their own patience from when they were asked for
            came += [pull.progress_at for pull in self.pulls.values() if pull.holder in holders]
        return max(flight.leader.progress_at, flight.queued_until, *came)

    @staticmethod
    def _sought(flight: Flight) -> tuple[NodeId, ...]:
        """Whom a waiting flight may come from."""
        return (*flight.referred, *flight.leader.event.holders)

    def tired_at(self, flight: Flight) -> float:
        """When a flight that waits, for busy or silent holders or behind others, is given up."""
        config = self._config
        if flight.queued or flight.silent:
            since = self.waits_since(flight)
            return min(fetch.impatient_at(config, since) for fetch, _ in flight.owners)
        patience_s = max(flight.leader.crowd_s, config.pull_stall_timeout_s)
        return self.waits_since(flight) + patience_s

    def tire(self, now: float) -> list[Effect]:
        """Nobody waits for too long: behind others, or for a sign of life, each has its own patience; for busy holders the
        leader's counts."""
        effects: list[Effect] = []
        for flight in tuple(self.waiting.values()):
            if self.tired_at(flight) > now:
                continue
            if flight.queued or flight.silent:
                effects += self._leave_queue(flight, now)
            elif flight.hopeless is None:
                flight.hopeless = Miss(MissReason.BUSY, "every holder serves as many as it can")
                self._sources.gave_up_on_busy(flight, self.waits_since(flight), now)
                flight.leader.lose_turn(self.waits_since(flight), now)
        return effects

    def stood_still(self, seconds: float, now: float) -> None:
        """So much of all silence was ours: every clock that others are judged by stood still."""
        for pull in self.pulls.values():
            pull.progress_at = min(now, pull.progress_at + seconds)
        for fetch in self.fetches.values():
            fetch.progress_at = min(now, fetch.progress_at + seconds)
            fetch.answered_at = min(now, fetch.answered_at + seconds)
        for holder, at in self.came_at.items():
            self.came_at[holder] = min(now, at + seconds)
        for flight in self.waiting.values():
            flight.queued_until = min(now, flight.queued_until + seconds)

    def _leave_queue(self, flight: Flight, now: float) -> list[Effect]:
        since = self.waits_since(flight)
        silence = "who has it sends nothing" if flight.silent else "its holder sends nothing for those before it"
        miss = Miss(MissReason.STALLED, silence)
        effects: list[Effect] = []
        for fetch, place in tuple(flight.owners):
            if fetch.impatient_at(self._config, since) <= now:
                fetch.lose(since, now)
                effects += self._disown(flight, fetch, place, miss)
        return effects
