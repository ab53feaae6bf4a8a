"""From what a user writes to token ids, with what is known about their parts.

The whole prompt is tokenized once, exactly as `transformers` does it without us; slots and visibility are found
afterwards by character offsets, so they never change a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcomm_p2p.errors import UsageError
from kvcomm_p2p.planning.chains import group_tag
from kvcomm_p2p.planning.formulas import LEAVES_MIN, find_formulas, formula_fingerprint
from kvcomm_p2p.planning.segments import VisibilityMark
from kvcomm_p2p.planning.winnow import ContentMark, content_marks
from kvcomm_p2p.prompt_text import (
    Access,
    Filled,
    Filler,
    Piece,
    Text,
    check_unicode,
    message_places,
    parse_visibility,
    rendered,
    split_messages,
)
from kvcomm_p2p.protocol.anchors import Visibility

__all__ = ["PreparedPrompt", "Ranges", "Text", "parse_visibility", "prepare", "prepare_ids"]

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A tokenized prompt: `token_ids` uint32 [T], T >= 1, read-only.

    `slots`: name -> token ranges [start, end) of its content, one per reference that holds a whole token; a token that
    straddles a border belongs to the template. `visibility`: marks, ascending and ever stricter; a token that touches a
    stricter piece is as strict. `text`: what was tokenized ("" when ids were given). `marks`: names of short contents (of
    every reference to a slot, and of messages), by which prompts of another shape that hold them are found.
    """

    token_ids: npt.NDArray[np.uint32]
    slots: Mapping[str, Ranges] = field(default_factory=dict)
    visibility: tuple[VisibilityMark, ...] = ()
    text: str = ""
    marks: tuple[ContentMark, ...] = ()


def prepare(
    tokenizer: Any,
    prompt: str | Text | Sequence[Mapping[str, Any]],
    slots: Mapping[str, str | Text] | None = None,
    *,
    chat: bool = True,
    visibility: str = "public",
    group: str = "",
    key: bytes = b"",
) -> PreparedPrompt:
    """Tokenize `prompt` with a `transformers` tokenizer.

    Messages ({"role", "content"}) go through the chat template, with the generation prompt; a text is one user message,
    or is tokenized as it is (with the tokenizer's special tokens) if `chat` is False or the tokenizer has no chat
    template. In every text, `{name}` and `[name]` of each slot are replaced by its content, once: markers inside a
    content stay. Other braces and brackets stay too. `visibility` and `group` hold for the whole prompt, `Text` for a
    piece. `key`: the content key, for group tags and for `marks` (none without it, or with a slow tokenizer).

    Raises UsageError: empty prompt, slot that no marker refers to, visibility that does not exist, group without a
    name, text that is not Unicode, template that rewrites texts with slots, tokenizer without offsets when they are
    needed.
    """
    whole = Access(parse_visibility(visibility, group), group)
    filler = Filler(slots or {})
    contents: Sequence[Filled | None] = ()
    if isinstance(prompt, (str, Text)):
        as_chat = chat and bool(getattr(tokenizer, "chat_template", None))
        if not (prompt.text if isinstance(prompt, Text) else prompt).strip():
            raise UsageError("the prompt is empty: give some text")
        content = filler.fill(prompt)
        text, pieces = content.text, content.pieces
        if as_chat:
            contents = [content]
            text, pieces = rendered(tokenizer, [{"role": "user"}], contents)
    else:
        as_chat = True
        messages, contents = split_messages(prompt, filler)
        if not getattr(tokenizer, "chat_template", None):
            raise UsageError("this model has no chat template: give the prompt as one text instead of messages")
        text, pieces = rendered(tokenizer, messages, contents)
    filler.check_used()
    check_unicode(text)
    strict = [piece for piece in pieces if piece.access.visibility > Visibility.PUBLIC]
    located = [piece for piece in pieces if piece.slot] or strict
    named = bool(key) and getattr(tokenizer, "is_fast", False)
    ids, offsets = _tokenized(tokenizer, text, special_tokens=not as_chat, with_offsets=bool(located) or named)
    if not len(ids):
        raise UsageError("the prompt is empty: it has no tokens")
    ranges = _slot_ranges(pieces, offsets, filler.names)
    places = [*(piece[:2] for piece in pieces if piece.slot), *message_places(text, contents)] if named else []
    return PreparedPrompt(
        token_ids=ids,
        slots=ranges,
        visibility=_marks(whole, strict, offsets, key),
        text=text,
        marks=(*content_marks(ids, _inside(offsets, places), key), *_formula_marks(text, offsets, key))
        if named
        else (),
    )


