"""How claims about one node are put together: a join-semilattice, so that order, repetition and loss do not matter."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from functools import lru_cache
from typing import NamedTuple

from msgspec import msgpack

from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.messages import Status

LEAP_MAX = 2**20
"""A claim that jumps further above what is known is not believed: counters never run out because somebody lies."""

GONE_REMEMBERED_MAX = 4096

TOKENS_REMEMBERED = 65536
"""A node's own standing is hashed at each exchange, and simulated nodes of one process believe the same of each other."""


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


@lru_cache(maxsize=TOKENS_REMEMBERED)
def token(node_id: NodeId, standing: Standing) -> int:
    """One member's part in the hash of a view: 64 bits. The gone have no part: 0."""
    if standing.is_gone:
        return 0
    packed = msgpack.encode((node_id, *standing))
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


class Departed:
    """How lives ended whose records are forgotten, or never came; of at most GONE_REMEMBERED_MAX nodes, the latest."""

    def __init__(self) -> None:
        self._ends: OrderedDict[NodeId, Standing] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ends)

    def get(self, node_id: NodeId) -> Standing | None:
        return self._ends.get(node_id)

    def add(self, node_id: NodeId, end: Standing) -> None:
        known = self._ends.pop(node_id, end)
        self._ends[node_id] = merge(known, end)
        if len(self._ends) > GONE_REMEMBERED_MAX:
            self._ends.popitem(last=False)

    def drop(self, node_id: NodeId) -> None:
        self._ends.pop(node_id, None)

    def outlives(self, node_id: NodeId, claim: Standing) -> Standing | None:
        """What is remembered of the node, if the claim is void by it. An end that leaps above the claim is a lie that was
        told before anybody knew the node."""
        end = self._ends.get(node_id)
        return end if end is not None and merge(end, claim) != claim and not is_leap(claim, end) else None
