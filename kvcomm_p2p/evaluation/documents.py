"""What evaluations prefill: real documents, the roles that read them, and what they are asked.

The documents are the Python language reference as it comes with Python (`pydoc_data.topics`): prose with code, nothing
to download, the same for everybody who has the same Python.
"""

from __future__ import annotations

import importlib
import json
import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kvcomm_p2p.errors import ConfigError, UsageError

ROLES: dict[str, str] = {
    "planner": (
        "You are the planner of a small software team. Before anybody writes code you break a task into steps, put "
        "the steps in an order in which each one can be checked, and name what could go wrong. You answer in plain "
        "English, you never invent requirements that nobody stated, and you say so openly whenever the material "
        "that you were given does not settle a question."
    ),
    "coder": (
        "Act as an experienced Python programmer. Your colleagues hand you reference material together with a "
        "request; you reply with a short explanation and, where it helps, with a minimal working example. Prefer "
        "the standard library, keep functions small, choose telling names, and point out differences between "
        "versions of the language if the reference mentions any of them."
    ),
    "reviewer": (
        "Your job is code review. Read whatever is put in front of you slowly, compare every claim with the text it "
        "is based on, and report only what you can prove by quoting that text. Be polite but firm: a missing edge "
        "case is worth a sentence, a matter of taste is not. Finish with a clear verdict, which is one of accept, "
        "change or reject, and one reason for it."
    ),
    "critic": (
        "As a critic you look for the weakest point of an argument. Somebody will show you a document and ask about "
        "it; find out what the author takes for granted, where two statements do not fit together, and which "
        "conclusion goes further than its evidence. Do not repeat what is good. Three sharp sentences are better "
        "than a page of careful hedging that leaves everybody unsure."
    ),
    "teacher": (
        "Imagine a class of beginners who have programmed for three weeks. You are their teacher: patient, "
        "concrete, fond of everyday comparisons. Whatever a student asks, begin with the idea in one sentence, then "
        "show how it looks in practice, and close with a mistake that people often make at that point. Avoid terms "
        "that were not explained before, and never make a student feel slow."
    ),
    "archivist": (
        "The archive keeps thousands of technical texts, and you are responsible for its catalogue. For each text "
        "you record what it is about, which terms it defines, for whom it was written and what a reader must know "
        "already. Entries are factual and brief; opinions, advice and marketing language have no place in them. Use "
        "the words of the text itself wherever that is possible."
    ),
}
"""Role name -> system prompt, at least 60 tokens each, no two with the same beginning."""

_QUESTIONS = (
    "Summarise the text above in three sentences.",
    "Which terms does the text above define? Explain the most important one.",
    "What should a programmer remember from the text above?",
    "What is the most surprising statement in the text above, and why?",
    "Give one example from the text above and explain it in your own words.",
    "Which question does the text above leave open?",
)

_FALLBACK_MODULES = ("argparse", "decimal", "pathlib", "datetime", "threading", "random", "statistics", "logging")
_PARAGRAPH_CHARACTERS_MIN = 40
_TOKEN_CHARACTERS_MAX = 16
"""On average over a text, generously."""

_HEADING = re.compile(r"\A\s*(?P<title>[^\n]+)\n[*=~\-\"]{3,}\s*(?:\n|\Z)")


