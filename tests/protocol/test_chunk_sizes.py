"""Chunks that are asked for: small where the link is slow or not known, large where the holder has shown that it is fast."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from protocol_harness import held, make_node, meta, new_handle, record, wait

from kvcomm_p2p.protocol import events as ev
from kvcomm_p2p.protocol import messages as m
from kvcomm_p2p.protocol import wire
from kvcomm_p2p.protocol.anchors import AnchorMeta, BlockKey, MissReason
from kvcomm_p2p.protocol.chunk_sizes import (
    CHUNK_SHARE,
    FIRST_NEAR_BYTES,
    HOLDERS_MAX,
    NEAR_S,
    ChunkSizes,
)
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.messages.packing import pack, unpack
from kvcomm_p2p.protocol.node import Node
from kvcomm_p2p.protocol.peer_stats import PeerCounts

STALL_S = 0.2
PEER = record(1)
KIB, MIB = 1024, 1024 * 1024
DOC = meta("doc", tokens=512, kv_bytes=16 * MIB)


def sizes(round_trip_s: float | None = None) -> ChunkSizes:
    return ChunkSizes(STALL_S, lambda _: PeerCounts(round_trip_s=round_trip_s))


def after(kv_bytes: int, seconds: float) -> int:
    known = sizes()
    known.brought(PEER.node_id, kv_bytes, seconds)
    return known.of(PEER.node_id)


def test_chunks_begin_small_and_less_small_in_the_same_room() -> None:
    assert sizes().of(PEER.node_id) == sizes(2 * NEAR_S).of(PEER.node_id) == m.CHUNK_BYTES_MIN
    assert sizes(NEAR_S / 10).of(PEER.node_id) == FIRST_NEAR_BYTES


def test_one_fast_pull_is_enough_for_the_largest_chunks_and_a_slow_one_for_the_smallest() -> None:
    assert after(MIB, 0.001) == m.CHUNK_BYTES_MAX
    assert after(MIB, 1.0) == m.CHUNK_BYTES_MIN


@given(st.integers(1, 2**28), st.floats(1e-6, 100.0))
def test_a_chunk_takes_a_small_share_of_the_stall_timeout_unless_it_is_the_smallest(kv: int, seconds: float) -> None:
    size = after(kv, seconds)
    assert m.CHUNK_BYTES_MIN <= size <= m.CHUNK_BYTES_MAX
    assert size == m.CHUNK_BYTES_MIN or size * seconds / kv <= CHUNK_SHARE * STALL_S * (1 + 1e-9)
    m.Pull(1, (m.PullBlock(DOC.anchor_id, 0, 1),), 1, chunk_bytes=size)


def test_a_small_pull_does_not_show_that_the_link_is_slow() -> None:
    known = sizes()
    known.brought(PEER.node_id, 4 * MIB, 0.001)
    known.brought(PEER.node_id, 10 * KIB, 0.05)
    assert known.of(PEER.node_id) == m.CHUNK_BYTES_MAX
    known.brought(PEER.node_id, 4 * MIB, 1.0)
    assert known.of(PEER.node_id) == m.CHUNK_BYTES_MIN


def test_silence_begins_anew_with_the_smallest_and_who_is_gone_is_forgotten() -> None:
    known = sizes(NEAR_S)
    known.brought(PEER.node_id, 4 * MIB, 0.001)
    known.stalled(PEER.node_id)
    assert known.of(PEER.node_id) == m.CHUNK_BYTES_MIN
    known.forget(PEER.node_id)
    assert not len(known)


def test_who_was_slow_or_silent_a_moment_ago_may_show_that_our_own_link_is_slow() -> None:
    known = sizes(NEAR_S)
    known.brought(PEER.node_id, MIB, 1.0)
    assert known.of(NodeId(bytes(16))) == m.CHUNK_BYTES_MIN
    known.brought(PEER.node_id, 4 * MIB, 0.001)
    assert known.of(NodeId(bytes(16))) == FIRST_NEAR_BYTES, "that one link is fast says nothing of another"


def test_the_round_trip_is_not_taken_for_a_slow_link() -> None:
    known = sizes(0.05)
    known.brought(PEER.node_id, MIB, 0.05 + 0.01)
    far = known.of(PEER.node_id)
    known = sizes(0.0)
    known.brought(PEER.node_id, MIB, 0.03)
    assert far == known.of(PEER.node_id), "half of the time at most is taken for it"


def test_no_more_holders_are_remembered_than_allowed() -> None:
    known = sizes()
    for number in range(HOLDERS_MAX + 5):
        known.brought(NodeId(number.to_bytes(16, "big")), MIB, 0.001)
    assert len(known) == HOLDERS_MAX
    assert known.of(NodeId(bytes(16))) == m.CHUNK_BYTES_MIN, "the one measured longest ago"


# ---------------------------------------------------------------------------------------------------------------- node


def node_of() -> Node:
    node = make_node(0)
    hello = m.Hello(m.PROTOCOL_VERSION, m.PROTOCOL_VERSION, bytes(16), PEER)
    node.handle(ev.MessageReceived(PEER.node_id, hello), 0.0)
    return node


def request(fetch_id: int, anchor: AnchorMeta, blocks: range) -> ev.FetchRequested:
    wants = tuple(
        ev.Want(BlockKey(anchor.anchor_id, i), anchor.block_bytes(i), bytes(32), new_handle()) for i in blocks
    )
    return ev.FetchRequested(fetch_id, (PEER.node_id,), wants, 60.0)


def pulls(effects: list[ev.Effect]) -> list[m.Pull]:
    sent = [effect.message for effect in effects if isinstance(effect, ev.SendMessage)]
    return [message for message in sent if isinstance(message, m.Pull)]


def bring(node: Node, pull: m.Pull, at: float, takes_s: float) -> list[ev.Effect]:
    """All blocks of a pull, in chunks as asked for, evenly in that time."""
    effects: list[ev.Effect] = []
    total = sum(block.wire_bytes for block in pull.blocks)
    came = 0
    for ordinal, block in enumerate(pull.blocks):
        for offset in range(0, block.wire_bytes, pull.chunk_bytes):
            size = min(pull.chunk_bytes, block.wire_bytes - offset)
            came += size
            event = ev.ChunkReceived(PEER.node_id, pull.pull_id, ordinal, offset, size)
            effects += node.handle(event, at + takes_s * came / total)
    return effects


def test_what_a_holder_shows_is_what_it_is_asked_for_next() -> None:
    node = node_of()
    first, second = pulls(node.handle(request(1, DOC, range(4)), 0.0))
    assert first.chunk_bytes == second.chunk_bytes == m.CHUNK_BYTES_MIN
    assert len(first.blocks) == len(second.blocks) == 2
    bring(node, first, 0.0, 0.001)
    bring(node, second, 0.001, 0.001)
    (third,) = pulls(node.handle(request(2, DOC, range(4, 6)), 0.1))
    assert third.chunk_bytes == m.CHUNK_BYTES_MAX and len(third.blocks) == 2
    bring(node, third, 0.1, 2.0)
    (fourth, *_) = pulls(node.handle(request(3, DOC, range(6, 9)), 3.0))
    assert fourth.chunk_bytes == m.CHUNK_BYTES_MIN and len(fourth.blocks) == 1, "no more than so many chunks a piece"


def test_a_block_of_the_default_model_comes_over_five_megabits_and_no_slower_than_three() -> None:
    doc = meta("default", tokens=32, kv_bytes=1_474_560)
    for bytes_per_s, comes in ((625_000, True), (400_000, True), (300_000, False)):
        node, event = node_of(), request(1, doc, range(1))
        (pull,) = pulls(node.handle(event, 0.0))
        chunk_s = pull.chunk_bytes / bytes_per_s
        offset, now, finished = 0, 0.0, []
        while offset < doc.kv_bytes and not finished:
            now += chunk_s
            finished += [e for e in wait(node, now) if isinstance(e, ev.FinishFetch)]
            size = min(pull.chunk_bytes, doc.kv_bytes - offset)
            node.handle(ev.ChunkReceived(PEER.node_id, pull.pull_id, 0, offset, size), now)
            offset += size
        assert (not finished) is comes, bytes_per_s
        if finished:
            (missed,) = finished[0].missed
            assert missed.miss.reason is MissReason.STALLED and finished[0].wait_lost_s <= STALL_S + 1e-9


# --------------------------------------------------------------------------------------------------------------- holder


@pytest.mark.parametrize("changes", [{}, {"offset": 100 * KIB}, {"offset": 9, "encoded_bytes": 300 * KIB}])
def test_the_holder_sends_chunks_as_asked_for_resumed_and_encoded(changes: dict[str, Any]) -> None:
    node = make_node(0, capabilities=m.Capability.INT8)
    hello = m.Hello(m.PROTOCOL_VERSION, m.PROTOCOL_VERSION, bytes(16), PEER)
    node.handle(ev.MessageReceived(PEER.node_id, hello), 0.0)
    node.handle(ev.AnchorsPublished((held(DOC),)), 0.0)
    encoding = m.Encoding.INT8 if "encoded_bytes" in changes else m.Encoding.RAW
    block = m.PullBlock(DOC.anchor_id, 1, DOC.block_bytes(1), **changes)
    pull = m.Pull(1, (block,), MIB, encoding, chunk_bytes=96 * KIB)
    (effect,) = [e for e in node.handle(ev.MessageReceived(PEER.node_id, pull), 1.0) if isinstance(e, ev.SendBlock)]
    assert (effect.chunk_bytes, effect.offset) == (96 * KIB, block.offset)


# ----------------------------------------------------------------------------------------------------------------- wire


@pytest.mark.parametrize("chunk_bytes", [m.CHUNK_BYTES_MIN - 1, 0, -1, m.CHUNK_BYTES_MAX + 1, 2**70])
def test_chunks_too_small_or_too_large_may_not_be_asked_for(chunk_bytes: int) -> None:
    pull = m.Pull(1, (m.PullBlock(DOC.anchor_id, 0, 1),), 1, chunk_bytes=m.CHUNK_BYTES_MIN)
    frame = wire.encode(PEER.node_id, pull)
    assert wire.decode(frame)[1] == pull
    fields = [11, 1, [[DOC.anchor_id, 0, 1, 0, 0]], 1, 0, False]
    assert unpack(pack(fields), m.Pull).chunk_bytes == m.CHUNK_BYTES_MAX, "older nodes do not say"
    with pytest.raises((ValueError, OverflowError)):
        unpack(pack([*fields, chunk_bytes]), m.Pull)
