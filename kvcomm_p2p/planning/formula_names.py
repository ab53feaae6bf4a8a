"""What the names in a formula stand for: reserved, free, or bound in a scope; and the canonical form that follows.

Replacing the letters of a whole formula by others, one for one, never changes what it says. Scopes allow more: what is
bound may be renamed on its own. That is safe only where nobody could read the scope otherwise. So every letter is

- reserved: kept as it is, wherever convention may give it a meaning of its own (`_Scanner._reserve`);
- bound: by a sum, product, limit, extremum, integral, quantifier or set whose scope is certain. If the letter also
  stands where the scope may or may not reach (`\\sum_i x_i + y_i`), nothing that binds it counts, and it is
- free, like everything else: renamed one for one over the whole formula.

The form spells the tree with every name replaced by its kind and number, in order of first occurrence.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import Enum, auto

from kvcomm_p2p.planning.formula_binders import big_binders, binds_below, differentials, is_d, letter_of, set_binder
from kvcomm_p2p.planning.formula_symbols import DECORATIONS, LETTER_CHARS, Role
from kvcomm_p2p.planning.formula_trees import (
    FENCE,
    Branch,
    Doubt,
    Items,
    Leaf,
    LeafKind,
    Node,
    Scripted,
    is_name,
    letters,
    role_of,
)

FORM_VERSION = b"1"
BINDINGS_MAX = 64
"""Every letter is looked up in all scopes: this keeps the time linear in the length."""

_APPLIED = frozenset({"O", "o", "P", "E", "Gamma", "zeta", "Theta", "Omega", "delta"})
"""Letters that are well-known functions when brackets follow."""

_INDEXED = frozenset({"delta", "epsilon", "varepsilon"})
"""Letters that are well-known symbols when they have several indices."""

_SINGLE_LETTER = re.compile(r"(?<!\w)\w(?!\w)")


@dataclass(frozen=True, slots=True)
class NamedForm:
    """`form`: equal for formulas that are equal up to spelling and renaming. `names`: (canonical name, as first
    written) of what was renamed, by first occurrence. `leaves`: how many signs the formula has.
    """

    form: bytes
    names: tuple[tuple[str, str], ...]
    leaves: int


def named_form(items: Items) -> NamedForm | None:
    """The canonical form of a tree, or None if it binds more than BINDINGS_MAX names."""
    scanner = _Scanner()
    try:
        scanner.sequence(items)
    except Doubt:
        return None
    return scanner.result()


class _Phase(Enum):
    """Whether a binding holds where the walk is."""

    BOUND = auto()
    DOUBTFUL = auto()
    OVER = auto()


class _Kind(Enum):
    """What bounds a scope. EVERYWHERE: in all of the sequence that it was made for."""

    BIG = auto()
    INTEGRAL = auto()
    QUANTIFIER = auto()
    EVERYWHERE = auto()


@dataclass(slots=True)
class _Binding:
    """A letter bound in a part of the sequence that is being read. `end`: index of an integral's differential."""

    letter: str
    number: int
    kind: _Kind
    phase: _Phase = _Phase.BOUND
    end: int = -1
    begun: bool = False
    separators: int = 0
    settled: bool = False

    def pass_by(self, role: Role) -> None:
        """Go on to a neighbour with this role, behind what binds."""
        begun, self.begun = self.begun, True
        if self.kind is _Kind.EVERYWHERE or self.settled:
            return
        if self.kind is _Kind.QUANTIFIER:
            # One separator belongs to the quantifier where its head ends there: `\forall x > 0: ...`.
            self.separators += role is Role.SEPARATOR
            if role is Role.CONNECTIVE or self.separators > 1:
                self.phase, self.settled = _Phase.DOUBTFUL, True
        elif self.kind is _Kind.INTEGRAL and self.phase is _Phase.BOUND:
            return  # its differential ends it
        elif role in (Role.SEPARATOR, Role.CONNECTIVE, Role.BAR):
            self.phase, self.settled = _Phase.DOUBTFUL, True
        elif role is Role.RELATION or (role is Role.ADDITIVE and self.kind is _Kind.INTEGRAL):
            self.phase = _Phase.OVER
        elif role is Role.ADDITIVE and begun and self.phase is _Phase.BOUND:
            self.phase = _Phase.DOUBTFUL


@dataclass(frozen=True, slots=True)
class _Use:
    """A letter in the form. `binding`: number of what binds it, or -1."""

    letter: str
    written: str
    binding: int
    in_subscript: bool


