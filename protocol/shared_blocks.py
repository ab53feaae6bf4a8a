"""Handing blocks over in memory that two nodes of one machine share, instead of sending them.

The puller asks for it (`Pull.shared`) where both nodes carry the same host tag; the holder answers block by block, with
a place (`SharedBlocks`) where it has the block in shared memory and with chunks where it has not. The bytes are checked before
they are taken, and only then credited, so the holder's lease lasts until they are safe. What cannot be taken (another
container's process table, a holder that died, memory that is not sealed, a wrong digest) is asked for once more in
chunks, by the same fetch within the same deadline, and the holder is not asked to share for a while.
"""

from __future__ import annotations

from kvcomm_p2p.protocol.events import AdoptShared
from kvcomm_p2p.protocol.flights import Flight, PullState
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.membership import Membership
from kvcomm_p2p.protocol.messages import Capability, MemberRecord, SharedBlocks
from kvcomm_p2p.protocol.penalties import PenaltyBox

SENT_INSTEAD_FIRST_S = 10.0
"""Seconds that a holder is not asked to share after that failed; doubles each time in a row."""

SENT_INSTEAD_MAX_S = 600.0


class Sharing:
    """With whom memory is shared. Counts blocks taken (`taken`) and blocks that had to be sent after all (`failed`)."""

    def __init__(self, me: MemberRecord, membership: Membership) -> None:
        self._me = me
        self._membership = membership
        self._distrusted = PenaltyBox(SENT_INSTEAD_FIRST_S, SENT_INSTEAD_MAX_S)
        self.taken = 0
        self.failed = 0

    def with_peer(self, peer: NodeId) -> bool:
        """Whether both nodes say that they can share memory with each other."""
        known = self._membership.get(peer)
        return known is not None and _shares(self._me) and _shares(known.record) and known.record.host == self._me.host

    def encodes(self, holder: NodeId) -> bool:
        """Whether blocks can be pulled from this holder as int8, and would have to travel at all."""
        peer = self._membership.get(holder)
        able = peer is not None and self._me.capabilities & peer.record.capabilities & Capability.INT8
        return bool(able) and not self.with_peer(holder)

    def asks(self, holder: NodeId, now: float) -> bool:
        """Whether a pull from this holder should ask for shared memory."""
        return self.with_peer(holder) and not self._distrusted.left_s(holder, now)

    def forget(self, peer: NodeId) -> None:
        """A peer is not remembered any more."""
        self._distrusted.forgive(peer)

    def offered(self, pull: PullState, message: SharedBlocks) -> list[tuple[Flight, AdoptShared]] | None:
        """The holder offers blocks: what to do about each, None if it offers what it may not. Changes nothing."""
        offers: list[tuple[Flight, AdoptShared]] = []
        last = -1
        for block in message.blocks:
            ascends = block.ordinal > last
            flight = pull.expects(block.ordinal, 0, block.length) if pull.shared and ascends else None
            if flight is None or block.length != flight.want.kv_bytes:
                return None
            last = block.ordinal
            adopt = AdoptShared(flight.handle, flight.want.kv_bytes, flight.want.digest, message.pid, block)
            offers.append((flight, adopt))
        return offers

    def read(self, holder: NodeId, ok: bool, now: float) -> None:
        """A block that a holder offered was taken, or could not be."""
        if ok:
            self.taken += 1
            self._distrusted.forgive(holder)
        else:
            self.failed += 1
            self._distrusted.punish(holder, now)


def _shares(record: MemberRecord) -> bool:
    return bool(record.host) and bool(record.capabilities & Capability.SHARED_MEMORY)
