"""Who is there: what is believed of each peer, and how evidence changes it (SWIM's lattice, see `standing`).

States: alive -> suspect (a probe failed, a connection was refused, or somebody says so) -> dead, unless it contradicts
with a higher incarnation in time; any -> left on Bye, which only a higher epoch undoes. The dead and those who left are
told of for `acquaintances.GONE_TOLD_S`, forgotten after `forget_after_s`, and then only their numbers are remembered, so
that stale news cannot bring them back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvcomm_p2p.protocol.acquaintances import Acquaintances
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.member_table import NO_ROW, KnownMembers, MemberTable, Peer
from kvcomm_p2p.protocol.messages import MemberRecord, Rumour, Status
from kvcomm_p2p.protocol.rumours import Rumours
from kvcomm_p2p.protocol.standing import Standing, is_leap, merge
from kvcomm_p2p.protocol.suspicion import Suspicion, shortest_s
from kvcomm_p2p.protocol.view import View


class PeerChange(NamedTuple):
    """`kind` as in `events.ReportPeer.change`, or "forgotten", which is not for reports."""

    peer: Peer
    kind: str
    detail: str = ""


class Membership(Acquaintances):
    """All peers known here (not this node itself), and what changes what is believed of them; at most `peers_max`.

    `incarnation` and `refutations` are this node's own; `epoch_wanted` is above our epoch once somebody has seen us in
    a later life than this one (our state was rolled back), or believes that we left. `on_own_record` hears of records of this
    node that others have. `turned` collects peers that came,
    went or changed their state, until it is drained.
    """

    def __init__(self, config: NodeConfig, me: MemberRecord, incarnation: int = 0) -> None:
        super().__init__(config, me, incarnation)
        self.refutations = 0
        self.epoch_wanted = me.epoch
        self.rumours = Rumours()
        self.doubted: list[Peer] = []
        self.turned_away = 0
        self._suspicions: dict[NodeId, Suspicion] = {}
        self.turned: dict[NodeId, None] = {}
        self.on_own_record: Callable[[MemberRecord], None] = lambda record: None

    def begin(self, known: KnownMembers, now: float, *, introduced: bool) -> bool:
        """Start with these peers, all alive, without a word to anybody; for a node that knows nobody yet (else nothing
        happens and False is returned). `introduced`: they know us. Costs no Python object per peer."""
        if len(self._table) or len(self._departed) or len(known) > self._config.peers_max + 1:
            return False
        self._table = MemberTable.of(known, self.me.node_id, now, introduced)
        self._view = View.of(known, self.me.node_id)
        self._alive = self._reachable = None
        return True

    def next_deadline(self) -> float:
        """When a suspect is due, infinity if none is."""
        return min((suspicion.ends_at for suspicion in self._suspicions.values()), default=float("inf"))

    def heard(self, node_id: NodeId, now: float) -> None:
        """It told us something itself, whatever: it cannot be declared dead for silence yet."""
        row = self._table.row(node_id)
        if row != NO_ROW:
            self._table.heard_at[row] = now

    def introduced(self, node_id: NodeId) -> Peer | None:
        """It has shown that it knows us."""
        peer = self.get(node_id)
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
            self.on_own_record(record)
            self._claimed_of_us(claim)
            return []
        peer = self.get(node_id)
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
        peer = self.get(rumour.node_id)
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
        peer = self.get(node_id)
        if peer is None or peer.is_gone:
            return []
        if peer.state is Status.SUSPECT:
            self._confirmed(peer, self.me.node_id)
            return []
        return self._enter(peer, peer.standing._replace(status=Status.SUSPECT), now, self.me.node_id, detail)

    def bury(self, node_id: NodeId, now: float, detail: str) -> list[PeerChange]:
        """There is proof that it is dead."""
        peer = self.get(node_id)
        if peer is None or peer.is_gone:
            return []
        return self._enter(peer, peer.standing._replace(status=Status.DEAD), now, b"", detail)

    def tick(self, now: float) -> list[PeerChange]:
        """Suspects whose term is over are dead, but those that spoke meanwhile (then `doubted`, to be asked again);
        who is gone for long is forgotten."""
        changes: list[PeerChange] = []
        self._compact()
        due = [node_id for node_id, suspicion in self._suspicions.items() if suspicion.ends_at <= now]
        for node_id in due:
            peer, suspicion = self._peer(node_id), self._suspicions[node_id]
            if peer.heard_at > suspicion.began_at:
                self._suspicions[node_id] = self._suspicion(now, None)
                self.doubted.append(peer)
            else:
                changes += self.bury(node_id, now, f"silent for {now - peer.heard_at:.1f} s")
        while self._gone:
            peer = self._oldest_gone()
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

    # ---------------------------------------------------------------------------------------------------------- inside

    def _peer(self, node_id: NodeId) -> Peer:
        """Of a node that is known for certain."""
        return Peer(self._table, self._table.row_of[node_id])

    def _oldest_gone(self) -> Peer:
        return self._peer(next(iter(self._gone)))

    def _compact(self) -> None:
        table = self._table.compacted()
        if table is not self._table:
            self._table = table
            self._alive = self._reachable = None
            self.doubted = [self._peer(peer.node_id) for peer in self.doubted]

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
        node_id, table = record.node_id, self._table
        if peer is None:
            if self.is_full_for(node_id):
                self.turned_away += 1
                return []
            if len(table) >= self._config.peers_max:
                changes.append(self._forget(self._oldest_gone()))
            peer = Peer(table, table.add(record, incarnation, now))
            changes.append(PeerChange(peer, "joined"))
        else:
            was, row = peer.state, table.row_of[node_id]
            self._view.change(node_id, peer.standing)
            table.replace(row, record)
            table.incarnations[row] = incarnation
            table.heard_at[row] = table.since[row] = now
            table.status[row] = Status.ALIVE
            peer.introduced = False
            self._gone.pop(node_id, None)
            self._suspicions.pop(node_id, None)
            changes.append(PeerChange(peer, "returned", f"restarted; was {was.word}"))
        self._departed.drop(node_id)
        self._view.change(node_id, peer.standing)
        self._turn(node_id)
        return changes + self._name_conflicts(peer)

    def _enter(self, peer: Peer, standing: Standing, now: float, accuser: bytes, detail: str = "") -> list[PeerChange]:
        """The one place where a known peer's standing changes within its epoch. Tells others of it."""
        node_id, was, table = peer.node_id, peer.state, self._table
        row = table.row_of[node_id]
        self._view.change(node_id, peer.standing)
        _, table.incarnations[row], table.status[row] = standing
        self._view.change(node_id, standing)
        self._suspicions.pop(node_id, None)
        if peer.state is Status.SUSPECT:
            self._suspicions[node_id] = self._suspicion(now, NodeId(accuser) if accuser else None)
        self.rumours.add(Rumour(node_id, *standing, accuser if peer.state is Status.SUSPECT else b""))
        if peer.state is was:
            return []
        table.since[row] = now
        self._gone.pop(node_id, None)
        if peer.is_gone:
            self._gone[node_id] = None
        self._turn(node_id)
        if peer.state is not Status.ALIVE:
            return [PeerChange(peer, peer.state.word, detail)]
        return [PeerChange(peer, "returned", f"was {was.word}"), *self._name_conflicts(peer)]

    def _suspicion(self, now: float, accuser: NodeId | None) -> Suspicion:
        return Suspicion(now, self._nodes, self._config.probe_interval_s, accuser)

    @property
    def _nodes(self) -> int:
        """How many belong to the cluster, this one included."""
        return len(self._table) - len(self._gone) + 1

    def _confirmed(self, peer: Peer, accuser: bytes) -> None:
        if accuser and self._suspicions[peer.node_id].confirm(NodeId(accuser)):
            self.rumours.add(Rumour(peer.node_id, *peer.standing, accuser))

    def _is_heard(self, peer: Peer, now: float) -> bool:
        suspicion = self._suspicions.get(peer.node_id)
        if suspicion is not None:
            return peer.heard_at > suspicion.began_at
        return now - peer.heard_at < shortest_s(self._nodes, self._config.probe_interval_s)

    def _turn(self, node_id: NodeId) -> None:
        self.turned[node_id] = None
        self._alive = self._reachable = None

    def _forget(self, peer: Peer) -> PeerChange:
        self._table.remove(self._table.row_of[peer.node_id])
        del self._gone[peer.node_id]
        self._turn(peer.node_id)
        self._departed.add(peer.node_id, peer.standing)
        return PeerChange(peer, "forgotten")

    def _name_conflicts(self, peer: Peer) -> list[PeerChange]:
        other = self.holder_of_name(peer.record.name, but=peer.node_id)
        if other is None or peer.conflict_reported:
            return []
        peer.conflict_reported = True
        whose = "this node" if other == self.me.node_id else f"node {other[:4].hex()}"
        return [PeerChange(peer, "name_conflict", f"{whose} has the same name")]
