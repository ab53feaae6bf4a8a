"""Memory that processes of one machine share: sealed regions, named by a process and one of its descriptors.

A region is a memfd, written once by its maker and then sealed: from then on nobody, its maker included, can change,
shrink or grow it, so what was checked stays as it was checked, and reading it cannot fault. It has no name in any file
system, and the kernel frees it when the last process that has it open or mapped has gone, however that went: crashes
leave nothing behind. A peer opens it through `/proc/<pid>/fd/<descriptor>`, which the kernel allows to those who may
inspect the process (in practice: the same user in the same process namespace).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hmac
import mmap
import os
import resource
import stat
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from kvcomm_p2p.protocol.messages import HOST_TAG_BYTES, SHARED_BYTES_MAX

DESCRIPTORS_MAX = 256
"""Regions that a process keeps open, where its limit allows: a quarter of the soft limit at most."""

REGION_BYTES_MIN = 64 * 1024
"""Blocks that are smaller than this together are not worth a descriptor."""

ALIGNMENT = 64
NAME = "kvcomm"

_SHRINK, _GROW, _WRITE, _SEAL = 0x2, 0x4, 0x8, 0x1
SEALS = _SHRINK | _GROW | _WRITE | _SEAL
_ADD_SEALS, _GET_SEALS = 1033, 1034
"""<linux/fcntl.h>; the fcntl module has no names for them in all versions."""


class NotShared(OSError):
    """What a peer pointed to is not a region that may be read, or cannot be reached from here."""


class Region:
    """A sealed region, mapped read-only. Views of it stay valid for as long as anybody keeps them, also when this object
    has gone. `descriptor` names it to other processes until `close`; -1: it cannot be named."""

    def __init__(self, descriptor: int, file_id: int, size: int) -> None:
        """Takes over the descriptor, also if it raises OSError because the region cannot be mapped."""
        self.file_id = file_id
        self.size = size
        self.descriptor = descriptor
        self.users = 0
        self._closes = weakref.finalize(self, os.close, descriptor)
        try:
            self.view = _map(descriptor, size)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Give the descriptor back. Nobody can open the region through this process any more; it stays mapped."""
        self.descriptor = -1
        self._closes()


