"""A run of real agents as it was recorded: what each was asked and answered, what it took, what its node sent.

JSON, one object a line: the head, the requests in the order in which they were asked, the end. docs/simulator.md describes it;
the simulator reads it as a workload.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvcomm_p2p.errors import UsageError

FORMAT = "kvcomm validation"
VERSION = 1


class Head(msgspec.Struct, frozen=True, kw_only=True, tag="head", tag_field="record"):
    """`agents`: names, in the order of their numbers; `up_s`: for how long each had been up when recording began. `warmup_s`:
    requests before it are not counted. `load_before`: one minute's load average when the first counted one was asked."""

    format: str = FORMAT
    version: int = VERSION
    model: str
    mode: str
    agents: list[str]
    up_s: list[float]
    warmup_s: float
    seed: int
    load_before: float
    machine: dict[str, Any]


class Request(msgspec.Struct, frozen=True, kw_only=True, tag="request", tag_field="record"):
    """`at_s`: asked so many seconds after the recording began. `marks`: token ranges [start, end) of the prompt with a name of
    their own (`ContentMark`). `answer`: token ids. `report`: `PrefillReport.as_dict`."""

    agent: int
    at_s: float
    prompt: list[int]
    marks: list[tuple[int, int]]
    answer: list[int]
    ttft_s: float
    total_s: float
    report: dict[str, Any]


class End(msgspec.Struct, frozen=True, kw_only=True, tag="end", tag_field="record"):
    """When recording ended, and what each node had sent since it began: bytes and frames by message type, seals included, KV
    not. `lost`: frames that its own transport refused. `forwards`: (tokens, seconds) of forwards beside the requests, by the
    agents in turn, which say what computing took in these minutes."""

    duration_s: float
    load_after: float
    sent_bytes: list[dict[str, int]]
    sent: list[dict[str, int]]
    lost: list[dict[str, int]]
    forwards: list[tuple[int, float]] = []


class RecordedRun(msgspec.Struct, frozen=True):
    """All of it."""

    head: Head
    requests: list[Request]
    end: End

    def write(self, path: Path) -> None:
        """Replaces `path`, whole or not at all; makes the folder. Only its owner may read it: prompts are in it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        lines = [msgspec.json.encode(record) for record in (self.head, *self.requests, self.end)]
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(b"\n".join(lines) + b"\n")
        partial.replace(path)


def read_run(path: Path) -> RecordedRun:
    """Raises UsageError for what is no such recording, or not a whole one."""
    records: Sequence[Head | Request | End]
    try:
        decoder = msgspec.json.Decoder(Head | Request | End)
        records = [decoder.decode(line) for line in path.read_bytes().splitlines() if line]
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"{path} is no recording of `kvcomm sim validate`: {error}") from error
    match records:
        case [Head() as head, *requests, End() as end] if head.format == FORMAT and head.version == VERSION:
            asked = [each for each in requests if isinstance(each, Request)]
            if len(asked) == len(requests):
                return RecordedRun(head, asked, end)
    raise UsageError(f"{path} is no whole recording of `kvcomm sim validate`, or of another version")
