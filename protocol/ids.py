"""Identifiers. All are fixed-length bytes so that they sort, pack and compare the same on every machine."""

from __future__ import annotations

from typing import NewType

NodeId = NewType("NodeId", bytes)
"""16 random bytes drawn when a node starts without durable state. Never derived from an address."""

ModelId = NewType("ModelId", bytes)
"""16 bytes: digest of everything that shapes KV (see `kvcomm_p2p.model.identity`)."""

SAME_MODEL = ModelId(b"")
"""In place of a model id in a log: that of its writer's member record."""

AnchorId = NewType("AnchorId", bytes)
"""16 bytes: keyed digest of (ModelId, token chain, start, end, variant). Equal for exact copies on any node."""

SequenceId = NewType("SequenceId", bytes)
"""8 bytes that tie the anchors of one sequence together; equal wherever the same exact sequence is held."""

ChainHash = NewType("ChainHash", bytes)
"""16 bytes: keyed digest of (ModelId, all tokens from position 0 to a block boundary)."""

NODE_ID_BYTES = 16
MODEL_ID_BYTES = 16
ANCHOR_ID_BYTES = 16
SEQUENCE_ID_BYTES = 8
CHAIN_HASH_BYTES = 16
DIGEST_BYTES = 32
"""SHA-256 of the bytes of one block."""


def short(identifier: bytes) -> str:
    """First 8 hex digits, for people."""
    return identifier[:4].hex()
