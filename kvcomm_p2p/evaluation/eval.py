"""Four workloads through real agents: what is taken over from whom, and what that does to the answers.

Several agents in one process, each with a node, a pool and sockets of its own, share one loaded model and pull from each
other over loopback. Every request is answered in the mode under test, as a user would ask it; that fills the cluster.
Then, outside of what is timed, the same prompt is prefilled in full, without anything of ours, and compared.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcomm_p2p.agent import Agent
from kvcomm_p2p.errors import KVCommError, UsageError
from kvcomm_p2p.evaluation.compare import aside
from kvcomm_p2p.evaluation.metrics import Continuation, Divergence, continue_greedily, diverge_at_once
from kvcomm_p2p.evaluation.progress import Step, stepping
from kvcomm_p2p.evaluation.results import Result, Row, machine
from kvcomm_p2p.evaluation.scores import Failure, Published, Sample, extra
from kvcomm_p2p.evaluation.summary import Case, rows
from kvcomm_p2p.evaluation.workers import private_cluster
from kvcomm_p2p.evaluation.workloads.catalogue import NAMES, Data, build
from kvcomm_p2p.evaluation.workloads.types import Ask, Task, Workload
from kvcomm_p2p.model.cache import KVCache
from kvcomm_p2p.model.decoding import Sampling, end_tokens
from kvcomm_p2p.model.runner import ModelRunner
from kvcomm_p2p.modes import parse_mode
from kvcomm_p2p.settings import Settings
from kvcomm_p2p.stack import Publication

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MODES = ("balanced",)
DEFAULT_MODEL = "smollm2-135m"
TOKENS = {"rag": 32, "mathematics": 48, "code": 48, "creative": 48}
"""Longest answers."""

MEET_TIMEOUT_S = 20.0
HEARD_ROUNDS = 6
"""Rounds of gossip after which everybody has heard what an agent published, before the next one is asked."""

Controls = Callable[[ModelRunner, Case], Sequence[Row]]
"""More rows for the table of a case, from the prompts of its samples; called when the case is measured, in this thread.
Their `case` is the case's name, a comma and what was done instead: "rag, balanced, no rotation"."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """`interrupted`: by Ctrl-C; what had been measured until then is in `result` and `cases`. `skipped`: workload ->
    why it did not run."""

    result: Result
    cases: tuple[Case, ...]
    skipped: dict[str, str]
    interrupted: bool

    def tables(self) -> list[Table]:
        """One per case, with the rows of its controls, whose case begins with its name and a comma."""
        tables = []
        for name in (case.name for case in self.cases):
            own = [row for row in self.result.rows if row.case == name or row.case.startswith(f"{name},")]
            if own:
                tables.append(Result(f"eval: {name}", own, self.result.seed).table())
        return tables


def run(
    console: Console | None = None,
    *,
    workload: str = "all",
    modes: Sequence[str] = MODES,
    model: str | ModelRunner = DEFAULT_MODEL,
    requests: int | None = None,
    tokens: int | None = None,
    seed: int = 0,
    data: Data | None = None,
    plots: Path | None = None,
    controls: Controls | None = None,
    settings: Settings | None = None,
) -> Evaluation:
    """Measures `workload` (one of catalogue.NAMES, or "all") in each of `modes`. `requests` and `tokens` are per workload
    and per answer; the defaults take about ten minutes for "all" in one mode on two cores. `plots`: folder for pictures.

    A request that fails becomes a row with the reason. "all" skips a workload whose data file is not given. Raises
    UsageError, ConfigError (a file that is missing or wrong, an extra that is not installed) and ModelError before
    anything is measured.
    """
    for module in ("sacrebleu.metrics", *(["matplotlib.figure"] if plots else [])):
        extra(module)
    if workload not in (*NAMES, "all"):
        raise UsageError(f"workload {workload!r} is not known: use one of {', '.join((*NAMES, 'all'))}")
    modes = list(dict.fromkeys(parse_mode(mode).value for mode in modes))
    data, settings = data or Data(), settings or Settings.from_env()
    wanted = NAMES if workload == "all" else (workload,)
    skipped = {name: why for name in wanted if (why := data.missing(name))} if workload == "all" else {}
    runner = model if isinstance(model, ModelRunner) else ModelRunner.load(model, cache_dir=settings.cache_dir)
    if runner.spec.share_refusal:
        raise UsageError(f"KV of {runner.spec.name} cannot be exchanged: {runner.spec.share_refusal}")
    workloads = [build(name, runner.tokenizer, data, requests, seed) for name in wanted if name not in skipped]
    cases: list[Case] = []
    table: list[Row] = []
    interrupted = False
    try:
        for each in workloads:
            for mode in modes:
                case = Case(each.name, mode, each.score_name)
                cases.append(case)
                try:
                    measure(runner, each, case, console, tokens=tokens or TOKENS[each.name], settings=settings)
                except Exception as error:  # the other cases are worth their figures
                    case.failures.append(Failure("", "", len(case.samples), f"the rest of the run: {_reason(error)}"))
                table += rows(case, seed)
                table += controls(runner, case) if controls else ()
    except KeyboardInterrupt:
        interrupted = True
        told = {row.case for row in table}
        table += [row for case in cases if case.name not in told for row in rows(case, seed)]
    if plots is not None:
        from kvcomm_p2p.evaluation.plots import draw

        draw(plots, cases)
    return Evaluation(Result(f"eval {workload}", table, seed), tuple(cases), skipped, interrupted)


def measure(
    runner: ModelRunner,
    workload: Workload,
    case: Case,
    console: Console | None = None,
    *,
    tokens: int,
    settings: Settings,
) -> None:
    """Runs a workload in `case.mode` through agents of its own, answers of up to `tokens` tokens, and adds to `case`
    what comes of it, request by request. Raises KVCommError if the agents do not find each other."""
    with stepping(console, case.name, workload.requests) as step:
        asyncio.run(_Run(runner, workload, case, tokens, settings, step).all())


class WatchedAgent(Agent):
    """An agent that also keeps what its last request was filled with, for the comparison."""

    publication: Publication | None = None

    async def _fill(self, *arguments: Any, **options: Any) -> Publication:
        self.publication = await super()._fill(*arguments, **options)
        return self.publication


class _Run:
    """One workload in one mode."""

    def __init__(
        self, runner: ModelRunner, workload: Workload, case: Case, tokens: int, settings: Settings, step: Step
    ) -> None:
        self._runner, self._workload, self._case, self._tokens, self._step = runner, workload, case, tokens, step
        self._settings = _settings(settings, len(workload.roles))
        self._published = Published()
        self._asked: set[str] = set()
        self._number = 0

    async def all(self) -> None:
        """Every task, one request at a time."""
        async with _cluster(self._runner, list(self._workload.roles), self._settings) as agents:
            for task in self._workload.tasks:
                conversation = task.converse()
                ask = next(conversation, None)
                while ask is not None:
                    answer = await self._answered(task, ask, agents[ask.agent])
                    self._step(f"{task.name}, {ask.agent}")
                    try:
                        ask = conversation.send(answer)
                    except StopIteration:
                        ask = None

    async def _answered(self, task: Task, ask: Ask, agent: WatchedAgent) -> str:
        """The answer's text, "" if there is none; adds a sample or a failure."""
        number, self._number = self._number, self._number + 1
        try:
            sample = await self._sample(task, ask, agent, number)
        except Exception as error:  # whatever one request runs into, the others are worth their figures
            self._case.failures.append(Failure(task.name, ask.agent, number, _reason(error)))
            return ""
        finally:
            self._asked.add(ask.agent)
        self._case.samples.append(sample)
        return sample.answer

    async def _sample(self, task: Task, ask: Ask, agent: WatchedAgent, number: int) -> Sample:
        messages = [dict(message) for message in ask.messages]
        sampling = Sampling(max_new_tokens=self._tokens)
        reply = await agent.generate(messages, slots=ask.slots, mode=self._case.mode, sampling=sampling)
        publication, agent.publication = agent.publication, None
        assert publication is not None
        await agent.settled()
        published_at = time.monotonic()
        ids = publication.prompt.token_ids
        possible = self._published.possible(ids)
        answer_ids = np.array(reply.token_ids, dtype=np.uint32)
        self._published.add(np.concatenate([ids, answer_ids]))
        dense_s, full, divergence = await aside(partial(self._compared, publication))
        if not all(map(math.isfinite, divergence.kl)):
            raise KVCommError("the answer's probabilities are not finite")
        dense_ids = [token for token in full.token_ids if token not in end_tokens(self._runner)]
        dense_answer = self._text(dense_ids)
        score = ask.score
        sample = Sample(
            task=task.name,
            agent=ask.agent,
            number=number,
            cold=ask.agent not in self._asked,
            prompt_ids=ids,
            covered_tokens=reply.report.covered_tokens,
            recomputed_tokens=reply.report.recomputed_tokens,
            possible_tokens=possible,
            kl=divergence.kl,
            top1=divergence.top1,
            answer_ids=answer_ids,
            dense_answer_ids=np.array(dense_ids, dtype=np.uint32),
            answer=self._text(reply.token_ids),
            dense_answer=dense_answer,
            score=None if score is None else await aside(partial(score, reply.text)),
            dense_score=None if score is None else await aside(partial(score, dense_answer)),
            ttft_s=reply.ttft_s,
            dense_ttft_s=reply.report.timings.tokenize_s + dense_s,
            predicted_kl=reply.report.predicted_kl,
            fallback=reply.report.fallback,
        )
        # Comparing has usually taken longer than the news needs to get around.
        heard_s = HEARD_ROUNDS * self._settings.gossip_interval_s
        await asyncio.sleep(max(0.0, heard_s - (time.monotonic() - published_at)))
        return sample

    def _compared(self, publication: Publication) -> tuple[float, Continuation, Divergence]:
        """Seconds of full prefill of the same prompt, its greedy answer, and how far the request was from it."""
        ids = publication.prompt.token_ids
        cache = self._runner.new_cache(len(ids) + self._tokens)
        started = time.perf_counter()
        logits = self._runner.prefill(ids.astype(np.int64), cache)
        seconds = time.perf_counter() - started
        full = continue_greedily(self._runner, cache, logits, self._tokens)
        own = publication.filled.cache
        assert isinstance(own, KVCache)
        own.truncate(len(ids))  # the answer behind it has been published
        compare = partial(diverge_at_once, self._runner, full, own, publication.filled.logits)
        return seconds, full, self._runner.in_forward_thread(compare)

    def _text(self, token_ids: Sequence[int]) -> str:
        return str(self._runner.tokenizer.decode(token_ids, skip_special_tokens=True))


