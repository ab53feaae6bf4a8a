"""A tiny model whose tokenizer has a chat template, as roles and documents need one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from kvcomm_p2p.model.runner import ModelRunner

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def chat_runner(tiny_llama: Callable[..., Any], tiny_tokenizer: Any) -> ModelRunner:
    """4,096 positions; every byte is a token."""
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = TEMPLATE
    model = tiny_llama(vocab_size=259, max_position_embeddings=4096)
    return ModelRunner.from_model(model, tokenizer, "tiny-chat")
