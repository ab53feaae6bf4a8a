"""Where a copy was computed, against where we want to put it.

KV of a run carries the influence of all that stood before it, so of several copies of the same content, the one whose
context is most like ours is the best, however it is repaired. Measured on the default model with three documents, 256
tokens of each moved and rotated: KL against full prefill, nats per token of the answer (geometric means; within a
column the order was nearly the same for each document), with nothing and with the first 32 tokens recomputed:

    our context                  the copy's context                       rotated   first 32
    system prompt of 74 tokens   5 % of its words differ                   0.0015    0.0007
                                 10 %                                      0.006     0.003
                                 another role's system prompt              0.009     0.0025
                                 two other roles'                          0.013     0.004
                                 the chat template only                    0.035     0.008
                                 nothing                                   0.13      0.014
                                 ours, then 50 tokens of another document  0.07      0.012
                                 ours, then 300 tokens                     0.11      0.03
    system prompt, 250 tokens    other system prompt, same document        0.0007    0.0003
    of a document                the same document and one before it       0.007     0.0035
                                 another document                          0.011     0.005
                                 other system prompt, another document     0.012     0.006
                                 nothing                                   0.05      0.014
                                 the system prompt, no document            0.065     0.027

So other text is bad where we have none, and where we have other text too, it is better than none. Likeness of two windows
is the cosine of their sets of token pairs: from the token ids where the donor's are known, else estimated from SimHashes
(two bits differ with probability angle / pi, and simhash votes by token pairs as well). One word changed in 40 tokens gives
about 0.95, unrelated windows 0 to 0.2.
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

PROVENANCE_TEXTS = {
    Provenance.SAME: "a copy from the same context",
    Provenance.NEAR: "a copy from nearly the same context",
    Provenance.ROLE: "a copy from behind another beginning",
    Provenance.BARE: "a copy computed behind nothing",
    Provenance.TEXT: "a copy from behind other text of the same length",
    Provenance.OTHER: "a copy from behind more text",
}

BARE_TOKENS_MAX = 7
"""A copy with no more tokens before it than this was computed behind nothing."""

NEARLY_MIN, ALIKE_MIN = 0.85, 0.7
"""Windows from this likeness on are nearly the same (about 7 % of their tokens changed one by one, or twice as many in
runs), or alike."""

NEARLY_LENGTHS_MIN = 0.8
"""Contexts of which one is shorter than this part of the other are not nearly the same, whatever they hold."""

SHORTER_MIN, LONGER_MIN = 0.5, 0.3
"""Below this ratio of the lengths a shorter context counts as none, and a longer one as other text."""

ROLE_TOKENS_MAX = 200
"""Unlike contexts up to this length are system prompts; longer ones hold other text besides."""

INSERTED_TOKENS = 4
"""So many tokens right before the run on one side, found further back on the other, tell that text was inserted there."""

INSERTED_SHARE = 0.5
"""What was inserted counts if it is at least this part of the whole context on the side that does not have it: long
conversations repeat their template every few hundred tokens."""

_LOOKED_AT_MAX = 2048
"""Tokens before a run in which they are looked for."""

_NEAR_SHARE, _FIRST_SHARE, _LENGTHS_SHARE = 0.6, 0.25, 0.15
"""What the tokens right before, the first ones and the lengths count in `Context.likeness`."""


@dataclass(frozen=True, slots=True)
class Context:
    """What stands before a run in the donor's sequence, against what stands before it in the prompt.

    `same`: equal as far as anybody knows. `bare`: nothing, or at most BARE_TOKENS_MAX tokens, in the donor. `near` and
    `first`: likeness (0 to 1) of the up to CONTEXT_TOKENS tokens right before the run, and of the first ones; what is not
    known of the donor counts as unlike. `lengths`: the shorter context's length over the longer one's (1 for two empty
    ones). `moved`: by how many positions the run moves towards the prompt's end. `more`: what stands right before the run
    in the prompt stands further back in the donor, so the donor has much other text in between; `less`: the other way
    round. `tokens`: length of the longer context.
    """

    same: bool
    bare: bool
    near: float
    first: float
    lengths: float
    moved: int
    more: bool
    less: bool
    tokens: int

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
    theirs = donor.token_ids[: donor_start - donor.start]
    return Context(
        same=_same(prompt_ids, prompt_start, donor, donor_start, key),
        bare=donor_start <= BARE_TOKENS_MAX,
        near=_near(prompt_ids, prompt_start, donor, donor_start, key),
        first=_first(prompt_ids, prompt_start, donor, donor_start, key),
        lengths=min(donor_start, prompt_start) / longer if longer else 1.0,
        moved=prompt_start - donor_start,
        more=_inserted(prompt_ids[:prompt_start], theirs) > INSERTED_SHARE * prompt_start,
        less=_inserted(theirs, prompt_ids[:prompt_start]) > INSERTED_SHARE * donor_start,
        tokens=longer,
    )


def kind(context: Context) -> Provenance:
    """The class of a context; copies of a better class are better whatever their likeness."""
    if context.same:
        return Provenance.SAME
    if context.bare:
        return Provenance.BARE
    if context.more or context.less:
        return Provenance.OTHER if context.more else Provenance.BARE
    if context.near >= ALIKE_MIN:
        nearly = min(context.near, context.first) >= NEARLY_MIN and context.lengths >= NEARLY_LENGTHS_MIN
        return Provenance.NEAR if nearly else Provenance.ROLE
    shorter = context.moved > 0
    if context.lengths < (SHORTER_MIN if shorter else LONGER_MIN):
        return Provenance.BARE if shorter else Provenance.OTHER
    return Provenance.ROLE if context.tokens <= ROLE_TOKENS_MAX else Provenance.TEXT


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


def _inserted(before: TokenIds, other: TokenIds) -> int:
    """How many tokens follow in `other` where the last INSERTED_TOKENS of `before` stand last; 0 if they do not."""
    last, other = before[-INSERTED_TOKENS:], other[-_LOOKED_AT_MAX:]
    if len(last) < INSERTED_TOKENS or len(other) < INSERTED_TOKENS:
        return 0
    at = np.flatnonzero(other[: len(other) - INSERTED_TOKENS + 1] == last[0])
    places = at[(other[at + 1] == last[1]) & (other[at + 2] == last[2]) & (other[at + 3] == last[3])]
    return len(other) - INSERTED_TOKENS - int(places[-1]) if len(places) else 0


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
