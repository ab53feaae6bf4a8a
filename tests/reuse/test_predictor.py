"""The prefix predictor: features of anything are finite, it learns what can be learned, and its files are trusted only if they
are right."""

from __future__ import annotations

import itertools
import random
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from kvcomm_p2p.protocol.ids import ModelId
from kvcomm_p2p.reuse import predictor as module
from kvcomm_p2p.reuse.predictor import Predictor
from kvcomm_p2p.reuse.predictor_choice import choose, predicted_divergence
from kvcomm_p2p.reuse.predictor_features import FEATURES, RunFeatures, features
from kvcomm_p2p.reuse.predictor_network import PATCH_TOKENS, WINDOW_TOKENS, DeviationNetwork

MODEL = ModelId(b"m" * 16)
UNBOUNDED_S = 1e9
FRESH = Predictor()


def run_of(n: int, *, bare: bool = False) -> RunFeatures:
    return RunFeatures(40, 100, 0 if bare else 60, 0.1, 0.2, 0.6, bare, n)


def example(number: int, n: int = 96) -> tuple[torch.Tensor, torch.Tensor]:
    """A run, and deviations by a law: bare copies are twice as wrong, and so are tokens of one of two kinds."""
    rng = random.Random(number)
    generator = torch.Generator().manual_seed(number)
    kinds = torch.randint(0, 2, (n,), generator=generator)
    vocabulary = torch.randn(2, 2, 4, generator=torch.Generator().manual_seed(99))
    values = vocabulary[kinds].transpose(0, 1)
    bare = rng.random() < 0.5
    x = features(run_of(n, bare=bare), torch.ones(2, n, 4), values)
    return x, 0.05 * (1 + kinds) * (1 + bare) * torch.exp(0.05 * torch.randn(n, generator=generator))


def trained(observations: int, every: int = 3) -> Predictor:
    predictor = Predictor()
    for number in range(observations):
        x, deviations = example(number)
        positions = torch.arange(number % every, len(x), every)
        assert predictor.observe(x, positions, deviations[positions], seconds=UNBOUNDED_S)
    return predictor


odd_floats = st.sampled_from([0.0, 1.0, -3.5, 1e30, -1e38, 1e-40, float("nan"), float("inf"), float("-inf")])


@given(
    n=st.integers(0, 40),
    keys=st.lists(odd_floats, min_size=4, max_size=4),
    values=st.lists(odd_floats, min_size=4, max_size=4),
    counts=st.tuples(*[st.integers(-(2**40), 2**40)] * 3),
    shares=st.tuples(*[st.floats()] * 3),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
@settings(deadline=None)
def test_features_are_finite_whatever_comes(
    n: int,
    keys: list[float],
    values: list[float],
    counts: tuple[int, int, int],
    shares: tuple[float, float, float],
    dtype: torch.dtype,
) -> None:
    rng = random.Random(n)
    run = RunFeatures(*counts, *shares, bare=False, run_tokens=n)
    x = features(
        run,
        torch.tensor([rng.choice(keys) for _ in range(2 * n * 3)]).view(2, n, 3).to(dtype),
        torch.tensor([rng.choice(values) for _ in range(2 * n * 5)]).view(2, n, 5).to(dtype),
    )
    assert x.shape == (n, FEATURES)
    assert x.dtype == torch.float32
    assert bool((x.abs() <= 4).all())
    assert bool(torch.isfinite(FRESH.predict(x)).all())


def test_features_tell_tokens_apart_and_equal_ones_not() -> None:
    values = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(1))
    values[:, 5] = values[:, 2]
    content = features(run_of(6), torch.ones(2, 6, 4), values)[:, 14:]
    assert torch.allclose(content[5], content[2], atol=1e-5)
    assert all(float((content[5] - content[other]).abs().max()) > 0.1 for other in (0, 1, 3, 4))


def test_one_bad_token_spoils_no_other() -> None:
    values = torch.randn(2, 20, 4, generator=torch.Generator().manual_seed(1))
    bad = values.clone()
    bad[0, 7, 1] = float("nan")
    good_rows, bad_rows = (features(run_of(20), torch.ones(2, 20, 4), each)[:, 14:] for each in (values, bad))
    others = [row for row in range(20) if row != 7]
    assert torch.equal(good_rows[others], bad_rows[others])


