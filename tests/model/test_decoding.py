"""Greedy and sampled decoding, stop texts, streaming, cancellation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcomm_p2p.errors import UsageError
from kvcomm_p2p.model.decoding import Decoded, Sampling, decode, end_tokens
from kvcomm_p2p.model.runner import ModelRunner
from kvcomm_p2p.model.streaming import TextStream

PROMPT = [(37 * i + 11) % 250 for i in range(30)]


def answer(runner: Any, sampling: Sampling, **options: Any) -> tuple[Decoded, Any]:
    cache = runner.new_cache(40)
    logits = runner.prefill(PROMPT, cache)
    return decode(runner, cache, PROMPT, logits, sampling, **options), cache


@pytest.mark.parametrize("penalty", [1.0, 1.4])
def test_greedy_equals_generate(runner: ModelRunner, penalty: float) -> None:
    decoded, cache = answer(runner, Sampling(max_new_tokens=20, repetition_penalty=penalty))
    expected = runner.model.generate(
        torch.tensor([PROMPT]), max_new_tokens=20, do_sample=False, repetition_penalty=penalty, pad_token_id=0
    )[0, len(PROMPT) :].tolist()
    ended = bool(end_tokens(runner) & set(expected))
    assert list(decoded.token_ids) == (expected[:-1] if ended else expected)
    assert decoded.finish_reason == ("eos" if ended else "length")
    assert cache.length == len(PROMPT) + len(decoded.token_ids) - (0 if ended else 1)


def test_the_cache_holds_what_a_prefill_of_the_answer_would(tiny_runner: Any) -> None:
    decoded, cache = answer(tiny_runner, Sampling(max_new_tokens=10))
    whole = tiny_runner.new_cache(50)
    tiny_runner.prefill([*PROMPT, *decoded.token_ids], whole)
    rows = cache.length
    torch.testing.assert_close(cache.keys[:, :, :, :rows], whole.keys[:, :, :, :rows], rtol=0, atol=1e-4)
    torch.testing.assert_close(cache.values[:, :, :, :rows], whole.values[:, :, :, :rows], rtol=0, atol=1e-4)


def test_seeds_repeat_and_differ(tiny_runner: Any) -> None:
    def drawn(seed: int) -> tuple[int, ...]:
        return answer(tiny_runner, Sampling(temperature=3.0, top_k=100, seed=seed, max_new_tokens=12))[0].token_ids

    assert drawn(1) == drawn(1)
    assert len({drawn(seed) for seed in range(5)}) > 1


def test_filters_narrow_the_choice(tiny_runner: Any) -> None:
    greedy = answer(tiny_runner, Sampling(max_new_tokens=8))[0].token_ids
    assert answer(tiny_runner, Sampling(temperature=5.0, top_k=1, max_new_tokens=8))[0].token_ids == greedy
    assert answer(tiny_runner, Sampling(temperature=5.0, top_p=1e-6, max_new_tokens=8))[0].token_ids == greedy


def test_end_token_ends(tiny_runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    free = answer(tiny_runner, Sampling(max_new_tokens=6))[0].token_ids
    monkeypatch.setattr(tiny_runner.model.generation_config, "eos_token_id", [258, free[3]])
    assert end_tokens(tiny_runner) == {258, free[3]}
    decoded, cache = answer(tiny_runner, Sampling(max_new_tokens=6))
    first = free.index(free[3])
    assert decoded.token_ids == free[:first] and decoded.finish_reason == "eos"
    assert cache.length == len(PROMPT) + first


def test_cancelled_between_tokens(tiny_runner: Any) -> None:
    answers = iter([False, False, False, True])
    decoded, _ = answer(tiny_runner, Sampling(max_new_tokens=20), cancelled=lambda: next(answers))
    assert decoded.finish_reason == "cancelled" and len(decoded.token_ids) == 3


def test_the_context_ends_the_answer(tiny_runner: Any) -> None:
    limit = tiny_runner.spec.context_tokens_max
    prompt = [5] * (limit - 2)
    cache = tiny_runner.new_cache(limit)
    decoded = decode(tiny_runner, cache, prompt, tiny_runner.prefill(prompt, cache), Sampling(max_new_tokens=50))
    assert decoded.finish_reason == "length" and cache.length <= limit
    assert len(decoded.token_ids) == 3


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1}, {"top_k": -1}, {"top_p": 0}, {"top_p": 1.1}, {"repetition_penalty": 0}, {"max_new_tokens": 0},
     {"stop": "text"}, {"stop": ("",)}],
)  # fmt: skip
def test_senseless_sampling_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Sampling(**wrong)


def feed(tokenizer: Any, text: str, stop: tuple[str, ...] = ()) -> tuple[list[str], bool, str]:
    pieces: list[str] = []
    stream = TextStream(tokenizer, stop, pieces.append)
    stopped = any(stream.push(token) for token in tokenizer.encode(text, add_special_tokens=False))
    stream.finish()
    assert "".join(pieces) == stream.text
    return pieces, stopped, stream.text


@pytest.mark.parametrize(
    "text", ["plain words", "naïve café", "你好，世界", "a 👩‍👩‍👧 b 😀", "  two  spaces \n\n\ttabs ", "e\u0301"]
)
def test_streamed_text_is_whole_characters(tiny_tokenizer: Any, text: str) -> None:
    pieces, stopped, whole = feed(tiny_tokenizer, text)
    assert whole == text and not stopped
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)
    assert len(pieces) == len(text)


def test_an_incomplete_character_at_the_end_is_shown_as_such(tiny_tokenizer: Any) -> None:
    pieces: list[str] = []
    stream = TextStream(tiny_tokenizer, (), pieces.append)
    for token in tiny_tokenizer.encode("ok 😀", add_special_tokens=False)[:-1]:
        stream.push(token)
    assert stream.text == "ok "
    stream.finish()
    assert stream.text.startswith("ok ") and stream.text.endswith("\N{REPLACEMENT CHARACTER}")


@pytest.mark.parametrize(
    ("stop", "expected", "stopped"),
    [
        (("END",), "one ", True),
        (("D tw", "END"), "one ", True),
        (("xyz",), "one END two ENDE", False),
        (("ENDER",), "one END two ENDE", False),
        (("two",), "one END ", True),
    ],
)
def test_stop_texts_straddle_tokens(tiny_tokenizer: Any, stop: tuple[str, ...], expected: str, stopped: bool) -> None:
    pieces, ended, whole = feed(tiny_tokenizer, "one END two ENDE", stop)
    assert (whole, ended) == (expected, stopped)
    assert "".join(pieces) == expected


def test_special_tokens_are_not_text(tiny_tokenizer: Any) -> None:
    stream = TextStream(tiny_tokenizer)
    for token in [1, *tiny_tokenizer.encode("hi", add_special_tokens=False), 2]:
        stream.push(token)
    stream.finish()
    assert stream.text == "hi"


def test_a_stop_text_ends_generation(tiny_runner: Any, tiny_tokenizer: Any) -> None:
    free, _ = answer(tiny_runner, Sampling(max_new_tokens=16))
    inner = free.text[4:6]
    decoded, _ = answer(tiny_runner, Sampling(max_new_tokens=16, stop=(inner,)))
    assert decoded.finish_reason == "stop"
    assert decoded.text == free.text[: free.text.index(inner)]
    assert len(decoded.token_ids) < len(free.token_ids)
