"""Who is there, judged by the age of incarnations.

Every node counts its own incarnation up once per gossip round, and digests carry the highest count that anybody has seen.
Only a count higher than the known one is evidence of life: late, repeated and second-hand news cannot bring a dead peer
back. States: alive -> expired (silent for `peer_timeout_s`, or unreachable) -> alive again on a higher incarnation; alive
or expired -> left on Bye, which only a higher epoch undoes; expired and left peers are forgotten after
`forget_after_s`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.messages import MemberRecord


class PeerState(enum.Enum):
    ALIVE = "alive"
    EXPIRED = "expired"
    LEFT = "left"


@dataclass(slots=True)
class Peer:
    """One peer as known here. `since`: when it got into its state; `introduced`: it is known to know us."""

    record: MemberRecord
    incarnation: int
    heard_at: float
    state: PeerState
    since: float
    introduced: bool = False
    conflict_reported: bool = False
    violations: int = 0

    @property
    def node_id(self) -> NodeId:
        return self.record.node_id


class PeerChange(NamedTuple):
    """`kind` as in `events.ReportPeer.change`."""

    peer: Peer
    kind: str
    detail: str = ""


class Membership:
    """All peers known here (not this node itself); at most `peers_max`."""

    def __init__(self, config: NodeConfig, me: MemberRecord) -> None:
        self._config = config
        self._me = me
        self._peers: dict[NodeId, Peer] = {}
        self._alive: tuple[Peer, ...] | None = ()
        self.turned_away = 0

    def get(self, node_id: NodeId) -> Peer | None:
        return self._peers.get(node_id)

    def is_alive(self, node_id: NodeId) -> bool:
        peer = self._peers.get(node_id)
        return peer is not None and peer.state is PeerState.ALIVE

    def introduced(self, node_id: NodeId) -> Peer | None:
        """It has shown that it knows us."""
        peer = self._peers.get(node_id)
        if peer is not None:
            peer.introduced = True
        return peer

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._peers.values())

    def __len__(self) -> int:
        return len(self._peers)

    def alive(self) -> tuple[Peer, ...]:
        """Peers that are alive, ascending by node id."""
        if self._alive is None:
            self._alive = self._in_state(PeerState.ALIVE)
        return self._alive

    def expired(self) -> tuple[Peer, ...]:
        """Peers that are silent, ascending by node id."""
        return self._in_state(PeerState.EXPIRED)

    def _in_state(self, state: PeerState) -> tuple[Peer, ...]:
        return tuple(sorted((p for p in self._peers.values() if p.state is state), key=lambda peer: peer.node_id))

    def holder_of_name(self, name: str, but: NodeId) -> NodeId | None:
        """The live node, this one included, that is called `name` and is not `but`."""
        if self._me.name == name and self._me.node_id != but:
            return self._me.node_id
        for peer in self.alive():
            if peer.record.name == name and peer.node_id != but:
                return peer.node_id
        return None

    def is_full_for(self, node_id: NodeId) -> bool:
        """Whether there is no room for this unknown node even after forgetting somebody who is gone."""
        if node_id in self._peers or len(self._peers) < self._config.peers_max:
            return False
        return all(peer.state is PeerState.ALIVE for peer in self._peers.values())

    def learn(self, record: MemberRecord, incarnation: int, now: float) -> list[PeerChange]:
        """A member record arrived, from itself or second-hand. Changes nothing for an older or equal epoch.

        May forget the peer that is gone for longest to make room (kind "forgotten", not for reports).
        """
        peer = self._peers.get(record.node_id)
        if record.node_id == self._me.node_id:
            return []
        if peer is not None and record.epoch <= peer.record.epoch:
            return self.hear(record.node_id, record.epoch, incarnation, now)
        changes: list[PeerChange] = []
        if peer is None:
            if self.is_full_for(record.node_id):
                self.turned_away += 1
                return []
            if len(self._peers) >= self._config.peers_max:
                changes.append(self._forget_one())
            peer = Peer(record, incarnation, now, PeerState.ALIVE, now)
            self._peers[record.node_id] = peer
            changes.append(PeerChange(peer, "joined"))
        else:
            was = peer.state
            peer.record, peer.incarnation, peer.heard_at = record, incarnation, now
            peer.introduced = False
            self._enter(peer, PeerState.ALIVE, now)
            changes.append(PeerChange(peer, "returned", f"restarted; was {was.value}"))
        self._alive = None
        return changes + self._name_conflicts(peer)

    def hear(self, node_id: NodeId, epoch: int, incarnation: int, now: float) -> list[PeerChange]:
        """A incarnation count arrived. Evidence of life only if it is higher than the known one of the same epoch."""
        peer = self._peers.get(node_id)
        if peer is None or epoch != peer.record.epoch or incarnation <= peer.incarnation:
            return []
        peer.incarnation, peer.heard_at = incarnation, now
        if peer.state is not PeerState.EXPIRED:
            return []
        self._enter(peer, PeerState.ALIVE, now)
        return [PeerChange(peer, "returned"), *self._name_conflicts(peer)]

    def leave(self, node_id: NodeId, epoch: int, now: float) -> list[PeerChange]:
        """It said Bye in this epoch."""
        peer = self._peers.get(node_id)
        if peer is None or epoch != peer.record.epoch or peer.state is PeerState.LEFT:
            return []
        self._enter(peer, PeerState.LEFT, now)
        return [PeerChange(peer, "left")]

    def expire(self, node_id: NodeId, now: float, detail: str) -> list[PeerChange]:
        """There is proof that it cannot be reached."""
        peer = self._peers.get(node_id)
        if peer is None or peer.state is not PeerState.ALIVE:
            return []
        self._enter(peer, PeerState.EXPIRED, now)
        return [PeerChange(peer, "expired", detail)]

    def tick(self, now: float) -> list[PeerChange]:
        """Expire the silent and forget the gone (kind "forgotten", not for reports)."""
        changes: list[PeerChange] = []
        for peer in self.alive():
            silent_s = now - peer.heard_at
            if silent_s >= self._config.peer_timeout_s:
                changes += self.expire(peer.node_id, now, f"silent for {silent_s:.1f} s")
        for peer in [p for p in self._peers.values() if p.state is not PeerState.ALIVE]:
            if now - peer.since >= self._config.forget_after_s:
                del self._peers[peer.node_id]
                changes.append(PeerChange(peer, "forgotten"))
        return changes

    def displaced_by(self, record: MemberRecord) -> Peer | None:
        """The live peer whose control address `record` has: one address is bound by one process, so that peer is
        gone."""
        for peer in self.alive():
            if peer.record.control == record.control and peer.node_id != record.node_id:
                return peer
        return None

    def _enter(self, peer: Peer, state: PeerState, now: float) -> None:
        peer.state, peer.since = state, now
        self._alive = None

    def _forget_one(self) -> PeerChange:
        gone = [peer for peer in self._peers.values() if peer.state is not PeerState.ALIVE]
        oldest = min(gone, key=lambda peer: (peer.since, peer.node_id))
        del self._peers[oldest.node_id]
        return PeerChange(oldest, "forgotten")

    def _name_conflicts(self, peer: Peer) -> list[PeerChange]:
        other = self.holder_of_name(peer.record.name, but=peer.node_id)
        if other is None or peer.conflict_reported:
            return []
        peer.conflict_reported = True
        whose = "this node" if other == self._me.node_id else f"node {other[:4].hex()}"
        return [PeerChange(peer, "name_conflict", f"{whose} has the same name")]
