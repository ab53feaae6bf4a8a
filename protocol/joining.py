"""Asking to be let in, until somebody answers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from kvcomm_p2p.protocol.anchors import Miss, MissReason
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.events import Effect, FinishJoin, JoinRequested, SendMessage
from kvcomm_p2p.protocol.messages import Hello, Refused

JOIN_RETRY_S_MAX = 5.0


@dataclass(slots=True)
class _Join:
    seeds: tuple[str, ...]
    deadline: float
    delay_s: float
    retry_at: float
    answered: bool = False


class Joining:
    """One join at a time. It is reported as finished once; the seeds are asked until one answers or refuses.

    `hello()` makes the message to send; `seeds` are those of the latest join, without our own address.
    """

    def __init__(self, config: NodeConfig, own_address: str, hello: Callable[[], Hello]) -> None:
        self._config = config
        self._own_address = own_address
        self._hello = hello
        self._join: _Join | None = None
        self.seeds: tuple[str, ...] = ()

    def next_deadline(self) -> float:
        if self._join is None:
            return math.inf
        return self._join.retry_at if self._join.answered else min(self._join.retry_at, self._join.deadline)

    def begin(self, event: JoinRequested, known: int, now: float) -> list[Effect]:
        """Ask all seeds. An earlier join that was not answered yet ends as missed; without seeds it is done at once,
        with the number of peers `known`."""
        effects = self.missed("replaced by another join")
        self._join = None
        self.seeds = tuple(seed for seed in dict.fromkeys(event.seeds) if seed != self._own_address)
        if not self.seeds:
            return [*effects, FinishJoin(known)]
        self._join = _Join(self.seeds, event.deadline, self._config.join_retry_s, now + self._config.join_retry_s)
        return effects + self._ask(self._join)

    def tick(self, now: float) -> list[Effect]:
        join = self._join
        if join is None:
            return []
        effects = self.missed("no seed answered") if join.deadline <= now else []
        if join.retry_at <= now:
            join.delay_s = min(2 * join.delay_s, JOIN_RETRY_S_MAX)
            join.retry_at = now + join.delay_s
            effects += self._ask(join)
        return effects

    def answered(self, known: int) -> list[Effect]:
        """Somebody let us in, who and others make `known` peers."""
        join, self._join = self._join, None
        return [FinishJoin(known)] if join is not None and not join.answered else []

    def refused(self, message: Refused) -> list[Effect]:
        """Somebody turned us down: stop asking."""
        join, self._join = self._join, None
        if join is None or join.answered:
            return []
        miss = Miss(MissReason.UNREACHABLE, message.detail or message.reason.name.lower())
        return [FinishJoin(miss, message.reason)]

    def missed(self, detail: str) -> list[Effect]:
        """Report the join as missed, if it has not been reported yet. Asking goes on."""
        if self._join is None or self._join.answered:
            return []
        self._join.answered = True
        return [FinishJoin(Miss(MissReason.UNREACHABLE, detail))]

    def _ask(self, join: _Join) -> list[Effect]:
        return [SendMessage(None, seed, self._hello()) for seed in join.seeds]
