"""The text of a prompt: slots filled in, chat template applied, and where the parts have come to stand in it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvcomm_p2p.errors import UsageError
from kvcomm_p2p.protocol.anchors import Visibility


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


class Access(NamedTuple):
    visibility: Visibility
    group: str


class Piece(NamedTuple):
    """Characters [start, end) that came from a slot (`slot` = its name) or a Text."""

    start: int
    end: int
    slot: str
    access: Access


class Filled(NamedTuple):
    text: str
    pieces: list[Piece]


class Filler:
    """Fills slots into texts and remembers which were used."""

    def __init__(self, slots: Mapping[str, str | Text]) -> None:
        self.names = list(slots)
        self._contents: dict[str, tuple[str, Access]] = {}
        for name, content in slots.items():
            if not isinstance(name, str) or not name or set(name) & set("{}[]"):
                raise UsageError(f"a slot's name must be text without brackets, not {name!r}")
            if not isinstance(content, (str, Text)):
                raise UsageError(f"slot {name!r} must be text, not {type(content).__name__}")
            self._contents[name] = text_and_access(content)
        either = "|".join(re.escape(name) for name in sorted(self._contents, key=len, reverse=True))
        self._markers = re.compile(rf"\{{({either})\}}|\[({either})\]") if either else None
        self._used: set[str] = set()
        self._seen: list[str] = []

    def fill(self, content: str | Text) -> Filled:
        """`content` with its slots filled in."""
        text, access = text_and_access(content)
        parts: list[str] = []
        pieces: list[Piece] = []
        at = length = 0
        for marker in self._markers.finditer(text) if self._markers else ():
            name = marker[1] or marker[2]
            self._used.add(name)
            filled, own = self._contents[name]
            before = text[at : marker.start()]
            parts += [before, filled]
            pieces.append(Piece(length + len(before), length + len(before) + len(filled), name, own))
            length += len(before) + len(filled)
            at = marker.end()
        parts.append(text[at:])
        self._seen.append(text)
        joined = "".join(parts)
        if access.visibility > Visibility.PUBLIC:
            pieces.insert(0, Piece(0, len(joined), "", access))
        return Filled(joined, pieces)

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


def text_and_access(content: str | Text) -> tuple[str, Access]:
    if isinstance(content, Text):
        return content.text, Access(parse_visibility(content.visibility, content.group), content.group)
    return content, Access(Visibility.PUBLIC, "")


def split_messages(
    prompt: Sequence[Mapping[str, Any]], filler: Filler
) -> tuple[list[dict[str, Any]], list[Filled | None]]:
    """Messages without their texts, and the texts, filled; None for a content that is not a text."""
    if not isinstance(prompt, Sequence) or not all(isinstance(message, Mapping) for message in prompt):
        raise UsageError("the prompt must be a text or a list of messages like {'role': 'user', 'content': '...'}")
    if not prompt:
        raise UsageError("the prompt is empty: give at least one message")
    contents: list[Filled | None] = []
    for message in prompt:
        if "role" not in message or "content" not in message:
            raise UsageError("every message needs a 'role' and a 'content'")
        content = message["content"]
        contents.append(filler.fill(content) if isinstance(content, (str, Text)) else None)
    return [dict(message) for message in prompt], contents


def rendered(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], contents: Sequence[Filled | None]
) -> tuple[str, list[Piece]]:
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


def message_places(text: str, contents: Sequence[Filled | None]) -> list[tuple[int, int]]:
    """Characters [start, end) of the messages' contents in the rendered text, without blanks around them.

    From the last message backwards; what a template has changed is left out.
    """
    places: list[tuple[int, int]] = []
    end = len(text)
    for content in reversed(contents):
        kept = content.text.strip() if content is not None else ""
        at = text.rfind(kept, 0, end) if kept else -1
        if at >= 0:
            places.append((at, at + len(kept)))
            end = at
    return places


def _border_order(contents: Sequence[Filled | None]) -> Iterator[tuple[int, int]]:
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


def _with_borders(content: Filled, mark: str) -> str:
    parts, at = [], 0
    for _, border in _border_order([content]):
        parts += [content.text[at:border], mark]
        at = border
    return "".join([*parts, content.text[at:]])


def _searched(text: str, contents: Sequence[Filled | None]) -> list[Piece]:
    """Pieces by looking for whole contents, from the last message backwards: for templates that trim at a piece's
    border.
    """
    pieces: list[Piece] = []
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


def check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(
            f"the prompt is not Unicode text (character {error.start}): decode bytes with errors='replace'"
        ) from None
