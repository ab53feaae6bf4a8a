"""Real agents, each in a process of its own, asked one after the other: a recording for the simulator to agree with.

Every agent has a role; each question brings two documents, some far more often than others, in an order of its own. One
prompt is in flight in the whole cluster, so that each forward has all cores, as the table of costs assumes; between two the
nodes have time to tell each other. The first round (a greeting each, over one document) makes every process load what it
loads once, and do once what takes longer the first time: pulling, aligning, repairing. It is not counted. Agents begin with
empty pools and without what earlier runs have taught the prefix predictor.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcomm_p2p.errors import UsageError
from kvcomm_p2p.evaluation.documents import ROLES, Document, Topic, cut_documents, library, questions
from kvcomm_p2p.evaluation.progress import stepping
from kvcomm_p2p.evaluation.recorded_run import End, Head, RecordedRun, Request
from kvcomm_p2p.evaluation.results import machine
from kvcomm_p2p.evaluation.ttft import load_tokenizer
from kvcomm_p2p.evaluation.workers import Worker, private_cluster
from kvcomm_p2p.model.registry import find_folder
from kvcomm_p2p.settings import PREFIX, Settings

if TYPE_CHECKING:
    from rich.console import Console

DOCUMENT_TOKENS = (200, 500)
DOCUMENTS_PER_AGENT = 1.5
PER_QUESTION = 2
EXPONENT = 1.0
ANSWER_TOKENS = 24
GREETING_TOKENS = 1000
"""As long as two documents: memory for a prompt is fetched from the system when it is longer than all before."""

PAUSE_S = 1.5
"""Between the end of a publication and the next prompt: who is asked next has heard of it, by all that is measured."""

TIMED_TOKENS = (16, 48, 128, 256, 512, 1024)
"""Before each prompt one of the idle agents times a forward over so many random tokens, in turn."""

SETTLE_S = 3.0
"""From the last join to the beginning of the recording."""

AGENTS_MAX = 64


@dataclass(frozen=True, slots=True)
class Prompt:
    """What agent number `agent` is asked."""

    agent: int
    messages: list[dict[str, str]]
    slots: dict[str, str]


def record_run(
    console: Console | None = None,
    *,
    model: str = "smollm2-135m",
    agents: int = 8,
    requests: int = 4,
    mode: str = "balanced",
    seed: int = 0,
    pause_s: float = PAUSE_S,
) -> RecordedRun:
    """`requests`: prompts per agent. Raises ModelError, KVCommError (a process that ended), UsageError (too few agents, or too
    many for this machine's library of texts)."""
    if not 2 <= agents <= AGENTS_MAX:
        raise UsageError(f"--agents {agents} must be between 2 and {AGENTS_MAX}")
    folder = find_folder(model, Settings.from_env().cache_dir)
    tokenizer = load_tokenizer(model)
    topics = library()
    welcome = greetings(tokenizer, agents, topics)
    prompts = make_prompts(tokenizer, agents, requests, seed, topics)
    names = [f"agent-{number}" for number in range(agents)]
    with (
        tempfile.TemporaryDirectory(prefix="kvcomm-") as state,
        ExitStack() as stack,
        stepping(console, "real agents", 2 * agents + len(prompts)) as step,
    ):
        workers, ready_at = _started(stack, names, folder, Path(state), step)
        time.sleep(SETTLE_S)
        before, began = _sent(workers), time.perf_counter()
        asked: list[Request] = []
        timed: list[tuple[int, float]] = []
        warmup_s, load_before = 0.0, _load()
        for number, prompt in enumerate([*welcome, *prompts]):
            if number == agents:
                warmup_s, load_before = time.perf_counter() - began, _load()
            if number >= agents:
                timed.append(_timed_forward(workers[(number + agents // 2) % agents], len(timed)))
            asked.append(_asked(workers[prompt.agent], prompt, mode, time.perf_counter() - began))
            step(f"{len(asked[-1].prompt):,} tokens")
            time.sleep(pause_s)
        after, duration_s = _sent(workers), time.perf_counter() - began
    head = Head(
        model=model,
        mode=mode,
        agents=names,
        up_s=[began - at for at in ready_at],
        warmup_s=warmup_s,
        seed=seed,
        load_before=load_before,
        machine=machine(),
    )
    end = End(
        duration_s=duration_s,
        load_after=_load(),
        forwards=timed,
        **{
            field: [_more(b[name], a[name]) for b, a in zip(before, after, strict=True)]
            for field, name in (("sent_bytes", "bytes"), ("sent", "frames"), ("lost", "lost"))
        },
    )
    return RecordedRun(head, asked, end)


def make_prompts(tokenizer: Any, agents: int, requests: int, seed: int, topics: list[Topic]) -> list[Prompt]:
    """`requests` rounds; in each every agent is asked once, in a drawn order. `topics`: what documents are cut from; mutated."""
    rng = random.Random(f"validate {seed}")
    documents = _documents(tokenizer, max(PER_QUESTION, round(DOCUMENTS_PER_AGENT * agents)), rng, topics)
    weights = [rank**-EXPONENT for rank in range(1, len(documents) + 1)]
    asks = questions(agents * requests)
    prompts: list[Prompt] = []
    for _ in range(requests):
        for agent in rng.sample(range(agents), agents):
            chosen: list[Document] = []
            while len(chosen) < PER_QUESTION:
                (document,) = rng.choices(documents, weights)
                if document not in chosen:
                    chosen.append(document)
            slots = {"first": chosen[0].text, "second": chosen[1].text}
            content = "{first}\n\n{second}\n\n" + asks[len(prompts)]
            prompts.append(Prompt(agent, _messages(agent, content), slots))
    return prompts


def greetings(tokenizer: Any, agents: int, topics: list[Topic]) -> list[Prompt]:
    """One prompt per agent, in the order of their numbers, all over one document that is taken out of `topics`."""
    (document,) = cut_documents(tokenizer, GREETING_TOKENS, 1, topics)
    slots = {"paper": document.text}
    return [
        Prompt(agent, _messages(agent, "Good morning! Today's paper:\n\n{paper}"), slots) for agent in range(agents)
    ]


def _messages(agent: int, content: str) -> list[dict[str, str]]:
    role = list(ROLES.values())[agent % len(ROLES)]
    return [{"role": "system", "content": role}, {"role": "user", "content": content}]


def _documents(tokenizer: Any, count: int, rng: random.Random, topics: list[Topic]) -> list[Document]:
    return [cut_documents(tokenizer, rng.randint(*DOCUMENT_TOKENS), 1, topics)[0] for _ in range(count)]


def _started(
    stack: ExitStack, names: Sequence[str], folder: Path, state: Path, step: Callable[[str], None]
) -> tuple[list[Worker], list[float]]:
    """One after the other, since each times a few forwards when it starts. All join the first. Also gives when each was
    ready."""
    cluster = private_cluster()
    settings = {f"{PREFIX}STATE_DIR": str(state / "state"), f"{PREFIX}CACHE_DIR": str(state / "cache")}
    workers: list[Worker] = []
    ready_at: list[float] = []
    for name in names:
        join = [worker.address for worker in workers[:1]]
        worker = Worker(name, str(folder), join, cluster=cluster, settings=settings)
        workers.append(stack.enter_context(worker).wait_ready())
        ready_at.append(time.perf_counter())
        step(f"{name} is ready")
    return workers, ready_at


def _asked(worker: Worker, prompt: Prompt, mode: str, at_s: float) -> Request:
    answer = worker.ask(do="answer", messages=prompt.messages, slots=prompt.slots, tokens=ANSWER_TOKENS, mode=mode)
    return Request(agent=prompt.agent, at_s=at_s, **answer)


def _timed_forward(worker: Worker, count: int) -> tuple[int, float]:
    tokens = TIMED_TOKENS[count % len(TIMED_TOKENS)]
    return tokens, worker.ask(do="forward", tokens=tokens, seed=count)["seconds"]


def _sent(workers: Sequence[Worker]) -> list[dict[str, dict[str, int]]]:
    return [worker.ask(do="sent") for worker in workers]


def _more(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    grown = {name: count - before.get(name, 0) for name, count in sorted(after.items())}
    return {name: count for name, count in grown.items() if count}


def _load() -> float:
    return os.getloadavg()[0]
