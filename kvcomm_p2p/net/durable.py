"""What a node keeps on disk between its lives: who it is, how often it was started, where its peers were, and what it was told
to erase (`erasures_file`).

One small file per cluster and agent name. It makes a node that starts again the same node in a higher epoch, so that peers
let it in under its old name at once, and nothing from its earlier life counts. No clock is involved. A file that is lost,
damaged or rolled back costs no more than a new identity, or a higher epoch once peers tell (`protocol.membership`).
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from kvcomm_p2p.errors import ConfigError, NameTakenError
from kvcomm_p2p.net.erasures_file import SUFFIX, read_erasures, write_erasures
from kvcomm_p2p.net.private_files import private_dir, read_private, write_private
from kvcomm_p2p.protocol.events import SaveState
from kvcomm_p2p.protocol.ids import NODE_ID_BYTES, NodeId
from kvcomm_p2p.protocol.messages import ADDRESS_CHARS_MAX, COUNTER_MAX, MemberRecord

FOLDER = "nodes"
STATE_BYTES_MAX = 64 * 1024
ADDRESSES_MAX = 64
FORMAT_VERSION = 1

log = logging.getLogger("kvcomm_p2p.net")

_Counter = Annotated[int, Meta(ge=0, le=COUNTER_MAX // 2)]
_Address = Annotated[str, Meta(min_length=1, max_length=ADDRESS_CHARS_MAX)]
_Key = Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")]


class _Saved(Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    cluster: str
    name: str
    node_id: Annotated[str, Meta(pattern=f"^[0-9a-f]{{{2 * NODE_ID_BYTES}}}$")]
    epoch: _Counter
    incarnation: _Counter
    addresses: Annotated[tuple[_Address, ...], Meta(max_length=ADDRESSES_MAX)] = ()
    keys: Annotated[tuple[_Key, ...], Meta(max_length=ADDRESSES_MAX)] = ()


class NodeLife:
    """One life of one node, from `open_life` to `close`. Methods may be called from any thread.

    `node_id`, `epoch`, `incarnation`, `addresses` (with the CURVE `keys` of who listens there, b"" where unknown) and
    `erasures` (`protocol.erasure_memory`) are what the node starts with. `is_kept` is False for a second process of one name:
    it is another node, and leaves nothing behind.
    """

    def __init__(
        self, saved: _Saved, path: Path | None, lock: int | None, erasing_key: bytes = b"", erasures: bytes = b""
    ) -> None:
        self.node_id = NodeId(bytes.fromhex(saved.node_id))
        self.epoch = saved.epoch
        self.incarnation = saved.incarnation
        self.addresses = saved.addresses
        known = [*map(bytes.fromhex, saved.keys), *(b"" for _ in saved.addresses)]
        self.keys = tuple(known[: len(saved.addresses)])
        self.erasures = erasures
        self._erasing_key = erasing_key
        self.sign: Callable[[MemberRecord], MemberRecord] = lambda record: record
        self._saved = saved
        self._path = path
        # Also where nobody calls `close`, because what was to be made next failed.
        self._unlock = weakref.finalize(self, os.close, lock) if lock is not None else None
        self._mutex = threading.Lock()
        self._pid = os.getpid()

    @property
    def is_kept(self) -> bool:
        """Whether anything is written; not in a child that was forked either."""
        return self._path is not None and os.getpid() == self._pid

    @property
    def before(self) -> dict[str, Any]:
        """What `protocol.node.Node` is given of its earlier lives."""
        return {"incarnation": self.incarnation, "addresses": self.addresses, "erasures": self.erasures}

    def save(self, state: SaveState, keys: Sequence[bytes] = ()) -> None:
        """Keep this; counters never fall, whatever the order of calls. `keys`: CURVE keys of who listens at the addresses, in
        their order (none: as before, where the addresses are). Blocks on the disk; a disk that fails is logged."""
        if not self.is_kept:  # in a forked child the lock may never be free
            return
        with self._mutex:
            if self._path is None:
                return
            epoch, incarnation = max((self._saved.epoch, self._saved.incarnation), (state.epoch, state.incarnation))
            addresses = state.addresses[:ADDRESSES_MAX]
            known = tuple(key.hex() for key in keys[: len(addresses)])
            if not known and addresses == self._saved.addresses:
                known = self._saved.keys
            saved = replace(self._saved, epoch=epoch, incarnation=incarnation, addresses=addresses, keys=known)
            if saved != self._saved:
                try:
                    _write(self._path, saved)
                    self._saved = saved
                except OSError as error:
                    log.warning("the state of this node could not be saved in %s: %s", self._path, error)

    def save_erasures(self, packed: bytes) -> None:
        """Keep these erasures in place of those before. Blocks on the disk; a disk that fails is logged."""
        if not self.is_kept:
            return
        with self._mutex:
            if self._path is None:
                return
            try:
                write_erasures(self._path.with_suffix(SUFFIX), self._erasing_key, packed)
            except OSError as error:
                log.error(
                    "what is to stay erased could not be saved in %s (%s): after a restart this node may take it back",
                    self._path.parent,
                    error,
                )

    def renewed(self, me: MemberRecord, epoch: int) -> MemberRecord:
        """Our record in a higher epoch, signed if records are signed."""
        return self.sign(replace(me, epoch=epoch, signature=b""))

    def close(self) -> None:
        """After a goodbye: who left on purpose does not look for its peers at its next start. Calling it again does
        nothing, nor does calling it in a child that was forked."""
        if os.getpid() != self._pid:
            return
        with self._mutex:
            path, self._path = self._path, None
            if path is not None and self._saved.addresses:
                try:
                    _write(path, replace(self._saved, addresses=(), keys=()))
                except OSError as error:
                    log.warning("the state of this node could not be saved in %s: %s", path, error)
            if self._unlock is not None:
                self._unlock()


def open_life(
    state_dir: Path, cluster: str, name: str, node_id: NodeId | None = None, *, erasing_key: bytes = b""
) -> NodeLife:
    """Begin the next life of the agent `name` of `cluster`; its higher epoch is on disk when this returns.

    `node_id` is given where it follows from keys; otherwise it is made up once and kept. `erasing_key`: by which erased content
    is named now. Raises NameTakenError if another
    process runs with the same given id, ConfigError if `state_dir` cannot be used.
    """
    try:
        folder = private_dir(private_dir(state_dir) / FOLDER)
        stem = hashlib.sha256(b"\0".join((cluster.encode(), name.encode()))).hexdigest()[:32]
        path = folder / f"{stem}.json"
        erasures = read_erasures(path.with_suffix(SUFFIX), erasing_key)
        fresh = _Saved(FORMAT_VERSION, cluster, name, (node_id or os.urandom(NODE_ID_BYTES)).hex(), 1, 0)
        lock = os.open(folder / f"{stem}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            if node_id is not None:
                raise NameTakenError(
                    f"another agent called {name!r} runs with this identity: choose another name"
                ) from None
            return NodeLife(fresh, None, None, erasing_key, erasures)
        try:
            for left in folder.glob(f".{stem}.*"):  # by a process that was killed while it wrote
                left.unlink(missing_ok=True)
            last = _read(path)
            if last is not None and (node_id is None or last.node_id == node_id.hex()):
                fresh = replace(last, epoch=last.epoch + 1, cluster=cluster, name=name)
            _write(path, fresh)
        except BaseException:
            os.close(lock)
            raise
        return NodeLife(fresh, path, lock, erasing_key, erasures)
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(
            f"node state in {state_dir}: {why}; set KVCOMM_STATE_DIR to a folder that you can write"
        ) from error


def _read(path: Path) -> _Saved | None:
    """None: there is none, or it is damaged (said in the log)."""
    try:
        content = read_private(path, "node state", STATE_BYTES_MAX)
        saved = msgspec.json.decode(content, type=_Saved)
        if saved.version == FORMAT_VERSION:
            return saved
        why = f"version {saved.version}"
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        why = str(error)
    log.warning("node state %s is not readable (%s): this node starts as a new one", path, why)
    return None


def _write(path: Path, saved: _Saved) -> None:
    write_private(path, msgspec.json.encode(saved) + b"\n", replace=True)
