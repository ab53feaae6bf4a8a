"""Tiny models whose tokenizers have a chat template, as roles and documents need one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from kvcomm_p2p.evaluation.documents import ROLES, topic_text
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


@pytest.fixture(scope="session")
def word_runner(tiny_llama: Callable[..., Any]) -> ModelRunner:
    """4,096 positions; words are tokens, as in real tokenizers: a system prompt has about 75."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4000,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([*ROLES.values()] * 20 + [topic_text("execmodel", 100_000)], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = TEMPLATE
    model = tiny_llama(vocab_size=len(tokenizer), max_position_embeddings=4096)
    return ModelRunner.from_model(model, tokenizer, "tiny-words")
