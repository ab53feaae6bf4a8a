"""The spellings of mathematics: which macros and characters mean one thing, and what a symbol does in a formula.

Every line of a table begins with the canonical name, followed by its other spellings: words are macros, single
characters stand for themselves. Spellings share a line only where they mean the same to every reader; where in doubt
(`\\Rightarrow` and `\\implies`, `\\leq` and `\\leqslant`) they have a line each.
"""

from __future__ import annotations

from enum import Enum, auto


class Role(Enum):
    """What a symbol does to the scope of the names around it."""

    RELATION = auto()
    ADDITIVE = auto()
    MULTIPLICATIVE = auto()
    SEPARATOR = auto()
    CONNECTIVE = auto()
    BIG = auto()
    INTEGRAL = auto()
    QUANTIFIER = auto()
    BAR = auto()
    PLAIN = auto()


_SYMBOL_LINES = {
    Role.RELATION: """
        = ; < lt ; > gt ; le leq ≤ ; ge geq ≥ ; ne neq ≠ ; leqslant ⩽ ; geqslant ⩾ ; in ∈ ; notin ∉ ; ni ∋
        subset ⊂ ; subseteq ⊆ ; supset ⊃ ; supseteq ⊇ ; subsetneq ⊊ ; supsetneq ⊋ ; approx ≈ ; equiv ≡ ; cong ≅
        sim ∼ ; simeq ≃ ; propto ∝ ; ll ≪ ; gg ≫ ; prec ≺ ; succ ≻ ; preceq ⪯ ; succeq ⪰ ; perp ⊥ ; parallel ∥
        models ⊨ ; vdash ⊢ ; asymp ≍ ; lesssim ≲ ; gtrsim ≳ ; nmid ∤ ; to rightarrow → ; gets leftarrow ←
        longrightarrow ⟶ ; longleftarrow ⟵ ; leftrightarrow ↔ ; mapsto ↦ ; longmapsto ⟼ ; hookrightarrow ↪
        uparrow ↑ ; downarrow ↓ ; coloneqq ≔ ; triangleq ≜ ; doteq ≐""",
    Role.ADDITIVE: """
        + ; - − ; pm ± ; mp ∓ ; oplus ⊕ ; ominus ⊖ ; cup ∪ ; cap ∩ ; setminus ∖ ; sqcup ⊔ ; sqcap ⊓ ; uplus ⊎
        bmod ; mod""",
    Role.MULTIPLICATIVE: """
        cdot · ⋅ ; times × ; * ast ∗ ; / ∕ ; div ÷ ; circ ∘ ; bullet • ; star ⋆ ; otimes ⊗ ; odot ⊙ ; ltimes ⋉
        rtimes ⋊""",
    Role.SEPARATOR: ", ; : colon ; . ; quad qquad",
    Role.CONNECTIVE: """
        land wedge ∧ ; lor vee ∨ ; implies Longrightarrow ⟹ ; impliedby Longleftarrow ⟸ ; Rightarrow ⇒ ; Leftarrow ⇐
        iff Longleftrightarrow ⟺ ; Leftrightarrow ⇔ ; therefore ∴ ; because ∵""",
    Role.BIG: """
        sum ∑ ; prod ∏ ; coprod ∐ ; bigcup ⋃ ; bigcap ⋂ ; bigvee ⋁ ; bigwedge ⋀ ; bigoplus ⨁ ; bigotimes ⨂
        bigsqcup ⨆ ; biguplus ⨄""",
    Role.INTEGRAL: "int ∫ ; iint ∬ ; iiint ∭ ; oint ∮",
    Role.QUANTIFIER: "forall ∀ ; exists ∃ ; nexists ∄",
    Role.BAR: "| vert mid ∣ ; Vert ‖",
    Role.PLAIN: """
        infty ∞ ; partial ∂ ; nabla ∇ ; pi π ; Delta Δ ∆ ; Sigma Σ ; Pi Π ; emptyset varnothing ∅ ; hbar ℏ ħ ; Re ℜ
        Im ℑ ; aleph ℵ ; wp ℘ ; neg lnot ¬ ; surd √ ; prime ; dagger † ; ddagger ‡ ; angle ∠ ; triangle △ ; square □
        top ⊤ ; bot ; degree ° ; complement ∁ ; imath ; jmath ; backslash ; not ; blacksquare ∎ ; !
        dots ldots cdots dotsc dotsb dotsm dotsi dotso … ⋯ ; vdots ⋮ ; ddots ⋱""",
}

_LETTER_LINES = """
    alpha α ; beta β ; gamma γ ; delta δ ; epsilon ϵ ; varepsilon ε ; zeta ζ ; eta η ; theta θ ; vartheta ϑ ; iota ι
    kappa κ ; lambda λ ; mu μ ; nu ν ; xi ξ ; rho ρ ; varrho ϱ ; sigma σ ; varsigma ς ; tau τ ; upsilon υ ; phi ϕ
    varphi φ ; chi χ ; psi ψ ; omega ω ; varpi ϖ ; Gamma Γ ; Theta Θ ; Lambda Λ ; Xi Ξ ; Upsilon Υ ; Phi Φ ; Psi Ψ
    Omega Ω ; ell ℓ"""


