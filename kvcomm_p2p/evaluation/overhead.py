"""What a request loses where nothing is gained: is reuse never slower than computing everything?

The holder of the documents is another process, as peers are, so that pulling and looking up cost what they cost. The agent
that is measured runs in this one, because some of what it goes by is replaced: the guard's fit by one that rejects everything,
and its link by a slower one. Each of these cases has an agent of its own, which shares the loaded model and begins with what
the ones before learned about computing here. Every prompt is new to its agent and nothing of it is kept; each is filled with
and without reuse, in turns. Nothing redraws itself meanwhile: a progress bar would compute beside what is measured.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from kvcomm_p2p.agent import Agent
from kvcomm_p2p.errors import KVCommError, UsageError
from kvcomm_p2p.evaluation.compare import aside, timed_fill
from kvcomm_p2p.evaluation.documents import Document, chat, cut_documents, library, questions
from kvcomm_p2p.evaluation.metrics import interval95
from kvcomm_p2p.evaluation.results import Result, Row
from kvcomm_p2p.evaluation.ttft import CONSUMER_ROLE, HOLDER_ROLE
from kvcomm_p2p.evaluation.workers import Worker, private_cluster
from kvcomm_p2p.model.runner import ModelRunner
from kvcomm_p2p.net.driver import Driver, FetchResult
from kvcomm_p2p.planning.costs import CostTracker
from kvcomm_p2p.planning.divergence import DivergenceFit
from kvcomm_p2p.planning.plan import KL_MAX
from kvcomm_p2p.planning.types import Costs, Mode
from kvcomm_p2p.prompts import PreparedPrompt, prepare, prepare_ids
from kvcomm_p2p.protocol.anchors import BlockKey
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.report import PrefillReport
from kvcomm_p2p.reuse.guard import WIDEN_KL_FACTOR
from kvcomm_p2p.settings import Settings

if TYPE_CHECKING:
    from rich.console import Console

ANSWER_TOKENS = 32
"""Room that requests ask for behind the prompt."""

WARM_UP_TOKENS = 64
"""Of the first prompt of every agent, which is not counted."""

HEARD_TIMEOUT_S = 20.0
HEARD_ROUNDS = 6
"""Rounds of gossip after which everybody has heard what an agent published."""

COVERED_MIN = 0.9
"""Of a document that a peer holds, at least so much must be found: else it is not what was to be measured."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens of the prompts that share nothing; of the documents whose reuse the guard rejects; of the shared runs that are
    pulled over each of `links` (bytes per second); of the documents for which searching and planning is timed."""

    missing: Sequence[int] = (100, 500, 1000, 2000)
    rejected: Sequence[int] = (100, 500, 1000, 2000)
    runs: Sequence[int] = (64, 128, 256, 512, 1024)
    links: Sequence[float] = (10e6, 100e6, 1e9)
    searched: Sequence[int] = (1000, 4000)


DEFAULT_SIZES = Sizes()


@dataclass(frozen=True, slots=True)
class Pair:
    """One prompt: seconds to the first token's logits with reuse allowed, and without; the report of the former."""

    allowed_s: float
    dense_s: float
    report: PrefillReport

    @property
    def reused(self) -> bool:
        """Anything came from a peer, and was kept."""
        return any(span.source for span in self.report.spans)


def run(console: Console | None = None, *, model: str = "smollm2-135m", repeats: int = 5) -> Result:
    """Medians over `repeats` prompts of each kind; about ten minutes on two cores.

    Raises ModelError, UsageError for a model without a profile, and KVCommError if a document that a peer holds was not found.
    """
    settings = replace(Settings.from_env(), cluster=private_cluster(), control_port=0, bulk_port=0)
    runner = ModelRunner.load(model, cache_dir=settings.cache_dir)
    with Worker("holder", model, cluster=settings.cluster) as holder:
        holder.wait_ready()
        return Result("bench overhead", measure(runner, holder, settings, repeats, console=console), 0)


