"""The hand-made reuse path on a tiny model, and the judgement that makes a profile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvcomm_p2p.errors import KVCommError, UsageError
from kvcomm_p2p.evaluation import quality
from kvcomm_p2p.evaluation.metrics import Divergence
from kvcomm_p2p.evaluation.quality import Measured, Outcome, judge, measure, measure_profile, rows
from kvcomm_p2p.evaluation.transplant import Variant, copy_donor, plan_reuse, transplant
from kvcomm_p2p.model.profiles import load_profile
from kvcomm_p2p.planning.types import Mode, ReuseRules

RULES = ReuseRules(approximate=True, reason="", head_tokens=32, run_tokens_min=64)
DOCUMENT = np.array([3 + (17 * index + index // 7) % 250 for index in range(300)], dtype=np.uint32)


def prompt(prefix: int, suffix: int) -> np.ndarray:
    """DOCUMENT behind `prefix` tokens that depend on their number, before `suffix` others."""
    front = [3 + (prefix + 5 * index) % 250 for index in range(prefix)]
    back = [3 + (suffix + 3 * index) % 250 for index in range(suffix)]
    return np.concatenate([front, DOCUMENT, back]).astype(np.uint32)


def donor_of(runner: Any, ids: np.ndarray) -> Any:
    cache = runner.new_cache(len(ids))
    runner.prefill(ids.astype(np.int64), cache)
    return copy_donor(runner, ids, cache)


def full(runner: Any, ids: np.ndarray) -> Any:
    cache = runner.new_cache(len(ids))
    return cache, runner.prefill(ids.astype(np.int64), cache)


def test_exact_prefix_gives_the_bits_of_the_donor_and_the_logits_of_full_prefill(chat_runner: Any) -> None:
    copy = donor_of(chat_runner, prompt(40, 21))
    ids = prompt(40, 33)
    plan = plan_reuse(chat_runner, ids, copy, Mode.EXACT, ReuseRules(approximate=False, reason="exact"))
    filled = transplant(chat_runner, ids, plan, copy, Variant.REPAIRED)
    cache, logits = full(chat_runner, ids)
    assert filled.recomputed_tokens == 33
    assert filled.residual is None
    torch.testing.assert_close(filled.logits, logits, atol=1e-4, rtol=0)
    torch.testing.assert_close(filled.cache.keys[:, :, :, : len(ids)], cache.keys[:, :, :, : len(ids)])


def test_layer_0_of_a_rotated_run_equals_full_prefill_and_an_unrotated_one_does_not(chat_runner: Any) -> None:
    copy = donor_of(chat_runner, prompt(70, 9))
    ids = prompt(41, 12)
    plan = plan_reuse(chat_runner, ids, copy, Mode.BALANCED, RULES)
    true = full(chat_runner, ids)[0].keys[0, :, :, : len(ids)]
    rotated = transplant(chat_runner, ids, plan, copy, Variant.ROTATED).cache.keys[0, :, :, : len(ids)]
    unrotated = transplant(chat_runner, ids, plan, copy, Variant.UNROTATED).cache.keys[0, :, :, : len(ids)]
    torch.testing.assert_close(rotated, true, atol=1e-4, rtol=1e-4)
    assert float((unrotated - true).abs().max()) > 0.1


def test_head_is_recomputed_except_in_rotation_only(chat_runner: Any) -> None:
    copy = donor_of(chat_runner, prompt(70, 9))
    ids = prompt(41, 12)
    plan = plan_reuse(chat_runner, ids, copy, Mode.BALANCED, RULES)
    repaired = transplant(chat_runner, ids, plan, copy, Variant.REPAIRED)
    rotated = transplant(chat_runner, ids, plan, copy, Variant.ROTATED)
    assert repaired.recomputed_tokens - rotated.recomputed_tokens == 32
    assert repaired.residual is not None and rotated.residual is None


def test_wrong_blocks_have_the_larger_residual(chat_runner: Any) -> None:
    copy = donor_of(chat_runner, prompt(70, 9))
    ids = prompt(41, 12)
    plan = plan_reuse(chat_runner, ids, copy, Mode.BALANCED, RULES)
    good, wrong = (transplant(chat_runner, ids, plan, copy, v) for v in (Variant.REPAIRED, Variant.WRONG_BLOCKS))
    assert good.residual is not None and wrong.residual is not None
    assert wrong.residual > good.residual


def test_a_plan_without_donor_is_refused(chat_runner: Any) -> None:
    copy = donor_of(chat_runner, prompt(70, 9))
    ids = np.array([5, 6, 7, 8] * 20, dtype=np.uint32)
    plan = plan_reuse(chat_runner, ids, copy, Mode.BALANCED, RULES)
    with pytest.raises(UsageError, match="no run"):
        transplant(chat_runner, ids, plan, copy, Variant.REPAIRED)


def test_a_cache_shorter_than_the_prompt_is_no_donor(chat_runner: Any) -> None:
    with pytest.raises(UsageError, match="holds 0"):
        copy_donor(chat_runner, DOCUMENT, chat_runner.new_cache(8))


def test_measure_fills_every_variant_and_exact_answers_do_not_differ(chat_runner: Any) -> None:
    measured = measure(chat_runner, documents=2, roles=2, tokens=4, document_tokens=(300, 400))
    assert {len(outcomes) for outcomes in measured.reused.values()} == {4}
    assert all(outcome.divergence.identical_tokens == outcome.divergence.tokens for outcome in measured.exact)
    table = rows(measured, seed=0)
    [differ] = [row.value for row in table if row.metric == "answers that differ"]
    assert differ == 0
    shares = {row.case: row.value for row in table if row.metric == "prompt tokens recomputed, mean"}
    assert 0 < shares[Variant.ROTATED.value] < shares[Variant.REPAIRED.value] < 100


def outcome(kl: float, residual: float | None) -> Outcome:
    return Outcome(500, 100, Divergence((kl,), 1.0, 1, None), residual)


def measured_with(good: list[Outcome], wrong: float) -> Measured:
    return Measured({Variant.REPAIRED: good, Variant.WRONG_BLOCKS: [outcome(1.0, wrong)]}, [])


def test_profile_takes_the_largest_residual_among_good_prompts_with_the_margin() -> None:
    prompts = [outcome(0.001, 0.05 + 0.005 * index) for index in range(20)] + [outcome(0.03, 0.4)]
    profile = judge(measured_with(prompts, wrong=0.9), "tiny")
    assert profile.residual_max == pytest.approx(1.5 * 0.145)
    assert "21 prompts" in profile.measured


@pytest.mark.parametrize(
    ("prompts", "wrong", "reason"),
    [
        ([outcome(0.05, 0.1)] * 25, 0.9, "nats/token, more than"),
        ([outcome(0.001, 0.1)] * 19, 0.9, "only 19 prompts"),
        ([outcome(0.001, 0.7)] * 25, 0.9, "cannot tell good from wrong"),
    ],
)
def test_no_profile_without_enough_quality(prompts: list[Outcome], wrong: float, reason: str) -> None:
    with pytest.raises(KVCommError, match=reason):
        judge(measured_with(prompts, wrong), "tiny")


def test_measured_profile_is_written_for_this_model_only(
    chat_runner: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [outcome(0.001, 0.1)] * 20
    monkeypatch.setattr(quality, "measure", lambda *_, **__: measured_with(prompts, wrong=0.9))
    profile = measure_profile(chat_runner, tmp_path / "tiny.json")
    assert load_profile(chat_runner.spec.model_id, [tmp_path]) == profile
    monkeypatch.setattr(quality, "measure", lambda *_, **__: measured_with(prompts, wrong=0.1))
    with pytest.raises(KVCommError):
        measure_profile(chat_runner, tmp_path / "other.json")
    assert not (tmp_path / "other.json").exists()


def test_models_whose_keys_cannot_be_moved_are_refused(chat_runner: Any) -> None:
    class Unmovable:
        spec = replace(chat_runner.spec, rotary=None, exact_only_reason="learned positions")

    with pytest.raises(UsageError, match="learned positions"):
        measure(Unmovable())  # type: ignore[arg-type]
