"""Bytes of KV blocks: one immutable buffer per block, named by handles that cannot be mistaken for a later block.

There is no slab to recycle: a buffer lives as long as anybody refers to it (a reader's view, a send in progress), so
what is being read can neither change nor vanish, whatever is dropped meanwhile. A buffer is plain memory, or a part of a
sealed region that peers on this machine may read as well (`net.shared_memory`).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from kvcomm_p2p.net.shared_memory import Draft, Region, SharedMemory
from kvcomm_p2p.protocol.anchors import BlockHandle

ADOPT_BYTES_MIN = 64 * 1024
"""Received payloads below this are copied: the transport packs small ones into shared buffers that adopting would
pin."""

_store_ids = itertools.count(1)


class StaleHandle(KeyError):
    """The store does not (or not yet wholly) have the block of this handle."""


class Place(NamedTuple):
    """Where a block stands in shared memory: at `offset` of the region `file_id` that this process has open."""

    descriptor: int
    file_id: int
    offset: int


class _Block:
    """`data` is None until bytes arrive; `gaps` are the byte ranges that are still missing, ascending. `region`: the one
    that `data` is a part of, from `offset`; a block is one user of it."""

    __slots__ = ("data", "gaps", "generation", "kv_bytes", "offset", "references", "region")

    def __init__(self, generation: int, kv_bytes: int, data: memoryview | None) -> None:
        self.generation = generation
        self.kv_bytes = kv_bytes
        self.data = data
        self.region: Region | None = None
        self.offset = 0
        self.gaps: list[tuple[int, int]] = [] if data is not None else [(0, kv_bytes)]
        self.references = 1

    @property
    def held_bytes(self) -> int:
        return 0 if self.data is None else self.kv_bytes


class BlockStore:
    """All methods may be called from any thread and cost O(1), apart from copies of partial writes.

    A handle carries references: `put` and `reserve` give the first, `retain` adds one, `drop` takes one away; at zero
    the block is forgotten and its slot reused under a new generation.
    """

    def __init__(self, shared: SharedMemory | None = None) -> None:
        """None: everything is in plain memory."""
        self.shared = shared
        self._id = next(_store_ids)
        self._lock = threading.Lock()
        self._blocks: list[_Block | None] = []
        self._generations: list[int] = []
        self._free: list[int] = []
        self._held_bytes = 0
        self._reserved_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of memory behind live handles (partly written blocks count whole)."""
        return self._held_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes promised by `reserve` for which no memory was taken yet."""
        return self._reserved_bytes

    def __len__(self) -> int:
        """Number of live handles."""
        return len(self._blocks) - len(self._free)

    def put(self, buffer: bytes | bytearray | memoryview) -> BlockHandle:
        """Adopt a C-contiguous buffer without copying. Whoever made it must not write to it any more.

        Raises ValueError if it is empty.
        """
        data = _flat(buffer)
        if not data.nbytes:
            raise ValueError("a block cannot be empty")
        with self._lock:
            return self._insert(data.nbytes, data)

    def compose(self, sizes: Sequence[int], *, shared: bool = True) -> Composition:
        """Memory for several blocks that go into the store together: such as peers on this machine can read where that is
        possible, unless `shared` is False (nobody may be served).

        Raises ValueError unless there are sizes and all are above 0.
        """
        if not sizes or min(sizes) <= 0:
            raise ValueError(f"blocks of {list(sizes)} bytes cannot be composed")
        return Composition(self, sizes, self.shared.draft(sizes) if self.shared and shared else None)

    def reserve(self, kv_bytes: int) -> BlockHandle:
        """A handle for a block that is to arrive. Takes no memory yet. Raises ValueError unless `kv_bytes` > 0."""
        if kv_bytes <= 0:
            raise ValueError(f"a block of {kv_bytes} bytes cannot be reserved")
        with self._lock:
            return self._insert(kv_bytes, None)

    def write(self, handle: BlockHandle, offset: int, payload: bytes | memoryview) -> None:
        """Fill bytes [offset, offset + len(payload)) of a reserved block.

        A payload that is the whole block is adopted without a copy (if not tiny) and must not change any more. Only one
        thread may write to a handle. Raises StaleHandle, and ValueError if the range is out of bounds or written
        already.
        """
        data = _flat(payload)
        end = offset + data.nbytes
        whole_memory: memoryview | None = None
        with self._lock:
            block = self._block(handle)
            if not any(start <= offset < end <= stop for start, stop in block.gaps):
                raise ValueError(f"bytes [{offset}, {end}) of a {block.kv_bytes}-byte block are not missing")
            if data.nbytes == block.kv_bytes and data.nbytes >= ADOPT_BYTES_MIN:
                whole_memory = data
            elif block.data is None:
                whole_memory = memoryview(bytearray(block.kv_bytes))
            if whole_memory is not None:
                block.data = whole_memory
                self._reserved_bytes -= block.kv_bytes
                self._held_bytes += block.kv_bytes
            memory = block.data
        assert memory is not None
        if memory is not data:
            memory[offset:end] = data
        with self._lock:
            block.gaps = _without(block.gaps, offset, end)

    def reset(self, handle: BlockHandle) -> None:
        """What was written to a reserved block is forgotten: it is as it was reserved. Views taken before stay valid.

        Changes nothing for a stale handle, and for a block that others see already (more than one reference) or that
        stands in shared memory.
        """
        with self._lock:
            try:
                block = self._block(handle)
            except StaleHandle:
                return
            if block.references != 1 or block.region is not None:
                return
            if block.data is not None:
                block.data = None
                self._held_bytes -= block.kv_bytes
                self._reserved_bytes += block.kv_bytes
            block.gaps = [(0, block.kv_bytes)]

    def adopt_shared(
        self,
        handle: BlockHandle,
        pid: int,
        place: Place,
        verify: Callable[[memoryview], bool],
    ) -> bool:
        """Fill a reserved block with what stands at `place` of a region that process `pid` has open, without copying.

        Whether `verify` says yes to the bytes. Not adopted, and the block left as it was, if it does not. Blocks for as
        long as `verify` takes. Raises NotShared (a peer's fault), StaleHandle, and ValueError if the block is whole.
        """
        if self.shared is None:
            raise ValueError("this store shares no memory")
        with self._lock:
            kv_bytes = self._block(handle).kv_bytes
        region = self.shared.attach(pid, place.descriptor, place.file_id, place.offset + kv_bytes)
        taken = False
        try:
            data = region.view[place.offset : place.offset + kv_bytes]
            if not verify(data):
                return False
            with self._lock:
                block = self._block(handle)
                if not block.gaps:
                    raise ValueError(f"{handle} is whole already")
                self._held_bytes += kv_bytes - block.held_bytes
                self._reserved_bytes -= kv_bytes - block.held_bytes
                block.data, block.gaps = data, []
                block.region, block.offset, taken = region, place.offset, True
            return True
        finally:
            if not taken:
                self.shared.leave(region)

    def place(self, handle: BlockHandle) -> Place | None:
        """Where peers on this machine can read the block; None if they cannot. Valid while the handle is."""
        with self._lock:
            block = self._block(handle)
            if block.region is None or block.region.descriptor < 0:
                return None
            return Place(block.region.descriptor, block.region.file_id, block.offset)

    def view(self, handle: BlockHandle) -> memoryview:
        """The block's bytes, read-only (uint8, flat). Valid for as long as the caller keeps it, even after `drop`.

        Raises StaleHandle if the handle was dropped or the block is not whole yet.
        """
        with self._lock:
            block = self._block(handle)
            if block.gaps or block.data is None:
                raise StaleHandle(f"{handle} is not whole yet")
            return block.data.toreadonly()

    def retain(self, handle: BlockHandle) -> None:
        """One more reference. Raises StaleHandle."""
        with self._lock:
            self._block(handle).references += 1

    def drop(self, handle: BlockHandle) -> bool:
        """One reference less. Views taken before stay valid. Returns False (and changes nothing) for a stale handle."""
        with self._lock:
            try:
                block = self._block(handle)
            except StaleHandle:
                return False
            block.references -= 1
            if block.references == 0:
                self._blocks[handle.slot] = None
                self._free.append(handle.slot)
                self._held_bytes -= block.held_bytes
                self._reserved_bytes -= block.kv_bytes - block.held_bytes
                if block.region is not None and self.shared is not None:
                    self.shared.leave(block.region)
            return True

    def put_all(
        self, buffers: Sequence[memoryview], region: Region | None, offsets: Sequence[int]
    ) -> tuple[BlockHandle, ...]:
        """`put` for several buffers, parts of a region of this store's `shared` from `offsets` if there is one."""
        handles = []
        with self._lock:
            for buffer, offset in zip(buffers, offsets, strict=True):
                handle = self._insert(buffer.nbytes, buffer)
                handles.append(handle)
                if region is not None and self.shared is not None:
                    block = self._block(handle)
                    block.region, block.offset = self.shared.use(region), offset
        return tuple(handles)

    def _insert(self, kv_bytes: int, data: memoryview | None) -> BlockHandle:
        if self._free:
            slot = self._free.pop()
            self._generations[slot] += 1
        else:
            slot = len(self._blocks)
            self._blocks.append(None)
            self._generations.append(0)
        block = _Block(self._generations[slot], kv_bytes, data)
        self._blocks[slot] = block
        self._held_bytes += block.held_bytes
        self._reserved_bytes += kv_bytes - block.held_bytes
        return BlockHandle(self._id, slot, block.generation)

    def _block(self, handle: BlockHandle) -> _Block:
        if handle.store == self._id and 0 <= handle.slot < len(self._blocks):
            block = self._blocks[handle.slot]
            if block is not None and block.generation == handle.generation:
                return block
        raise StaleHandle(handle)


class Composition:
    """Several blocks in the making: fill `buffers`, `finish`, `put`. One thread at a time. One that is never put costs
    nothing once it is forgotten."""

    def __init__(self, store: BlockStore, sizes: Sequence[int], draft: Draft | None) -> None:
        self._store = store
        self._draft = draft
        self._region: Region | None = None
        self._offsets: Sequence[int] = [0] * len(sizes) if draft is None else draft.offsets
        self.buffers = [np.empty(size, dtype=np.uint8).data for size in sizes] if draft is None else draft.buffers

    def finish(self) -> list[memoryview]:
        """Nothing changes any more: the blocks, read-only. `buffers` must not be in use (tensors, arrays) when called."""
        draft, self._draft = self._draft, None
        if draft is None:
            self.buffers = [_flat(buffer).toreadonly() for buffer in self.buffers]
        else:
            sizes = [buffer.nbytes for buffer in self.buffers]
            with suppress(BufferError, OSError):
                self._region = draft.seal()
            if self._region is None:
                self.buffers = draft.unsealed()
            else:
                view = self._region.view
                self.buffers = [view[at : at + size] for at, size in zip(self._offsets, sizes, strict=True)]
        return self.buffers

    def put(self) -> tuple[BlockHandle, ...]:
        """Handles of the finished blocks, one reference each."""
        return self._store.put_all(self.buffers, self._region, self._offsets)


def _flat(buffer: bytes | bytearray | memoryview) -> memoryview:
    view = memoryview(buffer)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _without(gaps: list[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    left: list[tuple[int, int]] = []
    for low, high in gaps:
        if stop <= low or high <= start:
            left.append((low, high))
            continue
        if low < start:
            left.append((low, start))
        if stop < high:
            left.append((stop, high))
    return left