@pytest.mark.parametrize("shape", [(2, 9, 4), (10, 4), (2, 11, 4)])
def test_features_refuse_another_number_of_tokens(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="layer0_values must be"):
        features(run_of(10), torch.ones(2, 10, 4), torch.ones(shape))


def test_a_fresh_predictor_chooses_the_first_tokens() -> None:
    x, _ = example(0, n=300)
    deviation = Predictor().predict(x)
    assert bool((deviation[1:] < deviation[:-1]).all())
    assert choose(deviation, 32) == [(0, 32)]
    assert torch.equal(deviation, Predictor().predict(x))


def test_a_few_thousand_parameters() -> None:
    assert 1000 < sum(parameter.numel() for parameter in DeviationNetwork().parameters()) < 5000


def test_long_runs_are_read_in_windows() -> None:
    predictor = trained(5)
    x = torch.cat([example(number)[0] for number in range(13)])
    assert len(x) > 2 * WINDOW_TOKENS
    parts = [predictor.predict(part) for part in x.split(WINDOW_TOKENS)]
    assert torch.allclose(predictor.predict(x), torch.cat(parts), rtol=1e-4)


def test_later_patches_do_not_change_earlier_predictions() -> None:
    predictor = trained(5)
    x, _ = example(3)
    changed = x.clone()
    changed[5 * PATCH_TOKENS :] += 0.5
    before, after = predictor.predict(x), predictor.predict(changed)
    assert torch.allclose(before[: 5 * PATCH_TOKENS], after[: 5 * PATCH_TOKENS], rtol=1e-5)
    assert not torch.allclose(before[5 * PATCH_TOKENS :], after[5 * PATCH_TOKENS :], rtol=1e-2)


def test_it_learns_level_and_shape_also_of_tokens_it_was_not_shown() -> None:
    predictor = trained(80)
    assert predictor.observations == 80
    assert predictor.skill is not None
    assert predictor.skill > 0.5
    assert predictor.shape_skill is not None
    assert predictor.shape_skill > 0.5
    x, true = example(1000)
    assert float((predictor.predict(x).log() - true.log()).abs().mean()) < 0.2
    fresh = Predictor()
    assert float((fresh.predict(x).log() - true.log()).abs().mean()) > 0.4


def test_no_skill_where_there_is_nothing_to_learn() -> None:
    predictor = Predictor()
    generator = torch.Generator().manual_seed(0)
    for number in range(60):
        x, _ = example(number)
        noise = torch.exp(torch.randn(len(x), generator=generator))
        predictor.observe(x, torch.arange(len(x)), noise, seconds=UNBOUNDED_S)
    assert predictor.shape_skill is not None
    assert predictor.shape_skill < 0.05


def test_skill_is_unknown_at_first() -> None:
    assert trained(module.SKILL_OBSERVATIONS_MIN - 1).skill is None
    assert trained(module.SKILL_OBSERVATIONS_MIN).skill is not None


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -0.1])
def test_a_bad_observation_changes_nothing(bad: float) -> None:
    predictor = trained(3)
    x, deviations = example(50)
    before = predictor.predict(x)
    deviations[4] = bad
    assert not predictor.observe(x, torch.arange(len(x)), deviations)
    x_bad = x.clone()
    x_bad[0, 0] = float("nan")
    assert not predictor.observe(x_bad, torch.tensor([1]), torch.tensor([0.1]))
    assert predictor.refused == 2
    assert predictor.observations == 3
    assert torch.equal(predictor.predict(x), before)


def test_nothing_observed_is_not_learned_from_nor_refused() -> None:
    predictor = Predictor()
    assert not predictor.observe(example(0)[0], torch.empty(0, dtype=torch.int64), torch.empty(0))
    assert (predictor.observations, predictor.refused) == (0, 0)


@pytest.mark.parametrize(
    ("positions", "count"),
    [
        (torch.tensor([96]), 1),
        (torch.tensor([-1]), 1),
        (torch.tensor([0, 1]), 1),
        (torch.tensor([0.0]), 1),
        (torch.tensor([[0]]), 1),
    ],
)
def test_observations_that_do_not_fit_are_the_callers_mistake(positions: torch.Tensor, count: int) -> None:
    with pytest.raises(ValueError, match="positions must"):
        Predictor().observe(example(0)[0], positions, torch.full((count,), 0.1))


