"""What real agents were asked, and what came of it, as `kvcomm sim validate --record` writes it: a workload, and its outcome.

The file is JSON, one object a line; docs/simulator.md describes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvcomm_p2p.errors import ConfigError
from kvcomm_p2p.planning.costs import CostTracker
from kvcomm_p2p.sim.agents import Outcome
from kvcomm_p2p.sim.cost_table import CostTable
from kvcomm_p2p.sim.workloads import Part, Recorded, Step, Task, Verdict

FORMAT = "kvcomm validation"
VERSION = 1


class Head(msgspec.Struct, frozen=True, tag="head", tag_field="record"):
    """See `evaluation.recorded_run.Head`."""

    format: str
    version: int
    model: str
    mode: str
    agents: list[str]
    up_s: list[float]
    warmup_s: float
    load_before: float


class Report(msgspec.Struct, frozen=True):
    """What is needed of a `PrefillReport`."""

    prompt_tokens: int
    exact_tokens: int
    continued_tokens: int
    recomputed_tokens: int
    covered_tokens: int
    pulled_bytes: int
    wait_lost_s: float
    fallback: str
    widened: bool
    misses: list[dict[str, Any]]

    @property
    def verdict(self) -> Verdict:
        """What the guard said."""
        if self.fallback:
            return Verdict.WIDENED_REJECTED if self.widened else Verdict.REJECTED
        return Verdict.WIDENED if self.widened else Verdict.KEPT


class Request(msgspec.Struct, frozen=True, tag="request", tag_field="record"):
    """See `evaluation.recorded_run.Request`."""

    agent: int
    at_s: float
    prompt: list[int]
    marks: list[tuple[int, int]]
    answer: list[int]
    ttft_s: float
    report: Report

    def outcome(self) -> Outcome:
        """As a simulated agent would tell it."""
        report = self.report
        return Outcome(
            agent=self.agent,
            started_at=self.at_s,
            ttft_s=self.ttft_s,
            queued_s=0.0,
            dense_s=0.0,
            tokens=report.prompt_tokens,
            covered=report.covered_tokens,
            reused=report.prompt_tokens - report.recomputed_tokens,
            exact=report.exact_tokens + report.continued_tokens,
            pulled_bytes=report.pulled_bytes,
            wait_lost_s=report.wait_lost_s,
            misses=Counter(str(miss["reason"]) for miss in report.misses),
        )


class End(msgspec.Struct, frozen=True, tag="end", tag_field="record"):
    """See `evaluation.recorded_run.End`."""

    duration_s: float
    sent_bytes: list[dict[str, int]]
    forwards: list[tuple[int, float]] = []


class RealRun(msgspec.Struct, frozen=True):
    """A whole recording."""

    head: Head
    requests: list[Request]
    end: End

    def tasks(self) -> Iterator[Task]:
        """Each request a task of its own, when it was asked."""
        for number, request in enumerate(self.requests):
            prompt, answer = _packed(request.prompt), _packed(request.answer)
            step = Step(
                request.agent,
                (Part("", len(request.prompt), ids=prompt),),
                len(request.answer),
                answer_ids=answer,
                contents=tuple(request.marks),
                verdict=request.report.verdict,
            )
            yield Task(request.at_s, (step,), f"request {number}")

    def costs(self, table: CostTable) -> CostTable:
        """The table with what forwards took while the recording was made: the machine of other minutes is another one. Fitted to
        forwards beside the requests, never to what is to be predicted. The same table if none were timed."""
        if not self.end.forwards:
            return table
        before = table.costs(pull_latency_s=1e-3, pull_bytes_per_s=1e9)
        fitted = CostTracker.measured(before, [(tokens, 0, seconds) for tokens, seconds in self.end.forwards]).costs
        return msgspec.structs.replace(
            table, forward_s=fitted.forward_s, token_s=fitted.token_s, attention_s=fitted.attention_s
        )

    def outcomes(self) -> list[Outcome]:
        """Of all requests, warming up included."""
        return [request.outcome() for request in self.requests]

    def scenario(self, path: Path, costs: str) -> dict[str, Any]:
        """What is to be simulated to get the same: a scenario in plain types."""
        return {
            "name": path.stem,
            "about": f"what {len(self.head.agents)} real agents were asked",
            "agents": len(self.head.agents),
            "duration_s": self.end.duration_s,
            "warmup_s": self.head.warmup_s,
            "up_s": self.head.up_s,
            "costs": costs,
            "beliefs": "first",
            "mode": self.head.mode,
            "profile": self.head.model,
            "fabrics": ["peers"],
            "updates": 0,
            "workload": {"kind": "recorded", "path": str(path)},
            "network": {"inside": "loopback", "same_host": True},
        }


def read_real_run(path: Path) -> RealRun:
    """Raises ConfigError for a file that is no such recording, or not a whole one."""
    decoder = msgspec.json.Decoder(Head | Request | End)
    try:
        records = [decoder.decode(line) for line in path.read_bytes().splitlines() if line]
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path} is no recording of kvcomm sim validate: {error}") from error
    match records:
        case [Head() as head, *rest, End() as end] if (head.format, head.version) == (FORMAT, VERSION):
            requests = [each for each in rest if isinstance(each, Request)]
            if requests and len(requests) == len(rest) and all(r.agent < len(head.agents) for r in requests):
                return RealRun(head, requests, end)
    raise ConfigError(f"{path} is no whole recording of kvcomm sim validate, or one of another version")


def recorded_workload(path: Path, agents: int) -> Recorded:
    """Raises ConfigError, also if the recording has other agents."""
    run = read_real_run(path)
    if len(run.head.agents) != agents:
        raise ConfigError(f"{path} has {len(run.head.agents)} agents: set agents to that")
    return Recorded(tuple(run.tasks()))


def _packed(ids: list[int]) -> bytes:
    return np.array(ids, dtype="<u4").tobytes()
