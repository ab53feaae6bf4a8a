"""From requests to the rows of the table: one table per workload and mode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvcomm_p2p.evaluation.metrics import interval95
from kvcomm_p2p.evaluation.results import Row
from kvcomm_p2p.evaluation.scores import Failure, Sample, bleu_terms, corpus_bleu

PREDICTED_FLOOR = 1e-3
"""Nats per token. Smaller divergences, predicted or measured, count as this much: nobody acts on their ratio."""

SLIPPED_KL = 0.05
"""Nats per token that the guard must not let pass."""

Combine = Callable[[npt.NDArray[np.float64]], float]
"""The figure, from the sums over all requests."""


_SHARES: dict[str, Callable[[Sample], int]] = {
    "tokens covered by donors": lambda sample: sample.covered_tokens,
    "tokens not recomputed": lambda sample: sample.prompt_tokens - sample.recomputed_tokens,
    "tokens recomputed": lambda sample: sample.recomputed_tokens,
    "tokens possible to cover": lambda sample: sample.possible_tokens,
}


@dataclass(slots=True)
class Case:
    """What was measured of one workload in one mode, in the order in which it was run. Grows while it is measured."""

    workload: str
    mode: str
    score_name: str = ""
    samples: list[Sample] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    @property
    def name(self) -> str:
        """How rows call it."""
        return f"{self.workload}, {self.mode}"


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure over `n` requests with its 95 % interval (None from fewer than 5 tasks)."""

    value: float
    n: int
    ci95: tuple[float, float] | None

    def row(self, case: str, metric: str, unit: str, baseline: float | None = None) -> Row:
        """As a row of the table."""
        return Row(case, metric, self.value, unit, self.n, self.ci95, baseline)


def estimate(
    tasks: Sequence[str], terms: Sequence[Sequence[float] | None], combine: Combine, seed: int
) -> Estimate | None:
    """`combine` of the terms summed over requests (None: a request that has no part in the figure), with a bootstrap
    over tasks: requests of one task depend on each other, so whole tasks are drawn. None if nothing is left."""
    groups: dict[str, list[Sequence[float]]] = {}
    for task, term in zip(tasks, terms, strict=True):
        if term is not None:
            groups.setdefault(task, []).append(term)
    if not groups:
        return None
    sums = np.array([np.sum(group, axis=0) for group in groups.values()], dtype=np.float64)

    def statistic(drawn: npt.NDArray[np.float64]) -> float:
        return combine(sums[drawn.astype(np.intp)].sum(axis=0))

    interval = interval95([float(index) for index in range(len(sums))], statistic, seed)
    return Estimate(combine(sums.sum(axis=0)), sum(map(len, groups.values())), interval)


def rows(case: Case, seed: int) -> list[Row]:
    """The table of one case; a figure that nothing was measured for has no row."""
    table = _hit_rows(case, seed)
    if case.samples:
        # Where nothing was taken over, nothing can differ: such requests would only dilute what reuse costs.
        reused = [sample for sample in case.samples if sample.reused] or case.samples
        kl, top1 = [sample.kl for sample in reused], [sample.top1 for sample in reused]
        table += divergence_rows(case.name, kl, top1, seed, _tasks(reused))
        table += _guard_rows(case.name, [sample for sample in reused if not sample.fallback], seed)
        table += _answer_rows(case.name, reused, seed)
        scores = [(sample.score, sample.dense_score) for sample in case.samples]
        table += _paired_rows(case.name, case.score_name, _tasks(case.samples), scores, seed)
        table += _time_rows(case)
    return table + _failure_rows(case)


def divergence_rows(
    case: str, kl: Sequence[Sequence[float]], top1: Sequence[float], seed: int, tasks: Sequence[str] | None = None
) -> list[Row]:
    """Rows of how far requests (at least one) are from full prefill: per request its KL in nats at each token and its
    share of equal most likely tokens. `tasks`: which requests belong together (default: none do).

    For controls too: under the same names they stand in the same table.
    """
    groups = list(tasks) if tasks is not None else [str(index) for index in range(len(kl))]
    means = [float(np.mean(values)) for values in kl]
    tokens = np.concatenate([np.asarray(values, dtype=np.float64) for values in kl])
    return [
        _mean_row(case, "KL from full prefill, mean", "nats/token", groups, means, seed),
        Row(case, "KL from full prefill, worst request", max(means), "nats/token", len(means)),
        Row(case, "KL from full prefill, p95 of tokens", float(np.percentile(tokens, 95)), "nats", len(tokens)),
        Row(case, "KL from full prefill, largest of tokens", float(tokens.max()), "nats", len(tokens)),
        _mean_row(case, "same most likely token", "", groups, top1, seed),
    ]


