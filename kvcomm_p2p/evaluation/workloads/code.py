"""Programming tasks: one agent writes, one reviews, one tests, one fixes, each reading everything before."""

from __future__ import annotations

import ast
import json
import re
import textwrap
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from kvcomm_p2p.errors import ConfigError
from kvcomm_p2p.evaluation.workloads.execution import passes
from kvcomm_p2p.evaluation.workloads.types import (
    Ask,
    Conversation,
    Task,
    Workload,
    chat_messages,
    enough,
    said,
    whole_tasks,
)

_STREAM = 3

PROGRAMMERS: dict[str, str] = {
    "writer": (
        "You write Python functions for a library that many people depend on. Take the signature and the description "
        "as they are, choose the simplest algorithm that is correct for every input that the description allows, and "
        "put no printing, no input and no test into the function."
    ),
    "reviewer": (
        "Every function passes your desk before it is merged. Follow the code with the examples of its description "
        "in mind, one statement after the other, and name the input for which it gives a wrong result. If there is "
        "none, say that the code is right; do not comment on style."
    ),
    "tester": (
        "You think of inputs that authors forget: nothing at all, one element, duplicates, negative numbers, the "
        "largest value. From a description you derive assertions that each check one statement of it, and you mark "
        "those that the code you were shown would not survive."
    ),
    "fixer": (
        "The last word on a function is yours. You read the description, the draft, the review and the tests, decide "
        "which objections are justified, and deliver a version that meets them. You reply with code and nothing else, "
        "because what you write goes straight into the repository."
    ),
}
"""Agent -> system prompt, in the order in which they work."""

_TASK = "Task:\n{task}"
_PARTS = {
    "writer": "\n\nThe writer's draft:\n{writer}",
    "reviewer": "\n\nThe review:\n{reviewer}",
    "tester": "\n\nThe tests:\n{tester}",
}
_WANTED = {
    "writer": "Write the whole function. Reply with code only.",
    "reviewer": "Which is the most important mistake of the draft? Answer in two sentences.",
    "tester": "Write three assert statements that the function has to pass.",
    "fixer": "Write the final version of the function. Reply with code only.",
}
_FENCE = re.compile(r"```[a-zA-Z0-9]*\n(.*?)(?:```|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class CodeTask:
    """`prompt`: imports, signature and docstring; `test`: statements that fail if `entry_point` is wrong; `stops`: texts
    behind which a completion of `prompt` is over."""

    name: str
    prompt: str
    entry_point: str
    test: str
    stops: tuple[str, ...]


def load_humaneval(path: Path) -> list[CodeTask]:
    """Tasks of a HumanEval file in MultiPL-E's form: one JSON object per line with `name`, `prompt`, `entry_point`,
    `test` and, if there are any, `stop_tokens`. Raises ConfigError naming the line."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): give the path of a humaneval.jsonl") from error
    tasks = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            name, prompt, entry_point, test = (str(item[key]) for key in ("name", "prompt", "entry_point", "test"))
            tasks.append(CodeTask(name, prompt, entry_point, test, tuple(map(str, item.get("stop_tokens", ())))))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f'{path}, line {number}: not an object with "name", "prompt", "entry_point" and "test"'
            ) from error
    return tasks


def code(tasks: Sequence[CodeTask], *, requests: int, seed: int, execute: bool = False) -> Workload:
    """Four requests per task, at least `requests` in all, over tasks drawn without repetition. The fixer's answer is
    scored: whether it parses and defines the function or, with `execute`, whether it passes the task's test in a
    process of its own. Raises UsageError if there are too few tasks."""
    count = whole_tasks(requests, len(PROGRAMMERS))
    enough(tasks, count, "tasks")
    judge = passes_test if execute else defines
    order = np.random.default_rng([seed, _STREAM]).permutation(len(tasks))[:count]
    return Workload(
        "code",
        PROGRAMMERS,
        tuple(Task(tasks[i].name, len(PROGRAMMERS), partial(_converse, tasks[i], judge)) for i in order.tolist()),
        "passes the test" if execute else "parses and defines the function",
    )


def program(task: CodeTask, answer: str) -> str:
    """The module that an answer stands for: its fenced code if it has some, behind what the prompt imports if it
    defines the function itself, else as the body of the prompt's function, up to the first stop text."""
    fenced = _FENCE.search(answer)
    written = fenced[1] if fenced else answer
    signature = re.compile(rf"^[ \t]*(?:async\s+)?def\s+{re.escape(task.entry_point)}\b", re.MULTILINE)
    if signature.search(written):
        own = signature.search(task.prompt)
        return task.prompt[: own.start() if own else 0] + textwrap.dedent(written)
    ends = [at for stop in task.stops if (at := written.find(stop)) >= 0]
    body = written[: min(ends, default=len(written))].strip("\n")
    if body[:1].strip():
        body = textwrap.indent(body, "    ")
    return f"{task.prompt}{body}\n"


def defines(task: CodeTask, answer: str) -> float:
    """1.0 if the answer's module parses and defines the function, else 0.0."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the compiler, about what a model wrote
            tree = ast.parse(program(task, answer))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return 0.0
    functions = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return float(any(function.name == task.entry_point for function in functions))


def passes_test(task: CodeTask, answer: str) -> float:
    """1.0 if the answer's module passes the task's test, else 0.0. Runs what a model wrote: see `execution.passes`."""
    return float(defines(task, answer) > 0 and passes(f"{program(task, answer)}\n\n{task.test}\n"))


def _converse(task: CodeTask, judge: Callable[[CodeTask, str], float]) -> Conversation:
    said_so_far: dict[str, str] = {"task": task.prompt.strip()}
    question = _TASK
    for name, system in PROGRAMMERS.items():
        score = partial(judge, task) if name == "fixer" else None
        messages = chat_messages(system, f"{question}\n\n{_WANTED[name]}")
        answer = yield Ask(name, messages, dict(said_so_far), score)
        said_so_far[name] = said(answer)
        question += _PARTS.get(name, "")
