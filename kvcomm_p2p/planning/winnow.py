"""Winnowed fingerprints: few keyed hashes per sequence by which equal stretches are found wherever they stand.

Every window of WINDOW consecutive k-gram hashes contributes its minimum (Schleimer, Wilkerson, Aiken 2003, "robust"
variant). An equal stretch of at least EQUAL_TOKENS_MIN tokens holds one whole window in both sequences, and the minimum
of a window depends on its content alone, so both select this value inside the stretch. Random text selects about 2 /
(WINDOW + 1) fingerprints per token.

The hash is keyed and well mixed but not cryptographic: the key's holders can compute it, others cannot test guesses.

Contents that are too short for the guarantee (a question, a short answer) get names of their own where somebody knows
where they begin and end: `content_marks`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcomm_p2p.planning.chains import TokenIds, keyed_digest, token_bytes
from kvcomm_p2p.protocol.kgrams import kgram_hashes

KGRAM_TOKENS = 16
WINDOW = 48
EQUAL_TOKENS_MIN = KGRAM_TOKENS + WINDOW - 1
"""Equal stretches from this length on (63 tokens) share a fingerprint for certain."""

MARK_TOKENS_MIN = 8
"""Shorter contents get no name."""

_FIRST_LOST_MAX, _LAST_LOST_MAX = 2, 1
"""Tokens at the borders of a content that may differ from prompt to prompt (measured, see `content_marks`)."""

_U64 = npt.NDArray[np.uint64]


class ContentMark(NamedTuple):
    """A name for exactly the tokens [position, position + length) of a sequence: a keyed 32-bit `fingerprint`."""

    position: int
    length: int
    fingerprint: int


def content_marks(token_ids: TokenIds, contents: Iterable[tuple[int, int]], key: bytes) -> tuple[ContentMark, ...]:
    """Names by which short contents, token ranges [start, end) of a sequence (uint32 [T]), find their equals in prompts
    of another shape. Sorted, unique. Contents of more tokens get none: there the winnowed fingerprints of `fingerprints`
    suffice, whatever happens at the borders. Raises ValueError for a range outside the sequence or a bad key.

    At a border the same text may be other tokens: "Gail" is two of them at the start of an answer, " Gail" is one behind
    a blank, which belongs to the template; a full stop behind a slot joins the quotation mark before it. So a content
    has several names: of all its tokens, and without its first one or two, its last, or both; of those that hold
    MARK_TOKENS_MIN tokens. Measured with the default model's tokenizer, questions, solutions and answers of the model
    filled into 10 templates (lines, quotes, lists, code fences, "A: {answer}"), share of pairs that have a name in common:

                                            600 texts    60 programs    16 answers
        all tokens only                        0.61          0.60           0.11
        and without the first and the last     0.64          0.60           0.11
        without the first, the last or both    0.93          1.00           0.89
        also without the first two             0.99          1.00           1.00

    Answers fare so badly at first because their last token has no KV yet when they are published.
    """
    marks: set[ContentMark] = set()
    for start, end in contents:
        if not 0 <= start <= end <= len(token_ids):
            raise ValueError(f"content [{start}, {end}) lies outside {len(token_ids)} tokens")
        if end - start >= EQUAL_TOKENS_MIN + _FIRST_LOST_MAX + _LAST_LOST_MAX:
            continue
        for first in range(start, start + _FIRST_LOST_MAX + 1):
            for last in range(end - _LAST_LOST_MAX, end + 1):
                if last - first >= MARK_TOKENS_MIN:
                    marks.add(content_mark(token_ids, first, last, key))
    return tuple(sorted(marks))


def content_mark(token_ids: TokenIds, start: int, end: int, key: bytes) -> ContentMark:
    """The name of exactly the tokens [start, end) of a sequence."""
    name = keyed_digest(b"kvcomm content", key, 4, token_bytes(token_ids[start:end]))
    return ContentMark(start, end - start, int.from_bytes(name, "little"))


def fingerprints(token_ids: TokenIds, key: bytes) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
    """Selected fingerprints of a sequence (uint32 [T]): values uint32 [F] and, ascending, the positions int64 [F] where
    their k-grams begin. Values may repeat. Empty when T < EQUAL_TOKENS_MIN: nothing that short can be found by them.

    Every window of WINDOW k-grams holds at least one selected position with the window's minimum; in repetitive text a
    selected position serves all windows that it can, so the count stays below 2 / WINDOW per token where hashes are
    equal.
    """
    tokens = np.asarray(token_ids, dtype=np.uint32)
    if len(tokens) < EQUAL_TOKENS_MIN:
        return np.empty(0, np.uint32), np.empty(0, np.int64)
    hashes = kgram_hashes(tokens, KGRAM_TOKENS, _key_words(key)) >> np.uint64(32)
    # Value in the high half, inverted position in the low half: the minimum is the rightmost of the smallest.
    backwards = np.uint64(0xFFFFFFFF) - np.arange(len(hashes), dtype=np.uint64)
    minima = _window_minima((hashes << np.uint64(32)) | backwards)
    values = minima >> np.uint64(32)
    rightmost = (np.uint64(0xFFFFFFFF) - (minima & np.uint64(0xFFFFFFFF))).astype(np.int64)
    positions = _select(values, rightmost)
    return hashes[positions].astype(np.uint32), positions


@lru_cache(maxsize=8)
def _key_words(key: bytes) -> _U64:
    words = np.frombuffer(keyed_digest(b"kvcomm winnow", key, 16), dtype="<u8").astype(np.uint64)
    words.flags.writeable = False
    return words


def _window_minima(keys: _U64) -> _U64:
    """Minimum of each WINDOW consecutive keys, by doubling."""
    minima, length = keys, 1
    while length * 2 <= WINDOW:
        minima = np.minimum(minima[: len(minima) - length], minima[length:])
        length *= 2
    rest = WINDOW - length
    return np.minimum(minima[: len(minima) - rest], minima[rest:]) if rest else minima


def _select(values: _U64, rightmost: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Positions to keep, ascending. `values` and `rightmost` describe window i's minimum, i ascending.

    Windows with the same minimum in a row form a group. A group needs the rightmost minimum of its first window; when
    that leaves the window before the group ends (equal k-grams), the rightmost minimum of the window that it left, and
    so on.
    """
    starts = np.concatenate(([0], np.flatnonzero(values[1:] != values[:-1]) + 1))
    lasts = np.concatenate((starts[1:], [len(values)])) - 1
    first = rightmost[starts]
    more: list[int] = []
    for group in np.flatnonzero(first < lasts):
        position, last = int(first[group]), int(lasts[group])
        while position < last:
            position = int(rightmost[position + 1])
            more.append(position)
    return np.unique(np.concatenate((first, np.array(more, dtype=np.int64))))
