"""Anchors that stand for no prompt: nobody finds them by content, so who wants one asks for it by name."""

from __future__ import annotations

import hashlib

import numpy as np

from kvcomm_p2p.protocol.anchors import BLOCK_TOKENS, NO_CHAIN, AnchorMeta, HeldAnchor, Visibility
from kvcomm_p2p.protocol.ids import ANCHOR_ID_BYTES, SEQUENCE_ID_BYTES, AnchorId, ModelId, SequenceId
from kvcomm_p2p.sim.machine import SimNode
from kvcomm_p2p.sim.world import World


def bare_anchor(
    world: World, holder: SimNode, model_id: ModelId, label: str, *, blocks: int, block_bytes: int
) -> HeldAnchor:
    """`blocks` whole blocks of `block_bytes` bytes each, with handles of `holder` that the caller owns.

    Its ids follow from `label` and the holder's name, so the same two give the same anchor. Takes new handles from `world`.
    """
    name = hashlib.blake2b(
        f"{label} of {holder.name}".encode(), digest_size=ANCHOR_ID_BYTES + SEQUENCE_ID_BYTES
    ).digest()
    tokens = blocks * BLOCK_TOKENS
    meta = AnchorMeta(
        anchor_id=AnchorId(name[:ANCHOR_ID_BYTES]),
        model_id=model_id,
        sequence_id=SequenceId(name[ANCHOR_ID_BYTES:]),
        start=0,
        end=tokens,
        chain_end=NO_CHAIN,
        fingerprints=b"",
        hops=0,
        visibility=Visibility.PUBLIC,
        group=b"",
        kv_bytes=blocks * block_bytes,
    )
    handles = tuple(world.new_handle(holder) for _ in range(blocks))
    return HeldAnchor(meta, np.zeros(tokens, np.uint32), handles, (bytes(32),) * blocks)
