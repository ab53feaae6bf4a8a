"""What simulated agents are asked: tasks of steps, each step a prompt of parts whose token identities are known.

Equal keys give equal tokens everywhere, whatever the process: what is shared between agents is the same text, nothing else is.
"""

from __future__ import annotations

import enum
import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Protocol

import networkx as nx
import numpy as np
import numpy.typing as npt

from kvcomm_p2p.errors import ConfigError
from kvcomm_p2p.sim.graphs import reading_order

VOCABULARY = 49152
TokenIds = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a prompt: `tokens` tokens of the text that `key` names. `output_of`: it is the answer of that step of
    the same task (its first `tokens` tokens). `ids`: it is exactly these token ids, little-endian uint32."""

    key: str
    tokens: int
    output_of: int | None = None
    ids: bytes = b""

    def token_ids(self, outputs: Mapping[int, str]) -> TokenIds:
        """uint32 [tokens], read-only. `outputs`: key of each answered step's text."""
        if self.ids:
            return np.frombuffer(self.ids, "<u4")
        return tokens_of(self.key if self.output_of is None else outputs[self.output_of], self.tokens)


class Verdict(enum.Enum):
    """What the guard says of a repaired prompt: there is no model here, so it is part of what is asked."""

    KEPT = "kept"
    WIDENED = "widened"
    REJECTED = "rejected"
    WIDENED_REJECTED = "widened, rejected"


@dataclass(frozen=True, slots=True)
class Step:
    """Agent `agent` gets a prompt once the steps in `after` are answered, and answers with `answer_tokens` tokens.

    `answer_ids`: exactly these (little-endian uint32; empty: such as the task's name gives). `contents`: token ranges [start,
    end) of the prompt that have names of their own (`planning.winnow.content_mark`). `verdict`: the guard's.
    """

    agent: int
    parts: tuple[Part, ...]
    answer_tokens: int
    after: tuple[int, ...] = ()
    answer_ids: bytes = b""
    contents: tuple[tuple[int, int], ...] = ()
    verdict: Verdict = Verdict.KEPT

    @property
    def prompt_tokens(self) -> int:
        return sum(part.tokens for part in self.parts)


@dataclass(frozen=True, slots=True)
class Task:
    """Steps that belong together, arriving `at_s`."""

    at_s: float
    steps: tuple[Step, ...]
    name: str = ""


class Workload(Protocol):
    """Tasks without end, ascending in time; the same for the same `rng`."""

    def tasks(self, rng: random.Random) -> Iterator[Task]: ...


@lru_cache(maxsize=8192)
def tokens_of(key: str, tokens: int) -> TokenIds:
    """The text that `key` names, read-only; shorter ones are beginnings of longer ones."""
    seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big")
    size = 1 << max(tokens - 1, 1).bit_length()  # the generator's stream does not depend on the length asked for
    ids = np.random.default_rng(seed).integers(16, VOCABULARY, size, dtype=np.uint32)[:tokens]
    ids.flags.writeable = False
    return ids


def prompt_of(step: Step, outputs: dict[int, str]) -> TokenIds:
    """The token ids of a step's prompt. `outputs`: key of each answered step's text."""
    return np.concatenate([part.token_ids(outputs) for part in step.parts])


def answer_of(step: Step, key: str) -> TokenIds:
    """The token ids of a step's answer; `key`: of its text."""
    return np.frombuffer(step.answer_ids, "<u4") if step.answer_ids else tokens_of(key, step.answer_tokens)


def zipf_weights(items: int, exponent: float) -> list[float]:
    """Relative frequencies 1 / rank ** exponent."""
    return [1 / rank**exponent for rank in range(1, items + 1)]


def drawn(rng: random.Random, weights: Sequence[float], items: int) -> list[int]:
    """So many different numbers (all, if there are not more), each as likely as its weight among those that are left."""
    left = list(weights)
    chosen: list[int] = []
    for _ in range(min(items, len(left))):
        (number,) = rng.choices(range(len(left)), left)
        left[number] = 0.0
        chosen.append(number)
    return chosen


