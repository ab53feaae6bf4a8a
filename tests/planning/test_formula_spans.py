"""Formulas are found in text, and prose, prices, shell variables and code are not formulas."""

from __future__ import annotations

import pytest
from formula_cases import form

from kvcomm_p2p.planning.formulas import LEAVES_MIN, Formula, find_formulas


def found(text: str) -> list[str]:
    return [text[formula.start : formula.end] for formula in find_formulas(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Let $x^2+1$ and $$y = 2.$$ be", ["$x^2+1$", "$$y = 2.$$"]),
        ("so \\(a+b\\) and \\[a=b\\]", ["\\(a+b\\)", "\\[a=b\\]"]),
        ("\\begin{align*}a &= b\\end{align*} done", ["\\begin{align*}a &= b\\end{align*}"]),
        ("It costs $5, then $x+1$ holds.", ["$x+1$"]),
        (
            "so $x^*$, $\\|y\\|$, $0^+$, $|x| < 1$, $|y|$, $+1$, $10-9$ and $a-z$",
            ["$x^*$", "$\\|y\\|$", "$0^+$", "$|x| < 1$", "$|y|$", "$+1$", "$10-9$"],
        ),
        ("公式$x+1$是", ["$x+1$"]),
        ("the $n$-th of $n$th", ["$n$"]),
        ("Theorem: ∑_{i=1}^n i² = n(n+1)/2 holds.", ["∑_{i=1}^n i² = n(n+1)/2"]),
        ("Recall that a² + b² = c² in a triangle.", ["a² + b² = c²"]),
        ("当 a² + b² = c² 时", ["a² + b² = c²"]),
        ("so (a+b)² = a² + 2ab + b².", ["(a+b)² = a² + 2ab + b²"]),
        ("- x² + y² = 1\n- E = mc² is it", ["x² + y² = 1", "E = mc²"]),
        ("∫_0^1 x² dx = 1/3 and more", ["∫_0^1 x² dx = 1/3"]),
        ("cos²θ + sin²θ = 1 for all θ", ["cos²θ + sin²θ = 1"]),
        ("a ∈ A ∪ B and `a ∈ B ∪ C ∪ D`", ["a ∈ A ∪ B"]),
        ("```\n$a+b$ x² + y² = z²\n```\n$c+d$", ["$c+d$"]),
    ],
)
def test_formulas_are_found(text: str, expected: list[str]) -> None:
    assert found(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "It costs $5 and $7.",
        "between $5-$7, or $5/$7, or $3.50 (i.e. 3$)",
        "I paid $5, or 5$ in all; $20 for A$ and $10 million to B$",
        "echo $HOME/bin:$PATH $a/$b $1$2 ${a}-${b}$ $(CC) $(A)/$(B)",
        "$x = $y + $z; $i++;$j++; $a['b']=$c; \"$x, $y\" '$x'.'$y'",
        "A$1:B$2 and s/^$/x/; s/$/y/ and ^a$|^b$",
        "`$a+b$` and `\\(a+b\\)` and ``` $$a+b$$ ```",
        "an area of 5 m² → 10 m²; if n ≤ 10 then",
        "def f(a, b): return a != b  # x ≤ 5, y² => z",
        "x == y² and a² -> b² and <b>²</b>",
        "I like H₂O • a ≥ b is a rule · see note² = there",
        "C:\\Users\\x and \\d+ and \\n",
        "s/\\(foo\\)/\\([^a]\\)/ \\([0-9]*\\) \\[a-z\\] \\(.*\\) \\(a*\\) \\[some text\\]",
        "$Id$ and $RCS$ and $x =~ /a{4}$",
        "| a² | b² |\n|---|---|",
        "plain words, nothing else",
        "",
    ],
)
def test_prose_and_code_are_not_formulas(text: str) -> None:
    assert found(text) == []


def test_what_is_found_is_described() -> None:
    text = "see $\\sum_{i=1}^n \\alpha_i = e$"
    (formula,) = find_formulas(text)
    names = (("b0", "i"), ("f0", "n"), ("f1", "\\alpha"))
    assert formula == Formula(4, len(text), form("\\sum_{i=1}^n \\alpha_i = e"), names, 9)


def test_small_plain_formulas_are_left_out() -> None:
    assert found("if n ≤ 10 or n ≤ m then") == []
    assert all(formula.leaves >= LEAVES_MIN for formula in find_formulas("so n ≤ m + 1 and n ≤ m"))


@pytest.mark.parametrize("before", ["", "word ", "note²: ", "a² + b = c, ", "x > 0\n"])
@pytest.mark.parametrize("length", [40, 70, 120, 260])
def test_half_of_a_plain_formula_is_never_found(before: str, length: int) -> None:
    equation = "y² = " + " + ".join("x" for _ in range(length))
    first = ["a² + b = c"] if before.startswith("a²") else []
    assert found(before + equation) == first + ([equation] if length == 40 else [])
    assert found(f"{before}{equation} + z² = 1") == first + ([f"{equation} + z² = 1"] if length == 40 else [])


@pytest.mark.parametrize("text", ["x² y² = 1 + z", "x² + y² = z² x + 1", "so n x² + y² = 1", "x² = y + z 5 and"])
def test_spaces_that_may_multiply_leave_a_formula_out(text: str) -> None:
    assert found(text) == []
