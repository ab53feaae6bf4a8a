"""Runs a node for real: one thread with one event loop that owns the node, its sockets and the coroutines that use
them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import os
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from kvcomm_p2p.errors import UsageError
from kvcomm_p2p.net.answers import DriverStats, FetchResult, TokensResult
from kvcomm_p2p.net.durable import NodeLife
from kvcomm_p2p.net.gate import Gate
from kvcomm_p2p.net.identity import Identity
from kvcomm_p2p.net.interpreter import Finish, Interpreter, MakeNode, is_digest
from kvcomm_p2p.net.key_watch import KeyWatch
from kvcomm_p2p.net.keys import ClusterKeys
from kvcomm_p2p.net.seal import Sealer
from kvcomm_p2p.net.transport import Addresses, Transport
from kvcomm_p2p.protocol.anchors import AnchorMeta, BlockKey, HeldAnchor, KVLayout, Miss, MissReason
from kvcomm_p2p.protocol.events import (
    AnchorsForgotten,
    AnchorsPublished,
    AnchorsUsed,
    EraseRequested,
    FetchCancelled,
    FetchRequested,
    FinishFetch,
    FinishJoin,
    FinishLookup,
    FinishTokens,
    JoinRequested,
    LeaveRequested,
    LookupRequested,
    TokensRequested,
    Want,
)
from kvcomm_p2p.protocol.ids import AnchorId, NodeId
from kvcomm_p2p.protocol.lookup import Lookup, LookupResult
from kvcomm_p2p.protocol.messages import Erasure
from kvcomm_p2p.protocol.views import PeerView
from kvcomm_p2p.store import BlockStore

__all__ = ["Driver", "DriverStats", "FetchResult", "TokensResult"]

HASH_THREADS = 2
FLUSH_S = 0.2
"""How long goodbyes may take to leave."""

TOKENS_DEADLINE_S = 1.0
"""Outer bound of `Driver.tokens`; a silent peer ends it much earlier (NodeConfig.tokens_timeout_s)."""

LOOKUP_DEADLINE_S = 1.0
"""Outer bound of `Driver.find`; silent peers end it much earlier (NodeConfig.lookup_timeout_s)."""

T = TypeVar("T")


class Driver:
    """Methods marked "Loop" belong on the driver's loop: call them from coroutines given to `run`. The others may be
    called from any thread. Coroutines raise UsageError once the driver stops, unless their result can say so.
    """

    def __init__(
        self,
        make_node: MakeNode,
        transport: Transport,
        store: BlockStore,
        keys: ClusterKeys,
        *,
        verify: Callable[[memoryview, bytes], bool] = is_digest,
        gate: Gate | None = None,
        state_dir: Path | None = None,
        life: NodeLife | None = None,
        layout: KVLayout | None = None,
    ) -> None:
        """`verify(bytes, digest)` runs in a pool of threads for every pulled block; only measurements replace it. `gate`: who
        is believed, by default every holder of `keys`. `state_dir`: where changes of keys and of the allow-list are looked for
        while the driver runs; None: nowhere. `life`: what outlives this process, closed by `stop`; None: nothing does.
        `layout`: of blocks that peers may ask for as int8 (`Capability.INT8`); None: they may not."""
        self._store = store
        self._life = life
        self._hashers = ThreadPoolExecutor(HASH_THREADS, thread_name_prefix="kvcomm-hash")
        sealer = Sealer(keys.seal)
        self._interpreter = Interpreter(
            make_node, transport, store, sealer, self._hashers, self._on_finish, verify, gate, life, layout
        )
        self._key_watch = (
            None if state_dir is None else KeyWatch(state_dir, keys, sealer, self._interpreter.set_allowed)
        )
        self._thread = threading.Thread(target=self._main, name="kvcomm-driver", daemon=True)
        self._started: concurrent.futures.Future[Addresses] = concurrent.futures.Future()
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._stopped = False
        self._running: set[concurrent.futures.Future[Any]] = set()
        self._next_id = 1
        self._fetches: dict[int, tuple[asyncio.Future[FetchResult], tuple[Want, ...]]] = {}
        self._lookups: dict[int, asyncio.Future[LookupResult]] = {}
        self._tokens: dict[int, asyncio.Future[TokensResult]] = {}
        self._join: asyncio.Future[FinishJoin] | None = None

    # ------------------------------------------------------------------------------------------------------ life cycle

    def start(self) -> Addresses:
        """Bind and begin. Returns when peers can reach the node. Raises TransportError, ConfigError."""
        self._thread.start()
        self.addresses = self._started.result()
        self.node_id: NodeId = self._interpreter.node.me.node_id
        return self.addresses

    def stop(self) -> None:
        """Say goodbye, finish everything that waits (Miss SHUTDOWN), end the thread. Safe to call twice, from any
        thread but the driver's own. In a child that was forked: nothing, the node is its parent's."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            first, self._stopped = not self._stopped, True
        if self._thread.ident is None:
            self._hashers.shutdown(wait=False)
        else:
            if first and self._started.exception() is None:
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
        if self._life is not None:
            self._life.close()
        for future in tuple(self._running):
            future.cancel()

    def run(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine on the driver's loop. Cancelling the returned future cancels it. Raises UsageError once the driver
        stops, and in a child that was forked."""
        if os.getpid() != self._pid:
            work.close()
            raise UsageError("this node runs in the process that this one was forked from: start one of your own")
        with self._lock:
            if self._stopped or not self._started.done() or self._started.exception() is not None:
                work.close()
                raise UsageError("the driver is not running")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            if self._started.done():
                raise
            self._started.set_exception(error)
        finally:
            self._hashers.shutdown(wait=False, cancel_futures=True)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        addresses = self._interpreter.start()
        if self._key_watch is not None:
            self._key_watch.start()
        self._started.set_result(addresses)
        try:
            await self._stop.wait()
            self._interpreter.handle(LeaveRequested())
        finally:
            self._finish_all()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            if others:  # whoever waited gets to see its result before the loop ends
                await asyncio.wait(others, timeout=FLUSH_S)
            if self._key_watch is not None:
                self._key_watch.stop()
            self._interpreter.stop(FLUSH_S)

    # ------------------------------------------------------------------------------------------------------------ loop

    async def join(self, seeds: Sequence[str], timeout_s: float) -> FinishJoin:
        """Loop. Join through any of `seeds` ("host:port", or "host:port#NAME" of a peer in the allow-list); after a timeout
        the node goes on trying by itself.

        Raises ConfigError for an address that cannot be a peer's, UsageError if a join is under way.
        """
        addresses = tuple(self._interpreter.gate.seed(seed) for seed in seeds)
        if self._join is not None:
            raise UsageError("a join is under way already")
        self._require_running()
        future: asyncio.Future[FinishJoin] = self._loop.create_future()
        self._join = future
        try:
            self._interpreter.handle(JoinRequested(addresses, self._loop.time() + timeout_s))
            return await future
        finally:
            self._join = None

    async def tokens(self, holder: NodeId, anchor: AnchorMeta, deadline_s: float = TOKENS_DEADLINE_S) -> TokensResult:
        """Loop. Token ids and block digests of an anchor of `holder`."""
        if self._stop.is_set():
            return TokensResult(Miss(MissReason.SHUTDOWN), 0.0)
        request_id = self._take_id()
        future: asyncio.Future[TokensResult] = self._loop.create_future()
        self._tokens[request_id] = future
        try:
            self._interpreter.handle(TokensRequested(request_id, holder, anchor, self._loop.time() + deadline_s))
            return await future
        finally:
            self._tokens.pop(request_id, None)

    async def fetch(
        self,
        holder: NodeId,
        blocks: Sequence[tuple[BlockKey, int, bytes]],
        deadline_s: float,
        stall_s: float = math.inf,
        *,
        others: Sequence[NodeId] = (),
        busy_s: float = math.inf,
        anchors: Sequence[AnchorMeta] = (),
        raw_bytes: Mapping[BlockKey, int] = MappingProxyType({}),
    ) -> FetchResult:
        """Loop. Pull blocks, given as (key, kv_bytes, SHA-256 as `holder` states it). Cancelling the awaiting task cancels
        the pull. `others`: who else may have them, best first; `stall_s`, `busy_s`, `anchors` as in FetchRequested.
        `raw_bytes`: sizes of the blocks that are to come as int8, of which `kv_bytes` then says how many; they are handed
        over as such (`encodes` says which holder can be asked).

        Raises ValueError if a key comes twice or a size is not positive.
        """
        if len({key for key, _, _ in blocks}) != len(blocks) or any(size <= 0 for _, size, _ in blocks):
            raise ValueError("a block is wanted twice by one fetch, or without bytes")
        if self._stop.is_set():
            return FetchResult({}, {key: Miss(MissReason.SHUTDOWN) for key, _, _ in blocks}, 0.0)
        wants = tuple(
            Want(key, size, digest, self._store.reserve(size), raw_bytes.get(key, 0)) for key, size, digest in blocks
        )
        fetch_id = self._take_id()
        future: asyncio.Future[FetchResult] = self._loop.create_future()
        self._fetches[fetch_id] = (future, wants)
        holders = (holder, *others)
        deadline = self._loop.time() + deadline_s
        self._interpreter.handle(FetchRequested(fetch_id, holders, wants, deadline, stall_s, busy_s, tuple(anchors)))
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self._release(future.result())
            elif fetch_id in self._fetches:
                self._interpreter.handle(FetchCancelled(fetch_id))
            raise

    async def publish(self, anchors: Iterable[HeldAnchor]) -> None:
        """Loop. Hold these anchors; the node takes over one reference to each of their handles.

        Raises ValueError, and takes nothing over, if an anchor contradicts itself.
        """
        self._require_running()
        self._interpreter.handle(AnchorsPublished(tuple(anchors)))

    async def forget(self, anchor_ids: Iterable[AnchorId]) -> None:
        """Loop. Hold these anchors no longer."""
        self._require_running()
        self._interpreter.handle(AnchorsForgotten(tuple(anchor_ids)))

    async def erase(self, erasures: Iterable[Erasure], *, everywhere: bool) -> int:
        """Loop. Erase this content from the pool (returns how many anchors went), remember it (on disk, too, when this
        returns), and tell all members if it is to go `everywhere`."""
        self._require_running()
        before = self._interpreter.node.stats().pool_anchors
        self._interpreter.handle(EraseRequested(tuple(erasures), everywhere))
        gone = before - self._interpreter.node.stats().pool_anchors
        await self._interpreter.saved()
        return gone

    def on_erased(self, callback: Callable[[tuple[AnchorId, ...]], None]) -> None:
        """Before `start`: called on the loop whenever anchors were erased, here or on a member's word."""
        self._interpreter.on_erased = callback

    @property
    def identity(self) -> Identity | None:
        """Who signs in this node's name; None where there are no keys."""
        return self._interpreter.gate.identity

    def security(self) -> dict[str, Any]:
        """Loop. See `Gate.view`."""
        return self._interpreter.gate.view()

    async def touch(self, anchor_ids: Iterable[AnchorId]) -> None:
        """Loop. These held anchors were used just now."""
        self._require_running()
        self._interpreter.handle(AnchorsUsed(tuple(anchor_ids)))

    async def find(self, lookup: Lookup, deadline_s: float = LOOKUP_DEADLINE_S) -> LookupResult:
        """Loop. What the cluster has for a prompt: at once from a full index, otherwise after asking (see
        `LookupRequested`)."""
        if self._stop.is_set():
            return LookupResult((), MissReason.SHUTDOWN)
        request_id = self._take_id()
        future: asyncio.Future[LookupResult] = self._loop.create_future()
        self._lookups[request_id] = future
        try:
            self._interpreter.handle(LookupRequested(request_id, lookup, self._loop.time() + deadline_s))
            return await future
        finally:
            self._lookups.pop(request_id, None)

    def encodes(self, holder: NodeId) -> bool:
        """Loop. Whether blocks can be pulled from this holder as int8, and would have to travel at all."""
        return self._interpreter.node.encodes(holder)

    def held(self, anchor_id: AnchorId) -> HeldAnchor | None:
        """Loop. An anchor of the own pool."""
        return self._interpreter.node.held(anchor_id)

    def known_anchors(self) -> frozenset[AnchorId]:
        """Loop. Those of the own pool, and of peers as far as their logs are known here."""
        node = self._interpreter.node
        return node.pooled().union(*(node.known_of(peer.node_id) for peer in node.peers()))

    def peers(self) -> tuple[PeerView, ...]:
        """Loop. All peers that are remembered."""
        return self._interpreter.node.peers()

    def stats(self) -> DriverStats:
        """Loop. A snapshot."""
        return DriverStats(
            self._interpreter.node.stats(),
            self._interpreter.counters.copy(),
            len(self._store),
            self._store.held_bytes,
            self._store.reserved_bytes,
        )

    async def leave(self) -> None:
        """Loop. Say goodbye to the peers and finish everything that waits; `stop` still has to be called."""
        self._interpreter.handle(LeaveRequested())

    # ---------------------------------------------------------------------------------------------------------- inside

    def _take_id(self) -> int:
        taken, self._next_id = self._next_id, self._next_id + 1
        return taken

    def _require_running(self) -> None:
        if self._stop.is_set():
            raise UsageError("the driver is stopping")

    def _on_finish(self, finish: Finish) -> None:
        if isinstance(finish, FinishFetch):
            self._finish_fetch(finish)
        elif isinstance(finish, FinishLookup):
            asked = self._lookups.get(finish.request_id)
            if asked is not None and not asked.done():
                asked.set_result(finish.result)
        elif isinstance(finish, FinishTokens):
            waiting = self._tokens.get(finish.request_id)
            if waiting is not None and not waiting.done():
                waiting.set_result(TokensResult(finish.result, finish.wait_lost_s))
        elif self._join is not None and not self._join.done():
            self._join.set_result(finish)

    def _finish_fetch(self, finish: FinishFetch) -> None:
        future, _ = self._fetches.pop(finish.fetch_id)
        result = FetchResult(
            {block.key: block.handle for block in finish.found},
            {block.key: block.miss for block in finish.missed},
            finish.wait_lost_s,
        )
        if future.done():
            self._release(result)
        else:
            future.set_result(result)

    def _release(self, result: FetchResult) -> None:
        for handle in result.found.values():
            self._store.drop(handle)

    def _finish_all(self) -> None:
        """The node has finished what it knew of; this is for what it did not get to (it failed)."""
        miss = Miss(MissReason.SHUTDOWN)
        for future, wants in self._fetches.values():
            for want in wants:
                self._store.drop(want.handle)
            if not future.done():
                future.set_result(FetchResult({}, {want.key: miss for want in wants}, 0.0))
        self._fetches.clear()
        for asked in self._lookups.values():
            if not asked.done():
                asked.set_result(LookupResult((), MissReason.SHUTDOWN))
        for waiting in self._tokens.values():
            if not waiting.done():
                waiting.set_result(TokensResult(miss, 0.0))
        if self._join is not None and not self._join.done():
            self._join.set_result(FinishJoin(miss))
