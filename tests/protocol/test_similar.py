"""The index of similar values: what a plain search finds, at all times, by tables as well as by scanning."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcomm_p2p.protocol import similar
from kvcomm_p2p.protocol.similar import ENTRY_MAX, SimilarIndex

ALL_ONES = 2**64 - 1


def plainly(pairs: dict[int, int], value: int, bits_max: int) -> list[tuple[int, int]]:
    near = [((held ^ value).bit_count(), entry) for entry, held in pairs.items()]
    return [(entry, distance) for distance, entry in sorted(near) if distance <= bits_max]


def flipped(value: int, bits: int, rng: np.random.Generator) -> int:
    """`value` with `bits` different bits."""
    return value ^ sum(1 << int(bit) for bit in rng.choice(64, bits, replace=False))


def small(monkeypatch: pytest.MonkeyPatch, tail: int) -> None:
    """Merge after `tail` additions, use tables however few values they hold, scan in several steps."""
    monkeypatch.setattr(similar, "TAIL_MIN", tail)
    monkeypatch.setattr(similar, "_SCANNED_PER_CANDIDATE", 1e-6)
    monkeypatch.setattr(similar, "_SCAN_VALUES", 7)


SOME_BITS = 0x9111_1111_1911_1119
"""Twenty bits, some in every piece."""

values = st.integers(0, ALL_ONES).map(lambda drawn: (ALL_ONES if drawn & 2 else 0) ^ (drawn & SOME_BITS))
entries = st.integers(0, 7) | st.just(ENTRY_MAX)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("add"), values, entries),
        st.tuples(st.just("remove"), st.just(0), entries),
        st.tuples(st.just("search"), values, st.sampled_from([0, 1, 2, 3, 5, 7, 9, 11, 13, 15, 16, 20, 40, 64])),
    ),
    min_size=20,
    max_size=80,
)


@pytest.mark.parametrize("tail", [0, 3, 1000])
def test_it_finds_what_a_plain_search_finds(tail: int, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, tail)

    @given(operations)
    @settings(deadline=None, max_examples=80)
    def histories(steps: list[tuple[str, int, int]]) -> None:
        index, pairs = SimilarIndex(), dict[int, int]()
        for action, value, number in steps:
            if action == "search":
                assert index.search(value, number) == plainly(pairs, value, number)
            elif action == "remove":
                index.remove(number)
                pairs.pop(number, None)
            elif number in pairs:
                with pytest.raises(ValueError, match="already"):
                    index.add(value, number)
            else:
                index.add(value, number)
                pairs[number] = value
            assert len(index) == len(pairs)
        assert index.search(0, 64) == plainly(pairs, 0, 64)

    histories()


@pytest.mark.parametrize("bits_max", range(0, 18))
def test_tables_miss_nothing_wherever_the_bits_differ(bits_max: int, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, 100)
    rng = np.random.default_rng(bits_max)
    center = int(rng.integers(0, 2**63))
    index, pairs = SimilarIndex(), dict[int, int]()
    # Around the very limit of the distance, the differing bits anywhere.
    for entry in range(1_500):
        pairs[entry] = flipped(center, int(rng.integers(max(0, bits_max - 3), bits_max + 4)), rng)
        index.add(pairs[entry], entry)
    by_tables = similar._from_tables(index._main, center, bits_max)
    assert (by_tables is None) == (bits_max > 15)
    assert index.search(center, bits_max) == plainly(pairs, center, bits_max)
    assert 0 < len(index.search(center, bits_max)) < len(pairs)


def test_crowded_buckets_are_scanned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(similar, "TAIL_MIN", 8_000)
    rng = np.random.default_rng(0)
    index, pairs = SimilarIndex(), dict[int, int]()
    for entry in range(9_000):
        pairs[entry] = int(rng.integers(0, 2**63)) if entry < 4_000 else 7
        index.add(pairs[entry], entry)
    assert similar._from_tables(index._main, 7, 9) is None
    assert similar._from_tables(index._main, 2**63 - 1, 9) is not None
    for value in (7, 2**63 - 1, pairs[0]):
        assert index.search(value, 9) == plainly(pairs, value, 9)
    assert index.search(7, 9, limit=3) == [(4_000, 0), (4_001, 0), (4_002, 0)]


@given(st.lists(values, max_size=40), values, st.integers(0, 64), st.integers(0, 50))
@settings(deadline=None)
def test_a_limit_keeps_the_nearest(held: list[int], value: int, bits_max: int, limit: int) -> None:
    index = SimilarIndex()
    for entry, each in enumerate(held):
        index.add(each, entry)
    assert index.search(value, bits_max, limit) == index.search(value, bits_max)[:limit]


def test_results_do_not_depend_on_the_order_of_additions(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, 20)
    rng = np.random.default_rng(4)
    pairs = {entry: flipped(99, int(rng.integers(0, 12)), rng) for entry in range(200)}
    found = []
    for order in (rng.permutation(200), rng.permutation(200)):
        index = SimilarIndex()
        for entry in order.tolist():
            index.add(pairs[entry], entry)
        found.append(index.search(99, 9))
    assert found[0] == found[1] == plainly(pairs, 99, 9)


def test_memory_is_bounded_while_values_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, 50)
    index = SimilarIndex()
    largest = 0
    for entry in range(5_000):
        index.add(entry * 0x9E3779B97F4A7C15 % 2**64, entry)
        index.remove(entry - 100)
        largest = max(largest, len(index._main.entries))
    assert len(index) == 100
    assert largest <= 300


BAD_PAIRS = [("add", pair) for pair in ((-1, 0), (2**64, 0), (0, -1), (0, ENTRY_MAX + 1))]
BAD_QUESTIONS = [("search", pair) for pair in ((-1, 9), (2**64, 9), (0, -1), (0, 65))]


@pytest.mark.parametrize(("method", "arguments"), [*BAD_PAIRS, *BAD_QUESTIONS])
def test_numbers_out_of_range_are_refused(method: str, arguments: tuple[Any, ...]) -> None:
    index = SimilarIndex()
    with pytest.raises(ValueError, match="out of range"):
        getattr(index, method)(*arguments)
    assert len(index) == 0
    assert index.search(0, 64) == []
