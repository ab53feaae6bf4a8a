"""KV whose rows say themselves what they were made of, and how filling a prompt makes them.

The model is played: what a row depends on is worked out row by row, from what was copied there and what it attends to,
as `ReuseEngine` goes about it. Nothing here asks `hops_at` or `filled_marks`.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from planning_cases import Tokens

from kvcomm_p2p.model.cache import KVCache
from kvcomm_p2p.planning.spans import blocks_needed, probe_positions, recompute_positions
from kvcomm_p2p.planning.types import Plan, Span, SpanKind
from kvcomm_p2p.protocol.anchors import BLOCK_TOKENS, BlockKey, KVLayout

NODES = 3
EVERYBODY = (1 << NODES) - 1
LAYOUT = KVLayout(layers=1, kv_heads=1, key_dim=1, value_dim=3, dtype="float32")
UNFILLED = 99


class Leak(AssertionError):
    """Something is more tainted, or more secret, than those who see it are told."""


@dataclass
class Rows:
    """What the KV of each token depends on: int64 [T] each.

    `hops`: longest chain of repairs behind it. `readers`: bit set of the nodes that may see everything it was computed
    from. `prefix`: names the tokens up to it where it was computed. `filled_by`: node in whose prompt it stood last.
    """

    hops: npt.NDArray[np.int64]
    readers: npt.NDArray[np.int64]
    prefix: npt.NDArray[np.int64]
    filled_by: npt.NDArray[np.int64]

    @classmethod
    def unfilled(cls, tokens: int) -> Rows:
        return cls(np.full(tokens, UNFILLED), np.zeros(tokens, int), np.full(tokens, -1), np.full(tokens, -1))

    @classmethod
    def of_block(cls, data: memoryview, tokens: int) -> Rows:
        numbers = np.frombuffer(data, "<f4").astype(np.int64)
        return cls(numbers[:tokens], *np.ascontiguousarray(numbers[tokens:].reshape(tokens, 3).T))

    def slab(self) -> KVCache:
        cache = KVCache(LAYOUT, len(self.hops))
        cache.keys[0, 0, 0, :, 0].numpy()[:] = self.hops
        cache.values[0, 0, 0].numpy()[:] = np.stack([self.readers, self.prefix, self.filled_by], axis=1)
        return cache

    def taint(self, rows: slice, hops: int, readers: int) -> None:
        """These rows now depend on something else as well."""
        self.hops[rows] = np.maximum(self.hops[rows], hops)
        self.readers[rows] &= readers

    def join(self, rows: Sequence[int] | slice) -> tuple[int, int]:
        """Hops and readers of what depends on all of these rows."""
        hops, readers = self.hops[rows], self.readers[rows]
        return int(hops.max(initial=0)), int(np.bitwise_and.reduce(readers, initial=EVERYBODY))


class Slab:
    """A prompt being filled, as `ReuseEngine` fills it. `text`: readers of each token as a word [T]."""

    def __init__(self, node: int, token_ids: Tokens, text: npt.NDArray[np.int64]) -> None:
        self._node = node
        self._text = text
        self._prefix = prefix_names(token_ids)
        self.rows = Rows.unfilled(len(token_ids))

    def align(self, spans: Sequence[Span], blocks: Mapping[BlockKey, memoryview]) -> None:
        """Copy what came; whatever is moved has one more repair behind it."""
        for span in spans:
            moved = span.kind not in (SpanKind.EXACT, SpanKind.CONTINUED)
            for anchor, index in blocks_needed(span):
                data = blocks.get(BlockKey(anchor.anchor_id, index))
                if data is not None:
                    self._copy(span, anchor.start + index * BLOCK_TOKENS, data, anchor.block_tokens(index), moved)

    def _copy(self, span: Span, first: int, data: memoryview, tokens: int, moved: bool) -> None:
        source = Rows.of_block(data, tokens)
        low, high = max(first, span.donor_start), min(first + tokens, span.donor_start + span.tokens)
        shift = span.start - span.donor_start
        for name in ("hops", "readers", "prefix", "filled_by"):
            getattr(self.rows, name)[low + shift : high + shift] = getattr(source, name)[low - first : high - first]
        target = slice(low + shift, high + shift)
        self._check_copied(span, target)
        self.rows.hops[target] += moved
        self.rows.readers[target] &= self._text[target]

    def _check_copied(self, span: Span, target: slice) -> None:
        if span.kind is SpanKind.EXACT:
            if self.rows.hops[target].any():
                raise Leak(f"EXACT [{span.start}, {span.end}) draws on repaired KV")
            if (self.rows.prefix[target] != self._prefix[target]).any():
                raise Leak(f"EXACT [{span.start}, {span.end}) draws on KV of another prefix")
        if span.kind is SpanKind.CONTINUED and (self.rows.filled_by[target] != self._node).any():
            raise Leak(f"CONTINUED [{span.start}, {span.end}) draws on KV that was never in a prompt of this node's")

    def repair(self, plan: Plan, since: int) -> None:
        """One forward over what the plan recomputes from `since` on."""
        computed = [int(row) for row in recompute_positions(plan) if row >= since]
        if len(computed) == plan.tokens - computed[0]:
            return self.compute(computed[0])
        for span in plan.spans:
            if span.kind is SpanKind.REUSE and span.donor is None:
                hops, readers = self.rows.join([span.start - 1, span.end])
                self.rows.hops[span.start : span.end] = hops
                self.rows.readers[span.start : span.end] = readers & self._text[span.start : span.end]
        aligned = replace(self.rows, hops=self.rows.hops.copy(), readers=self.rows.readers.copy())
        self._forward(computed)
        for number in range(1, len(plan.runs) + 1):
            body = [span for span in plan.spans if span.run == number and span.kind is SpanKind.REUSE]
            probes = [int(row) for span in body for row in probe_positions(span)]
            if any(span.shift for span in body) and probes:
                self._shift(slice(body[0].start, body[-1].end), probes, aligned)
                # Whatever is computed attends, layer by layer, to what was shifted before it.
                self._forward(computed)
        return None

    def compute(self, start: int) -> None:
        """All rows from `start` on, as an ordinary continuation."""
        self._forward(range(start, len(self._text)))

    def end(self) -> Rows:
        self.rows.filled_by[:] = self._node
        return self.rows

    def _shift(self, body: slice, probes: list[int], aligned: Rows) -> None:
        """All of the body moves by what the probes were off by: they attend to everything before the last of them."""
        for hops, readers in (self.rows.join(slice(0, probes[-1] + 1)), aligned.join(probes)):
            self.rows.taint(body, hops, readers)

    def _forward(self, computed: Sequence[int]) -> None:
        """A computed row depends on its own word and on all rows before it."""
        rows = list(computed)
        hops, readers = self.rows.hops.copy(), self.rows.readers.copy()
        hops[rows], readers[rows] = 0, self._text[rows]
        self.rows.hops[rows] = np.maximum.accumulate(hops)[rows]
        self.rows.readers[rows] = np.bitwise_and.accumulate(readers)[rows]
        self.rows.prefix[rows] = self._prefix[rows]


def prefix_names(token_ids: Tokens) -> npt.NDArray[np.int64]:
    """For each token a number (24 bits) that stands for all tokens up to it."""
    names, name = [], 0
    for token in token_ids.astype("<u4"):
        name = zlib.crc32(token.tobytes(), name)
        names.append(name & 0xFFFFFF)
    return np.array(names, dtype=np.int64)
