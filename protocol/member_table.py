"""Who is known, in columns: one row per peer instead of one object, so that thousands of nodes with thousands of peers
each fit into one process.

What never changes while nobody comes or goes (records, ids, their order) is shared by all nodes that began with the same
`KnownMembers`, and copied by a node when its own first change comes.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import numpy as np

from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.messages import BUCKETS, MemberRecord, Status
from kvcomm_p2p.protocol.messages.exchanges import bucket_of
from kvcomm_p2p.protocol.names import Names
from kvcomm_p2p.protocol.origin_log import blank_state
from kvcomm_p2p.protocol.standing import Standing, token

_INTRODUCED, _CONFLICT_REPORTED, _ABSENT = 1, 2, 4
_STATUSES = tuple(Status)
NO_ROW = -1


class KnownMembers:
    """Members that a node begins with, all alive, each in an `incarnation`. Immutable; any number of nodes may share it.

    Records of one node twice: the higher epoch counts.
    """

    __slots__ = (
        "blank_buckets",
        "blanks",
        "epochs",
        "hashes",
        "ids",
        "incarnations",
        "names",
        "places",
        "records",
        "row_of",
        "rows",
    )

    def __init__(self, members: Iterable[tuple[MemberRecord, int]]) -> None:
        latest: dict[NodeId, tuple[MemberRecord, int]] = {}
        for record, incarnation in members:
            known = latest.get(record.node_id)
            if known is None or (known[0].epoch, known[1]) < (record.epoch, incarnation):
                latest[record.node_id] = (record, incarnation)
        self.ids = sorted(latest)
        self.records = [latest[node_id][0] for node_id in self.ids]
        self.incarnations = array("q", [latest[node_id][1] for node_id in self.ids])
        self.row_of = {node_id: row for row, node_id in enumerate(self.ids)}
        self.rows = array("I", range(len(self.ids)))
        self.names, self.places = Names(), Names()
        for record in self.records:
            self.names.add(record.name, record.node_id)
            self.places.add(record.control, record.node_id)
        self.hashes = [0] * BUCKETS
        """Of what is believed of them, by bucket: see `view.View`."""
        self.epochs = array("q", [record.epoch for record in self.records])
        self.blanks = array("Q", [blank_state(record.node_id, record.epoch) for record in self.records])
        self.blank_buckets = [0] * BUCKETS
        """Of their logs, of which nothing is known: see `roster.States`."""
        for row, node_id in enumerate(self.ids):
            self.hashes[bucket_of(node_id)] ^= token(node_id, self._standing(row))
            self.blank_buckets[bucket_of(node_id)] ^= self.blanks[row]

    def __len__(self) -> int:
        return len(self.ids)

    def standing(self, node_id: NodeId) -> Standing | None:
        """Of one of them, None of others."""
        row = self.row_of.get(node_id)
        return None if row is None else self._standing(row)

    def _standing(self, row: int) -> Standing:
        return Standing(self.records[row].epoch, self.incarnations[row], Status.ALIVE)


class MemberTable:
    """Rows of peers, never used for another one. Those who call the table change the columns of a row; who comes and goes,
    and what it is called (`names`) and where it is (`places`: control addresses), only `add`, `replace` and `remove` do."""

    __slots__ = (
        "_absent",
        "_shared",
        "flags",
        "heard_at",
        "ids",
        "incarnations",
        "names",
        "places",
        "records",
        "row_of",
        "rows",
        "since",
        "status",
        "violations",
    )

    def __init__(self) -> None:
        self._shared = False
        self._absent = 0
        self.ids: list[NodeId] = []
        self.rows = array("I")
        self.row_of: dict[NodeId, int] = {}
        self.records: list[MemberRecord] = []
        self.names, self.places = Names(), Names()
        self.incarnations = array("q")
        self.heard_at = array("d")
        self.since = array("d")
        self.status = array("B")
        self.flags = array("B")
        self.violations: dict[int, int] = {}

    @classmethod
    def of(cls, known: KnownMembers, but: NodeId, now: float, introduced: bool) -> MemberTable:
        """All of `known` except for one node. Costs no Python object per row."""
        table = cls()
        table._shared = True
        table.ids, table.rows, table.row_of = known.ids, known.rows, known.row_of
        table.records, table.names, table.places = known.records, known.names, known.places
        size = len(known)
        table.incarnations = known.incarnations[:]
        table.heard_at = array("d", [now]) * size
        table.since = table.heard_at[:]
        table.status = array("B", [Status.ALIVE]) * size
        table.flags = array("B", [_INTRODUCED if introduced else 0]) * size
        if but in known.row_of:
            table._part_with(known.row_of[but])
        return table

    def __len__(self) -> int:
        return len(self.records) - self._absent

    def row(self, node_id: NodeId) -> int:
        """NO_ROW for a node that is not known (any more)."""
        row = self.row_of.get(node_id, NO_ROW)
        return NO_ROW if row < 0 or self.flags[row] & _ABSENT else row

    def present(self) -> Iterator[int]:
        """All rows, in the order in which they came."""
        return (row for row in range(len(self.records)) if not self.flags[row] & _ABSENT)

    def select(self, status_max: Status) -> Peers:
        """Peers of this status or a lower one, ascending by node id."""
        order = np.frombuffer(self.rows, np.uint32)
        flags, status = np.frombuffer(self.flags, np.uint8), np.frombuffer(self.status, np.uint8)
        chosen = order[(status[order] <= status_max) & (flags[order] & _ABSENT == 0)] if len(order) else order
        return Peers(self, array("I", chosen.tobytes()))

    def add(self, record: MemberRecord, incarnation: int, now: float) -> int:
        """A peer that is not known: alive from now on. Returns its row."""
        self._own()
        row, node_id = len(self.records), record.node_id
        self.records.append(record)
        self.row_of[node_id] = row
        self.incarnations.append(incarnation)
        self.heard_at.append(now)
        self.since.append(now)
        self.status.append(Status.ALIVE)
        self.flags.append(0)
        at = bisect_left(self.ids, node_id)
        if at < len(self.ids) and self.ids[at] == node_id:  # known once, and removed
            self.rows[at] = row
        else:
            self.ids.insert(at, node_id)
            self.rows.insert(at, row)
        self._name(record)
        return row

    def replace(self, row: int, record: MemberRecord) -> None:
        """The same node in another life."""
        self._own()
        self._unname(self.records[row])
        self.records[row] = record
        self._name(record)

    def remove(self, row: int) -> None:
        """It is known no longer."""
        self._own()
        node_id = self.records[row].node_id
        del self.row_of[node_id]
        at = bisect_left(self.ids, node_id)
        del self.ids[at], self.rows[at]
        self._part_with(row)
        self._unname(self.records[row])

    def compacted(self) -> MemberTable:
        """This table, or a smaller one with the same peers if many rows are unused."""
        if self._absent <= max(64, len(self.records) // 2):
            return self
        table = MemberTable()
        for row in self.present():
            at = table.add(self.records[row], self.incarnations[row], self.heard_at[row])
            table.since[at], table.status[at], table.flags[at] = self.since[row], self.status[row], self.flags[row]
            if row in self.violations:
                table.violations[at] = self.violations[row]
        return table

    def _part_with(self, row: int) -> None:
        self.flags[row] |= _ABSENT
        self._absent += 1

    def _own(self) -> None:
        if self._shared:
            self._shared = False
            self.ids, self.rows, self.row_of = self.ids[:], self.rows[:], dict(self.row_of)
            self.records, self.names, self.places = self.records[:], self.names.copy(), self.places.copy()

    def _name(self, record: MemberRecord) -> None:
        self.names.add(record.name, record.node_id)
        self.places.add(record.control, record.node_id)

    def _unname(self, record: MemberRecord) -> None:
        self.names.drop(record.name, record.node_id)
        self.places.drop(record.control, record.node_id)


class Peer:
    """One peer as known here: a view of its row, always up to date while the peer is remembered.

    `since`: when it got into its state; `heard_at`: when it last told us anything itself; `introduced`: it is known to
    know us.
    """

    __slots__ = ("_row", "_table")

    def __init__(self, table: MemberTable, row: int) -> None:
        self._table = table
        self._row = row

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Peer) and other.node_id == self.node_id

    def __hash__(self) -> int:
        return hash(self.node_id)

    def __repr__(self) -> str:
        return f"Peer({self.record.name!r}, {self.standing!r})"

    @property
    def record(self) -> MemberRecord:
        return self._table.records[self._row]

    @property
    def node_id(self) -> NodeId:
        return self._table.records[self._row].node_id

    @property
    def incarnation(self) -> int:
        return self._table.incarnations[self._row]

    @property
    def heard_at(self) -> float:
        return self._table.heard_at[self._row]

    @property
    def since(self) -> float:
        return self._table.since[self._row]

    @property
    def state(self) -> Status:
        return _STATUSES[self._table.status[self._row]]

    @property
    def standing(self) -> Standing:
        table, row = self._table, self._row
        return Standing(table.records[row].epoch, table.incarnations[row], _STATUSES[table.status[row]])

    @property
    def is_gone(self) -> bool:
        return self._table.status[self._row] >= Status.DEAD

    @property
    def introduced(self) -> bool:
        return bool(self._table.flags[self._row] & _INTRODUCED)

    @introduced.setter
    def introduced(self, value: bool) -> None:
        self._flag(_INTRODUCED, value)

    @property
    def conflict_reported(self) -> bool:
        return bool(self._table.flags[self._row] & _CONFLICT_REPORTED)

    @conflict_reported.setter
    def conflict_reported(self, value: bool) -> None:
        self._flag(_CONFLICT_REPORTED, value)

    @property
    def violations(self) -> int:
        return self._table.violations.get(self._row, 0)

    @violations.setter
    def violations(self, value: int) -> None:
        self._table.violations[self._row] = value

    def _flag(self, flag: int, value: bool) -> None:
        flags = self._table.flags[self._row]
        self._table.flags[self._row] = flags | flag if value else flags & ~flag


class Peers(Sequence[Peer]):
    """Some peers in some order. Does not change when peers come or go."""

    __slots__ = ("_rows", "_table")

    def __init__(self, table: MemberTable, rows: array[int]) -> None:
        self._table = table
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Peer: ...

    @overload
    def __getitem__(self, index: slice) -> Peers: ...

    def __getitem__(self, index: int | slice) -> Peer | Peers:
        if isinstance(index, slice):
            return Peers(self._table, self._rows[index])
        return Peer(self._table, self._rows[index])

    def __iter__(self) -> Iterator[Peer]:
        table = self._table
        return (Peer(table, row) for row in self._rows)

    def ids(self) -> list[NodeId]:
        """Their node ids, in the same order."""
        records = self._table.records
        return [records[row].node_id for row in self._rows]
