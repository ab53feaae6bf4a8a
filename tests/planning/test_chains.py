"""Names for content: what they hold, and that they are the same everywhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import KEY, MODEL, words

from kvcomm_p2p.planning.chains import (
    ChainHasher,
    anchor_id,
    chain_hashes,
    group_tag,
    prefix_digest,
    sequence_id,
)
from kvcomm_p2p.protocol.ids import ModelId


def test_one_hash_for_every_block_boundary() -> None:
    tokens = words(1, 100)
    hashes = chain_hashes(tokens, KEY, MODEL)
    assert len(hashes) == 3
    assert all(len(h) == 16 for h in hashes)
    assert chain_hashes(tokens[:96], KEY, MODEL) == hashes
    assert chain_hashes(tokens[:31], KEY, MODEL) == []


def test_a_hash_holds_all_tokens_before_it() -> None:
    tokens = words(1, 96)
    hashes = chain_hashes(tokens, KEY, MODEL)
    changed = tokens.copy()
    changed[40] += 1
    others = chain_hashes(changed, KEY, MODEL)
    assert [a == b for a, b in zip(hashes, others, strict=True)] == [True, False, False]
    assert not set(hashes) & set(chain_hashes(tokens, b"another key", MODEL))
    assert not set(hashes) & set(chain_hashes(tokens, KEY, ModelId(b"n" * 16)))


@given(st.lists(st.integers(0, 70), max_size=6))
def test_growing_gives_the_same_hashes(lengths: list[int]) -> None:
    tokens = words(1, sum(lengths))
    hasher, hashes, at = ChainHasher(KEY, MODEL), [], 0
    for length in lengths:
        twin = hasher.copy()
        hashes += hasher.extend(tokens[at : at + length])
        at += length
        assert twin.tokens == at - length
        assert hasher.tokens == at
        assert hasher.prefix_digest() == prefix_digest(tokens[:at], KEY, MODEL)
    assert hashes == chain_hashes(tokens, KEY, MODEL)


def test_the_digest_of_a_prefix_holds_its_tail() -> None:
    tokens = words(1, 70)
    digests = [prefix_digest(tokens[:n], KEY, MODEL) for n in range(71)]
    assert len(set(digests)) == 71
    assert digests[64] == chain_hashes(tokens, KEY, MODEL)[1]


def test_byte_order_and_layout_of_the_array_do_not_matter() -> None:
    tokens = words(1, 64)
    expected = chain_hashes(tokens, KEY, MODEL)
    assert chain_hashes(tokens.astype(">u4"), KEY, MODEL) == expected
    assert chain_hashes(np.repeat(tokens, 2)[::2], KEY, MODEL) == expected


def test_names_are_the_same_on_every_machine() -> None:
    tokens = np.arange(32, dtype=np.uint32)
    (chain,) = chain_hashes(tokens, KEY, MODEL)
    names = (chain, anchor_id(chain, 0, 32, KEY), sequence_id(chain, KEY), group_tag("red", KEY))
    assert [name.hex() for name in names] == PINNED


def test_domains_ranges_variants_and_keys_are_apart() -> None:
    prefix = prefix_digest(words(1, 64), KEY, MODEL)
    ids = {
        anchor_id(prefix, 0, 64, KEY),
        anchor_id(prefix, 32, 64, KEY),
        anchor_id(prefix, 0, 64, KEY, b"n"),
        anchor_id(prefix, 0, 64, b"another key"),
    }
    assert len(ids) == 4
    assert (
        len({sequence_id(prefix, KEY), sequence_id(prefix, KEY, b"n"), group_tag("a", KEY), group_tag("b", KEY)}) == 4
    )


def test_bad_keys_and_groups_are_refused() -> None:
    for key in (b"", b"k" * 65):
        with pytest.raises(ValueError, match="1 to 64 bytes"):
            ChainHasher(key, MODEL)
    with pytest.raises(ValueError, match="name"):
        group_tag("", KEY)


PINNED = [
    "9ba406300d81496c1814288bb70204db",
    "04fa6f89df96438070bbb61b3ed8b448",
    "a299c919edbc632c",
    "617c1556ee2a2897",
]
