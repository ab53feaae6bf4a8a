"""Shared fixtures: tiny random models made in memory, never downloaded. Skips, with its reason, what cannot run
here."""

from __future__ import annotations

import os

# Before anything imports triton: its kernels then run on the CPU.
os.environ.setdefault("TRITON_INTERPRET", "1")

from collections.abc import Callable, Iterable
from typing import Any

import pytest


@pytest.fixture(scope="session")
def tiny_llama() -> Callable[..., Any]:
    """`tiny_llama(seed=0, **config overrides)`: random weights, eval mode, float32, 3 layers, 4 query and 2
    kv-heads."""

    def make(seed: int = 0, **overrides: Any) -> Any:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        settings: dict[str, Any] = {
            "vocab_size": 256,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            # Larger than usual, so that layers matter and a mistake in one shows in the logits.
            "initializer_range": 0.2,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 2,
        }
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**(settings | overrides))).eval()

    return make


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Any:
    """A byte-level tokenizer of 256 + 3 ids: every byte is one token, so an emoji is four."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {symbol: 3 + index for index, symbol in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="session")
def tiny_runner(tiny_llama: Callable[..., Any], tiny_tokenizer: Any) -> Any:
    """A ModelRunner over a tiny random Llama whose vocabulary fits `tiny_tokenizer`."""
    from kvcomm_p2p.model.runner import ModelRunner

    return ModelRunner.from_model(tiny_llama(vocab_size=259), tiny_tokenizer, "tiny-llama")


def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    """Skips tests marked `model` without the default model, and those marked `gpu` without a GPU."""
    for marker, why_not in (("model", _why_no_model), ("gpu", _why_no_gpu)):
        marked = [item for item in items if item.get_closest_marker(marker)]
        reason = why_not() if marked else ""
        if reason:
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))


def _why_no_model() -> str:
    from kvcomm_p2p.errors import ModelError
    from kvcomm_p2p.model.registry import DEFAULT_MODEL, find_folder
    from kvcomm_p2p.settings import Settings

    try:
        find_folder(DEFAULT_MODEL, Settings.from_env().cache_dir)
    except ModelError as error:
        return str(error)
    return ""


def _why_no_gpu() -> str:
    import torch

    return "" if torch.cuda.is_available() else "needs an NVIDIA GPU"


@pytest.fixture(scope="session")
def default_runner() -> Any:
    """A ModelRunner over the default model, for tests marked `model`."""
    from kvcomm_p2p.model.registry import DEFAULT_MODEL
    from kvcomm_p2p.model.runner import ModelRunner
    from kvcomm_p2p.settings import Settings

    return ModelRunner.load(DEFAULT_MODEL, cache_dir=Settings.from_env().cache_dir)
