"""Sealed regions and the store that keeps blocks in them: nothing changes, nothing is left behind, nothing else is opened."""

from __future__ import annotations

import errno
import fcntl
import gc
import mmap
import os
import random
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcomm_p2p.net import shared_memory
from kvcomm_p2p.net.shared_memory import (
    REGION_BYTES_MIN,
    SEALS,
    Draft,
    NotShared,
    Region,
    SharedMemory,
    available,
    host_tag,
)
from kvcomm_p2p.protocol.anchors import BlockHandle
from kvcomm_p2p.protocol.messages import SHARED_BYTES_MAX
from kvcomm_p2p.store import BlockStore, Place, StaleHandle

SIZE = REGION_BYTES_MIN
F_ADD_SEALS, F_GET_SEALS = 1033, 1034


def open_descriptors() -> list[str]:
    """What this process has open, descriptor by descriptor, sorted."""
    named = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            named.append(str(entry.readlink()))
        except FileNotFoundError:  # the one that lists
            continue
    return sorted(named)


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:kvcomm")


@pytest.fixture(autouse=True, scope="module")
def garbage_of_others_is_gone() -> None:
    gc.collect()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before, mapped, files = open_descriptors(), mappings(), sorted(Path("/dev/shm").iterdir())
    yield
    gc.collect()
    assert open_descriptors() == before
    assert mappings() == mapped
    assert sorted(Path("/dev/shm").iterdir()) == files


def region_with(content: bytes) -> Region:
    draft = Draft([len(content)])
    draft.buffers[0][:] = content
    return draft.seal()


def fill(store: BlockStore, contents: list[bytes]) -> tuple[BlockHandle, ...]:
    composed = store.compose([len(content) for content in contents])
    for buffer, content in zip(composed.buffers, contents, strict=True):
        buffer[:] = content
    composed.finish()
    return composed.put()


# -------------------------------------------------------------------------------------------------------------- regions


def test_memory_is_shared_here_and_the_tag_says_with_whom() -> None:
    assert available()
    tag = host_tag(b"k" * 32)
    assert len(tag) == 16 and tag == host_tag(b"k" * 32) != host_tag(b"l" * 32)


