"""Which letters a sum, a limit, an integral or a set binds, told only where there is no other reading."""

from __future__ import annotations

from kvcomm_p2p.planning.formula_symbols import LIMIT_FUNCTIONS, Role
from kvcomm_p2p.planning.formula_trees import (
    Items,
    Leaf,
    LeafKind,
    Node,
    Scripted,
    is_name,
    is_operator,
    letters,
    role_of,
)

_ASSIGNING = frozenset({"=", "in", "to", "subset", "subseteq"})
_ASCENDING = frozenset({"<", "le", "leqslant"})


def letter_of(node: Node | None) -> str:
    """The letter that a node is, or "" for everything else, letters with scripts included."""
    return node.value if isinstance(node, Leaf) and node.kind is LeafKind.LETTER else ""


def is_symbol(node: Node | None, *names: str) -> bool:
    """Whether a node is one of these symbols, without scripts."""
    return isinstance(node, Leaf) and node.kind is LeafKind.SYMBOL and node.value in names


def binds_below(node: Node | None) -> bool:
    """Whether a subscript of this node binds names for what follows: big operators, limits, extrema."""
    if isinstance(node, Leaf) and node.kind is LeafKind.FUNCTION:
        return node.value in LIMIT_FUNCTIONS
    return isinstance(node, Leaf) and role_of(node) is Role.BIG


def big_binders(sub: Items, ranged: bool) -> list[str]:
    """Letters that the subscript of a big operator or a limit binds. `ranged`: it has an upper limit, too.

    `i=1`, `x \\in X`, `x \\to 0`, `n \\ge 0`, `1 \\le i \\le n`, `i`, `i, j \\in I`, each with conditions behind `:` or `|`. Not
    `i < j`: the sum may be over either. Not a bare capital: `\\sup_X` is over a set.
    """
    if any(is_symbol(item, "newline", "&") or role_of(item) is Role.CONNECTIVE for item in sub):
        return []
    cut = next((at for at, item in enumerate(sub) if is_symbol(item, ":", "|", ";")), len(sub))
    found: list[str] = []
    relations: list[str] = []
    for part in _split(sub[:cut]):
        letter, relation = _bound_in(part)
        alike = not relations or relation == relations[0]
        completes = not any(relations) and (relation == "in" or (relation == "=" and ranged))
        if not letter or letter in found or not (alike or completes):
            break
        found.append(letter)
        relations.append(relation)
    return found


def _split(items: Items) -> list[Items]:
    """The stretches between commas."""
    commas = [at for at, item in enumerate(items) if is_symbol(item, ",")]
    starts, ends = [0, *(at + 1 for at in commas)], [*commas, len(items)]
    return [items[start:end] for start, end in zip(starts, ends, strict=True)]


def _bound_in(part: Items) -> tuple[str, str]:
    """The letter that one stretch binds and the relation that it stands in ("" for none), or ("", "")."""
    relations = [at for at, item in enumerate(part) if role_of(item) is Role.RELATION]
    first = letter_of(part[0]) if part else ""
    if first and len(part) == 1:
        return (first, "") if not first[0].isupper() else ("", "")
    signs = [item.value for item in (part[at] for at in relations) if isinstance(item, Leaf)]
    if first and relations == [1] and signs:
        others = letters(part[2:])
        if first not in others and (signs[0] in _ASSIGNING or not others):
            return first, signs[0]
    elif relations == [1, 3] and len(signs) == 2 and _ASCENDING.issuperset(signs):
        middle, bound = letter_of(part[2]), part[0]
        from_number = isinstance(bound, Leaf) and bound.kind is LeafKind.NUMBER
        if middle and from_number and middle not in letters(part[4:]):
            return middle, "between"
    return "", ""


def differentials(items: Items) -> dict[int, list[tuple[str, int]]]:
    """Index of an integral sign -> the letters that it binds, each with the index where its scope ends (`x` in `dx`).

    The scope lies between the sign and the differential.
    """
    found: dict[int, list[tuple[str, int]]] = {}
    open_signs: list[int] = []
    for at, item in enumerate(items):
        role = role_of(item)
        if role is Role.INTEGRAL:
            open_signs += [at] * _multiplicity(item)
        elif role in (Role.RELATION, Role.SEPARATOR, Role.CONNECTIVE):
            open_signs.clear()
        elif open_signs and is_d(item) and at + 1 < len(items) and not is_operator(items[at + 1]):
            sign, variable = open_signs.pop(), items[at + 1]
            letter = letter_of(variable) if isinstance(item, Leaf) else ""
            if letter:
                found.setdefault(sign, []).append((letter, at + 1))
    return found


def _multiplicity(item: Node) -> int:
    base = item.base if isinstance(item, Scripted) else item
    return {"iint": 2, "iiint": 3}.get(base.value, 1) if isinstance(base, Leaf) else 1


def is_d(node: Node) -> bool:
    """Whether a node is the letter d, or d with a superscript (`d^3 x`)."""
    return is_name(node) and (
        node.base == Leaf(LeafKind.LETTER, "d", "d") and node.sub is None
        if isinstance(node, Scripted)
        else isinstance(node, Leaf) and node.value == "d"
    )


def set_binder(inside: Items, before: Node | None) -> str:
    """The letter that `{x | ...}` or `{x \\in A : ...}` binds in all of it, or "". `inside`: what the braces hold.

    Nothing where an operand stands before the braces (`P\\{X \\mid Y\\}` is conditional), nor where the condition
    does not speak of the letter.
    """
    if before is not None and not is_operator(before) and not binds_below(_base(before)):
        return ""
    bar = next((at for at, item in enumerate(inside) if is_symbol(item, ":", "|")), 0)
    letter = letter_of(inside[0]) if bar else ""
    member = bar > 2 and is_symbol(inside[1], "in") and letter not in letters(inside[2:bar])
    bare = bar == 1 and letter in letters(inside[2:])
    return letter if member or bare else ""


def _base(node: Node) -> Node | None:
    return node.base if isinstance(node, Scripted) else node
