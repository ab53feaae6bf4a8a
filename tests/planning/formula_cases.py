"""Random formulas for the tests: what they mean, how they may be spelled, and when two of them mean the same.

A formula here is a tree with letters in it and scopes that nobody can read otherwise (bodies stand in brackets), so
that `meaning` can tell from the tree alone which letters are the same name. It shares nothing with what it tests.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

from kvcomm_p2p.planning.formulas import canonical_form

Tree = Any
"""("name", letter, index or None) | ("number", digits) | ("constant", which) | ("power", base, exponent)
| ("sum" or "product", first, second) | ("fraction", top, bottom) | ("apply", function, argument)
| ("big" or "integral", operator, letter, first, last, body) | ("forall", letter, body) | ("set", letter, condition)"""

LETTERS = "abfgkmnpquvwxyzABFGαβλμ"
MACROS = {"α": "\\alpha", "β": "\\beta", "λ": "\\lambda", "μ": "\\mu", "π": "\\pi", "∞": "\\infty"}
SUPERSCRIPTS = dict(zip("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹", strict=True))


def form(latex: str) -> bytes:
    """The canonical form of a formula that must have one."""
    canonical = canonical_form(latex)
    assert canonical is not None, latex
    return canonical


def meaning(tree: Tree) -> Tree:
    """The tree with every name as ("free" or "bound", number): equal exactly for formulas equal up to renaming."""
    counter, free = itertools.count(), {}

    def walk(node: Tree, scope: dict[str, int]) -> Tree:
        kind = node[0]
        if kind == "name":
            letter = node[1]
            name = ("bound", scope[letter]) if letter in scope else ("free", free.setdefault(letter, len(free)))
            return (kind, name, node[2] and walk(node[2], scope))
        if kind in ("number", "constant"):
            return node
        if kind in ("big", "integral"):
            inner = {**scope, node[2]: next(counter)}
            return (kind, node[1], walk(node[3], scope), walk(node[4], scope), walk(node[5], inner))
        if kind in ("forall", "set"):
            return (kind, walk(node[2], {**scope, node[1]: next(counter)}))
        return (kind, *(walk(part, scope) if isinstance(part, tuple) else part for part in node[1:]))

    return walk(tree, {})


@dataclass(frozen=True)
class Maker:
    """Draws trees. `letters`: those to use; few of them make many coincidences."""

    rng: random.Random
    letters: str

    def tree(self, depth: int, bound: tuple[str, ...] = ()) -> Tree:
        rng = self.rng
        if depth == 0:
            return self._atom(bound)
        kind = rng.choice(["sum", "product", "fraction", "apply", "power", "big", "integral", "forall", "set"])
        if kind in ("sum", "product", "fraction"):
            return (kind, self.tree(depth - 1, bound), self.tree(rng.randrange(depth), bound))
        if kind == "apply":
            return (kind, rng.choice(["sin", "log"]), self.tree(depth - 1, bound))
        if kind == "power":
            return (kind, self._atom(bound), ("number", rng.choice("234")))
        letter = rng.choice(self.letters)
        body = ("sum", ("name", letter, None), self.tree(depth - 1, (*bound, letter)))
        if kind in ("forall", "set"):
            return (kind, letter, body)
        operator = rng.choice(["sum", "prod"]) if kind == "big" else "int"
        return (kind, operator, letter, self._limit(bound, letter), self._limit(bound, letter), body)

    def _limit(self, bound: tuple[str, ...], letter: str) -> Tree:
        """An atom without the letter: what `\\sum_{i=i}` means is anybody's guess."""
        atom = self._atom(bound)
        return self._limit(bound, letter) if letter in free_letters(atom) else atom

    def _atom(self, bound: tuple[str, ...]) -> Tree:
        rng = self.rng
        if rng.random() < 0.25:
            return rng.choice([("number", str(rng.randrange(20))), ("constant", rng.choice("πe∞"))])
        letter = rng.choice([*bound, *self.letters])
        if letter in bound or rng.random() < 0.7:
            return ("name", letter, None)
        return ("name", letter, rng.choice([("number", "1"), ("name", rng.choice([*bound, *self.letters]), None)]))


