"""Where the bytes of published anchors stand: written once, into memory that peers may read, unless they may not."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from kvcomm_p2p.model.cache import KVCache
from kvcomm_p2p.net.shared_memory import SharedMemory
from kvcomm_p2p.protocol.anchors import AnchorMeta, KVLayout, Visibility
from kvcomm_p2p.protocol.ids import AnchorId, ChainHash, ModelId, SequenceId
from kvcomm_p2p.reuse.blocks import block_tensors
from kvcomm_p2p.reuse.publish import copy_anchor
from kvcomm_p2p.store import BlockStore

LAYOUT = KVLayout(4, 2, 32, 32, "float32")
TOKENS = 80


def anchor(visibility: Visibility) -> AnchorMeta:
    """80 tokens: two whole blocks and a part of one."""
    return AnchorMeta(
        anchor_id=AnchorId(bytes(16)),
        model_id=ModelId(bytes(16)),
        sequence_id=SequenceId(bytes(8)),
        start=32,
        end=32 + TOKENS,
        chain_end=ChainHash(b""),
        fingerprints=b"",
        hops=0,
        visibility=visibility,
        group=b"g" * 8 if visibility is Visibility.GROUP else b"",
        kv_bytes=TOKENS * LAYOUT.token_bytes,
    )


@pytest.mark.parametrize("visibility", list(Visibility))
@pytest.mark.parametrize("shares", [True, False])
def test_private_anchors_are_never_in_shared_memory(visibility: Visibility, shares: bool) -> None:
    cache = KVCache(LAYOUT, 120)
    torch.manual_seed(0)
    cache.keys.normal_()
    cache.values.normal_()
    store = BlockStore(SharedMemory() if shares else None)
    blocks, digests = copy_anchor(cache, anchor(visibility), store)
    handles = blocks.put()
    shared = [store.place(handle) is not None for handle in handles]
    assert shared == [shares and visibility is not Visibility.PRIVATE] * 3
    for index, (handle, digest) in enumerate(zip(handles, digests, strict=True)):
        view, tokens = store.view(handle), anchor(visibility).block_tokens(index)
        assert hashlib.sha256(view).digest() == digest and view.readonly
        keys, values = block_tensors(view, LAYOUT, tokens)
        first = 32 + 32 * index
        assert torch.equal(keys, cache.keys[:, 0, :, first : first + tokens])
        assert torch.equal(values, cache.values[:, 0, :, first : first + tokens])
    del view, keys, values
    assert store.held_bytes == TOKENS * LAYOUT.token_bytes
    for handle in handles:
        store.drop(handle)
    del blocks, handle
    assert store.held_bytes == 0
    assert store.shared is None or store.shared.regions == 0


def test_a_copy_that_fails_in_the_middle_leaves_no_descriptor() -> None:
    store = BlockStore(SharedMemory())
    before = len(list(Path("/proc/self/fd").iterdir()))
    short = KVCache(LAYOUT, 60)
    with pytest.raises((RuntimeError, ValueError)):
        copy_anchor(short, anchor(Visibility.PUBLIC), store)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert (len(store), store.held_bytes) == (0, 0)
