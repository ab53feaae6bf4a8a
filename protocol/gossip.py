"""Who holds what: replicas of per-origin logs, what a peer lacks of them, and what its news change.

Every node is the single writer of its own log: `Put` when an anchor becomes available, `Del` when it goes, numbered by
`seq` without reuse within an epoch. A replica holds everything of a log up to its `max_seq` (only the latest entry of
an anchor is kept), so "what do you lack" is a comparison of numbers. Deletions are told for `tombstone_s`, then the
writer raises `gc_floor`: whoever is still below it, and did not start from a snapshot above it, gets a new snapshot.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import NamedTuple

from kvcomm_p2p.protocol.anchors import AnchorMeta
from kvcomm_p2p.protocol.ids import AnchorId, ModelId, NodeId
from kvcomm_p2p.protocol.log_bytes import DELTA_BYTES_MIN, member_bytes_max
from kvcomm_p2p.protocol.member_table import KnownMembers
from kvcomm_p2p.protocol.messages import (
    DELTA_ENTRIES_MAX,
    HASH_BYTES,
    DigestEntry,
    Head,
    LogEntry,
    MemberRecord,
    OriginDelta,
    read_entry,
)
from kvcomm_p2p.protocol.origin_log import OriginLog, OwnLog
from kvcomm_p2p.protocol.roster import States

MUTED_ROUNDS = 50
"""Gossip rounds for which an origin that went over a limit is not listened to."""


class Have(NamedTuple):
    """How much of one log somebody has. `set_digest` is None where it is not known."""

    epoch: int
    max_seq: int
    gc_floor: int = 0
    set_digest: int | None = None
    signed: bool = False

    @classmethod
    def of(cls, entry: DigestEntry) -> Have:
        digest = int.from_bytes(entry.set_digest, "little") if entry.set_digest else None
        return cls(entry.epoch, entry.max_seq, entry.gc_floor, digest)


class LogChange(NamedTuple):
    """What applying news did to the set of anchors of one origin. `reset`: everything known before is void."""

    reset: bool
    put: tuple[AnchorMeta, ...]
    deleted: tuple[AnchorId, ...]


class Verdict(enum.Enum):
    """What became of a delta."""

    APPLIED = "applied"
    KNOWN = "known"
    """Nothing new, or of an older epoch."""
    GAP = "gap"
    """It continues beyond what is known here: ask for what is between."""
    REFUSED = "refused"
    """Over a limit, or not listened to."""
    DIVERGED = "diverged"
    """What is known here is not what the writer says: it was thrown away, ask for all."""


class Cut(NamedTuple):
    """A delta and its bytes at most; `whole`: nothing of the log is left to send."""

    delta: OriginDelta
    bytes: int
    whole: bool


class Replicas:
    """The logs of all origins that are known here, this node's own among them. `states`: of those that count in digests."""

    def __init__(
        self, me: NodeId, epoch: int, model_id: ModelId, *, anchors_per_peer_max: int, anchors_max: int
    ) -> None:
        """`epoch`, `model_id`: as our own member record says."""
        self.me = me
        self.own = OwnLog(epoch, model_id)
        self._logs: dict[NodeId, OriginLog] = {me: self.own}
        self._anchors_per_peer_max = anchors_per_peer_max
        self._anchors_max = anchors_max
        self._entries_held = 0
        self._muted: dict[NodeId, int] = {}
        self.states = States()
        self.states.place(me, epoch)
        self._own_hashed: tuple[int, ...] = ()
        self.refused = 0
        self.diverged = 0

    def log(self, origin: NodeId) -> OriginLog | None:
        return self._logs.get(origin)

    def anchors_of(self, origin: NodeId) -> int:
        log = self._logs.get(origin)
        return 0 if log is None else log.puts

    def renew(self, epoch: int, model_id: ModelId) -> None:
        """Our own log starts anew in a higher epoch, with everything that it lists."""
        log = OwnLog(epoch, model_id)
        for entry in self.own.after(0):
            if entry.meta is not None:
                log.put(entry.meta)
        self.own = self._logs[self.me] = log
        self._own_hashed = ()

    def forget(self, origin: NodeId) -> None:
        self._muted.pop(origin, None)
        log = self._logs.pop(origin, None)
        if log is not None:
            self._entries_held -= len(log)
            self._touch(origin)

    def mute(self, origin: NodeId) -> None:
        """Do not listen to its news for MUTED_ROUNDS."""
        self._muted[origin] = MUTED_ROUNDS

    def is_muted(self, origin: NodeId) -> bool:
        return origin in self._muted

    def collect(self, now: float, tombstone_s: float) -> None:
        """Once per gossip round: forget old deletions of our own, and listen again to origins over the limits some
        day."""
        self.own.collect(now, tombstone_s)
        if self._muted:
            self._muted = {origin: rounds - 1 for origin, rounds in self._muted.items() if rounds > 1}

    # ----------------------------------------------------------------------------------------------------------- hashes

    def begin(self, known: KnownMembers) -> None:
        """These members count, of whose logs nothing is known yet."""
        self.states = States.of(known)
        self.count(self.me, self.own.epoch)
        self._own_hashed = ()

    def count(self, origin: NodeId, epoch: int | None) -> None:
        """From now on hashes are about this epoch of its log; None: not about it at all."""
        self.states.place(origin, epoch)
        if origin in self._logs:
            self._touch(origin)

    def _touch(self, origin: NodeId) -> None:
        """Its log changed."""
        log = self._logs.get(origin)
        if log is None:
            self.states.unset(origin)
        else:
            self.states.set(origin, log.epoch, log.max_seq, log.state_hash(origin))

    def _hash_own(self) -> None:
        own = self.own
        hashed = (own.max_seq, own.gc_floor, own.set_digest, own.head.seq if own.head.signature else 0)
        if hashed != self._own_hashed:
            self._own_hashed = hashed
            self._touch(self.me)

    def state(self) -> bytes:
        """Hash of the state of all logs that count. Costs nothing that grows with their number."""
        self._hash_own()
        return self.states.total()

    def bucket_hashes(self) -> list[int]:
        """64 bits per bucket."""
        self._hash_own()
        return self.states.buckets()

    def rows(self, mask: int) -> bytes:
        """See `States.rows`."""
        self._hash_own()
        return self.states.rows(mask)

    def differing(self, mask: int, theirs: bytes) -> list[tuple[NodeId, int]] | None:
        """See `States.differing`."""
        self._hash_own()
        return self.states.differing(mask, theirs)

    def have(self, origin: NodeId, epoch: int) -> Have:
        """How much of this epoch of a log is known here."""
        log = self._logs.get(origin)
        if log is None or log.epoch != epoch:
            return Have(epoch, 0, 0, 0)
        return Have(epoch, log.max_seq, log.gc_floor, log.set_digest)

    # ------------------------------------------------------------------------------------------------------ news for others

    def lacks(self, origin: NodeId, theirs: Have | None) -> int | None:
        """How many numbers of a log somebody who has `theirs` lacks, at most; None if nothing can be told."""
        log = self._logs.get(origin)
        if log is None or (theirs is not None and theirs.epoch > log.epoch):
            return None
        if theirs is None or theirs.epoch < log.epoch:
            return log.max_seq
        if log.gc_floor > theirs.max_seq and log.gc_floor > theirs.gc_floor:
            return len(log)
        if log.max_seq > theirs.max_seq:
            return log.max_seq - theirs.max_seq
        differs = theirs.set_digest is not None and theirs.set_digest != log.set_digest
        told = differs or log.gc_floor > theirs.gc_floor or bool(log.head.signature)
        return 0 if log.max_seq == theirs.max_seq and told else None

    def cut(
        self, origin: NodeId, theirs: Have | None, bytes_max: int, member: MemberRecord | None, incarnation: int
    ) -> Cut | None:
        """News of a log for somebody who has `theirs`, in at most `bytes_max`; None if there is nothing to tell or no
        room for any of it. `member`: for who does not know the origin."""
        if self.lacks(origin, theirs) is None:
            return None
        log = self._logs[origin]
        fresh = theirs is None or theirs.epoch < log.epoch
        start = 0 if theirs is None or fresh else theirs.max_seq
        reset = theirs is not None and not fresh and log.gc_floor > start and log.gc_floor > theirs.gc_floor
        start = 0 if reset else start
        news = log.after(start)
        used = DELTA_BYTES_MIN + (member_bytes_max(member) if member is not None else 0)
        if used > bytes_max:
            return None
        taken: list[bytes] = []
        last = start
        for entry in news:
            size = entry.wire_bytes
            if used + size > bytes_max or len(taken) == DELTA_ENTRIES_MAX:
                break
            used += size
            taken.append(entry.raw)
            last = entry.seq
        whole = len(taken) == len(news)
        if not taken and not whole and member is None:
            return None
        head = self._head(log)
        delta = OriginDelta(
            node_id=origin,
            epoch=log.epoch,
            reset=reset,
            from_seq=start,
            to_seq=log.max_seq if whole else last,
            gc_floor=log.gc_floor,
            entries=tuple(taken),
            log_seq=max(log.max_seq, log.whole_from),
            head_seq=head.seq,
            head_digest=head.digest.to_bytes(HASH_BYTES, "little"),
            head_signature=head.signature,
            member=member,
            incarnation=incarnation,
        )
        return Cut(delta, used, whole)

    def _head(self, log: OriginLog) -> Head:
        """The writer's latest word, as far as it is known here; our own is always up to date."""
        unsigned = log is self.own and not log.head.signature
        return Head(log.max_seq, log.set_digest) if unsigned else log.head

    def introduction(self, member: MemberRecord, incarnation: int, room: int, entries_room: int) -> Cut | None:
        """A member for somebody who does not know it, with as much of its log as there is room for."""
        least = DELTA_BYTES_MIN + member_bytes_max(member)
        if least > room:
            return None
        log = self._logs.get(member.node_id)
        known = log is not None and log.epoch == member.epoch
        cut = (
            self.cut(member.node_id, None, min(room, max(entries_room, least)), member, incarnation) if known else None
        )
        if cut is not None:
            return cut
        delta = OriginDelta(member.node_id, member.epoch, False, 0, 0, 0, (), member=member, incarnation=incarnation)
        return Cut(delta, least, not known)

    # ---------------------------------------------------------------------------------------------------- news from others

    def apply(self, delta: OriginDelta, model_id: ModelId) -> tuple[Verdict, LogChange | None]:
        """Take in news of a peer, whose member record of this epoch names the model."""
        origin, epoch = delta.node_id, delta.epoch
        log = self._logs.get(origin)
        if origin == self.me or (log is not None and log.epoch > epoch):
            return Verdict.KNOWN, None
        if origin in self._muted:
            return Verdict.REFUSED, None
        fresh = log is None or log.epoch < epoch
        if fresh and delta.from_seq:
            return Verdict.GAP, None
        if not fresh and log is not None and not self._continues(log, delta):
            return self._not_continued(origin, log, delta)
        restart = fresh or delta.reset
        target = OriginLog(epoch) if restart or log is None else log
        entries = [read_entry(raw, model_id) for raw in delta.entries]
        news = [entry for entry in entries if entry.seq > target.max_seq]
        if not self._fits(target, log, len(news)):
            self.refused += 1
            self.mute(origin)
            return Verdict.REFUSED, None
        change = self._install(log, target, delta, news, restart)
        return self._checked(origin, target, change)

    @staticmethod
    def _continues(log: OriginLog, delta: OriginDelta) -> bool:
        if delta.reset:
            # A snapshot is taken only by who needs it: a late duplicate must not throw newer entries away.
            return delta.gc_floor > log.max_seq and delta.gc_floor > log.gc_floor
        # Deletions up to the sender's floor are not in it: we must have seen them, or never have had their anchors.
        told = delta.gc_floor <= log.max_seq or delta.gc_floor <= log.gc_floor
        return told and delta.from_seq <= log.max_seq < delta.to_seq

    def _not_continued(self, origin: NodeId, log: OriginLog, delta: OriginDelta) -> tuple[Verdict, LogChange | None]:
        if delta.to_seq > log.max_seq:
            return Verdict.GAP, None
        if delta.to_seq == log.max_seq:
            self._learn_head(log, delta)
            before = len(log)
            log.raise_floor(delta.gc_floor)
            self._entries_held -= before - len(log)
            self._touch(origin)
            verdict, change = self._checked(origin, log, None)
            return (verdict, change) if verdict is Verdict.DIVERGED else (Verdict.KNOWN, None)
        return Verdict.KNOWN, None

    def _checked(self, origin: NodeId, log: OriginLog, change: LogChange | None) -> tuple[Verdict, LogChange | None]:
        """A log that is not what its writer says of it is thrown away, unless that word still has to be verified."""
        if not log.contradicts_head or log.head.signature:
            return Verdict.APPLIED, change
        return self.discard(origin)

    def discard(self, origin: NodeId) -> tuple[Verdict, LogChange]:
        """What is known of this log is wrong: forget it and count that."""
        self.diverged += 1
        self.forget(origin)
        return Verdict.DIVERGED, LogChange(True, (), ())

    def _fits(self, target: OriginLog, replaced: OriginLog | None, more: int) -> bool:
        """Deletions count as entries: a peer cannot fill memory with them either (twice the anchors, since honest
        peers keep them for `tombstone_s`)."""
        known = len(target) + more
        if known > 2 * self._anchors_per_peer_max:
            return False
        freed = len(replaced) if replaced is not None else 0
        return self._entries_held - freed + known <= 2 * self._anchors_max

    def _install(
        self, old: OriginLog | None, log: OriginLog, delta: OriginDelta, news: Iterable[LogEntry], restart: bool
    ) -> LogChange:
        before = 0 if old is None else len(old)
        put: dict[AnchorId, AnchorMeta] = {}
        deleted: dict[AnchorId, None] = {}
        for entry in news:
            if entry.meta is not None:
                put[entry.anchor_id] = entry.meta
                deleted.pop(entry.anchor_id, None)
            else:
                put.pop(entry.anchor_id, None)
                deleted[entry.anchor_id] = None
            log.append(entry)
        log.max_seq = max(log.max_seq, delta.to_seq)
        log.whole_from = max(log.whole_from, delta.log_seq)
        if restart:
            # Whoever starts now has no entry that was deleted before this floor, even while its snapshot is incomplete.
            log.gc_floor = delta.gc_floor
        log.raise_floor(delta.gc_floor)
        self._learn_head(log, delta)
        self._logs[delta.node_id] = log
        self._entries_held += len(log) - before
        self._touch(delta.node_id)
        return LogChange(restart, tuple(put.values()), tuple(deleted))

    @staticmethod
    def _learn_head(log: OriginLog, delta: OriginDelta) -> None:
        """Unsigned words are only worth something about the present; signed ones count once they are verified."""
        if not delta.head_signature and not log.head.signature and delta.head_seq >= log.max_seq:
            log.head = delta.head

    def accept_head(self, origin: NodeId, head: Head) -> None:
        """A signed head was verified."""
        log = self._logs.get(origin)
        if log is not None and (head.seq > log.head.seq or not log.head.signature):
            log.head = head
            self._touch(origin)

    def learn_floor(self, entry: DigestEntry) -> None:
        """A peer's digest says that deletions up to its floor may be forgotten."""
        log = self._logs.get(entry.node_id)
        if log is not None and entry.node_id != self.me and log.epoch == entry.epoch:
            before = len(log)
            log.raise_floor(entry.gc_floor)
            self._entries_held -= before - len(log)
            self._touch(entry.node_id)
