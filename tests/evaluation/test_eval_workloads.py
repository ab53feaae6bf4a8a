"""Workloads are pure, seeded, and what they say they are."""

from __future__ import annotations

import json
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcomm_p2p.errors import ConfigError, UsageError
from kvcomm_p2p.evaluation.documents import ROLES, Document, Problem
from kvcomm_p2p.evaluation.workloads import catalogue
from kvcomm_p2p.evaluation.workloads.code import (
    PROGRAMMERS,
    CodeTask,
    code,
    defines,
    load_humaneval,
    passes_test,
    program,
)
from kvcomm_p2p.evaluation.workloads.creative import WRITERS, creative
from kvcomm_p2p.evaluation.workloads.execution import passes
from kvcomm_p2p.evaluation.workloads.mathematics import MATHEMATICIANS, final_number, is_right, mathematics
from kvcomm_p2p.evaluation.workloads.rag import rag, rag_documents, zipf
from kvcomm_p2p.evaluation.workloads.types import NO_ANSWER, Ask, Workload

DOCUMENTS = [Document(f"d{index}", f"Text of document {index}.", 5) for index in range(40)]
PROBLEMS = [Problem(f"What is {index} + 1?", f"Easy.\n#### {index + 1}") for index in range(30)]
DOUBLE = CodeTask(
    "double",
    'import math\n\n\ndef double(n: int) -> int:\n    """Twice n."""\n',
    "double",
    "assert double(4) == 8",
    ("\ndef", "\n#"),
)
TASKS = [CodeTask(f"task{index}", f"def f{index}():\n", f"f{index}", "", ()) for index in range(12)]


def transcript(workload: Workload, answer: str = "fine") -> list[Ask]:
    """Everything that is asked when every answer is `answer` and the agent's name."""
    asks = []
    for task in workload.tasks:
        conversation = task.converse()
        ask = next(conversation, None)
        made = 0
        while ask is not None:
            asks.append(ask)
            made += 1
            try:
                ask = conversation.send(f"{answer} by {ask.agent}" if answer else "")
            except StopIteration:
                ask = None
        assert made == task.requests
    return asks


def said(asks: list[Ask]) -> list[Any]:
    return [(ask.agent, ask.messages, dict(ask.slots)) for ask in asks]


MAKERS = {
    "rag": lambda requests, seed: rag(DOCUMENTS, requests=requests, seed=seed),
    "mathematics": lambda requests, seed: mathematics(PROBLEMS, requests=requests, seed=seed),
    "code": lambda requests, seed: code(TASKS, requests=requests, seed=seed),
    "creative": lambda requests, seed: creative(requests=requests, seed=seed),
}


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_the_same_seed_asks_the_same_and_another_seed_something_else(name: str) -> None:
    make = MAKERS[name]
    assert said(transcript(make(10, 3))) == said(transcript(make(10, 3)))
    assert said(transcript(make(10, 3))) != said(transcript(make(10, 4)))


@pytest.mark.parametrize("name", sorted(MAKERS))
@pytest.mark.parametrize("requests", [1, 7, 16])
def test_as_many_requests_as_asked_for_in_whole_tasks(name: str, requests: int) -> None:
    workload = MAKERS[name](requests, 0)
    asks = transcript(workload)
    assert requests <= len(asks) == workload.requests < requests + 8
    assert {ask.agent for ask in asks} <= set(workload.roles)
    assert all(len(prompt) > 180 for prompt in workload.roles.values())
    assert len({prompt[:16] for prompt in workload.roles.values()}) == len(workload.roles)


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_every_slot_is_in_the_question_and_no_request_means_an_error(name: str) -> None:
    for ask in transcript(MAKERS[name](9, 1), answer=""):
        assert all(f"{{{slot}}}" in ask.messages[-1]["content"] for slot in ask.slots)
        assert all(text.strip() for text in ask.slots.values())
    with pytest.raises(UsageError, match="at least 1"):
        MAKERS[name](0, 1)


