"""The puller's side: fetches are answered by pulls, and a block that two fetches want is pulled once.

A *flight* is one block on its way: the fetch that asked first leads it, later ones follow and get the leader's handle
(each with a reference of its own, see `events.RetainBlock`). If the leader loses it for a reason that does not concern
a follower (its own deadline or cancellation, or another holder's fault), the followers pull it themselves, and time
without progress that they already lost counts. A pull is one request to one holder for the blocks that its fetch leads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from kvcomm_p2p.protocol.anchors import BlockHandle, Miss, MissReason
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.events import (
    BlockVerified,
    ChunkReceived,
    DropBlock,
    Effect,
    FetchRequested,
    FoundBlock,
    MissedBlock,
    RetainBlock,
    StoreChunk,
    VerifyBlock,
)
from kvcomm_p2p.protocol.flights import (
    FAILED_AS,
    OWN_REASONS,
    Fetch,
    Flight,
    FlightKey,
    Phase,
    PullState,
    PullViolation,
    key_of,
)
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.membership import Membership
from kvcomm_p2p.protocol.messages import (
    PULL_BLOCKS_MAX,
    CancelPull,
    PullFailed,
    PullFailedReason,
    SharedBlocks,
)
from kvcomm_p2p.protocol.penalties import PenaltyBox
from kvcomm_p2p.protocol.shared_blocks import Sharing


class Pulls:
    """All fetches and pulls in progress. Methods return effects; a ValueError is a violation by the sender."""

    def __init__(self, config: NodeConfig, membership: Membership, penalties: PenaltyBox, sharing: Sharing) -> None:
        self._config = config
        self._sharing = sharing
        self._membership = membership
        self._penalties = penalties
        self._fetches: dict[int, Fetch] = {}
        self._pulls: dict[int, PullState] = {}
        self._flights: dict[FlightKey, Flight] = {}
        self._verifying: dict[BlockHandle, Flight] = {}
        self._next_pull_id = 1
        self.received_bytes = 0
        self.unasked_chunks = 0
        self.misses: dict[MissReason, int] = {}

    def __len__(self) -> int:
        return len(self._fetches)

    @property
    def pulling(self) -> int:
        return len(self._pulls)

    def fetch(self, event: FetchRequested, now: float) -> list[Effect]:
        """Start a fetch. Raises KeyError if its id is in use (our bug)."""
        if event.fetch_id in self._fetches:
            raise KeyError(f"fetch id {event.fetch_id} is in use")
        fetch = Fetch(event, now, [None] * len(event.wants), len(event.wants))
        self._fetches[event.fetch_id] = fetch
        if not event.wants:
            return self._finish(fetch)
        return self._launch(fetch, list(range(len(event.wants))), now, progress_at=now)

    def cancel(self, fetch_id: int, now: float) -> list[Effect]:
        """Ignored if the fetch is finished already."""
        fetch = self._fetches.get(fetch_id)
        return [] if fetch is None else self._abandon(fetch, Miss(MissReason.CANCELLED), now)

    def shutdown(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for fetch in tuple(self._fetches.values()):
            if fetch.event.fetch_id in self._fetches:
                effects += self._abandon(fetch, Miss(MissReason.SHUTDOWN), now)
        return effects

    def _launch(self, fetch: Fetch, positions: list[int], now: float, progress_at: float) -> list[Effect]:
        """Follow blocks that are in flight; pull the others, or miss them at once if the holder is not to be asked."""
        holder = fetch.event.holder
        refusal = self._refusal(holder, now)
        effects: list[Effect] = []
        lead: list[int] = []
        for position in positions:
            key = key_of(fetch.event.wants[position])
            flight = self._flights.get(key)
            if flight is not None:
                flight.followers.append((fetch, position))
            elif refusal is not None:
                effects += self._miss(fetch, position, refusal, 0.0)
            else:
                lead.append(position)
        for first in range(0, len(lead), PULL_BLOCKS_MAX):
            effects += self._open(fetch, lead[first : first + PULL_BLOCKS_MAX], now, progress_at)
        return effects

    def _refusal(self, holder: NodeId, now: float) -> Miss | None:
        peer = self._membership.get(holder)
        if peer is None or not self._membership.is_alive(holder):
            return Miss(MissReason.UNREACHABLE, "unknown" if peer is None else peer.state.value)
        left_s = self._penalties.left_s(holder, now)
        if left_s > 0:
            return Miss(MissReason.STALLED, f"failed to deliver before; not asked for another {left_s:.1f} s")
        return None

    def _open(self, fetch: Fetch, positions: list[int], now: float, progress_at: float) -> list[Effect]:
        peer = self._membership.get(fetch.event.holder)
        if peer is None:
            raise KeyError("a pull from an unknown holder")
        pull = PullState(self._next_pull_id, fetch, peer.node_id, peer.record.bulk, progress_at)
        pull.shared = self._sharing.asks(peer.node_id, now)
        self._next_pull_id += 1
        for position in positions:
            want = fetch.event.wants[position]
            key = key_of(want)
            if key in self._flights:  # named twice by one fetch
                self._flights[key].followers.append((fetch, position))
                continue
            flight = Flight(key, want, pull, position=position)
            pull.flights.append(flight)
            self._flights[key] = flight
        return self._enqueue(pull, now) if pull.flights else []

    def _enqueue(self, pull: PullState, now: float) -> list[Effect]:
        self._pulls[pull.pull_id] = pull
        effects = self._start_queued(pull.holder, now)
        pull.waited = pull.phase is Phase.QUEUED
        return effects

    def _start_queued(self, holder: NodeId, now: float) -> list[Effect]:
        effects: list[Effect] = []
        mine = [pull for pull in self._pulls.values() if pull.holder == holder]
        active = sum(pull.phase is not Phase.QUEUED and pull.waits for pull in mine)
        for pull in mine:
            if pull.phase is Phase.QUEUED and active < self._config.pulls_per_peer_max:
                active += 1
                if pull.waited:
                    pull.progress_at = now  # until now it waited for other pulls, which made progress
                effects.append(pull.ask(self._config.credit_bytes))
        return effects

    def chunk(self, event: ChunkReceived, now: float) -> list[Effect]:
        """Bytes arrived. Those nobody asked for are dropped silently (they were on the way when a pull ended)."""
        pull = self._pulls.get(event.pull_id)
        if pull is None or pull.phase is not Phase.ACTIVE:
            self.unasked_chunks += 1
            return []
        if event.sender != pull.holder:
            raise ValueError("chunk of somebody else's pull")
        flight = pull.expects(event.ordinal, event.offset, event.length)
        if flight is None:
            detail = f"chunk at {event.ordinal}:{event.offset}+{event.length} does not continue the pull"
            raise self._violated(pull, MissReason.LENGTH_MISMATCH, detail, now)
        pull.current = event.ordinal
        pull.progress_at = now
        pull.received += event.length
        self.received_bytes += event.length
        flight.received += event.length
        want = flight.want
        effects: list[Effect] = [StoreChunk(want.handle, event.offset, event.length, want.kv_bytes)]
        if flight.received == want.kv_bytes:
            flight.arrived = True
            self._verifying[want.handle] = flight
            effects.append(VerifyBlock(want.handle, want.digest))
        return effects + self._credit(pull, now)

    def shared(self, sender: NodeId, message: SharedBlocks, now: float) -> list[Effect]:
        """Blocks are offered in shared memory. Dropped silently if nobody asked for it, as chunks are."""
        pull = self._pulls.get(message.pull_id)
        if pull is None or pull.phase is not Phase.ACTIVE:
            return []
        if sender != pull.holder:
            raise ValueError("shared blocks of somebody else's pull")
        offered = self._sharing.offered(pull, message, now)
        if offered is None:
            detail = f"shared blocks from {message.blocks[0].ordinal} on do not continue the pull"
            raise self._violated(pull, MissReason.LENGTH_MISMATCH, detail, now)
        self._verifying.update((effect.handle, flight) for flight, effect in offered)
        return [effect for _, effect in offered]

    def _credit(self, pull: PullState, now: float) -> list[Effect]:
        effects = pull.credit(self._config.credit_bytes)
        return effects if pull.waits else effects + self._start_queued(pull.holder, now)

    def verified(self, event: BlockVerified, now: float) -> list[Effect]:
        """The driver compared a block with its digest. Ignored if the pull ended meanwhile."""
        flight = self._verifying.pop(event.handle, None)
        if flight is None:
            return []
        pull = flight.pull
        if flight.sharing:
            self._sharing.read(flight, event.ok, now)
            self.received_bytes += flight.want.kv_bytes if event.ok else 0
            effects = self._deliver(flight) if event.ok else []
            if pull.pull_id in self._pulls:
                effects += self._credit(pull, now)
            return effects + self._retire(pull, now)
        if event.ok:
            self._penalties.forgive(pull.holder)
            return self._deliver(flight) + self._retire(pull, now)
        key = flight.want.key
        detail = f"block {key.index} of anchor {key.anchor_id[:4].hex()} is not what was announced"
        raise self._violated(pull, MissReason.DIGEST_MISMATCH, detail, now)

    def failed(self, sender: NodeId, message: PullFailed, now: float) -> list[Effect]:
        """The holder says that a block, or the whole pull, does not come."""
        pull = self._pulls.get(message.pull_id)
        if pull is None or pull.phase is not Phase.ACTIVE:
            return []
        if sender != pull.holder:
            raise ValueError("failure of somebody else's pull")
        miss = Miss(FAILED_AS[message.reason])
        if message.ordinal is None:
            if not pull.waits:
                return []
            if message.reason is PullFailedReason.BUSY and pull.retries(self._config, message.retry_after_s, now):
                return []
            lost_s = now - pull.progress_at if message.reason is PullFailedReason.BUSY else 0.0
            return self._end([pull], miss, now, lost_s, tell_holder=False)
        if message.ordinal >= len(pull.flights) or pull.flights[message.ordinal].arrived:
            detail = f"block {message.ordinal} failed after it arrived, or was never asked for"
            raise self._violated(pull, MissReason.LENGTH_MISMATCH, detail, now)
        flight = pull.flights[message.ordinal]
        if flight.settled:
            return []
        pull.progress_at = now
        pull.received -= flight.received
        again: dict[int, list[int]] = {}
        effects = self._lose(flight, miss, now, 0.0, again)
        effects += self._relaunch(again, now, pull.progress_at)
        if pull.pull_id in self._pulls:
            effects += self._credit(pull, now)
        return effects + self._retire(pull, now)

    def next_deadline(self) -> float:
        deadline = min((fetch.event.deadline for fetch in self._fetches.values()), default=math.inf)
        for pull in self._pulls.values():
            deadline = min(deadline, pull.retry_at, pull.stalls_at(self._config))
        return deadline

    def tick(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for fetch in tuple(self._fetches.values()):
            if fetch.event.deadline <= now and fetch.event.fetch_id in self._fetches:
                effects += self._abandon(fetch, Miss(MissReason.DEADLINE), now)
        for pull in tuple(self._pulls.values()):
            if pull.pull_id not in self._pulls:
                continue
            if pull.phase is Phase.BUSY and pull.retry_at <= now:
                effects.append(pull.ask(self._config.credit_bytes))
            elif pull.stalls_at(self._config) <= now:
                lost_s = now - pull.progress_at
                miss = Miss(MissReason.STALLED, f"nothing came for {lost_s:.3f} s")
                self._penalties.punish(pull.holder, now)
                effects += self._end([pull, *self._queued(pull.holder)], miss, now, lost_s)
        return effects

    def _queued(self, holder: NodeId) -> list[PullState]:
        return [pull for pull in self._pulls.values() if pull.holder == holder and pull.phase is Phase.QUEUED]

    def peer_gone(self, peer: NodeId, now: float) -> list[Effect]:
        """The holder left, expired or cannot be reached."""
        pulls = [pull for pull in self._pulls.values() if pull.holder == peer]
        since = min((pull.progress_at for pull in pulls if pull.phase is not Phase.QUEUED and pull.waits), default=now)
        return self._end(pulls, Miss(MissReason.UNREACHABLE), now, now - since, tell_holder=False)

    def _deliver(self, flight: Flight) -> list[Effect]:
        """A block is here and right: the leader and every follower get one reference to its handle."""
        flight.settled = True
        del self._flights[flight.key]
        handle = flight.want.handle
        owners = [(flight.pull.fetch, flight.position), *flight.followers]
        effects: list[Effect] = [RetainBlock(handle) for _ in flight.followers]
        effects += [DropBlock(fetch.event.wants[position].handle) for fetch, position in flight.followers]
        for fetch, position in owners:
            fetch.results[position] = FoundBlock(fetch.event.wants[position].key, handle)
            fetch.open -= 1
            if not fetch.open:
                effects += self._finish(fetch)
        return effects

    def _lose(self, flight: Flight, miss: Miss, now: float, lost_s: float, again: dict[int, list[int]]) -> list[Effect]:
        """A block does not come. Followers whom the reason concerns lose it too, the others (fetch id to positions, added
        to `again`) are to pull it themselves."""
        flight.settled = True
        del self._flights[flight.key]
        self._verifying.pop(flight.want.handle, None)
        pull = flight.pull
        effects = self._miss(pull.fetch, flight.position, miss, lost_s)
        for fetch, position in flight.followers:
            concerned = miss.reason in (MissReason.STALLED, MissReason.SHUTDOWN) or fetch.event.holder == pull.holder
            if fetch is pull.fetch or (concerned and miss.reason not in OWN_REASONS):
                effects += self._miss(fetch, position, miss, min(lost_s, now - fetch.started_at))
            else:
                again.setdefault(fetch.event.fetch_id, []).append(position)
        return effects

    def _relaunch(self, again: dict[int, list[int]], now: float, progress_at: float) -> list[Effect]:
        """Former followers start now; the time without progress that they saw counts."""
        starts = (self._launch(self._fetches[fetch_id], places, now, progress_at) for fetch_id, places in again.items())
        return [effect for effects in starts for effect in effects]

    def _miss(self, fetch: Fetch, position: int, miss: Miss, lost_s: float) -> list[Effect]:
        want = fetch.event.wants[position]
        fetch.results[position] = MissedBlock(want.key, miss)
        fetch.open -= 1
        fetch.lost_s = max(fetch.lost_s, lost_s)
        self.misses[miss.reason] = self.misses.get(miss.reason, 0) + 1
        effects: list[Effect] = [DropBlock(want.handle)]
        return effects if fetch.open else effects + self._finish(fetch)

    def _end(
        self, pulls: Iterable[PullState], miss: Miss, now: float, lost_s: float, *, tell_holder: bool = True
    ) -> list[Effect]:
        """End pulls of one holder together; what has not been delivered is missed."""
        effects: list[Effect] = []
        ending = [pull for pull in pulls if self._pulls.pop(pull.pull_id, None) is not None]
        for pull in ending:
            if tell_holder and pull.phase is Phase.ACTIVE and (pull.waits or pull.credited != pull.received):
                effects.append(pull.to_holder(CancelPull(pull.pull_id)))
        for pull in ending:
            again: dict[int, list[int]] = {}
            for flight in pull.flights:
                if not flight.settled:
                    effects += self._lose(flight, miss, now, lost_s, again)
            effects += self._relaunch(again, now, now if all(f.arrived for f in pull.flights) else pull.progress_at)
        for holder in dict.fromkeys(pull.holder for pull in ending):
            effects += self._start_queued(holder, now)
        return effects

    def _violated(self, pull: PullState, reason: MissReason, detail: str, now: float) -> PullViolation:
        """The holder broke the rules: it is punished, and what it still owes is missed."""
        self._penalties.punish(pull.holder, now)
        effects = self._end([pull, *self._queued(pull.holder)], Miss(reason, detail), now, 0.0)
        return PullViolation(pull.holder, detail, effects)

    def _abandon(self, fetch: Fetch, miss: Miss, now: float) -> list[Effect]:
        """Finish a fetch now: what it follows it lets go, what it leads ends."""
        effects: list[Effect] = []
        for flight in tuple(self._flights.values()):
            if flight.pull.fetch is fetch:
                continue
            mine = [position for follower, position in flight.followers if follower is fetch]
            if mine:
                flight.followers = [item for item in flight.followers if item[0] is not fetch]
                lost_s = self._lost_s(flight.pull, miss, max(flight.pull.progress_at, fetch.started_at), now)
                for position in mine:
                    effects += self._miss(fetch, position, miss, lost_s)
        for pull in tuple(self._pulls.values()):
            if pull.fetch is fetch:
                effects += self._end([pull], miss, now, self._lost_s(pull, miss, pull.progress_at, now))
        return effects

    def _lost_s(self, pull: PullState, miss: Miss, since: float, now: float) -> float:
        """A caller that stops waiting lost nothing; one whose deadline passes lost the time that its holder let pass."""
        if miss.reason is not MissReason.DEADLINE or all(flight.arrived for flight in pull.flights):
            return 0.0
        if pull.phase is Phase.QUEUED:
            mine = [other.progress_at for other in self._pulls.values() if other.holder == pull.holder]
            since = max([since, *mine])
        return now - since

    def _retire(self, pull: PullState, now: float) -> list[Effect]:
        """Forget a pull of which everything is decided; what could not be taken from shared memory is pulled again."""
        if pull.pull_id not in self._pulls or not all(flight.settled or flight.again for flight in pull.flights):
            return []
        del self._pulls[pull.pull_id]
        leftover = pull.credited != pull.received and pull.phase is Phase.ACTIVE
        effects: list[Effect] = [pull.to_holder(CancelPull(pull.pull_id))] if leftover else []
        retry = self._sharing.sent_instead(pull, self._next_pull_id, now)
        if retry is not None:
            self._next_pull_id += 1
            effects += self._enqueue(retry, now)
        return effects + self._start_queued(pull.holder, now)

    def _finish(self, fetch: Fetch) -> list[Effect]:
        del self._fetches[fetch.event.fetch_id]
        return [fetch.answer()]
