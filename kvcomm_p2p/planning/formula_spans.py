"""Where formulas may stand in a text: LaTeX between its delimiters, and plain lines like `a² + b² = c²`.

Both are conservative, for prose, prices, shell variables and code must not become formulas: what is between dollars has to
hug them and hold no words; what is plain has to be an equation or the like with a sign that only mathematics uses.
Code between backticks is never looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from kvcomm_p2p.planning.formula_latex import FORMULA_CHARS_MAX
from kvcomm_p2p.planning.formula_symbols import (
    FUNCTION_WORDS,
    LETTER_CHARS,
    ROLES,
    SHORT_WORDS,
    SUBSCRIPTS,
    SUPERSCRIPTS,
    SYMBOL_CHARS,
    WRAPPERS,
    Role,
)

INLINE_CHARS_MAX = 1_000
PLAIN_TOKENS_MAX = 300
PLAIN_REACH = 200
"""How far from a mathematical sign an equation without delimiters is looked for, in characters."""

_OUTER = "|".join(re.escape(name) for name in sorted(WRAPPERS))
_OPENING = re.compile(rf"```|`|\\begin\{{(?P<environment>{_OUTER})\}}|\\[\[(]|\$\$?|\\.", re.DOTALL)
_CLOSING = {"$$": "$$", "\\[": "\\]", "\\(": "\\)"}
_INLINE_CODE = re.compile(r"`[^`\n]+`")
_INLINE_MATH = re.compile(
    r"(?<![A-Za-z0-9$])\$(?!\{[A-Za-z_]\w*\})(?![\s$=<>*/,;:.)&\]])"
    rf"(?P<body>(?:[^$\\\n`]|\\.|\n(?!\s*\n)){{1,{INLINE_CHARS_MAX}}})"
    r"(?<![\s=</;:(&\[\\])(?<![^^][*+\->])\$(?![A-Za-z0-9_{$(])",
    re.DOTALL,
)
_NO_PROSE = re.compile(
    r"\\(?:text\w*|mbox|math\w+|operatorname\*?|begin|end|label|tag\*?)\s*\{[^{}]*\}|\\[A-Za-z]+|[_^]\{[^{}]*\}"
)
_CODE = re.compile(r"\.[*+]|\[\^|\|\^|(?:^|\[)(?:[aA]-[zZ]|0-9)|[^^][*+]$|\?$|\\$|\(\?|=~ ?/|^[A-Za-z]{2,}$")
_PROSE = (
    "the and for but not you are was per our its has had can all any one two off out via who how why did get got yes"
)
_PROSE_WORDS = frozenset(_PROSE.split())


def _class_of(*roles: Role) -> str:
    """A regular expression's character class of the non-ASCII signs with these roles."""
    return "".join(sorted(char for char, name in SYMBOL_CHARS.items() if not char.isascii() and ROLES[name] in roles))


_SCRIPTS = "".join(SUPERSCRIPTS) + "".join(SUBSCRIPTS)
_ROLES_OF_SIGNS = (Role.RELATION, Role.BIG, Role.INTEGRAL, Role.QUANTIFIER)
_ARROWS = "→←↑↓↔"
"""Relations that prose uses, too."""

_IS_SIGN = np.zeros(0x3000, dtype=bool)
_IS_SIGN[[ord(char) for char in _class_of(*_ROLES_OF_SIGNS) + "∞∂∇√∪∩" + _SCRIPTS]] = True
_IS_SIGN[[ord(char) for char in _ARROWS]] = False

