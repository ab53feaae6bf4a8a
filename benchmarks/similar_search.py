"""Search of similar fingerprints: medians by size, distance and skew, additions and removals, and SimHash itself.

`python benchmarks/similar_search.py [--json [FILE]] [--seed N]`. Half of the values asked for lie 8 bits from one that is
held, half are unrelated to all. "skewed" bits are 1 with probability 0.3. The baseline is one whole-array numpy
expression over the same values, asked in turn with ours.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console

from kvcomm_p2p.evaluation.results import Result, Row
from kvcomm_p2p.planning.simhash import simhash
from kvcomm_p2p.protocol.similar import SimilarIndex

SIZES = {"10k": 10_000, "100k": 100_000, "1M": 1_000_000}
BITS_MAX = (9, 16)
QUESTIONS = 300
REMOVALS = 100_000
ONE_SHARE = {"random": 0.5, "skewed": 0.3}

Values = npt.NDArray[np.uint64]


def drawn(count: int, one_share: float, rng: np.random.Generator) -> Values:
    """Random fingerprints [count] whose bits are 1 with probability `one_share`."""
    if one_share == 0.5:
        return rng.integers(0, 2**64, count, dtype=np.uint64)
    values = np.zeros(count, np.uint64)
    for bit in range(64):
        values |= (rng.random(count) < one_share).astype(np.uint64) << np.uint64(bit)
    return values


def questions(held: Values, one_share: float, rng: np.random.Generator) -> list[int]:
    near = rng.choice(held, QUESTIONS // 2)
    for at in range(len(near)):
        near[at] ^= np.bitwise_or.reduce(np.uint64(1) << rng.choice(64, 8, replace=False).astype(np.uint64))
    asked = np.concatenate((near, drawn(QUESTIONS - len(near), one_share, rng)))
    return [int(value) for value in rng.permutation(asked)]


def plain(held: Values, value: int, bits_max: int) -> npt.NDArray[np.intp]:
    return np.flatnonzero(np.bitwise_count(held ^ np.uint64(value)) <= bits_max)


def took_s(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def filled(held: Values, case: str) -> tuple[SimilarIndex, list[Row]]:
    """An index of `held` and what filling it took: per addition, and the longest, which merges."""
    index = SimilarIndex()
    longest_s = 0.0
    started = time.perf_counter()
    for entry, value in enumerate(held.tolist()):
        at = time.perf_counter()
        index.add(value, entry)
        longest_s = max(longest_s, time.perf_counter() - at)
    whole_s = time.perf_counter() - started
    rows = [
        Row(case, "additions", len(held) / whole_s, "1/s", len(held)),
        Row(case, "addition_longest", longest_s * 1e3, "ms", len(held)),
    ]
    return index, rows


def search_rows(index: SimilarIndex, held: Values, asked: list[int], case: str) -> list[Row]:
    """Raises AssertionError if a search misses something or finds too much."""
    rows = []
    for bits_max in BITS_MAX:
        ours: list[float] = []
        theirs: list[float] = []
        for value in asked:
            ours.append(took_s(partial(index.search, value, bits_max)))
            theirs.append(took_s(partial(plain, held, value, bits_max)))
            found = sorted(entry for entry, _ in index.search(value, bits_max))
            assert found == plain(held, value, bits_max).tolist(), f"wrong result at {bits_max} bits"
        median_ms, plain_ms = statistics.median(ours) * 1e3, statistics.median(theirs) * 1e3
        ratio = plain_ms / median_ms
        rows.append(Row(case, f"search_{bits_max}_bits", median_ms, "ms", len(asked), None, plain_ms, ratio))
        rows.append(Row(case, f"search_{bits_max}_bits_p90", float(np.quantile(ours, 0.9)) * 1e3, "ms", len(asked)))
    return rows


def removal_row(index: SimilarIndex, case: str, rng: np.random.Generator) -> Row:
    gone = rng.permutation(len(index))[:REMOVALS].tolist()
    started = time.perf_counter()
    for entry in gone:
        index.remove(entry)
    whole_s = time.perf_counter() - started
    return Row(case, "removals", len(gone) / whole_s, "1/s", len(gone))


def simhash_rows(rng: np.random.Generator) -> list[Row]:
    rows = []
    for tokens in (128, 512):
        texts = [rng.integers(0, 49_152, tokens).astype(np.uint32) for _ in range(2_000)]
        times = [took_s(partial(simhash, text, b"key")) for text in texts]
        rows.append(Row(f"{tokens} tokens", "simhash", statistics.median(times) * 1e6, "us", len(times)))
    return rows


def run(seed: int) -> Result:
    rng = np.random.default_rng(seed)
    rows = simhash_rows(rng)
    for kind, one_share in ONE_SHARE.items():
        for name, size in SIZES.items():
            case = f"{name} {kind}"
            held = drawn(size, one_share, rng)
            index, filling = filled(held, case)
            rows += search_rows(index, held, questions(held, one_share, rng), case)
            rows += [*filling, removal_row(index, case, rng)]
    return Result("bench similar_search", rows, seed=seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", nargs="?", const="-", help="the results object on stdout, or in this file")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    result = run(arguments.seed)
    if arguments.json == "-":
        print(result.to_json())
        return
    Console(width=None if sys.stdout.isatty() else 140).print(result.table())
    if arguments.json:
        result.write(Path(arguments.json))


if __name__ == "__main__":
    main()
