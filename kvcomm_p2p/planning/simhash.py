"""SimHash of token ids: 64 bits that differ in few places where two texts share most of their token pairs.

Every distinct k-gram votes with its keyed 64-bit hash; bit i of the SimHash is the majority of bit i (Charikar 2002). For
texts whose vote vectors enclose the angle a, each bit differs with probability a / pi, so unrelated texts lie around 32
bits apart. A k-gram that repeats votes VOTES_MAX times at most: with one vote near-duplicates lie further apart, without
a limit texts of one kind (indentation, "Question:") come too close.

Measured with SmolLM2's tokenizer on disjoint windows of GSM8K, HumanEval and Python's own library (60 of each, 37 of
HumanEval at 512 tokens), edited by runs of mean 8 tokens that are inserted, replaced or deleted until their lengths make
up the share given (last two lines: single tokens). Mean distance in bits, and how many lie within 9 and 16 bits:

    edited               128 tokens           512 tokens
    5 %                   5.4   95, 100 %      4.8   98, 100 %
    10 %                  7.2   78, 100 %      7.1   80, 100 %
    20 %                  9.6   51,  98 %      9.8   47,  98 %
    5 %, single           7.5   79, 100 %      7.2   80, 100 %
    10 %, single         10.0   46,  97 %      9.9   45,  99 %

Windows of one kind lie 27 (HumanEval) to 31 bits apart at 128 tokens and 24 to 31 at 512; of their pairs at most 0.06 %
lie within 9 bits (HumanEval's problems share boilerplate) and 2.9 % within 16, of the others' 0.1 %. Windows of
different kinds lie 31 bits apart, the nearest 15. With k = 4 the first three lines would be 7.0, 9.3 and 12.2 bits at 128
tokens (every occurrence votes); with k = 1 texts of one kind would be only 21 to 28 bits apart.

As with winnowed fingerprints, the hash is keyed and well mixed but not cryptographic: the key's holders can compute it,
others cannot test guesses.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvcomm_p2p.planning.chains import TokenIds, keyed_digest
from kvcomm_p2p.protocol.kgrams import kgram_hashes

SIMHASH_BITS = 64

SHINGLE_TOKENS = 2
"""k: tokens per k-gram (the docstring above says why). A power of two, as `kgram_hashes` wants it."""

VOTES_MAX = 2
"""Votes of one k-gram, however often it occurs."""

_U64 = npt.NDArray[np.uint64]

_BIT_OF_BYTE = np.arange(8, dtype=np.uint64)[:, None]
_LOW_BITS = np.uint64(0x0101010101010101)
_LANE_MAX = 255


def simhash(token_ids: TokenIds, key: bytes) -> int:
    """64-bit SimHash (0 <= value < 2**64) of `token_ids` (uint32 [T], any T) under the content key (1 to 64 bytes).

    The same on every machine. 0 for no tokens; fewer than SHINGLE_TOKENS are one k-gram of that length. Raises
    ValueError for a bad key.
    """
    tokens = np.asarray(token_ids, dtype=np.uint32)
    if not len(tokens):
        return 0
    shingle = SHINGLE_TOKENS if len(tokens) >= SHINGLE_TOKENS else 1
    votes = np.sort(kgram_hashes(tokens, shingle, _key_words(key)))
    repeated = votes[VOTES_MAX:] == votes[:-VOTES_MAX]
    if repeated.any():
        votes = np.concatenate((votes[:VOTES_MAX], votes[VOTES_MAX:][~repeated]))
    majority = _bit_counts(votes) * 2 > len(votes)
    return int.from_bytes(np.packbits(majority, bitorder="little").tobytes(), "little")


def similarity(a: int, b: int) -> float:
    """1 - Hamming distance / 64 of two SimHashes: 1.0 for equal ones, about 0.5 for unrelated texts."""
    return 1.0 - (a ^ b).bit_count() / SIMHASH_BITS


@lru_cache(maxsize=8)
def _key_words(key: bytes) -> _U64:
    words = np.frombuffer(keyed_digest(b"kvcomm simhash", key, 16), dtype="<u8").astype(np.uint64)
    words.flags.writeable = False
    return words


def _bit_counts(values: _U64) -> npt.NDArray[np.int64]:
    """How many of `values` (uint64 [V], V > 0) have bit i set: int64 [64].

    Row j of `lanes` holds bit j of each of a value's eight bytes in that byte, so that one 64-bit addition counts eight
    bits; bytes overflow past 255 values, hence the pieces.
    """
    lanes = values >> _BIT_OF_BYTE
    lanes &= _LOW_BITS
    pieces = np.add.reduceat(lanes, np.arange(0, len(values), _LANE_MAX), axis=1)
    by_byte: npt.NDArray[np.int64] = (
        pieces.astype("<u8", copy=False).view(np.uint8).reshape(8, -1, 8).sum(axis=1, dtype=np.int64)
    )
    return by_byte.T.ravel()


WINDOW_TOKENS = 512
WINDOW_STRIDE = 96
"""Windows of a prompt that are sketched: as long as the longest anchors, so close that some window lies within half a stride
of whatever an anchor holds."""


def window_sketches(token_ids: TokenIds, key: bytes) -> tuple[int, ...]:
    """SimHashes of overlapping windows of a prompt (uint32 [T]), to be compared with those of anchors' contents. Unique, in
    order of position; none for fewer than 32 tokens."""
    tokens = len(token_ids)
    if tokens < 32:
        return ()
    starts = range(0, max(1, tokens - WINDOW_TOKENS + WINDOW_STRIDE), WINDOW_STRIDE)
    return tuple(dict.fromkeys(simhash(token_ids[start : start + WINDOW_TOKENS], key) for start in starts))