def _arrivals(rng: random.Random, per_s: float) -> Iterator[float]:
    now = 0.0
    while True:
        now += rng.expovariate(per_s)
        yield now


@dataclass(frozen=True, slots=True)
class Roles:
    """System prompts: agent i has role i modulo `count`, of `tokens` tokens, and its own `name_tokens` in front or not."""

    count: int = 5
    tokens: int = 80

    def part(self, agent: int) -> Part:
        return Part(f"role {agent % self.count}", self.tokens)


@dataclass(frozen=True, slots=True)
class Rag:
    """Questions over documents: each brings `per_question` of `documents` documents (300 to 1,500 tokens, Zipf-distributed)
    to `readers` agents, in an order of their own. `handed_on`: the first of them answers before the others are asked, as when
    one agent looks something up and hands it to others."""

    agents: int
    tasks_per_s: float
    documents: int = 40
    per_question: int = 3
    exponent: float = 1.0
    readers: int = 1
    handed_on: bool = False
    agent_exponent: float = 0.0
    question_tokens: int = 30
    answer_tokens: int = 60
    roles: Roles = Roles()

    def tasks(self, rng: random.Random) -> Iterator[Task]:
        sizes = random.Random("documents")
        lengths = [sizes.randrange(300, 1501) for _ in range(self.documents)]
        weights = zipf_weights(self.documents, self.exponent)
        agent_weights = zipf_weights(self.agents, self.agent_exponent)
        for number, at_s in enumerate(_arrivals(rng, self.tasks_per_s)):
            chosen = drawn(rng, weights, self.per_question)
            readers = drawn(rng, agent_weights, self.readers)
            steps: list[Step] = []
            for agent in readers:
                order = rng.sample(chosen, len(chosen))
                texts = [Part(f"document {document}", lengths[document]) for document in order]
                question = Part(f"question {number}", self.question_tokens)
                after = (0,) if self.handed_on and steps else ()
                steps.append(Step(agent, (self.roles.part(agent), *texts, question), self.answer_tokens, after))
            yield Task(at_s, tuple(steps), f"question {number}")