_ONE_LETTER_WORDS = ("a", "A", "I")
_SIGN = re.compile(f"[{re.escape(''.join(chr(code) for code in np.flatnonzero(_IS_SIGN)))}]")
_GREEK = "".join(LETTER_CHARS)
_LETTER = rf"[^\W\d_{re.escape(_SCRIPTS)}]"
_ALONE, _END = rf"(?<!{_LETTER})", rf"(?!{_LETTER})"
_SCRIPT_SIGNS = f"[{re.escape(_SCRIPTS)}′″]"
_PLAIN_TOKENS = {
    "space": r"[ \u00a0]+",
    "function": rf"{_ALONE}(?:{'|'.join(sorted(FUNCTION_WORDS))}){_END}",
    "differential": rf"{_ALONE}d[a-z{_GREEK}]{_END}",
    # A number may have one or two letters behind it, and two letters a script: `2ab`, `mc²`.
    "operand": rf"[0-9]+(?:\.[0-9]+)?(?!\.?[0-9])(?:[a-z]{{2}}{_END})?|{_ALONE}[A-Za-z{_GREEK}πΔ]{_END}"
    rf"|{_ALONE}[a-z]{{2}}(?={_SCRIPT_SIGNS})|[∞∅ℝℕℤℚℂ]",
    "script": rf"{_SCRIPT_SIGNS}+|[\^_](?:\{{[^{{}}\n]*\}}|[A-Za-z0-9{_GREEK}∞](?![A-Za-z0-9]))",
    "big": f"[{_class_of(Role.BIG)}Σ√∂∇]",
    "integral": f"[{_class_of(Role.INTEGRAL)}]",
    "quantifier": "[∀∃]",
    "relation": rf"[{_class_of(Role.RELATION)}]|(?<![=<>!:+\-*/~])=(?![=<>~])|(?<= )[<>](?= )",
    "binary": rf"(?!•)[{_class_of(Role.ADDITIVE, Role.MULTIPLICATIVE)}]|"
    r"(?<!\+)\+(?!\+)|(?<!-)-(?![->])|(?<!\*)\*(?!\*)|(?<!/)/(?!/)",
    "open": r"\(",
    "close": r"\)",
    "comma": ",",
    "stop": f"{_LETTER}+|.",
}
_PLAIN = re.compile("|".join(f"(?P<{name}>{pattern})" for name, pattern in _PLAIN_TOKENS.items()))


def latex_spans(text: str) -> Iterator[tuple[int, int, bool]]:
    """Start and end of what stands between delimiters (both included), ascending, and whether it may be a formula;
    otherwise it is code. Linear in the length of the text.
    """
    position = 0
    while match := _OPENING.search(text, position):
        start, sign = match.start(), match[0]
        position = match.end()
        if sign == "```":
            closing = text.find(sign, position)
            end = len(text) if closing < 0 else closing + len(sign)
            yield start, end, False
        elif sign == "`":
            code = _INLINE_CODE.match(text, start)
            if code is None:
                continue
            end = code.end()
            yield start, end, False
        else:
            end = _formula_end(text, match)
            if end < 0:
                continue
            yield start, end, True
        position = end


def _formula_end(text: str, match: re.Match[str]) -> int:
    """End of the formula that `match` opens, or -1."""
    sign, environment = match[0], match["environment"]
    if sign == "$":
        inline = _INLINE_MATH.match(text, match.start())
        return inline.end() if inline is not None and not _is_other(inline["body"]) else -1
    closing = f"\\end{{{environment}}}" if environment else _CLOSING.get(sign)
    if closing is None:
        return -1
    at = text.find(closing, match.end(), match.end() + FORMULA_CHARS_MAX)
    if at < 0 or (not environment and _is_other(text[match.end() : at])):
        return -1
    return at + len(closing)


def _is_other(body: str) -> bool:
    """Whether what stands between delimiters is a regular expression or code, a single word, or holds words outside of
    macros, their arguments and scripts.
    """
    return bool(_CODE.search(body)) or any(
        (len(word) > 3 and word not in FUNCTION_WORDS) or word.lower() in _PROSE_WORDS or word in SHORT_WORDS
        for word in re.findall(r"[A-Za-z]{2,}", _NO_PROSE.sub(" ", body))
    )


def has_signs(text: str) -> bool:
    """Whether a text holds a character that only mathematics uses; about a nanosecond per character."""
    if text.isascii():
        return False
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    return bool(_IS_SIGN[np.minimum(codes, len(_IS_SIGN) - 1)].any())


