"""The default model, where it has been pulled: real weights, real text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvcomm_p2p.model.call import cache_argument
from kvcomm_p2p.model.decoding import Sampling, decode

pytestmark = pytest.mark.model

MESSAGES = [
    {"role": "system", "content": "You answer in one sentence."},
    {"role": "user", "content": "Why is the sky blue? The café's menu says: 你好 😀."},
]


@pytest.fixture(scope="module")
def prompt(default_runner: Any) -> list[int]:
    text = default_runner.tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    ids = default_runner.tokenizer.encode(text, add_special_tokens=False)
    return [int(token) for token in ids]


def test_spec(default_runner: Any) -> None:
    spec = default_runner.spec
    assert (spec.layout.layers, spec.layout.kv_heads, spec.layout.key_dim, spec.layout.value_dim) == (30, 3, 64, 64)
    assert spec.layout.dtype == "float32" and spec.context_tokens_max == 8192
    assert spec.rotary is not None and not spec.rotary.interleaved and len(spec.rotary.inv_freq) == 32
    assert spec.share_refusal == "" and spec.exact_only_reason == ""


def test_chat_template_and_tokenizer(default_runner: Any, prompt: list[int]) -> None:
    text = default_runner.tokenizer.decode(prompt)
    assert text.startswith("<|im_start|>system\nYou answer in one sentence.<|im_end|>\n<|im_start|>user\n")
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert "你好 😀" in text and prompt[0] == 1


def test_greedy_equals_generate(default_runner: Any, prompt: list[int]) -> None:
    cache = default_runner.new_cache(200)
    logits = default_runner.prefill(np.array(prompt, dtype=np.uint32), cache)
    pieces: list[str] = []
    decoded = decode(default_runner, cache, prompt, logits, Sampling(max_new_tokens=24), on_text=pieces.append)
    expected = default_runner.model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[
        0, len(prompt) :
    ]
    produced = expected.tolist()
    assert list(decoded.token_ids) == produced[: len(decoded.token_ids)]
    assert len(decoded.token_ids) >= len(produced) - 1
    assert "".join(pieces) == default_runner.tokenizer.decode(decoded.token_ids, skip_special_tokens=True)
    assert len(pieces) > 3


def test_recompute_equals_prefill(default_runner: Any, prompt: list[int]) -> None:
    cache = default_runner.new_cache(200)
    logits = default_runner.prefill(prompt, cache)
    keys = cache.keys[:, :, :, : len(prompt)].clone()
    rows = [*range(3, 20), *range(len(prompt) - 8, len(prompt))]
    cache.keys[:, :, :, rows] = 0
    cache.values[:, :, :, rows] = 0
    again = default_runner.recompute(prompt, rows, cache)
    torch.testing.assert_close(again, logits, rtol=0, atol=5e-4)
    torch.testing.assert_close(cache.keys[:, :, :, : len(prompt)], keys, rtol=0, atol=5e-4)


def test_generate_goes_on_from_our_cache(default_runner: Any, prompt: list[int]) -> None:
    ids = torch.tensor([prompt])
    expected = default_runner.model.generate(ids, max_new_tokens=10, do_sample=False)
    cache = default_runner.new_cache(len(prompt))
    default_runner.prefill(prompt, cache)
    handed = cache.to_dynamic(default_runner.model.config)
    argument = {cache_argument(default_runner.model): handed}
    actual = default_runner.model.generate(ids, **argument, max_new_tokens=10, do_sample=False)
    assert actual.tolist() == expected.tolist()
