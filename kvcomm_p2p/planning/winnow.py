"""Winnowed fingerprints: few keyed hashes per sequence by which equal stretches are found wherever they stand.

Every window of WINDOW consecutive k-gram hashes contributes its minimum (Schleimer, Wilkerson, Aiken 2003, "robust"
variant). An equal stretch of at least EQUAL_TOKENS_MIN tokens holds one whole window in both sequences, and the minimum
of a window depends on its content alone, so both select this value inside the stretch. Random text selects about 2 /
(WINDOW + 1) fingerprints per token.

The hash is keyed and well mixed but not cryptographic: the key's holders can compute it, others cannot test guesses.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvcomm_p2p.planning.chains import TokenIds, keyed_digest

KGRAM_TOKENS = 16
WINDOW = 48
EQUAL_TOKENS_MIN = KGRAM_TOKENS + WINDOW - 1
"""Equal stretches from this length on (63 tokens) share a fingerprint for certain."""

_U64 = npt.NDArray[np.uint64]


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


def kgram_hashes(tokens: TokenIds, k: int, words: _U64) -> _U64:
    """64-bit hashes of all k-grams: uint64 [T - k + 1], empty when T < k. `k` is a power of two; `words` uint64 [>= 2].

    Each round joins two neighbours of equal length, so a k-gram costs log2(k) steps.
    """
    if len(tokens) < k:
        return np.empty(0, np.uint64)
    hashes = _mixed(tokens.astype(np.uint64) + words[0])
    length = 1
    while length < k:
        left, right = hashes[: len(hashes) - length], hashes[length:]
        hashes = _mixed(left * (words[1] | np.uint64(1)) + (right ^ words[0]))
        length *= 2
    return hashes


@lru_cache(maxsize=8)
def _key_words(key: bytes) -> _U64:
    words = np.frombuffer(keyed_digest(b"kvcomm winnow", key, 16), dtype="<u8").astype(np.uint64)
    words.flags.writeable = False
    return words


def _mixed(values: _U64) -> _U64:
    """A bijection that spreads every input bit over all output bits (two multiply-xorshift rounds). New array."""
    values = values ^ (values >> np.uint64(32))
    values *= np.uint64(0xD6E8FEB86659FD93)
    values ^= values >> np.uint64(32)
    values *= np.uint64(0xD6E8FEB86659FD93)
    values ^= values >> np.uint64(32)
    return values


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
