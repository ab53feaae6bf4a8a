"""Budgets, eviction, leases, duplicates, visibility."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from protocol_harness import held, meta

from kvcomm_p2p.protocol.anchors import BlockHandle, Visibility
from kvcomm_p2p.protocol.ids import AnchorId, ChainHash
from kvcomm_p2p.protocol.pool import Pool, may_see

KV = 64 * 8


def test_least_recently_used_goes_first() -> None:
    pool = Pool(2 * KV, 10)
    anchors = [held(meta(count)) for count in range(3)]
    pool.publish(anchors[:1], 0.0)
    pool.publish(anchors[1:2], 1.0)
    pool.use([anchors[0].meta.anchor_id], 2.0)
    change = pool.publish(anchors[2:], 3.0)
    assert [gone.anchor_id for gone in change.removed] == [anchors[1].meta.anchor_id]
    assert change.dropped == anchors[1].handles
    assert pool.bytes == 2 * KV


def test_frequent_use_outweighs_some_recency() -> None:
    pool = Pool(2 * KV, 10)
    often, once, new = (held(meta(label)) for label in ("often", "once", "new"))
    pool.publish([often], 0.0)
    for _ in range(7):
        pool.use([often.meta.anchor_id], 1.0)
    pool.publish([once], 100.0)
    assert pool.publish([new], 101.0).removed == (once.meta,)


def test_leased_is_never_evicted_but_may_be_forgotten() -> None:
    pool = Pool(KV, 10)
    leased, new = held(meta("leased")), held(meta("new"))
    pool.publish([leased], 0.0)
    lease = pool.lease(leased.meta.anchor_id)
    assert lease is not None
    change = pool.publish([new], 1.0)
    assert change.rejected == 1 and change.dropped == new.handles and not change.added
    lease.release()
    assert pool.publish([new], 2.0).removed == (leased.meta,)
    again = pool.lease(new.meta.anchor_id)
    assert pool.forget([new.meta.anchor_id]).dropped == new.handles
    assert again is not None
    again.release()
    assert len(pool) == 0 and pool.bytes == 0


def test_larger_than_the_budget_is_rejected_without_evicting_others() -> None:
    pool = Pool(KV, 10)
    small, large = held(meta("small")), held(meta("large", tokens=128))
    pool.publish([small], 0.0)
    assert pool.publish([large], 1.0).dropped == large.handles
    assert pool.get(small.meta.anchor_id) == small


def test_duplicates_give_the_new_handles_back() -> None:
    pool = Pool(10 * KV, 10)
    first, second = held(meta("same")), held(meta("same"))
    pool.publish([first], 0.0)
    change = pool.publish([second], 1.0)
    assert change.dropped == second.handles and not change.added and not change.removed
    assert pool.publish([first], 2.0).dropped == first.handles, "a second reference to shared handles goes back as well"
    assert pool.get(first.meta.anchor_id) == first


def test_fewer_repairs_replace_the_old_kv_unless_it_is_leased() -> None:
    pool = Pool(10 * KV, 10)
    repaired = held(meta("same", hops=1, chain_end=ChainHash(b"")))
    exact = held(meta("same"))
    pool.publish([repaired], 0.0)
    lease = pool.lease(exact.meta.anchor_id)
    assert pool.publish([exact], 1.0).dropped == exact.handles
    assert lease is not None
    lease.release()
    assert pool.publish([replace(exact)], 2.0).dropped == repaired.handles
    kept = pool.get(exact.meta.anchor_id)
    assert kept is not None and kept.meta.hops == 0 and kept.handles == exact.handles


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [
        ((Visibility.PUBLIC, b""), (Visibility.PRIVATE, b""), (Visibility.PRIVATE, b"")),
        ((Visibility.PRIVATE, b""), (Visibility.PUBLIC, b""), (Visibility.PRIVATE, b"")),
        ((Visibility.PUBLIC, b""), (Visibility.GROUP, b"g" * 8), (Visibility.GROUP, b"g" * 8)),
        ((Visibility.GROUP, b"g" * 8), (Visibility.GROUP, b"h" * 8), (Visibility.PRIVATE, b"")),
        ((Visibility.GROUP, b"g" * 8), (Visibility.GROUP, b"g" * 8), (Visibility.GROUP, b"g" * 8)),
    ],
)
def test_visibility_becomes_the_strictest(
    first: tuple[Visibility, bytes], second: tuple[Visibility, bytes], kept: tuple[Visibility, bytes]
) -> None:
    pool = Pool(10 * KV, 10)
    for visibility, group in (first, second):
        pool.publish([held(meta("same", visibility=visibility, group=group))], 0.0)
    (only,) = pool.metas()
    assert (only.visibility, only.group) == kept


def test_who_may_see() -> None:
    tag = b"g" * 8
    assert may_see(meta("public"), ())
    assert not may_see(meta("group", visibility=Visibility.GROUP, group=tag), ())
    assert may_see(meta("group", visibility=Visibility.GROUP, group=tag), (tag,))
    assert not may_see(meta("private", visibility=Visibility.PRIVATE), (tag,))
    assert not may_see(meta("worn", hops=2, chain_end=ChainHash(b"")), (tag,))


@pytest.mark.parametrize("broken", ["handles", "digests", "tokens", "start"])
def test_anchors_that_contradict_themselves_are_our_bug(broken: str) -> None:
    anchor = held(meta("broken"))
    changes: dict[str, dict[str, Any]] = {
        "handles": {"handles": anchor.handles[:1]},
        "digests": {"digests": ()},
        "tokens": {"token_ids": np.arange(3, dtype=np.uint32)},
        "start": {"meta": replace(anchor.meta, start=1, end=65)},
    }
    pool = Pool(10 * KV, 10)
    with pytest.raises(ValueError, match="published anchor"):
        pool.publish([held(meta("good")), replace(anchor, **changes[broken])], 0.0)
    assert len(pool) == 0, "nothing is taken in halfway"


@given(
    st.lists(
        st.tuples(st.sampled_from(["publish", "forget", "use", "lease", "release"]), st.integers(0, 9)), max_size=80
    )
)
@settings(deadline=None)
def test_budgets_hold_and_every_handle_is_held_or_dropped(steps: list[tuple[str, int]]) -> None:
    pool = Pool(4 * KV, 5)
    given_in: set[BlockHandle] = set()
    dropped: list[BlockHandle] = []
    leases: dict[AnchorId, list[object]] = {}
    for now, (action, label) in enumerate(steps):
        anchor_id = meta(label).anchor_id
        if action == "publish":
            anchor = held(meta(label, tokens=32 * (1 + label % 3)))
            given_in.update(anchor.handles)
            protected = {key for key, items in leases.items() if items and pool.get(key) is not None}
            change = pool.publish([anchor], float(now))
            dropped += change.dropped
            assert all(pool.get(key) is not None for key in protected)
        elif action == "forget":
            dropped += pool.forget([anchor_id]).dropped
            leases.pop(anchor_id, None)
        elif action == "use":
            pool.use([anchor_id], float(now))
        elif action == "lease":
            lease = pool.lease(anchor_id)
            if lease is not None:
                leases.setdefault(anchor_id, []).append(lease)
        elif leases.get(anchor_id):
            leases[anchor_id].pop().release()  # type: ignore[attr-defined]
        assert pool.bytes <= 4 * KV and len(pool) <= 5
        assert pool.bytes == sum(item.kv_bytes for item in pool.metas())
    kept = [handle for item in pool.metas() for handle in pool.get(item.anchor_id).handles]  # type: ignore[union-attr]
    assert sorted(kept + dropped) == sorted(given_in)
