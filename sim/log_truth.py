"""What every origin wrote into its log, and whether others' copies are what it wrote: no invention, no resurrection, no loss."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcomm_p2p.protocol.ids import AnchorId, NodeId
from kvcomm_p2p.protocol.origin_log import OriginLog


@dataclass(slots=True)
class _Written:
    """One epoch of one origin: all entries of each anchor as (seq, whether it has it), ascending."""

    seq: int = 0
    entries: dict[AnchorId, list[tuple[int, bool]]] = field(default_factory=dict)

    def latest(self, anchor_id: AnchorId, seq: int) -> tuple[int, bool]:
        """The last entry of the anchor up to `seq`; (0, False) before the first."""
        found = (0, False)
        for entry in self.entries.get(anchor_id, ()):
            if entry[0] > seq:
                break
            found = entry
        return found


class LogTruth:
    """Follows the logs of a few nodes. Costs as much as there are entries, so it is for small worlds."""

    def __init__(self) -> None:
        self._written: dict[tuple[NodeId, int], _Written] = {}
        self._right: dict[tuple[NodeId, NodeId], tuple[int, int, int]] = {}

    def wrote(self, origin: NodeId, log: OriginLog) -> str:
        """The origin's own log as it is now. Returns what is wrong with it, "" if nothing is. Not for an epoch that the origin
        began twice, of which there is no one truth."""
        written = self._written.setdefault((origin, log.epoch), _Written())
        if log.max_seq == written.seq:
            return ""
        if log.max_seq < written.seq:
            return f"took back entries of its own log: {written.seq} became {log.max_seq}"
        for entry in log.after(written.seq):
            written.entries.setdefault(entry.anchor_id, []).append((entry.seq, entry.meta is not None))
        written.seq = log.max_seq
        return ""

    def compare(self, reader: NodeId, origin: NodeId, log: OriginLog) -> tuple[str, AnchorId | None]:
        """A copy of the origin's log at the reader: what is wrong with it ("": nothing), and which anchor that is about."""
        state = (log.epoch, log.max_seq, log.set_digest)
        if self._right.get((reader, origin)) == state:
            return "", None
        written = self._written.get((origin, log.epoch), _Written())
        if log.max_seq > written.seq:
            return f"knows {log.max_seq} entries of a log that has {written.seq}", None
        for entry in log.after(0):
            truth = written.latest(entry.anchor_id, log.max_seq)
            if entry.meta is not None and truth != (entry.seq, True):
                told = f"entry {truth[0]} says that it is gone" if truth[0] else "nothing was ever said of it"
                return (
                    f"believes at entry {log.max_seq} in an anchor put by entry {entry.seq}, but {told}",
                    entry.anchor_id,
                )
        for anchor_id, entries in written.entries.items():
            # What was superseded later may be missing until a snapshot is complete.
            seq, has = written.latest(anchor_id, log.max_seq)
            if has and not log.lists(anchor_id) and (log.whole or entries[-1][0] == seq):
                return f"knows entries up to {log.max_seq}, but not the anchor put by entry {seq}", anchor_id
        self._right[reader, origin] = state
        return "", None
