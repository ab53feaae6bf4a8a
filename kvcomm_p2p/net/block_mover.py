"""Bytes of blocks, in and out: sending them or saying where they stand, storing what comes, checking it in other threads."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress

from kvcomm_p2p.net.counters import WireCounters
from kvcomm_p2p.net.encoded_uploads import Encoded, EncodedUploads
from kvcomm_p2p.protocol.anchors import BlockHandle, KVLayout
from kvcomm_p2p.protocol.events import (
    AdoptShared,
    BlockUnavailable,
    BlockVerified,
    Event,
    Plane,
    SendBlock,
    SendMessage,
    StoreChunk,
    VerifyBlock,
)
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.messages import PULL_BLOCKS_MAX, Chunk, EncodedBlock, SharedBlock, SharedBlocks
from kvcomm_p2p.store import BlockStore, Place, StaleHandle

HASH_THREADS = 2
"""Threads that check blocks; more would take cores from the model."""

log = logging.getLogger("kvcomm_p2p.net")

SendChunk = Callable[[NodeId, Chunk, memoryview], bool]
"""Sends one chunk on the connection that a peer asked on; False: it is lost, and so would be what follows."""

Verify = Callable[[memoryview, bytes], bool]


class BlockMover:
    """Lives on the interpreter's loop, apart from the checks. Checked blocks are told in batches: threads and loop meet
    once for all that is done by then, not once per block."""

    def __init__(
        self,
        store: BlockStore,
        hashers: Executor,
        verify: Verify,
        counters: WireCounters,
        send_chunk: SendChunk,
        send_message: Callable[[SendMessage], None],
        report: Callable[[Event], None],
        layout: KVLayout | None = None,
    ) -> None:
        """`layout`: of the blocks that may go out as int8; None: none may."""
        self._store = store
        self._hashers = hashers
        self._verify = verify
        self._counters = counters
        self._send_chunk = send_chunk
        self._send_message = send_message
        self._report = report
        self._encoded = EncodedUploads(layout, hashers, self._send_encoded, report)
        self._offers: list[SharedBlock] = []
        self._offered_to: tuple[NodeId, int] | None = None
        self._lock = threading.Lock()
        self._waiting: deque[VerifyBlock | AdoptShared] = deque()
        self._checked: deque[tuple[VerifyBlock | AdoptShared, bool]] = deque()
        self._checking = 0
        self._told = False

    def start(self) -> None:
        """On the running loop."""
        self._loop = asyncio.get_running_loop()
        self._encoded.start()

    # -------------------------------------------------------------------------------------------------------------- out

    def send(self, effect: SendBlock) -> None:
        """All chunks of a block, or, where the peer can read it, where it stands: that waits for `flush`."""
        try:
            view = self._store.view(effect.handle)
        except StaleHandle:
            self._report(BlockUnavailable(effect.to, effect.pull_id, effect.ordinal))
            return
        if effect.encoded_bytes:
            self._encoded.send(effect, view)
            return
        place = self._store.place(effect.handle) if effect.shared else None
        if place is not None:
            self._offer(effect, place)
            return
        self.flush()
        self._send_chunks(effect, view)

    def _send_encoded(self, effect: SendBlock, encoded: Encoded) -> None:
        told = EncodedBlock(effect.pull_id, effect.ordinal, encoded.digest)
        self._send_message(SendMessage(effect.to, "", told, Plane.BULK_REPLY))
        self._send_chunks(effect, encoded.data)

    def _send_chunks(self, effect: SendBlock, data: memoryview) -> None:
        for offset in range(effect.offset, data.nbytes, effect.chunk_bytes):
            payload = data[offset : offset + effect.chunk_bytes]
            header = Chunk(effect.pull_id, effect.ordinal, offset, payload.nbytes)
            if not self._send_chunk(effect.to, header, payload):
                self._counters.lost["Chunk"] += 1
                return
            self._counters.sent["Chunk"] += 1
            self._counters.payload_bytes_sent += payload.nbytes

    def _offer(self, effect: SendBlock, place: Place) -> None:
        pull = effect.to, effect.pull_id
        if self._offered_to != pull or len(self._offers) == PULL_BLOCKS_MAX:
            self.flush()
        self._offered_to = pull
        self._offers.append(SharedBlock(effect.ordinal, *place, effect.kv_bytes))

    def flush(self) -> None:
        """Send the places that wait, as one message. To be called before anything else goes to a puller, and whenever the
        effects of an event have been carried out."""
        if self._offered_to is None:
            return
        (peer, pull_id), offers = self._offered_to, tuple(self._offers)
        self._offered_to = None
        self._offers.clear()
        self._send_message(SendMessage(peer, "", SharedBlocks(pull_id, os.getpid(), offers), Plane.BULK_REPLY))

    # --------------------------------------------------------------------------------------------------------------- in

    def store(self, effect: StoreChunk, payload: memoryview) -> None:
        """A chunk's bytes."""
        try:
            self._store.write(effect.handle, effect.offset, payload)
        except (StaleHandle, ValueError) as error:
            self._counters.dropped["bad_write"] += 1
            log.warning("a chunk could not be stored: %s", error)

    def check(self, effect: VerifyBlock | AdoptShared) -> None:
        """In another thread: compare a block with its digest, or take it from shared memory if it agrees."""
        with self._lock:
            self._waiting.append(effect)
            if self._checking == HASH_THREADS:
                return
            self._checking += 1
        self._hashers.submit(self._check_all)

    def forget(self, handle: BlockHandle) -> None:
        """A block is given up."""
        self._encoded.forget(handle)

    def stop(self) -> None:
        """What waits to be checked or encoded is forgotten."""
        self._encoded.stop()
        with self._lock:
            self._waiting.clear()

    def _check_all(self) -> None:
        """In a hashing thread, until nothing waits."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._checking -= 1
                    return
                effect = self._waiting.popleft()
            ok = self._checks(effect)
            with self._lock:
                self._checked.append((effect, ok))
                tell, self._told = not self._told, True
            if tell:
                with suppress(RuntimeError):  # the loop has ended
                    self._loop.call_soon_threadsafe(self._tell)

    def _checks(self, effect: VerifyBlock | AdoptShared) -> bool:
        """Whatever is wrong, with what a peer points to or with our handle: no."""
        try:
            if isinstance(effect, VerifyBlock):
                return self._verify(self._store.view(effect.handle), effect.digest)
            source = effect.source
            place = Place(source.descriptor, source.file_id, source.offset)
            return self._store.adopt_shared(
                effect.handle, effect.pid, place, lambda view: self._verify(view, effect.digest)
            )
        except StaleHandle:
            return False
        except (OSError, ValueError) as error:
            log.debug("a shared block could not be taken: %s", error)
            return False
        except Exception:
            self._counters.failures += 1
            log.exception("checking a block failed; please report this")
            return False

    def _tell(self) -> None:
        """On the loop: everything that is checked by now."""
        with self._lock:
            self._told = False
            checked = list(self._checked)
            self._checked.clear()
        for effect, ok in checked:
            self._count(effect, ok)
            self._report(BlockVerified(effect.handle, ok))

    def _count(self, effect: VerifyBlock | AdoptShared, ok: bool) -> None:
        counters = self._counters
        if ok:
            counters.verified_blocks += 1
            if isinstance(effect, AdoptShared):
                counters.shared_bytes_adopted += effect.kv_bytes
        elif isinstance(effect, AdoptShared):
            counters.shared_blocks_refused += 1
        else:
            counters.mismatched_blocks += 1