def test_documents_are_drawn_by_zipfs_law() -> None:
    weights = zipf(40)
    assert weights.sum() == pytest.approx(1.0)
    assert weights[0] / weights[9] == pytest.approx(10.0)
    drawn = Counter(
        text for ask in transcript(rag(DOCUMENTS, requests=4000, seed=0, readers=1)) for text in ask.slots.values()
    )
    shares = np.array([drawn[document.text] for document in DOCUMENTS]) / 4000
    # The first document is drawn at least as often as alone (three draws), and popularity falls in order.
    assert 3 * weights[0] * 0.6 < shares[0] < 1.0
    groups = [shares[:2].mean(), shares[2:6].mean(), shares[6:16].mean(), shares[16:].mean()]
    assert groups == sorted(groups, reverse=True)
    assert groups[0] > 8 * groups[-1]


def test_a_question_brings_the_same_three_documents_to_all_its_readers_in_orders_of_their_own() -> None:
    asks = transcript(rag(DOCUMENTS, requests=40, seed=0))
    orders = 0
    for question in [asks[start : start + 5] for start in range(0, len(asks), 5)]:
        assert {ask.agent for ask in question} == set(list(ROLES)[:5])
        assert len({frozenset(ask.slots.values()) for ask in question}) == 1
        assert len(set(question[0].slots.values())) == 3
        orders += len({tuple(ask.slots.values()) for ask in question})
    assert orders > 16
    with pytest.raises(UsageError, match="readers"):
        rag(DOCUMENTS, requests=1, seed=0, readers=6)


def test_with_one_reader_the_roles_take_turns() -> None:
    asks = transcript(rag(DOCUMENTS, requests=10, seed=0, readers=1))
    assert [ask.agent for ask in asks] == list(ROLES)[:5] * 2


def test_documents_have_lengths_between_the_borders(tiny_tokenizer: Any) -> None:
    documents = rag_documents(tiny_tokenizer, 0, count=6, tokens=(300, 800))
    assert sorted(round(document.tokens, -2) for document in documents) == [300, 400, 500, 600, 700, 800]
    assert documents == rag_documents(tiny_tokenizer, 0, count=6, tokens=(300, 800))
    assert documents != rag_documents(tiny_tokenizer, 1, count=6, tokens=(300, 800))


def test_in_the_second_round_everybody_reads_everybodys_last_answer_and_is_scored() -> None:
    asks = transcript(mathematics(PROBLEMS, requests=8, seed=0))
    first, second = asks[:4], asks[4:]
    assert [ask.agent for ask in first] == [ask.agent for ask in second] == list(MATHEMATICIANS)
    assert all(set(ask.slots) == {"problem"} and ask.score is None for ask in first)
    for ask in second:
        assert {name: ask.slots[name] for name in MATHEMATICIANS} == {n: f"fine by {n}" for n in MATHEMATICIANS}
        assert ask.score is not None
        number = int(ask.slots["problem"].split()[2]) + 1
        assert (ask.score(f"Answer: {number}"), ask.score(f"Answer: {number + 1}")) == (1.0, 0.0)


def test_an_answer_that_never_came_is_said_to_be_missing() -> None:
    asks = transcript(mathematics(PROBLEMS, requests=8, seed=0), answer="")
    assert asks[-1].slots["sceptic"] == NO_ANSWER


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 + 4 = 7\n#### 7", "7"),
        ("#### 1,234.50", "1234.5"),
        ("Answer: $18. She sells 9 eggs for 2 dollars.", "18"),
        ("The answer is **42**, because 6 times 7.", "42"),
        ("16-3=13 and 13 - 4 = 9.", "9"),
        ("It falls by -5", "-5"),
        ("Answer: 3\nNo, wait.\nAnswer: 4", "4"),
        ("nothing", None),
    ],
)
def test_final_numbers(text: str, number: str | None) -> None:
    assert final_number(text) == (None if number is None else Decimal(number))


@given(st.text(max_size=80))
def test_final_number_never_raises(text: str) -> None:
    found = final_number(text)
    assert found is None or found.is_finite()


def test_a_solution_without_a_number_is_never_matched() -> None:
    assert is_right("nothing", "nothing") == 0.0


def test_each_programmer_reads_all_before_and_the_fixer_is_scored() -> None:
    asks = transcript(code(TASKS, requests=4, seed=0))
    assert [ask.agent for ask in asks] == list(PROGRAMMERS)
    assert [set(ask.slots) - {"task"} for ask in asks] == [set(list(PROGRAMMERS)[:count]) for count in range(4)]
    assert asks[3].slots["tester"] == "fine by tester"
    assert [ask.score is None for ask in asks] == [True, True, True, False]


