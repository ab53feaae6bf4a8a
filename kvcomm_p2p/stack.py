"""Everything behind one agent, built once: model, keys, store, transport, node, driver, engine, publisher."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from kvcomm_p2p.errors import ConfigError, NameTakenError, UsageError
from kvcomm_p2p.forgetting import Forgotten, forget
from kvcomm_p2p.metrics import MetricsServer
from kvcomm_p2p.model.cache import KVCache
from kvcomm_p2p.model.runner import ModelRunner
from kvcomm_p2p.model.spec import ModelSpec
from kvcomm_p2p.model.threads import helper_pool
from kvcomm_p2p.net.driver import Driver, DriverStats
from kvcomm_p2p.net.durable import NodeLife, open_life
from kvcomm_p2p.net.gate import Gate, curve_keys, open_gate
from kvcomm_p2p.net.keys import ClusterKeys, load_cluster_keys
from kvcomm_p2p.net.limits import require_descriptors
from kvcomm_p2p.net.recorded_nodes import RecordedNode
from kvcomm_p2p.net.recorder import Recorder, make_recorder
from kvcomm_p2p.net.shared_memory import SharedMemory, host_tag
from kvcomm_p2p.net.signatures import signed_record
from kvcomm_p2p.net.transport import Addresses
from kvcomm_p2p.net.zmq_transport import ZmqTransport
from kvcomm_p2p.planning.chains import group_tag
from kvcomm_p2p.planning.costs import CostTracker, first_costs
from kvcomm_p2p.planning.lineage import Lineage
from kvcomm_p2p.planning.types import Mode
from kvcomm_p2p.prompts import PreparedPrompt
from kvcomm_p2p.protocol.anchors import KVLayout
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.messages import Capability, MemberRecord, RefusedReason
from kvcomm_p2p.protocol.node import Node
from kvcomm_p2p.protocol.views import PeerView
from kvcomm_p2p.reuse.deviations import DeviationMemory
from kvcomm_p2p.reuse.donors import DonorFinder
from kvcomm_p2p.reuse.engine import Filled, ReuseEngine
from kvcomm_p2p.reuse.foresight import Foresight, predictor_path
from kvcomm_p2p.reuse.learning import Learner
from kvcomm_p2p.reuse.publish import Published, Publisher
from kvcomm_p2p.reuse.pulling import Puller
from kvcomm_p2p.reuse.recall import Recall
from kvcomm_p2p.reuse.scouting import Scout
from kvcomm_p2p.settings import Settings
from kvcomm_p2p.store import BlockStore

COMPUTE_THREADS = 4
"""They wait for forwards, and copy, check and align meanwhile."""

JOIN_TIMEOUT_S = 2.0
SETTLE_TIMEOUT_S = 60.0
PROBE_TOKENS, PROBE_RUNS = (1, 64), 2
"""Sizes of the prefills that are timed when an agent starts, and how often: what a forward costs, and each token in it."""

T = TypeVar("T")

log = logging.getLogger("kvcomm_p2p.agent")


@dataclass(slots=True)
class Publication:
    """A prompt on its way to the pool; its answer follows it."""

    prompt: PreparedPrompt
    filled: Filled
    published: concurrent.futures.Future[Published] | None


class AgentStack:
    """The running parts of one agent. `close` ends them all."""

    def __init__(
        self,
        name: str,
        runner: ModelRunner,
        settings: Settings,
        driver: Driver,
        store: BlockStore,
        content_key: bytes,
    ) -> None:
        self.runner = runner
        self.group_key = content_key
        self.pool_bytes_max = settings.pool_bytes_max
        self.driver = driver
        self.store = store
        self.memory = DeviationMemory(settings.deviation_bytes)
        # Deviations do not say of what text they were seen: when some is erased, all of them go.
        driver.on_erased(lambda anchor_ids: self.memory.clear())
        self.addresses: Addresses = driver.start()
        self.node_id: NodeId = driver.node_id
        self._name = name
        self._names: dict[bytes, str] = {}
        self._compute = helper_pool(COMPUTE_THREADS, "kvcomm-compute")
        lineage = Lineage()
        finder = DonorFinder(
            driver,
            lineage,
            me=self.node_id,
            spec=runner.spec,
            vocabulary_size=runner.vocabulary_size,
            content_key=content_key,
        )
        layout = wire_layout(runner.spec, settings)
        self._puller = Puller(driver, store, layout, self._compute, settings.wire_encoding == "int8")
        self._learner = Learner(self.memory, driver, store, runner.spec, self._compute)
        self._foresight = Foresight(runner.spec, predictor_path(settings.cache_dir, runner.spec.model_id))
        costs = measured_costs(runner)
        self._scout = Scout(driver, store, runner, costs, self._compute)
        self.engine = ReuseEngine(
            runner,
            finder,
            self._puller,
            costs,
            self._compute,
            self._peer_name,
            content_key,
            Recall(self.memory, runner.spec),
            self._foresight,
        )
        self._publisher = Publisher(driver, store, runner.spec, lineage, content_key, self._compute)
        self.recorder: Recorder | None = None
        self.metrics: MetricsServer | None = None
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._pending: set[concurrent.futures.Future[Any]] = set()

    @property
    def address(self) -> str:
        """Control address under which peers reach this agent."""
        return self.addresses.control

    async def join(self, seeds: Sequence[str]) -> None:
        """Loop. Join through any of the seeds; if none answers in time the node goes on trying.

        Raises NameTakenError, ConfigError (another cluster or protocol version, or not an address).
        """
        if not seeds:
            return
        outcome = await self.driver.join(seeds, JOIN_TIMEOUT_S)
        if outcome.refused is RefusedReason.NAME_TAKEN:
            raise NameTakenError(f"another live agent is called {self._name!r}: choose another name")
        if outcome.refused is not None:
            why = outcome.result if isinstance(outcome.result, int) else outcome.result.detail
            reason = outcome.refused.name.lower().replace("_", " ")
            raise ConfigError(f"{', '.join(seeds)} refused this agent: {reason} ({why})")
        if not isinstance(outcome.result, int):
            log.warning("no answer yet from %s; trying again in the background", ", ".join(seeds))

    # ------------------------------------------------------------------------------------------------ filling, publishing

    async def fill(
        self,
        prompt: PreparedPrompt,
        mode: Mode,
        *,
        exact_only: str = "",
        rows_extra: int = 0,
        cancelled: Callable[[], bool] | None = None,
        publish: bool = True,
    ) -> Publication:
        """Loop. See `ReuseEngine.fill`. Then share the prompt and what was pulled for it, in the background, or let go of it.

        One step, so that a caller who is cancelled in between cannot lose what was pulled.
        """
        filled = await self.engine.fill(prompt, mode, exact_only=exact_only, rows_extra=rows_extra, cancelled=cancelled)
        look = self._scout.wanted(filled.plan, filled.found)
        if look is not None:
            self._background(self._scout.look(look, filled.found))
        if publish and isinstance(filled.cache, KVCache):
            published = self._background(self._publish_prompt(prompt, filled, filled.cache))
            if published is not None:
                # Not part of publishing, which the answer waits for.
                self._background(self._learn(published, prompt, filled, filled.cache))
            return Publication(prompt, filled, published)
        self._puller.release(filled.pulled, list(filled.pulled.handles))
        return Publication(prompt, filled, None)

    async def forget(self, what: str, *, everywhere: bool) -> Forgotten:
        """Loop. See `forgetting.forget`."""
        key = ClusterKeys(b"", self.group_key).erasing
        return await forget(self.driver, self.runner.tokenizer, what, key, everywhere=everywhere)

    def publish_answer(self, publication: Publication, token_ids: Sequence[int]) -> None:
        """Share what was generated behind a published prompt, in the background."""
        cache = publication.filled.cache
        if publication.published is not None and isinstance(cache, KVCache) and token_ids:
            self._background(self._publish_answer(publication, cache, token_ids))

    def settle(self) -> None:
        """Wait until everything handed over so far is in the pool. Raises UsageError after SETTLE_TIMEOUT_S."""
        with self._lock:
            pending = list(self._pending)
        _, late = concurrent.futures.wait(pending, timeout=SETTLE_TIMEOUT_S)
        if late:
            raise UsageError(f"publishing did not finish within {SETTLE_TIMEOUT_S:.0f} s: the machine is overloaded")

    # ---------------------------------------------------------------------------------------------------------- status

    def snapshot(self) -> tuple[DriverStats, tuple[PeerView, ...]]:
        """Counters and peers; from any thread but the driver's."""

        async def read() -> tuple[DriverStats, tuple[PeerView, ...]]:
            return self.driver.stats(), self.driver.peers()

        return self.driver.run(read()).result(timeout=5.0)

    def security(self) -> dict[str, Any]:
        """Who was not let in, and the like (`Gate.view`); from any thread but the driver's."""

        async def read() -> dict[str, Any]:
            return self.driver.security()

        return self.driver.run(read()).result(timeout=5.0)

    def close(self) -> None:
        """Say goodbye and stop. Safe to call twice; not from the driver's thread. Nothing in a child that was forked: all of
        this is its parent's."""
        if os.getpid() != self._pid:
            return
        if self.metrics is not None:
            self.metrics.close()
        self.driver.stop()
        if self.recorder is not None:
            self.recorder.close()
        self._compute.shutdown(wait=True, cancel_futures=True)
        self._foresight.close()

    # ---------------------------------------------------------------------------------------------------------- inside

    async def _publish_prompt(self, prompt: PreparedPrompt, filled: Filled, cache: KVCache) -> Published:
        await self._publisher.replicas(filled.pulled)
        return await self._publisher.prompt(prompt.token_ids, cache, filled.plan, prompt.visibility, prompt.marks)

    async def _learn(
        self, published: concurrent.futures.Future[Published], prompt: PreparedPrompt, filled: Filled, cache: KVCache
    ) -> None:
        await asyncio.wait([asyncio.wrap_future(published)])
        await self._learner.learn(cache, filled.plan, prompt.visibility)

    async def _publish_answer(self, publication: Publication, cache: KVCache, token_ids: Sequence[int]) -> None:
        assert publication.published is not None
        published = await asyncio.wrap_future(publication.published)
        whole = np.concatenate([publication.prompt.token_ids, np.asarray(token_ids, dtype=np.uint32)])
        rows = whole[: cache.length]
        await self._publisher.answer(rows, cache, publication.filled.plan, publication.prompt.visibility, published)

    def _background(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T] | None:
        """None when the driver has stopped: nothing is shared any more."""
        try:
            future = self.driver.run(work)
        except UsageError:
            return None
        with self._lock:
            self._pending.add(future)
        future.add_done_callback(self._published)
        return future

    def _published(self, future: concurrent.futures.Future[Any]) -> None:
        with self._lock:
            self._pending.discard(future)
        if not future.cancelled() and (error := future.exception()) is not None:
            if isinstance(error, UsageError):
                log.debug("not published: %s", error)
            else:
                log.error("publishing failed", exc_info=error)

    def _peer_name(self, node_id: bytes) -> str:
        """Loop. A peer's name, also of one that has left; our own for our own pool."""
        if node_id == self.node_id:
            return self._name
        if node_id not in self._names:
            self._names.update((peer.node_id, peer.name) for peer in self.driver.peers())
        return self._names.get(node_id, node_id[:4].hex())


