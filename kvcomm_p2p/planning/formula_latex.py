"""LaTeX formulas read into trees: pylatexenc finds macros, arguments and environments, this tells what they mean.

Several spellings of one thing become one; what only moves ink (thin spaces, sizes, `\\displaystyle`, labels) is dropped.
Everything that is not known for sure ends in None: macros, characters and environments outside the tables.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Any

from pylatexenc import latexwalker, macrospec

from kvcomm_p2p.planning import formula_symbols as spelled
from kvcomm_p2p.planning.formula_trees import (
    GROUP,
    LINES,
    QUAD,
    Branch,
    Doubt,
    Items,
    Leaf,
    LeafKind,
    Mark,
    MarkKind,
    Token,
    as_node,
    sole_lines,
    structured,
)

FORMULA_CHARS_MAX = 4_000
NESTING_MAX = 24
"""Brackets of any kind inside each other. Both limits keep the recursion and the time of every step small."""

_NESTING = re.compile(
    r"(?P<open>[{(\[⟨⌊⌈]|\\(?:left(?![a-z])|begin\b|l(?:angle|floor|ceil|vert|Vert|brace|brack)\b))"
    r"|[})\]⟩⌋⌉]|\\(?:right(?![a-z])|end\b|r(?:angle|floor|ceil|vert|Vert|brace|brack)\b)"
)
_SUP_CHARS, _SUB_CHARS = "".join(spelled.SUPERSCRIPTS), "".join(spelled.SUBSCRIPTS)
_CHARS = re.compile(
    rf"(?P<space>\s+)|(?P<number>[0-9]+(?:\.[0-9]+)?)|(?P<run>[A-Za-z]+)|(?P<sup>[{re.escape(_SUP_CHARS)}]+)"
    rf"|(?P<sub>[{re.escape(_SUB_CHARS)}]+)|(?P<prime>['′″‴]+)|(?P<dots>\.\.\.)|(?P<assign>:=)"
    r"|(?P<script>[\^_])\s*(?P<one>[A-Za-z0-9](?![A-Za-z]{2}))?|(?P<other>.)",
    re.DOTALL,
)
_END_MARKS = tuple(Leaf(LeafKind.SYMBOL, mark) for mark in ".,;")
"""What ends a sentence around a displayed formula."""
_MATH_ITALIC = range(0x1D434, 0x1D468)
_PRIMES = {"'": 1, "′": 1, "″": 2, "‴": 3}


def _context() -> Any:
    """What pylatexenc must know: the arguments of every macro and environment that we accept, and nothing else."""
    arguments = dict.fromkeys(spelled.FRACTIONS, "{{") | dict.fromkeys(spelled.DECORATIONS, "{")
    arguments |= dict.fromkeys(spelled.VERBATIM_FONTS | spelled.TEXT_MACROS, "{") | {"operatorname": "*{", "sqrt": "[{"}
    arguments |= spelled.FRAMES | spelled.STACKED | spelled.DROPPED_WITH_ARGUMENT | {"\\": "*[", "hspace": "*{"}
    context = macrospec.LatexContextDb()
    context.add_context_category(
        "formulas",
        macros=[macrospec.MacroSpec(name, argspec) for name, argspec in sorted(arguments.items())],
        environments=[
            macrospec.EnvironmentSpec(name, argspec)
            for name, argspec in sorted((spelled.WRAPPERS | spelled.TABLES).items())
        ],
        specials=[macrospec.SpecialsSpec("&"), macrospec.SpecialsSpec("~")],
    )
    context.set_unknown_macro_spec(macrospec.MacroSpec(""))
    context.set_unknown_environment_spec(macrospec.EnvironmentSpec(""))
    return context


_CONTEXT = _context()


def parse_formula(latex: str) -> Items | None:
    """The tree of a formula without its delimiters, or None where it cannot be read with confidence. Never raises.

    At most FORMULA_CHARS_MAX characters and NESTING_MAX brackets inside each other.
    """
    if len(latex) > FORMULA_CHARS_MAX or _nesting(latex) > NESTING_MAX:
        return None
    try:
        walker = latexwalker.LatexWalker(latex, latex_context=_CONTEXT, tolerant_parsing=False)
        nodes = walker.get_latex_nodes()[0]
    except Exception:  # whatever a parser of hand-written LaTeX stumbles over, we cannot read
        return None
    try:
        items = structured(_Reader(latex).tokens(nodes))
    except Doubt:
        return None
    while items and items[-1] in _END_MARKS:
        items = sole_lines(items[:-1])
    return items or None


def _nesting(latex: str) -> int:
    """The greatest number of brackets inside each other, exact where they match."""
    depth = deepest = 0
    for match in _NESTING.finditer(latex):
        depth = depth + 1 if match["open"] else max(0, depth - 1)
        deepest = max(deepest, depth)
    return deepest


class _Reader:
    """Turns pylatexenc's nodes of one source into tokens. Everything may raise Doubt."""

    def __init__(self, source: str) -> None:
        self._source = source

    def tokens(self, nodes: list[Any]) -> list[Token]:
        """The tokens of the inside of one pair of braces."""
        tokens: list[Token] = []
        bracket: MarkKind | None = None
        for node in nodes:
            if node.isNodeType(latexwalker.LatexMacroNode) and node.macroname in ("left", "right"):
                if bracket is not None:
                    raise Doubt("\\left without a bracket")
                bracket = MarkKind.LEFT if node.macroname == "left" else MarkKind.RIGHT
                continue
            new = self._node(node)
            if bracket is not None and new:
                new[0] = Mark(bracket, _delimiter(new[0]))
                bracket = None
            tokens += new
        if bracket is not None:
            raise Doubt("\\left without a bracket")
        return tokens

    def _node(self, node: Any) -> list[Token]:
        if node.isNodeType(latexwalker.LatexCharsNode):
            return _char_tokens(node.chars)
        if node.isNodeType(latexwalker.LatexMacroNode):
            return self._macro(node)
        if node.isNodeType(latexwalker.LatexGroupNode) and node.delimiters == ("{", "}"):
            return [as_node(self._items(node))]
        if node.isNodeType(latexwalker.LatexSpecialsNode):
            return [Leaf(LeafKind.SYMBOL, "&")] if node.specials_chars == "&" else []
        if node.isNodeType(latexwalker.LatexEnvironmentNode):
            return self._environment(node)
        raise Doubt("a comment, or mathematics inside mathematics")

    def _items(self, node: Any) -> Items:
        """An argument or a group as a sequence."""
        if node is None:
            raise Doubt("an argument is missing")
        if node.isNodeType(latexwalker.LatexGroupNode):
            return structured(self.tokens(node.nodelist))
        return structured(self.tokens([node]))

    def _macro(self, node: Any) -> list[Token]:
        name = node.macroname
        if name in _MACRO_TOKENS:
            return [_MACRO_TOKENS[name]]
        if name in spelled.SPACE_MACROS or name in spelled.STYLE_MACROS or name in spelled.DROPPED_WITH_ARGUMENT:
            return []
        arguments = node.nodeargd.argnlist if node.nodeargd is not None else None
        if not arguments:
            raise Doubt("a macro that is not known, or without its arguments")
        if name == "hspace":
            return [QUAD]
        if name in spelled.TEXT_MACROS:
            return [Leaf(LeafKind.TEXT, f"{name} {self._text(arguments[-1])}")]
        if name in spelled.VERBATIM_FONTS:
            return [_verbatim(name, self._raw(arguments[-1]))]
        if name in spelled.DECORATIONS:
            return [self._decorated(spelled.BOLD.get(name, name), arguments[0])]
        if name == "sqrt":
            parts = tuple(self._items(argument) for argument in arguments if argument is not None)
            return [Branch("sqrt" if len(parts) == 1 else "root", parts)]
        tag = spelled.FRACTIONS.get(name, name)
        return [Branch(tag, tuple(self._items(argument) for argument in arguments))]

    def _decorated(self, name: str, argument: Any) -> Token:
        raw = self._raw(argument)
        if len(raw) > 1 and raw.isascii() and raw.isalpha():
            return Leaf(LeafKind.WORD, f"{name} {raw}", raw)
        return Branch(name, (self._items(argument),))

    def _environment(self, node: Any) -> list[Token]:
        name = node.environmentname
        tokens = self.tokens(node.nodelist)
        newline = Leaf(LeafKind.SYMBOL, "newline")
        while tokens and tokens[-1] == newline:
            tokens.pop()
        if name in spelled.WRAPPERS:
            rows = "".join("n" if token == newline else "&" for token in tokens if token == newline or _is_align(token))
            # One alignment mark in a row only lays out; more of them hold equations apart.
            if "&&" not in rows:
                tokens = [token for token in tokens if not _is_align(token)]
            return [Branch(LINES, (structured(tokens),))]
        if name not in spelled.TABLES:
            raise Doubt("an environment that is not known")
        columns = self._raw(node.nodeargd.argnlist[0]) if spelled.TABLES[name] else ""
        return [Branch(f"{name} {columns}", (structured(tokens),))]

    def _raw(self, argument: Any) -> str:
        """An argument as written, without its braces and without spaces."""
        if argument is None:
            raise Doubt("an argument is missing")
        text = self._source[argument.pos : argument.pos + argument.len]
        if argument.isNodeType(latexwalker.LatexGroupNode):
            text = text[1:-1]
        return text.replace("\\,", "").replace(" ", "")

    def _text(self, argument: Any) -> str:
        """The words of `\\text{...}`. Anything but words may be a formula again."""
        if argument is None:
            raise Doubt("an argument is missing")
        text = self._source[argument.pos : argument.pos + argument.len].strip("{}")
        if re.search(r"[\\${}%]", text):
            raise Doubt("more than words in a text")
        return " ".join(text.split())


