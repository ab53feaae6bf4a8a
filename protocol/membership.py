"""Who is there: what is believed of each peer, and how evidence changes it (SWIM's lattice, see `standing`).

States: alive -> suspect (a probe failed, a connection was refused, or somebody says so) -> dead, unless it contradicts
with a higher incarnation in time; any -> left on Bye, which only a higher epoch undoes. The dead and those who left are
told of for GONE_TOLD_S, forgotten after `forget_after_s`, and then only their numbers are remembered, so that stale
news cannot bring them back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.messages import MemberRecord, Rumour, Status
from kvcomm_p2p.protocol.names import Names
from kvcomm_p2p.protocol.rumours import Rumours
from kvcomm_p2p.protocol.standing import Departed, Standing, is_leap, merge, token
from kvcomm_p2p.protocol.suspicion import Suspicion, shortest_s

GONE_TOLD_S = 60.0
"""Seconds for which digests name a peer that died or left."""


@dataclass(slots=True)
class Peer:
    """One peer as known here. `since`: when it got into its state; `heard_at`: when it last told us anything itself;
    `introduced`: it is known to know us."""

    record: MemberRecord
    incarnation: int
    heard_at: float
    state: Status
    since: float
    introduced: bool = False
    conflict_reported: bool = False
    violations: int = 0

    @property
    def node_id(self) -> NodeId:
        return self.record.node_id

    @property
    def standing(self) -> Standing:
        return Standing(self.record.epoch, self.incarnation, self.state)

    @property
    def is_gone(self) -> bool:
        return self.standing.is_gone


class PeerChange(NamedTuple):
    """`kind` as in `events.ReportPeer.change`, or "forgotten", which is not for reports."""

    peer: Peer
    kind: str
    detail: str = ""


class Membership:
    """All peers known here (not this node itself); at most `peers_max`.

    `incarnation` and `refutations` are this node's own; `epoch_wanted` is above our epoch once somebody has seen us in
    a later life than this one (our state was rolled back), or believes that we left.
    """

    def __init__(self, config: NodeConfig, me: MemberRecord, incarnation: int = 0) -> None:
        self.me = me
        self.incarnation = incarnation
        self.refutations = 0
        self.epoch_wanted = me.epoch
        self.rumours = Rumours()
        self.doubted: list[Peer] = []
        self.turned_away = 0
        self._config = config
        self._peers: dict[NodeId, Peer] = {}
        self._suspicions: dict[NodeId, Suspicion] = {}
        self._gone: dict[NodeId, Peer] = {}
        self._names = Names()
        self._departed = Departed()
        self._alive: tuple[Peer, ...] | None = ()
        self._reachable: tuple[Peer, ...] | None = ()
        self._view = 0

    def get(self, node_id: NodeId) -> Peer | None:
        return self._peers.get(node_id)

    def is_alive(self, node_id: NodeId) -> bool:
        """Whether it may be asked for something: not suspect, not gone."""
        peer = self._peers.get(node_id)
        return peer is not None and peer.state is Status.ALIVE

    def is_reachable(self, node_id: NodeId) -> bool:
        """Whether it belongs to the cluster still: alive or suspect."""
        peer = self._peers.get(node_id)
        return peer is not None and not peer.is_gone

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._peers.values())

    def __len__(self) -> int:
        return len(self._peers)

    def alive(self) -> tuple[Peer, ...]:
        """Peers that are alive, ascending by node id."""
        if self._alive is None:
            self._alive = tuple(peer for peer in self.reachable() if peer.state is Status.ALIVE)
        return self._alive

    def reachable(self) -> tuple[Peer, ...]:
        """Peers that are alive or suspect, ascending by node id."""
        if self._reachable is None:
            there = (peer for peer in self._peers.values() if not peer.is_gone)
            self._reachable = tuple(sorted(there, key=_by_id))
        return self._reachable

    def dead(self) -> tuple[Peer, ...]:
        """Peers that died and are not forgotten yet, ascending by node id."""
        return tuple(sorted((peer for peer in self._gone.values() if peer.state is Status.DEAD), key=_by_id))

    def told(self, now: float) -> list[Peer]:
        """Whom digests name: who is there, and who went less than GONE_TOLD_S ago. Ascending by node id."""
        going = [peer for peer in self._gone.values() if now - peer.since < GONE_TOLD_S]
        return sorted([*self.reachable(), *going], key=_by_id) if going else list(self.reachable())

    def view_hash(self) -> bytes:
        """8 bytes that are equal for nodes which believe the same of all who are there, themselves included.

        Over (node_id, epoch, incarnation, status) of everybody alive or suspect. The gone are no part of it: each node
        forgets them at its own time, and who still takes one for alive differs anyway.
        """
        own = token(self.me.node_id, Standing(self.me.epoch, self.incarnation, Status.ALIVE))
        return (self._view ^ own).to_bytes(8, "little")

    def standing(self, node_id: NodeId) -> Standing | None:
        """What is known of a node, also of one that is forgotten. None: nothing."""
        peer = self._peers.get(node_id)
        end = self._departed.get(node_id)
        if peer is None or end is None:
            return end if peer is None else peer.standing
        return merge(peer.standing, end)

    def doubt(self, node_id: NodeId) -> Rumour | None:
        """What a node should be told about itself: that it is suspected, dead or gone here. None: nothing is amiss."""
        standing = self.standing(node_id)
        if standing is None or standing.status is Status.ALIVE:
            return None
        return Rumour(node_id, *standing)

    def holder_of_name(self, name: str, but: NodeId) -> NodeId | None:
        """The live node, this one included, that is called `name` and is not `but`."""
        if self.me.name == name and self.me.node_id != but:
            return self.me.node_id
        return next((peer for peer in self._names.bearers(name) if peer != but and self.is_alive(peer)), None)

    def is_full_for(self, node_id: NodeId) -> bool:
        """Whether there is no room for this unknown node even after forgetting somebody who is gone."""
        return node_id not in self._peers and len(self._peers) >= self._config.peers_max and not self._gone

    def displaced_by(self, record: MemberRecord) -> Peer | None:
        """The peer whose control address `record` has: one address is bound by one process, so that peer is gone. Not one
        of another key: anybody may claim to be anywhere."""
        for peer in self._peers.values():
            known = peer.record
            same = (known.control, known.public_key) == (record.control, record.public_key)
            if same and not peer.is_gone and peer.node_id != record.node_id:
                return peer
        return None

    def next_deadline(self) -> float:
        """When a suspect is due, infinity if none is."""
        return min((suspicion.ends_at for suspicion in self._suspicions.values()), default=float("inf"))

    def heard(self, node_id: NodeId, now: float) -> None:
        """It told us something itself, whatever: it cannot be declared dead for silence yet."""
        peer = self._peers.get(node_id)
        if peer is not None:
            peer.heard_at = now

    def introduced(self, node_id: NodeId) -> Peer | None:
        """It has shown that it knows us."""
        peer = self._peers.get(node_id)
        if peer is not None:
            peer.introduced = True
        return peer

    def learn(self, record: MemberRecord, incarnation: int, now: float) -> list[PeerChange]:
        """A member record arrived, from itself or second-hand, with an incarnation in which it lived.

        A record of the known epoch says no more than its incarnation; an older one says nothing. May forget the peer
        that is gone for longest to make room.
        """
        node_id = record.node_id
        claim = Standing(record.epoch, incarnation, Status.ALIVE)
        if node_id == self.me.node_id:
            self._claimed_of_us(claim)
            return []
        peer = self._peers.get(node_id)
        if peer is not None and record.epoch <= peer.record.epoch:
            return self.hear(Rumour(node_id, *claim), now)
        if peer is not None and is_leap(peer.standing, claim):
            return []
        end = self._departed.outlives(node_id, claim)
        if end is not None:
            self.rumours.add(Rumour(node_id, *end))
            return []
        return self._install(peer, record, incarnation, now)

    def hear(self, rumour: Rumour, now: float) -> list[PeerChange]:
        """Somebody claims something about a node (this one included): by rumour, digest, Pong, or its own Bye.

        Second-hand death of a peer that we hear ourselves is taken for a suspicion only.
        """
        claim = Standing(rumour.epoch, rumour.incarnation, rumour.status)
        if rumour.node_id == self.me.node_id:
            self._claimed_of_us(claim)
            return []
        peer = self._peers.get(rumour.node_id)
        if peer is None or claim.epoch > peer.record.epoch:
            return self._claimed_of_unknown(peer, rumour.node_id, claim, now)
        known = peer.standing
        later = self._departed.get(rumour.node_id)
        if is_leap(known, claim) or (later is not None and later.epoch > claim.epoch):
            return []
        if claim.status is Status.DEAD and not peer.is_gone and self._is_heard(peer, now):
            claim = claim._replace(status=Status.SUSPECT)
        merged = merge(known, claim)
        if merged != known:
            return self._enter(peer, merged, now, rumour.accuser)
        if claim.status is Status.SUSPECT and claim == known:
            self._confirmed(peer, rumour.accuser)
        elif peer.is_gone and claim.status in (Status.ALIVE, Status.SUSPECT):
            self.rumours.add(Rumour(peer.node_id, *known))  # somebody lags behind
        return []

    def accuse(self, node_id: NodeId, now: float, detail: str) -> list[PeerChange]:
        """We found out ourselves that it does not answer: it is suspect."""
        peer = self._peers.get(node_id)
        if peer is None or peer.is_gone:
            return []
        if peer.state is Status.SUSPECT:
            self._confirmed(peer, self.me.node_id)
            return []
        return self._enter(peer, peer.standing._replace(status=Status.SUSPECT), now, self.me.node_id, detail)

    def bury(self, node_id: NodeId, now: float, detail: str) -> list[PeerChange]:
        """There is proof that it is dead."""
        peer = self._peers.get(node_id)
        if peer is None or peer.is_gone:
            return []
        return self._enter(peer, peer.standing._replace(status=Status.DEAD), now, b"", detail)

    def tick(self, now: float) -> list[PeerChange]:
        """Suspects whose term is over are dead, but those that spoke meanwhile (then `doubted`, to be asked again);
        who is gone for long is forgotten."""
        changes: list[PeerChange] = []
        due = [node_id for node_id, suspicion in self._suspicions.items() if suspicion.ends_at <= now]
        for node_id in due:
            peer, suspicion = self._peers[node_id], self._suspicions[node_id]
            if peer.heard_at > suspicion.began_at:
                self._suspicions[node_id] = self._suspicion(now, None)
                self.doubted.append(peer)
            else:
                changes += self.bury(node_id, now, f"silent for {now - peer.heard_at:.1f} s")
        while self._gone:
            peer = next(iter(self._gone.values()))
            if now - peer.since < self._config.forget_after_s:
                break
            changes.append(self._forget(peer))
        return changes

    def stalled(self, seconds: float) -> None:
        """We were not there for so long: suspects get that time on top."""
        for suspicion in self._suspicions.values():
            suspicion.extend(seconds)

    def renew(self, me: MemberRecord) -> None:
        """This node goes on in a higher epoch."""
        self.me = me
        self.incarnation = 0
        self.epoch_wanted = max(self.epoch_wanted, me.epoch)

    def _claimed_of_us(self, claim: Standing) -> None:
        mine = Standing(self.me.epoch, self.incarnation, Status.ALIVE)
        if claim.epoch < mine.epoch or is_leap(mine, claim):
            return
        if claim.epoch > mine.epoch or claim.status is Status.LEFT:
            self.epoch_wanted = max(self.epoch_wanted, claim.epoch + 1)
            return
        if claim.status is Status.ALIVE and claim.incarnation <= self.incarnation:
            return
        if claim.incarnation >= self.incarnation:
            self.incarnation = claim.incarnation + 1
            self.refutations += claim.status is not Status.ALIVE
        self.rumours.add(Rumour(self.me.node_id, self.me.epoch, self.incarnation, Status.ALIVE))

    def _claimed_of_unknown(self, peer: Peer | None, node_id: NodeId, claim: Standing, now: float) -> list[PeerChange]:
        """About a node, or a life of it, whose record we do not have: its end is remembered, the rest will come with
        its record."""
        known = self._departed.get(node_id) if peer is None else peer.standing
        if known is not None and is_leap(known, claim):
            return []
        if claim.is_gone:
            self._departed.add(node_id, claim)
            if peer is None or not self._is_heard(peer, now):
                return self.bury(node_id, now, "a later life of it is over")
            return self.accuse(node_id, now, "a later life of it is said to be over")
        end = self._departed.outlives(node_id, claim)
        if end is not None:
            self.rumours.add(Rumour(node_id, *end))
        return []

    def _install(self, peer: Peer | None, record: MemberRecord, incarnation: int, now: float) -> list[PeerChange]:
        changes: list[PeerChange] = []
        if peer is None:
            if self.is_full_for(record.node_id):
                self.turned_away += 1
                return []
            if len(self._peers) >= self._config.peers_max:
                changes.append(self._forget(next(iter(self._gone.values()))))
            peer = Peer(record, incarnation, now, Status.ALIVE, now)
            self._peers[record.node_id] = peer
            changes.append(PeerChange(peer, "joined"))
        else:
            was = peer.state
            self._names.drop(peer.record.name, peer.node_id)
            self._view ^= token(peer.node_id, peer.standing)
            peer.record, peer.incarnation, peer.heard_at = record, incarnation, now
            peer.state, peer.since, peer.introduced = Status.ALIVE, now, False
            self._gone.pop(peer.node_id, None)
            self._suspicions.pop(peer.node_id, None)
            changes.append(PeerChange(peer, "returned", f"restarted; was {was.word}"))
        self._names.add(record.name, record.node_id)
        self._departed.drop(record.node_id)
        self._view ^= token(peer.node_id, peer.standing)
        self._alive = self._reachable = None
        return changes + self._name_conflicts(peer)

    def _enter(self, peer: Peer, standing: Standing, now: float, accuser: bytes, detail: str = "") -> list[PeerChange]:
        """The one place where a known peer's standing changes within its epoch. Tells others of it."""
        node_id, was = peer.node_id, peer.state
        self._view ^= token(node_id, peer.standing)
        _, peer.incarnation, peer.state = standing
        self._view ^= token(node_id, standing)
        self._suspicions.pop(node_id, None)
        if peer.state is Status.SUSPECT:
            self._suspicions[node_id] = self._suspicion(now, NodeId(accuser) if accuser else None)
        self.rumours.add(Rumour(node_id, *standing, accuser if peer.state is Status.SUSPECT else b""))
        if peer.state is was:
            return []
        peer.since = now
        self._gone.pop(node_id, None)
        if peer.is_gone:
            self._gone[node_id] = peer
        self._alive = self._reachable = None
        if peer.state is not Status.ALIVE:
            return [PeerChange(peer, peer.state.word, detail)]
        return [PeerChange(peer, "returned", f"was {was.word}"), *self._name_conflicts(peer)]

    def _suspicion(self, now: float, accuser: NodeId | None) -> Suspicion:
        return Suspicion(now, self._nodes, self._config.probe_interval_s, accuser)

    @property
    def _nodes(self) -> int:
        """How many belong to the cluster, this one included."""
        return len(self._peers) - len(self._gone) + 1

    def _confirmed(self, peer: Peer, accuser: bytes) -> None:
        if accuser and self._suspicions[peer.node_id].confirm(NodeId(accuser)):
            self.rumours.add(Rumour(peer.node_id, *peer.standing, accuser))

    def _is_heard(self, peer: Peer, now: float) -> bool:
        suspicion = self._suspicions.get(peer.node_id)
        if suspicion is not None:
            return peer.heard_at > suspicion.began_at
        return now - peer.heard_at < shortest_s(self._nodes, self._config.probe_interval_s)

    def _forget(self, peer: Peer) -> PeerChange:
        del self._peers[peer.node_id]
        del self._gone[peer.node_id]
        self._names.drop(peer.record.name, peer.node_id)
        self._departed.add(peer.node_id, peer.standing)
        return PeerChange(peer, "forgotten")

    def _name_conflicts(self, peer: Peer) -> list[PeerChange]:
        other = self.holder_of_name(peer.record.name, but=peer.node_id)
        if other is None or peer.conflict_reported:
            return []
        peer.conflict_reported = True
        whose = "this node" if other == self.me.node_id else f"node {other[:4].hex()}"
        return [PeerChange(peer, "name_conflict", f"{whose} has the same name")]


def _by_id(peer: Peer) -> NodeId:
    return peer.node_id
