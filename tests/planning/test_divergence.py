"""From what a repaired prompt shows to the divergence that is predicted."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcomm_p2p.planning.divergence import (
    DEVIATION_MIN,
    KL_MIN,
    DivergenceFit,
    RunDeviation,
    Symptoms,
    fit_divergence,
)

deviations = st.floats(1e-3, 3.0)
entropies = st.floats(0.0, 10.0)
coefficients = st.floats(0.0, 4.0)
seen = st.builds(Symptoms, deviations, deviations, entropies, st.floats(0.0, 1.0))
shares = st.floats(0.01, 1.0)
fits = st.builds(
    DivergenceFit,
    st.floats(-8, 2),
    coefficients,
    coefficients,
    st.floats(-0.5, 1.0),
    st.just(0.5),
    st.just(8),
    st.floats(-1.0, 1.0),
)


def test_symptoms_are_root_mean_squares_over_the_prompt() -> None:
    runs = [RunDeviation(0.5, 0.2, 0.1), RunDeviation(0.25, 0.4, 0.3)]
    found = Symptoms.of(runs, entropy=1.5)
    assert found.head == pytest.approx(math.sqrt(0.5 * 0.04 + 0.25 * 0.16))
    assert found.body == pytest.approx(math.sqrt(0.5 * 0.01 + 0.25 * 0.09))
    assert found.entropy == 1.5
    assert found.shifted == 0.0
    assert Symptoms.of([runs[0], replace(runs[1], shifted=True)], 1.5) == replace(found, shifted=pytest.approx(1 / 3))
    assert Symptoms.of([], 1.5) == Symptoms(0.0, 0.0, 1.5)


@settings(deadline=None)
@given(shares, deviations)
def test_a_run_without_head_or_probes_counts_with_the_other(share: float, value: float) -> None:
    both = Symptoms.of([RunDeviation(share, value, value)], 0.0)
    assert Symptoms.of([RunDeviation(share, value, None)], 0.0) == both
    assert Symptoms.of([RunDeviation(share, None, value)], 0.0) == both
    assert Symptoms.of([RunDeviation(share, None, None)], 0.0) == Symptoms(0.0, 0.0, 0.0)


@settings(deadline=None)
@given(fits, seen, st.floats(1.0, 5.0), st.floats(1.0, 5.0))
def test_more_deviation_never_predicts_less(fit: DivergenceFit, one: Symptoms, heads: float, bodies: float) -> None:
    worse = replace(one, head=one.head * heads, body=one.body * bodies)
    assert fit.kl(worse) >= fit.kl(one) > 0


@settings(deadline=None)
@given(fits, st.lists(st.tuples(shares, deviations, deviations), min_size=1, max_size=4), st.data())
def test_what_is_not_a_number_is_predicted_as_none(
    fit: DivergenceFit, runs: list[tuple[float, float, float]], data: st.DataObject
) -> None:
    broken = [list(run) for run in runs]
    broken[data.draw(st.integers(0, len(runs) - 1))][data.draw(st.integers(1, 2))] = math.nan
    assert math.isnan(fit.kl(Symptoms.of([RunDeviation(*run) for run in broken], 1.0)))
    assert math.isnan(fit.kl(Symptoms.of([RunDeviation(*run) for run in runs], math.nan)))


@settings(deadline=None)
@given(fits, entropies)
def test_rounding_is_not_told_apart_and_nothing_overflows(fit: DivergenceFit, entropy: float) -> None:
    assert fit.kl(Symptoms(0.0, 0.0, entropy)) == fit.kl(Symptoms(DEVIATION_MIN, DEVIATION_MIN / 3, entropy))
    assert fit.kl(replace(Symptoms(1e300, 1e300, entropy))) >= fit.kl(Symptoms(1.0, 1.0, entropy))
    steep = replace(fit, body=4.0)
    assert steep.kl(Symptoms(1.0, math.inf, entropy)) > 1e3


def varied(prompts: int, seed: int) -> list[Symptoms]:
    rng = np.random.default_rng(seed)
    return [Symptoms(*np.exp(rng.uniform(-5, 0.5, 2)), rng.uniform(0.1, 8), rng.uniform()) for _ in range(prompts)]


@settings(deadline=None)
@given(fits, st.integers(8, 60), st.integers(0, 99))
def test_the_coefficients_behind_a_divergence_are_found(true: DivergenceFit, prompts: int, seed: int) -> None:
    symptoms = varied(prompts, seed)
    kl = [true.kl(each) for each in symptoms]
    if min(kl) < KL_MIN:
        true = replace(true, intercept=true.intercept - math.log(min(kl) / KL_MIN))
        kl = [true.kl(each) for each in symptoms]
    found = fit_divergence(symptoms, [value * (1 + 1e-12) for value in kl])
    assert found.prompts == prompts and found.spread < 1e-6
    for name in ("intercept", "body", "head", "entropy", "shifted"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), abs=1e-4), name


@settings(deadline=None)
@given(st.integers(8, 40), st.integers(0, 999), st.floats(-3, 3), st.floats(-3, 3), st.floats(0, 2))
def test_no_coefficient_of_a_deviation_is_negative_and_no_other_fit_is_nearer(
    prompts: int, seed: int, body: float, head: float, noise: float
) -> None:
    rng = np.random.default_rng(seed)
    symptoms = varied(prompts, seed)
    target = [body * math.log(s.body) + head * math.log(s.head) + rng.normal(0, noise) for s in symptoms]
    kl = np.exp(np.array(target) - min(target) + math.log(KL_MIN))
    found = fit_divergence(symptoms, kl.tolist())
    assert found.body >= 0 and found.head >= 0

    def error(fit: DivergenceFit) -> float:
        return sum((math.log(value) - math.log(fit.kl(each))) ** 2 for value, each in zip(kl, symptoms, strict=True))

    assert found.spread == pytest.approx(math.sqrt(error(found) / prompts), abs=1e-9)
    for _ in range(20):
        d = rng.normal(0, 0.05, 5)
        other = replace(
            found,
            intercept=found.intercept + d[0],
            body=max(0.0, found.body + d[1]),
            head=max(0.0, found.head + d[2]),
            entropy=found.entropy + d[3],
            shifted=found.shifted + d[4],
        )
        assert error(other) >= error(found) - 1e-9


def test_divergences_below_what_is_told_apart_count_as_that() -> None:
    symptoms = varied(12, 0)
    assert fit_divergence(symptoms, [0.0] * 12) == fit_divergence(symptoms, [KL_MIN] * 12)


def test_nothing_is_fitted_to_too_little_or_to_what_is_broken() -> None:
    symptoms = varied(8, 1)
    with pytest.raises(ValueError, match="7 prompts do not determine"):
        fit_divergence(symptoms[:7], [0.1] * 7)
    for broken in (Symptoms(math.nan, 0.1, 1.0), Symptoms(0.1, 0.1, math.inf)):
        with pytest.raises(ValueError, match="not finite"):
            fit_divergence([*symptoms, broken], [0.1] * 9)
    with pytest.raises(ValueError, match="not finite"):
        fit_divergence(symptoms, [math.nan] * 8)
