"""From what a user writes to token ids, with what is known about their parts.

The whole prompt is tokenized once, exactly as `transformers` does it without us; slots and visibility are found
afterwards by character offsets, so they never change a token.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvcomm_p2p.errors import UsageError
from kvcomm_p2p.planning.chains import group_tag
from kvcomm_p2p.planning.segments import VisibilityMark
from kvcomm_p2p.protocol.anchors import Visibility

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of a prompt (slot content, message content or the prompt itself) that says who may learn of its KV.

    `visibility`: "public", "group" (then `group` names it) or "private". What follows it in the prompt is as strict.
    """

    text: str
    visibility: str = "public"
    group: str = ""

    def __post_init__(self) -> None:
        parse_visibility(self.visibility, self.group)


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A tokenized prompt: `token_ids` uint32 [T], T >= 1, read-only.

    `slots`: name -> token ranges [start, end) of its content, one per reference that holds a whole token; a token that
    straddles a border belongs to the template. `visibility`: marks, ascending and ever stricter; a token that touches a
    stricter piece is as strict. `text`: what was tokenized ("" when ids were given).
    """

    token_ids: npt.NDArray[np.uint32]
    slots: Mapping[str, Ranges] = field(default_factory=dict)
    visibility: tuple[VisibilityMark, ...] = ()
    text: str = ""


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
    piece. `key`: the content key, for group tags.

    Raises UsageError: empty prompt, slot that no marker refers to, visibility that does not exist, group without a
    name, text that is not Unicode, template that rewrites texts with slots, tokenizer without offsets when they are
    needed.
    """
    whole = _Access(parse_visibility(visibility, group), group)
    filler = _Filler(slots or {})
    if isinstance(prompt, (str, Text)):
        as_chat = chat and bool(getattr(tokenizer, "chat_template", None))
        if not (prompt.text if isinstance(prompt, Text) else prompt).strip():
            raise UsageError("the prompt is empty: give some text")
        content = filler.fill(prompt)
        text, pieces = (
            _rendered(tokenizer, [{"role": "user"}], [content]) if as_chat else (content.text, content.pieces)
        )
    else:
        as_chat = True
        messages, contents = _messages(prompt, filler)
        if not getattr(tokenizer, "chat_template", None):
            raise UsageError("this model has no chat template: give the prompt as one text instead of messages")
        text, pieces = _rendered(tokenizer, messages, contents)
    filler.check_used()
    _check_unicode(text)
    strict = [piece for piece in pieces if piece.access.visibility > Visibility.PUBLIC]
    located = [piece for piece in pieces if piece.slot] or strict
    ids, offsets = _tokenized(tokenizer, text, special_tokens=not as_chat, with_offsets=bool(located))
    if not len(ids):
        raise UsageError("the prompt is empty: it has no tokens")
    return PreparedPrompt(
        token_ids=ids,
        slots=_slot_ranges(pieces, offsets, filler.names) if located else dict.fromkeys(filler.names, ()),
        visibility=_marks(whole, strict, offsets, key),
        text=text,
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
    whole = _Access(parse_visibility(visibility, group), group)
    return PreparedPrompt(token_ids=_frozen(ids), visibility=_marks(whole, [], _NO_OFFSETS, key))


def parse_visibility(name: str, group: str = "") -> Visibility:
    """`name` as a value. Raises UsageError for an unknown one, or a group name that is missing or not called for."""
    names = [value.name.lower() for value in Visibility]
    if name not in names:
        raise UsageError(f"visibility must be one of {', '.join(names)}, not {name!r}")
    value = Visibility[name.upper()]
    if value is Visibility.GROUP and not group:
        raise UsageError("visibility 'group' needs group='<name>'")
    if group and value is not Visibility.GROUP:
        raise UsageError("group=... needs visibility='group'")
    return value


class _Access(NamedTuple):
    visibility: Visibility
    group: str


class _Piece(NamedTuple):
    """Characters [start, end) that came from a slot (`slot` = its name) or a Text."""

    start: int
    end: int
    slot: str
    access: _Access


class _Filled(NamedTuple):
    text: str
    pieces: list[_Piece]


class _Filler:
    """Fills slots into texts and remembers which were used."""

    def __init__(self, slots: Mapping[str, str | Text]) -> None:
        self.names = list(slots)
        self._contents: dict[str, tuple[str, _Access]] = {}
        for name, content in slots.items():
            if not isinstance(name, str) or not name or set(name) & set("{}[]"):
                raise UsageError(f"a slot's name must be text without brackets, not {name!r}")
            if not isinstance(content, (str, Text)):
                raise UsageError(f"slot {name!r} must be text, not {type(content).__name__}")
            self._contents[name] = _text_and_access(content)
        either = "|".join(re.escape(name) for name in sorted(self._contents, key=len, reverse=True))
        self._markers = re.compile(rf"\{{({either})\}}|\[({either})\]") if either else None
        self._used: set[str] = set()
        self._seen: list[str] = []

    def fill(self, content: str | Text) -> _Filled:
        """`content` with its slots filled in."""
        text, access = _text_and_access(content)
        parts: list[str] = []
        pieces: list[_Piece] = []
        at = length = 0
        for marker in self._markers.finditer(text) if self._markers else ():
            name = marker[1] or marker[2]
            self._used.add(name)
            filled, own = self._contents[name]
            before = text[at : marker.start()]
            parts += [before, filled]
            pieces.append(_Piece(length + len(before), length + len(before) + len(filled), name, own))
            length += len(before) + len(filled)
            at = marker.end()
        parts.append(text[at:])
        self._seen.append(text)
        joined = "".join(parts)
        if access.visibility > Visibility.PUBLIC:
            pieces.insert(0, _Piece(0, len(joined), "", access))
        return _Filled(joined, pieces)

    def check_used(self) -> None:
        """Raises UsageError if a slot was given that no text refers to."""
        unused = [name for name in self.names if name not in self._used]
        if unused:
            found = {marker[0] for text in self._seen for marker in re.finditer(r"\{\w+\}|\[\w+\]", text)}
            there = sorted(found - _markers(self.names))[:8]
            hint = f"the prompt has {', '.join(there)}" if there else f"write {{{unused[0]}}} where it belongs"
            raise UsageError(f"no text refers to slot {', '.join(map(repr, unused))}; {hint}")


def _markers(names: Sequence[str]) -> set[str]:
    return {f"{{{name}}}" for name in names} | {f"[{name}]" for name in names}


def _text_and_access(content: str | Text) -> tuple[str, _Access]:
    if isinstance(content, Text):
        return content.text, _Access(parse_visibility(content.visibility, content.group), content.group)
    return content, _Access(Visibility.PUBLIC, "")


def _messages(
    prompt: Sequence[Mapping[str, Any]], filler: _Filler
) -> tuple[list[dict[str, Any]], list[_Filled | None]]:
    """Messages without their texts, and the texts, filled; None for a content that is not a text."""
    if not isinstance(prompt, Sequence) or not all(isinstance(message, Mapping) for message in prompt):
        raise UsageError("the prompt must be a text or a list of messages like {'role': 'user', 'content': '...'}")
    if not prompt:
        raise UsageError("the prompt is empty: give at least one message")
    contents: list[_Filled | None] = []
    for message in prompt:
        if "role" not in message or "content" not in message:
            raise UsageError("every message needs a 'role' and a 'content'")
        content = message["content"]
        contents.append(filler.fill(content) if isinstance(content, (str, Text)) else None)
    return [dict(message) for message in prompt], contents


def _rendered(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], contents: Sequence[_Filled | None]
) -> tuple[str, list[_Piece]]:
    """The text that the chat template makes of the messages, and where the pieces are in it."""
    text = _template(tokenizer, messages, [content and content.text for content in contents])
    if not any(content and content.pieces for content in contents):
        return text, []
    # Templates may move and trim texts: render again, with a mark at each piece's borders, to see where they went.
    mark = next(chr(code) for code in range(0xE000, 0xF8FF) if chr(code) not in text)
    marked = _template(tokenizer, messages, [content and _with_borders(content, mark) for content in contents])
    if marked.replace(mark, "") != text:
        return text, _searched(text, contents)
    borders = [position - i for i, position in enumerate(m.start() for m in re.finditer(re.escape(mark), marked))]
    pieces = [piece for content in contents if content for piece in content.pieces]
    order = [number for number, _ in _border_order(contents)]
    if len(borders) != len(order):
        raise UsageError("this model's chat template repeats or drops texts, so slots cannot be located in it")
    starts: dict[int, int] = {}
    ends: dict[int, int] = {}
    for number, position in zip(order, borders, strict=True):
        (ends if number in starts else starts)[number] = position
    return text, [piece._replace(start=starts[i], end=ends[i]) for i, piece in enumerate(pieces)]


