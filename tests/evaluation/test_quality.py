"""What the table of methods says, and that the measurement behind it runs on a tiny model."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from kvcomm_p2p.errors import ConfigError, UsageError
from kvcomm_p2p.evaluation.cases import Scenario
from kvcomm_p2p.evaluation.methods import Outcome
from kvcomm_p2p.evaluation.metrics import Divergence
from kvcomm_p2p.evaluation.quality import SHARES, run, table
from kvcomm_p2p.evaluation.results import Row
from kvcomm_p2p.model.spec import Profile
from kvcomm_p2p.planning.divergence import DivergenceFit
from kvcomm_p2p.planning.types import Provenance, Repair

TIMES = "times less KL than the first tokens"


def outcome(kl: float, cost: float = 0.1) -> Outcome:
    return Outcome(Divergence((kl,), 0.75, 1, None), cost)


def rows_of(rows: list[Row], case: str) -> dict[str, Row]:
    return {row.metric: row for row in rows if row.case == f"{Scenario.ROLE.value}: {case}"}


def test_the_table_tells_divergence_agreement_and_cost() -> None:
    rows = rows_of(table(Scenario.ROLE, {"rotation only": [outcome(0.02), outcome(0.04, 0.3)]}, 0), "rotation only")
    assert {metric: (round(row.value, 6), row.unit, row.n) for metric, row in rows.items()} == {
        "KL from full prefill, mean": (0.03, "nats/token", 2),
        "KL, worst prompt": (0.04, "nats/token", 2),
        "same most likely token": (0.75, "", 2),
        "reusable tokens recomputed": (20.0, "%", 2),
    }


def test_a_method_is_compared_with_the_first_tokens_at_the_same_share_prompt_by_prompt() -> None:
    measured = {
        "first tokens, 10%": [outcome(0.04), outcome(0.04), outcome(0.09)],
        "first tokens, 30%": [outcome(0.001)] * 3,
        "oracle, 10%": [outcome(0.02), outcome(0.01), None],
        "first 16, probes and shift, 10%": [outcome(0.04), None, outcome(0.01)],
        "rotation only": [outcome(0.5)] * 3,
    }
    rows = table(Scenario.ROLE, measured, 0)
    times = {row.case.partition(": ")[2]: (row.value, row.n) for row in rows if row.metric == TIMES}
    assert times == {
        "oracle, 10%": (pytest.approx(8**0.5), 2),
        "first 16, probes and shift, 10%": (pytest.approx(3.0), 2),
    }


def test_the_interval_of_a_ratio_is_one_of_ratios() -> None:
    base = [outcome(0.04 * (1 + i % 3)) for i in range(9)]
    half = [outcome(each.divergence.kl_mean / (1.6, 2.0, 2.5)[i // 3]) for i, each in enumerate(base)]
    [row] = [r for r in table(Scenario.ROLE, {"first tokens, 10%": base, "ours, 10%": half}, 0) if r.metric == TIMES]
    assert row.value == pytest.approx(2.0) and row.ci95 is not None
    assert 1.6 <= row.ci95[0] < 2.0 < row.ci95[1] <= 2.5


@pytest.fixture(scope="module")
def calibrated(word_runner: Any) -> Any:
    """With a profile that lets everything of a role pass, and nothing else."""
    fit = DivergenceFit(math.log(1e-3), 0.0, 0.0, 0.0, 0.0, 8)
    profile = Profile(64, MappingProxyType({Provenance.ROLE: (Repair(8, kl=1e-3),)}), fit, "for tests")
    runner = copy.copy(word_runner)
    runner.spec = replace(word_runner.spec, profile=profile)
    return runner


def test_every_method_is_measured_on_held_out_prompts(calibrated: Any) -> None:
    result = run(model=calibrated, prompts=5, tokens=2, scenarios=[Scenario.ROLE])
    [share] = SHARES[Scenario.ROLE]
    label = f"{share:.0%}"
    named = {row.case for row in result.rows}
    expected = {"noise: full prefill in two halves", "rotation only", "control: no rotation", "control: wrong blocks"}
    expected |= {"kvcomm balanced", "kvcomm fast", "KVCOMM's anchors", "nearest tokens' deviations"}
    expected |= {f"{name}, {label}" for name in ("first tokens", "random tokens", "first 32, probes and shift")}
    assert {f"{Scenario.ROLE.value}: {name}" for name in expected} <= named
    rows = list(result.rows)
    kl = {name: rows_of(rows, name)["KL from full prefill, mean"] for name in expected}
    assert kl["noise: full prefill in two halves"].value < 1e-7
    assert kl["rotation only"].n == 5 and kl["KVCOMM's anchors"].n == 1
    cost = {name: rows_of(rows, name)["reusable tokens recomputed"].value for name in expected}
    assert cost["rotation only"] == 0 and cost[f"first tokens, {label}"] == pytest.approx(100 * share, abs=0.3)
    assert 0 < cost["kvcomm balanced"] < 10
    assert json.loads(result.to_json())["command"] == "bench quality"


def test_what_the_profile_does_not_allow_is_full_prefill(calibrated: Any) -> None:
    result = run(model=calibrated, prompts=1, tokens=2, scenarios=[Scenario.BARE])
    ours = [row for row in result.rows if "kvcomm" in row.case]
    assert {row.value for row in ours if row.metric == "reusable tokens recomputed"} == {100.0}
    assert {row.value for row in ours if row.metric.startswith("KL")} == {0.0}
    assert any(row.case.endswith("rotation only") and row.value > 0 for row in result.rows)


def test_without_a_profile_only_the_methods_are_measured(word_runner: Any) -> None:
    result = run(model=word_runner, prompts=1, tokens=2, scenarios=[Scenario.NEAR])
    assert result.rows and not [row for row in result.rows if "kvcomm" in row.case]


def test_too_few_problems_are_told_before_anything_is_measured(word_runner: Any, tmp_path: Path) -> None:
    problems = tmp_path / "gsm8k.jsonl"
    problems.write_text('{"question": "One and one?", "answer": "Two."}\n')
    with pytest.raises(UsageError, match="3 problems are needed, 1 were given"):
        run(model=word_runner, prompts=3, scenarios=[Scenario.LONG, Scenario.SHORT], gsm8k=problems)
    with pytest.raises(ConfigError, match=r"none\.jsonl cannot be read"):
        run(model=word_runner, gsm8k=tmp_path / "none.jsonl")


def test_models_whose_keys_cannot_be_moved_are_refused(word_runner: Any) -> None:
    unmovable = copy.copy(word_runner)
    unmovable.spec = replace(word_runner.spec, rotary=None, exact_only_reason="learned positions")
    with pytest.raises(UsageError, match="learned positions"):
        run(model=unmovable)


def test_every_scenario_has_a_budget() -> None:
    assert set(SHARES) == set(Scenario)
