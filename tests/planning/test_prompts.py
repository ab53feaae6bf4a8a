"""Prompts: tokenized exactly as without us, slots and visibility found by character offsets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcomm_p2p.errors import UsageError
from kvcomm_p2p.planning.chains import group_tag
from kvcomm_p2p.planning.segments import VisibilityMark
from kvcomm_p2p.planning.winnow import content_marks
from kvcomm_p2p.prompts import PreparedPrompt, Text, prepare, prepare_ids
from kvcomm_p2p.protocol.anchors import Visibility

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMMING = CHATML.replace("m['content']", "m['content'] | trim")
TEXTS = ["the report says that the cat sat on the mat", "write code {x: 1} and [report] please", "user assistant"] * 3


def make_tokenizer(template: str | None = CHATML, *, trim_offsets: bool = False) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    core.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(
            vocab_size=400,
            min_frequency=2,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=["<|im_start|>", "<|im_end|>"],
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core, eos_token="<|im_end|>"
    )
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


def texts_of(tokenizer: Any, prepared: PreparedPrompt, name: str) -> list[str]:
    return [tokenizer.decode(prepared.token_ids[a:b].tolist()) for a, b in prepared.slots[name]]


def test_ids_equal_those_of_the_chat_template(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the report: hé🎉 {x: 1} [0]"}]
    prepared = prepare(tokenizer, messages)
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert prepared.token_ids.tolist() == expected
    assert prepared.token_ids.dtype == np.uint32
    assert not prepared.token_ids.flags.writeable
    assert prepared.text == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prepared.visibility == ()


def test_a_text_is_one_user_message_unless_raw(tokenizer: Any) -> None:
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "the cat"}], add_generation_prompt=True)[
        "input_ids"
    ]
    assert prepare(tokenizer, "the cat").token_ids.tolist() == chat
    assert prepare(tokenizer, "the cat", chat=False).token_ids.tolist() == tokenizer("the cat")["input_ids"]
    assert prepare(make_tokenizer(None), "the cat").token_ids.tolist() == tokenizer("the cat")["input_ids"]


def test_slots_change_no_token_and_map_to_their_content(tokenizer: Any) -> None:
    slots = {"report": "\nthe cat sat\n", "question": "why?"}
    messages = [
        {"role": "system", "content": "Read.\n{report}"},
        {"role": "user", "content": "[question]\n{report}\n{question}"},
    ]
    prepared = prepare(tokenizer, messages, slots)
    filled = [
        {"role": "system", "content": "Read.\n\nthe cat sat\n"},
        {"role": "user", "content": "why?\n\nthe cat sat\n\nwhy?"},
    ]
    expected = tokenizer.apply_chat_template(filled, add_generation_prompt=True)["input_ids"]
    assert prepared.token_ids.tolist() == expected
    assert [text.strip() for text in texts_of(tokenizer, prepared, "report")] == ["the cat sat"] * 2
    assert texts_of(tokenizer, prepared, "question") == ["why?"] * 2


def test_a_token_that_straddles_a_border_belongs_to_the_template(tokenizer: Any) -> None:
    blank_joins_the_word = prepare(tokenizer, "the {word} mat", {"word": "cat"}, chat=False)
    assert tokenizer.tokenize("the cat mat") == ["the", "Ġcat", "Ġmat"]
    assert blank_joins_the_word.slots["word"] == ()
    glued = prepare(tokenizer, "the{word}mat", {"word": " cat"}, chat=False)
    assert texts_of(tokenizer, glued, "word") == [" cat"]
    inside = prepare(tokenizer, "t{word}e", {"word": "h"}, chat=False)
    assert len(inside.token_ids) == 1
    assert inside.slots["word"] == ()


def test_offsets_that_leave_out_the_leading_blank_are_widened() -> None:
    trimming = make_tokenizer(trim_offsets=True)
    prepared = prepare(trimming, "the {word} mat", {"word": "cat"}, chat=False)
    assert trimming.decode(prepared.token_ids.tolist()) == "the cat mat"
    assert all(not text.startswith(" ") for text in texts_of(trimming, prepared, "word"))


def test_contents_are_not_expanded_again(tokenizer: Any) -> None:
    prepared = prepare(tokenizer, "{a} {b}", {"a": "see {b} [b]", "b": "x"}, chat=False)
    assert prepared.text == "see {b} [b] x"


def test_braces_that_are_no_slot_stay(tokenizer: Any) -> None:
    code = 'f = {"a": [1, {report}], b: {}} {other} [0]'
    assert prepare(tokenizer, code, {"report": "R"}, chat=False).text == code.replace("{report}", "R")
    assert prepare(tokenizer, code, chat=False).text == code


@pytest.mark.parametrize("name", ["报告", "a.b", "two words", "x+y"])
def test_names_are_any_text(tokenizer: Any, name: str) -> None:
    prepared = prepare(tokenizer, f"[{name}] and {{{name}}}", {name: "the cat"}, chat=False)
    assert prepared.text == "the cat and the cat"


ODD = st.text(alphabet=st.sampled_from("ab {}[]\n\t é漢🎉👩‍🚀the"), max_size=12)


@settings(max_examples=150, deadline=None)
@given(ODD, ODD, ODD, st.booleans())
def test_ranges_are_right_for_odd_text(before: str, content: str, after: str, chat: bool) -> None:
    tokenizer = SHARED
    prepared = prepare(tokenizer, before + "{slot}" + after + "x", {"slot": Text(content, "private")}, chat=chat)
    text = before + content + after + "x"
    if chat:
        reference = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
    else:
        reference = tokenizer(text)
    assert prepared.token_ids.tolist() == reference["input_ids"]
    begin = prepared.text.index(text) + len(before)
    offsets = tokenizer(prepared.text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    inside = [i for i, (a, b) in enumerate(offsets) if a >= begin and b <= begin + len(content) and a < b]
    touching = [i for i, (a, b) in enumerate(offsets) if a < begin + len(content) and b > begin]
    assert prepared.slots["slot"] == (((inside[0], inside[-1] + 1),) if inside else ())
    expected = (VisibilityMark(touching[0], Visibility.PRIVATE),) if touching else ()
    assert prepared.visibility == expected


SHARED = make_tokenizer()


def test_role_names_do_not_confuse_the_search(tokenizer: Any) -> None:
    prepared = prepare(tokenizer, "{word}", {"word": "user"})
    ((start, end),) = prepared.slots["word"]
    assert tokenizer.decode(prepared.token_ids[:start].tolist()) == "<|im_start|>user\n"
    assert tokenizer.decode(prepared.token_ids[start:end].tolist()) == "user"


def test_templates_that_trim_texts() -> None:
    tokenizer = make_tokenizer(TRIMMING)
    prepared = prepare(tokenizer, [{"role": "user", "content": "{a} mid:{b}"}], {"a": "  the cat", "b": "mat  \n"})
    assert prepared.text == "<|im_start|>user\nthe cat mid:mat<|im_end|>\n<|im_start|>assistant\n"
    assert texts_of(tokenizer, prepared, "a") == ["the cat"]
    assert texts_of(tokenizer, prepared, "b") == ["mat"]


def test_adjacent_empty_and_nested_pieces(tokenizer: Any) -> None:
    whole = Text("{a}{b}{a}", "private")
    prepared = prepare(tokenizer, [{"role": "user", "content": whole}], {"a": "", "b": "the cat"})
    assert texts_of(tokenizer, prepared, "b") == ["the cat"]
    assert prepared.slots["a"] == ()
    assert prepared.visibility == (VisibilityMark(prepared.slots["b"][0][0], Visibility.PRIVATE),)


def test_visibility_grows_and_two_groups_make_private(tokenizer: Any) -> None:
    key = b"key"
    slots: dict[str, str | Text] = {
        "a": Text("the cat", "group", "red"),
        "b": Text("the mat", "group", "blue"),
        "c": "sat",
    }
    prepared = prepare(tokenizer, "say {a}, {c}, {b}.", slots, chat=False, key=key)
    first, second = prepared.visibility
    assert first[1:] == (Visibility.GROUP, group_tag("red", key))
    assert second[1:] == (Visibility.PRIVATE, b"")
    assert 0 < first.start <= prepared.slots["a"][0][0] < second.start <= prepared.slots["b"][0][0]
    whole = prepare(tokenizer, "say {a}", {"a": Text("x", "group", "red")}, visibility="private", key=key)
    assert whole.visibility == (VisibilityMark(0, Visibility.PRIVATE),)


@pytest.mark.parametrize(
    "prompt,slots,message",
    [
        ("", None, "empty"),
        (" \n", None, "empty"),
        ([], None, "empty"),
        (Text(""), None, "empty"),
        ("say {report}", {"reprot": "x"}, r"'reprot'.*\{report\}"),
        ("say", {"report": "x"}, r"write \{report\}"),
        ("say {a}", {"a": 3}, "must be text"),
        ("say {}", {"": "x"}, "name"),
        ([{"content": "x"}], None, "role"),
        ([3], None, "list of messages"),
        ("bad \udcff", None, "Unicode"),
    ],
)
def test_mistakes_are_named(tokenizer: Any, prompt: Any, slots: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        prepare(tokenizer, prompt, slots)


def test_mistakes_with_visibility_and_templates(tokenizer: Any) -> None:
    with pytest.raises(UsageError, match="public, group, private"):
        Text("x", "secret")
    with pytest.raises(UsageError, match="needs group"):
        prepare(tokenizer, "x", visibility="group")
    with pytest.raises(UsageError, match="needs visibility"):
        Text("x", group="red")
    with pytest.raises(UsageError, match="no chat template"):
        prepare(make_tokenizer(None), [{"role": "user", "content": "x"}])
    refusing = make_tokenizer("{{ raise_exception('no system role') }}")
    with pytest.raises(UsageError, match="no system role"):
        prepare(refusing, "x")
    shouting = make_tokenizer(CHATML.replace("m['content']", "m['content'] | upper | replace('A', 'aa')"))
    with pytest.raises(UsageError, match="repeats"):
        prepare(
            make_tokenizer("{% for m in messages %}{{ m['content'] }}{{ m['content'] }}{% endfor %}"),
            "a {x}",
            {"x": "b"},
        )
    assert prepare(shouting, "a").text


def test_slow_tokenizers_work_without_slots_and_say_so_with_them(tokenizer: Any) -> None:
    class Slow:
        is_fast = False
        chat_template = None

        def __call__(self, text: str, **options: Any) -> dict[str, Any]:
            assert not options["return_offsets_mapping"]
            return {"input_ids": [ord(c) for c in text]}

    assert prepare(Slow(), "ab", key=KEY).token_ids.tolist() == [97, 98]
    assert prepare(Slow(), "ab", visibility="private").visibility == (VisibilityMark(0, Visibility.PRIVATE),)
    with pytest.raises(UsageError, match="fast tokenizer"):
        prepare(Slow(), "a{x}", {"x": "b"})


def named(prepared: PreparedPrompt) -> set[int]:
    return {mark.fingerprint for mark in prepared.marks}


WORDS = ["the", "report", "says", "cat", "sat", "on", "mat", "please", "[0]", "é", "42", "."]
SHAPES = ["{it}", "the report: {it} please", 'write "{it}".', "[it]\n[it]", "code {x: 1}\n```\n[it]\n```", "({it})"]
KEY = b"content key"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(WORDS), min_size=14, max_size=20),
    st.sampled_from(SHAPES),
    st.sampled_from(SHAPES),
)
def test_short_contents_have_a_name_in_common_in_prompts_of_any_shape(words: list[str], one: str, other: str) -> None:
    content = " ".join(["the", *words])  # a word that is one token also at the beginning
    prompts = [
        prepare(SHARED, shape, {"it": content}, chat=chat, key=KEY) for shape, chat in ((one, True), (other, False))
    ]
    assert named(prompts[0]) & named(prompts[1])
    for prompt in prompts:
        for mark in prompt.marks:
            assert mark.length >= 8 and mark.position + mark.length <= len(prompt.token_ids)


def test_messages_and_every_reference_to_a_slot_have_names(tokenizer: Any) -> None:
    cat, mat = (
        "the cat sat on the mat the cat sat on the mat",
        "the report says that the cat sat: please say the report",
    )
    messages = [{"role": "system", "content": mat}, {"role": "user", "content": "{cat} and {cat}"}]
    prepared = prepare(tokenizer, messages, {"cat": cat}, key=KEY)
    first, second = (
        {mark.fingerprint for mark in content_marks(prepared.token_ids, [range_], KEY)}
        for range_ in prepared.slots["cat"]
    )
    assert first | second <= named(prepared)
    assert first & second
    alone = prepare(tokenizer, [{"role": "user", "content": mat}], key=KEY)
    assert alone.marks and named(alone) <= named(prepared)
    assert not named(alone) & named(prepare(tokenizer, [{"role": "user", "content": mat}], key=b"another"))


def test_no_names_without_a_key_or_of_templates_that_rewrite(tokenizer: Any) -> None:
    mat = "the cat sat on the mat the cat sat on the mat"
    assert prepare(tokenizer, mat).marks == ()
    assert prepare(tokenizer, mat, chat=False, key=KEY).marks == ()
    shouting = make_tokenizer(CHATML.replace("m['content']", "m['content'] | upper"))
    assert prepare(shouting, mat, key=KEY).marks == ()
    assert prepare_ids(list(range(20)), 30, key=KEY).marks == ()


def test_ids_given_directly() -> None:
    import torch

    for ids in ([1, 2, 3], np.array([[1, 2, 3]]), torch.tensor([[1, 2, 3]])):
        assert prepare_ids(ids, 4).token_ids.tolist() == [1, 2, 3]
    for bad, message in (
        ([], "empty"),
        ([1, 4], r"\[0, 4\)"),
        ([-1], r"\[0, 4\)"),
        ([1.5], "integers"),
        ([[1], [2]], "shape"),
        ([[1], [2, 3]], "one sequence"),
    ):
        with pytest.raises(UsageError, match=message):
            prepare_ids(bad, 4)
    marks = prepare_ids([1], 4, visibility="group", group="red", key=b"k").visibility
    assert marks == (VisibilityMark(0, Visibility.GROUP, group_tag("red", b"k")),)
