"""What each part of the protocol is worth: the same scenario with several seeds, with everything and without each part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace

import msgspec

from kvcomm_p2p.planning.types import ReuseRules
from kvcomm_p2p.sim.agents import Outcome
from kvcomm_p2p.sim.metrics import Observed, Summary, percentile
from kvcomm_p2p.sim.scenario import Scenario
from kvcomm_p2p.sim.study import Figure, Study, named, run_study

WHOLE = "peers"
WORSE_BY = 1.01
"""A seed counts as worse from this ratio of its 99th percentiles on."""


@dataclass(frozen=True, slots=True)
class _Runs:
    """One run of a study, over all seeds."""

    summaries: tuple[Summary, ...]
    outcomes: tuple[Outcome, ...]
    observed: tuple[Observed, ...]

    def mean(self, of: Callable[[Summary], float]) -> float:
        return sum(map(of, self.summaries)) / len(self.summaries)


def runs_of_seeds(
    scenario: Scenario,
    parts: Sequence[str],
    rules: ReuseRules,
    seeds: int,
    *,
    jobs: int = 1,
    done: Callable[[int], None] = lambda seed: None,
) -> list[Study]:
    """The fabric peers whole and without each of the `parts` (names of ablations), with the scenario's seed and those after it,
    in `jobs` processes. `done`: told of every seed that is. Raises ConfigError for what no scenario can be."""
    without = msgspec.structs.replace(scenario, fabrics=(WHOLE,), ablations=tuple(parts))
    without.runs()
    chosen = [msgspec.structs.replace(without, seed=scenario.seed + number) for number in range(seeds)]
    # What is read-only does not travel to other processes.
    rules = replace(rules, repairs=dict(rules.repairs), short=dict(rules.short), short_from=dict(rules.short_from))
    studies: dict[int, Study] = {}
    with ProcessPoolExecutor(max_workers=jobs) as executor:
        futures = {executor.submit(run_study, each, rules): each.seed for each in chosen}
        for future in as_completed(futures):
            studies[futures[future]] = future.result()
            done(futures[future])
    return [studies[each.seed] for each in chosen]


def worth(studies: Sequence[Study]) -> list[Figure]:
    """Studies of one scenario with ablations that differ in their seed, run by run. Times are over the prompts of all seeds and
    compared with the whole protocol (`baseline`; a `ratio` below 1 says by how much it is slower without the part); everything
    else is the mean of the seeds. Raises ValueError without studies or without a run of the whole protocol."""
    if not studies:
        raise ValueError("nothing was simulated")
    runs = {observed.fabric: _runs(studies, number) for number, observed in enumerate(studies[0].observed)}
    if WHOLE not in runs:
        raise ValueError("there is nothing to compare with: peers was not simulated")
    rows: list[Figure] = []
    for name, each in runs.items():
        rows += _rows(f"{studies[0].scenario.name}: {named(name)}", each, runs[WHOLE])
    return rows


def _runs(studies: Sequence[Study], number: int) -> _Runs:
    warmup_s = studies[0].scenario.warmup_s
    observed = tuple(study.observed[number] for study in studies)
    counted = tuple(each for run in observed for each in run.outcomes if each.started_at >= warmup_s)
    return _Runs(tuple(study.summaries()[number] for study in studies), counted, observed)


def _rows(case: str, each: _Runs, whole: _Runs) -> list[Figure]:
    n, seeds = len(each.outcomes), len(each.summaries)
    rows = []
    for metric, of in TIMES.items():
        value, base = of(each.outcomes), None if each is whole else of(whole.outcomes)
        ratio = base / value if base is not None and value > 0 else None
        rows.append(Figure(case, metric, value, "s", n, base, ratio))
    if each is not whole:
        pairs = zip(each.summaries, whole.summaries, strict=True)
        worse = sum(mine.ttft_p99_s > WORSE_BY * theirs.ttft_p99_s for mine, theirs in pairs)
        rows.append(Figure(case, "seeds with a worse p99", float(worse), f"of {seeds}", seeds))
    told = sum(run.busy_told for run in each.observed) / seeds
    rows += [
        Figure(case, "not recomputed", 100 * each.mean(lambda run: run.reused), "%", n),
        Figure(case, "of these behind the same exact prefix", 100 * each.mean(lambda run: run.exact), "%", n),
        Figure(case, "pulled", each.mean(lambda run: run.pulled_bytes) / 1e6, "MB", seeds),
        Figure(
            case, "largest share of bytes from one holder", 100 * each.mean(lambda r: r.served_max_share), "%", seeds
        ),
        Figure(case, "told that a holder is busy", told, "times", seeds),
        Figure(case, "control traffic per node", each.mean(lambda r: r.control_bytes_per_node_s) / 1000, "kB/s", seeds),
    ]
    return rows


def _mean(outcomes: Sequence[Outcome]) -> float:
    return sum(each.ttft_s for each in outcomes) / max(1, len(outcomes))


TIMES: dict[str, Callable[[Sequence[Outcome]], float]] = {
    "first token, mean": _mean,
    "first token, p50": lambda outcomes: percentile([each.ttft_s for each in outcomes], 50),
    "first token, p99": lambda outcomes: percentile([each.ttft_s for each in outcomes], 99),
    "waiting for blocks, p99": lambda outcomes: percentile([each.pull_s for each in outcomes], 99),
}
