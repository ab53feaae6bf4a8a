"""The face of `kvcomm_p2p.agent` without model and network.

Peers are whoever listens at the addresses to join. The answer is the prompt's words, one by one. Commands inside the
prompt: `SLOW` waits between words, `CRASH` raises a bug, `LONG` asks for too much.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from kvcomm_p2p.errors import ModelError, TransportError, UsageError
from kvcomm_p2p.report import MissReport, PrefillReport, SpanReport, Timings

START_S = float(os.environ.get("FAKE_START_S", "0"))
CLOSE_S = float(os.environ.get("FAKE_CLOSE_S", "0"))


@dataclass
class Reply:
    text: str
    token_ids: list[int]
    finish_reason: str
    report: PrefillReport
    ttft_s: float
    total_s: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Forgotten:
    anchors: int
    told: int


@dataclass
class AgentStatus:
    name: str
    role: str
    node_id: str
    address: str
    model: str
    model_id: str = "m1"
    exact_only_reason: str = ""
    uptime_s: float = 1.5
    pool_bytes: int = 46_080
    pool_bytes_max: int = 1 << 30
    anchors: int = 2
    requests: int = 0
    prompt_tokens: int = 0
    exact_tokens: int = 0
    continued_tokens: int = 0
    reused_tokens: int = 0
    recomputed_tokens: int = 0
    pulled_bytes: int = 0
    misses: dict[str, int] = field(default_factory=dict)
    peers: list[dict[str, Any]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Agent:
    def __init__(self, name: str, *, model: str, join: Any = (), role: str = "", settings: Any, port: int = 0) -> None:
        self.name, self.role, self._model, self._join = name, role, model, tuple(join)
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port = port
        self._tokens = 0
        self.cancelled = 0
        self.last_report: PrefillReport | None = None

    async def start(self) -> None:
        if self._model == "missing":
            raise ModelError("the model missing is not here yet: run `kvcomm model pull missing`")
        await asyncio.sleep(START_S)
        try:
            self._listener.bind(("127.0.0.1", self._port))
            self._listener.listen()
        except OSError as error:
            raise TransportError(f"port {self._port} is in use: take another --port") from error
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"

    async def warm(self, messages: list[dict[str, Any]]) -> int:
        return len(messages)

    async def close(self) -> None:
        await asyncio.sleep(CLOSE_S)
        self._listener.close()

    def status(self) -> AgentStatus:
        peers = []
        for address in self._join:
            host, _, port = address.rpartition(":")
            with socket.socket() as probe:
                if probe.connect_ex((host, int(port))) == 0:
                    peers.append(
                        {
                            "name": f"at-{port}",
                            "node_id": port,
                            "state": "alive",
                            "address": address,
                            "anchors": 1,
                            "model_id": "m1",
                            "last_heard_s": 0.1,
                        }
                    )
        return AgentStatus(
            self.name,
            self.role,
            f"id-{self.name}",
            self.address,
            self._model,
            prompt_tokens=self._tokens,
            reused_tokens=self._tokens // 2,
            recomputed_tokens=self._tokens - self._tokens // 2,
            misses={"busy": 1} if self._tokens else {},
            peers=peers,
        )

    def watch(self) -> Watch:
        return Watch(self)

    async def forget(self, what: str, *, everywhere: bool = False) -> Forgotten:
        if len(what) < 4:
            raise UsageError("cannot forget this text: it is too short")
        return Forgotten(len(what.split()), 2 if everywhere else 0)

    async def explain(self, prompt: Any, *, slots: Any = None, mode: str = "balanced") -> PrefillReport:
        report = report_of(max(2, len(filled(prompt, slots).split())), mode)
        return replace(report, pulled_bytes=0, pulled_tokens=0, planned_only=True)

    async def stream(
        self, prompt: Any, *, slots: Any = None, mode: str = "balanced", sampling: Any = None
    ) -> AsyncIterator[str | Reply]:
        text = filled(prompt, slots)
        words = text.split()[: sampling.max_new_tokens if sampling else None]
        try:
            for word in words:
                if "SLOW" in text:
                    await asyncio.sleep(0.2)
                yield word + " "
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise
        count = max(2, len(words))
        self._tokens += count
        self.last_report = report = report_of(count, mode)
        yield Reply(" ".join(words), [1] * count, "length", report, 0.1, 0.2)


class Watch:
    """The face of `kvcomm_p2p.watching.Watch`. A name that begins with "lone" knows nobody."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def peers(self) -> dict[str, Any]:
        status = self._agent.status()
        peer = {
            "node_id": "ab" * 16,
            "name": "planner",
            "state": "alive",
            "model_id": "m2",
            "control": "127.0.0.1:1",
            "anchors": 7,
            "heard_age_s": 0.3,
            "penalty_s": 12.0,
            "epoch": 4,
            "incarnation": 9,
            "log_seq": 8,
            "told_seq": 9,
            "round_trip_s": 0.002,
            "pulled_bytes": 46_080,
            "uploaded_bytes": 0,
            "busy_told": 3,
            "busy_given": 0,
            "penalties": 2,
            "violations": 1,
            "misses": {"stalled": 2, "busy": 5},
        }
        return {
            "name": status.name,
            "node_id": status.node_id,
            "address": status.address,
            "model": status.model,
            "model_id": status.model_id,
            "metrics_address": "127.0.0.1:9",
            "peers": [] if status.name.startswith("lone") else [peer],
        }

    def inspect(self) -> dict[str, Any]:
        names = ("refused_deltas", "rejected_anchors", "pool_anchors")
        return {
            **self.peers(),
            "protocol_version": 2,
            "cluster": "default",
            "cluster_mark": "00",
            "identity": {"weights": "1"},
            "share_refusal": "",
            "exact_only": "",
            "gossip_interval_s": 0.01,
            "pool_bytes_max": 1 << 30,
            "misses": {},
            "wait_lost_s": 0.0,
            "stats": {**dict.fromkeys(names, 0), "sharded": False},
            "dropped": {},
            "lost": {},
            "unreachable": 0,
            "failures": 0,
        }

    def metrics_text(self) -> str:
        return "kvcomm_requests_total 3.0\n"

    def recording(self) -> dict[str, Any]:
        raise UsageError(f"node {self._agent.name!r} is not being recorded")


def filled(prompt: Any, slots: Any) -> str:
    """The prompt's text, and what is wrong with it."""
    text = prompt if isinstance(prompt, str) else " ".join(f"{m['role']}:{m['content']}" for m in prompt)
    for name, value in (slots or {}).items():
        if "{" + name + "}" not in text:
            raise UsageError(f"no text refers to slot {name!r}")
        text = text.replace("{" + name + "}", value)
    if "CRASH" in text:
        raise RuntimeError("a bug")
    if "LONG" in text:
        raise UsageError("the prompt has 9,000 tokens, the model's context holds 8,192: shorten it")
    return text


def report_of(count: int, mode: str) -> PrefillReport:
    """Of a prompt of at least 2 tokens, the first half of which comes from a peer."""
    return PrefillReport(
        mode=mode,
        prompt_tokens=count,
        exact_tokens=0,
        continued_tokens=0,
        reused_tokens=count // 2,
        recomputed_tokens=count - count // 2,
        pulled_bytes=46_080,
        pulled_tokens=count // 2,
        spans=(
            SpanReport(0, count // 2, "reuse", "planner"),
            SpanReport(count // 2, count, "recompute", why="head of a reused run"),
        ),
        misses=(MissReport("a run", "busy"),),
        timings=Timings(),
        wait_lost_s=0.0,
    )