def build_stack(
    name: str,
    model: str | ModelRunner,
    settings: Settings,
    *,
    ports: tuple[int, int] = (0, 0),
    dtype: str = "float32",
    groups: Sequence[str] = (),
) -> AgentStack:
    """Load, bind and wire up; blocking. Raises ModelError, TransportError, ConfigError."""
    gate = open_gate(
        settings.state_dir, settings.bind_host, encrypted=settings.encrypted, advertise_host=settings.advertise_host
    )
    keys = load_cluster_keys(settings.state_dir)
    require_descriptors(settings.node_config().peers_max)
    runner = model
    if not isinstance(runner, ModelRunner):
        runner = ModelRunner.load(runner, dtype=dtype, cache_dir=settings.cache_dir)
    spec = runner.spec
    life = next_life(name, settings, gate, keys)
    node_id = life.node_id
    tags = tuple(sorted({group_tag(group, keys.content) for group in groups}))
    host = host_tag(keys.content) if settings.shared_memory else b""
    layout = wire_layout(spec, settings)
    recorder = make_recorder(settings, name, node_id)
    before: dict[str, Any] = life.before

    def make_node(addresses: Addresses, now: float) -> Node:
        me = MemberRecord(
            node_id,
            life.epoch,
            name,
            spec.model_id,
            addresses.control,
            addresses.bulk,
            groups=tags,
            host=host,
            capabilities=(Capability.SHARED_MEMORY if host else 0) | (Capability.INT8 if layout else 0),
        )
        config = replace(settings.node_config(), erasing_key=keys.erasing)
        rng = random.Random(os.urandom(16))  # whom we ask next is nobody's guess
        if recorder is not None:
            return RecordedNode(config, me=life.sign(me), rng=rng, now=now, recorder=recorder, **before)
        return Node(config, me=life.sign(me), rng=rng, now=now, **before)

    transport = ZmqTransport(
        bind_host=settings.bind_host,
        advertise_host=settings.advertise_host,
        control_port=ports[0] or settings.control_port,
        bulk_port=ports[1] or settings.bulk_port,
        curve=curve_keys(gate),
    )
    store = BlockStore(SharedMemory() if host else None)
    driver = Driver(
        make_node, transport, store, keys, gate=gate, state_dir=settings.state_dir, life=life, layout=layout
    )
    try:
        stack = AgentStack(name, runner, settings, driver, store, keys.content)
    except BaseException:
        driver.stop()
        if recorder is not None:
            recorder.close()
        raise
    stack.recorder = recorder
    return stack