ANSWERS = {
    "fenced": "Here it is:\n```python\ndef double(n):\n    return 2 * n\n```\nDone.",
    "fence never closed": "```\ndef double(n):\n    return n + n",
    "needs the prompt's imports": "def double(n):\n    return math.floor(2 * n)",
    "body": "    return 2 * n\n\ndef other():\n    nonsense(",
    "body without indentation": "return 2 * n",
}


@pytest.mark.parametrize("kind", sorted(ANSWERS))
def test_answers_that_are_right(kind: str) -> None:
    assert defines(DOUBLE, ANSWERS[kind]) == 1.0
    assert passes_test(DOUBLE, ANSWERS[kind]) == 1.0


@pytest.mark.parametrize("answer", ["def double(n):\n    return (2 *", "def other(n): return 2 * n\n    x", "\0", ""])
def test_answers_that_do_not_parse(answer: str) -> None:
    assert defines(DOUBLE, answer) == (0.0 if answer else 1.0)
    assert passes_test(DOUBLE, answer) == 0.0


@pytest.mark.parametrize(
    "body",
    [
        "return 3 * n",
        "raise ValueError",
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "f = open('x', 'w'); f.write('y'); f.close(); return 2 * n",
        "x = bytearray(2 << 30); return 2 * n",
    ],
)
def test_answers_that_parse_but_do_not_pass(body: str) -> None:
    answer = f"def double(n):\n    {body}"
    assert defines(DOUBLE, answer) == 1.0
    assert passes_test(DOUBLE, answer) == 0.0


def test_a_program_that_never_ends_is_ended() -> None:
    assert not passes("while True: pass", timeout_s=0.3)
    assert passes("print('said and lost')")


def test_programs_start_behind_what_the_prompt_imports() -> None:
    assert program(DOUBLE, "def double(n):\n    return 1").startswith("import math\n\n\ndef double(n):")
    assert program(DOUBLE, "return 1").endswith('"""Twice n."""\n    return 1\n')


def test_humaneval_lines(tmp_path: Path) -> None:
    path = tmp_path / "humaneval.jsonl"
    line = {"name": "n", "prompt": "p", "entry_point": "e", "test": "t", "stop_tokens": ["\ndef"]}
    path.write_text(json.dumps(line) + "\n\n", "utf-8")
    assert load_humaneval(path) == [CodeTask("n", "p", "e", "t", ("\ndef",))]
    path.write_text(json.dumps(line) + '\n{"name": 1}\n', "utf-8")
    with pytest.raises(ConfigError, match="line 2"):
        load_humaneval(path)
    with pytest.raises(ConfigError, match=r"humaneval\.jsonl"):
        load_humaneval(tmp_path / "missing")


def test_creative_prompts_are_all_different() -> None:
    asks = transcript(creative(requests=200, seed=0))
    assert len({ask.messages[-1]["content"] for ask in asks}) == 200
    assert [ask.agent for ask in asks[:4]] == list(WRITERS)
    with pytest.raises(UsageError, match="2400"):
        creative(requests=2401, seed=0)


def test_too_few_problems_and_tasks_are_named() -> None:
    with pytest.raises(UsageError, match="problems"):
        mathematics(PROBLEMS[:1], requests=9, seed=0)
    with pytest.raises(UsageError, match="tasks"):
        code(TASKS[:1], requests=5, seed=0)


def test_the_catalogue_builds_what_it_has_data_for(tiny_tokenizer: Any, tmp_path: Path) -> None:
    problems = tmp_path / "gsm8k.jsonl"
    problems.write_text("".join(json.dumps({"question": p.question, "answer": p.answer}) + "\n" for p in PROBLEMS))
    data = catalogue.Data(gsm8k=problems, document_tokens=(50, 90))
    for name in ("rag", "mathematics", "creative"):
        assert catalogue.build(name, tiny_tokenizer, data, None, 0).requests >= catalogue.REQUESTS[name]
    assert data.missing("code") and not data.missing("mathematics")
    with pytest.raises(ConfigError, match="--humaneval"):
        catalogue.build("code", tiny_tokenizer, data, None, 0)
