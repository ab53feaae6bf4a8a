"""Runs that are corrected from memory: where that is allowed, and doing it before the forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvcomm_p2p.model.cache import KVCache
from kvcomm_p2p.model.spec import ModelSpec
from kvcomm_p2p.planning.replan import without_runs
from kvcomm_p2p.planning.segments import VisibilityMark
from kvcomm_p2p.planning.types import Plan, Provenance, Repair, SpanKind
from kvcomm_p2p.protocol.anchors import Miss, MissReason, Visibility
from kvcomm_p2p.reuse.correctors import nearest_tokens
from kvcomm_p2p.reuse.deviations import Deviation, DeviationMemory, strictest

MEMORY_TOKENS_MIN = 256
"""Fewer remembered tokens of a kind correct nothing: too few are like any other token."""

CORRECTED_SHARE_MIN = 0.9
"""Of a run's tokens; what is like nothing that is remembered stays as wrong as it was aligned."""


@dataclass(frozen=True, slots=True)
class Recalled:
    """A plan whose runs are corrected as far as they may be, and the deviations that this took."""

    plan: Plan
    used: tuple[Deviation, ...] = ()


class Recall:
    """Uses one agent's memory. Thread safe."""

    def __init__(self, memory: DeviationMemory, spec: ModelSpec) -> None:
        self._memory = memory
        self._spec = spec

    def short(self, visibility: Sequence[VisibilityMark]) -> tuple[Mapping[Provenance, Repair], Mapping[bytes, int]]:
        """`ReuseRules.short` and `.short_from` of a prompt with these marks: what was measured, and for each kind of prefix
        change the first position where enough is remembered that may flow there. Both empty if nothing is."""
        profile = self._spec.profile
        since: dict[bytes, int] = {}
        if profile is None or not profile.short:
            return {}, since
        for position in sorted({0, *(mark.start for mark in visibility)}):
            seen_by = access_at(visibility, position)
            for edge, tokens in self._memory.tokens_by_edge(self._spec.model_id, *seen_by).items():
                if tokens >= MEMORY_TOKENS_MIN:
                    since.setdefault(edge, position)
        repairs = {kind: Repair(0, kl=kl, memory=True) for kind, kl in sorted(profile.short.items())}
        return (repairs if since else {}), since

    def correct(self, cache: KVCache, plan: Plan, visibility: Sequence[VisibilityMark]) -> Recalled:
        """Correct the aligned rows, in place, of all runs that ask for it. Those that are too unlike what is remembered are
        recomputed instead.

        A run is corrected by what may flow to its first token, which those who see the least may see.
        """
        strange: dict[int, Miss] = {}
        used: list[Deviation] = []
        for number, choice in enumerate(plan.runs, start=1):
            if not choice.repair.memory:
                continue
            seen_by = access_at(visibility, choice.start)
            candidates = self._memory.candidates(self._spec.model_id, choice.edge, *seen_by)
            spans = [span for span in plan.spans if span.run == number and span.kind is SpanKind.REUSE and span.donor]
            shares = [0.0] * len(candidates)
            corrected = 0
            for span in spans:
                rows = slice(span.start, span.end)
                keys, values = cache.keys[:, 0, :, rows], cache.values[:, 0, :, rows]
                done = nearest_tokens(keys, values, span.start, candidates, self._spec.rotary)
                corrected += int(done.corrected.sum())
                shares = [one + other for one, other in zip(shares, done.shares, strict=True)]
            tokens = sum(span.tokens for span in spans)
            if corrected < CORRECTED_SHARE_MIN * tokens:
                detail = f"{corrected} of {tokens} tokens are like any that are remembered"
                strange[number] = Miss(MissReason.DIVERGENCE, detail)
            else:
                self._memory.credit(candidates, shares)
                used += [each for each, share in zip(candidates, shares, strict=True) if share > 0]
        return Recalled(without_runs(plan, strange), tuple(used))

    def blame(self, used: Sequence[Deviation]) -> None:
        """The guard rejected what these deviations took part in: they are forgotten."""
        self._memory.discard(used)


def access_at(marks: Sequence[VisibilityMark], position: int) -> tuple[Visibility, bytes]:
    """(visibility, group) of the token at `position`: the strictest of what stands up to there."""
    return strictest((mark.visibility, mark.group) for mark in marks if mark.start <= position)
