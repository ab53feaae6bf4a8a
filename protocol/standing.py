"""How claims about one node are put together: a join-semilattice, so that order, repetition and loss do not matter."""

from __future__ import annotations

from typing import NamedTuple

from kvcomm_p2p.protocol.messages import Status

LEAP_MAX = 2**20
"""A claim that jumps further above what is known is not believed: counters never run out because somebody lies."""


class Standing(NamedTuple):
    """What is known of a node: which of its lives, which incarnation of that, and how it fares.

    A node raises its `epoch` at each start and its `incarnation` to contradict those who suspect it; nobody else raises
    either.
    """

    epoch: int
    incarnation: int
    status: Status

    @property
    def is_gone(self) -> bool:
        return self.status in (Status.DEAD, Status.LEFT)


def merge(one: Standing, other: Standing) -> Standing:
    """What two claims say together: commutative, associative, idempotent.

    A higher epoch voids the lower. Within an epoch LEFT stays, the incarnation never falls, and only a higher
    incarnation voids suspicion and death (SWIM, section 4.2; that failure evidence raises the stored incarnation, too,
    keeps an older ALIVE from undoing a newer death).
    """
    if one.epoch != other.epoch:
        return max(one, other, key=lambda claim: claim.epoch)
    incarnation = max(one.incarnation, other.incarnation)
    if Status.LEFT in (one.status, other.status):
        return Standing(one.epoch, incarnation, Status.LEFT)
    status = max(claim.status for claim in (one, other) if claim.incarnation == incarnation)
    return Standing(one.epoch, incarnation, status)


def is_leap(known: Standing, claim: Standing) -> bool:
    """Whether the claim is further above what is known than restarts and refutations can explain."""
    if claim.epoch > known.epoch:
        return claim.epoch - known.epoch > LEAP_MAX
    return claim.epoch == known.epoch and claim.incarnation - known.incarnation > LEAP_MAX
