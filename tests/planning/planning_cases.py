"""Sequences, donors and costs for tests of planning."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvcomm_p2p.planning.types import Costs, Donor, ReuseRules
from kvcomm_p2p.protocol.anchors import ANCHOR_TOKENS_MAX, AnchorMeta, Visibility
from kvcomm_p2p.protocol.ids import AnchorId, ChainHash, ModelId, NodeId, SequenceId

Tokens = npt.NDArray[np.uint32]

MODEL = ModelId(b"m" * 16)
KEY = b"content key"
ME = NodeId(b"0" * 16)
PEER = NodeId(b"1" * 16)
TOKEN_BYTES = 46_080

RULES = ReuseRules(approximate=True, reason="")
EXACT_RULES = ReuseRules(approximate=False, reason="no profile: run kvcomm calibrate")

COSTS = Costs(
    forward_s=0.01,
    token_s=0.002,
    attention_s=2e-7,
    pull_latency_s=0.003,
    pull_bytes_per_s=1e9,
    align_bytes_per_s=3e9,
    token_bytes=TOKEN_BYTES,
)


def words(seed: int, n: int) -> Tokens:
    return np.random.default_rng(seed).integers(0, 50_000, n).astype(np.uint32)


def joined(*parts: Tokens) -> Tokens:
    return np.concatenate(parts).astype(np.uint32)


def donor(
    token_ids: Tokens,
    *,
    start: int = 0,
    local: bool = False,
    hops: Sequence[int] | int = 0,
    same_prefix_until: int = 0,
    holder: NodeId | None = None,
    name: int = 0,
    anchor_tokens: int = ANCHOR_TOKENS_MAX,
) -> Donor:
    """A donor whose anchors have `anchor_tokens` tokens; `hops` for all, or for each anchor."""
    anchors = []
    for number, at in enumerate(range(0, len(token_ids), anchor_tokens)):
        end = min(at + anchor_tokens, len(token_ids))
        anchors.append(
            AnchorMeta(
                anchor_id=AnchorId(bytes([name, number]) + b"a" * 14),
                model_id=MODEL,
                sequence_id=SequenceId(bytes([name]) * 8),
                start=start + at,
                end=start + end,
                chain_end=ChainHash(b""),
                fingerprints=b"",
                hops=hops if isinstance(hops, int) else hops[number],
                visibility=Visibility.PUBLIC,
                group=b"",
                kv_bytes=(end - at) * TOKEN_BYTES,
            )
        )
    return Donor(
        holder=holder or (ME if local else PEER),
        local=local,
        sequence_id=SequenceId(bytes([name]) * 8),
        start=start,
        token_ids=token_ids,
        anchors=tuple(anchors),
        same_prefix_until=same_prefix_until,
    )
