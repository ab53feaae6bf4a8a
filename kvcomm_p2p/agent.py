"""What a user holds: an agent that generates text and shares what it has prefilled.

async with Agent("reviewer", join=["127.0.0.1:5701"]) as agent:
    reply = await agent.generate("Summarise [report].", slots={"report": text})
    print(reply.text, reply.report.sources)
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from kvcomm_p2p.agent_status import AgentStatus, Totals
from kvcomm_p2p.errors import CancelledByCaller, ConfigError, UsageError
from kvcomm_p2p.forgetting import Forgotten
from kvcomm_p2p.in_flight import InFlight
from kvcomm_p2p.model.decoding import Decoded, Sampling, decode
from kvcomm_p2p.model.runner import ModelRunner
from kvcomm_p2p.model.threads import helper_pool
from kvcomm_p2p.modes import exact_only_reason, parse_mode
from kvcomm_p2p.net.seeds import check_seed
from kvcomm_p2p.planning.types import Mode
from kvcomm_p2p.prompts import PreparedPrompt, Text, prepare, prepare_ids
from kvcomm_p2p.reply import Prefilled, Reply
from kvcomm_p2p.report import PrefillReport
from kvcomm_p2p.reuse.engine import Filled
from kvcomm_p2p.settings import Settings
from kvcomm_p2p.stack import AgentStack, Publication, build_stack
from kvcomm_p2p.watching import Watch

GENERATIONS_MAX = 16
"""`generate` calls that decode at the same time; more wait their turn."""

CLOSE_WAIT_S = 5.0
"""How long `close` waits for what it cancelled to end by itself."""

T = TypeVar("T")


class Agent:
    """One agent: a model, a node, a pool of shared KV. Use it as an async context manager, or `start` and `close` it.

    All methods may be called from any event loop, several at a time; `status` and `cancel_all` from any thread.
    """

    def __init__(
        self,
        name: str,
        *,
        model: str | ModelRunner = "smollm2-135m",
        join: Sequence[str] = (),
        role: str = "",
        settings: Settings | None = None,
        port: int = 0,
        bulk_port: int = 0,
        dtype: str = "float32",
        groups: Sequence[str] = (),
    ) -> None:
        """`join`: control addresses ("host:port") of any peers; they may start later. `groups`: names of groups whose anchors
        this agent may see. Raises ConfigError for a bad name or role combination at once; models load in `start`."""
        if not name or len(name.encode()) > 64 or not name.isprintable() or "/" in name:
            raise ConfigError(f"agent name {name!r} must have 1 to 64 bytes, all printable, and no slash")
        if isinstance(join, str):
            raise ConfigError(f'join must be a list of addresses, for example join=["{join}"]')
        self.name = name
        self.role = role
        self.settings = settings or Settings.from_env()
        for seed in join:
            check_seed(seed, encrypted=self.settings.encrypted)
        self._model = model
        self._join = tuple(join)
        self._ports = (port, bulk_port)
        self._dtype = dtype
        self._groups = tuple(groups)
        self._stack: AgentStack | None = None
        self._started_at = 0.0
        self._totals = Totals()
        self._starting = False
        self._lock = threading.Lock()
        self._flights = InFlight()

    async def __aenter__(self) -> Agent:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Load the model, bind, join. Seeds that do not answer yet are retried in the background.

        Raises ModelError, TransportError (port in use), NameTakenError, ConfigError.
        """
        with self._lock:
            if self._stack is not None or self._starting:
                raise UsageError(f"agent {self.name!r} is already running")
            self._starting = True
        try:
            self._stack = await self._started()
            self._started_at = time.monotonic()
        finally:
            self._starting = False

    async def _started(self) -> AgentStack:
        loop = asyncio.get_running_loop()
        build = partial(
            build_stack,
            self.name,
            self._model,
            self.settings,
            ports=self._ports,
            dtype=self._dtype,
            groups=self._groups,
        )
        builder = helper_pool(1, "kvcomm-build")
        building = loop.run_in_executor(builder, build)
        builder.shutdown(wait=False)
        try:
            stack = await asyncio.shield(building)
        except asyncio.CancelledError:
            # The thread cannot be interrupted: wait for it, and leave nothing behind.
            with suppress(Exception):
                await loop.run_in_executor(None, (await building).close)
            raise
        try:
            await asyncio.wrap_future(stack.driver.run(stack.join(self._join)))
            Watch(stack, self.name, self.role, self.settings, self._totals).serve_metrics()
        except BaseException:
            await loop.run_in_executor(None, stack.close)
            raise
        self._decoders = helper_pool(GENERATIONS_MAX, "kvcomm-decode")
        return stack

    async def close(self) -> None:
        """Cancel what is in flight, tell the peers, stop. Safe to call twice; the agent can be started again."""
        stack, self._stack = self._stack, None
        self.cancel_all()
        if stack is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._stop, stack)

    def _stop(self, stack: AgentStack) -> None:
        self._flights.wait(CLOSE_WAIT_S)  # whoever is in flight gets to end by itself, at its next token or chunk
        stack.close()
        self._decoders.shutdown(wait=True)

    def cancel_all(self) -> None:
        """Cancel every generation and prefill in flight; their callers get CancelledByCaller."""
        self._flights.cancel_all()

    @property
    def address(self) -> str:
        """Control address that others join."""
        return self._running().address

    @property
    def node_id(self) -> bytes:
        return self._running().node_id

    @property
    def runner(self) -> ModelRunner:
        return self._running().runner

    def status(self) -> AgentStatus:
        """Counters, pool and peers, now."""
        stack = self._running()
        return AgentStatus.of(stack, self.name, self.role, self._totals, time.monotonic() - self._started_at)

    def watch(self) -> Watch:
        """What can be seen from outside: peers, what decides about reuse, metrics, the recording."""
        return Watch(self._running(), self.name, self.role, self.settings, self._totals)

    @property
    def last_report(self) -> PrefillReport | None:
        """Of the last `generate` or `prefill` that was filled; None before the first. It holds no text."""
        return self._totals.last

    async def generate(
        self,
        prompt: str | list[dict[str, Any]],
        *,
        slots: Mapping[str, str | Text] | None = None,
        mode: str = "balanced",
        sampling: Sampling | None = None,
        visibility: str = "public",
        group: str = "",
        on_text: Callable[[str], None] | None = None,
    ) -> Reply:
        """Answer a prompt: text (one user message) or chat messages, with `slots` filled in.

        `mode`: exact, balanced, fast or dense. `visibility`: public, group (with `group`) or private, for prompt and answer.
        `on_text` is called with pieces of the answer from another thread. Cancelling the awaiting task cancels the generation.
        Raises UsageError, CancelledByCaller.
        """
        started = time.perf_counter()
        stack = self._running()
        chosen, sampling = parse_mode(mode), sampling or Sampling()
        with self._in_flight(stack) as cancel:
            prepared = await self._prepare(stack, prompt, slots, visibility, group)
            prepared_s = time.perf_counter() - started
            publication = await self._fill(stack, prepared, chosen, cancel, rows_extra=sampling.max_new_tokens)
            filled = publication.filled
            ttft_s = time.perf_counter() - started
            decoded = await self._decode(stack, prepared, filled, sampling, on_text, cancel)
            stack.publish_answer(publication, decoded.token_ids)
        report = replace(filled.report, timings=replace(filled.report.timings, tokenize_s=prepared_s))
        self._totals.add(report)
        if decoded.finish_reason == "cancelled":
            raise self._cancelled()
        return Reply(
            text=decoded.text,
            token_ids=list(decoded.token_ids),
            finish_reason=decoded.finish_reason,
            report=report,
            ttft_s=ttft_s,
            total_s=time.perf_counter() - started,
        )

    async def stream(self, prompt: str | list[dict[str, Any]], **options: Any) -> AsyncIterator[str | Reply]:
        """Like `generate` (same options, except on_text): yields pieces of text, then the Reply. Closing it cancels."""
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[str | None] = asyncio.Queue()

        def on_text(piece: str) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

        task = asyncio.create_task(self.generate(prompt, on_text=on_text, **options))
        task.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            while (piece := await pieces.get()) is not None:
                yield piece
            yield task.result()
        finally:
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    async def prefill(
        self, token_ids: Sequence[int], *, mode: str = "balanced", visibility: str = "public", group: str = ""
    ) -> Prefilled:
        """A cache with which `model.generate(token_ids, ...)` goes on as it would without us.

        `token_ids`: the whole prompt (list, array or tensor of shape [T] or [1, T]). Raises UsageError for an empty prompt,
        ids outside the vocabulary or a prompt beyond the model's context.
        """
        stack = self._running()
        prepared = prepare_ids(
            token_ids, stack.runner.vocabulary_size, visibility=visibility, group=group, key=stack.group_key
        )
        filled = await self.fill(prepared, mode)
        call = partial(filled.cache.to_dynamic, stack.runner.model.config)
        cache = await asyncio.get_running_loop().run_in_executor(self._decoders, call)
        self._totals.add(filled.report)
        return Prefilled(cache, filled.report, filled.logits)

    async def warm(self, messages: list[dict[str, Any]], *, visibility: str = "public", group: str = "") -> int:
        """Prefill what every prompt that begins with these messages has in common (a role's system message, say), so that
        the first such prompt finds it in the own pool. Returns its length in tokens; 0 if there is nothing to keep.
        """
        stack = self._running()
        endings = [[*messages, {"role": "user", "content": text}] for text in ("a", "1")]
        both = [await self._prepare(stack, prompt, None, visibility, group) for prompt in endings]
        one, other = (prompt.token_ids for prompt in both)
        shortest = min(len(one), len(other))
        common = int((np.cumprod(one[:shortest] == other[:shortest])).sum())
        if common == 0:
            return 0
        await self.fill(replace(both[0], token_ids=one[:common]), Mode.EXACT)
        return common

    async def fill(
        self, prompt: PreparedPrompt, mode: str | Mode, *, rows_extra: int = 0, publish: bool = True
    ) -> Filled:
        """The engine's own face: the filled slab with logits, report and plan. Publishes the prompt unless told not to."""
        stack = self._running()
        chosen = parse_mode(mode)
        with self._in_flight(stack) as cancel:
            return (await self._fill(stack, prompt, chosen, cancel, rows_extra=rows_extra, publish=publish)).filled

    async def explain(
        self,
        prompt: str | list[dict[str, Any]],
        *,
        slots: Mapping[str, str | Text] | None = None,
        mode: str = "balanced",
        visibility: str = "public",
        group: str = "",
    ) -> PrefillReport:
        """What `generate` would do with a prompt now: its report without an outcome. Donors are looked up and asked for token
        ids; nothing is pulled, computed or published. Raises UsageError, CancelledByCaller."""
        stack = self._running()
        chosen = parse_mode(mode)
        with self._in_flight(stack):
            prepared = await self._prepare(stack, prompt, slots, visibility, group)
            reason = exact_only_reason(self.role)
            return await self._done(stack, stack.engine.explain(prepared, chosen, exact_only=reason))

    async def forget(self, what: str, *, everywhere: bool = False) -> Forgotten:
        """Erase a text or an anchor (see `forgetting.anchor_named`), here or `everywhere`, for good. Raises UsageError."""
        stack = self._running()
        return await self._done(stack, stack.forget(what, everywhere=everywhere))

    async def settled(self) -> None:
        """Wait until everything prefilled or generated so far is published (it is found by this node's peers a gossip
        interval later)."""
        stack = self._running()
        await asyncio.get_running_loop().run_in_executor(None, stack.settle)

    async def _prepare(
        self,
        stack: AgentStack,
        prompt: str | list[dict[str, Any]],
        slots: Mapping[str, str | Text] | None,
        visibility: str,
        group: str,
    ) -> PreparedPrompt:
        call = partial(
            prepare,
            stack.runner.tokenizer,
            prompt,
            slots,
            visibility=visibility,
            group=group,
            key=stack.group_key,
        )
        return await asyncio.get_running_loop().run_in_executor(None, call)

    async def _fill(
        self, stack: AgentStack, prompt: PreparedPrompt, mode: Mode, cancel: threading.Event, **options: Any
    ) -> Publication:
        reason = exact_only_reason(self.role)
        return await self._done(stack, stack.fill(prompt, mode, exact_only=reason, cancelled=cancel.is_set, **options))

    async def _done(self, stack: AgentStack, work: Coroutine[Any, Any, T]) -> T:
        """What `work` gives, on the driver's loop."""
        future = asyncio.wrap_future(stack.driver.run(work))
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            future.cancel()
            raise
        if future.cancelled():  # the driver ended, not our caller's patience
            raise self._cancelled()
        return future.result()

    @contextmanager
    def _in_flight(self, stack: AgentStack) -> Iterator[threading.Event]:
        """An event that `cancel_all`, `close` and cancelling the task set; `close` waits for the end of the context."""
        try:
            with self._flights.one() as cancel:
                yield cancel
        except UsageError:
            if self._stack is not stack:  # closed under us: no mistake of this caller's
                raise self._cancelled() from None
            raise

    def _cancelled(self) -> CancelledByCaller:
        return CancelledByCaller(f"generation of {self.name!r} was cancelled")

    async def _decode(
        self,
        stack: AgentStack,
        prompt: PreparedPrompt,
        filled: Filled,
        sampling: Sampling,
        on_text: Callable[[str], None] | None,
        cancel: threading.Event,
    ) -> Decoded:
        call = partial(
            decode,
            stack.runner,
            filled.cache,
            prompt.token_ids.astype(np.int64).tolist(),
            filled.logits,
            sampling,
            on_text=on_text,
            cancelled=cancel.is_set,
        )
        future = asyncio.get_running_loop().run_in_executor(self._decoders, call)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            # The thread ends at its next token; wait for it, since it uses the slab.
            cancel.set()
            with suppress(Exception):
                await future
            raise

    def _running(self) -> AgentStack:
        if self._stack is None:
            raise UsageError(f"agent {self.name!r} is not running: use 'async with Agent(...)' or call start() first")
        return self._stack