def _spellings(lines: str) -> dict[str, str]:
    """Spelling -> canonical name."""
    rows = (line.split() for line in lines.replace("\n", " ; ").split(" ; "))
    return {word: row[0] for row in rows for word in row}


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _split(table: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """The table for macros and the one for characters."""
    macros = {word: name for word, name in table.items() if word.isascii() and word.isalpha()}
    return macros, {word: name for word, name in table.items() if word not in macros}


ROLES = {name: role for role, lines in _SYMBOL_LINES.items() for name in _spellings(lines).values()}
"""Canonical symbol -> role. `;`, the line break, `&` and the brackets of unpaired bars are added below."""

_SYMBOLS = {word: name for lines in _SYMBOL_LINES.values() for word, name in _spellings(lines).items()}
SYMBOL_MACROS, SYMBOL_CHARS = _split(_SYMBOLS)
LETTER_MACROS, LETTER_CHARS = _split(_spellings(_LETTER_LINES))

SYMBOL_CHARS[";"] = ";"
SYMBOL_MACROS |= {"|": "Vert", "%": "%", "#": "#", "$": "$", "&": "and", "_": "low line"}
ROLES |= {";": Role.SEPARATOR, "newline": Role.SEPARATOR, "&": Role.SEPARATOR}

SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱᵃᵇᶜᵈᵉᵏˡᵐᵖʳˢᵗˣʸᶻʲᵀ", "0123456789+-=()niabcdeklmprstxyzjT", strict=True))
SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₐₑₕᵢⱼₖₗₘₙₒₚᵣₛₜᵤᵥₓ", "0123456789+-=()aehijklmnoprstuvx", strict=True))
DOUBLE_STRUCK = dict(zip("ℝℕℤℚℂℙℍ𝔼𝔽", "RNZQCPHEF", strict=True))

OPENING = {"{": "{", "lbrace": "{", "(": "(", "[": "[", "lbrack": "[", "langle": "<", "⟨": "<", "lfloor": "lfloor"}
OPENING |= {"⌊": "lfloor", "lceil": "lceil", "⌈": "lceil", "lvert": "|", "lVert": "Vert"}
CLOSING = {"}": "}", "rbrace": "}", ")": ")", "]": "]", "rbrack": "]", "rangle": ">", "⟩": ">", "rfloor": "rfloor"}
CLOSING |= {"⌋": "rfloor", "rceil": "rceil", "⌉": "rceil", "rvert": "|", "rVert": "Vert"}

LIMIT_FUNCTIONS = frozenset({"lim", "limsup", "liminf", "max", "min", "sup", "inf", "argmax", "argmin"})
"""Functions whose subscript binds a name."""

FUNCTION_MACROS = frozenset(
    _words(
        "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh coth log ln lg exp det dim ker deg gcd hom arg Pr max "
        "min sup inf lim limsup liminf"
    )
)
FUNCTION_WORDS = frozenset(name for name in FUNCTION_MACROS if len(name) > 2) | {"ln", "lcm", "sgn", "argmax", "argmin"}
"""Functions that are recognised without a backslash, too."""

SHORT_WORDS = frozenset(
    _words(
        "am an as at be by do go he if in is it me my no of on or so to up us we lg tg ch sh th Re Im Tr tr pi km cm mm kg "
        "mg ms ns Hz dB eV kV mV mA GB MB kB"
    )
)
"""Runs of two letters that may be a word or a unit rather than a product. Longer runs always may."""

SPACE_MACROS = frozenset({",", ";", ":", "!", ">", " ", "\n", "\t", "thinspace", "medspace", "thickspace", "enspace"})
STYLE_MACROS = frozenset(
    _words(
        "displaystyle textstyle scriptstyle scriptscriptstyle limits nolimits nonumber notag "
        "big Big bigg Bigg bigl Bigl biggl Biggl bigr Bigr biggr Biggr bigm Bigm biggm Biggm"
    )
)
DROPPED_WITH_ARGUMENT = {"label": "{", "tag": "*{"}
"""Macro -> its arguments in pylatexenc's notation; none of them changes what a formula says."""

FRACTIONS = {"frac": "frac", "dfrac": "frac", "tfrac": "frac", "binom": "binom", "dbinom": "binom", "tbinom": "binom"}
INFIX_FRACTIONS = {"over": "frac", "choose": "binom"}
DECORATIONS = frozenset(
    _words(
        "hat widehat bar overline vec overrightarrow tilde widetilde dot ddot check breve acute grave mathring underline "
        "mathbf boldsymbol bm mathit"
    )
)
"""Macros that make another name of a letter; the letter below is renamed, the decoration stays."""

BOLD = {"bm": "boldsymbol"}
VERBATIM_FONTS = frozenset(_words("mathrm mathbb mathcal mathfrak mathscr mathsf mathtt operatorname"))
TEXT_MACROS = frozenset(_words("text textrm textbf textit textsf texttt mbox"))
FRAMES = {"boxed": "{", "overbrace": "{", "underbrace": "{", "pmod": "{", "substack": "{"}
STACKED = {"overset": "{{", "underset": "{{", "stackrel": "{{"}

WRAPPERS = {
    name + star: ("{" if name.startswith("alignat") else "")
    for name in _words(
        "equation displaymath math align alignat aligned alignedat gather gathered multline split flalign"
    )
    for star in ("", "*")
}
"""Environments that only lay a formula out -> their arguments."""

TABLES = dict.fromkeys(_words("matrix pmatrix bmatrix Bmatrix vmatrix Vmatrix smallmatrix cases"), "") | {"array": "{"}
