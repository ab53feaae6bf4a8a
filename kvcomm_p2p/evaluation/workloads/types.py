"""The nouns of workloads."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field

from kvcomm_p2p.errors import UsageError

NO_ANSWER = "(no answer)"
"""Stands in a prompt for an answer that was empty or never came."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: `agent` answers chat `messages` whose markers {name} are filled from `slots`.

    `score`: of the answer's text, 0 to 1, for requests whose answer has a right and a wrong; None for the others.
    """

    agent: str
    messages: tuple[Mapping[str, str], ...]
    slots: Mapping[str, str] = field(default_factory=dict)
    score: Callable[[str], float] | None = None


Conversation = Generator[Ask, str, None]
"""Yields a request and is sent the answer's text ("" if the request failed), until nothing is left to ask."""


@dataclass(frozen=True, slots=True)
class Task:
    """Requests that belong together (they may read each other's answers): the unit that is resampled for confidence
    intervals. `converse` begins the conversation anew; `requests` is how many it makes."""

    name: str
    requests: int
    converse: Callable[[], Conversation]


@dataclass(frozen=True, slots=True)
class Workload:
    """Tasks in the order in which they are run, and the agents that they need: `roles` maps name -> system prompt.

    `score_name`: what `Ask.score` measures, for people ("" if nothing is scored).
    """

    name: str
    roles: Mapping[str, str]
    tasks: tuple[Task, ...]
    score_name: str = ""

    @property
    def requests(self) -> int:
        """Of all tasks."""
        return sum(task.requests for task in self.tasks)


def chat_messages(system: str, user: str) -> tuple[Mapping[str, str], ...]:
    """A system prompt and one question behind it."""
    return ({"role": "system", "content": system}, {"role": "user", "content": user})


def said(answer: str) -> str:
    """An answer as others read it: without blanks around it, `NO_ANSWER` if nothing is left."""
    return answer.strip() or NO_ANSWER


def whole_tasks(requests: int, per_task: int) -> int:
    """Tasks of `per_task` requests that make at least `requests`. Raises UsageError for less than one request."""
    if requests < 1:
        raise UsageError(f"a workload of {requests} requests measures nothing: ask for at least 1")
    return -(-requests // per_task)


def enough(found: Sequence[object], wanted: int, what: str) -> None:
    """Raises UsageError if fewer than `wanted` of `what` were found."""
    if len(found) < wanted:
        raise UsageError(f"{wanted} {what} are needed for so many requests, the file has {len(found)}: ask for fewer")
