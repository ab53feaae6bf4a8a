"""One origin's log: what its writer said of its anchors, as far as it is known here."""

from __future__ import annotations

import struct
from functools import lru_cache
from hashlib import blake2b

from kvcomm_p2p.protocol.anchors import AnchorMeta
from kvcomm_p2p.protocol.ids import AnchorId, ModelId, NodeId
from kvcomm_p2p.protocol.messages import HASH_BYTES, Del, Head, LogEntry, Put, pack_entry, read_entry

NO_HEAD = Head(0, 0)
STATES_REMEMBERED = 65536

_STATE = struct.Struct("<16sQQQQQ")


class OriginLog:
    """One origin's log as far as it is known here. Mutable; bounded by what `append` is given.

    `set_digest` is the exclusive or of the digests of all anchors listed. `whole_from`: what is superseded up to there
    may be missing already, so the set is that of its writer only once `max_seq` has reached it. `head`: the writer's
    latest word on the log.
    """

    __slots__ = ("_entries", "epoch", "gc_floor", "head", "max_seq", "puts", "set_digest", "whole_from")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.max_seq = 0
        self.gc_floor = 0
        self.puts = 0
        self.set_digest = 0
        self.whole_from = 0
        self.head = NO_HEAD
        self._entries: dict[AnchorId, LogEntry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __bool__(self) -> bool:
        """An empty log is still a log: everything in it may have been deleted, and that has to be told."""
        return True

    def append(self, entry: LogEntry) -> None:
        """Take in an entry above `max_seq`; it supersedes the earlier one of the same anchor."""
        earlier = self._entries.pop(entry.anchor_id, None)
        if earlier is not None and earlier.meta is not None:
            self.puts -= 1
            self.set_digest ^= earlier.digest
        self._entries[entry.anchor_id] = entry
        if entry.meta is not None:
            self.puts += 1
            self.set_digest ^= entry.digest
        self.max_seq = entry.seq

    def latest(self, anchor_id: AnchorId) -> LogEntry | None:
        return self._entries.get(anchor_id)

    def lists(self, anchor_id: AnchorId) -> bool:
        """Whether the origin has this anchor now."""
        entry = self._entries.get(anchor_id)
        return entry is not None and entry.meta is not None

    def anchor_ids(self) -> list[AnchorId]:
        """Anchors that the origin has now, in the order in which it told of them."""
        return [anchor_id for anchor_id, entry in self._entries.items() if entry.meta is not None]

    def after(self, seq: int) -> list[LogEntry]:
        """Entries above `seq`, ascending. Costs as much as it returns."""
        news: list[LogEntry] = []
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
        if self.puts == len(self._entries):
            return
        for entry in [entry for entry in self._entries.values() if entry.seq <= floor and entry.meta is None]:
            del self._entries[entry.anchor_id]

    @property
    def whole(self) -> bool:
        """Whether it lists what its writer listed when its log ended at `max_seq`."""
        return self.max_seq >= self.whole_from

    @property
    def contradicts_head(self) -> bool:
        """Whether the writer says that at this length the log lists something else."""
        return self.whole and 0 < self.head.seq == self.max_seq and self.head.digest != self.set_digest

    def state_hash(self, node_id: NodeId) -> int:
        """64 bits of all that two replicas of a log may differ in."""
        signed = self.head.seq if self.head.signature else 0
        return state_hash(node_id, self.epoch, self.max_seq, self.gc_floor, self.set_digest, signed)


def state_hash(
    node_id: NodeId, epoch: int, max_seq: int = 0, gc_floor: int = 0, set_digest: int = 0, signed: int = 0
) -> int:
    """See `OriginLog.state_hash`; by default of a log that nothing is known of."""
    packed = _STATE.pack(node_id, epoch, max_seq, gc_floor, set_digest, signed)
    return int.from_bytes(blake2b(packed, digest_size=HASH_BYTES).digest(), "little")


@lru_cache(maxsize=STATES_REMEMBERED)
def blank_state(node_id: NodeId, epoch: int) -> int:
    """`state_hash` of a log that nothing is known of. Also stands for the member itself in hashes of rosters."""
    return state_hash(node_id, epoch)


class OwnLog(OriginLog):
    """The log that this node writes. `model_id`: what its member record of this epoch names; entries do not name it again."""

    __slots__ = ("_deleted_at", "_floor_at", "_model_id")

    def __init__(self, epoch: int, model_id: ModelId) -> None:
        super().__init__(epoch)
        self._model_id = model_id
        self._deleted_at: dict[int, float] = {}
        self._floor_at = 0.0

    def put(self, meta: AnchorMeta) -> None:
        self._write(Put.of(self.max_seq + 1, meta, self._model_id))

    def delete(self, anchor_id: AnchorId, now: float) -> None:
        """Announce that an anchor is gone. Ignored for one that was never announced."""
        if self.lists(anchor_id):
            self._write(Del(self.max_seq + 1, anchor_id))
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

    def _write(self, entry: Put | Del) -> None:
        self.append(read_entry(pack_entry(entry), self._model_id))