@dataclass(frozen=True, slots=True)
class Mathematics:
    """Groups of `debaters` agents discuss a problem over `rounds` rounds; from the second on everybody reads everybody."""

    agents: int
    tasks_per_s: float
    debaters: int = 4
    rounds: int = 2
    problem_tokens: int = 120
    answer_tokens: int = 150
    roles: Roles = Roles(count=4, tokens=60)

    def tasks(self, rng: random.Random) -> Iterator[Task]:
        groups = max(1, self.agents // self.debaters)
        for number, at_s in enumerate(_arrivals(rng, self.tasks_per_s)):
            first = rng.randrange(groups) * self.debaters
            group = [agent % self.agents for agent in range(first, first + self.debaters)]
            problem = Part(f"problem {number}", self.problem_tokens)
            steps: list[Step] = []
            before: list[int] = []
            for turn in range(self.rounds):
                heard = tuple(Part("", self.answer_tokens, output_of=step) for step in before)
                ask = Part(f"turn {turn}", 20)
                begun = len(steps)
                for agent in group:
                    parts = (self.roles.part(agent), problem, *heard, ask)
                    steps.append(Step(agent, parts, self.answer_tokens, tuple(before)))
                before = list(range(begun, len(steps)))
            yield Task(at_s, tuple(steps), f"problem {number}")


@dataclass(frozen=True, slots=True)
class Code:
    """Writer, reviewer, tester and fixer, each reading the task and all that was written before."""

    agents: int
    tasks_per_s: float
    stages: int = 4
    task_tokens: int = 150
    answer_tokens: int = 200
    roles: Roles = Roles(count=4, tokens=90)

    def tasks(self, rng: random.Random) -> Iterator[Task]:
        teams = max(1, self.agents // self.stages)
        for number, at_s in enumerate(_arrivals(rng, self.tasks_per_s)):
            first = rng.randrange(teams) * self.stages
            what = Part(f"task {number}", self.task_tokens)
            steps = []
            for stage in range(self.stages):
                agent = (first + stage) % self.agents
                heard = tuple(Part("", self.answer_tokens, output_of=step) for step in range(stage))
                after = (stage - 1,) if stage else ()
                steps.append(Step(agent, (self.roles.part(agent), what, *heard), self.answer_tokens, after))
            yield Task(at_s, tuple(steps), f"task {number}")


@dataclass(frozen=True, slots=True)
class Creative:
    """Open prompts: a role and a wish that nobody else has; little is shared."""

    agents: int
    tasks_per_s: float
    wish_tokens: int = 60
    answer_tokens: int = 200
    roles: Roles = Roles(count=5, tokens=100)

    def tasks(self, rng: random.Random) -> Iterator[Task]:
        for number, at_s in enumerate(_arrivals(rng, self.tasks_per_s)):
            agent = rng.randrange(self.agents)
            parts = (self.roles.part(agent), Part(f"wish {number}", self.wish_tokens))
            yield Task(at_s, (Step(agent, parts, self.answer_tokens),), f"wish {number}")


@dataclass(frozen=True)
class Graph:
    """A task goes through a graph of agents: each reads its parents' answers, a shared document and the question.

    A graph without circles is walked once in reading order; otherwise `rounds` rounds, each agent reading what its parents
    said in the round before. At most `parents_max` parents are read (those with the lowest numbers), so that a hub's
    prompt stays finite.
    """

    graph: nx.DiGraph
    tasks_per_s: float
    rounds: int = 2
    parents_max: int = 4
    document_tokens: int = 500
    documents: int = 10
    question_tokens: int = 40
    answer_tokens: int = 120
    roles: Roles = Roles()

    def tasks(self, rng: random.Random) -> Iterator[Task]:
        layers = reading_order(self.graph)
        for number, at_s in enumerate(_arrivals(rng, self.tasks_per_s)):
            document = Part(f"document {rng.randrange(self.documents)}", self.document_tokens)
            question = Part(f"question {number}", self.question_tokens)
            steps: list[Step] = []
            step_of: dict[int, int] = {}
            for layer in layers if layers is not None else [sorted(self.graph.nodes)] * self.rounds:
                spoken = dict(step_of)
                for agent in layer:
                    parents = [p for p in sorted(self.graph.predecessors(agent)) if p in spoken][: self.parents_max]
                    heard = tuple(Part("", self.answer_tokens, output_of=spoken[p]) for p in parents)
                    parts = (self.roles.part(agent), document, *heard, question)
                    step_of[agent] = len(steps)
                    steps.append(Step(agent, parts, self.answer_tokens, tuple(spoken[p] for p in parents)))
            yield Task(at_s, tuple(steps), f"question {number}")


@dataclass(frozen=True)
class Recorded:
    """Tasks that were seen on real nodes, as they came."""

    recorded: tuple[Task, ...]

    def tasks(self, rng: random.Random) -> Iterator[Task]:
        return iter(self.recorded)


KINDS = {"rag": Rag, "mathematics": Mathematics, "code": Code, "creative": Creative}


def until(workload: Workload, rng: random.Random, end_s: float, tasks_max: int | None = None) -> list[Task]:
    """The tasks that arrive before `end_s`, at most `tasks_max`. Raises ConfigError if there are none."""
    chosen: list[Task] = []
    for number, task in zip(count(), workload.tasks(rng), strict=False):
        if task.at_s >= end_s or (tasks_max is not None and number >= tasks_max):
            break
        chosen.append(task)
    if not chosen:
        raise ConfigError("the workload brings no task in the simulated time: raise tasks_per_s or the duration")
    return chosen
