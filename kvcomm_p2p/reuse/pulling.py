"""Bring the blocks that a plan needs: from the own store, and from peers with deadlines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcomm_p2p.net.driver import Driver, FetchResult
from kvcomm_p2p.net.encoding import NotEncodable, decode
from kvcomm_p2p.planning.fetches import (
    Limits,
    Wants,
    anchors_of,
    in_groups,
    limits_of,
    other_holders,
    own_blocks,
    peers_blocks,
)
from kvcomm_p2p.planning.finding import FoundDonors
from kvcomm_p2p.planning.types import Costs, Donor, Int8From, Plan, Span
from kvcomm_p2p.protocol.anchors import BLOCK_TOKENS, AnchorMeta, BlockHandle, BlockKey, KVLayout, Miss, MissReason
from kvcomm_p2p.protocol.ids import AnchorId, NodeId
from kvcomm_p2p.reuse.checks import PulledBlock
from kvcomm_p2p.store import BlockStore, StaleHandle


@dataclass(slots=True)
class Pulled:
    """What came. `blocks` holds local and remote bytes; `remote` the remote ones with what their holder said of them;
    `handles` are owned by us: publish them as replicas or drop them (what travelled as int8 has none: it is no replica).
    `kv_bytes`: as they travelled. `anchors` are those that remote blocks belong to,
    `token_ids` (uint32) all that the holder stated for each."""

    blocks: dict[BlockKey, memoryview] = field(default_factory=dict)
    remote: dict[BlockKey, PulledBlock] = field(default_factory=dict)
    handles: dict[BlockKey, BlockHandle] = field(default_factory=dict)
    anchors: dict[AnchorId, AnchorMeta] = field(default_factory=dict)
    token_ids: dict[AnchorId, npt.NDArray[np.uint32]] = field(default_factory=dict)
    failed: dict[BlockKey, Miss] = field(default_factory=dict)
    wait_lost_s: float = 0.0
    kv_bytes: int = 0
    seconds: float = 0.0


class Puller:
    """Lives on the driver's loop."""

    def __init__(
        self,
        driver: Driver,
        store: BlockStore,
        layout: KVLayout | None = None,
        compute: Executor | None = None,
        always_int8: bool = False,
    ) -> None:
        """`layout`: of blocks that may come as int8, which `compute` decodes (None: the loop's own threads); None: none
        may. `always_int8`: see `Int8From.always`."""
        self._driver = driver
        self._store = store
        self._layout = layout
        self._compute = compute
        self._always_int8 = always_int8

    def int8(self, donors: Iterable[Donor]) -> Int8From:
        """Which of their holders send KV as int8."""
        if self._layout is None:
            return Int8From()
        holders = dict.fromkeys(donor.holder for donor in donors if not donor.local)
        return Int8From(frozenset(filter(self._driver.encodes, holders)), self._always_int8)

    def local(self, plan: Plan) -> Pulled:
        """The blocks of the plan that the own pool holds; what it does not hold any more is in `failed`."""
        pulled = Pulled()
        for key in own_blocks(plan):
            self._take_local(key, pulled)
        return pulled

    async def pull(
        self,
        plan: Plan,
        found: FoundDonors,
        costs: Costs,
        pulled: Pulled,
        on_blocks: Callable[[dict[BlockKey, memoryview]], Awaitable[None]],
    ) -> Pulled:
        """Adds the blocks that peers hold to `pulled` (from `local`) and returns it; `on_blocks` gets them as they come.

        Never raises for a peer's fault: what did not come is in `failed`. Cancelled, it keeps nothing.
        """
        started = time.perf_counter()
        used = {key.anchor_id for key in pulled.blocks}
        try:
            if used:
                await self._driver.touch(sorted(used))
            await _all(
                *(
                    self._fetch_all(holder, wants, int8, found, costs, pulled, on_blocks)
                    for (holder, int8), wants in peers_blocks(plan).items()
                )
            )
        except BaseException:
            self.release(pulled, list(pulled.handles))
            raise
        pulled.seconds = time.perf_counter() - started
        return pulled

    def release(self, pulled: Pulled, keys: Iterable[BlockKey]) -> None:
        """Drop handles that nobody will publish."""
        for key in tuple(keys):
            handle = pulled.handles.pop(key, None)
            if handle is not None:
                self._store.drop(handle)

    def _take_local(self, key: BlockKey, pulled: Pulled) -> None:
        held = self._driver.held(key.anchor_id)
        try:
            if held is None:
                raise StaleHandle(key)
            pulled.blocks[key] = self._store.view(held.handles[key.index])
        except StaleHandle:
            pulled.failed[key] = Miss(MissReason.EVICTED, "evicted from the own pool between planning and reading")

    async def _fetch_all(
        self,
        holder: NodeId,
        wants: Wants,
        int8: bool,
        found: FoundDonors,
        costs: Costs,
        pulled: Pulled,
        on_blocks: Callable[[dict[BlockKey, memoryview]], Awaitable[None]],
    ) -> None:
        """Everything that is wanted of one holder, in groups, each handed on when it is whole."""
        limits = limits_of(wants, found.wait_lost_s, costs)

        async def fetch(group: Wants) -> None:
            came = await self._fetch(holder, group, int8, found, limits, pulled)
            if came:
                await on_blocks(came)

        await _all(*(fetch(group) for group in in_groups(wants)))

    async def _fetch(
        self,
        holder: NodeId,
        wants: Wants,
        int8: bool,
        found: FoundDonors,
        limits: Limits,
        pulled: Pulled,
    ) -> dict[BlockKey, memoryview]:
        raw_bytes = {key: anchor.block_bytes(index) for key, (anchor, index) in wants.items()}
        asked = [
            (key, self._wire_bytes(anchor, index, int8), found.details[holder, anchor.anchor_id].digests[index])
            for key, (anchor, index) in wants.items()
        ]
        result = await self._driver.fetch(
            holder,
            asked,
            limits.deadline_s,
            limits.stall_s,
            others=other_holders(wants, found, holder),
            busy_s=limits.busy_s,
            anchors=tuple(anchors_of(wants).values()),
            **({"raw_bytes": raw_bytes} if int8 else {}),
        )
        pulled.failed.update(result.missed)
        pulled.wait_lost_s = max(pulled.wait_lost_s, result.wait_lost_s)
        came = self._taken(result, pulled, own=not int8)
        if int8:
            came = await self._decoded(came, {key: wants[key][0].block_tokens(wants[key][1]) for key in came}, pulled)
        for key, data in came.items():
            anchor, index = wants[key]
            detail = found.details[holder, anchor.anchor_id]
            offset = index * BLOCK_TOKENS
            pulled.blocks[key] = data
            pulled.anchors[anchor.anchor_id] = anchor
            pulled.token_ids[anchor.anchor_id] = detail.token_ids
            pulled.remote[key] = PulledBlock(
                key=key,
                data=data,
                digest=detail.digests[index],
                token_ids=detail.token_ids[offset : offset + anchor.block_tokens(index)],
                position=anchor.start + offset,
                int8=int8,
            )
        return came

    def _taken(self, result: FetchResult, pulled: Pulled, *, own: bool) -> dict[BlockKey, memoryview]:
        """What was fetched; its handles are kept if we `own` them from now on, else dropped (the bytes stay)."""
        came: dict[BlockKey, memoryview] = {}
        for key, handle in result.found.items():
            try:
                came[key] = self._store.view(handle)
            except StaleHandle:
                pulled.failed[key] = Miss(MissReason.EVICTED, "the fetched block was dropped before it was read")
                continue
            pulled.kv_bytes += came[key].nbytes
            if own:
                pulled.handles[key] = handle
            else:
                self._store.drop(handle)
        return came

    async def _decoded(
        self, encoded: Mapping[BlockKey, memoryview], tokens: Mapping[BlockKey, int], pulled: Pulled
    ) -> dict[BlockKey, memoryview]:
        """The blocks that these are int8 forms of; what is none is in `pulled.failed`."""
        layout = self._layout
        assert layout is not None

        def decode_all() -> dict[BlockKey, memoryview | Miss]:
            return {key: _decoded(data, layout, tokens[key]) for key, data in encoded.items()}

        blocks = await asyncio.get_running_loop().run_in_executor(self._compute, decode_all)
        pulled.failed.update({key: miss for key, miss in blocks.items() if isinstance(miss, Miss)})
        return {key: data for key, data in blocks.items() if not isinstance(data, Miss)}

    def _wire_bytes(self, anchor: AnchorMeta, index: int, int8: bool) -> int:
        """What a block comes to on the way."""
        return (
            self._layout.int8_bytes(anchor.block_tokens(index)) if int8 and self._layout else anchor.block_bytes(index)
        )


def _decoded(data: memoryview, layout: KVLayout, tokens: int) -> memoryview | Miss:
    try:
        return decode(data, layout, tokens)
    except NotEncodable as error:
        return Miss(MissReason.NOT_FINITE, str(error))
    except ValueError as error:
        return Miss(MissReason.LENGTH_MISMATCH, str(error))


async def _all(*work: Coroutine[Any, Any, None]) -> None:
    """Wait for all; when one fails or we are cancelled, none of the others goes on."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def donor_spans(plan: Plan) -> list[Span]:
    """Spans that need donor KV: everything with a donor, the recomputed heads of reused runs included (the guard compares)."""
    return [span for span in plan.spans if span.donor is not None]
