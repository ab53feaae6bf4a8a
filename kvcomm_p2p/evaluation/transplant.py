"""Fill a cache from a donor's KV by hand, in one process: the planning, alignment, repair and guard of the engine
without pool, network and fallback, so that every variant can be measured, also those that the engine would refuse.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from kvcomm_p2p.errors import UsageError
from kvcomm_p2p.model.cache import KVCache
from kvcomm_p2p.model.runner import ModelRunner
from kvcomm_p2p.planning.plan import make_plan
from kvcomm_p2p.planning.spans import recompute_positions
from kvcomm_p2p.planning.types import Costs, Donor, Mode, Plan, ReuseRules, SpanKind
from kvcomm_p2p.protocol.anchors import ANCHOR_TOKENS_MAX, BLOCK_TOKENS, AnchorMeta, BlockKey, Visibility
from kvcomm_p2p.protocol.ids import AnchorId, ChainHash, NodeId, SequenceId
from kvcomm_p2p.reuse.align import align_span
from kvcomm_p2p.reuse.blocks import copy_block
from kvcomm_p2p.reuse.guard import keep_head, residual

_HOLDER = NodeId(bytes(16))


class Variant(enum.Enum):
    """How a plan is carried out; all but REPAIRED are controls, which must come out worse."""

    REPAIRED = "reuse with recomputed head"
    ROTATED = "control: rotation only"
    UNROTATED = "control: no rotation"
    WRONG_BLOCKS = "control: wrong blocks"


@dataclass(frozen=True, slots=True)
class DonorCopy:
    """What a holder has of one prompt: its tokens (uint32 [T]) as anchors, and the bytes of their blocks."""

    donor: Donor
    blocks: Mapping[BlockKey, memoryview]


@dataclass(frozen=True, slots=True)
class Transplant:
    """A filled prompt. `residual` as the guard measures it (None if no run was reused)."""

    cache: KVCache
    logits: torch.Tensor
    plan: Plan
    residual: float | None

    @property
    def recomputed_tokens(self) -> int:
        """Prompt tokens that went through the model, the head among them where it was recomputed."""
        return sum(span.tokens for span in self.plan.spans if span.kind is SpanKind.RECOMPUTE)


def copy_donor(runner: ModelRunner, token_ids: npt.NDArray[np.uint32], cache: KVCache) -> DonorCopy:
    """Publishes nothing, but cuts the KV of a prompt (uint32 [T], in rows [0, T) of `cache`) into anchors and blocks as
    publishing does. Raises UsageError if the cache holds fewer rows."""
    tokens = len(token_ids)
    if cache.length < tokens:
        raise UsageError(f"the cache holds {cache.length} of the donor's {tokens} tokens")
    sequence_id = SequenceId(hashlib.sha256(b"evaluation" + token_ids.tobytes()).digest()[:16])
    anchors: list[AnchorMeta] = []
    blocks: dict[BlockKey, memoryview] = {}
    for start in range(0, tokens, ANCHOR_TOKENS_MAX):
        end = min(start + ANCHOR_TOKENS_MAX, tokens)
        anchor_id = AnchorId(hashlib.sha256(sequence_id + start.to_bytes(8, "little")).digest()[:16])
        anchors.append(
            AnchorMeta(
                anchor_id=anchor_id,
                model_id=runner.spec.model_id,
                sequence_id=sequence_id,
                start=start,
                end=end,
                chain_end=ChainHash(b""),
                fingerprints=b"",
                hops=0,
                visibility=Visibility.PUBLIC,
                group=b"",
                kv_bytes=(end - start) * runner.spec.layout.token_bytes,
            )
        )
        for index, first in enumerate(range(start, end, BLOCK_TOKENS)):
            blocks[BlockKey(anchor_id, index)] = copy_block(cache, first, min(first + BLOCK_TOKENS, end))
    donor = Donor(
        holder=_HOLDER,
        local=True,
        sequence_id=sequence_id,
        start=0,
        token_ids=token_ids,
        anchors=tuple(anchors),
    )
    return DonorCopy(donor, blocks)


def plan_reuse(
    runner: ModelRunner, token_ids: npt.NDArray[np.uint32], copy: DonorCopy, mode: Mode, rules: ReuseRules
) -> Plan:
    """The engine's plan for a prompt (uint32 [T]) with this donor, on a machine where reusing always pays."""
    costs = Costs(
        forward_s=0.0001,
        token_s=0.01,
        attention_s=1e-9,
        pull_latency_s=0.0001,
        pull_bytes_per_s=1e12,
        align_bytes_per_s=1e12,
        token_bytes=runner.spec.layout.token_bytes,
    )
    return make_plan(token_ids, [copy.donor], mode, rules, costs)


def transplant(
    runner: ModelRunner, token_ids: npt.NDArray[np.uint32], plan: Plan, copy: DonorCopy, variant: Variant
) -> Transplant:
    """Carries out `plan` for the prompt (uint32 [T]) as `variant` says, in a new cache.

    Raises UsageError for a plan without donor spans, which would compare full prefill with itself.
    """
    spans = [span for span in plan.spans if span.donor is not None]
    if not spans:
        raise UsageError("this prompt shares no run with the donor: nothing would be transplanted")
    if variant is Variant.ROTATED:
        plan = _without_heads(plan)
    blocks = _shuffled(copy.blocks) if variant is Variant.WRONG_BLOCKS else copy.blocks
    rotary = None if variant is Variant.UNROTATED else runner.spec.rotary
    cache = runner.new_cache(plan.tokens)
    if not isinstance(cache, KVCache):
        raise UsageError(f"KV of {runner.spec.name} cannot be exchanged: {runner.spec.share_refusal}")
    heads = []
    for span in spans:
        align_span(cache, span, blocks, rotary)
        if span.kind is SpanKind.RECOMPUTE:
            heads.append(keep_head(cache, span.start, span.end))
    ids = token_ids.astype(np.int64)
    positions = recompute_positions(plan)
    first = int(positions[0])
    if len(positions) == len(ids) - first:
        cache.length = first
        logits = runner.prefill(ids[first:], cache, first)
    else:
        logits = runner.recompute(ids, positions, cache)
    measured = None if variant is Variant.ROTATED else residual(cache, heads)
    return Transplant(cache, logits, plan, measured)


def _without_heads(plan: Plan) -> Plan:
    """The same plan, but the heads of reused runs stay as the donor computed them."""
    spans = tuple(
        replace(span, kind=SpanKind.REUSE) if span.donor is not None and span.kind is SpanKind.RECOMPUTE else span
        for span in plan.spans
    )
    return replace(plan, spans=spans)


def _shuffled(blocks: Mapping[BlockKey, memoryview]) -> dict[BlockKey, memoryview]:
    """Every block gets the bytes of another one of the same size, half the sequence away."""
    sizes: dict[int, list[BlockKey]] = {}
    for key, data in blocks.items():
        sizes.setdefault(data.nbytes, []).append(key)
    return {
        key: blocks[keys[(index + max(1, len(keys) // 2)) % len(keys)]]
        for keys in sizes.values()
        for index, key in enumerate(keys)
    }
