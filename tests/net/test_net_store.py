"""BlockStore: exact bytes, exact references, and views that outlive everything."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcomm_p2p.protocol.anchors import BlockHandle
from kvcomm_p2p.store import ADOPT_BYTES_MIN, BlockStore, StaleHandle

BIG = bytes(range(256)) * (ADOPT_BYTES_MIN // 256)


def test_put_adopts_without_copying() -> None:
    store = BlockStore()
    buffer = bytearray(BIG)
    handle = store.put(buffer)
    buffer[0] = 77  # what nobody may do; here it shows that there is one buffer only
    assert store.view(handle)[0] == 77


def test_view_is_read_only() -> None:
    store = BlockStore()
    view = store.view(store.put(bytearray(8)))
    assert view.readonly
    with pytest.raises(TypeError):
        view[0] = 1


def test_view_survives_drop_and_reuse_of_the_slot() -> None:
    store = BlockStore()
    old = store.put(b"old" * 10)
    view = store.view(old)
    assert store.drop(old)
    new = store.put(b"new" * 10)
    assert (new.slot, new.generation) == (old.slot, old.generation + 1)
    assert bytes(view) == b"old" * 10
    with pytest.raises(StaleHandle):
        store.view(old)


def test_stale_handles_change_nothing() -> None:
    store = BlockStore()
    handle = store.put(b"x")
    store.drop(handle)
    assert not store.drop(handle)
    with pytest.raises(KeyError):
        store.retain(handle)
    with pytest.raises(StaleHandle):
        store.view(BlockHandle(handle.store + 1, 0, 0))
    assert (len(store), store.held_bytes, store.reserved_bytes) == (0, 0, 0)


def test_what_was_reset_is_as_it_was_reserved() -> None:
    store = BlockStore()
    handle = store.reserve(8)
    store.write(handle, 0, b"wrong")
    store.reset(handle)
    assert (store.held_bytes, store.reserved_bytes) == (0, 8)
    store.write(handle, 0, b"right ")
    with pytest.raises(StaleHandle):
        store.view(handle)
    store.write(handle, 6, b"??")
    assert bytes(store.view(handle)) == b"right ??"
    store.retain(handle)
    store.reset(handle)
    assert bytes(store.view(handle)) == b"right ??", "others see it already"
    store.drop(handle)
    store.drop(handle)
    store.reset(handle)
    assert (len(store), store.held_bytes, store.reserved_bytes) == (0, 0, 0)


def test_reserving_takes_no_memory_until_bytes_arrive() -> None:
    store = BlockStore()
    handle = store.reserve(10**15)
    assert (store.held_bytes, store.reserved_bytes) == (0, 10**15)
    with pytest.raises(StaleHandle):
        store.view(handle)
    store.drop(handle)
    assert store.reserved_bytes == 0


def test_whole_payload_is_adopted() -> None:
    store = BlockStore()
    handle = store.reserve(len(BIG))
    store.write(handle, 0, memoryview(BIG))
    assert store.view(handle).obj is BIG
    assert (store.held_bytes, store.reserved_bytes) == (len(BIG), 0)


def test_small_payload_is_copied() -> None:
    store = BlockStore()
    payload = b"small"
    handle = store.reserve(len(payload))
    store.write(handle, 0, payload)
    view = store.view(handle)
    assert bytes(view) == payload and view.obj is not payload


@given(st.permutations(range(7)), st.integers(1, 50))
def test_pieces_in_any_order_make_the_block(order: list[int], piece: int) -> None:
    store = BlockStore()
    content = bytes(i % 251 for i in range(7 * piece))
    handle = store.reserve(len(content))
    for position in order:
        with pytest.raises(StaleHandle):
            store.view(handle)
        store.write(handle, position * piece, content[position * piece : (position + 1) * piece])
    assert bytes(store.view(handle)) == content
    assert (store.held_bytes, store.reserved_bytes) == (len(content), 0)


@pytest.mark.parametrize(("offset", "length"), [(0, 11), (8, 3), (10, 1), (0, 0), (-1, 2), (2, 4)])
def test_writes_out_of_place_are_refused(offset: int, length: int) -> None:
    store = BlockStore()
    handle = store.reserve(10)
    store.write(handle, 4, b"45")
    with pytest.raises(ValueError, match="not missing"):
        store.write(handle, offset, bytes(length))
    assert store.held_bytes == 10


def test_references_are_counted() -> None:
    store = BlockStore()
    handle = store.put(b"block")
    store.retain(handle)
    store.drop(handle)
    assert bytes(store.view(handle)) == b"block"
    store.drop(handle)
    assert len(store) == 0


def test_empty_blocks_are_refused() -> None:
    store = BlockStore()
    with pytest.raises(ValueError, match="empty"):
        store.put(b"")
    with pytest.raises(ValueError, match="0 bytes"):
        store.reserve(0)


def test_many_threads_leave_exact_accounts() -> None:
    store = BlockStore()

    def work() -> None:
        for size in range(1, 300):
            handle = store.put(bytes(size))
            reserved = store.reserve(size)
            store.write(reserved, 0, bytes(size))
            assert len(store.view(handle)) == len(store.view(reserved)) == size
            store.drop(handle)
            store.drop(reserved)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(store), store.held_bytes, store.reserved_bytes) == (0, 0, 0)
