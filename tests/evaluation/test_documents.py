"""Documents are real, long enough, disjoint and the same every time."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from kvcomm_p2p.errors import ConfigError, UsageError
from kvcomm_p2p.evaluation import documents
from kvcomm_p2p.evaluation.documents import (
    ROLES,
    chat,
    cut_documents,
    load_gsm8k,
    questions,
    shortened,
    topic_text,
)


def test_documents_have_the_tokens_asked_for(tiny_tokenizer: Any) -> None:
    for document in cut_documents(tiny_tokenizer, 1500, 5):
        assert len(tiny_tokenizer.encode(document.text, add_special_tokens=False)) == document.tokens
        assert 1500 <= document.tokens < 1600
        assert document.text.endswith(document.text.strip()[-1])


def test_documents_share_no_paragraph_and_begin_in_different_topics(tiny_tokenizer: Any) -> None:
    found = cut_documents(tiny_tokenizer, 1500, 12)
    assert len({document.title for document in found}) == 12
    paragraphs = [p for document in found for p in document.text.split("\n\n") if len(p) > 80]
    assert len(paragraphs) == len(set(paragraphs))


def test_documents_are_the_same_every_time(tiny_tokenizer: Any) -> None:
    assert cut_documents(tiny_tokenizer, 500, 3) == cut_documents(tiny_tokenizer, 500, 3)


def test_too_many_documents_are_refused_with_how_many_there_are(tiny_tokenizer: Any) -> None:
    with pytest.raises(UsageError, match=r"give \d documents of 150000 tokens, not 9"):
        cut_documents(tiny_tokenizer, 150_000, 9)


def test_shortened_is_a_beginning(tiny_tokenizer: Any) -> None:
    [document] = cut_documents(tiny_tokenizer, 900, 1)
    short = shortened(tiny_tokenizer, document, 300)
    assert document.text.startswith(short.text) and 300 <= short.tokens < 400
    with pytest.raises(UsageError, match="fewer than 5000"):
        shortened(tiny_tokenizer, document, 5000)


def test_topic_text_begins_with_the_topic_and_goes_on_when_it_is_short() -> None:
    text = topic_text("execmodel", 5000)
    assert "Execution model" in text[:200] and 5000 <= len(text) < 8000
    assert len(topic_text("execmodel", 200_000)) >= 200_000
    assert len(topic_text("no such topic", 3000)) >= 3000


def test_a_python_without_topics_still_gives_documents(tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def without_topics(name: str) -> Any:
        if name == "pydoc_data.topics":
            raise ImportError(name)
        return real(name)

    monkeypatch.setattr(documents.importlib, "import_module", without_topics)
    documents._texts.cache_clear()
    try:
        found = cut_documents(tiny_tokenizer, 1000, 8)
    finally:
        documents._texts.cache_clear()
    assert all(document.tokens >= 1000 for document in found)


def test_roles_begin_differently() -> None:
    assert len({prompt[:20] for prompt in ROLES.values()}) == len(ROLES) >= 6
    assert all(len(prompt.split()) >= 50 for prompt in ROLES.values())


def test_chat_holds_role_slot_and_question() -> None:
    system, user = chat("critic", questions(8)[7])
    assert system == {"role": "system", "content": ROLES["critic"]}
    assert user["content"].startswith("{document}") and user["content"].endswith(questions(2)[1])


def test_gsm8k_lines(tmp_path: Path) -> None:
    path = tmp_path / "gsm8k.jsonl"
    path.write_text('{"question": "2+2?", "answer": "4\u2028#### 4"}\n\n{"question": "é", "answer": "1"}\n', "utf-8")
    first, second = load_gsm8k(path)
    assert (first.question, first.answer, second.question) == ("2+2?", "4\u2028#### 4", "é")


@pytest.mark.parametrize("line", ["not json", '["a"]', '{"question": "q"}'])
def test_gsm8k_names_the_line_that_is_wrong(tmp_path: Path, line: str) -> None:
    path = tmp_path / "gsm8k.jsonl"
    path.write_text('{"question": "q", "answer": "a"}\n' + line + "\n", "utf-8")
    with pytest.raises(ConfigError, match="line 2"):
        load_gsm8k(path)


def test_gsm8k_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gsm8k\.jsonl"):
        load_gsm8k(tmp_path / "missing")