class Draft:
    """Room for several blocks in a region that is not sealed yet; `buffers` are writable, one per block."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """Raises OSError when there is no memory or no descriptor left."""
        self.offsets = _offsets(sizes)
        self._sizes = sizes
        self._size = self.offsets[-1] + sizes[-1]
        self._descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._closes = weakref.finalize(self, os.close, self._descriptor)
        try:
            # Costs nothing in all, since the pages are needed, and says here, not by a signal, that there is no memory.
            os.posix_fallocate(self._descriptor, 0, self._size)
            self._memory = mmap.mmap(self._descriptor, self._size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError:
            self._closes()
            raise
        self.buffers = self._slices()

    def seal(self) -> Region:
        """The region; the buffers are void. Raises BufferError if one of them is still in use, OSError if the kernel
        refuses (a process forked meanwhile has the memory mapped as well); then there is `unsealed`."""
        for buffer in self.buffers:
            buffer.release()
        self._memory.close()
        fcntl.fcntl(self._descriptor, _ADD_SEALS, SEALS)
        self._closes.detach()
        return Region(self._descriptor, os.fstat(self._descriptor).st_ino, self._size)

    def unsealed(self) -> list[memoryview]:
        """What was written, read-only, one view per block; for this process alone. Nothing else may be called after."""
        if self._memory.closed:
            self._memory = mmap.mmap(self._descriptor, self._size, mmap.MAP_SHARED, mmap.PROT_READ)
        self._closes()
        return [view.toreadonly() for view in self._slices()]

    def _slices(self) -> list[memoryview]:
        whole = memoryview(self._memory)
        return [whole[at : at + size] for at, size in zip(self.offsets, self._sizes, strict=True)]


class SharedMemory:
    """The regions of one store, own and peers'. Any thread may call. At most `descriptors_max` are kept open; what comes
    beyond is mapped all the same (a peer's region) or not made (an own one)."""

    def __init__(self, descriptors_max: int | None = None) -> None:
        """None: DESCRIPTORS_MAX, or a quarter of what this process may open, if that is less."""
        if descriptors_max is None:
            soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            descriptors_max = DESCRIPTORS_MAX if soft == resource.RLIM_INFINITY else min(DESCRIPTORS_MAX, soft // 4)
        self._descriptors_max = descriptors_max
        self._lock = threading.Lock()
        self._regions: dict[int, Region] = {}

    @property
    def regions(self) -> int:
        """Regions in use."""
        return len(self._regions)

    @property
    def descriptors(self) -> int:
        """Of them, those that are open and can be named to peers."""
        with self._lock:
            return self._open()

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the regions in use, whole: a region lasts as long as any block in it."""
        with self._lock:
            return sum(region.size for region in self._regions.values())

    def draft(self, sizes: Sequence[int]) -> Draft | None:
        """Room for blocks of these sizes; None if they are too small or too large for a region, or there are too many
        regions, or the system has no more to give."""
        if not REGION_BYTES_MIN <= sum(sizes) <= SHARED_BYTES_MAX // 2 or self.descriptors >= self._descriptors_max:
            return None
        with suppress(OSError):
            return Draft(sizes)
        return None

    def use(self, region: Region) -> Region:
        """One more user of a region. Returns the region to use: another thread may have attached the same."""
        with self._lock:
            known = self._regions.setdefault(region.file_id, region)
            if known is region and self._open() > self._descriptors_max:
                region.close()
            known.users += 1
        if known is not region:
            region.close()
        return known

    def leave(self, region: Region) -> None:
        """One user less; with the last the descriptor is given back. Views stay valid."""
        with self._lock:
            region.users -= 1
            if not region.users:
                del self._regions[region.file_id]
                region.close()

    def attach(self, pid: int, descriptor: int, file_id: int, end: int) -> Region:
        """A region of a peer, for one more user. Raises NotShared unless the descriptor of that process is a sealed region
        of our user with this `file_id` and at least `end` bytes. Nothing else is opened, whatever the numbers name."""
        with self._lock:
            known = self._regions.get(file_id)
            if known is not None and end <= known.size:
                known.users += 1
                return known
        return self.use(_open_region(pid, descriptor, file_id, end))

    def _open(self) -> int:
        return sum(region.descriptor >= 0 for region in self._regions.values())


def available() -> bool:
    """Whether this system lets processes share regions: tried once, on ourselves, the way a peer would do it."""
    try:
        region = Draft([REGION_BYTES_MIN]).seal()
        try:
            _open_region(os.getpid(), region.descriptor, region.file_id, REGION_BYTES_MIN).close()
        finally:
            region.close()
    except (OSError, AttributeError, BufferError):
        return False
    return True


def host_tag(key: bytes) -> bytes:
    """Equal for processes that can open each other's descriptors: same boot of the same machine, same user, same process
    and user namespace. Keyed, so that it tells others nothing. Empty where memory cannot be shared."""
    if not available():
        return b""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        spaces = [str(Path("/proc/self/ns", space).readlink()) for space in ("pid", "user")]
    except (OSError, ValueError):
        return b""
    place = "\0".join(["kvcomm host v1", boot, str(os.geteuid()), *spaces])
    return hmac.digest(key, place.encode(), "sha256")[:HOST_TAG_BYTES]


def _open_region(pid: int, descriptor: int, file_id: int, end: int) -> Region:
    """Look at what the numbers name without opening it (O_PATH), since opening a device or a pipe can block or have
    effects; open it only if it is a region."""
    try:
        path = os.open(f"/proc/{pid:d}/fd/{descriptor:d}", os.O_PATH | os.O_CLOEXEC)
    except OSError as error:
        raise NotShared(error.errno, f"descriptor {descriptor} of process {pid}: {error.strerror}") from None
    try:
        status = os.fstat(path)
        right = stat.S_ISREG(status.st_mode) and status.st_dev == _device() and status.st_uid == os.geteuid()
        if not right or str(Path(f"/proc/self/fd/{path}").readlink()) != f"/memfd:{NAME} (deleted)":
            raise NotShared(errno.EINVAL, f"descriptor {descriptor} of process {pid} is not a region of ours")
        if status.st_ino != file_id:
            raise NotShared(errno.ESTALE, f"descriptor {descriptor} of process {pid} names another region by now")
        if not end <= status.st_size <= SHARED_BYTES_MAX:
            raise NotShared(errno.ERANGE, f"the region has {status.st_size} bytes, not {end}")
        opened = os.open(f"/proc/self/fd/{path}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    finally:
        os.close(path)
    try:
        sealed = fcntl.fcntl(opened, _GET_SEALS) & SEALS == SEALS
    except OSError:
        sealed = False
    if not sealed:
        os.close(opened)
        raise NotShared(errno.EPERM, f"descriptor {descriptor} of process {pid} can still be changed")
    return Region(opened, file_id, status.st_size)


@lru_cache(maxsize=1)
def _device() -> int:
    """The kernel keeps all memfds on one device of its own. Raises OSError."""
    descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC)
    try:
        return os.fstat(descriptor).st_dev
    finally:
        os.close(descriptor)


def _offsets(sizes: Sequence[int]) -> list[int]:
    offsets, at = [], 0
    for size in sizes:
        offsets.append(at)
        at += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets


def _map(descriptor: int, size: int) -> memoryview:
    """Read-only, for as long as any view of it lives. Python's own mmap would keep a second descriptor for each."""
    library = _library()
    address = library.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    memory = (ctypes.c_uint8 * size).from_address(address)
    # Not at exit: threads that read it may still run then, and the process takes its mappings with it anyway.
    weakref.finalize(memory, library.munmap, address, size).atexit = False
    return memoryview(memory).cast("B").toreadonly()


_MAP_FAILED = ctypes.c_void_p(-1).value


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    library.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return library
