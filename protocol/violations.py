"""Who broke the rules of the protocol, and who only answered what another was asked at the same address."""

from __future__ import annotations

from kvcomm_p2p.protocol.events import Effect, ReportPeer
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.membership import Membership


class NotAsked(ValueError):
    """An answer from somebody else than `asked`, to whom the question went."""

    def __init__(self, what: str, asked: NodeId) -> None:
        super().__init__(f"{what} somebody else")
        self.asked = asked


def is_innocent(members: Membership, sender: NodeId, violation: ValueError) -> bool:
    """Whether the sender listens where the one that was asked did: a node that crashed without its state returns there as
    another one, and gets what its earlier life is still asked. Such an answer counts neither for nor against anybody."""
    if not isinstance(violation, NotAsked):
        return False
    peers = members.get(sender), members.get(violation.asked)
    places = {peer.record.control for peer in peers if peer is not None}
    return None not in peers and len(places) == 1


def counted(members: Membership, sender: NodeId, violation: ValueError) -> list[Effect]:
    """One more of a peer. Its first, second, fourth, eighth ... is reported, so that it cannot flood the log."""
    peer = members.get(sender)
    if peer is None:
        return []
    peer.violations += 1
    if peer.violations & (peer.violations - 1):
        return []
    return [ReportPeer(sender, peer.record.name, "violation", f"{violation} ({peer.violations} so far)")]