def _is_align(token: Token) -> bool:
    return token == Leaf(LeafKind.SYMBOL, "&")


def _verbatim(name: str, raw: str) -> Leaf:
    """Letters in a font that makes them names of their own, never renamed. Several upright ones are a function."""
    if not (raw.isascii() and raw.isalnum()):
        raise Doubt("more than letters in a font")
    if name == "operatorname" or (name == "mathrm" and len(raw) > 1 and raw.isalpha()):
        return Leaf(LeafKind.FUNCTION, raw)
    return Leaf(LeafKind.UPRIGHT, f"{name} {raw}")


def _delimiter(token: Token) -> str:
    """What stands behind `\\left` or `\\right`."""
    if isinstance(token, Mark) and token.kind in (MarkKind.OPEN, MarkKind.CLOSE):
        return token.value
    if isinstance(token, Leaf) and token.kind is LeafKind.SYMBOL and token.value in (".", "|", "Vert", "/", "<", ">"):
        return token.value
    raise Doubt("not a bracket")


def _macro_tokens() -> dict[str, Token]:
    """Macros without arguments that are one token each."""
    tokens: dict[str, Token] = {"quad": QUAD, "qquad": QUAD, "\\": Leaf(LeafKind.SYMBOL, "newline")}
    tokens |= {name: Leaf(LeafKind.SYMBOL, value) for name, value in spelled.SYMBOL_MACROS.items()}
    tokens |= {name: Leaf(LeafKind.LETTER, value, f"\\{name}") for name, value in spelled.LETTER_MACROS.items()}
    tokens |= {name: Leaf(LeafKind.FUNCTION, name) for name in spelled.FUNCTION_MACROS}
    tokens |= {name: Mark(MarkKind.OPEN, value) for name, value in spelled.OPENING.items() if name not in "([⟨⌊⌈"}
    tokens |= {name: Mark(MarkKind.CLOSE, value) for name, value in spelled.CLOSING.items() if name not in ")]⟩⌋⌉"}
    tokens |= {name: Mark(MarkKind.INFIX, value) for name, value in spelled.INFIX_FRACTIONS.items()}
    return tokens | {"middle": Leaf(LeafKind.SYMBOL, "middle")}