@pytest.mark.parametrize("x", [torch.ones(5, FEATURES + 1), torch.ones(FEATURES), torch.ones(5, FEATURES).half()])
def test_features_that_do_not_fit_are_the_callers_mistake(x: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="features must be"):
        Predictor().predict(x)


def test_it_learns_from_tensors_made_under_inference_mode() -> None:
    with torch.inference_mode():
        predictor = Predictor()
        x, deviations = example(0)
        before = predictor.predict(x)
        assert predictor.observe(x, torch.arange(len(x)), deviations)
        assert not torch.equal(predictor.predict(x), before)


def test_it_learns_on_after_being_loaded_under_inference_mode(tmp_path: Path) -> None:
    path = tmp_path / "predictor.safetensors"
    trained(3).save(path, MODEL)
    with torch.inference_mode():
        loaded, reason = Predictor.load(path, MODEL)
    x, deviations = example(0)
    assert reason == ""
    assert loaded.observe(x, torch.arange(len(x)), deviations)
    assert loaded.predict(x).add_(1.0).shape == (len(x),)


def test_the_same_observations_give_the_same_weights() -> None:
    x, _ = example(77)
    assert torch.equal(trained(10).predict(x), trained(10).predict(x))


def test_learning_ends_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    monkeypatch.setattr(module, "learn", lambda network, optimizer, windows: steps.append(len(windows)))
    predictor = Predictor()
    x, deviations = example(0)
    predictor.observe(x, torch.arange(len(x)), deviations, seconds=0.0, steps_max=100)
    assert len(steps) == 1
    predictor.observe(x, torch.arange(len(x)), deviations, seconds=UNBOUNDED_S, steps_max=7)
    assert len(steps) == 8


def test_what_is_replayed_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REPLAY_WINDOWS_MAX", 5)
    predictor = trained(9)
    assert len(predictor._replay) == 5


def test_predictions_go_on_while_it_learns() -> None:
    predictor = Predictor()
    x, deviations = example(0)
    results: list[bool] = []

    def predict() -> None:
        results.extend(bool(torch.isfinite(predictor.predict(x)).all()) for _ in range(50))

    threads = [threading.Thread(target=predict) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        predictor.observe(x, torch.arange(len(x)), deviations)
    for thread in threads:
        thread.join()
    assert results == [True] * 150


def test_a_predictor_survives_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "predictor.safetensors"
    predictor = trained(20)
    predictor.save(path, MODEL)
    predictor.save(path, MODEL)
    loaded, reason = Predictor.load(path, MODEL)
    x, deviations = example(500)
    assert reason == ""
    assert torch.equal(loaded.predict(x), predictor.predict(x))
    assert (loaded.observations, loaded.skill, loaded.shape_skill) == (20, predictor.skill, predictor.shape_skill)
    assert loaded.observe(x, torch.arange(len(x)), deviations)
    assert loaded.observations == 21
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def damaged(path: Path, how: str) -> None:
    """Rewrites a good file."""
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata())
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    data = path.read_bytes()
    if how == "truncated":
        path.write_bytes(data[: len(data) // 2])
        return
    if how == "garbage":
        path.write_bytes(random.Random(0).randbytes(5000))
        return
    if how == "empty":
        path.write_bytes(b"")
        return
    if how == "huge":
        path.write_bytes(data + bytes(module.FILE_BYTES_MAX))
        return
    if how == "schema":
        metadata["schema"] = "999"
    elif how == "count":
        metadata["observations"] = "-1"
    elif how == "missing":
        del tensors["network.out.bias"]
    elif how == "shape":
        tensors["network.out.bias"] = torch.zeros(2)
    elif how == "dtype":
        tensors["network.out.bias"] = torch.zeros(1, dtype=torch.float64)
    elif how == "nan":
        tensors["network.out.bias"] = torch.full((1,), float("nan"))
    save_file(tensors, path, metadata if how != "metadata" else None)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("truncated", "cannot be read"),
        ("garbage", "cannot be read"),
        ("empty", "cannot be read"),
        ("huge", "larger than any predictor"),
        ("metadata", "has schema None"),
        ("schema", "has schema 999"),
        ("count", "does not say how many"),
        ("missing", "does not hold the tensors"),
        ("shape", "of another shape"),
        ("dtype", "of another shape"),
        ("nan", "not finite"),
    ],
)
def test_bad_files_begin_a_fresh_predictor_with_a_reason(tmp_path: Path, how: str, reason: str) -> None:
    path = tmp_path / "predictor.safetensors"
    trained(3).save(path, MODEL)
    damaged(path, how)
    loaded, why = Predictor.load(path, MODEL)
    x, _ = example(0)
    assert reason in why
    assert loaded.observations == 0
    assert torch.equal(loaded.predict(x), Predictor().predict(x))