def next_life(name: str, settings: Settings, gate: Gate, keys: ClusterKeys) -> NodeLife:
    """What outlives the process of this agent, and signs its records if it has an identity; `gate` learns whose the addresses are
    that it had. Raises NameTakenError, ConfigError."""
    identity = gate.identity
    given_id = None if identity is None else identity.public.node_id(name)
    life = open_life(settings.state_dir, settings.cluster, name, given_id, erasing_key=keys.erasing)
    gate.remember(life.addresses, life.keys)
    if identity is not None:
        life.sign = partial(signed_record, identity)
    return life


def wire_layout(spec: ModelSpec, settings: Settings) -> KVLayout | None:
    """The layout of blocks that travel as int8; None where they may not, or would not become smaller."""
    layout = spec.layout
    return layout if settings.wire_encoding != "raw" and layout.int8_smaller else None


def measured_costs(runner: ModelRunner) -> CostTracker:
    """Time a few small prefills, so that the first plans are not guesses. Pull and align start conservatively."""
    spec = runner.spec
    few, many = min(PROBE_TOKENS[0], spec.context_tokens_max), min(PROBE_TOKENS[1], spec.context_tokens_max)
    seconds: list[tuple[int, int, float]] = []
    for tokens in (many, *[few, many] * PROBE_RUNS):  # the first only warms up
        started = time.perf_counter()
        runner.prefill([index % runner.vocabulary_size for index in range(tokens)], runner.new_cache(tokens))
        seconds.append((tokens, 0, time.perf_counter() - started))
    del seconds[0]
    fastest = [min(s for tokens, _, s in seconds if tokens == size) for size in (few, many)]
    token_s = max((fastest[1] - fastest[0]) / max(many - few, 1), fastest[1] / many / 10)
    start = first_costs(max(fastest[0] - few * token_s, fastest[0] / 10), token_s, spec.layout.token_bytes)
    return CostTracker.measured(replace(start, int8_share=spec.layout.int8_share), seconds)
