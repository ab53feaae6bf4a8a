"""Where a copy was computed, against where we want to put it.

KV of a run carries the influence of all that stood before it. Measured on the default model (a 400-token document,
rotated, nothing recomputed; KL against full prefill, nats per token): behind a system prompt that differs in a few words
0.0003, behind another role's 0.014, behind one start token 0.032, behind nothing 0.056, behind another document 0.072.
So of several copies of the same content, the one whose context is most like ours is the best, however it is repaired.

Likeness of two windows is the cosine of their sets of token pairs: from the token ids where the donor's are known, else
estimated from SimHashes (two bits differ with probability angle / pi, and simhash votes by token pairs as well). One word
changed in 40 tokens gives about 0.95, unrelated windows 0 to 0.2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from kvcomm_p2p.planning.chains import TokenIds, token_bytes
from kvcomm_p2p.planning.simhash import SIMHASH_BITS, simhash
from kvcomm_p2p.planning.types import Donor, Provenance
from kvcomm_p2p.protocol.anchors import CONTEXT_TOKENS

BARE_TOKENS_MAX = 7
"""A copy with no more tokens before it than this was computed behind nothing."""

ALIKE_MIN = 0.6
"""Windows from this likeness on are nearly the same: about a fifth of their tokens changed one by one, or twice as many
in runs."""

LENGTHS_MIN = 0.5
"""Contexts of which one is shorter than this part of the other are not nearly the same, whatever they hold."""

ROLE_TOKENS_MAX = 128
"""Contexts up to this length are a system prompt and a template; in longer ones there is other text."""

_NEAR_SHARE, _FIRST_SHARE, _LENGTHS_SHARE = 0.6, 0.25, 0.15
"""What the tokens right before, the first ones and the lengths count in `Context.likeness`."""


@dataclass(frozen=True, slots=True)
class Context:
    """What stands before a run in the donor's sequence, against what stands before it in the prompt.

    `same`: equal as far as anybody knows. `bare`: nothing, or at most BARE_TOKENS_MAX tokens, in the donor. `near` and
    `first`: likeness (0 to 1) of the up to CONTEXT_TOKENS tokens right before the run, and of the first ones; what is not
    known of the donor counts as unlike. `lengths`: the shorter context's length over the longer one's (1 for two empty
    ones). `tokens`: length of the longer one. `moved`: by how many positions the run moves towards the prompt's end.
    """

    same: bool
    bare: bool
    near: float
    first: float
    lengths: float
    tokens: int
    moved: int

    @property
    def likeness(self) -> float:
        """0 to 1: orders copies whose contexts are of one kind."""
        return _NEAR_SHARE * self.near + _FIRST_SHARE * self.first + _LENGTHS_SHARE * self.lengths


def context_likeness(prompt_ids: TokenIds, prompt_start: int, donor: Donor, donor_start: int, key: bytes) -> Context:
    """What stands before position `donor_start` of the donor's sequence, against `prompt_ids` (uint32 [T]) before
    `prompt_start`.

    The donor's ids are known from `donor.start` on; of what is before that, its first anchor tells. `key`: content key,
    under which SimHashes are made. Raises ValueError unless donor.start <= donor_start <= donor.end and 0 <=
    prompt_start <= T.
    """
    if not (donor.start <= donor_start <= donor.end and 0 <= prompt_start <= len(prompt_ids)):
        raise ValueError(f"no run can begin at {donor_start} of the donor and {prompt_start} of the prompt")
    longer = max(donor_start, prompt_start)
    return Context(
        same=_same(prompt_ids, prompt_start, donor, donor_start, key),
        bare=donor_start <= BARE_TOKENS_MAX,
        near=_near(prompt_ids, prompt_start, donor, donor_start, key),
        first=_first(prompt_ids, prompt_start, donor, donor_start, key),
        lengths=min(donor_start, prompt_start) / longer if longer else 1.0,
        tokens=longer,
        moved=prompt_start - donor_start,
    )


def kind(context: Context) -> Provenance:
    """The class of a context; copies of a better class are better whatever their likeness."""
    if context.same:
        return Provenance.SAME
    if context.bare:
        return Provenance.BARE
    alike = context.near >= ALIKE_MIN
    if alike and context.first >= ALIKE_MIN and context.lengths >= LENGTHS_MIN:
        return Provenance.NEAR
    return Provenance.ROLE if alike or context.tokens <= ROLE_TOKENS_MAX else Provenance.OTHER


def _same(prompt: TokenIds, prompt_start: int, donor: Donor, donor_start: int, key: bytes) -> bool:
    if donor_start != prompt_start:
        return False
    known = donor_start - donor.start
    if not np.array_equal(donor.token_ids[:known], prompt[donor.start : prompt_start]):
        return False
    if donor.same_prefix_until >= donor.start:
        return True
    meta = donor.anchors[0]
    return (meta.context_first, meta.context_last) == (
        _simhash(prompt[: min(CONTEXT_TOKENS, donor.start)], key),
        _simhash(prompt[max(0, donor.start - CONTEXT_TOKENS) : donor.start], key),
    )


def _near(prompt: TokenIds, prompt_start: int, donor: Donor, donor_start: int, key: bytes) -> float:
    known = min(CONTEXT_TOKENS, donor_start - donor.start)
    told = min(CONTEXT_TOKENS, donor_start) - known
    if not told:
        ours = prompt[max(0, prompt_start - CONTEXT_TOKENS) : prompt_start]
        return _alike(donor.token_ids[donor_start - donor.start - known : donor_start - donor.start], ours)
    split = max(0, prompt_start - known)
    by_ids = _alike(donor.token_ids[:known], prompt[split:prompt_start]) if known else 0.0
    before = prompt[max(0, split - CONTEXT_TOKENS) : split]
    by_hash = _estimate(donor.anchors[0].context_last, before, key)
    return (known * by_ids + told * by_hash) / (known + told)


def _first(prompt: TokenIds, prompt_start: int, donor: Donor, donor_start: int, key: bytes) -> float:
    if not donor_start or not prompt_start:
        return float(donor_start == prompt_start)
    length = min(CONTEXT_TOKENS, donor_start)
    told = min(length, donor.start)
    by_ids = (
        _alike(donor.token_ids[: length - told], prompt[told : min(length, prompt_start)]) if told < length else 0.0
    )
    by_hash = _estimate(donor.anchors[0].context_first, prompt[: min(told, prompt_start)], key) if told else 0.0
    return (told * by_hash + (length - told) * by_ids) / length


def _alike(a: TokenIds, b: TokenIds) -> float:
    """Cosine of the sets of token pairs of two windows; two empty windows are alike, an empty one is like no other."""
    if not len(a) or not len(b):
        return float(len(a) == len(b))
    left, right = _pairs(a.tolist()), _pairs(b.tolist())
    return len(left & right) / math.sqrt(len(left) * len(right))


def _pairs(ids: list[int]) -> set[tuple[int, ...]]:
    return set(pairwise(ids)) if len(ids) > 1 else {tuple(ids)}


def _estimate(told: int, window: TokenIds, key: bytes) -> float:
    """The cosine that a donor's SimHash and a window of ours suggest; 0 for unrelated ones, and if nothing is told."""
    if not told or not len(window):
        return 0.0
    bits = (told ^ _simhash(window, key)).bit_count()
    return max(0.0, math.cos(math.pi * bits / SIMHASH_BITS))


def _simhash(window: TokenIds, key: bytes) -> int:
    """Candidates at one place of a prompt ask for the same windows."""
    return _simhash_of(token_bytes(window), key)


@lru_cache(maxsize=512)
def _simhash_of(window: bytes, key: bytes) -> int:
    return simhash(np.frombuffer(window, "<u4"), key)
