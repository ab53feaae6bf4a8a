"""How a text that is to be erased is named without saying it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvcomm_p2p.protocol.kgrams import U64, TokenIds, kgram_hashes
from kvcomm_p2p.protocol.messages import ERASURE_HASHES_MAX, STRETCH_TOKENS

Places: TypeAlias = "npt.NDArray[np.intp]"

FindStretches = Callable[[TokenIds, int, U64], Places]
"""Where in token ids, ascending, stretches of so many tokens begin whose hashes are in a table (ascending, not empty)."""

_BORDER_FIRST, _BORDER_LAST = 2, 1
"""Tokens at the borders of a text that may be others elsewhere (`planning.winnow.content_marks`)."""


def stretches(variants: Iterable[Sequence[int] | TokenIds], key: bytes) -> tuple[int, tuple[bytes, ...]]:
    """How the text whose tokenizations are given is named in erasures: the length of a stretch, and hashes of stretches for
    one erasure each. `key`: 16 bytes.

    A stretch has the largest of STRETCH_TOKENS that fits into every variant without its border tokens; the next one begins a
    quarter of its length later. So whatever shares 1.25 times that many tokens in a row with the text is found. Raises
    ValueError for a text of too few tokens.
    """
    texts = [np.asarray(variant, dtype=np.uint32) for variant in variants]
    inner = [t[_BORDER_FIRST : len(t) - _BORDER_LAST] if len(t) >= 8 else t for t in texts]
    shortest = min((len(text) for text in inner), default=0)
    if shortest < STRETCH_TOKENS[0]:
        raise ValueError(
            f"a text of {shortest} tokens is too short to be told from others: at least {STRETCH_TOKENS[0]}"
        )
    tokens = max(size for size in STRETCH_TOKENS if size <= shortest)
    found: list[U64] = []
    for text in inner:
        hashes = kgram_hashes(text, tokens, key_words(key))
        starts = np.arange(0, len(hashes), max(1, tokens // 4))
        found.append(hashes[np.append(starts, len(hashes) - 1)])
    every = np.unique(np.concatenate(found)).astype("<u8")
    pieces = range(0, len(every), ERASURE_HASHES_MAX)
    return tokens, tuple(every[at : at + ERASURE_HASHES_MAX].tobytes() for at in pieces)


def finder(key: bytes) -> FindStretches:
    """Finds stretches that were named with `key`, 16 bytes."""
    words = key_words(key)

    def find(token_ids: TokenIds, tokens: int, table: U64) -> Places:
        hashes = kgram_hashes(token_ids, tokens, words)
        at = np.minimum(np.searchsorted(table, hashes), len(table) - 1)
        return np.flatnonzero(table[at] == hashes)

    return find


def key_words(key: bytes) -> U64:
    """What `kgram_hashes` takes, from 16 bytes."""
    return np.frombuffer(key[:16].ljust(16, b"\0"), dtype="<u8").astype(np.uint64)
