"""Time and recall of the position aligner on edit scripts and on repetitive text.

`python benchmarks/alignment.py [--runs N] [--json]`. Times are wall-clock times; processor times of the same calls stand beside
them, because other work on the machine does not stretch those so much. Donors are Zipf ids (49,152 of them). Prompts are the
donors with bursts of tokens replaced, inserted and deleted (mean 8), and one eighth of the prompt moved. Truth is the edit
script: the donor position of every prompt token that was not written by it. `baseline` is RapidFuzz's edit path over the
whole sequences up to 16k tokens, and for repetitive text the time of an edited text of the same length.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import numpy.typing as npt
from rapidfuzz.distance import Levenshtein
from rich.console import Console

from kvcomm_p2p.evaluation.results import Result, Row
from kvcomm_p2p.planning.alignment import align

VOCABULARY = 49_152
BURST_TOKENS = 8
SEED = 0
BASELINE_TOKENS_MAX = 16_384
RUNS = 9
CASES = ((2_048, 0.1), (16_384, 0.02), (16_384, 0.1), (16_384, 0.3), (131_072, 0.1), (131_072, 0.3))

Tokens = npt.NDArray[np.uint32]
Positions = npt.NDArray[np.int64]


def zipf(rng: np.random.Generator, tokens: int) -> Tokens:
    weights = 1 / np.arange(1, VOCABULARY + 1)
    return rng.choice(VOCABULARY, tokens, p=weights / weights.sum()).astype(np.uint32)


def edited(rng: np.random.Generator, tokens: int, share: float) -> tuple[Tokens, Tokens, Positions]:
    """Prompt, donor (`tokens` of them, about `share` of them edited), and each prompt token's true donor position or -1."""
    donor = zipf(rng, tokens)
    parts: list[Tokens] = []
    truth: list[Positions] = []
    at = 0
    while at < tokens:
        end = min(tokens, at + int(rng.geometric(share / BURST_TOKENS)))
        parts.append(donor[at:end])
        truth.append(np.arange(at, end))
        length, kind = int(rng.geometric(1 / BURST_TOKENS)), int(rng.integers(3))
        if kind != 0:  # replaced or inserted
            parts.append(zipf(rng, length))
            truth.append(np.full(length, -1))
        at = end if kind == 1 else end + length
    prompt, positions = np.concatenate(parts), np.concatenate(truth)
    size, begin, aim = len(prompt) // 8, len(prompt) // 4, 3 * len(prompt) // 4
    order = np.r_[:begin, begin + size : aim, begin : begin + size, aim : len(prompt)]
    return prompt[order], donor, positions[order]


def repetitive(tokens: int) -> Iterator[tuple[str, Tokens, Tokens]]:
    """Texts with quadratically many seeds, or with none."""
    rng = np.random.default_rng(SEED)
    text = zipf(rng, tokens)
    one = np.full(tokens, 7, np.uint32)
    two = np.tile(np.array([1, 2], np.uint32), tokens // 2)
    yield "equal", text, text
    yield "nothing shared", text, text + np.uint32(VOCABULARY)
    yield "one token", one, one
    yield "period 2", two, two[1:]
    yield "four letters, unrelated", text % np.uint32(4), zipf(rng, tokens) % np.uint32(4)
    paragraphs = rng.integers(0, VOCABULARY, (tokens // 256, 64)).astype(np.uint32)
    for_each = np.repeat(np.arange(len(paragraphs)), 4)
    prompt, donor = (paragraphs[rng.permutation(for_each)].reshape(-1) for _ in range(2))
    yield "paragraphs, each 4 times, shuffled", prompt, donor


def times_ms(work: Callable[[], object], runs: int) -> tuple[list[float], list[float]]:
    """Wall-clock and processor milliseconds of `runs` calls, after one that is not counted."""
    work()
    wall, processor = [], []
    for _ in range(runs):
        started, started_here = time.perf_counter(), time.thread_time()
        work()
        wall.append((time.perf_counter() - started) * 1e3)
        processor.append((time.thread_time() - started_here) * 1e3)
    return wall, processor


def path_positions(prompt: Tokens, donor: Tokens) -> Positions:
    """The map that a shortest edit path over everything gives."""
    positions = np.full(len(prompt), -1, dtype=np.int64)
    for code in Levenshtein.opcodes(prompt.tolist(), donor.tolist()):
        if code.tag == "equal":
            positions[code.src_start : code.src_end] = np.arange(code.dest_start, code.dest_end)
    return positions


def edit_rows(runs: int) -> Iterator[Row]:
    """Time, and how many tokens have their true donor position or another one."""
    rng = np.random.default_rng(SEED)
    for tokens, share in CASES:
        prompt, donor, truth = edited(rng, tokens, share)
        case = f"{tokens // 1024}k, {share:.0%} edited, block moved"
        times, processor = times_ms(partial(align, prompt, donor), runs)
        median = statistics.median(times)
        baseline = baseline_found = None
        kept = truth >= 0
        if tokens <= BASELINE_TOKENS_MAX:
            path_times, _ = times_ms(partial(path_positions, prompt, donor), min(runs, 3))
            baseline = statistics.median(path_times)
            baseline_found = float((path_positions(prompt, donor) == truth)[kept].mean())
        positions = align(prompt, donor).positions
        yield Row(
            case, "time median", median, "ms", runs, baseline=baseline, ratio=baseline / median if baseline else None
        )
        yield Row(case, "time min", min(times), "ms", runs)
        yield Row(case, "processor time median", statistics.median(processor), "ms", runs)
        found = float((positions == truth)[kept].mean())
        yield Row(case, "unedited tokens at their true position", found, "", int(kept.sum()), baseline=baseline_found)
        other = int(((positions >= 0) & (positions != truth)).sum())
        yield Row(case, "tokens mapped elsewhere (equal ids)", other, "tokens", len(prompt))


def repetitive_rows(runs: int) -> Iterator[Row]:
    """Time beside that of ordinary text, and how much is mapped."""
    for tokens in (16_384, 131_072):
        prompt, donor, _ = edited(np.random.default_rng(SEED), tokens, 0.1)
        normal = statistics.median(times_ms(partial(align, prompt, donor), runs)[1])
        for name, text, other in repetitive(tokens):
            case = f"{tokens // 1024}k, {name}"
            median = statistics.median(times_ms(partial(align, text, other), runs)[1])
            yield Row(case, "processor time median", median, "ms", runs, baseline=normal)
            yield Row(case, "share of tokens mapped", align(text, other).matched / len(text), "", len(text))


def main() -> int:
    parser = argparse.ArgumentParser(description="Time and recall of the position aligner.")
    parser.add_argument("--runs", type=int, default=RUNS, help="timed calls per case")
    parser.add_argument("--json", action="store_true", help="print the results object instead of the table")
    options = parser.parse_args()
    result = Result("bench alignment", [*edit_rows(options.runs), *repetitive_rows(options.runs)], seed=SEED)
    if options.json:
        print(result.to_json())
    else:
        Console().print(result.table())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
