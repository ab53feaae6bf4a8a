"""The agent for programs without an event loop: notebooks, scripts."""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
import threading
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from kvcomm_p2p.agent import Agent
from kvcomm_p2p.agent_status import AgentStatus
from kvcomm_p2p.errors import UsageError
from kvcomm_p2p.reply import Prefilled, Reply

FINISH_S = 2.0

T = TypeVar("T")


class SyncAgent:
    """The same as `Agent`, blocking. Works inside a running event loop too (Jupyter), since it brings its own thread.

    with SyncAgent("notebook") as agent:
        print(agent.generate("What is a KV cache?").text)
    """

    def __init__(self, name: str, **options: Any) -> None:
        """Options are those of `Agent`."""
        self.agent = Agent(name, **options)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> SyncAgent:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """See `Agent.start`."""
        if self._loop is not None:
            raise UsageError(f"agent {self.agent.name!r} is already running")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvcomm-sync", daemon=True)
        self._thread.start()
        try:
            self._wait(self.agent.start())
        except BaseException:
            self._stop()
            raise

    def close(self) -> None:
        """See `Agent.close`."""
        if self._loop is not None:
            self._wait(self.agent.close())
            self._stop()

    @property
    def address(self) -> str:
        return self.agent.address

    def status(self) -> AgentStatus:
        """See `Agent.status`."""
        return self.agent.status()

    def generate(self, prompt: str | list[dict[str, Any]], **options: Any) -> Reply:
        """See `Agent.generate`. Ctrl-C cancels the generation."""
        return self._wait(self.agent.generate(prompt, **options))

    def prefill(self, token_ids: Sequence[int], **options: Any) -> Prefilled:
        """See `Agent.prefill`."""
        return self._wait(self.agent.prefill(token_ids, **options))

    def stream(self, prompt: str | list[dict[str, Any]], **options: Any) -> Iterator[str | Reply]:
        """See `Agent.stream`."""
        items: queue.SimpleQueue[str | Reply | BaseException] = queue.SimpleQueue()

        async def feed() -> None:
            try:
                async for item in self.agent.stream(prompt, **options):
                    items.put(item)
            except BaseException as error:
                items.put(error)
                raise

        future = self._submit(feed())
        try:
            while True:
                item = items.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
                if isinstance(item, Reply):
                    return
        finally:
            future.cancel()

    def _submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        if self._loop is None:
            work.close()
            raise UsageError(
                f"agent {self.agent.name!r} is not running: use 'with SyncAgent(...)' or call start() first"
            )
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future = self._submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _stop(self) -> None:
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        self._wait(self._finish(loop))
        self._loop = None
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    async def _finish(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let streams that were left early end, then the loop's own threads."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=FINISH_S)
        await loop.shutdown_asyncgens()
        await loop.shutdown_default_executor()
