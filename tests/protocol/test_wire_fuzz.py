"""Mutated frames: only WireError escapes the codec, nothing escapes a node, and memory stays bounded."""

from __future__ import annotations

import random
import resource
import tracemalloc
from pathlib import Path

import pytest
from test_wire import SAMPLES
from wire_fuzz import BOMBS, Mutator, Victim, originals

from kvcomm_p2p.protocol import messages as m
from kvcomm_p2p.protocol import wire

FRAMES = 200_000
RSS_GROWTH_MAX = 64 << 20
DECODE_BYTES_MAX = 40 << 20
"""While one frame is decoded. The worst is 6 kB of array headers: MessagePack makes room for the 4,095 entries of each of
1,024 nested arrays (8 bytes per entry) before it finds that they are missing."""


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.timeout(300)
def test_mutated_frames_never_raise_anything_else_and_never_break_a_node() -> None:
    mutator = Mutator(originals(), random.Random(1))
    victim = Victim()
    before = 0
    for count in range(FRAMES):
        if count == FRAMES // 10:  # tables are full by now
            before = rss_bytes()
        victim.take(mutator.frame())
    assert rss_bytes() - before < RSS_GROWTH_MAX
    # The test tests something: a good part gets past the codec, and something of every kind.
    assert sum(victim.decoded.values()) > FRAMES // 10
    assert set(victim.decoded) == {type(message).__name__ for message in SAMPLES.values()}
    stats = victim.node.stats()
    assert stats.violations > 0
    assert stats.peers_known <= 64


@pytest.mark.parametrize("bomb", BOMBS, ids=range(len(BOMBS)))
def test_bombs_cost_no_memory(bomb: bytes) -> None:
    frame = wire.MAGIC + bytes([m.PROTOCOL_VERSION]) + bytes(16) + bomb
    tracemalloc.start()
    try:
        with pytest.raises(wire.WireError):
            wire.decode(frame)
        assert tracemalloc.get_traced_memory()[1] < DECODE_BYTES_MAX
    finally:
        tracemalloc.stop()


def test_equal_seeds_give_equal_frames() -> None:
    first, second = (Mutator(originals(), random.Random(7)) for _ in range(2))
    assert [first.frame() for _ in range(2000)] == [second.frame() for _ in range(2000)]
