"""Who holds what, spread by push-pull reconciliation of per-origin logs.

Every node is the single writer of its own log: `Put` when an anchor becomes available, `Del` when it goes, numbered by
`seq` without reuse within an epoch. A replica holds everything of a log up to its `max_seq` (only the latest entry of
an anchor is kept), so "what do you lack" is a comparison of numbers. Deletions are told for `tombstone_s`, then the
writer raises `gc_floor`: whoever is still below it, and did not start from a snapshot above it, gets a new snapshot.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvcomm_p2p.protocol.anchors import AnchorMeta
from kvcomm_p2p.protocol.ids import AnchorId, NodeId
from kvcomm_p2p.protocol.messages import (
    COUNTER_MAX,
    DELTA_ENTRIES_MAX,
    Del,
    DigestEntry,
    MemberRecord,
    OriginDelta,
    Put,
    Status,
)

MUTED_ROUNDS = 50
"""Gossip rounds for which an origin that went over a limit is not listened to."""

ENTRY_BYTES_MAX = 160
"""Upper bound of a log entry's encoding, without its fingerprints."""


def entry_bytes_max(entry: Put | Del) -> int:
    """Upper bound of the entry's bytes on the wire."""
    return ENTRY_BYTES_MAX + len(entry.fingerprints) if isinstance(entry, Put) else 32


def member_bytes_max(member: MemberRecord) -> int:
    """Upper bound of the bytes of an OriginDelta without entries (a character takes at most 4 bytes)."""
    return 160 + 4 * (len(member.name) + len(member.control) + len(member.bulk)) + 10 * len(member.groups)


class Known(NamedTuple):
    """A member as membership knows it. `wanted`: its anchors are of interest (it has not left)."""

    member: MemberRecord
    incarnation: int
    wanted: bool
    status: Status = Status.ALIVE


class LogChange(NamedTuple):
    """What applying news did to the set of anchors of one origin. `reset`: everything known before is void."""

    reset: bool
    put: tuple[AnchorMeta, ...]
    deleted: tuple[AnchorId, ...]


