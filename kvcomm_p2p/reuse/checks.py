"""Do pulled blocks hold what their holder says? Cheap checks that need no trust.

Layer-0 KV depends on nothing but token and position, so it can be recomputed for a few tokens of every block: a wrong model,
wrong tokens, wrong positions, somebody else's block and crude poisoning all differ there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import SystemRandom

import numpy as np
import numpy.typing as npt
import torch

from kvcomm_p2p.model.runner import ModelRunner
from kvcomm_p2p.protocol.anchors import BlockKey, KVLayout, Miss, MissReason
from kvcomm_p2p.reuse.blocks import block_tensors

SAMPLED_TOKENS = 8
"""Tokens per block whose layer 0 is recomputed; drawn anew each time, so that a peer cannot know which."""

LAYER0_ERROR_MAX = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 5e-2}
"""Largest relative L2 error of layer-0 keys and values of one token that still counts as equal (rounding is 1e-6 in float32)."""

LAYER0_INT8_ERROR_MAX = 5e-2
"""So much more where the block travelled as int8: of the default model a token's keys or values are off by 1.6 % at most, one
position further they would be off by 18 % at least."""

_random = SystemRandom()


@dataclass(frozen=True, slots=True)
class PulledBlock:
    """A block as it came: `token_ids` (uint32 [n]), `position` of its first token and `digest` as the holder states them. `int8`:
    it travelled so."""

    key: BlockKey
    data: memoryview
    digest: bytes
    token_ids: npt.NDArray[np.uint32]
    position: int
    int8: bool = False


def not_finite(blocks: Sequence[PulledBlock], layout: KVLayout) -> dict[BlockKey, Miss]:
    """Blocks that hold NaN or infinity."""
    failed: dict[BlockKey, Miss] = {}
    for block in blocks:
        keys, values = block_tensors(block.data, layout, len(block.token_ids))
        # The sum is finite iff every element is (or the block is absurd): one pass, no temporary. In half precision the sum
        # of sound keys may overflow, hence the dtype.
        if not bool(torch.isfinite(keys.sum(dtype=torch.float32) + values.sum(dtype=torch.float32))):
            failed[block.key] = Miss(MissReason.NOT_FINITE, "the block holds NaN or infinity")
    return failed


def layer0_mismatches(runner: ModelRunner, blocks: Sequence[PulledBlock]) -> dict[BlockKey, Miss]:
    """Finite blocks whose layer 0 is not that of the tokens and positions that their holder states. One forward for all."""
    layout = runner.spec.layout
    failed: dict[BlockKey, Miss] = {}
    samples: list[tuple[PulledBlock, torch.Tensor, torch.Tensor]] = []
    ids: list[npt.NDArray[np.uint32]] = []
    positions: list[npt.NDArray[np.int64]] = []
    for block in blocks:
        tokens = len(block.token_ids)
        keys, values = block_tensors(block.data, layout, tokens)
        chosen = sorted(_random.sample(range(tokens), min(SAMPLED_TOKENS, tokens)))
        samples.append((block, keys[0][:, chosen], values[0][:, chosen]))
        ids.append(block.token_ids[chosen])
        positions.append(np.asarray(chosen, dtype=np.int64) + block.position)
    if not samples:
        return failed
    true_keys, true_values = runner.layer0(np.concatenate(ids).astype(np.int64), np.concatenate(positions))
    # One comparison for all blocks: the layer is tiny, Python per block is not.
    claimed_keys = torch.cat([keys for _, keys, _ in samples], dim=1).float()
    claimed_values = torch.cat([values for _, _, values in samples], dim=1).float()
    error = torch.maximum(_error(claimed_keys, true_keys.float()), _error(claimed_values, true_values.float()))
    at = 0
    for block, keys, _ in samples:
        worst = float(error[at : at + keys.shape[1]].max())
        at += keys.shape[1]
        if not worst <= LAYER0_ERROR_MAX[layout.dtype] + block.int8 * LAYER0_INT8_ERROR_MAX:
            failed[block.key] = Miss(MissReason.LAYER0_MISMATCH, f"layer 0 differs from these tokens by {worst:.2g}")
    return failed


def _error(claimed: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """Relative L2 error per token, [n], of tensors [H, n, D]."""
    difference = (claimed - true).pow(2).sum(dim=(0, 2)).sqrt()
    return difference / true.pow(2).sum(dim=(0, 2)).sqrt().clamp_min(1e-6)
