"""Texts that a command line gives: as they are, from stdin, or from a file."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from kvcomm_p2p.errors import UsageError

_MARKER = re.compile(r"(?<![\w\\}$^)\]])\{([^\W\d]\w*)\}")
"""A slot, and not the braces of LaTeX (`\\frac{a}{b}`, `x^{n}`), of a shell (`${HOME}`) or of code (`f(){go}`)."""


def read_file(path: Path) -> str:
    """The file's text. Raises UsageError naming the fix."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 (byte {error.start}): convert it first, e.g. with iconv") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}): check the path") from error


def names_a_file(word: str) -> bool:
    """Whether there is a file of this name. Never raises."""
    try:
        return Path(word).is_file()
    except (OSError, ValueError):  # too long for a name, or with characters that no name has
        return False


def text_or_file(word: str, option: str) -> str:
    """The text of the file `word`, or `word` itself; "-" reads stdin. `option` took it, for people.

    Raises UsageError for a file that cannot be read, and for what looks like a path where nothing is.
    """
    if word == "-":
        return sys.stdin.read()
    if names_a_file(word):
        return read_file(Path(word))
    if _looks_like_a_path(word):
        raise UsageError(
            f"there is no file {word}: check the path (if this is the text itself: {option} - reads stdin)"
        )
    return word


def check_filled(text: str, slots: Iterable[str]) -> None:
    """Raises UsageError if a `{name}` in a typed text is none of `slots`."""
    unfilled = [name for name in dict.fromkeys(_MARKER.findall(text)) if name not in set(slots)]
    if unfilled:
        name = unfilled[0]
        told = ", ".join(f"{{{each}}}" for each in unfilled)
        raise UsageError(
            f"nothing fills {told}: give --slot {name}=TEXT or --slot {name}=@FILE "
            f"(to leave it as it is: --slot '{name}={{{name}}}')"
        )


def _looks_like_a_path(word: str) -> bool:
    """No blanks, and a slash or an ending such as .md."""
    return not re.search(r"\s", word) and bool(re.search(r"/|\w\.[A-Za-z]\w{0,7}$", word))
