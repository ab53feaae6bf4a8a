"""Whatever comes in, nothing raises, and it takes bounded time."""

from __future__ import annotations

import pytest
from formula_tables import DIFFERENT, SAME
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcomm_p2p.planning.formulas import canonical_form, find_formulas


@pytest.mark.parametrize(
    "latex",
    [
        "",
        " ",
        "$",
        "$$",
        "\\frac{a}",
        "\\foo x",
        "{x",
        "x}",
        "(x",
        "x)",
        "x^",
        "x_i_j",
        "x^a^b",
        "x^2²",
        "\\left( x",
        "x_max",
        "\\sqrt\\frac12",
        "\\text{if $x$}",
        "a % b",
        "x \x00",
        "x \ud800",
        "привет",
        "a \\over b \\over c",
        "\\begin{foo}x\\end{foo}",
        "\\left) x \\right",
        "x' '^2'",
        "\\mathbb{\\foo}",
        "\\hat",
        "\\begin{align}",
        "\\end{align}",
        "\\\\[",
        "#",
        "a$b",
    ],
)
def test_what_cannot_be_read_is_none(latex: str) -> None:
    assert canonical_form(latex) is None


@pytest.mark.parametrize(
    "latex",
    [
        opening * 10_000
        for opening in ("{", "}", "(", "[", "\\left(", "\\frac", "\\sqrt[", "\\begin{cases}", "x^", "$", "\\", "`")
    ]
    + [
        "{" * 5_000 + "}" * 5_000,
        "(" * 1_900 + ")" * 1_900,
        "x_{" * 1_000 + "}" * 1_000,
        "\\sum_x " * 570,
        "\\int x " * 250 + "dx " * 250,
    ]
    + [
        "\\forall x " * 390,
        "x+" * 1_999 + "x",
        "\\$" * 5_000,
        "$x" * 5_000,
        "$a " * 5_000,
        "\\(" * 5_000,
        "\\begin{align}" * 700,
    ],
    ids=lambda latex: f"{latex[:8]} {len(latex)}",
)
@pytest.mark.timeout(10)
def test_pathological_input_is_bounded(latex: str) -> None:
    canonical_form(latex)
    find_formulas(latex)
    find_formulas(f"${latex}$ ∑ {latex}")


CORPUS = [spelling for spellings in SAME for spelling in spellings] + [
    spelling for pair in DIFFERENT for spelling in pair
]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_malformed_input_never_raises(data: st.DataObject) -> None:
    """Truncated, spliced and sprinkled formulas, alone and in a text."""
    pieces = data.draw(st.lists(st.sampled_from(CORPUS), min_size=1, max_size=3))
    junk = data.draw(
        st.lists(
            st.sampled_from([*"{}[]()$\\^_&|'`%~\x00\ud800", "\\left", "\\begin{align}", "\\over", "²", "∫"]),
            max_size=4,
        )
    )
    text = ""
    for piece in pieces:
        start = data.draw(st.integers(0, len(piece)))
        text += piece[start : data.draw(st.integers(start, len(piece)))] + (junk.pop() if junk else "")
    assert_sound(text)
    assert_sound(f"Say ${text}$ or $${text}$$ or \\({text}\\).\n{text}")


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet=st.one_of(st.characters(), st.sampled_from("\\{}$^_&=+ ∑²abx\n")), max_size=60))
def test_random_text_never_raises(text: str) -> None:
    assert_sound(text)


def assert_sound(text: str) -> None:
    """Found formulas are apart, in the text, and what canonical_form says of them."""
    canonical_form(text)
    position = 0
    for formula in find_formulas(text):
        assert position <= formula.start < formula.end <= len(text)
        assert canonical_form(text[formula.start : formula.end]) == formula.canonical
        position = formula.end
