"""Shards and their owners."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcomm_p2p.protocol import shard_map
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.index_mode import BURST_S, IndexMode
from kvcomm_p2p.protocol.shard_map import (
    BAND,
    LANDMARK,
    OWNERS,
    SHARDS,
    OwnerTable,
    band_values,
    owner_table,
    shards_of,
)


def ids(count: int, seed: int = 1) -> list[NodeId]:
    rng = random.Random(seed)
    return [NodeId(rng.randbytes(16)) for _ in range(count)]


def table(members: list[NodeId], near: OwnerTable | None = None) -> OwnerTable:
    """Computed anew."""
    shard_map._tables.clear()
    return owner_table(tuple(sorted(members)), near)


def names(of: OwnerTable) -> list[set[NodeId]]:
    return [{of.members[place] for place in row if place >= 0} for row in of.owners.tolist()]


@given(st.integers(1, 20), st.integers(0, 6), st.integers(0, 6), st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_a_table_depends_on_its_members_alone(count: int, gone: int, came: int, seed: int) -> None:
    """However it was arrived at: the golden rule of a directory that nobody coordinates."""
    before = ids(count, seed)
    after = before[min(gone, count - 1) :] + ids(came, seed + 1000)
    small = table(after, table(before))
    anew = table(after)
    assert small.members == anew.members and (small.owners == anew.owners).all() and (small.scores == anew.scores).all()
    shares = [len(owners) for owners in names(anew)]
    assert set(shares) == {min(OWNERS, len(after))}


def test_one_member_moves_its_share_and_nothing_else() -> None:
    """At 1,000 members about 3 x 16,384 / 1,001 = 49 of 49,152 replicas."""
    members = ids(1001)
    before = table(members[:1000])
    after = table(members, before)
    moved = [new - old for old, new in zip(names(before), names(after), strict=True)]
    assert all(each <= {members[1000]} for each in moved)
    assert 25 <= sum(map(len, moved)) <= 80
    left = table(members[:1000], after)
    assert (left.owners == before.owners).all()


def test_owners_are_even() -> None:
    for count, most in ((16, 1.1), (128, 1.4), (1000, 1.9)):
        sizes = np.bincount(table(ids(count)).owners.ravel(), minlength=count)
        assert sizes.max() <= most * OWNERS * SHARDS / count and sizes.min() > 0


def test_small_and_skewed_values_spread_over_all_shards() -> None:
    """Landmarks are minima, so they are small numbers."""
    for kind in (LANDMARK, BAND):
        counts = np.bincount(shards_of(kind, np.arange(10 * SHARDS)), minlength=SHARDS)
        assert counts.max() < 40 and (counts == 0).mean() < 0.001
    assert (shards_of(LANDMARK, np.arange(1000)) != shards_of(BAND, np.arange(1000))).mean() > 0.99


@given(st.integers(0, 2**64 - 1), st.sets(st.integers(0, 63), max_size=7))
def test_flipped_bands_meet_within_seven_bits(content: int, bits: set[int]) -> None:
    other = content
    for bit in bits:
        other ^= 1 << bit
    assert set(band_values(content)) & set(band_values(other, flipped=True))
    if len(bits) <= 3:
        assert set(band_values(content)) & set(band_values(other))


def test_a_burst_of_news_is_no_reason_to_give_up_the_index() -> None:
    """Everybody publishes a thousand anchors at once, or a newcomer reads them all: that passes."""
    config = NodeConfig()
    news = 20.0 * config.directory_bytes_per_s_max
    burst, lasting = IndexMode(config, 0.0), IndexMode(config, 0.0)
    for second in range(200):
        burst.update(0.0, news if second % 60 < 50 else 0.0, float(second))
        lasting.update(0.0, news, float(second))
    assert not burst.sharded
    assert lasting.sharded and lasting.since == BURST_S
    full = IndexMode(config, 0.0)
    full.update(1.01 * config.directory_bytes_max, 0.0, 1.0)
    assert full.sharded
