"""64-bit hashes of all runs of k tokens: keyed and well mixed, but not cryptographic."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]


def kgram_hashes(tokens: TokenIds, k: int, words: U64) -> U64:
    """64-bit hashes of all k-grams: uint64 [T - k + 1], empty when T < k. `k` is a power of two; `words` uint64 [>= 2].

    Each round joins two neighbours of equal length, so a k-gram costs log2(k) steps.
    """
    if len(tokens) < k:
        return np.empty(0, np.uint64)
    hashes = mixed(tokens.astype(np.uint64) + words[0])
    length = 1
    while length < k:
        left, right = hashes[: len(hashes) - length], hashes[length:]
        hashes = mixed(left * (words[1] | np.uint64(1)) + (right ^ words[0]))
        length *= 2
    return hashes


def mixed(values: U64) -> U64:
    """A bijection that spreads every input bit over all output bits (two multiply-xorshift rounds). New array."""
    values = values ^ (values >> np.uint64(32))
    values *= np.uint64(0xD6E8FEB86659FD93)
    values ^= values >> np.uint64(32)
    values *= np.uint64(0xD6E8FEB86659FD93)
    values ^= values >> np.uint64(32)
    return values
