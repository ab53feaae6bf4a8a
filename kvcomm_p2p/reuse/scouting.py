"""Having a look at links that are believed too slow (`planning.scouting`): pull a few blocks, place them, tell the costs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial

from kvcomm_p2p.model.cache import KVCache
from kvcomm_p2p.model.runner import ModelRunner
from kvcomm_p2p.net.driver import Driver
from kvcomm_p2p.planning.costs import CostTracker
from kvcomm_p2p.planning.finding import FoundDonors
from kvcomm_p2p.planning.scouting import SCOUT_LIMITS, Look, Scouting
from kvcomm_p2p.planning.types import Plan
from kvcomm_p2p.protocol.anchors import BlockKey
from kvcomm_p2p.reuse.align import Aligner
from kvcomm_p2p.store import BlockStore, StaleHandle


class Scout:
    """Lives on the driver's loop; places blocks in compute threads."""

    def __init__(
        self,
        driver: Driver,
        store: BlockStore,
        runner: ModelRunner,
        costs: CostTracker,
        compute: Executor,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._driver = driver
        self._store = store
        self._runner = runner
        self._costs = costs
        self._compute = compute
        self._clock = clock
        self._scouting = Scouting()

    def wanted(self, plan: Plan, found: FoundDonors) -> Look | None:
        """What to look at now, if anything; whoever asks looks (`look`), or nobody does for a while."""
        return self._scouting.look(plan, found, self._clock())

    async def look(self, look: Look, found: FoundDonors) -> bool:
        """Pull the blocks and tell the costs; False if not all came."""
        holder = look.donor.holder
        blocks = [
            (key, anchor.block_bytes(index), found.details[holder, anchor.anchor_id].digests[index])
            for key, (anchor, index) in look.wants.items()
        ]
        started = self._clock()
        result = await self._driver.fetch(holder, blocks, SCOUT_LIMITS.deadline_s)
        seconds = self._clock() - started
        try:
            views = {key: self._store.view(handle) for key, handle in result.found.items()}
        except StaleHandle:
            views = {}
        finally:
            for handle in result.found.values():
                self._store.drop(handle)
        if not views or result.missed:
            return False
        self._costs.saw_pull(holder, sum(view.nbytes for view in views.values()), seconds)
        await asyncio.get_running_loop().run_in_executor(self._compute, partial(self._place, look, views))
        return True

    def _place(self, look: Look, views: dict[BlockKey, memoryview]) -> None:
        """Align the blocks one position further, as a reused run would be."""
        span = look.span()
        cache = self._runner.new_cache(span.end)
        if not isinstance(cache, KVCache) or self._runner.spec.rotary is None:
            return
        cache.reserve(span.end)
        aligner = Aligner(cache, [span], self._runner.spec.rotary)
        aligner.put(views)
        self._costs.saw_align(aligner.kv_bytes, aligner.seconds)