_MACRO_TOKENS = _macro_tokens()


def _char_tokens(chars: str) -> list[Token]:
    """Tokens of a stretch without macros and braces. Raises Doubt for characters that are not known, and for a script
    of one letter with two more behind it: `x_max` is no subscript m to most who write it.
    """
    tokens: list[Token] = []
    for match in _CHARS.finditer(chars):
        kind, text = match.lastgroup, match[0]
        if kind == "space":
            continue
        if kind == "run":
            tokens += _run(text)
        elif kind == "number":
            tokens.append(Leaf(LeafKind.NUMBER, text))
        elif kind in ("script", "one"):
            tokens.append(Mark(MarkKind.SUP if text[0] == "^" else MarkKind.SUB))
            one = match["one"]
            if one is not None:
                letter = one.isalpha()
                tokens.append(Leaf(LeafKind.LETTER, one, one) if letter else Leaf(LeafKind.NUMBER, one))
            elif re.match(r"[A-Za-z]", chars[match.end() :]):
                raise Doubt("a script of several letters without braces")
        elif kind in ("sup", "sub"):
            table = spelled.SUPERSCRIPTS if kind == "sup" else spelled.SUBSCRIPTS
            content = structured(_char_tokens("".join(table[char] for char in text)))
            tokens += [Mark(MarkKind.SUP if kind == "sup" else MarkKind.SUB), Branch(GROUP, (content,))]
        elif kind == "prime":
            tokens.append(Mark(MarkKind.PRIME, "'" * sum(_PRIMES[char] for char in text)))
        else:
            tokens.append(_sign(text))
    return tokens


def _run(text: str) -> list[Token]:
    """Letters in a row: a function, a word, or names that are multiplied."""
    if text in spelled.FUNCTION_WORDS:
        return [Leaf(LeafKind.FUNCTION, text)]
    if len(text) > 2 or text in spelled.SHORT_WORDS:
        return [Leaf(LeafKind.WORD, text, text)]
    return [Leaf(LeafKind.LETTER, letter, letter) for letter in text]


def _sign(text: str) -> Token:
    """One sign that is neither a letter run nor a number."""
    if text == ":=":
        return Leaf(LeafKind.SYMBOL, "coloneqq")
    if text == "...":
        return Leaf(LeafKind.SYMBOL, "dots")
    if text in spelled.SYMBOL_CHARS:
        return Leaf(LeafKind.SYMBOL, spelled.SYMBOL_CHARS[text])
    if text in spelled.LETTER_CHARS:
        return Leaf(LeafKind.LETTER, spelled.LETTER_CHARS[text], text)
    if text in spelled.OPENING:
        return Mark(MarkKind.OPEN, spelled.OPENING[text])
    if text in spelled.CLOSING:
        return Mark(MarkKind.CLOSE, spelled.CLOSING[text])
    if text in spelled.DOUBLE_STRUCK:
        return Leaf(LeafKind.UPRIGHT, f"mathbb {spelled.DOUBLE_STRUCK[text]}")
    if ord(text) in _MATH_ITALIC or text == "ℎ":
        letter = unicodedata.normalize("NFKC", text)
        return Leaf(LeafKind.LETTER, letter, text)
    raise Doubt("a character that is not known")
