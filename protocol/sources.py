"""Whom to ask for a block: the holders that the fetch names, best first, and peers that a busy holder referred to."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvcomm_p2p.protocol.anchors import Miss, MissReason
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.flights import ROUNDING_S, Flight
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.membership import Membership
from kvcomm_p2p.protocol.messages import Capability
from kvcomm_p2p.protocol.penalties import PenaltyBox
from kvcomm_p2p.protocol.vain_waits import VAIN_WAITS, VainWaits

BUSY_RETRY_MIN_S = 0.005
"""Whatever a busy holder advises, it is not asked again sooner."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Who may be asked for a block now, best first (nobody yet: all are busy or, if `silent`, were given up for silence and
    showed no life since); `miss`: why there is nobody, now or later, and `by`: whose fault that is."""

    holders: tuple[NodeId, ...]
    miss: Miss | None = None
    by: NodeId | None = None
    silent: bool = False


class Sources:
    """Knows which holders said that they are busy, and which were given up for silence, for all fetches together."""

    def __init__(self, config: NodeConfig, membership: Membership, penalties: PenaltyBox) -> None:
        self._config = config
        self._membership = membership
        self._penalties = penalties
        self._busy_until: dict[NodeId, float] = {}
        self._silent_at: dict[NodeId, float] = {}
        self._vain = VainWaits(VAIN_WAITS * config.pull_busy_wait_s, lambda holder: membership.get(holder) is not None)

    def choose(self, flight: Flight, now: float) -> Choice:
        """Who is next for the leader of a flight: those a busy holder referred to, then the holders in their order.

        The fetch's own holders are taken one after the other (only the first one's digest is known to be that of its
        bytes): a later one has its turn when those before it are busy or out of the question.
        """
        fetch = flight.leader
        first = fetch.event.holders[0] if fetch.event.holders else None
        why, by = flight.hopeless or self._spent(flight, now), None
        if why is not None:
            return Choice((), miss=why, by=next(reversed(flight.failed_at), first))
        referred: list[NodeId] = []
        named: list[NodeId] = []
        busy = silent = False
        for holder in _named(flight):
            refusal = self._refusal(flight, holder, now)
            if refusal is not None:
                if why is None or holder == first:
                    why, by = refusal, holder
            elif self._is_silent(flight, holder):
                silent = True
            elif self._busy_until.get(holder, now) > now:
                busy = True
            else:
                (referred if holder in flight.referred else named).append(holder)
        if referred or named:
            return Choice((*referred, *named[:1]))
        if busy or silent:
            return Choice((), silent=not busy)
        return Choice((), miss=why or Miss(MissReason.NOT_FOUND), by=by)

    def busy(self, holder: NodeId, retry_after_s: float, now: float) -> None:
        """It serves as many as it can and wants to be asked later."""
        self._busy_until[holder] = now + max(retry_after_s, BUSY_RETRY_MIN_S)
        self._vain.told_busy(holder, now)

    def gave_up_on_busy(self, flight: Flight, since: float, now: float) -> None:
        """A flight has waited since then for holders that are busy, in vain: who never serves is not asked for a while."""
        for holder in _named(flight):
            if self._vain.gave_up(holder, since, now):
                self._penalties.punish(holder, now)

    def served(self, holder: NodeId) -> None:
        """A block of it is here, and right."""
        self._penalties.forgive(holder)
        self._vain.served(holder)

    def fell_silent(self, holder: NodeId, now: float, *, punish: bool) -> None:
        """It was given up for silence. Fetches that are under way ask it again when it shows life (it may only not have come
        to run for a moment), later ones when its penalty is over, if it is to have one."""
        self._silent_at[holder] = now
        if punish:
            self._penalties.punish(holder, now)

    def heard_at(self, holder: NodeId) -> float:
        """When it last said anything, on any connection."""
        peer = self._membership.get(holder)
        return -math.inf if peer is None else peer.heard_at

    def lived_since(self, holder: NodeId, moment: float) -> bool:
        """Whether it said anything after that moment."""
        return self.heard_at(holder) > moment

    def refer(self, flight: Flight, referrals: tuple[NodeId, ...]) -> int:
        """A busy holder named peers that have this block; those that are alive here may be asked. Returns how many."""
        alive = [peer for peer in referrals if self._membership.is_alive(peer) and not flight.encoded]
        for peer in alive:
            flight.referred[peer] = None
            flight.failed_at.pop(peer, None)
        return len(alive)

    def others(self, flight: Flight, but: NodeId, now: float) -> tuple[NodeId, ...]:
        """Who may be asked for a block now besides the holder `but`, best first. Nobody for one that may not be mixed."""
        if flight.anew and flight.received:
            return ()
        return tuple(
            holder
            for holder in _named(flight)
            if holder != but
            and self._busy_until.get(holder, now) <= now
            and not self._is_silent(flight, holder)
            and self._refusal(flight, holder, now) is None
        )

    def retry_at(self) -> float:
        """When the next busy holder may be asked again."""
        return min(self._busy_until.values(), default=math.inf)

    def forget_retries(self, now: float) -> None:
        """Holders that may be asked again are not busy any more; silence longer ago than any penalty is no matter."""
        self._busy_until = {holder: until for holder, until in self._busy_until.items() if until > now}
        kept_s = self._config.penalty_max_s
        self._silent_at = {holder: at for holder, at in self._silent_at.items() if at + kept_s > now}

    def _spent(self, flight: Flight, now: float) -> Miss | None:
        """A fetch that has lost all it may lose asks nobody: it would give up before an answer could come."""
        if flight.leader.patience_s(self._config, now) > ROUNDING_S:
            return None
        # What a peer that we were referred to said is not the reason: others would have been asked.
        for holder in flight.leader.event.holders:
            if holder in flight.failed_at:
                return flight.failed_at[holder]
        return Miss(MissReason.STALLED, "the request has lost what it may lose by waiting")

    def _fell_silent_for(self, flight: Flight, holder: NodeId) -> float | None:
        """When the holder was given up for silence, if the leader was under way by then."""
        at = self._silent_at.get(holder)
        return at if at is not None and flight.leader.started_at <= at else None

    def _is_silent(self, flight: Flight, holder: NodeId) -> bool:
        """Given up for silence, and not a word since."""
        at = self._fell_silent_for(flight, holder)
        return at is not None and not self.lived_since(holder, at)

    def _refusal(self, flight: Flight, holder: NodeId, now: float) -> Miss | None:
        """Why the leader does not ask this holder for this block, None if it may."""
        miss = flight.failed_at.get(holder) or flight.leader.refused.get(holder)
        if miss is not None:
            return miss
        if not self._membership.is_alive(holder):
            peer = self._membership.get(holder)
            return Miss(MissReason.UNREACHABLE, "unknown" if peer is None else peer.state.word)
        left_s = self._penalties.left_s(holder, now)
        if left_s > 0 and self._fell_silent_for(flight, holder) is None:
            return Miss(MissReason.STALLED, f"failed to deliver before; not asked for another {left_s:.1f} s")
        peer = self._membership.get(holder)
        if flight.encoded and peer is not None and not peer.record.capabilities & Capability.INT8:
            return Miss(MissReason.NOT_FOUND, "sends nothing as int8")
        return None


def _named(flight: Flight) -> tuple[NodeId, ...]:
    """Whom the leader may ask in principle. The digest of an encoded block is the word of its sender: that has to be the
    one whose word the fetch goes by anyway."""
    holders = flight.leader.event.holders
    return holders[:1] if flight.encoded else tuple(dict.fromkeys((*flight.referred, *holders)))