def plain_spans(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Start and end of equations and the like without delimiters in text[start:end], ascending. Each is on one line, has
    at most PLAIN_TOKENS_MAX numbers, names and signs, holds a relation and a sign that only mathematics uses, and nothing that
    could be a word. Linear in the length of the text.
    """
    for left, right in _neighbourhoods(text, start, end):
        # What begins or ends where we stopped looking may be the half of something.
        cut_left = left > start and text[left - 1] != "\n"
        cut_right = right < end and text[right] != "\n"
        yield from _equations(text, left, right, cut_left, cut_right)


def _neighbourhoods(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Parts of lines within PLAIN_REACH of mathematical signs, ascending and apart."""
    left = right = -1
    for sign in _SIGN.finditer(text, start, end):
        if left >= 0 and sign.start() < right:
            right = _reach(text, sign.end(), end)
            continue
        if left >= 0:
            yield left, right
        floor = max(start, right, sign.start() - PLAIN_REACH)
        left = max(floor, text.rfind("\n", floor, sign.start()) + 1)
        right = _reach(text, sign.end(), end)
    if left >= 0:
        yield left, right


def _reach(text: str, position: int, end: int) -> int:
    """PLAIN_REACH behind `position`, or the end of the line or of the text before that."""
    limit = min(end, position + PLAIN_REACH)
    newline = text.find("\n", position, limit)
    return limit if newline < 0 else newline


def _equations(text: str, start: int, end: int, cut_left: bool, cut_right: bool) -> Iterator[tuple[int, int]]:
    """The equations of a piece of a line, except for those that touch a side where it is cut."""
    stretch: list[re.Match[str]] = []
    depth, spoiled = 0, cut_left
    for token in _PLAIN.finditer(text, start, end):
        kind = token.lastgroup
        depth += (kind == "open") - (kind == "close")
        ends = kind == "stop" or (kind == "comma" and depth <= 0)
        if ends or not _may_follow(stretch, token):
            # Behind an operand a word may go on, but another operand makes a product that we cannot delimit.
            spoiled |= not ends and token[0] not in _ONE_LETTER_WORDS and stretch[-2][0] not in _ONE_LETTER_WORDS
            if not spoiled:
                yield from _equation(stretch)
            stretch, depth, spoiled = [], 0, spoiled and not ends
        if not ends:
            stretch.append(token)
    if not spoiled and not cut_right:
        yield from _equation(stretch)


def _may_follow(stretch: list[re.Match[str]], token: re.Match[str]) -> bool:
    """Whether an operand may stand behind what is there. Behind a space only where it cannot be the next word."""
    if token.lastgroup not in ("operand", "function", "open", "differential") or not stretch:
        return True
    if token.lastgroup == "differential":
        return any(before.lastgroup == "integral" for before in stretch[-PLAIN_TOKENS_MAX:])
    if stretch[-1].lastgroup != "space":
        return True
    last = _last(stretch, ("space",))
    if last in ("", "relation", "binary", "open", "comma"):
        return True
    return _last(stretch, ("space", "script")) in ("big", "integral", "function", "quantifier")


def _last(stretch: list[re.Match[str]], beside: tuple[str, ...]) -> str:
    """The kind of the last token that is of none of these kinds, or ""."""
    return next((token.lastgroup or "" for token in reversed(stretch) if token.lastgroup not in beside), "")


def _equation(stretch: list[re.Match[str]]) -> Iterator[tuple[int, int]]:
    """The stretch without what hangs over at its ends, if it is an equation or the like. Yields at most one span."""
    if len(stretch) > PLAIN_TOKENS_MAX:
        return
    hanging = ("space", "comma", "binary", "relation")
    while stretch and stretch[-1].lastgroup in hanging:
        stretch = stretch[:-1]
    while stretch and stretch[0].lastgroup in (*hanging, "script"):
        stretch = stretch[1:]
    depth, relations = 0, 0
    for token in stretch:
        depth += (token.lastgroup == "open") - (token.lastgroup == "close")
        if depth < 0:
            return
        relations += token.lastgroup == "relation" and depth == 0
    if depth == 0 and relations and any(has_signs(token[0]) for token in stretch):
        yield stretch[0].start(), stretch[-1].end()
