"""Formulas as trees, and how a flat row of signs becomes one: scripts, brackets, bars, infix fractions.

A tree keeps the order of what is written (no algebra) and whatever may carry meaning. What cannot be read with
confidence (unbalanced brackets, double scripts) raises Doubt, which never leaves `formula_latex.parse_formula`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from kvcomm_p2p.planning.formula_symbols import ROLES, Role


class LeafKind(Enum):
    """What a leaf is; the values tag it in the canonical form."""

    NUMBER = "n"
    SYMBOL = "s"
    FUNCTION = "f"
    UPRIGHT = "u"
    WORD = "w"
    TEXT = "t"
    LETTER = "v"


@dataclass(frozen=True, slots=True)
class Leaf:
    """One sign. `value` is canonical; `written` is what stood there (letters and words only)."""

    kind: LeafKind
    value: str
    written: str = ""


@dataclass(frozen=True, slots=True)
class Branch:
    """A construct with parts: a fraction, a root, brackets, a table, a decorated letter."""

    tag: str
    parts: tuple[Items, ...]


@dataclass(frozen=True, slots=True)
class Scripted:
    """Something with a subscript, a superscript or both. `base` None: nothing stands there."""

    base: Node | None
    sub: Items | None
    sup: Items | None


Node = Leaf | Branch | Scripted
Items = tuple[Node, ...]


class MarkKind(Enum):
    """What steers the structure and is not a node itself."""

    SUP = "superscript"
    SUB = "subscript"
    PRIME = "prime"
    OPEN = "opening bracket"
    CLOSE = "closing bracket"
    LEFT = "bracket after \\left"
    RIGHT = "bracket after \\right"
    INFIX = "infix fraction"


@dataclass(frozen=True, slots=True)
class Mark:
    """A sign between nodes. `value`: the bracket ("." for none), or what the infix fraction makes."""

    kind: MarkKind
    value: str = ""


Token = Leaf | Branch | Scripted | Mark

GROUP = "group"
LINES = "lines"
FENCE = "fence"
QUAD = Leaf(LeafKind.SYMBOL, "quad")
PRIME = Leaf(LeafKind.SYMBOL, "prime")

_OPERATORS = (Role.RELATION, Role.ADDITIVE, Role.MULTIPLICATIVE, Role.SEPARATOR, Role.CONNECTIVE)
_PAIRS = {
    "(": ")]",
    "[": ")]",
    "{": "}",
    "<": ">",
    "lfloor": ("rfloor", "rceil"),
    "lceil": "rceil",
    "|": "|",
    "Vert": ("Vert",),
}


class Doubt(Exception):
    """The formula cannot be read with confidence."""


def role_of(node: Node | None) -> Role:
    """What a node does to scopes: that of its symbol, scripts aside. Text separates; so does what stands above or
    below something else; braces that hold more than operands are not looked through and separate, too.
    """
    while isinstance(node, Scripted):
        node = node.base
    if isinstance(node, Leaf):
        if node.kind is LeafKind.SYMBOL:
            return ROLES.get(node.value, Role.PLAIN)
        return Role.SEPARATOR if node.kind is LeafKind.TEXT else Role.PLAIN
    if isinstance(node, Branch):
        if node.tag in ("overset", "underset", "stackrel"):
            return Role.SEPARATOR
        if node.tag in (GROUP, LINES) and any(is_operator(item) for item in node.parts[0]):
            return Role.SEPARATOR
    return Role.PLAIN


def is_operator(node: Node | None) -> bool:
    """Whether a node stands between operands."""
    return role_of(node) in _OPERATORS


def leaves(items: Items) -> Iterator[Leaf]:
    """All leaves, in the order of the canonical form."""
    for item in items:
        if isinstance(item, Leaf):
            yield item
        elif isinstance(item, Branch):
            for part in item.parts:
                yield from leaves(part)
        else:
            for part in ((item.base,) if item.base else (), item.sub or (), item.sup or ()):
                yield from leaves(part)


def letters(items: Items) -> set[str]:
    """The letters that occur anywhere in `items`."""
    return {leaf.value for leaf in leaves(items) if leaf.kind is LeafKind.LETTER}


def as_node(items: Items) -> Node:
    """What braces around `items` mean: one thing is itself (but a word stays a word), several are a group."""
    if len(items) == 1 and not (isinstance(items[0], Leaf) and items[0].kind is LeafKind.WORD):
        return items[0]
    return Branch(GROUP, (items,))


def as_items(node: Node) -> Items:
    """The inverse of as_node."""
    return node.parts[0] if isinstance(node, Branch) and node.tag == GROUP else (node,)


def structured(tokens: list[Token]) -> Items:
    """The sequence that `tokens` (the inside of one pair of braces) make. Raises Doubt."""
    infix = [at for at, token in enumerate(tokens) if isinstance(token, Mark) and token.kind is MarkKind.INFIX]
    if len(infix) > 1:
        raise Doubt("infix fractions in a row")
    if infix:
        mark = tokens[infix[0]]
        assert isinstance(mark, Mark)
        parts = (structured(tokens[: infix[0]]), structured(tokens[infix[0] + 1 :]))
        return (Branch(mark.value, parts),)
    return _Row().read(tokens)


@dataclass(slots=True)
class _Frame:
    """An open bracket and what has been read since. `scripted`: the last item got its scripts here."""

    bracket: str = ""
    stretchy: bool = False
    items: list[Node] = field(default_factory=list)
    scripted: bool = False


class _Row:
    """Reads tokens from left to right with a stack of open brackets."""

    def __init__(self) -> None:
        self._frames = [_Frame()]

    def read(self, tokens: list[Token]) -> Items:
        """Everything, as a finished sequence. Raises Doubt."""
        script: MarkKind | None = None
        for token in tokens:
            if script is not None:
                if isinstance(token, Mark):
                    raise Doubt("a script without content")
                self._attach(script, as_items(token))
                script = None
            elif not isinstance(token, Mark):
                self._frames[-1].items.append(token)
                self._frames[-1].scripted = False
            elif token.kind in (MarkKind.SUP, MarkKind.SUB):
                script = token.kind
            elif token.kind is MarkKind.PRIME:
                self._attach(MarkKind.PRIME, (PRIME,) * len(token.value))
            elif token.kind in (MarkKind.OPEN, MarkKind.LEFT):
                self._frames.append(_Frame(token.value, token.kind is MarkKind.LEFT))
            else:
                self._close(token)
        if script is not None or len(self._frames) > 1:
            raise Doubt("something is left open")
        return _finished(self._frames[0].items)

    def _close(self, token: Mark) -> None:
        frame = self._frames.pop()
        stretchy = token.kind is MarkKind.RIGHT
        fits = stretchy or token.value in _PAIRS.get(frame.bracket, "")
        if not self._frames or frame.stretchy is not stretchy or not fits:
            raise Doubt("brackets do not match")
        outer = self._frames[-1]
        outer.items.append(Branch(f"{FENCE} {frame.bracket} {token.value}", (_finished(frame.items),)))
        outer.scripted = False

    def _attach(self, kind: MarkKind, content: Items) -> None:
        """Give the last item a script. As in TeX, a superscript may follow primes; nothing else may come twice."""
        frame = self._frames[-1]
        last = frame.items.pop() if frame.items else None
        base, sub, sup = last, None, None
        if frame.scripted and isinstance(last, Scripted):
            base, sub, sup = last.base, last.sub, last.sup
        if kind is MarkKind.SUB:
            if sub is not None:
                raise Doubt("double subscript")
            sub = content
        else:
            if sup is not None and (kind is MarkKind.PRIME or any(item != PRIME for item in sup)):
                raise Doubt("double superscript")
            sup = (sup or ()) + content
        frame.items.append(Scripted(base, sub, sup))
        frame.scripted = True


def _finished(items: list[Node]) -> Items:
    """A closed sequence: empty braces and mere spacing dropped, bars paired, operators and differentials told."""
    kept: list[Node] = []
    for item in items:
        if is_operator(item) and kept and kept[-1] == QUAD:
            kept.pop()  # wide space holds operands apart; beside an operator it is only space
        if item != Branch(GROUP, ((),)) and not (item == QUAD and (not kept or is_operator(kept[-1]))):
            kept.append(item)
    if kept and kept[-1] == QUAD:
        kept.pop()
    for bar in ("|", "Vert"):
        kept = _bars_paired(kept, bar)
    return sole_lines(tuple(_told(item, kept[at + 1] if at + 1 < len(kept) else None) for at, item in enumerate(kept)))


def sole_lines(items: Items) -> Items:
    """The lines of an environment that only lays out, where nothing stands beside it; else `items`."""
    if len(items) == 1 and isinstance(items[0], Branch) and items[0].tag == LINES:
        return items[0].parts[0]
    return items


def _bars_paired(items: list[Node], name: str) -> list[Node]:
    """`|x|` as brackets, where it can be nothing else: two bars in all, the first where an operand is due."""
    bar = Leaf(LeafKind.SYMBOL, name)
    at = [k for k, item in enumerate(items) if item == bar or (isinstance(item, Scripted) and item.base == bar)]
    if len(at) != 2 or at[1] == at[0] + 1 or items[at[0]] != bar or (at[0] and not is_operator(items[at[0] - 1])):
        return items
    fence = Branch(f"{FENCE} {name} {name}", (tuple(items[at[0] + 1 : at[1]]),))
    last = items[at[1]]
    closed = Scripted(fence, last.sub, last.sup) if isinstance(last, Scripted) else fence
    return [*items[: at[0]], closed, *items[at[1] + 1 :]]


def _told(item: Node, following: Node | None) -> Node:
    """Sigma and Pi with a bound index and a body are operators; an upright d before a name is a differential."""
    base = item.base if isinstance(item, Scripted) else item
    if not isinstance(base, Leaf):
        return item
    operand_follows = following is not None and not is_operator(following)
    if base.kind is LeafKind.SYMBOL and base.value in ("Sigma", "Pi") and isinstance(item, Scripted):
        binds = any(isinstance(part, Leaf) and part.value in ("=", "in") for part in item.sub or ())
        if binds and operand_follows:
            return Scripted(Leaf(LeafKind.SYMBOL, {"Sigma": "sum", "Pi": "prod"}[base.value]), item.sub, item.sup)
    if base.kind is LeafKind.UPRIGHT and base.value == "mathrm d" and is_name(following):
        d = Leaf(LeafKind.LETTER, "d", "d")
        return Scripted(d, item.sub, item.sup) if isinstance(item, Scripted) else d
    return item


def is_name(node: Node | None) -> bool:
    """Whether a node is a letter, with scripts or without."""
    while isinstance(node, Scripted):
        node = node.base
    return isinstance(node, Leaf) and node.kind is LeafKind.LETTER