def _hit_rows(case: Case, seed: int) -> list[Row]:
    table = []
    parts = {"cold": [s for s in case.samples if s.cold], "steady": [s for s in case.samples if not s.cold]}
    for metric, count in _SHARES.items():
        for part, samples in parts.items():
            terms = [(count(sample), sample.prompt_tokens) for sample in samples]
            found = estimate(_tasks(samples), terms, _percent, seed)
            if found is not None:
                table.append(found.row(case.name, f"{metric}, {part}", "%"))
    if case.samples:
        lengths = [sample.prompt_tokens for sample in case.samples]
        table.append(Row(case.name, "prompt tokens, mean", float(np.mean(lengths)), "", len(lengths)))
    return table


def _guard_rows(case: str, samples: Sequence[Sample], seed: int) -> list[Row]:
    """Of requests that took something over and whose guard had something to compare (it let all of them pass)."""
    watched = [(sample.predicted_kl, sample) for sample in samples if sample.predicted_kl is not None]
    if not watched:
        return []
    factors = [max(predicted, PREDICTED_FLOOR) / max(sample.kl_mean, PREDICTED_FLOOR) for predicted, sample in watched]
    tasks = [sample.task for _, sample in watched]
    near = [100.0 * (1 / 3 <= factor <= 3) for factor in factors]
    slipped = [100.0 * (sample.kl_mean > SLIPPED_KL) for _, sample in watched]
    return [
        _mean_row(case, "guard: predicted KL within a factor of 3", "%", tasks, near, seed),
        Row(case, "guard: predicted over measured KL, median", float(np.median(factors)), "×", len(factors)),
        _mean_row(case, f"guard: passed above {SLIPPED_KL:g} nats/token", "%", tasks, slipped, seed),
    ]


def _answer_rows(case: str, samples: Sequence[Sample], seed: int) -> list[Row]:
    tasks = _tasks(samples)
    longest = float(np.mean([len(sample.dense_answer_ids) for sample in samples]))
    same = [sample.identical_tokens for sample in samples]
    whole = [100.0 * sample.same_answer for sample in samples]
    table = [
        _mean_row(case, "greedy answer: identical tokens, mean", "", tasks, same, seed, longest),
        _mean_row(case, "greedy answer: wholly identical", "%", tasks, whole, seed),
    ]
    if any(sample.dense_answer.strip() for sample in samples):
        terms = [bleu_terms(sample.answer, sample.dense_answer) for sample in samples]
        bleu = estimate(tasks, terms, corpus_bleu, seed)
        table += [] if bleu is None else [bleu.row(case, "BLEU against full prefill's answer", "")]
    copied = [(sample.copied, sample.dense_copied) for sample in samples]
    return [*table, *_paired_rows(case, "answer copied from the prompt", tasks, copied, seed)]


def _paired_rows(
    case: str, metric: str, tasks: Sequence[str], pairs: Sequence[tuple[float | None, float | None]], seed: int
) -> list[Row]:
    """A share of the own answers beside that of full prefill's (None: nothing to measure), and what the pairs differ."""
    both = [None if own is None or dense is None else (own, dense) for own, dense in pairs]
    own = estimate(tasks, [None if pair is None else (pair[0], 1) for pair in both], _percent, seed)
    dense = estimate(tasks, [None if pair is None else (pair[1], 1) for pair in both], _percent, seed)
    change = estimate(tasks, [None if pair is None else (pair[0] - pair[1], 1) for pair in both], _percent, seed)
    if own is None or dense is None or change is None:
        return []
    return [own.row(case, metric, "%", dense.value), change.row(case, f"{metric}: change", "points")]


def _time_rows(case: Case) -> list[Row]:
    table = []
    parts = {"all": case.samples, "steady": [sample for sample in case.samples if not sample.cold]}
    for part, samples in parts.items():
        for percent in (50, 90, 99) if samples else ():
            value = float(np.percentile([sample.ttft_s for sample in samples], percent))
            dense = float(np.percentile([sample.dense_ttft_s for sample in samples], percent))
            metric = f"first token, p{percent}, {part}"
            table.append(Row(case.name, metric, value, "s", len(samples), None, dense, dense / value))
    return table


def _failure_rows(case: Case) -> list[Row]:
    table = []
    if fallbacks := sum(bool(sample.fallback) for sample in case.samples):
        table.append(Row(case.name, "full prefill after all (guard)", fallbacks, "requests", len(case.samples)))
    requests = len(case.samples) + len(case.failures)
    counts = Counter(failure.reason for failure in case.failures)
    table += [Row(case.name, f"failed: {reason}", count, "requests", requests) for reason, count in counts.items()]
    return table


def _mean_row(
    case: str,
    metric: str,
    unit: str,
    tasks: Sequence[str],
    values: Sequence[float],
    seed: int,
    baseline: float | None = None,
) -> Row:
    found = estimate(tasks, [(value, 1) for value in values], lambda sums: float(sums[0] / sums[1]), seed)
    assert found is not None
    return found.row(case, metric, unit, baseline)


def _percent(sums: npt.NDArray[np.float64]) -> float:
    return 100 * float(sums[0] / sums[1])


def _tasks(samples: Sequence[Sample]) -> list[str]:
    return [sample.task for sample in samples]