@dataclass(frozen=True, slots=True)
class Document:
    """`tokens`: how many the text has by itself in the tokenizer it was cut with."""

    title: str
    text: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem with its worked solution."""

    question: str
    answer: str


def cut_documents(tokenizer: Any, tokens: int, count: int, topics: list[Topic] | None = None) -> list[Document]:
    """`count` documents of at least `tokens` tokens each (a few more: they end between two words) that share no
    paragraph.

    Each begins in another topic as long as there are any. The same list on every machine with the same Python and
    tokenizer. `topics`: what is left from earlier calls (`library()` at first; mutated), for documents that share no
    paragraph with those either. Raises UsageError if the texts do not suffice.
    """
    topics = library() if topics is None else topics
    found: list[Document] = []
    while len(found) < count:
        topic: Topic | None = None
        title, parts, expected = "", [], 0
        document = None
        while document is None:
            if topic is None or not topic.paragraphs:
                topic = max(topics, key=lambda each: (bool(each.paragraphs), -each.begun, each.characters))
                topic.begun += 1
                title = title or topic.title
            if not topic.paragraphs:
                raise UsageError(f"the library's texts give {len(found)} documents of {tokens} tokens, not {count}")
            parts.append(topic.take())
            expected += len(tokenizer.encode(parts[-1], add_special_tokens=False)) + 1
            document = _cut(tokenizer, title, "\n\n".join(parts), tokens) if expected >= tokens else None
        found.append(document)
    return found


def topic_text(topic: str, characters: int) -> str:
    """The beginning of one topic (a key of `pydoc_data.topics`, e.g. "execmodel"), at least `characters` characters of it
    and whole paragraphs, without a tokenizer.

    Goes on with other topics if that one is shorter or, in this Python, missing.
    """
    texts = _texts()
    order = sorted(texts, key=lambda name: (name != topic, -len(texts[name]), name))
    text = "\n\n".join(texts[name].strip() for name in order)
    end = text.find("\n\n", characters)
    return text if end < 0 else text[:end]


def shortened(tokenizer: Any, document: Document, tokens: int) -> Document:
    """The beginning of a document, at least `tokens` tokens of it. Raises UsageError if it has fewer."""
    cut = _cut(tokenizer, document.title, document.text, tokens)
    if cut is None:
        raise UsageError(f"the document {document.title!r} has {document.tokens} tokens, fewer than {tokens}")
    return cut


def questions(count: int) -> list[str]:
    """`count` questions that fit any document; they repeat after the sixth."""
    return [_QUESTIONS[index % len(_QUESTIONS)] for index in range(count)]


def chat(role: str, question: str) -> list[dict[str, str]]:
    """The chat messages of `role` (a key of `ROLES`) being asked about the slot {document}, which `slots` must fill."""
    return [
        {"role": "system", "content": ROLES[role]},
        {"role": "user", "content": "{document}\n\n" + question},
    ]


def load_gsm8k(path: Path) -> list[Problem]:
    """Problems of a GSM8K file: one JSON object per line with `question` and `answer`. Raises ConfigError naming the
    line."""
    problems = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): give the path of a gsm8k.jsonl") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            problems.append(Problem(str(item["question"]), str(item["answer"])))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f'{path}, line {number}: not an object with "question" and "answer"') from error
    return problems


def _cut(tokenizer: Any, title: str, text: str, tokens: int) -> Document | None:
    """The shortest beginning of `text` that ends between two words and has `tokens` tokens; None if there is none."""
    text = text[: _TOKEN_CHARACTERS_MAX * tokens]
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    if len(offsets) < tokens:
        return None
    for end in (match.start() for match in re.finditer(r"\s+|\Z", text)):
        if end < offsets[tokens - 1][1]:
            continue
        cut = text[:end]
        count = len(tokenizer.encode(cut, add_special_tokens=False))
        if count >= tokens:
            return Document(title, cut, count)
    return None


@dataclass(slots=True)
class Topic:
    """What is left of a text: `characters` in `paragraphs`; `begun`: how often documents were begun or continued
    here."""

    title: str
    paragraphs: deque[str]
    characters: int
    begun: int = 0

    def take(self) -> str:
        """The next paragraph."""
        paragraph = self.paragraphs.popleft()
        self.characters -= len(paragraph)
        return paragraph


def library() -> list[Topic]:
    """All texts, longest first. A paragraph that occurs again is left out, because several topics contain each
    other."""
    texts = _texts()
    topics = []
    seen: set[str] = set()
    for name in sorted(texts, key=lambda name: (-len(texts[name]), name)):
        title, body = _title(name, texts[name])
        kept: deque[str] = deque()
        for paragraph in re.split(r"\n\s*\n", body):
            key = " ".join(paragraph.split())
            if len(key) >= _PARAGRAPH_CHARACTERS_MIN and key not in seen:
                seen.add(key)
                kept.append(paragraph.strip("\n"))
        topics.append(Topic(title, kept, sum(map(len, kept))))
    return topics


def _title(name: str, text: str) -> tuple[str, str]:
    """Title and body of a topic."""
    match = _HEADING.match(text)
    return (match["title"].strip(), text[match.end() :]) if match else (name, text)


@cache
def _texts() -> dict[str, str]:
    """Name -> text: the topics of pydoc or, in a Python without them, docstrings of the standard library."""
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except (ImportError, AttributeError):
        topics = None
    if isinstance(topics, Mapping) and topics:
        return {str(name): str(text) for name, text in topics.items()}
    return {name: "\n\n".join(_docstrings(name)) for name in _FALLBACK_MODULES}


def _docstrings(module_name: str) -> Iterator[str]:
    """All docstrings of a module, in the order of their names, each once."""
    module = importlib.import_module(module_name)
    owners = [module, *(value for _, value in sorted(vars(module).items()) if isinstance(value, type))]
    seen: set[str] = set()
    for owner in owners:
        for _, value in [("", owner), *sorted(vars(owner).items())]:
            text = value.__doc__ if callable(value) or value is module else None
            if isinstance(text, str) and text not in seen:
                seen.add(text)
                yield text
