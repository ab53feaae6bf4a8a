"""Random candidates, repairs and rules for tests of planning."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from planning_cases import donor

from kvcomm_p2p.planning.candidates import GAP_MAX, Candidate
from kvcomm_p2p.planning.types import Donor, Provenance, Repair, ReuseRules, Run

TOKENS_MAX = 4000

DONOR: Donor = donor(np.arange(TOKENS_MAX, dtype=np.uint32))


@st.composite
def candidates(draw: st.DrawFn, pieces_max: int = 6, start_min: int = 0) -> Candidate:
    """Pieces of 12 tokens and more, small holes between them, of a donor of TOKENS_MAX tokens."""
    prompt_at, donor_at = draw(st.integers(start_min, start_min + 200)), draw(st.integers(0, 200))
    pieces = []
    for _ in range(draw(st.integers(1, pieces_max))):
        length = draw(st.integers(12, 300))
        pieces.append(Run(donor_at, prompt_at, length))
        gap = draw(st.integers(0, GAP_MAX))
        donor_gap = draw(st.integers(0 if gap else 1, GAP_MAX))
        prompt_at, donor_at = prompt_at + length + gap, donor_at + length + donor_gap
    return Candidate(DONOR, tuple(pieces), draw(st.sampled_from(Provenance)))


repairs = st.builds(
    Repair,
    st.integers(0, 128),
    st.sampled_from([0.0, 0.05, 0.1, 0.2, 0.5]),
    st.booleans(),
    st.floats(0.0, 0.1),
    st.booleans(),
)


@st.composite
def rules(draw: st.DrawFn) -> ReuseRules:
    """Up to five repairs of every provenance, a budget, and how holes and the guard are served."""
    options = {each: tuple(draw(st.lists(repairs, min_size=0, max_size=5))) for each in Provenance}
    return ReuseRules(
        approximate=True,
        reason="",
        run_tokens_min=draw(st.sampled_from([16, 64])),
        repairs=options,
        kl_target=draw(st.floats(0.0, 0.05)),
        kl_max=draw(st.floats(0.001, 0.1)),
        guard_probes=draw(st.integers(0, 12)),
        hole_head_tokens=draw(st.integers(0, 8)),
        interpolated_tokens=draw(st.sampled_from([0, 3, 5])),
    )
