"""Which erasures a node remembers, and what follows from them by name; bounded per author, in all, and in time.

`pack` and `restore` carry it into the next life of the node, with the age that everything has by then.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta, Struct
from msgspec.structs import replace

from kvcomm_p2p.protocol.ids import ANCHOR_ID_BYTES, SEQUENCE_ID_BYTES, AnchorId, ChainHash, SequenceId
from kvcomm_p2p.protocol.kgrams import U64
from kvcomm_p2p.protocol.messages import ERASURE_S, Erasure

ERASURES_MAX = 4096
ERASURES_PER_AUTHOR_MAX = 512
"""Older ones of an author make room for its newer ones, and those of who has most for those of others."""

HASHES_MAX = 1 << 18
NAMES_MAX = 16_384
"""Anchors and ends of exact prefixes, and sequences, that are remembered as erased."""

PACKED_BYTES_MAX = 10 << 20
"""More than `pack` makes of a full memory."""

PACKED_VERSION = 1

_START_BYTES = 8


@dataclass(slots=True)
class Remembered:
    """`born`: when it was made, by our clock; `told`: it is for everybody, not for this node alone."""

    erasure: Erasure
    born: float
    told: bool


class _Kept(Struct, frozen=True, array_like=True):
    erasure: Erasure
    told: bool


class _Packed(Struct, frozen=True, array_like=True):
    """`names`: ids of erased anchors and chain hashes at their ends, which are as long, one behind the other; `cuts`: sequences,
    each with where erased content begins."""

    version: int
    kept: Annotated[tuple[_Kept, ...], Meta(max_length=ERASURES_MAX)]
    names: Annotated[bytes, Meta(max_length=NAMES_MAX * ANCHOR_ID_BYTES)]
    cuts: Annotated[bytes, Meta(max_length=NAMES_MAX * (SEQUENCE_ID_BYTES + _START_BYTES))]


class ErasureMemory:
    """Erasures by id, oldest first; erased anchors by id; and from where on sequences are erased. `changed`: something was
    added or removed since `pack`."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, Remembered] = OrderedDict()
        self._counts: dict[bytes, int] = {}
        self._hashes = 0
        self._erased: OrderedDict[AnchorId | ChainHash, None] = OrderedDict()
        self._cut: OrderedDict[SequenceId, int] = OrderedDict()
        self._tables: dict[int, U64] | None = {}
        self.changed = False

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, erasure_id: bytes) -> bool:
        return erasure_id in self._known

    def get(self, erasure_id: bytes) -> Remembered | None:
        return self._known.get(erasure_id)

    def told(self) -> Iterator[tuple[bytes, Erasure]]:
        """Those that are for everybody: id and erasure, in the order in which they came."""
        return ((identity, item.erasure) for identity, item in self._known.items() if item.told)

    def add(self, erasure: Erasure, now: float, *, told: bool) -> bool:
        """Remember one more, and the anchors that it names. False if it is known or has had its time. May forget others."""
        if erasure.erasure_id in self._known or erasure.age_s >= ERASURE_S:
            return False
        self.expire(now)
        self._make_room(erasure)
        self._known[erasure.erasure_id] = Remembered(erasure, now - erasure.age_s, told)
        author = _author(erasure)
        self._counts[author] = self._counts.get(author, 0) + 1
        self._hashes += len(erasure.hashes) // 8
        self._tables = None
        self.changed = True
        for anchor_id in erasure.anchor_ids:
            self.add_name(anchor_id)
        return True

    def expire(self, now: float) -> None:
        """Forget what has had its time; with the last erasure the names go, too."""
        old = [identity for identity, item in self._known.items() if now - item.born >= ERASURE_S]
        for identity in old:
            self._let_go(identity)
        if not self._known:
            self._erased.clear()
            self._cut.clear()

    def tables(self) -> Mapping[int, U64]:
        """The hashes of all stretches, ascending, by the length of a stretch in tokens."""
        if self._tables is None:
            parts: dict[int, list[U64]] = {}
            for item in self._known.values():
                if item.erasure.hashes:
                    hashes = np.frombuffer(item.erasure.hashes, "<u8").astype(np.uint64)
                    parts.setdefault(item.erasure.tokens, []).append(hashes)
            self._tables = {tokens: np.unique(np.concatenate(parts[tokens])) for tokens in sorted(parts)}
        return MappingProxyType(self._tables)

    # ------------------------------------------------------------------------------------------------------------- names

    def add_name(self, name: AnchorId | ChainHash) -> None:
        """An anchor was erased, or an exact prefix that ends so; none if it is empty."""
        if name and name not in self._erased:
            self._erased[name] = None
            self.changed = True
            if len(self._erased) > NAMES_MAX:
                self._erased.popitem(last=False)

    def add_cut(self, sequence_id: SequenceId, start: int) -> None:
        """What stands behind `start` of this sequence was computed with erased content in view."""
        if start < self._cut.get(sequence_id, start + 1):
            self._cut[sequence_id] = start
            self.changed = True
            if len(self._cut) > NAMES_MAX:
                self._cut.popitem(last=False)

    def has_name(self, name: AnchorId | ChainHash) -> bool:
        """Whether an anchor of this id was erased, or an exact prefix that ends so."""
        return name in self._erased

    def is_behind(self, sequence_id: SequenceId, end: int) -> bool:
        """Whether what ends at `end` of this sequence ends behind erased content, or in it."""
        cut = self._cut.get(sequence_id)
        return cut is not None and end > cut

    # -------------------------------------------------------------------------------------------------------- other lives

    def pack(self, now: float) -> bytes:
        """All of it, for `restore`; at most PACKED_BYTES_MAX. Clears `changed`."""
        self.expire(now)
        self.changed = False
        kept = tuple(_Kept(aged(item, now), item.told) for item in self._known.values())
        cuts = b"".join(sequence + start.to_bytes(_START_BYTES, "little") for sequence, start in self._cut.items())
        return msgspec.msgpack.encode(_Packed(PACKED_VERSION, kept, b"".join(self._erased), cuts))

    def restore(self, packed: bytes, now: float) -> None:
        """Remember again what was packed; time that passed meanwhile does not count. Raises ValueError for other bytes."""
        saved = _unpacked(packed)
        for item in saved.kept:
            self.add(item.erasure, now, told=item.told)
        for at in range(0, len(saved.names), ANCHOR_ID_BYTES):
            self.add_name(AnchorId(saved.names[at : at + ANCHOR_ID_BYTES]))
        row_bytes = SEQUENCE_ID_BYTES + _START_BYTES
        for at in range(0, len(saved.cuts), row_bytes):
            row = saved.cuts[at : at + row_bytes]
            self.add_cut(SequenceId(row[:SEQUENCE_ID_BYTES]), int.from_bytes(row[SEQUENCE_ID_BYTES:], "little"))
        self.changed = False

    # ------------------------------------------------------------------------------------------------------------ inside

    def _make_room(self, erasure: Erasure) -> None:
        author = _author(erasure)
        if self._counts.get(author, 0) >= ERASURES_PER_AUTHOR_MAX:
            self._evict(author)
        while len(self._known) >= ERASURES_MAX or self._hashes + len(erasure.hashes) // 8 > HASHES_MAX:
            self._evict(max(self._counts, key=lambda each: (self._counts[each], each)))

    def _evict(self, author: bytes) -> None:
        """The oldest of an author."""
        self._let_go(next(identity for identity, item in self._known.items() if _author(item.erasure) == author))

    def _let_go(self, identity: bytes) -> None:
        erasure = self._known.pop(identity).erasure
        author = _author(erasure)
        self._counts[author] -= 1
        if not self._counts[author]:
            del self._counts[author]
        self._hashes -= len(erasure.hashes) // 8
        self._tables = None
        self.changed = True


def count_packed(packed: bytes) -> int:
    """How many erasures `pack` has put there. Raises ValueError for bytes that it cannot have made."""
    return len(_unpacked(packed).kept)


def aged(item: Remembered, now: float) -> Erasure:
    """The erasure with the age that it has by now, in seconds."""
    return replace(item.erasure, age_s=min(max(0.0, now - item.born), ERASURE_S))


def _unpacked(packed: bytes) -> _Packed:
    try:
        saved = msgspec.msgpack.decode(packed, type=_Packed)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"these are no erasures: {error!s:.160}") from None
    row_bytes = SEQUENCE_ID_BYTES + _START_BYTES
    if saved.version != PACKED_VERSION:
        raise ValueError(f"erasures in version {saved.version}")
    if len(saved.names) % ANCHOR_ID_BYTES or len(saved.cuts) % row_bytes:
        raise ValueError("names of erased anchors are not whole")
    return saved


def _author(erasure: Erasure) -> bytes:
    return erasure.public_key or erasure.origin