def test_files_of_others_and_missing_ones_begin_a_fresh_predictor(tmp_path: Path) -> None:
    path = tmp_path / "predictor.safetensors"
    assert "there is no" in Predictor.load(path, MODEL)[1]
    assert "cannot be read" in Predictor.load(tmp_path, MODEL)[1]
    trained(3).save(path, MODEL)
    loaded, reason = Predictor.load(path, ModelId(b"n" * 16))
    assert "is for model" in reason
    assert loaded.observations == 0


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "predictor.safetensors"
    trained(3).save(path, MODEL)
    before = path.read_bytes()

    def full(self: Path, target: Path) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="no space"):
        trained(4).save(path, MODEL)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


deviations_lists = st.lists(st.floats(0, 10) | st.just(float("nan")), max_size=120)


@given(deviation=deviations_lists, budget=st.integers(0, 140), span_min=st.integers(1, 20))
@settings(max_examples=200, deadline=None)
def test_choices_spend_the_budget_in_spans_and_beat_every_window(
    deviation: list[float], budget: int, span_min: int
) -> None:
    values = torch.tensor(deviation)
    spans = choose(values, budget, span_min)
    tokens = sum(end - start for start, end in spans)
    assert tokens == min(budget, len(deviation))
    assert all(0 <= start < end <= len(deviation) for start, end in spans)
    assert all(left[1] < right[0] for left, right in itertools.pairwise(spans))
    assert all(end - start >= min(span_min, tokens) for start, end in spans)
    finite = torch.nan_to_num(values, nan=0.0).double()
    chosen = sum(float(finite[start:end].sum()) for start, end in spans)
    windows = [float(finite[first : first + tokens].sum()) for first in range(len(deviation) - tokens + 1)]
    assert chosen >= max(windows) - 1e-6


def test_a_peak_worth_a_span_is_found_and_a_small_one_is_not() -> None:
    falling = 0.3 * (1 + torch.arange(400.0)) ** -0.3
    assert choose(falling, 48) == [(0, 48)]
    high, low = falling.clone(), falling.clone()
    high[203:213] = 0.5
    low[203:213] = 0.08
    spans = choose(high, 48)
    assert spans[0][0] == 0
    assert len(spans) == 2
    assert spans[1][0] <= 203
    assert spans[1][1] >= 213
    assert choose(low, 48) == [(0, 48)]


@pytest.mark.parametrize(("budget", "span_min"), [(-1, 8), (3, 0)])
def test_choices_refuse_nonsense(budget: int, span_min: int) -> None:
    with pytest.raises(ValueError, match="may be"):
        choose(torch.ones(10), budget, span_min)


@given(deviation=st.lists(st.floats(0, 10), min_size=1, max_size=80), budget=st.integers(0, 90))
@settings(deadline=None)
def test_recomputing_never_raises_the_predicted_divergence(deviation: list[float], budget: int) -> None:
    values = torch.tensor(deviation)
    nothing = predicted_divergence(values)
    assert nothing == pytest.approx(float(values.double().square().mean()))
    left = predicted_divergence(values, choose(values, budget))
    assert 0 <= left <= nothing
    assert left == pytest.approx(0) or budget < len(deviation)
    assert values.tolist() == torch.tensor(deviation).tolist()


def test_no_tokens_no_divergence() -> None:
    assert predicted_divergence(torch.empty(0)) == 0.0
    assert choose(torch.empty(0), 5) == []
    assert Predictor().predict(torch.empty(0, FEATURES)).shape == (0,)
