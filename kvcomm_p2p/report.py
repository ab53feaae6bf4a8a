"""What a prefill tells its caller: which tokens came from where, what was recomputed and why, what it cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import msgspec


@dataclass(frozen=True, slots=True)
class SpanReport:
    """Tokens [start, end) of the prompt. `kind`: exact, continued, reuse or recompute. `source`: name of the agent that held
    the KV ("" when recomputed, our own name for the local pool). `donor_start`: where it stood in the donor's sequence.
    `probes`: so many of a reused span's tokens were recomputed all the same, to see how wrong the others are. `anchors`: the
    beginnings of the ids of those that it comes from, in order. `run`: 1 + index of its run in `PrefillReport.runs`, 0 if it
    belongs to none."""

    start: int
    end: int
    kind: str
    source: str = ""
    donor_start: int = 0
    why: str = ""
    probes: int = 0
    anchors: tuple[str, ...] = ()
    run: int = 0


@dataclass(frozen=True, slots=True)
class RivalReport:
    """Another copy of tokens [start, end) of a reused run that was not taken, and why.

    The names are those of `RunReport`; `anchor` is the one that it begins with. `saved_s`: predicted seconds that it would
    have saved on these tokens; None where it may not be reused.
    """

    start: int
    end: int
    source: str
    anchor: str
    donor_start: int
    provenance: str
    likeness: float
    saved_s: float | None
    why: str


@dataclass(frozen=True, slots=True)
class RunReport:
    """A reused run [start, end) of the prompt, and why this copy was taken.

    `source`: the agent that held it; `donor_start`: where it stood there. `provenance` and `likeness` (0 to 1): how much the
    text before the copy was like the text before it here. `head_tokens`, `probes`, `shift`, `memory`: its repair (see
    `planning.types.Repair`); the first two counted in tokens. `expected_kl`: its
    share of the expected divergence; `saved_s`: predicted seconds against recomputing it. `deviation`: of the aligned KV
    where the guard compared it (None: it did not); `predicted_deviation`: what the prefix predictor said before of what is not
    recomputed (None: it did not). `anchors`: the beginnings of the ids of those it comes from. `hops`: repairs
    that were behind the copy already. `kv_bytes`: of its blocks, head included, if a peer holds them. `others`: copies that
    were not taken, the best few.
    """

    start: int
    end: int
    source: str
    donor_start: int
    provenance: str
    likeness: float
    head_tokens: int
    probes: int
    shift: bool
    expected_kl: float
    saved_s: float
    deviation: float | None = None
    anchors: tuple[str, ...] = ()
    hops: int = 0
    kv_bytes: int = 0
    memory: bool = False
    predicted_deviation: float | None = None
    others: tuple[RivalReport, ...] = ()


@dataclass(frozen=True, slots=True)
class MissReport:
    """Something that was not reused. `what` names it for people, `reason` is a value of `MissReason`."""

    what: str
    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds. `total_s` is the time from tokens to next-token logits (TTFT without tokenization, which `tokenize_s` states).
    Phases overlap (blocks are aligned while others are pulled) and may wait for another request's forward, so they do not add
    up to the total."""

    tokenize_s: float = 0.0
    find_s: float = 0.0
    plan_s: float = 0.0
    pull_s: float = 0.0
    align_s: float = 0.0
    recompute_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PrefillReport:
    """One per prefill. Token counts add up: prompt = exact + continued + reused + recomputed.

    `slots`: slot name -> token ranges [start, end) of its content in the prompt. `fallback`: why a plan with reuse ended in
    dense prefill ("" if it did not). `wait_lost_s`: seconds spent waiting for peers that did not deliver. `covered_tokens`:
    prompt tokens in any equal run that some donor holds, used or not. `expected_kl` and `predicted_kl`: divergence from full
    prefill, nats per token of the answer, as planned and as the guard predicts it (None: nothing was compared). `kl_max`: what
    it may be (0: only exact KV may be used); `exact_only`: why a mode that may approximate did not. `planned_s` and `dense_s`:
    predicted seconds of the plan, and of computing everything. `rejected_runs`: on a fallback, the runs that the guard
    rejected. `widened`: the guard asked for longer heads, which were computed. `planned_only`: a plan that was made to be looked
    at; nothing was pulled or computed.
    """

    mode: str
    prompt_tokens: int
    exact_tokens: int
    continued_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    pulled_bytes: int
    pulled_tokens: int
    spans: tuple[SpanReport, ...]
    misses: tuple[MissReport, ...]
    timings: Timings
    wait_lost_s: float
    predicted_kl: float | None = None
    fallback: str = ""
    slots: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    covered_tokens: int = 0
    expected_kl: float = 0.0
    planned_s: float = 0.0
    dense_s: float = 0.0
    runs: tuple[RunReport, ...] = ()
    kl_max: float = 0.0
    exact_only: str = ""
    rejected_runs: tuple[RunReport, ...] = ()
    planned_only: bool = False
    widened: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Plain types, ready for JSON."""
        # A prompt's slots are a read-only mapping, which asdict cannot copy.
        return asdict(replace(self, slots=dict(self.slots)))

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> PrefillReport:
        """What `as_dict` made, also by way of JSON; unknown fields are left out. Raises ValueError for anything else."""
        return msgspec.convert(fields, cls)

    @property
    def sources(self) -> dict[str, int]:
        """See `tokens_by_source`."""
        return dict(tokens_by_source(map(asdict, self.spans)))


def tokens_by_source(spans: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """Agent name -> prompt tokens that came from it and were not computed all the same. `spans`: those of `as_dict`."""
    tokens: Counter[str] = Counter()
    for span in spans:
        if span["source"]:
            tokens[span["source"]] += span["end"] - span["start"] - span["probes"]
    return tokens