@pytest.mark.parametrize("missing", ["memfd_create", "proc"])
def test_without_what_it_needs_there_is_no_tag(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing == "proc":  # a /proc of another process namespace: our own number means somebody else there

        def another(pid: int, descriptor: int, file_id: int, end: int) -> Region:
            raise NotShared(errno.ENOENT, "gone")

        monkeypatch.setattr(shared_memory, "_open_region", another)
    else:
        monkeypatch.delattr(os, "memfd_create")
    assert not available()
    assert host_tag(b"k" * 32) == b""


def test_nobody_can_change_a_region_not_even_its_maker() -> None:
    region = region_with(bytes(range(256)) * (SIZE // 256))
    assert fcntl.fcntl(region.descriptor, F_GET_SEALS) & SEALS == SEALS
    writable = os.open(f"/proc/self/fd/{region.descriptor}", os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            os.pwrite(writable, b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(writable, 0)
        with pytest.raises(PermissionError):
            os.ftruncate(writable, 2 * SIZE)
        with pytest.raises(PermissionError):
            mmap.mmap(writable, SIZE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(PermissionError):
            fcntl.fcntl(writable, F_ADD_SEALS, 0x10)
    finally:
        os.close(writable)
    with pytest.raises(TypeError):
        region.view[0] = 1
    assert region.view[255] == 255
    region.close()


def test_views_outlive_the_region_and_then_the_mapping_goes() -> None:
    before = mappings()
    region = region_with(b"abcd" * (SIZE // 4))
    view = region.view[4:8]
    region.close()
    del region
    assert bytes(view) == b"abcd" and mappings() == before + 1
    del view
    assert mappings() == before


def test_buffers_in_use_are_noticed_and_the_bytes_are_kept() -> None:
    draft = Draft([SIZE, 100])
    draft.buffers[0][:4], draft.buffers[1][:4] = b"abcd", b"efgh"
    held = memoryview(draft.buffers[1])
    with pytest.raises(BufferError):
        draft.seal()
    assert [bytes(view[:4]) for view in draft.unsealed()] == [b"abcd", b"efgh"]
    assert bytes(held[:4]) == b"efgh"


def test_a_draft_that_a_child_has_mapped_is_kept_unsealed() -> None:
    """Between fork and exec (or for good) a child shares the writable mapping, and the kernel refuses the seal."""
    draft = Draft([SIZE])
    draft.buffers[0][:4] = b"abcd"
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.read(reads, 1)
        os._exit(0)
    try:
        with pytest.raises(OSError, match="busy"):
            draft.seal()
        (view,) = draft.unsealed()
        assert bytes(view[:4]) == b"abcd" and view.readonly
    finally:
        os.write(writes, b"x")
        os.waitpid(child, 0)
        os.close(reads)
        os.close(writes)


def test_a_draft_that_is_forgotten_costs_nothing() -> None:
    draft = Draft([SIZE])
    assert len(draft.buffers) == 1


# ---------------------------------------------------------------------------------------------- what a peer may point to


class Pointers:
    """Things a hostile peer could name; `number` is the descriptor, `file_id` its true inode."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.opened: list[int] = []
        self.kept: list[Any] = []

    def open(self, path: str, flags: int = os.O_RDONLY) -> int:
        self.opened.append(os.open(path, flags))
        return self.opened[-1]

    def close(self) -> None:
        for each in self.kept:
            each.close()
        for descriptor in self.opened:
            os.close(descriptor)

    def fifo(self) -> int:
        os.mkfifo(self.folder / "fifo")
        return self.open(str(self.folder / "fifo"), os.O_RDONLY | os.O_NONBLOCK)

    def directory(self) -> int:
        return self.open(str(self.folder))

    def device(self) -> int:
        return self.open("/dev/zero")

    def terminal(self) -> int:
        master, slave = os.openpty()
        self.opened += [master, slave]
        return slave

    def file(self) -> int:
        (self.folder / "file").write_bytes(bytes(2 * SIZE))
        return self.open(str(self.folder / "file"), os.O_RDWR)

    def file_in_shm(self) -> int:
        with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
            file.truncate(2 * SIZE)
            return self.open(file.name, os.O_RDWR)

    def socket(self) -> int:
        self.kept.append(socket.socket())
        return int(self.kept[-1].fileno())

    def pipe(self) -> int:
        reads, writes = os.pipe()
        self.opened += [reads, writes]
        return reads

    def _memfd(self, name: str, seals: int) -> int:
        descriptor = os.memfd_create(name, os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, 2 * SIZE)
        fcntl.fcntl(descriptor, F_ADD_SEALS, seals)
        self.opened.append(descriptor)
        return descriptor

    def unsealed(self) -> int:
        return self._memfd("kvcomm", 0)

    def may_be_truncated(self) -> int:
        return self._memfd("kvcomm", SEALS & ~0x2)

    def may_be_written(self) -> int:
        return self._memfd("kvcomm", SEALS & ~0x8)

    def mapped_by_a_writer(self) -> int:
        """F_SEAL_FUTURE_WRITE leaves the maker's own mapping writable."""
        return self._memfd("kvcomm", 0x2 | 0x4 | 0x10 | 0x1)

    def of_another_program(self) -> int:
        return self._memfd("secrets", SEALS)

    def closed(self) -> int:
        descriptor = os.dup(0)
        os.close(descriptor)
        return descriptor


POINTERS = sorted(name for name in vars(Pointers) if not name.startswith("_") and name not in ("open", "close"))


@pytest.mark.parametrize("pointer", POINTERS)
def test_hostile_descriptors(pointer: str, tmp_path: Path) -> None:
    pointers = Pointers(tmp_path)
    memory = SharedMemory()
    try:
        number = getattr(pointers, pointer)()
        file_id = 1 if pointer == "closed" else os.fstat(number).st_ino
        began = time.monotonic()
        with pytest.raises(NotShared):
            memory.attach(os.getpid(), number, file_id, SIZE)
        assert time.monotonic() - began < 1.0
        assert memory.regions == 0
    finally:
        pointers.close()


def test_a_pipe_that_is_named_does_not_even_notice(tmp_path: Path) -> None:
    """Opening a FIFO would wake its writer, opening a device may do anything: what is named is looked at, not opened."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    pointer = os.open(fifo, os.O_PATH)
    woken = threading.Event()

    def writer() -> None:
        descriptor = os.open(fifo, os.O_WRONLY)  # waits for a reader
        woken.set()
        os.close(descriptor)

    thread = threading.Thread(target=writer)
    thread.start()
    time.sleep(0.05)
    with pytest.raises(NotShared):
        SharedMemory().attach(os.getpid(), pointer, os.fstat(pointer).st_ino, 1)
    assert not woken.wait(0.1)
    os.close(os.open(fifo, os.O_RDONLY))
    thread.join()
    os.close(pointer)


@pytest.mark.parametrize(("pid", "descriptor"), [(2**31 - 1, 0), (2**22 + 1, 3), (1, 2**31 - 1), (1, 0)])
def test_processes_that_are_not_there_or_not_ours(pid: int, descriptor: int) -> None:
    with pytest.raises(NotShared):
        SharedMemory().attach(pid, descriptor, 1, SIZE)


@pytest.mark.parametrize("end", [SIZE + 1, SHARED_BYTES_MAX, 2**62])
def test_ranges_behind_the_end(end: int) -> None:
    region = region_with(bytes(SIZE))
    with pytest.raises(NotShared):
        SharedMemory().attach(os.getpid(), region.descriptor, region.file_id, end)
    region.close()


def test_a_descriptor_that_names_another_region_by_now() -> None:
    old = region_with(b"old!" * (SIZE // 4))
    number, file_id = old.descriptor, old.file_id
    old.close()
    new = region_with(b"new!" * (SIZE // 4))
    assert new.descriptor == number and new.file_id != file_id
    with pytest.raises(NotShared) as caught:
        SharedMemory().attach(os.getpid(), number, file_id, SIZE)
    assert caught.value.errno == errno.ESTALE
    new.close()


# ------------------------------------------------------------------------------------------------------ bounds and store


def test_descriptors_are_bounded_and_memory_is_plain_beyond() -> None:
    holder, puller = BlockStore(SharedMemory(4)), BlockStore(SharedMemory(2))
    assert holder.shared is not None and puller.shared is not None
    contents = [bytes([number]) * SIZE for number in range(6)]
    held = [fill(holder, [content])[0] for content in contents]
    places = [holder.place(handle) for handle in held]
    assert [place is not None for place in places] == [True] * 4 + [False] * 2
    assert (holder.shared.descriptors, holder.held_bytes) == (4, 6 * SIZE)
    pulled = []
    for place, content in zip(places[:4], contents, strict=False):
        handle = puller.reserve(SIZE)
        assert place is not None
        assert puller.adopt_shared(handle, os.getpid(), place, lambda view, content=content: view == content)  # type: ignore[misc]
        pulled.append(handle)
    # What is beyond is mapped all the same; it can only not be handed on.
    assert (puller.shared.descriptors, puller.shared.regions, puller.held_bytes) == (2, 4, 4 * SIZE)
    assert [bytes(puller.view(handle)) for handle in pulled] == contents[:4]
    assert sum(puller.place(handle) is not None for handle in pulled) == 2
    for store, handles in ((holder, held), (puller, pulled)):
        assert all(store.drop(handle) for handle in handles)
        assert store.shared is not None
        assert (store.held_bytes, store.shared.regions, store.shared.descriptors) == (0, 0, 0)


def test_the_bound_follows_the_limit_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory.resource, "getrlimit", lambda _: (8, 8))
    memory = SharedMemory()
    store = BlockStore(memory)
    handles = [fill(store, [bytes(SIZE)])[0] for _ in range(4)]
    assert memory.descriptors == 2
    for handle in handles:
        store.drop(handle)


def test_small_blocks_are_not_worth_a_region() -> None:
    store = BlockStore(SharedMemory())
    (handle,) = fill(store, [b"small"])
    assert store.place(handle) is None and bytes(store.view(handle)) == b"small"


def test_no_descriptor_left_means_plain_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    store = BlockStore(SharedMemory())
    (handle,) = fill(store, [bytes(SIZE)])
    assert store.place(handle) is None and store.view(handle).nbytes == SIZE


def test_no_memory_left_means_plain_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    store = BlockStore(SharedMemory())
    (handle,) = fill(store, [bytes(SIZE)])
    assert store.place(handle) is None


def test_what_does_not_verify_is_not_adopted() -> None:
    holder, puller = BlockStore(SharedMemory()), BlockStore(SharedMemory())
    (held,) = fill(holder, [b"x" * SIZE])
    place = holder.place(held)
    assert place is not None
    handle = puller.reserve(SIZE)
    assert not puller.adopt_shared(handle, os.getpid(), place, lambda view: False)
    assert (puller.held_bytes, puller.reserved_bytes) == (0, SIZE)
    puller.write(handle, 0, b"y" * SIZE)
    with pytest.raises(ValueError, match="whole"):
        puller.adopt_shared(handle, os.getpid(), place, lambda view: True)
    assert puller.view(handle)[0] == ord("y")
    puller.drop(handle)
    with pytest.raises(StaleHandle):
        puller.adopt_shared(handle, os.getpid(), place, lambda view: True)
    dropped_meanwhile = puller.reserve(SIZE)
    with pytest.raises(StaleHandle):
        puller.adopt_shared(dropped_meanwhile, os.getpid(), place, lambda view: puller.drop(dropped_meanwhile))
    assert puller.shared is not None and puller.shared.regions == 0
    holder.drop(held)


def test_a_block_that_came_in_part_can_still_be_adopted() -> None:
    holder, puller = BlockStore(SharedMemory()), BlockStore(SharedMemory())
    (held,) = fill(holder, [b"x" * SIZE])
    place = holder.place(held)
    assert place is not None
    handle = puller.reserve(SIZE)
    puller.write(handle, 0, b"x" * 100)
    assert puller.adopt_shared(handle, os.getpid(), place, lambda view: True)
    assert (puller.held_bytes, puller.reserved_bytes) == (SIZE, 0)
    assert bytes(puller.view(handle)) == b"x" * SIZE
    puller.drop(handle)
    holder.drop(held)


def test_blocks_of_one_region_share_its_descriptor_until_the_last_goes() -> None:
    holder, puller = BlockStore(SharedMemory()), BlockStore(SharedMemory())
    contents = [bytes([n]) * (SIZE + n) for n in range(5)]
    held = fill(holder, contents)
    pulled = []
    for handle, content in zip(held, contents, strict=True):
        place = holder.place(handle)
        assert place is not None and place.offset % 64 == 0
        pulled.append(puller.reserve(len(content)))
        assert puller.adopt_shared(pulled[-1], os.getpid(), place, lambda view, content=content: view == content)  # type: ignore[misc]
    assert holder.shared is not None and puller.shared is not None
    assert (holder.shared.descriptors, puller.shared.descriptors) == (1, 1)
    view = puller.view(pulled[2])
    for handle in pulled[:4]:
        puller.drop(handle)
    assert puller.shared.descriptors == 1 and puller.held_bytes == len(contents[4])
    puller.drop(pulled[4])
    assert puller.shared.descriptors == 0
    for handle in held:
        holder.drop(handle)
    assert bytes(view) == contents[2]


class StoreMachine(RuleBasedStateMachine):
    """A holder and a puller in any order of publishing, adopting, viewing and dropping."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(0)
        self.stores = [BlockStore(SharedMemory(3)), BlockStore(SharedMemory(2))]
        self.held: list[list[tuple[BlockHandle, bytes, int]]] = [[], []]
        self.views: list[tuple[memoryview, bytes]] = []

    @precondition(lambda self: sum(map(len, self.held)) < 30)
    @rule(sizes=st.lists(st.integers(1, 3 * SIZE // 2), min_size=1, max_size=4), finished=st.booleans())
    def publish(self, sizes: list[int], finished: bool) -> None:
        contents = [self.rng.randbytes(min(size, 64)).ljust(size, b".") for size in sizes]
        if not finished:
            self.stores[0].compose(sizes)
            return
        for handle, content in zip(fill(self.stores[0], contents), contents, strict=True):
            self.held[0].append((handle, content, 1))

    @precondition(lambda self: self.held[0])
    @rule(data=st.data(), ok=st.booleans())
    def adopt(self, data: Any, ok: bool) -> None:
        handle, content, _ = data.draw(st.sampled_from(self.held[0]))
        place = self.stores[0].place(handle)
        if place is None:
            return
        reserved = self.stores[1].reserve(len(content))
        assert self.stores[1].adopt_shared(reserved, os.getpid(), place, lambda view: ok and view == content) is ok
        if ok:
            self.held[1].append((reserved, content, 1))
        else:
            self.stores[1].drop(reserved)

    @precondition(lambda self: any(self.held))
    @rule(data=st.data(), retain=st.booleans(), view=st.booleans())
    def use(self, data: Any, retain: bool, view: bool) -> None:
        side = data.draw(st.sampled_from([side for side in (0, 1) if self.held[side]]))
        index = data.draw(st.integers(0, len(self.held[side]) - 1))
        handle, content, references = self.held[side][index]
        if view:
            self.views.append((self.stores[side].view(handle), content))
        if retain:
            self.stores[side].retain(handle)
            self.held[side][index] = (handle, content, references + 1)
            return
        assert self.stores[side].drop(handle)
        self.held[side][index] = (handle, content, references - 1)
        if references == 1:
            del self.held[side][index]

    @precondition(lambda self: self.views)
    @rule()
    def let_go(self) -> None:
        self.views.pop(0)

    @invariant()
    def accounts_are_exact(self) -> None:
        for store, held in zip(self.stores, self.held, strict=True):
            assert store.held_bytes == sum(len(content) for _, content, _ in held)
            assert (store.reserved_bytes, len(store)) == (0, len(held))
            memory = store.shared
            assert memory is not None
            assert memory.descriptors <= memory._descriptors_max
            assert memory.regions <= len(held) and bool(memory.mapped_bytes) == bool(memory.regions)

    @invariant()
    def bytes_are_right(self) -> None:
        for store, held in zip(self.stores, self.held, strict=True):
            assert all(store.view(handle) == content for handle, content, _ in held)
        assert all(view == content for view, content in self.views)

    def teardown(self) -> None:
        for store, held in zip(self.stores, self.held, strict=True):
            for handle, _, references in held:
                for _ in range(references):
                    assert store.drop(handle)
            assert store.shared is not None
            assert (len(store), store.held_bytes, store.shared.regions) == (0, 0, 0)
        self.views.clear()


StoreMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestStores = StoreMachine.TestCase


def test_threads_that_adopt_and_drop_the_same_region_leave_nothing() -> None:
    holder, puller = BlockStore(SharedMemory()), BlockStore(SharedMemory())
    held = fill(holder, [bytes([n]) * SIZE for n in range(4)])
    problems: list[BaseException] = []

    def work(content: int, place: Place) -> None:
        try:
            for _ in range(100):
                handle = puller.reserve(SIZE)
                assert puller.adopt_shared(handle, os.getpid(), place, lambda view: view[0] == view[-1] == content)
                assert puller.view(handle)[5] == content
                puller.drop(handle)
        except BaseException as error:
            problems.append(error)

    works: list[Callable[[], None]] = []
    for content, handle in enumerate(held):
        place = holder.place(handle)
        assert place is not None
        works.append(lambda content=content, place=place: work(content, place))  # type: ignore[misc]
    threads = [threading.Thread(target=each) for each in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    assert puller.shared is not None and (puller.shared.regions, puller.held_bytes, puller.reserved_bytes) == (0, 0, 0)
    for handle in held:
        holder.drop(handle)
