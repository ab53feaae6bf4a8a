"""Formulas with equal forms say the same, and those that say the same have equal forms: random ones, both ways."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
from formula_cases import LETTERS, Maker, Spelling, Tree, form, meaning, renamed
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcomm_p2p.planning.formulas import formula_fingerprint

KEY = b"content key"
SEEDS = st.integers(0, 2**48)


# Random trees, both ways.


@settings(max_examples=150, deadline=None)
@given(SEEDS)
def test_spelling_and_renaming_do_not_matter(seed: int) -> None:
    rng = random.Random(seed)
    tree = Maker(rng, rng.choice(["kxy", LETTERS])).tree(rng.randrange(1, 4))
    other = renamed(tree, rng)
    assert meaning(other) == meaning(tree)
    assert form(Spelling(rng).formula(other)) == form(Spelling(rng).formula(tree))


@settings(max_examples=200, deadline=None)
@given(SEEDS)
def test_equal_forms_mean_the_same(seed: int) -> None:
    """After a few changes: of single names (to another name, not one for one, into another scope), numbers, operators."""
    rng = random.Random(seed)
    tree = Maker(rng, "kxy").tree(rng.randrange(1, 4))
    other = tree
    for _ in range(rng.randrange(1, 4)):
        other = changed(other, rng)
    if form(Spelling(rng).formula(tree)) == form(Spelling(rng).formula(other)):
        assert meaning(tree) == meaning(other)


def test_changes_are_seen() -> None:
    """Keeps the test above honest: most changes change the meaning, and all of these are seen."""
    different = 0
    for seed in range(300):
        rng = random.Random(seed)
        tree = Maker(rng, "kxy").tree(2)
        other = changed(tree, rng)
        if meaning(tree) != meaning(other):
            different += 1
            assert form(Spelling(rng).formula(tree)) != form(Spelling(rng).formula(other))
    assert different > 150


def changed(tree: Tree, rng: random.Random) -> Tree:
    """The tree with another name, number, constant, function or operator in one place."""
    places = list(leaf_places(tree, ()))
    place = rng.choice(places)

    def put(node: Any, path: tuple[int, ...]) -> Any:
        if path:
            return (*node[: path[0]], put(node[path[0]], path[1:]), *node[path[0] + 1 :])
        if isinstance(node, str):
            swaps = {"sum": "prod", "prod": "sum", "sin": "log", "log": "sin"}
            return swaps.get(node) or rng.choice("kxy")
        if node[0] == "name" and rng.random() < 0.6:
            return ("name", rng.choice("kxy"), node[2])
        return rng.choice([("name", rng.choice("kxy"), None), ("number", "7"), ("constant", "e")])

    return put(tree, place)


def leaf_places(node: Tree, path: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if node[0] in ("name", "number", "constant"):
        yield path
    if node[0] in ("big", "apply", "forall", "set"):
        yield (*path, 1)
    if node[0] in ("big", "integral"):
        yield (*path, 2)
    for at, part in enumerate(node):
        if isinstance(part, tuple):
            yield from leaf_places(part, (*path, at))


# Sums without brackets: every reading of their scopes counts.


@settings(max_examples=200, deadline=None)
@given(SEEDS)
def test_equal_forms_mean_the_same_in_every_reading(seed: int) -> None:
    rng = random.Random(seed)
    row = random_row(rng)
    other = list(row)
    if rng.random() < 0.5:
        letters = dict(zip("kxy", rng.sample("kxy", 3), strict=True))
        other = [(kind, *(letters.get(letter, letter) for letter in rest)) for kind, *rest in row]
    for _ in range(rng.randrange(3)):
        at = rng.randrange(len(other))
        if other[at][0] != "sign":
            other[at] = (other[at][0], rng.choice("kxy"), *other[at][2:])
    if form(row_text(row)) == form(row_text(other)):
        assert list(readings(row)) == list(readings(other))


def random_row(rng: random.Random) -> list[tuple[str, ...]]:
    """Terms with or without sums before them: ("sum", letter), ("name", letter, index or ""), ("sign", which)."""
    row: list[tuple[str, ...]] = []
    for term in range(rng.randrange(1, 5)):
        if term:
            row.append(("sign", rng.choice("++=,")))
        for _ in range(rng.randrange(1, 4)):
            row.append(("sum", rng.choice("kxy")) if rng.random() < 0.4 else name(rng))
        row.append(("name", rng.choice("kxy"), ""))
    return row


def name(rng: random.Random) -> tuple[str, ...]:
    return ("name", rng.choice("kxy"), rng.choice(["", "", "k", "x", "y"]))


def row_text(row: list[tuple[str, ...]]) -> str:
    spelled = {"sum": "\\sum_{{{0}}}", "name": "{0}_{{{1}}}", "sign": "{0}"}
    return " ".join(spelled[kind].format(*rest).replace("_{}", "") for kind, *rest in row)


def readings(row: list[tuple[str, ...]]) -> Iterator[list[Any]]:
    """The row with names resolved, once for every combination of where its sums may end: at the next sign, at the next
    relation or comma, at the end if a comma follows.
    """
    sums = [at for at, item in enumerate(row) if item[0] == "sum"]
    for ends in itertools.product(*[possible_ends(row, at) for at in sums]):
        free: dict[str, int] = {}

        def resolve(letter: str, at: int, ends: tuple[int, ...] = ends, free: dict[str, int] = free) -> Any:
            inside = [
                start for start, end in zip(sums, ends, strict=True) if start < at < end and row[start][1] == letter
            ]
            return ("bound", inside[-1]) if inside else ("free", free.setdefault(letter, len(free)))

        yield [
            item
            if item[0] == "sign"
            else item[0]
            if item[0] == "sum"
            else [resolve(part, at) for part in item[1:] if part]
            for at, item in enumerate(row)
        ]


def possible_ends(row: list[tuple[str, ...]], start: int) -> list[int]:
    signs = [(at, row[at][1]) for at in range(start, len(row)) if row[at][0] == "sign"]
    ends = {signs[0][0] if signs else len(row), next((at for at, sign in signs if sign in "=,"), len(row))}
    return sorted(ends | ({len(row)} if any(sign == "," for _, sign in signs) else set()))


# Fingerprints.


def test_fingerprints_depend_on_form_and_key() -> None:
    first = formula_fingerprint(form("x+y"), KEY)
    assert first == formula_fingerprint(form("a+b"), KEY)
    assert first != formula_fingerprint(form("x+x"), KEY)
    assert first != formula_fingerprint(form("x+y"), b"another key")
    assert 0 < first < 2**32


def test_a_fingerprint_is_never_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcomm_p2p.planning.formulas.keyed_digest", lambda *_: bytes(4))
    assert formula_fingerprint(b"form", KEY) == 1


def test_a_bad_key_is_refused() -> None:
    with pytest.raises(ValueError, match="key"):
        formula_fingerprint(b"form", b"")
