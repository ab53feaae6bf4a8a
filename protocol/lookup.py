"""Questions to the directory, and its answers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcomm_p2p.protocol.anchors import AnchorMeta, MissReason
from kvcomm_p2p.protocol.ids import ChainHash, ModelId, NodeId

LANDMARKS_ASKED_MAX = 256
"""Fingerprints for which shard owners are asked where a lookup names no landmarks, or more than these."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """What a prompt asks: its chain hash at every block boundary (ascending), its winnowed fingerprints (uint32,
    unique), and `sketches`: SimHashes of windows of it. Anchors whose content is at most `sketch_bits_max` bits (0 to
    64) from one of them are near-duplicates. Each sketch costs a search, so none costs nothing.

    `landmarks` are those of the fingerprints that shard owners are asked for (see `HeldAnchor.landmarks`); empty: the
    smallest LANDMARKS_ASKED_MAX.
    """

    model_id: ModelId
    chains: tuple[ChainHash, ...]
    fingerprints: npt.NDArray[np.uint32]
    anchors_max: int = 64
    sketches: tuple[int, ...] = ()
    sketch_bits_max: int = 9
    landmarks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class AnchorHit:
    """An anchor that shares something with the prompt. `holder` may be the node itself.

    `prefix_tokens` > 0: the anchor's `chain_end` equals the prompt's chain hash there, so its first `prefix_tokens` =
    `end` tokens equal the prompt's (and were computed exactly). `matches`: number of the prompt's fingerprints it
    contains. `similar_bits`: Hamming distance of its content to the nearest of the prompt's sketches, None unless that is
    within the lookup's `sketch_bits_max`.
    """

    meta: AnchorMeta
    holder: NodeId
    matches: int
    prefix_tokens: int
    similar_bits: int | None = None


@dataclass(frozen=True, slots=True)
class LookupResult:
    """Hits, best first (prefix_tokens, then matches, then the most similar, then own before peers, then ids), with the
    neighbours of every hit in the same sequence and holder (matches 0), since an equal run may reach into them.

    `miss` says why there is nothing at all: NOT_FOUND, or MODEL_MISMATCH when only anchors of other models would have
    been hit, or DEADLINE when owners of shards did not answer in time. `wait_lost_s`: seconds spent on peers that did
    not answer.
    """

    hits: tuple[AnchorHit, ...]
    miss: MissReason | None
    wait_lost_s: float = 0.0