class OriginLog:
    """One origin's log as far as it is known here. Mutable; bounded by what `apply` and `append` let in."""

    __slots__ = ("_entries", "_seq_of", "epoch", "gc_floor", "max_seq", "puts")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.max_seq = 0
        self.gc_floor = 0
        self.puts = 0
        self._entries: dict[int, Put | Del] = {}
        self._seq_of: dict[AnchorId, int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __bool__(self) -> bool:
        """An empty log is still a log: everything in it may have been deleted, and that has to be told."""
        return True

    def append(self, entry: Put | Del) -> None:
        """Take in an entry above `max_seq`; it supersedes the earlier one of the same anchor."""
        earlier = self._seq_of.pop(entry.anchor_id, None)
        if earlier is not None:
            self.puts -= isinstance(self._entries.pop(earlier), Put)
        self._entries[entry.seq] = entry
        self._seq_of[entry.anchor_id] = entry.seq
        self.puts += isinstance(entry, Put)
        self.max_seq = entry.seq

    def latest(self, anchor_id: AnchorId) -> Put | Del | None:
        seq = self._seq_of.get(anchor_id)
        return None if seq is None else self._entries[seq]

    def anchor_ids(self) -> list[AnchorId]:
        """Anchors that the origin has now, in the order in which it told of them."""
        return [entry.anchor_id for entry in self._entries.values() if isinstance(entry, Put)]

    def after(self, seq: int) -> list[Put | Del]:
        """Entries above `seq`, ascending. Costs as much as it returns."""
        news: list[Put | Del] = []
        for entry in reversed(self._entries.values()):
            if entry.seq <= seq:
                break
            news.append(entry)
        news.reverse()
        return news

    def raise_floor(self, floor: int) -> None:
        """Forget deletions up to `floor`. Ignored unless everything up to there is known."""
        if not self.gc_floor < floor <= self.max_seq:
            return
        self.gc_floor = floor
        for seq in [seq for seq, entry in self._entries.items() if seq <= floor and isinstance(entry, Del)]:
            del self._seq_of[self._entries.pop(seq).anchor_id]


class OwnLog(OriginLog):
    """The log that this node writes."""

    __slots__ = ("_deleted_at", "_floor_at")

    def __init__(self, epoch: int) -> None:
        super().__init__(epoch)
        self._deleted_at: dict[int, float] = {}
        self._floor_at = 0.0

    def put(self, meta: AnchorMeta) -> None:
        self.append(Put.of(self.max_seq + 1, meta))

    def delete(self, anchor_id: AnchorId, now: float) -> None:
        """Announce that an anchor is gone. Ignored for one that was never announced."""
        if isinstance(self.latest(anchor_id), Put):
            self.append(Del(self.max_seq + 1, anchor_id))
            self._deleted_at[self.max_seq] = now

    def collect(self, now: float, tombstone_s: float) -> None:
        """Raise the floor over deletions older than `tombstone_s`, in steps of a quarter of it, so that a newcomer who
        is still receiving its snapshot is rarely overtaken."""
        if now - self._floor_at < tombstone_s / 4:
            return
        self._floor_at = now
        old = [seq for seq, deleted_at in self._deleted_at.items() if now - deleted_at >= tombstone_s]
        for seq in old:
            del self._deleted_at[seq]
        if old:
            self.raise_floor(old[-1])


class Replicas:
    """The logs of all origins that are known here, this node's own among them."""

    def __init__(self, me: NodeId, epoch: int, *, anchors_per_peer_max: int, anchors_max: int) -> None:
        self.me = me
        self.own = OwnLog(epoch)
        self._logs: dict[NodeId, OriginLog] = {me: self.own}
        self._anchors_per_peer_max = anchors_per_peer_max
        self._anchors_max = anchors_max
        self._entries_held = 0
        self._muted: dict[NodeId, int] = {}
        self.refused = 0

    @property
    def anchors(self) -> int:
        """Log entries of peers held here."""
        return self._entries_held

    def log(self, origin: NodeId) -> OriginLog | None:
        return self._logs.get(origin)

    def anchors_of(self, origin: NodeId) -> int:
        log = self._logs.get(origin)
        return 0 if log is None else log.puts

    def renew(self, epoch: int) -> None:
        """Our own log starts anew in a higher epoch, with everything that we still hold."""
        log = OwnLog(epoch)
        for entry in self.own.after(0):
            if isinstance(entry, Put):
                log.put(entry.meta())
        self.own = self._logs[self.me] = log

    def forget(self, origin: NodeId) -> None:
        self._muted.pop(origin, None)
        log = self._logs.pop(origin, None)
        if log is not None:
            self._entries_held -= len(log)

    def collect(self, now: float, tombstone_s: float) -> None:
        """Once per gossip round: forget old deletions of our own, and listen again to origins over the limits some
        day."""
        self.own.collect(now, tombstone_s)
        self._muted = {origin: rounds - 1 for origin, rounds in self._muted.items() if rounds > 1}

    def digest(self, members: Iterable[Known]) -> tuple[DigestEntry, ...]:
        """What is known here of `members`, in the order given. Unwanted and muted ones look complete: tell me
        nothing."""
        return tuple(self._digest_entry(known) for known in members)

    def _digest_entry(self, known: Known) -> DigestEntry:
        origin, epoch = known.member.node_id, known.member.epoch
        log = self._logs.get(origin)
        if not known.wanted or origin in self._muted:
            return DigestEntry(origin, epoch, known.incarnation, COUNTER_MAX, COUNTER_MAX, known.status)
        if log is None or log.epoch != epoch:
            return DigestEntry(origin, epoch, known.incarnation, 0, 0, known.status)
        return DigestEntry(origin, epoch, known.incarnation, log.max_seq, log.gc_floor, known.status)

    def deltas(
        self, members: Iterable[Known], digest: Iterable[DigestEntry], bytes_max: int
    ) -> tuple[OriginDelta, ...]:
        """What the writer of `digest` lacks of `members`: unknown origins first, then those with the fewest news.

        Stays within `bytes_max`; a log that does not fit is sent up to some entry and continued next time.
        """
        known = {entry.node_id: entry for entry in digest}
        stale: list[tuple[bool, int, NodeId, MemberRecord, int, _Start]] = []
        for member, incarnation, *_ in members:
            theirs = known.get(member.node_id)
            start = self._start_for(member, theirs)
            if start is not None:
                stale.append((theirs is not None, len(start.news), member.node_id, member, incarnation, start))
        stale.sort(key=lambda item: item[:3])
        deltas: list[OriginDelta] = []
        left = bytes_max
        for *_, member, incarnation, start in stale:
            delta, used = self._cut(member, incarnation, start, left)
            if delta is not None:
                deltas.append(delta)
                left -= used
        return tuple(deltas)

    def _start_for(self, member: MemberRecord, theirs: DigestEntry | None) -> _Start | None:
        log = self._logs.get(member.node_id)
        if log is None or log.epoch != member.epoch:
            log = None
        if theirs is None or theirs.epoch < member.epoch:
            return _Start(log, 0, False, [] if log is None else log.after(0))
        if log is None or theirs.epoch > member.epoch:
            return None
        if log.gc_floor > theirs.max_seq and log.gc_floor > theirs.gc_floor:
            return _Start(log, 0, True, log.after(0))
        if log.max_seq <= theirs.max_seq:
            return None
        return _Start(log, theirs.max_seq, False, log.after(theirs.max_seq))

    def _cut(
        self, member: MemberRecord, incarnation: int, start: _Start, bytes_max: int
    ) -> tuple[OriginDelta | None, int]:
        used = member_bytes_max(member)
        if used > bytes_max:
            return None, 0
        taken: list[Put | Del] = []
        for entry in start.news:
            size = entry_bytes_max(entry)
            if used + size > bytes_max or len(taken) == DELTA_ENTRIES_MAX:
                break
            used += size
            taken.append(entry)
        log = start.log
        complete = len(taken) == len(start.news)
        if not complete and not taken and (start.from_seq or start.reset):
            return None, 0
        to_seq = (log.max_seq if log is not None else 0) if complete else (taken[-1].seq if taken else start.from_seq)
        floor = log.gc_floor if log is not None else 0
        delta = OriginDelta(member, incarnation, start.reset, start.from_seq, to_seq, floor, tuple(taken))
        return delta, used

    def apply(self, delta: OriginDelta) -> LogChange | None:
        """Take in news of a peer. None: nothing to apply (already known, older epoch, a gap, or over a limit)."""
        origin, epoch = delta.member.node_id, delta.member.epoch
        log = self._logs.get(origin)
        if origin == self.me or (log is not None and log.epoch > epoch):
            return None
        fresh = log is None or log.epoch < epoch
        if not fresh and log is not None and not self._continues(log, delta):
            return None
        if fresh and delta.from_seq:
            return None
        restart = fresh or delta.reset
        target = OriginLog(epoch) if restart or log is None else log
        if not self._fits(target, log, delta):
            self.refused += 1
            self._muted[origin] = MUTED_ROUNDS
            return None
        return self._install(origin, log, target, delta, restart)

    @staticmethod
    def _continues(log: OriginLog, delta: OriginDelta) -> bool:
        if delta.reset:
            # A snapshot is taken only by who needs it: a late duplicate must not throw newer entries away.
            return delta.gc_floor > log.max_seq and delta.gc_floor > log.gc_floor
        # Deletions up to the sender's floor are not in it: we must have seen them, or never have had their anchors.
        told = delta.gc_floor <= log.max_seq or delta.gc_floor <= log.gc_floor
        return told and delta.from_seq <= log.max_seq < delta.to_seq

    def _fits(self, target: OriginLog, replaced: OriginLog | None, delta: OriginDelta) -> bool:
        """Deletions count as entries: a peer cannot fill memory with them either (twice the anchors, since honest
        peers keep them for `tombstone_s`)."""
        known = len(target) + sum(entry.seq > target.max_seq for entry in delta.entries)
        if known > 2 * self._anchors_per_peer_max:
            return False
        freed = len(replaced) if replaced is not None else 0
        return self._entries_held - freed + known <= 2 * self._anchors_max

    def _install(
        self, origin: NodeId, old: OriginLog | None, log: OriginLog, delta: OriginDelta, restart: bool
    ) -> LogChange:
        before = 0 if old is None else len(old)
        put: dict[AnchorId, AnchorMeta] = {}
        deleted: dict[AnchorId, None] = {}
        for entry in delta.entries:
            if entry.seq <= log.max_seq:
                continue
            if isinstance(entry, Put):
                put[entry.anchor_id] = entry.meta()
                deleted.pop(entry.anchor_id, None)
            else:
                put.pop(entry.anchor_id, None)
                deleted[entry.anchor_id] = None
            log.append(entry)
        log.max_seq = max(log.max_seq, delta.to_seq)
        if restart:
            # Whoever starts now has no entry that was deleted before this floor, even while its snapshot is incomplete.
            log.gc_floor = delta.gc_floor
        log.raise_floor(delta.gc_floor)
        self._logs[origin] = log
        self._entries_held += len(log) - before
        return LogChange(restart, tuple(put.values()), tuple(deleted))

    def learn_floor(self, entry: DigestEntry) -> None:
        """A peer's digest says that deletions up to its floor may be forgotten."""
        log = self._logs.get(entry.node_id)
        if log is not None and entry.node_id != self.me and log.epoch == entry.epoch:
            before = len(log)
            log.raise_floor(entry.gc_floor)
            self._entries_held -= before - len(log)


class _Start(NamedTuple):
    log: OriginLog | None
    from_seq: int
    reset: bool
    news: list[Put | Del]