def measure(
    runner: ModelRunner,
    holder: Worker,
    settings: Settings,
    repeats: int,
    sizes: Sizes = DEFAULT_SIZES,
    console: Console | None = None,
) -> list[Row]:
    """`run` with a loaded model, and a holder of the same model in the cluster of `settings`. Raises as `run`."""
    if runner.spec.profile is None:
        raise UsageError(f"no profile for {runner.spec.name}: run kvcomm calibrate {runner.spec.name} first")
    return asyncio.run(_Measurement(runner, holder, settings, repeats, sizes, console).all())


def constant_fit(kl: float) -> DivergenceFit:
    """A guard's fit that predicts `kl` nats per token whatever it is shown."""
    return DivergenceFit(intercept=math.log(kl), body=0.0, head=0.0, entropy=0.0, spread=0.0, prompts=1)


REJECTIONS = {
    "guard rejects": constant_fit(100 * KL_MAX[Mode.BALANCED]),
    "guard asks for longer heads, then rejects": constant_fit(math.sqrt(WIDEN_KL_FACTOR) * KL_MAX[Mode.BALANCED]),
}


@dataclass(slots=True)
class Link:
    """When what is asked of a link of `bytes_per_s` would have come: one thing after the other, at full speed."""

    bytes_per_s: float
    free_at: float = field(default=0.0)

    def arrival(self, kv_bytes: int, now: float) -> float:
        """Takes the link for `kv_bytes` more bytes; the moment at which the last of them is here."""
        self.free_at = max(now, self.free_at) + kv_bytes / self.bytes_per_s
        return self.free_at


class SlowDriver:
    """Stands where the puller has its driver. What it fetches comes over loopback, but no sooner than `link` would bring it."""

    def __init__(self, driver: Driver, link: Link) -> None:
        self._driver = driver
        self._link = link

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)

    async def fetch(
        self,
        holder: NodeId,
        blocks: Sequence[tuple[BlockKey, int, bytes]],
        deadline_s: float,
        stall_s: float = math.inf,
        **more: Any,
    ) -> FetchResult:
        """As `Driver.fetch`."""
        arrival = self._link.arrival(sum(kv_bytes for _, kv_bytes, _ in blocks), time.perf_counter())
        result = await self._driver.fetch(holder, blocks, deadline_s, stall_s, **more)
        await asyncio.sleep(max(0.0, arrival - time.perf_counter()))
        return result


