"""Retrieval: every question brings three documents, some far more often than others, and five roles read them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcomm_p2p.errors import UsageError
from kvcomm_p2p.evaluation.documents import ROLES, Document, cut_documents, library, questions
from kvcomm_p2p.evaluation.workloads.types import Ask, Conversation, Task, Workload, chat_messages, whole_tasks

DOCUMENTS = 40
DOCUMENT_TOKENS = (300, 1500)
"""The shortest and the longest; the others lie evenly between them."""

PER_QUESTION = 3
EXPONENT = 1.0
READERS = 5
_SLOTS = ("first", "second", "third")
_STREAM = 1
"""Part of the random generator's seed, so that workloads with the same seed do not draw the same numbers."""


def rag_documents(
    tokenizer: Any, seed: int, *, count: int = DOCUMENTS, tokens: tuple[int, int] = DOCUMENT_TOKENS
) -> list[Document]:
    """`count` real documents that share no paragraph, by falling popularity; which length is popular depends on
    `seed`. Raises UsageError if the library's texts do not suffice."""
    lengths = np.linspace(*tokens, count).round().astype(int)
    topics = library()
    order = np.random.default_rng([seed, _STREAM, 0]).permutation(lengths)
    return [document for length in order for document in cut_documents(tokenizer, int(length), 1, topics)]


def zipf(count: int, exponent: float = EXPONENT) -> npt.NDArray[np.float64]:
    """Probabilities [count] of the ranks 1 to count: proportional to rank ** -exponent."""
    weights = np.arange(1, count + 1, dtype=np.float64) ** -exponent
    return np.asarray(weights / weights.sum())


def rag(documents: Sequence[Document], *, requests: int, seed: int, readers: int = READERS) -> Workload:
    """At least `requests` requests: each question goes to `readers` of the five roles, which take turns.

    A question's documents are drawn by Zipf's law over their order, without repetition; each reader gets them in an
    order of its own. Raises UsageError for fewer documents than a question brings, or readers that are not 1 to 5.
    """
    roles = dict(list(ROLES.items())[:READERS])
    if not 1 <= readers <= len(roles):
        raise UsageError(f"a question can be put to 1 to {len(roles)} readers, not to {readers}")
    if len(documents) < PER_QUESTION:
        raise UsageError(f"a question brings {PER_QUESTION} documents, only {len(documents)} are there")
    rng = np.random.default_rng([seed, _STREAM, 1])
    popularity = zipf(len(documents))
    names = list(roles)
    count = whole_tasks(requests, readers)
    tasks = []
    for number, question in enumerate(questions(count)):
        drawn = rng.choice(len(documents), PER_QUESTION, replace=False, p=popularity)
        asks = []
        for turn in range(number * readers, (number + 1) * readers):
            role = names[turn % len(names)]
            texts = [documents[index].text for index in rng.permutation(drawn)]
            asks.append(_ask(role, question, texts))
        tasks.append(Task(f"question {number + 1}", readers, partial(_converse, tuple(asks))))
    return Workload("rag", roles, tuple(tasks))


def _ask(role: str, question: str, texts: Sequence[str]) -> Ask:
    markers = "\n\n".join(f"{{{slot}}}" for slot in _SLOTS)
    slots = dict(zip(_SLOTS, texts, strict=True))
    return Ask(role, chat_messages(ROLES[role], f"{markers}\n\n{question}"), slots)


def _converse(asks: tuple[Ask, ...]) -> Conversation:
    for ask in asks:  # noqa: UP028 - an iterator of a tuple cannot be sent answers
        yield ask
