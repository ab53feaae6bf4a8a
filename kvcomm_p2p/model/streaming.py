"""Text out of tokens, one at a time: whole characters only, and nothing that may turn out to belong to a stop text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Feed tokens with `push`; `text` is what has been released so far (and given to `on_text`)."""

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), on_text: Callable[[str], None] | None = None) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._on_text = on_text
        self._tokens: list[int] = []
        # Tokens [context, shown) have been shown; they are decoded again so that spaces between tokens come out right.
        self._context = 0
        self._shown = 0
        self._held = ""
        self._stopped = False
        self.text = ""

    def push(self, token: int) -> bool:
        """Takes one token. True when the text has reached a stop text: everything from there on is dropped."""
        if self._tokenizer is None:
            return False
        self._tokens.append(token)
        self._held += self._new_text(final=False)
        self._stopped = self._cut_at_stop()
        self._release(len(self._held) if self._stopped else len(self._held) - self._possible_stop())
        return self._stopped

    def finish(self) -> None:
        """Releases what was held back, also an incomplete character (as U+FFFD)."""
        if self._tokenizer is None or self._stopped:
            return
        self._held += self._new_text(final=True)
        self._stopped = self._cut_at_stop()
        self._release(len(self._held))

    def _new_text(self, *, final: bool) -> str:
        before = self._decode(self._tokens[self._context : self._shown])
        now = self._decode(self._tokens[self._context :])
        if len(now) <= len(before) or (now.endswith(_INCOMPLETE) and not final):
            return ""
        self._context, self._shown = self._shown, len(self._tokens)
        return now[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        if not tokens:
            return ""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _cut_at_stop(self) -> bool:
        found = [at for text in self._stop if (at := self._held.find(text)) >= 0]
        if found:
            self._held = self._held[: min(found)]
        return bool(found)

    def _possible_stop(self) -> int:
        """Length of the longest end of the held text that begins a stop text."""
        longest = max((len(text) for text in self._stop), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(text.startswith(self._held[-length:]) for text in self._stop):
                return length
        return 0

    def _release(self, length: int) -> None:
        piece, self._held = self._held[:length], self._held[length:]
        if piece:
            self.text += piece
            if self._on_text is not None:
                self._on_text(piece)