@dataclass(frozen=True)
class Spelling:
    """Writes trees; everything that may be written in several ways is drawn anew each time."""

    rng: random.Random

    def formula(self, tree: Tree) -> str:
        kind = tree[0]
        if kind == "name":
            return self._letter(tree[1]) + (self._script("_", tree[2]) if tree[2] else "")
        if kind == "number":
            return str(tree[1])
        if kind == "constant":
            return self._letter(tree[1])
        if kind == "power":
            return self.formula(tree[1]) + self._script("^", tree[2])
        if kind == "sum":
            return f"{self.formula(tree[1])}{self._space()}+{self._space()}{self.formula(tree[2])}"
        if kind == "product":
            return self._brackets(tree[1]) + self._pick(" \\cdot ", " · ", "⋅") + self._brackets(tree[2])
        if kind == "fraction":
            top, bottom = self.formula(tree[1]), self.formula(tree[2])
            return self._pick(
                f"\\frac{{{top}}}{{{bottom}}}", f"\\dfrac{{{top}}}{{{bottom}}}", f"{{{top} \\over {bottom}}}"
            )
        if kind == "apply":
            name = tree[1]
            function = self._pick(f"\\{name}", f"\\mathrm{{{name}}}", f"\\operatorname{{{name}}}", f"{name} ")
            return function + self._brackets(tree[2])
        return self._binder(tree)

    def _binder(self, tree: Tree) -> str:
        kind = tree[0]
        if kind == "forall":
            quantifier, colon = self._pick("\\forall ", "∀"), self._pick(":", "\\colon ")
            return f"({quantifier}{self._letter(tree[1])}{colon}{self.formula(tree[2])})"
        if kind == "set":
            letter = self._letter(tree[1])
            bar = self._pick(" \\mid ", "|", "∣")
            left, right = self._pick(("\\{", "\\}"), ("\\left\\{", "\\right\\}"), ("\\lbrace ", "\\rbrace "))
            return f"+{left}{letter}{bar}{self.formula(tree[2])}{right}"
        _, operator, letter, first, last, body = tree
        sign = self._pick(f"\\{operator}", f"\\{operator}\\limits", {"sum": "∑", "prod": "∏", "int": "∫"}[operator])
        low = f"_{{{self._letter(letter)}={self.formula(first)}}}" if kind == "big" else f"_{{{self.formula(first)}}}"
        scripts = [low, f"^{{{self.formula(last)}}}"]
        self.rng.shuffle(scripts)
        inside = self._bracketed(self.formula(body))
        if kind == "integral":
            inside += self._space() + self._pick("d", "\\mathrm{d}") + " " + self._letter(letter)
        return f"({sign}{''.join(scripts)}{inside})"

    def _brackets(self, tree: Tree) -> str:
        return self._bracketed(self.formula(tree))

    def _bracketed(self, text: str) -> str:
        left, right = self._pick(("(", ")"), ("\\left(", "\\right)"), ("\\bigl(", "\\bigr)"))
        return f"{left}{text}{right}"

    def _script(self, sign: str, tree: Tree) -> str:
        text = self.formula(tree)
        if sign == "^" and text in SUPERSCRIPTS:
            return self._pick(f"^{text}", f"^{{{text}}}", SUPERSCRIPTS[text], f" ^ {text}")
        if len(text) == 1:
            return self._pick(f"{sign}{text} ", f"{sign}{{{text}}}")
        return f"{sign}{{{text}}}"

    def _letter(self, letter: str) -> str:
        macro = MACROS.get(letter)
        return self._pick(letter, f"{{{letter}}}") if macro is None else self._pick(letter, f"{macro} ", f"{{{macro}}}")

    def _space(self) -> str:
        return self._pick("", " ", "\\,", "~", "\\;", "\n", "\\ ")

    def _pick(self, *choices: Any) -> Any:
        return self.rng.choice(choices)


def renamed(tree: Tree, rng: random.Random) -> Tree:
    """The same formula with other letters: free ones mapped one for one, bound ones each on its own."""
    taken = sorted(free_letters(tree))
    free = dict(zip(taken, rng.sample(LETTERS, len(taken)), strict=True))

    def walk(node: Tree, names: dict[str, str]) -> Tree:
        kind = node[0]
        if kind == "name":
            return (kind, names[node[1]], node[2] and walk(node[2], names))
        if kind in ("number", "constant"):
            return node
        if kind in ("big", "integral", "forall", "set"):
            at = 2 if kind in ("big", "integral") else 1
            letter = node[at]
            seen = {names[other] for other in free_letters(node[-1]) if other != letter}
            seen |= {names[other] for part in node[at + 1 : -1] for other in free_letters(part)}
            new = rng.choice([choice for choice in LETTERS if choice not in seen])
            outside = [walk(part, names) for part in node[at + 1 : -1]]
            return (*node[:at], new, *outside, walk(node[-1], {**names, letter: new}))
        return (kind, *(walk(part, names) if isinstance(part, tuple) else part for part in node[1:]))

    return walk(tree, free)


def free_letters(tree: Tree) -> set[str]:
    """Letters of a tree that nothing in it binds."""
    kind = tree[0]
    if kind == "name":
        return {tree[1]} | (free_letters(tree[2]) if tree[2] else set())
    if kind in ("big", "integral"):
        return free_letters(tree[3]) | free_letters(tree[4]) | (free_letters(tree[5]) - {tree[2]})
    if kind in ("forall", "set"):
        return free_letters(tree[2]) - {tree[1]}
    return {letter for part in tree[1:] if isinstance(part, tuple) for letter in free_letters(part)}
