"""Hedging: when a holder is silent for half of what may be waited, another is asked for the same; the first byte wins.

Both pulls of a race list the same flights, which the earlier one carries until the race is decided. Any sign of life of the
earlier one ends it in its favour; of the later one only bytes do. Both share one clock: a race wins no extra time.
"""

from __future__ import annotations

from kvcomm_p2p.protocol.events import Effect
from kvcomm_p2p.protocol.flights import Flight, PullState
from kvcomm_p2p.protocol.messages import CancelPull


def begin(pull: PullState, later: PullState) -> None:
    """`later` is asked for what `pull` owes."""
    pull.rival, later.rival = later, pull
    later.hedge = True
    later.progress_at = pull.progress_at


def win(pull: PullState, now: float) -> tuple[list[Effect], list[Flight]]:
    """`pull` is first; its rival is told and over. Returns what to send, and flights that nobody carries any more."""
    loser = pull.rival
    assert loser is not None
    owed, mine = loser.owed, pull.owed
    pull.rival = loser.rival = None
    left: list[Flight] = []
    if pull.hedge:
        for flight in mine:
            for fetch, _ in flight.owners:
                fetch.lose(pull.progress_at, now)
            flight.pull = pull
        left = [flight for flight in owed if flight not in mine]
        for flight in left:
            flight.pull = None
    pull.hedge = False
    return [loser.to_holder(CancelPull(loser.pull_id))], left


def holder_lives(pull: PullState, now: float) -> None:
    """Its holder sends something, if not this: what is sent to one peer comes one after the other."""
    pull.progressed(now)
    if pull.rival is not None:
        pull.rival.progressed(now)


def leave(pull: PullState) -> None:
    """`pull` ends otherwise; its rival goes on alone with what both were asked for."""
    rival = pull.rival
    assert rival is not None
    inherited = rival.owed
    pull.rival = rival.rival = None
    if pull.hedge:
        rival.hedged = False  # there may be somebody else to ask
    rival.hedge = False
    if inherited and inherited[0].pull is pull:
        for flight in inherited:
            flight.pull = rival
