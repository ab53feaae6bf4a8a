"""What can be asked of the membership: who is known, and what is believed of each."""

from __future__ import annotations

from collections.abc import Iterator

from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.member_table import NO_ROW, MemberTable, Peer, Peers
from kvcomm_p2p.protocol.messages import MemberRecord, Rumour, Status
from kvcomm_p2p.protocol.standing import Departed, Standing, merge
from kvcomm_p2p.protocol.view import View

GONE_TOLD_S = 60.0
"""Seconds for which digests name a peer that died or left."""


class Acquaintances:
    """This node (`me`, in its `incarnation`) and its peers. Nothing here changes what is believed."""

    def __init__(self, config: NodeConfig, me: MemberRecord, incarnation: int) -> None:
        self.me = me
        self.incarnation = incarnation
        self._config = config
        self._table = MemberTable()
        self._gone: dict[NodeId, None] = {}
        """Who died or left and is not forgotten, longest first."""
        self._departed = Departed()
        self._alive: Peers | None = None
        self._reachable: Peers | None = None
        self._view = View()

    def get(self, node_id: NodeId) -> Peer | None:
        row = self._table.row(node_id)
        return None if row == NO_ROW else Peer(self._table, row)

    def is_alive(self, node_id: NodeId) -> bool:
        """Whether it may be asked for something: not suspect, not gone."""
        row = self._table.row(node_id)
        return row != NO_ROW and self._table.status[row] == Status.ALIVE

    def is_reachable(self, node_id: NodeId) -> bool:
        """Whether it belongs to the cluster still: alive or suspect."""
        row = self._table.row(node_id)
        return row != NO_ROW and self._table.status[row] <= Status.SUSPECT

    def __iter__(self) -> Iterator[Peer]:
        table = self._table
        return (Peer(table, row) for row in table.present())

    def __len__(self) -> int:
        return len(self._table)

    def alive(self) -> Peers:
        """Peers that are alive, ascending by node id."""
        if self._alive is None:
            self._alive = self._table.select(Status.ALIVE)
        return self._alive

    def reachable(self) -> Peers:
        """Peers that are alive or suspect, ascending by node id."""
        if self._reachable is None:
            self._reachable = self._table.select(Status.SUSPECT)
        return self._reachable

    def epoch_of(self, node_id: NodeId) -> int | None:
        """The epoch of this node or of a peer that is alive or suspect, None of others."""
        if node_id == self.me.node_id:
            return self.me.epoch
        row = self._table.row(node_id)
        there = row != NO_ROW and self._table.status[row] <= Status.SUSPECT
        return self._table.records[row].epoch if there else None

    def dead(self) -> list[Peer]:
        """Peers that died and are not forgotten yet, ascending by node id."""
        return [peer for peer in self._gone_peers() if peer.state is Status.DEAD]

    def going(self, now: float) -> list[Peer]:
        """Who went less than GONE_TOLD_S ago, ascending by node id. Digests name them besides those who are there."""
        return [peer for peer in self._gone_peers() if now - peer.since < GONE_TOLD_S]

    def _gone_peers(self) -> list[Peer]:
        peers = (self.get(node_id) for node_id in sorted(self._gone))
        return [peer for peer in peers if peer is not None]

    def view_hash(self) -> bytes:
        """8 bytes that are equal for nodes which believe the same of all who are there, themselves included.

        Over (node_id, epoch, incarnation, status) of everybody alive or suspect. The gone are no part of it: each node
        forgets them at its own time, and who still takes one for alive differs anyway.
        """
        return self._view.total(self.me.node_id, self._own_standing()).to_bytes(8, "little")

    def view_hashes(self) -> list[int]:
        """The same by bucket of node ids (`roster.bucket_of`), 64 bits each."""
        return self._view.buckets(self.me.node_id, self._own_standing())

    def _own_standing(self) -> Standing:
        return Standing(self.me.epoch, self.incarnation, Status.ALIVE)

    def standing(self, node_id: NodeId) -> Standing | None:
        """What is known of a node, also of one that is forgotten. None: nothing."""
        peer = self.get(node_id)
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
        bearers = self._table.names.bearers(name)
        return next((node_id for node_id in bearers if node_id != but and self.is_alive(node_id)), None)

    def is_full_for(self, node_id: NodeId) -> bool:
        """Whether there is no room for this unknown node even after forgetting somebody who is gone."""
        unknown = self._table.row(node_id) == NO_ROW
        return unknown and len(self._table) >= self._config.peers_max and not self._gone

    def displaced_by(self, record: MemberRecord) -> Peer | None:
        """The peer whose control address `record` has: one address is bound by one process, so that peer is gone. Not one
        of another key: anybody may claim to be anywhere."""
        same = (peer for peer in self.at_address(record.control) if peer.record.public_key == record.public_key)
        return next((peer for peer in same if peer.node_id != record.node_id), None)

    def at_address(self, control: str) -> list[Peer]:
        """Peers with this control address that are alive or suspect, ascending by node id."""
        peers = (self.get(node_id) for node_id in self._table.places.bearers(control))
        return [peer for peer in peers if peer is not None and not peer.is_gone]

    def believes(self, node_id: NodeId, epoch: int, incarnation: int, status: Status) -> bool:
        """Whether a peer is known to live, and a claim says just that, as most do: `hear` would change nothing."""
        table = self._table
        row = table.row(node_id)
        return (
            row != NO_ROW
            and status is Status.ALIVE
            and table.status[row] == Status.ALIVE
            and table.incarnations[row] == incarnation
            and table.records[row].epoch == epoch
        )