def _border_order(contents: Sequence[_Filled | None]) -> Iterator[tuple[int, int]]:
    """(number of the piece, character in its content) of every border, in the order in which borders stand in the
    text.
    """
    first = 0
    for content in contents:
        if content is None:
            continue
        # Ends before starts at one place, but an empty piece begins before it ends; an enclosing Text stays outside.
        borders = []
        for i, piece in enumerate(content.pieces):
            outer = not piece.slot
            borders.append((piece.start, 0 if outer else 2 * i + 1, first + i))
            borders.append((piece.end, 2 * len(content.pieces) + 1 if outer else 2 * i + 2, first + i))
        yield from ((number, at) for at, _, number in sorted(borders))
        first += len(content.pieces)


def _with_borders(content: _Filled, mark: str) -> str:
    parts, at = [], 0
    for _, border in _border_order([content]):
        parts += [content.text[at:border], mark]
        at = border
    return "".join([*parts, content.text[at:]])


def _searched(text: str, contents: Sequence[_Filled | None]) -> list[_Piece]:
    """Pieces by looking for whole contents, from the last message backwards: for templates that trim at a piece's
    border.
    """
    pieces: list[_Piece] = []
    end = len(text)
    for content in reversed(contents):
        if content is None:
            continue
        kept = content.text.strip()
        at = text.rfind(kept, 0, end)
        if at < 0:
            raise UsageError("this model's chat template rewrites texts, so slots cannot be located in it")
        shift = at - content.text.find(kept)
        end = at
        low, high = at, at + len(kept)
        pieces = [
            piece._replace(start=min(max(piece.start + shift, low), high), end=max(min(piece.end + shift, high), low))
            for piece in content.pieces
        ] + pieces
    return pieces


