"""Having a look at links that are believed too slow: nothing would ever be pulled over them again, and nothing be learned.

What an agent believes of transfers before it has seen one is on the side of slow; what it has seen may be long ago. So where
reuse was turned down for its cost, a few of those blocks are pulled in the background, after the answer, and placed into
scratch memory: the next plan knows. At most once per peer in SCOUT_EVERY_S.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial

from kvcomm_p2p.model.cache import KVCache
from kvcomm_p2p.model.runner import ModelRunner
from kvcomm_p2p.net.driver import Driver
from kvcomm_p2p.planning.costs import CostTracker
from kvcomm_p2p.planning.finding import FoundDonors
from kvcomm_p2p.planning.types import Donor, Plan, Span, SpanKind
from kvcomm_p2p.protocol.anchors import BLOCK_TOKENS, BlockKey, MissReason
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.reuse.align import Aligner
from kvcomm_p2p.store import BlockStore, StaleHandle

SCOUT_EVERY_S = 30.0
SCOUT_BLOCKS = 4
SCOUT_DEADLINE_S = 2.0
SCOUTED_MAX = 1024
"""Peers whose last look is remembered."""


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
        self._looked_at: OrderedDict[NodeId, float] = OrderedDict()

    def wants(self, plan: Plan, found: FoundDonors) -> Donor | None:
        """A donor at the peer that lost most tokens to its cost, if that peer is due for a look."""
        lost: Counter[NodeId] = Counter()
        for rejected in plan.rejected:
            if rejected.miss.reason is MissReason.COST:
                lost[rejected.holder] += rejected.end - rejected.start
        now = self._clock()
        for holder, _ in sorted(lost.items(), key=lambda item: (-item[1], item[0])):
            looked_at = self._looked_at.get(holder)
            if looked_at is not None and now - looked_at < SCOUT_EVERY_S:
                continue
            for donor in found.donors:
                if donor.holder == holder and not donor.local:
                    return donor
        return None

    async def look(self, plan: Plan, found: FoundDonors) -> bool:
        """Pull a few blocks and tell the costs; False if there was nothing to look at, or nothing came."""
        donor = self.wants(plan, found)
        if donor is None:
            return False
        self._looked_at[donor.holder] = self._clock()
        self._looked_at.move_to_end(donor.holder)
        while len(self._looked_at) > SCOUTED_MAX:
            self._looked_at.popitem(last=False)
        anchor = donor.anchors[0]
        detail = found.details.get((donor.holder, anchor.anchor_id))
        if detail is None:
            return False
        blocks = [
            (BlockKey(anchor.anchor_id, index), anchor.block_bytes(index), detail.digests[index])
            for index in range(min(SCOUT_BLOCKS, anchor.blocks))
        ]
        started = self._clock()
        result = await self._driver.fetch(donor.holder, blocks, SCOUT_DEADLINE_S)
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
        self._costs.saw_pull(donor.holder, sum(view.nbytes for view in views.values()), seconds)
        await asyncio.get_running_loop().run_in_executor(self._compute, partial(self._place, donor, views))
        return True

    def _place(self, donor: Donor, views: dict[BlockKey, memoryview]) -> None:
        """Align the blocks one position further, as a reused run would be."""
        tokens = min(len(views) * BLOCK_TOKENS, donor.anchors[0].tokens)
        cache = self._runner.new_cache(tokens + 1)
        if not isinstance(cache, KVCache) or self._runner.spec.rotary is None:
            return
        cache.reserve(tokens + 1)
        span = Span(1, 1 + tokens, SpanKind.REUSE, donor, donor.start)
        aligner = Aligner(cache, [span], self._runner.spec.rotary)
        aligner.put(views)
        self._costs.saw_align(aligner.kv_bytes, aligner.seconds)