class _Measurement:
    """All of it, in order. Documents are held shortly before they are needed: the holder's pool need not have room for all."""

    def __init__(
        self,
        runner: ModelRunner,
        holder: Worker,
        settings: Settings,
        repeats: int,
        sizes: Sizes,
        console: Console | None,
    ) -> None:
        self._runner, self._holder, self._settings = runner, holder, settings
        self._repeats, self._sizes, self._console = repeats, sizes, console
        self._topics = library()
        self._anchors = 0
        self._agents = 0
        self._costs: Costs | None = None

    async def all(self) -> list[Row]:
        runs = {tokens: self._documents(tokens) for tokens in self._sizes.runs}
        await self._hold(document for documents in runs.values() for document in documents)
        rows = await self._missing()
        for bytes_per_s in self._sizes.links:
            rows += await self._linked(runs, bytes_per_s)
        held = {tokens: self._documents(tokens) for tokens in self._sizes.rejected}
        await self._hold(document for documents in held.values() for document in documents)
        for title, fit in REJECTIONS.items():
            rows += await self._rejected(title, fit, held)
        for tokens in self._sizes.searched:
            rows += await self._searched(tokens)
        return rows

    async def _missing(self) -> list[Row]:
        """Prompts that share nothing with anybody, in a cluster that holds other things."""
        rows: list[Row] = []
        async with self._agent() as agent:
            for tokens in self._sizes.missing:
                pairs = []
                for number, document in enumerate(self._documents(tokens)):
                    ids = self._runner.tokenizer.encode(document.text, add_special_tokens=False)[:tokens]
                    prompt = prepare_ids(ids, self._runner.vocabulary_size, key=agent._running().group_key)
                    pairs.append(await _pair(agent, prompt, number))
                rows += self._told(f"nothing to reuse, {tokens:,} tokens", pairs)
        return rows

    async def _linked(self, runs: dict[int, list[Document]], bytes_per_s: float) -> list[Row]:
        """Runs of every length over a link; the agent has been told how fast it is, and goes on learning."""
        rows: list[Row] = []
        async with self._agent(bytes_per_s=bytes_per_s) as agent:
            for tokens, documents in runs.items():
                pairs = [await self._found(agent, document, number) for number, document in enumerate(documents)]
                case = f"{tokens:,} shared tokens over {bytes_per_s / 1e6:,.0f} MB/s"
                rows += self._told(case, pairs, ("requests that reuse", lambda pair: pair.reused))
        return rows

    async def _rejected(self, title: str, fit: DivergenceFit, held: dict[int, list[Document]]) -> list[Row]:
        """Everything is pulled, aligned and repaired, and then computed all the same."""
        rows: list[Row] = []
        async with self._agent(fit=fit) as agent:
            for tokens, documents in held.items():
                pairs = [await self._found(agent, document, number) for number, document in enumerate(documents)]
                counted = ("requests rejected", lambda pair: bool(pair.report.fallback))
                rows += self._told(f"{title}, {tokens:,} shared tokens", pairs, counted)
        return rows

    async def _searched(self, tokens: int) -> list[Row]:
        """How much of the time to first token passes before anything is pulled or computed."""
        documents = self._documents(tokens)
        await self._hold(documents)
        reports = []
        async with self._agent() as agent:
            for number, document in enumerate(documents):
                filled, _ = await timed_fill(agent, self._prompt(document, number), Mode.BALANCED, ANSWER_TOKENS)
                reports.append(_checked(filled.report, document))
        return _search_rows(f"search and plan, {tokens:,} shared tokens", reports)

    async def _found(self, agent: Agent, document: Document, number: int) -> Pair:
        pair = await _pair(agent, self._prompt(document, number), number)
        _checked(pair.report, document)
        return pair

    def _told(
        self, case: str, pairs: Sequence[Pair], counted: tuple[str, Callable[[Pair], bool]] | None = None
    ) -> list[Row]:
        rows = pair_rows(case, pairs)
        if counted is not None:
            metric, holds = counted
            rows.append(Row(case, metric, 100 * sum(map(holds, pairs)) / len(pairs), "%", len(pairs)))
        self._say(f"{case}: {rows[1].value:.2f} times full prefill")
        return rows

    def _documents(self, tokens: int) -> list[Document]:
        return cut_documents(self._runner.tokenizer, tokens, self._repeats, self._topics)

    def _prompt(self, document: Document, number: int) -> PreparedPrompt:
        question = questions(number + 2)[-1]
        return prepare(self._runner.tokenizer, chat(CONSUMER_ROLE, question), {"document": document.text})

    async def _hold(self, documents: Sequence[Document] | Iterator[Document]) -> None:
        """The holder prefills the documents, behind its own role and before another question than ours."""
        for number, document in enumerate(documents):
            messages, slots = chat(HOLDER_ROLE, questions(number % self._repeats + 1)[-1]), {"document": document.text}
            answer = await aside(partial(self._holder.ask, do="hold", messages=messages, slots=slots))
            self._anchors = answer["anchors"]
        self._say("documents are held")

    @asynccontextmanager
    async def _agent(
        self, *, fit: DivergenceFit | None = None, bytes_per_s: float | None = None
    ) -> AsyncIterator[Agent]:
        """An agent that knows what the holder has, with a guard of this fit, and a link of this speed."""
        runner, self._agents = self._runner, self._agents + 1
        if fit is not None and runner.spec.profile is not None:
            spec = replace(runner.spec, profile=replace(runner.spec.profile, divergence=fit))
            runner = ModelRunner(runner.model, runner.tokenizer, spec, runner._call)
        name = f"consumer-{self._agents}"
        async with Agent(name, model=runner, join=[self._holder.address], settings=self._settings) as agent:
            stack = agent._running()
            costs = self._costs or stack.engine._costs.costs
            if bytes_per_s is not None:
                costs = replace(costs, pull_bytes_per_s=bytes_per_s)
                stack._puller._driver = cast(Driver, SlowDriver(stack.driver, Link(bytes_per_s)))
            stack.engine._costs = CostTracker(costs)
            await self._heard(agent)
            await _pair(agent, prepare_ids(range(WARM_UP_TOKENS), runner.vocabulary_size), 0)
            yield agent
            # The first one only computes: what it learned of that is what the others begin with.
            self._costs = self._costs or stack.engine._costs.costs

    async def _heard(self, agent: Agent) -> None:
        """Until the agent knows what the holder has."""
        deadline = time.monotonic() + HEARD_TIMEOUT_S
        while not any(peer["anchors"] >= self._anchors for peer in agent.status().peers):
            if time.monotonic() > deadline:
                raise KVCommError(f"the holder's anchors were not heard of within {HEARD_TIMEOUT_S:g} s")
            await asyncio.sleep(self._settings.gossip_interval_s)
        await asyncio.sleep(HEARD_ROUNDS * self._settings.gossip_interval_s)

    def _say(self, text: str) -> None:
        if self._console is not None:
            self._console.print(text, style="dim")