def _template(tokenizer: Any, messages: Sequence[Mapping[str, Any]], texts: Sequence[str | None]) -> str:
    filled = [
        {**message, **({} if text is None else {"content": text})}
        for message, text in zip(messages, texts, strict=True)
    ]
    try:
        rendered = tokenizer.apply_chat_template(filled, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates raise jinja2's errors of their own making
        if type(error).__module__.startswith("jinja2"):
            raise UsageError(f"the model's chat template refuses these messages: {error}") from error
        raise
    return str(rendered)


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(
            f"the prompt is not Unicode text (character {error.start}): decode bytes with errors='replace'"
        ) from None


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


def _slot_ranges(
    pieces: Sequence[_Piece], offsets: npt.NDArray[np.int64], names: Sequence[str]
) -> Mapping[str, Ranges]:
    ranges: dict[str, list[tuple[int, int]]] = {name: [] for name in names}
    for piece in pieces:
        if not piece.slot:
            continue
        inside = (offsets[:, 0] >= piece.start) & (offsets[:, 1] <= piece.end) & (offsets[:, 1] > offsets[:, 0])
        tokens = np.flatnonzero(inside)
        if len(tokens):
            ranges[piece.slot].append((int(tokens[0]), int(tokens[-1]) + 1))
    return MappingProxyType({name: tuple(sorted(found)) for name, found in ranges.items()})


def _marks(
    whole: _Access, strict: Sequence[_Piece], offsets: npt.NDArray[np.int64], key: bytes
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
