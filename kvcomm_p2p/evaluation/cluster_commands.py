"""What a node of a cluster of processes can be told (see `cluster_node`): each `do_` coroutine is a command, its arguments
the fields of the command, its result the answer. Importing this module loads no torch.

Times are seconds of CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from kvcomm_p2p.errors import KVCommError
from kvcomm_p2p.evaluation.cluster_anchors import AnchorMaker, Shape, describe, lookup, number_of
from kvcomm_p2p.evaluation.cluster_build import build
from kvcomm_p2p.evaluation.process_use import process_use
from kvcomm_p2p.net.driver import FetchResult
from kvcomm_p2p.net.interpreter import is_digest
from kvcomm_p2p.net.lossy_transport import Faults
from kvcomm_p2p.protocol.events import AnchorTokens
from kvcomm_p2p.protocol.ids import AnchorId, NodeId

LOOK_S = 0.02
"""Changes that no frame brought (a timer ran out) are seen this late."""

HISTORY_MAX = 200_000


class ClusterNode:
    """One node and what it can be told. Coroutines run on the driver's loop."""

    def __init__(self, options: dict[str, Any]) -> None:
        """`options`: see `cluster_build.build`."""
        self.name: str = options["name"]
        self.transport, self.store, self.driver = build(options)
        self.anchors = AnchorMaker(self.store)
        self._seen: dict[str, tuple[str, int]] = {}
        self._history: deque[tuple[float, str, str, int]] = deque(maxlen=HISTORY_MAX)
        self._watching: asyncio.Task[None] | None = None

    async def do_join(self, seeds: list[str], timeout_s: float = 10.0) -> dict[str, Any]:
        """`at`: when it was asked for; `peers`: how many were known when a seed answered."""
        at = time.monotonic()
        outcome = await self.driver.join(seeds, timeout_s)
        if not isinstance(outcome.result, int):
            raise KVCommError(f"{self.name} could not join: {outcome.result.detail or outcome.result.reason.value}")
        return {"at": at, "peers": outcome.result, "seconds": time.monotonic() - at}

    async def do_publish(self, numbers: list[int], shape: dict[str, int] | None = None) -> dict[str, Any]:
        """`at`: right before the node was told."""
        form = Shape(**(shape or {}))
        held = await asyncio.to_thread(lambda: [self.anchors.make(number, form) for number in numbers])
        at = time.monotonic()
        await self.driver.publish(held)
        return {"at": at}

    async def do_forget(self, numbers: list[int]) -> dict[str, Any]:
        at = time.monotonic()
        await self.driver.forget([AnchorId(number.to_bytes(16, "big")) for number in numbers])
        return {"at": at}

    async def do_fetch(
        self,
        holder: str,
        number: int,
        shape: dict[str, int],
        deadline_s: float = 30.0,
        at: float = 0.0,
        publish: bool = False,
        pass_on: bool = False,
        strike: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Pull a whole anchor, not before `at`, and hold it if `publish` and all of it came. `pass_on`: its blocks may be served
        to others as they come, as an engine's are.

        `strike`: send the signal `name` to the process `pid` once more than `after_bytes` payload bytes came. In the answer
        `right` says that the found blocks are the ones that were meant, `struck_at` is 0 if the signal was not sent.
        """
        form = Shape(**shape)
        wants = await asyncio.to_thread(self.anchors.wants, number, form)
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        struck = self._strike(**strike) if strike else (lambda: 0.0)
        started = time.monotonic()
        anchors = (describe(number, form),) if pass_on else ()
        result = await self.driver.fetch(NodeId(bytes.fromhex(holder)), wants, deadline_s, anchors=anchors)
        ended = time.monotonic()
        missed: dict[str, int] = {}
        for miss in result.missed.values():
            missed[miss.reason.value] = missed.get(miss.reason.value, 0) + 1
        right = await self._take(number, form, result, publish and not missed)
        return {
            "found": len(result.found),
            "missed": missed,
            "wait_lost_s": result.wait_lost_s,
            "seconds": ended - started,
            "ended": ended,
            "right": right,
            "struck_at": struck(),
        }

    async def do_tokens(self, holder: str, number: int, count: int, interval_s: float) -> dict[str, Any]:
        """Round trips of the control plane: token ids of a small anchor, `count` times."""
        seconds, missed = [], 0
        meta = describe(number, Shape())
        for _ in range(count):
            started = time.monotonic()
            answer = await self.driver.tokens(NodeId(bytes.fromhex(holder)), meta, 1.0)
            if isinstance(answer.result, AnchorTokens):
                seconds.append(time.monotonic() - started)
            else:
                missed += 1
            await asyncio.sleep(max(0.0, interval_s - (time.monotonic() - started)))
        return {"seconds": seconds, "missed": missed}

    async def do_wait(
        self, timeout_s: float, alive: int | None = None, anchors: int | None = None, gone: str | None = None
    ) -> dict[str, Any]:
        """`at`: when so many peers were alive, so many anchors of peers known, and `gone` neither alive nor suspected."""
        deadline = time.monotonic() + timeout_s
        while True:
            states = {peer.name: peer.state for peer in self.driver.peers()}
            stats = self.driver.stats().node
            if (
                (alive is None or stats.peers_alive == alive)
                and (anchors is None or stats.peer_anchors == anchors)
                and (gone is None or states.get(gone) not in ("alive", "suspect"))
            ):
                return {"at": time.monotonic()}
            if time.monotonic() > deadline:
                raise KVCommError(
                    f"{self.name} waited {timeout_s:g} s in vain for {alive=}, {anchors=}, {gone=}: it knows "
                    f"{stats.peers_alive} alive, {stats.peer_anchors} anchors"
                )
            await asyncio.sleep(LOOK_S)

    async def do_peers(self) -> dict[str, Any]:
        views = self.driver.peers()
        return {"peers": [[view.name, view.node_id.hex(), view.state, view.anchors] for view in views]}

    async def do_holders(self, numbers: list[int]) -> dict[str, Any]:
        """For each anchor the names of those who hold it, as a lookup tells."""
        names = {self.driver.node_id: self.name} | {peer.node_id: peer.name for peer in self.driver.peers()}
        holders: dict[int, list[str]] = {}
        for number in numbers:
            result: Any = self.driver.find(lookup(number))
            if inspect.isawaitable(result):
                result = await result
            hits = [hit for hit in result.hits if number_of(hit.meta.anchor_id) == number]
            holders[number] = sorted(names.get(hit.holder, hit.holder.hex()) for hit in hits)
        return {"holders": [[number, *names] for number, names in holders.items()]}

    async def do_watch(self, on: bool) -> dict[str, Any]:
        """Note every change of a peer's state or count of anchors from now on (or no longer); the notes are cleared."""
        if self._watching is not None:
            self._watching.cancel()
        self._watching = self.transport.on_delivered = None
        self._seen.clear()
        self._look()
        self._history.clear()
        if on:
            self.transport.on_delivered = self._look
            self._watching = asyncio.get_running_loop().create_task(self._keep_looking())
        return {}

    async def do_history(self) -> dict[str, Any]:
        """Since `watch`: (time, peer's name, state, anchors), one entry per change."""
        return {"changes": [list(entry) for entry in self._history]}

    async def do_faults(
        self,
        control: dict[str, float] | None = None,
        requests: dict[str, float] | None = None,
        replies: dict[str, float] | None = None,
    ) -> dict[str, Any]:
        """What is not given is mended."""
        transport = self.transport
        transport.control = Faults(**(control or {}))
        transport.requests = Faults(**(requests or {}))
        transport.replies = Faults(**(replies or {}))
        return {}

    async def do_cut(self, addresses: list[str]) -> dict[str, Any]:
        """Nothing is sent to these addresses any more, and to all others again."""
        self.transport.cut(addresses)
        return {"at": time.monotonic()}

    async def do_leave(self) -> dict[str, Any]:
        await self.driver.leave()
        return {}

    async def do_stats(self) -> dict[str, Any]:
        """Counters of node, wire and faults, and what the process uses."""
        stats = self.driver.stats()
        node, wire, traffic = stats.node, stats.wire, self.transport.traffic
        return {
            "at": time.monotonic(),
            "use": process_use(),
            "threads": threading.active_count(),
            "control_bytes": traffic.control_bytes,
            "control_frames": traffic.control_frames,
            "bulk_bytes": traffic.bulk_bytes,
            "lost": traffic.lost,
            "cut": traffic.cut,
            "payload_bytes_sent": wire.payload_bytes_sent,
            "uploaded_bytes": node.sent_bytes,
            "failures": wire.failures,
            "wire_lost": dict(wire.lost),
            "dropped": dict(wire.dropped),
            "violations": node.violations,
            "alive": node.peers_alive,
            "known": node.peers_known,
            "anchors": node.peer_anchors,
            "own_anchors": node.pool_anchors,
            "fetches": node.fetches,
            "uploads": node.uploads,
            "store_blocks": stats.store_blocks,
            "store_bytes": stats.store_held_bytes + stats.store_reserved_bytes,
        }

    # ---------------------------------------------------------------------------------------------------------- inside

    async def _take(self, number: int, form: Shape, result: FetchResult, publish: bool) -> bool:
        """Hold or let go of what was pulled; whether it is what was meant."""
        wanted = dict(zip(range(form.blocks), await asyncio.to_thread(self.anchors.wants, number, form), strict=True))
        views = [(self.store.view(handle), wanted[key.index][2]) for key, handle in result.found.items()]
        right = await asyncio.to_thread(lambda: all(is_digest(view, digest) for view, digest in views))
        if publish:
            handles = tuple(result.found[key] for key, _, _ in wanted.values())
            await self.driver.publish([self.anchors.pulled(number, form, handles)])
        else:
            for handle in result.found.values():
                self.store.drop(handle)
        return right

    def _strike(self, pid: int, after_bytes: int, name: str) -> Callable[[], float]:
        began = self.driver.stats().wire.payload_bytes_received
        struck_at = 0.0

        def look() -> None:
            nonlocal struck_at
            if not struck_at and self.driver.stats().wire.payload_bytes_received - began > after_bytes:
                os.kill(pid, getattr(signal, name))
                struck_at = time.monotonic()
                self.transport.on_delivered = None

        self.transport.on_delivered = look
        return lambda: struck_at

    def _look(self) -> None:
        now = time.monotonic()
        for peer in self.driver.peers():
            known = (peer.state, peer.anchors)
            if self._seen.get(peer.name) != known:
                self._seen[peer.name] = known
                self._history.append((now, peer.name, *known))

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self._look()
