"""What is another spelling or another choice of letters, and what is another formula."""

from __future__ import annotations

import pytest
from formula_cases import form
from formula_tables import DIFFERENT, RENAMED, SAME

from kvcomm_p2p.planning.formulas import canonical_form


@pytest.mark.parametrize("spellings", SAME, ids=lambda spellings: spellings[0])
def test_spellings(spellings: tuple[str, ...]) -> None:
    assert {form(spelling) for spelling in spellings} == {form(spellings[0])}


@pytest.mark.parametrize(("one", "other"), RENAMED)
def test_renamings(one: str, other: str) -> None:
    assert form(one) == form(other)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_differences(one: str, other: str) -> None:
    first, second = canonical_form(one), canonical_form(other)
    assert first is not None or second is not None
    assert first != second


def test_forms_are_the_same_on_every_machine() -> None:
    assert form("\\sum_{i=1}^n x_i e^{-\\alpha}") == b"1^s3:sum[b0;s1:=n1:1][f0;]^f1;[b0;]-^r1:e-[s1:-f2;]"
