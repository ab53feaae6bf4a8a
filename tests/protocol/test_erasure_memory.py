"""What a node was told to erase outlives its process: nothing comes back, nothing lasts longer, and the disk is spared."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from protocol_harness import Network, digest16, joined, make_node, record
from test_erasing import erasure, erasures, held_by, publish, tokens_of

from kvcomm_p2p.protocol import erasing, erasure_memory
from kvcomm_p2p.protocol import events as ev
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.erasure_memory import PACKED_BYTES_MAX, ErasureMemory, aged
from kvcomm_p2p.protocol.ids import AnchorId, NodeId, SequenceId
from kvcomm_p2p.protocol.messages import (
    ERASURE_ANCHORS_MAX,
    ERASURE_HASHES_MAX,
    ERASURE_S,
    ERASURES_PER_MESSAGE_MAX,
    Erasure,
    ErasuresKnown,
    Forget,
)
from kvcomm_p2p.protocol.node import Node


def saved_by(network: Network, node_id: NodeId) -> bytes:
    """What a driver would have on disk by now."""
    *_, last = network.take(node_id, ev.SaveErasures)
    return last.packed


def restarted(network: Network, index: int, packed: bytes, epoch: int = 2) -> NodeId:
    """The node again, with an empty pool and nobody to ask."""
    me = record(index, epoch=epoch)
    network.nodes[me.node_id] = Node(NodeConfig(), me=me, rng=random.Random(index), now=network.now, erasures=packed)
    network.stores[me.node_id], network.references[me.node_id] = {}, {}
    return me.node_id


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_restarted_node_takes_nothing_back_also_when_it_is_alone(everywhere: bool) -> None:
    network = Network()
    node = network.add(0)
    text = tokens_of("text", 64)
    document = np.concatenate([text, tokens_of("behind", 128)])
    publish(network, node, "doc", document)
    network.handle(node, ev.EraseRequested(erasures(text), everywhere))
    packed = saved_by(network, node)
    node = restarted(network, 0, packed)
    assert held_by(network, node, publish(network, node, "another", text)) == [False]
    # Behind it in the same sequence, too: nothing of that holds the text itself.
    assert held_by(network, node, publish(network, node, "doc", document)) == [False] * 3
    assert held_by(network, node, publish(network, node, "fine", tokens_of("fine", 64))) == [True]


def test_what_others_told_is_kept_and_told_on_and_what_is_for_here_is_not() -> None:
    network, ids = joined(2)
    network.handle(ids[0], ev.EraseRequested((erasure(1),), everywhere=True))
    network.run(0.5)
    network.handle(ids[1], ev.EraseRequested((erasure(2),), everywhere=False))
    node = restarted(network, 1, saved_by(network, ids[1]))
    network.answers[node] = []
    newcomer = network.add(7)
    network.join(newcomer, node)
    network.run(60.0, until=lambda: len(network.nodes[newcomer]._custody.erasing) > 0)
    network.run(1.0)
    known = network.nodes[newcomer]._custody.erasing
    assert (erasure(1).erasure_id in known, erasure(2).erasure_id in known) == (True, False)


def test_time_that_has_passed_counts_on_and_time_between_lives_does_not() -> None:
    network = Network()
    node = network.add(0)
    text = tokens_of("text", 64)
    network.handle(node, ev.EraseRequested(erasures(text), everywhere=False))
    network.take(node, ev.SaveErasures)
    network.now += ERASURE_S - 100
    network.handle(node, ev.LeaveRequested())
    node = restarted(network, 0, saved_by(network, node))
    network.now += 50
    assert held_by(network, node, publish(network, node, "a", text)) == [False]
    network.now += 100
    network.handle(node, ev.TimerExpired())
    assert held_by(network, node, publish(network, node, "b", text)) == [True]


def test_ages_are_saved_every_hour_and_an_idle_node_saves_nothing() -> None:
    network = Network()
    busy, idle = network.add(0), network.add(1)
    network.handle(busy, ev.EraseRequested((erasure(1),), everywhere=False))
    assert len(network.take(busy, ev.SaveErasures)) == 1
    for _ in range(5):
        network.now += erasing.SAVE_AGES_S / 2
        network.handle(busy, ev.TimerExpired())
        network.handle(idle, ev.TimerExpired())
    assert len(network.take(busy, ev.SaveErasures)) == 2
    network.handle(idle, ev.LeaveRequested())
    assert not network.take(idle, ev.SaveErasures)


def test_a_flood_of_erasures_costs_the_disk_little() -> None:
    """A member tells as many and as long ones as it may, one after the other: what is written stays below the rate."""
    network, ids = joined(2)
    began, written, writes = network.now, 0, 0
    hashes = np.arange(ERASURE_HASHES_MAX, dtype="<u8").tobytes()
    for number in range(600):
        network.run(0.05)
        news = tuple(
            Erasure(digest16(number, n), ids[1], 0.0, 8, hashes, tuple(digest16(number, n, a) for a in range(64)))
            for n in range(1)
        )
        network.handle(ids[0], ev.MessageReceived(ids[1], Forget(news)))
        for effect in network.take(ids[0], ev.SaveErasures):
            written, writes = written + len(effect.packed), writes + 1
    seconds = network.now - began
    largest = PACKED_BYTES_MAX / erasing.SAVE_BYTES_PER_S
    assert len(network.nodes[ids[0]]._custody.erasing) > 500
    assert 2 <= writes <= seconds / erasing.SAVE_PAUSE_S + 1
    assert written <= erasing.SAVE_BYTES_PER_S * (seconds + largest)


def test_the_largest_memory_fits_its_bound() -> None:
    memory = ErasureMemory()
    hashes = bytes(8 * (erasure_memory.HASHES_MAX // erasure_memory.ERASURES_MAX))
    for number in range(erasure_memory.ERASURES_MAX):
        names = tuple(AnchorId(digest16("a", number, n)) for n in range(ERASURE_ANCHORS_MAX))
        author = digest16("author", number // 500) * 2
        one = Erasure(digest16(number), NodeId(author[:16]), 0.0, 8, hashes, names, author, bytes(64))
        assert memory.add(one, 0.0, told=True)
    for number in range(erasure_memory.NAMES_MAX):
        memory.add_cut(SequenceId(digest16("s", number)[:8]), number)
    packed = memory.pack(1000.0)
    assert len(memory) == erasure_memory.ERASURES_MAX
    assert 0.5 * PACKED_BYTES_MAX < len(packed) <= PACKED_BYTES_MAX
    again = ErasureMemory()
    again.restore(packed, 5.0)
    assert again.pack(5.0) == packed


NUMBERS = st.lists(st.tuples(st.integers(0, 40), st.floats(0, ERASURE_S), st.booleans()), max_size=30)


@given(NUMBERS, st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2**40)), max_size=9), st.floats(0, 1e6))
def test_what_was_packed_is_restored(
    rows: list[tuple[int, float, bool]], cuts: list[tuple[int, int]], later_s: float
) -> None:
    memory = ErasureMemory()
    for number, age_s, told in rows:
        memory.add(erasure(number, author=number % 3, age_s=age_s), 10.0, told=told)
    for number, start in cuts:
        memory.add_cut(SequenceId(bytes(7) + bytes([number])), start)
        memory.add_name(AnchorId(digest16("name", number)))
    packed = memory.pack(10.0)
    other = ErasureMemory()
    other.restore(packed, 10.0 + later_s)
    assert not other.changed
    assert [each for each, _ in other.told()] == [each for each, _ in memory.told()]
    assert len(other) == len(memory)
    for number, _, _ in rows:
        before, after = (
            memory.get(erasure(number, number % 3).erasure_id),
            other.get(erasure(number, number % 3).erasure_id),
        )
        assert (before is None) == (after is None)
        if before is not None and after is not None:
            assert aged(after, 10.0 + later_s).age_s == pytest.approx(aged(before, 10.0).age_s, abs=1e-3)
    if len(memory):
        for number, _ in cuts:
            assert other.has_name(AnchorId(digest16("name", number)))
            sequence = SequenceId(bytes(7) + bytes([number]))
            cut = min(start for each, start in cuts if each == number)
            assert other.is_behind(sequence, cut + 1) and not other.is_behind(sequence, cut)


@given(st.data())
@settings(max_examples=200)
def test_other_bytes_are_refused_or_harmless(data: st.DataObject) -> None:
    memory = ErasureMemory()
    for number in range(3):
        memory.add(erasure(number), 0.0, told=True)
    memory.add_cut(SequenceId(b"s" * 8), 64)
    packed = bytearray(memory.pack(1.0))
    for _ in range(data.draw(st.integers(1, 3))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(packed[: data.draw(st.integers(0, len(packed)))])
    other = ErasureMemory()
    try:
        other.restore(cut, 0.0)
    except ValueError:
        return
    assert len(other) <= 3


def test_a_flood_of_comparisons_is_answered_within_bounds() -> None:
    """Ids that nobody has, over and over: one answer a second, and nothing is remembered."""
    network, ids = joined(2)
    network.handle(ids[0], ev.EraseRequested(tuple(erasure(n) for n in range(50)), everywhere=True))
    network.run(0.2)
    answers: list[Any] = []
    question = ErasuresKnown(tuple(bytes([n]) * 4096 for n in range(16)))
    for _ in range(100):
        effects = network.nodes[ids[0]].handle(ev.MessageReceived(ids[1], question), network.now)
        answers += [effect for effect in effects if isinstance(effect, ev.SendMessage)]
    assert 1 <= len(answers) <= 2
    assert all(len(e.message.erasures) <= ERASURES_PER_MESSAGE_MAX for e in answers if isinstance(e.message, Forget))
    assert len(network.nodes[ids[0]]._custody.erasing) == 50


def test_erasures_that_no_node_saved_are_refused() -> None:
    with pytest.raises(ValueError, match="no erasures"):
        Node(NodeConfig(), me=record(0), rng=random.Random(0), now=0.0, erasures=b"garbage")
    assert len(make_node(0)._custody.erasing) == 0