@asynccontextmanager
async def _cluster(
    runner: ModelRunner, names: Sequence[str], settings: Settings
) -> AsyncIterator[dict[str, WatchedAgent]]:
    """Agents that share a model and know each other; closed when the context ends."""
    agents: dict[str, WatchedAgent] = {}
    async with AsyncExitStack() as stack:
        for name in names:
            join = [first.address for first in list(agents.values())[:1]]
            agents[name] = WatchedAgent(name, model=runner, role=name, join=join, settings=settings)
            await stack.enter_async_context(agents[name])
        deadline = time.monotonic() + MEET_TIMEOUT_S
        while any(
            sum(peer["state"] == "alive" for peer in agent.status().peers) < len(agents) - 1
            for agent in agents.values()
        ):
            if time.monotonic() > deadline:
                raise KVCommError(f"the agents did not find each other within {MEET_TIMEOUT_S:g} s")
            await asyncio.sleep(settings.gossip_interval_s)
        yield agents


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, KVCommError) else f"{type(error).__name__}: {error}"


def _settings(settings: Settings, agents: int) -> Settings:
    """A cluster of their own, any free ports, and pools that together take half of the memory at most."""
    memory = machine()["memory_bytes"]
    pool = settings.pool_bytes_max if memory is None else min(settings.pool_bytes_max, memory // (2 * agents))
    return replace(settings, cluster=private_cluster(), control_port=0, bulk_port=0, pool_bytes_max=pool)