def pair_rows(case: str, pairs: Sequence[Pair]) -> list[Row]:
    """Medians of both, and their ratio the way the promise is put: how many times as long as full prefill it takes."""
    allowed, dense = [pair.allowed_s for pair in pairs], [pair.dense_s for pair in pairs]
    n = len(pairs)
    slower = median(allowed) / median(dense)
    each = [pair.allowed_s / pair.dense_s for pair in pairs]
    return [
        Row(case, "first token, against full prefill", median(allowed), "s", n, None, median(dense), 1 / slower),
        Row(case, "times full prefill", slower, "×", n, interval95(each, lambda values: float(np.median(values)), 0)),
    ]


def _search_rows(case: str, reports: Sequence[PrefillReport]) -> list[Row]:
    n = len(reports)
    times = [report.timings for report in reports]
    shares = [100 * (each.find_s + each.plan_s) / each.total_s for each in times]
    return [
        Row(case, "first token", median(each.total_s for each in times), "s", n),
        Row(case, "of it: search, alignment and planning", median(shares), "%", n),
        Row(case, "of it: search", median(each.find_s for each in times), "s", n),
        Row(case, "of it: alignment and planning", median(each.plan_s for each in times), "s", n),
    ]


def _checked(report: PrefillReport, document: Document) -> PrefillReport:
    if report.covered_tokens < COVERED_MIN * document.tokens:
        misses = "; ".join(f"{miss.what}: {miss.reason} {miss.detail}" for miss in report.misses)
        raise KVCommError(
            f"{report.covered_tokens} of the {document.tokens} tokens of {document.title!r} were found at the peer ({misses})"
        )
    return report


async def _pair(agent: Agent, prompt: PreparedPrompt, number: int) -> Pair:
    """One prompt both ways, every other time the other way first."""
    if number % 2:
        _, dense_s = await timed_fill(agent, prompt, Mode.DENSE, ANSWER_TOKENS)
        filled, allowed_s = await timed_fill(agent, prompt, Mode.BALANCED, ANSWER_TOKENS)
    else:
        filled, allowed_s = await timed_fill(agent, prompt, Mode.BALANCED, ANSWER_TOKENS)
        _, dense_s = await timed_fill(agent, prompt, Mode.DENSE, ANSWER_TOKENS)
    return Pair(allowed_s, dense_s, filled.report)