class _Scanner:
    """One walk over the tree: spells it, with a _Use for every letter, and notes what is known of the letters."""

    def __init__(self) -> None:
        self._out: list[bytes | _Use] = [FORM_VERSION]
        self._scope: list[_Binding] = []
        self._bindings = 0
        self._leaves = 0
        self._subscripts = 0
        self._reserved = {"e"}
        self._unscoped: set[str] = set()
        self._marked: set[str] = set()

    def sequence(self, items: Items, bound: tuple[_Binding, ...] = ()) -> None:
        """Spell a sequence; `bound` holds in all of it."""
        outer, begin = len(self._scope), len(self._out)
        self._scope += bound
        integrals = differentials(items)
        for at, item in enumerate(items):
            role = role_of(item)
            for binding in self._scope[outer:]:
                binding.pass_by(role)
            self._reserve(item, items[at + 1] if at + 1 < len(items) else None)
            new = self._node(item, items[at - 1] if at else None)
            for binding in self._scope[outer:]:
                if binding.end == at:
                    binding.phase = _Phase.DOUBTFUL
            if role is Role.QUANTIFIER and isinstance(item, Leaf):
                new = self._quantified(items[at + 1 :], begin)
            for letter, end in integrals.get(at, ()):
                new.append(self._binding(letter, _Kind.INTEGRAL, end))
            self._scope += new
        del self._scope[outer:]

    def _node(self, node: Node, before: Node | None) -> list[_Binding]:
        """Spell one node; returns what it binds in the rest of its sequence."""
        if isinstance(node, Leaf):
            self._leaf(node)
        elif isinstance(node, Branch):
            self._branch(node, before)
        else:
            return self._scripted(node, before)
        return []

    def _leaf(self, leaf: Leaf) -> None:
        self._leaves += 1
        if leaf.kind is LeafKind.LETTER:
            self._out.append(_Use(leaf.value, leaf.written, self._resolve(leaf.value), self._subscripts > 0))
            return
        self._spell(leaf.kind.value, leaf.value)
        # Letters that may be meant in a word or a text must not be renamed beside it.
        if leaf.kind is LeafKind.WORD:
            self._reserved.update(leaf.written)
        elif leaf.kind is LeafKind.TEXT:
            self._reserved.update(LETTER_CHARS.get(letter, letter) for letter in _SINGLE_LETTER.findall(leaf.value))

    def _branch(self, node: Branch, before: Node | None) -> None:
        self._out.append(b"(")
        self._spell("b", node.tag)
        if node.tag in DECORATIONS:
            for item in node.parts[0]:
                self._mark(item)
        letter = set_binder(node.parts[0], before) if node.tag.startswith(f"{FENCE} {{") else ""
        bound = (self._binding(letter, _Kind.EVERYWHERE),) if letter else ()
        for part in node.parts:
            self._part(part, bound)
        self._out.append(b")")

    def _scripted(self, node: Scripted, before: Node | None) -> list[_Binding]:
        self._out.append(b"^")
        if node.base is None:
            self._out.append(b"-")
        else:
            self._node(node.base, before)
        new: list[_Binding] = []
        if node.sub is not None and binds_below(node.base):
            new = [self._binding(letter, _Kind.BIG) for letter in big_binders(node.sub, node.sup is not None)]
        if node.sub is not None or not _is_power(node.sup or ()):
            self._mark(node)
        self._subscripts += 1
        self._part(node.sub, tuple(replace(binding, kind=_Kind.EVERYWHERE) for binding in new))
        self._subscripts -= 1
        doubtful = (replace(binding, kind=_Kind.EVERYWHERE, phase=_Phase.DOUBTFUL) for binding in new)
        self._part(node.sup, tuple(doubtful))
        return new

    def _part(self, items: Items | None, bound: tuple[_Binding, ...]) -> None:
        if items is None:
            self._out.append(b"-")
            return
        self._out.append(b"[")
        self.sequence(items, bound)
        self._out.append(b"]")

    def _spell(self, kind: str, value: str) -> None:
        payload = value.encode("utf-8", "surrogatepass")
        self._out.append(f"{kind}{len(payload)}:".encode() + payload)

    def _binding(self, letter: str, kind: _Kind, end: int = -1) -> _Binding:
        self._bindings += 1
        if self._bindings > BINDINGS_MAX:
            raise Doubt("more scopes than anybody writes")
        return _Binding(letter, self._bindings, kind, end=end)

    def _resolve(self, letter: str) -> int:
        """Number of the innermost binding that holds here, or -1."""
        for binding in reversed(self._scope):
            if binding.letter == letter and binding.phase is not _Phase.OVER:
                if binding.phase is _Phase.BOUND:
                    return binding.number
                self._unscoped.add(letter)
                return -1
        return -1

    def _quantified(self, rest: Items, begin: int) -> list[_Binding]:
        """What a quantifier binds: the letter behind it. `f(x) = 0 \\forall x` speaks of the x before it, too."""
        if rest and rest[0] == Leaf(LeafKind.SYMBOL, "!"):
            rest = rest[1:]
        letter = letter_of(rest[0]) if rest else ""
        if not letter:
            return []
        if any(isinstance(use, _Use) and use.letter == letter and use.binding < 0 for use in self._out[begin:]):
            self._unscoped.add(letter)
        binding = self._binding(letter, _Kind.QUANTIFIER)
        binding.separators = role_of(rest[1]) not in (Role.SEPARATOR, Role.RELATION) if len(rest) > 1 else 0
        return [binding]

    def _mark(self, node: Node) -> None:
        """A bound letter with scripts or a decoration may be another name than the letter alone."""
        while isinstance(node, Scripted) and node.base is not None:
            node = node.base
        letter = letter_of(node)
        if letter and self._resolve(letter) >= 0:
            self._marked.add(letter)

    def _reserve(self, item: Node, after: Node | None) -> None:
        """Reserve letters in positions that give them a meaning of their own, over the whole formula."""
        if role_of(item) is Role.INTEGRAL or (is_d(item) and (is_name(after) or isinstance(_base(after), Branch))):
            self._reserved.add("d")
        base, follows = _base(item), _base(after)
        letter = letter_of(base)
        if letter in _APPLIED and isinstance(follows, Branch) and follows.tag.startswith(FENCE):
            self._reserved.add(letter)
        if not isinstance(item, Scripted):
            return
        if letter in _INDEXED and item.sub is not None and len(item.sub) > 1:
            self._reserved.add(letter)
        if letter == "e" and "j" in letters(item.sup or ()):
            self._reserved.add("j")
        self._reserve_exponent(base, item.sup or ())

    def _reserve_exponent(self, base: Node | None, sup: Items) -> None:
        """T and H may transpose, and c and t behind a capital may complement or transpose."""
        last = letter_of(sup[-1]) if sup else ""
        if binds_below(base) or role_of(base) is Role.INTEGRAL:
            return
        if isinstance(base, Leaf) and base.kind is LeafKind.NUMBER:
            return
        capital = isinstance(base, Branch) or letter_of(base)[:1].isupper()
        if last in ("T", "H") or (last in ("c", "t") and len(sup) == 1 and capital):
            self._reserved.add(last)

    def result(self) -> NamedForm:
        """The form of everything that was spelled."""
        uses = [use for use in self._out if isinstance(use, _Use)]
        bindings: dict[str, list[int]] = {}
        for use in uses:
            bindings.setdefault(use.letter, []).append(use.binding)
        for letter, numbers in bindings.items():
            # Bound but used nowhere: perhaps no name at all, as the measure in `\int f d\mu`.
            idle = any(number >= 0 and numbers.count(number) == 1 for number in numbers)
            if len(set(numbers)) > 1 and (letter in self._marked or idle):
                self._unscoped.add(letter)
        # Alone, i is the imaginary unit; where it only counts, it is a name.
        alone = any(use.letter == "i" and not use.in_subscript and self._free(use) for use in uses)
        return self._numbered("i" if alone else "")

    def _free(self, use: _Use) -> bool:
        return use.binding < 0 or use.letter in self._unscoped

    def _numbered(self, soft: str) -> NamedForm:
        """Spell the uses: `soft` is reserved where it is free."""
        numbers: dict[tuple[str, str | int], str] = {}
        names: list[tuple[str, str]] = []
        counts = {"f": 0, "b": 0}
        spelled: list[bytes] = []
        for token in self._out:
            if isinstance(token, bytes):
                spelled.append(token)
                continue
            free = self._free(token)
            if token.letter in self._reserved or (free and token.letter == soft):
                spelled.append(f"r{len(token.letter)}:{token.letter}".encode())
                continue
            key: tuple[str, str | int] = ("f", token.letter) if free else ("b", token.binding)
            if key not in numbers:
                numbers[key] = f"{key[0]}{counts[key[0]]}"
                counts[key[0]] += 1
                names.append((numbers[key], token.written))
            spelled.append(numbers[key].encode() + b";")
        return NamedForm(b"".join(spelled), tuple(names), self._leaves)


def _base(node: Node | None) -> Node | None:
    """A node without its scripts."""
    while isinstance(node, Scripted):
        node = node.base
    return node


def _is_power(sup: Items) -> bool:
    """Whether a superscript can be nothing but an exponent: numbers and the signs between them."""
    kinds = [item.kind if isinstance(item, Leaf) else None for item in sup]
    signs = [item.value for item in sup if isinstance(item, Leaf) and item.kind is LeafKind.SYMBOL]
    allowed = all(kind in (LeafKind.NUMBER, LeafKind.SYMBOL) for kind in kinds)
    return allowed and LeafKind.NUMBER in kinds and all(sign in ("+", "-", "/") for sign in signs)
