"""Time passes over fetches and pulls: deadlines, silence, second holders. What `Pulls` does when nothing happens."""

from __future__ import annotations

import math
from collections.abc import Callable

from kvcomm_p2p.protocol import racing
from kvcomm_p2p.protocol.anchors import Miss, MissReason
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.events import Effect
from kvcomm_p2p.protocol.flight_table import FlightTable
from kvcomm_p2p.protocol.flights import Fetch, PullState
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.lateness import LATE_S, Lateness
from kvcomm_p2p.protocol.penalties import PenaltyBox
from kvcomm_p2p.protocol.sources import Sources

DRIP_STALLS = 5
"""Stall timeouts that a holder has before it can be found to be too slow; shorter deadlines are the caller's affair."""


class Patience:
    """Who waited for how long. Shares its tables with `Pulls`; methods return effects."""

    def __init__(
        self,
        config: NodeConfig,
        table: FlightTable,
        sources: Sources,
        penalties: PenaltyBox,
        ping: Callable[[NodeId], list[Effect]],
    ) -> None:
        """`ping`: asks a peer whether it lives."""
        self._config = config
        self._table = table
        self._sources = sources
        self._penalties = penalties
        self._ping = ping
        self._lateness = Lateness()
        self._deadline: float | None = None

    def woke(self, now: float) -> None:
        """Before anything else at `now`: what this node did not run, though it wanted to be woken, is nobody's silence."""
        late_s = self._lateness.woke(now, self.next_deadline)
        self._deadline = None
        if late_s > 0 and self._table.fetches:
            self._table.counts["late"] += 1
            self._table.stood_still(late_s, now)

    def next_deadline(self) -> float:
        """Computed once after each event."""
        if self._deadline is None:
            self._deadline = self._next_deadline()
        return self._deadline

    def _next_deadline(self) -> float:
        table, config = self._table, self._config
        deadline = min((fetch.event.deadline for fetch in table.fetches.values()), default=math.inf)
        if not table.pulls and not table.waiting:
            return deadline
        hedged = min((pull.hedges_at(config) for pull in table.pulls.values()), default=math.inf)
        if table.waiting:
            deadline = min(deadline, self._sources.retry_at())
        judged = min(self._judged_at(), hedged)
        return min(deadline, self._lateness.pulse_at, max(judged, self._lateness.judges_at))

    def _judged_at(self) -> float:
        """When somebody is to be given up next."""
        table, judged = self._table, math.inf
        for pull in table.pulls.values():
            for fetch in pull.waiting():
                judged = min(judged, fetch.impatient_at(self._config, pull.progress_at))
            judged = min(judged, pull.stalls_at(self._config))
        for flight in table.waiting.values():
            judged = min(judged, table.tired_at(flight))
        return judged

    def tick(self, now: float) -> list[Effect]:
        """Give up what has waited for too long, and ask whom there is to ask instead."""
        effects: list[Effect] = []
        for fetch in tuple(self._table.fetches.values()):
            if fetch.event.deadline <= now:
                self._dripped(fetch, now)
                effects += self._table.abandon(fetch, Miss(MissReason.DEADLINE), now)
        judges = now >= self._lateness.judges_at and not self._was_busy(now)
        if judges:
            for pull in self._table.pulls.values():
                if pull.stalls_at(self._config) <= now:
                    self._look_for_life(pull, now)
            for pull in tuple(self._table.pulls.values()):
                if pull.pull_id in self._table.pulls:
                    effects += self._judge(pull, now)
        effects += self._table.schedule(now)
        if judges:
            effects += self._table.tire(now)
        self._sources.forget_retries(now)
        return effects + self._table.schedule(now)

    def _judge(self, pull: PullState, now: float) -> list[Effect]:
        """A pull that may have been silent for too long, for its holder or for one of those who wait for it."""
        if pull.stalls_at(self._config) <= now:
            return self._stalled(pull, now)
        effects: list[Effect] = []
        for fetch in pull.waiting():
            if fetch.impatient_at(self._config, pull.progress_at) <= now:
                miss = Miss(MissReason.STALLED, "nothing came while the request had time to wait")
                effects += self._table.lose_patience(fetch, pull, miss, now)
        if pull.pull_id in self._table.pulls and pull.hedges_at(self._config) <= now:
            effects += self._hedge(pull, now)
        return effects

    def _was_busy(self, now: float) -> bool:
        """Somebody was to be given up a while ago, but this node had so much else to do that it has not read yet what came."""
        late_s = now - max(self._judged_at(), self._lateness.judges_at)
        if late_s <= LATE_S or not self._lateness.grace(now):
            return False
        self._table.counts["late"] += 1
        self._table.stood_still(late_s, now)
        return True

    def _look_for_life(self, pull: PullState, now: float) -> None:
        """If its holder said anything since, it is slow and not frozen, and its silence counts from there. Only of one that
        has answered since the request began, so that it can (its bulk connection may be dead and the other not), or if this
        node is behind itself; and for no longer than a crowd is worth waiting in."""
        heard_at = self._sources.heard_at(pull.holder)
        spoke_at = math.inf if self._lateness.in_trouble(now) else self._table.spoke_at.get(pull.holder, -math.inf)
        patient = [fetch for fetch in pull.waiting() if spoke_at >= fetch.started_at and fetch.is_patient(now)]
        if heard_at > pull.progress_at and patient:
            pull.progress_at = heard_at
            for fetch in patient:
                fetch.answered_at = max(fetch.answered_at, heard_at)

    def _dripped(self, fetch: Fetch, now: float) -> None:
        """A fetch ends by its deadline with little: who had half of that time, and as long as DRIP_STALLS stalls, sends
        just enough not to stall."""
        if not fetch.got_little or now - fetch.event.deadline > LATE_S:
            return
        least_s = max((now - fetch.started_at) / 2, DRIP_STALLS * self._config.pull_stall_timeout_s)
        for pull in self._table.pulls.values():
            if now - pull.began_at >= least_s and fetch in pull.waiting():
                self._penalties.punish(pull.holder, now)

    def _stalled(self, pull: PullState, now: float) -> list[Effect]:
        """Nothing came for as long as may be waited. What it owed is asked of others, or of the same once it shows life, as
        far as those who want it have patience left."""
        since = pull.progress_at
        self._table.chunks.stalled(pull.holder)
        # Otherwise it was not the holder who was impatient.
        self._sources.fell_silent(pull.holder, now, punish=now - since >= self._config.pull_stall_timeout_s / 2)
        lost = (since, now)
        effects = [] if pull.rival is None else self._table.end(pull.rival, None)
        return effects + self._table.end(pull, None, lost=lost)

    def _hedge(self, pull: PullState, now: float) -> list[Effect]:
        """Half of what may be waited is over: ask whether the holder lives, and somebody else too, if there is anybody."""
        pull.hedged = True
        owed = pull.owed
        effects = self._ping(pull.holder)
        for holder in self._sources.others(owed[0], pull.holder, now):
            if self._table.active(holder) < self._config.pulls_per_peer_max:
                asked = [flight for flight in owed if holder in self._sources.others(flight, pull.holder, now)]
                later = self._table.open(holder, asked, now)
                racing.begin(pull, later)
                self._table.counts["hedged"] += 1
                return [*effects, later.ask(self._config.credit_bytes)]
        return effects
