"""A debate over word problems: everybody answers, reads everybody's last answer, and answers again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from functools import partial

import numpy as np

from kvcomm_p2p.errors import UsageError
from kvcomm_p2p.evaluation.documents import Problem
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

ROUNDS = 2
_STREAM = 2

MATHEMATICIANS: dict[str, str] = {
    "arithmetician": (
        "You solve word problems with plain arithmetic. Write down each quantity that the problem states, combine "
        "them one operation at a time, and check every product and every difference before you go on. You never "
        "introduce a variable when a number will do, and you keep the units beside the numbers."
    ),
    "algebraist": (
        "As the algebraist of the group you translate a story into equations. Name the unknown, say what it counts, "
        "set up one equation for each sentence that carries information, and solve them in order. When two sentences "
        "say the same, you point that out instead of using both of them."
    ),
    "estimator": (
        "Your strength is a sense of proportion. Before you calculate anything you guess how large the result must "
        "be, then you work it out, then you compare. A result that is ten times too large or too small makes you "
        "start again from the first sentence of the problem, however elegant the calculation looked."
    ),
    "sceptic": (
        "Other people overlook details, and you are there to find them: a discount that applies to half of the "
        "items, a rate per week where days were asked for, a person who was counted twice. Read the question at the "
        "end of the problem first, then solve it from the back, and state which trap you avoided."
    ),
}
"""Agent -> system prompt."""

_FIRST = "Problem:\n{problem}\n\nSolve it. Begin with 'Answer: <number>', then explain in at most three sentences."
_AGAIN = (
    "Problem:\n{problem}\n\nThese are the last answers of the group.\n\n"
    + "\n\n".join(f"The {name} says:\n{{{name}}}" for name in MATHEMATICIANS)
    + "\n\nCompare them and solve the problem again. Begin with 'Answer: <number>', then explain in at most three "
    "sentences."
)
_NUMBER = r"(?:(?<![\w)])-)?\$?[0-9][0-9,]*(?:\.[0-9]+)?"
_MARKED = re.compile(rf"(?:####|\banswer(?:\s+is)?\s*[:=]?)\s*\**\s*({_NUMBER})", re.IGNORECASE)


def mathematics(problems: Sequence[Problem], *, requests: int, seed: int, rounds: int = ROUNDS) -> Workload:
    """Debates of four agents over `rounds` rounds, as many as make at least `requests` requests, over problems drawn
    without repetition. The answers of the last round are scored: right number or not.

    Raises UsageError if there are too few problems, or less than one round.
    """
    if rounds < 1:
        raise UsageError(f"a debate has at least 1 round, not {rounds}")
    per_task = rounds * len(MATHEMATICIANS)
    count = whole_tasks(requests, per_task)
    enough(problems, count, "problems")
    order = np.random.default_rng([seed, _STREAM]).permutation(len(problems))[:count]
    tasks = tuple(
        Task(f"problem {index + 1}", per_task, partial(_debate, problems[index], rounds)) for index in order.tolist()
    )
    return Workload("mathematics", MATHEMATICIANS, tasks, "right final number")


def final_number(text: str) -> Decimal | None:
    """The number that a text gives as its answer: the last one behind "####" or "answer", else the last of all.

    Thousands separators and dollar signs are dropped; None without a number.
    """
    found = _MARKED.findall(text) or re.findall(_NUMBER, text)
    return Decimal(found[-1].replace(",", "").replace("$", "")) if found else None


def is_right(solution: str, answer: str) -> float:
    """1.0 if the answer's final number equals the solution's, else 0.0."""
    expected = final_number(solution)
    return float(expected is not None and final_number(answer) == expected)


def _debate(problem: Problem, rounds: int) -> Conversation:
    answers: dict[str, str] = {}
    for number in range(rounds):
        last = {name: said(answers.get(name, "")) for name in MATHEMATICIANS} if number else {}
        for name, system in MATHEMATICIANS.items():
            score = partial(is_right, problem.answer) if number == rounds - 1 else None
            messages = chat_messages(system, _AGAIN if number else _FIRST)
            answers[name] = yield Ask(name, messages, {"problem": problem.question, **last}, score)
