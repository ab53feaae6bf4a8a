"""Find donors over the network: carries out the questions that `planning.finding` asks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcomm_p2p.model.spec import ModelSpec
from kvcomm_p2p.net.driver import Driver
from kvcomm_p2p.planning.finding import AskDirectory, AskTokens, Compute, Finding, FoundDonors, Question
from kvcomm_p2p.planning.lineage import Lineage
from kvcomm_p2p.planning.winnow import ContentMark
from kvcomm_p2p.protocol.ids import AnchorId, NodeId


class DonorFinder:
    """Asks the directory and, for promising sequences, their holders. Lives on the driver's loop."""

    def __init__(
        self,
        driver: Driver,
        lineage: Lineage,
        *,
        me: NodeId,
        spec: ModelSpec,
        vocabulary_size: int,
        content_key: bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._driver = driver
        self._finding = Finding(
            lineage,
            me=me,
            model_id=spec.model_id,
            layout=spec.layout,
            context_tokens_max=spec.context_tokens_max,
            vocabulary_size=vocabulary_size,
            content_key=content_key,
            held=driver.held,
            clock=clock,
        )

    async def find(self, token_ids: npt.NDArray[np.uint32], marks: Sequence[ContentMark] = ()) -> FoundDonors:
        """Donors for a prompt (uint32 [T]) and the names of its short contents; waits for peers at most the protocol's
        tokens timeout."""
        search = self._finding.search(token_ids, marks)
        answer: Any = None
        while True:
            try:
                question = search.send(answer)
            except StopIteration as found:
                donors: FoundDonors = found.value
                return donors
            answer = await self._answer(question)

    def forget(self, holder: NodeId, anchor_id: AnchorId) -> None:
        """What this holder said of this anchor turned out wrong."""
        self._finding.forget(holder, anchor_id)

    def distrust(self, holder: NodeId, anchor_id: AnchorId) -> None:
        """The guard rejected what was made of this anchor: see `Finding.distrust`."""
        self._finding.distrust(holder, anchor_id)

    async def _answer(self, question: Question) -> Any:
        if isinstance(question, Compute):
            return await asyncio.get_running_loop().run_in_executor(None, question.call)
        if isinstance(question, AskDirectory):
            return await self._driver.find(question.lookup)
        assert isinstance(question, AskTokens)
        answers = await asyncio.gather(*(self._driver.tokens(holder, anchor) for holder, anchor in question.wanted))
        return [(answer.result, answer.wait_lost_s) for answer in answers]
