"""Blocks that go out as int8: encoded in other threads, sent in the order in which they were asked for."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from typing import NamedTuple

from kvcomm_p2p.net.encoding import NotEncodable, encode
from kvcomm_p2p.protocol.anchors import BlockHandle, KVLayout
from kvcomm_p2p.protocol.events import BlockUnavailable, Event, SendBlock
from kvcomm_p2p.protocol.messages import PullFailedReason

CACHE_BYTES_MAX = 32 << 20
"""Of encoded blocks that are kept for whoever asks next; the ones asked for longest ago go first."""

log = logging.getLogger("kvcomm_p2p.net")


class Encoded(NamedTuple):
    """A block as it travels, and its SHA-256."""

    data: memoryview
    digest: bytes


class _Work:
    """One block that is being encoded, or was. `result`: the reason, where that does not work; None: not yet."""

    __slots__ = ("result",)

    def __init__(self) -> None:
        self.result: Encoded | PullFailedReason | None = None


class EncodedUploads:
    """Lives on the interpreter's loop, apart from the encoding. Where a block cannot be sent, `report` gets BlockUnavailable."""

    def __init__(
        self,
        layout: KVLayout | None,
        hashers: Executor,
        deliver: Callable[[SendBlock, Encoded], None],
        report: Callable[[Event], None],
        cache_bytes_max: int = CACHE_BYTES_MAX,
    ) -> None:
        """`layout`: of all blocks; None: nothing can be encoded. `deliver` sends a block."""
        self._layout = layout
        self._hashers = hashers
        self._deliver = deliver
        self._report = report
        self._cache_bytes_max = cache_bytes_max
        self._queue: deque[tuple[SendBlock, _Work]] = deque()
        self._working: dict[BlockHandle, _Work] = {}
        self._cached: OrderedDict[BlockHandle, _Work] = OrderedDict()
        self.cached_bytes = 0
        self.encoded_blocks = 0

    def start(self) -> None:
        """On the running loop."""
        self._loop = asyncio.get_running_loop()

    def send(self, effect: SendBlock, block: memoryview) -> None:
        """Encode a block unless that was done before, then deliver it after those that were asked for earlier."""
        work = self._cached.get(effect.handle) or self._working.get(effect.handle)
        if work is None:
            work = self._working[effect.handle] = _Work()
            self._hashers.submit(self._encode, effect.handle, work, block)
        elif effect.handle in self._cached:
            self._cached.move_to_end(effect.handle)
        self._queue.append((effect, work))
        self._send_ready()

    def forget(self, handle: BlockHandle) -> None:
        """A block is given up: keep nothing of it."""
        self._working.pop(handle, None)
        work = self._cached.pop(handle, None)
        if work is not None and isinstance(work.result, Encoded):
            self.cached_bytes -= work.result.data.nbytes

    def stop(self) -> None:
        """What waits is not sent any more."""
        self._queue.clear()
        self._cached.clear()
        self.cached_bytes = 0

    def _encode(self, handle: BlockHandle, work: _Work, block: memoryview) -> None:
        """In a hashing thread."""
        result: Encoded | PullFailedReason = PullFailedReason.NOT_FOUND
        try:
            if self._layout is not None:
                data = memoryview(encode(block, self._layout)).toreadonly()
                result = Encoded(data, hashlib.sha256(data).digest())
        except NotEncodable:
            result = PullFailedReason.NOT_FINITE
        except ValueError as error:
            log.debug("a block cannot be encoded: %s", error)
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._done, handle, work, result)

    def _done(self, handle: BlockHandle, work: _Work, result: Encoded | PullFailedReason) -> None:
        work.result = result
        if self._working.get(handle) is work:
            del self._working[handle]
            if isinstance(result, Encoded):
                self.encoded_blocks += 1
                self._cached[handle] = work
                self.cached_bytes += result.data.nbytes
                while self.cached_bytes > self._cache_bytes_max:
                    self.forget(next(iter(self._cached)))
        self._send_ready()

    def _send_ready(self) -> None:
        while self._queue and self._queue[0][1].result is not None:
            effect, work = self._queue.popleft()
            result = work.result
            if isinstance(result, Encoded) and result.data.nbytes == effect.encoded_bytes:
                self._deliver(effect, result)
                continue
            reason = result if isinstance(result, PullFailedReason) else PullFailedReason.NOT_FOUND
            self._report(BlockUnavailable(effect.to, effect.pull_id, effect.ordinal, reason))
