"""Formulas in prompts, found and told apart up to spelling and consistent renaming.

Two prompts that state one formula with other letters are likely to share more around it, so equal forms nominate an
anchor, beside equal stretches. That is all they do: a renamed letter is another token with other keys and values.
Hence the rule throughout: to equate two formulas wrongly is worse than to miss one. There is no algebra: `a + b` is not `b + a`.
Letters that are not known to be reserved may be renamed, so `E = mc^2` has the form of `F = ab^2`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from kvcomm_p2p.planning.chains import keyed_digest
from kvcomm_p2p.planning.formula_latex import parse_formula
from kvcomm_p2p.planning.formula_names import NamedForm, named_form
from kvcomm_p2p.planning.formula_spans import has_signs, latex_spans, plain_spans

LEAVES_MIN = 5
"""Formulas with fewer signs say too little to nominate anything: `x`, `n > 0` are in every text."""

_DELIMITERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))


@dataclass(frozen=True, slots=True)
class Formula:
    """A formula in a text: text[start:end], delimiters included.

    `canonical`: equal for formulas that are equal up to spelling and renaming. `names`: (canonical name, as written) of
    what was renamed, by first occurrence; canonical names begin with b (bound) or f (free). `leaves`: how many signs.
    """

    start: int
    end: int
    canonical: bytes
    names: tuple[tuple[str, str], ...]
    leaves: int


def find_formulas(text: str) -> list[Formula]:
    """Formulas of a text, ascending and apart: LaTeX between `$`, `$$`, `\\(`, `\\[` and in equation environments, and
    equations in plain Unicode (those with LEAVES_MIN signs or more) on one line. What cannot be read with confidence is left out.

    For each, `canonical_form(text[start:end])` is its canonical form. Never raises. A text without `$`, `\\` and signs of
    mathematics costs about a nanosecond per character.
    """
    latex = "$" in text or "\\" in text
    plain = has_signs(text)
    if not latex and not plain:
        return []
    found: list[Formula] = []
    gap = 0
    spans = list(latex_spans(text)) if latex or "`" in text else []
    for start, end, is_formula in [*spans, (len(text), len(text), False)]:
        if plain:
            found += _plain_formulas(text, gap, start)
        gap = end
        form = _named(_body(text[start:end])) if is_formula else None
        if form is not None:
            found.append(Formula(start, end, form.form, form.names, form.leaves))
    return found


def canonical_form(latex: str) -> bytes | None:
    """The canonical form of one formula, in LaTeX or Unicode, with or without delimiters around it. None where it
    cannot be read with confidence. Never raises; time and depth are bounded whatever the input.

    Equal forms mean: equal up to spelling (`∑` and `\\sum`, `x²` and `x^{2}`, `\\left(` and `(`, spacing) and up to renaming
    free letters one for one and bound letters within their scopes. See `formula_names` for what is never renamed.
    """
    form = _named(_body(latex))
    return None if form is None else form.form


def formula_fingerprint(canonical: bytes, key: bytes) -> int:
    """32-bit fingerprint of a canonical form under the content key (1 to 64 bytes), never 0. Raises ValueError for a
    bad key.
    """
    return int.from_bytes(keyed_digest(b"kvcomm formula", key, 4, canonical), "little") or 1


def _plain_formulas(text: str, start: int, end: int) -> list[Formula]:
    found = []
    for first, last in plain_spans(text, start, end):
        form = _named(text[first:last])
        if form is not None and form.leaves >= LEAVES_MIN:
            found.append(Formula(first, last, form.form, form.names, form.leaves))
    return found


def _body(latex: str) -> str:
    """A formula without space and delimiters around it."""
    latex = latex.strip()
    for opening, closing in _DELIMITERS:
        if latex.startswith(opening) and latex.endswith(closing) and len(latex) >= len(opening) + len(closing):
            return latex[len(opening) : len(latex) - len(closing)]
    return latex


@lru_cache(maxsize=2048)
def _named(body: str) -> NamedForm | None:
    """Cached, for agents repeat what they were told."""
    items = parse_formula(body)
    return None if items is None else named_form(items)