def prepare_ids(
    token_ids: Any, vocabulary_size: int, *, visibility: str = "public", group: str = "", key: bytes = b""
) -> PreparedPrompt:
    """A prompt that is tokenized already: a list, array or tensor of shape [T] or [1, T].

    Raises UsageError for an empty prompt, another shape, or ids that are not integers in [0, vocabulary_size).
    """
    if hasattr(token_ids, "detach"):
        token_ids = token_ids.detach().cpu().numpy()
    try:
        ids = np.asarray(token_ids)
    except ValueError:
        raise UsageError("token ids must be one sequence of integers") from None
    if ids.ndim == 2 and len(ids) == 1:
        ids = ids[0]
    if ids.ndim != 1:
        raise UsageError(f"token ids must have shape [T] or [1, T], not {list(ids.shape)}")
    if not len(ids):
        raise UsageError("the prompt is empty: it has no tokens")
    if not np.issubdtype(ids.dtype, np.integer):
        raise UsageError(f"token ids must be integers, not {ids.dtype}")
    if int(ids.min()) < 0 or int(ids.max()) >= vocabulary_size:
        raise UsageError(f"token ids must lie in [0, {vocabulary_size}), these reach from {ids.min()} to {ids.max()}")
    whole = Access(parse_visibility(visibility, group), group)
    return PreparedPrompt(token_ids=_frozen(ids), visibility=_marks(whole, [], _NO_OFFSETS, key))


def _formula_marks(text: str, offsets: npt.NDArray[np.int64], key: bytes) -> list[ContentMark]:
    """Names of the formulas in a text, equal for all spellings and namings of one formula; tiny ones name nothing."""
    marks = []
    for formula in find_formulas(text):
        for start, end in _inside(offsets, [(formula.start, formula.end)]):
            if formula.leaves >= LEAVES_MIN:
                marks.append(ContentMark(start, end - start, formula_fingerprint(formula.canonical, key)))
    return marks


_NO_OFFSETS: npt.NDArray[np.int64] = np.empty((0, 2), dtype=np.int64)


def _tokenized(
    tokenizer: Any, text: str, *, special_tokens: bool, with_offsets: bool
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
    """Ids uint32 [T] and, if asked for, the characters [start, end) of each token: int64 [T, 2]."""
    if with_offsets and not getattr(tokenizer, "is_fast", False):
        raise UsageError("this model's tokenizer tells no character offsets: slots and Text(...) need a fast tokenizer")
    encoded = tokenizer(text, add_special_tokens=special_tokens, return_offsets_mapping=with_offsets, verbose=False)
    ids = _frozen(np.array(encoded["input_ids"], dtype=np.int64))
    if not with_offsets:
        return ids, _NO_OFFSETS
    offsets = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
    # Some tokenizers trim the blank in front of a word from its offsets, though it is part of the token: give it back.
    reached = np.concatenate(([0], np.maximum.accumulate(offsets[:, 1])[:-1]))
    whole = offsets[:, 1] > offsets[:, 0]
    offsets[:, 0] = np.where(whole, np.minimum(offsets[:, 0], np.maximum(reached, 0)), offsets[:, 0])
    return ids, offsets


def _frozen(ids: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    frozen = np.array(ids, dtype=np.uint32)
    frozen.flags.writeable = False
    return frozen


def _slot_ranges(pieces: Sequence[Piece], offsets: npt.NDArray[np.int64], names: Sequence[str]) -> Mapping[str, Ranges]:
    found = {name: _inside(offsets, (piece[:2] for piece in pieces if piece.slot == name)) for name in names}
    return MappingProxyType(found)


def _inside(offsets: npt.NDArray[np.int64], places: Iterable[tuple[int, int]]) -> Ranges:
    """Token ranges of the tokens that lie wholly in the characters [start, end); ascending, of places with any."""
    ranges: list[tuple[int, int]] = []
    for start, end in places:
        inside = (offsets[:, 0] >= start) & (offsets[:, 1] <= end) & (offsets[:, 1] > offsets[:, 0])
        tokens = np.flatnonzero(inside)
        if len(tokens):
            ranges.append((int(tokens[0]), int(tokens[-1]) + 1))
    return tuple(sorted(ranges))


def _marks(
    whole: Access, strict: Sequence[Piece], offsets: npt.NDArray[np.int64], key: bytes
) -> tuple[VisibilityMark, ...]:
    """Marks of the prompt's own visibility and of every piece that is stricter than public."""
    starts = [(0, whole)]
    for piece in strict:
        touching = np.flatnonzero((offsets[:, 0] < piece.end) & (offsets[:, 1] > piece.start))
        if len(touching):
            starts.append((int(touching[0]), piece.access))
    marks: list[VisibilityMark] = []
    level = VisibilityMark(0, Visibility.PUBLIC)
    for start, (visibility, name) in sorted(starts, key=lambda item: (item[0], -item[1].visibility)):
        tag = group_tag(name, key) if name else b""
        if visibility is Visibility.GROUP and level.visibility is Visibility.GROUP and tag != level.group:
            visibility, tag = Visibility.PRIVATE, b""
        if visibility > level.visibility:
            level = VisibilityMark(start, visibility, tag)
            marks.append(level)
    return tuple(marks)
