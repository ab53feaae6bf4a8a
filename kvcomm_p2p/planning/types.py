"""The nouns of planning."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvcomm_p2p.protocol.anchors import AnchorMeta, Miss
from kvcomm_p2p.protocol.ids import NodeId, SequenceId

if TYPE_CHECKING:
    from kvcomm_p2p.planning.provenance import Context


class Mode(str, enum.Enum):
    """How much approximation a request allows."""

    EXACT = "exact"
    """Only KV that full prefill would have produced: exact prefixes."""
    BALANCED = "balanced"
    """Also repaired reuse of equal runs, if the model has a measured profile; divergence hardly measurable in answers."""
    FAST = "fast"
    """Like BALANCED with a larger divergence budget: less repair."""
    DENSE = "dense"
    """No reuse at all."""


class SpanKind(str, enum.Enum):
    EXACT = "exact"
    """Donor KV at the same position behind the same exact prefix: copied as it is."""
    CONTINUED = "continued"
    """Our own non-exact KV at the same position behind the same tokens (an earlier turn): copied as it is."""
    REUSE = "reuse"
    """Donor KV from elsewhere: rotated to its new position."""
    RECOMPUTE = "recompute"
    """Computed from the token ids through all layers."""


class Provenance(enum.IntEnum):
    """What stood before a copy where it was computed, against what stands before it in the prompt; the best first."""

    SAME = 0
    """The same, as far as anybody knows."""
    NEAR = 1
    """Nearly the same."""
    ROLE = 2
    """Another beginning (a role's system prompt), otherwise alike."""
    TEXT = 3
    """Other text, and about as much of it as we have there."""
    BARE = 4
    """Nothing, or much less than we have there."""
    OTHER = 5
    """Other text where we have none."""


@dataclass(frozen=True, slots=True)
class Repair:
    """One way to repair a reused run, and what was measured of it.

    The first min(head_tokens, n // 4) of the run's n tokens are recomputed, and `probe_share` of the others, evenly spaced.
    `shift`: what is not recomputed is corrected by the probes' shrunk mean residual. `kl`: expected divergence, nats per
    token of the answer, if the whole prompt were such runs. `memory`: what is not recomputed is corrected by remembered
    deviations; for the guard at most an eighth of the tokens are recomputed.
    """

    head_tokens: int
    probe_share: float = 0.0
    shift: bool = False
    kl: float = 0.0
    memory: bool = False


@dataclass(frozen=True, slots=True)
class Donor:
    """Consecutive anchors of one sequence at one holder, with their token ids.

    `start` is the position of `token_ids[0]` in the donor's sequence; `anchors` cover [start, start + len(token_ids))
    without gaps, ascending. `local`: the holder is this node. `hops`: the largest of its anchors. `same_prefix_until`:
    positions [0, same_prefix_until) of the donor's sequence are known to equal the prompt's (from chain hashes), 0 if
    unknown. `replica`: some of it is not exact and was made by a peer, whoever holds it.
    """

    holder: NodeId
    local: bool
    sequence_id: SequenceId
    start: int
    token_ids: npt.NDArray[np.uint32]
    anchors: tuple[AnchorMeta, ...]
    same_prefix_until: int = 0
    replica: bool = False

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def hops(self) -> int:
        hops: int = max(anchor.hops for anchor in self.anchors)
        return hops


@dataclass(frozen=True, slots=True)
class Run:
    """A maximal stretch of equal tokens: prompt position prompt_start + i equals the donor sequence's position
    donor_start + i, for 0 <= i < length.
    """

    donor_start: int
    prompt_start: int
    length: int

    @property
    def prompt_end(self) -> int:
        return self.prompt_start + self.length


@dataclass(frozen=True, slots=True)
class Span:
    """Part [start, end) of the prompt and how it is filled.

    For EXACT, CONTINUED and REUSE, prompt position p comes from position p - start + donor_start of `donor`'s sequence.
    `why` is one phrase for people ("head of a reused run", "no donor", "shorter than 64 tokens", ...). `probes`: so many
    evenly spaced tokens of a REUSE span are recomputed all the same, for the guard to compare; with `shift` they also
    correct the others. `run` numbers the reused runs of a plan, from 1: its head, and all of its pieces; 0 elsewhere.
    `encoded`: its KV travels as int8, as far as no span that is not needs the same blocks.
    """

    start: int
    end: int
    kind: SpanKind
    donor: Donor | None = None
    donor_start: int = 0
    why: str = ""
    probes: int = 0
    shift: bool = False
    run: int = 0
    encoded: bool = False

    @property
    def tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Rival:
    """Another copy of tokens [start, end) of a reused run that was not taken, and `why`, in a few words for people.

    `donor_start`: where prompt position `start` stands in the donor's sequence. `saved_s`: predicted seconds that it would
    have saved there; None where it may not be reused at all.
    """

    start: int
    end: int
    donor: Donor
    donor_start: int
    provenance: Provenance
    likeness: float
    saved_s: float | None
    why: str


@dataclass(frozen=True, slots=True)
class RunChoice:
    """Why a reused run is filled as it is. `likeness`: 0 to 1, of the contexts within their class; `kl`: its share of the
    plan's expected divergence; `saved_s`: predicted seconds against recomputing it; `others`: copies that were not taken, the
    best few; `context`: all that is known of what stood before the copy, None where nobody compared; `edge`: the kind of
    prefix change (`edges.edge_of`), empty where nobody asked."""

    start: int
    end: int
    donor: Donor
    provenance: Provenance
    likeness: float
    repair: Repair
    kl: float
    saved_s: float
    others: tuple[Rival, ...] = ()
    context: Context | None = None
    edge: bytes = b""


@dataclass(frozen=True, slots=True)
class UnusedRun:
    """Equal pieces of one donor, ascending in prompt and donor, that were recomputed all the same. `edge`: the kind of prefix
    change (`edges.edge_of`)."""

    donor: Donor
    pieces: tuple[Run, ...]
    provenance: Provenance
    edge: bytes


@dataclass(frozen=True, slots=True)
class Rejected:
    """Something that was found but not used. `run`: what it was, if it was no exact prefix."""

    start: int
    end: int
    holder: NodeId
    miss: Miss
    run: UnusedRun | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Plan:
    """How a prompt of `tokens` tokens is filled: spans are contiguous, ascending and cover [0, tokens).

    The last prompt token is always recomputed (its logits are needed). `hops` of the KV after position p is the largest
    donor hops + 1 of any REUSE span (+ 2 if it travelled as int8; or hops of a CONTINUED one) that starts at or before p,
    with what such a span is entangled with; see `spans.hops_at`.
    """

    tokens: int
    mode: Mode
    spans: tuple[Span, ...]
    rejected: tuple[Rejected, ...]
    dense_s: float
    """Predicted seconds for recomputing everything."""
    planned_s: float
    """Predicted seconds for this plan."""
    runs: tuple[RunChoice, ...] = ()
    """What was chosen for each reused run: `spans` with `run` = i + 1 belong to runs[i]."""
    covered: int = 0
    """Prompt tokens that stand in any equal run of any donor, used or not."""
    kl_max: float = 0.0
    """The divergence that the request may have, nats per token of the answer; 0 where only exact KV may be used."""
    exact_only: str = ""
    """Why a mode that may approximate does not, and what to do about it."""

    @property
    def kl(self) -> float:
        """Expected divergence from full prefill, nats per token of the answer."""
        return sum(run.kl for run in self.runs)


@dataclass(frozen=True, slots=True)
class ReuseRules:
    """What a model's profile and the mode allow. `approximate=False`: exact only, and `reason` says why and what to do.

    `repairs`: per provenance the measured ways to repair a run, cheapest first; a provenance that is missing is not reused,
    unless nothing at all was measured. Plans aim at `kl_target`, and what cannot be repaired to below `kl_max` by itself
    is not reused. Every reused run gets at least `guard_probes` probes. `hole_head_tokens` are recomputed behind a hole
    (a place where the donor differs); holes of at most `interpolated_tokens` are filled from their neighbours instead of
    recomputed.

    `short`: per provenance the one way in which runs of `short_tokens_min` to `run_tokens_min` - 1 tokens may be reused; a
    provenance that is missing is not. `short_from`: per kind of prefix change (`edges.edge_of`) of which enough is
    remembered the first prompt position where that may be used; a kind that is missing is not reused.

    `int8_kl`: divergence of KV that travelled as int8, nats per token of the answer, if the whole prompt were such; None: it
    was not measured, and nothing travels so.
    """

    approximate: bool
    reason: str
    run_tokens_min: int = 64
    repairs: Mapping[Provenance, tuple[Repair, ...]] = field(default_factory=lambda: _UNMEASURED)
    kl_target: float = 0.0
    kl_max: float = float("inf")
    guard_probes: int = 0
    hole_head_tokens: int = 4
    interpolated_tokens: int = 0
    short: Mapping[Provenance, Repair] = field(default_factory=lambda: _NO_REPAIR)
    short_tokens_min: int = 16
    short_from: Mapping[bytes, int] = field(default_factory=lambda: _NOWHERE)
    int8_kl: float | None = None

    def options(self, provenance: Provenance, start: int, tokens: int, edge: bytes = b"") -> tuple[Repair, ...]:
        """The measured repairs of a run of `tokens` equal tokens at prompt position `start`, cheapest first. `edge`: its kind
        of prefix change."""
        if tokens >= self.run_tokens_min:
            return self.repairs.get(provenance, ())
        first = self.short_from.get(edge)
        # Position 0 is like no other: everything attends to it.
        if tokens < self.short_tokens_min or first is None or start < max(1, first):
            return ()
        return (self.short[provenance],) if provenance in self.short else ()

    @property
    def reused_tokens_min(self) -> int:
        """Fewer equal tokens are never reused."""
        return self.short_tokens_min if self.short else self.run_tokens_min


_UNMEASURED: Mapping[Provenance, tuple[Repair, ...]] = MappingProxyType({each: (Repair(32),) for each in Provenance})
_NO_REPAIR: Mapping[Provenance, Repair] = MappingProxyType({})
_NOWHERE: Mapping[bytes, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Int8From:
    """`holders`: who sends KV as int8 to this node. `always`: they are asked to wherever it may be approximate, not only
    where the link is slow."""

    holders: frozenset[NodeId] = frozenset()
    always: bool = False


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured constants of this machine and model (seconds, tokens, bytes). Refreshed online by `costs.CostTracker`.

    Recomputing R tokens against C cached ones costs forward_s + R * token_s + (R * C + R * R / 2) * attention_s.
    Pulling B bytes costs pull_latency_s + B / pull_bytes_per_s; aligning B bytes costs B / align_bytes_per_s.
    As int8, B bytes of KV are int8_share * B bytes on the way (0: they cannot travel so), and encoding and decoding them
    costs B / int8_bytes_per_s.
    """

    forward_s: float
    token_s: float
    attention_s: float
    pull_latency_s: float
    pull_bytes_per_s: float
    align_bytes_per_s: float
    token_bytes: int
    int8_share: float = 0.0
    int8_bytes_per_s: float = 5e8
