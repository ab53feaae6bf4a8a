"""What measurements make a profile, what they do not allow, and where it goes."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcomm_p2p.errors import KVCommError, UsageError
from kvcomm_p2p.evaluation import calibrate
from kvcomm_p2p.evaluation.calibrate import (
    KINDS,
    KL_USEFUL,
    OPTIONS,
    PROMPTS_MIN,
    SEVERAL,
    Sample,
    _useful,
    describe,
    judge,
    measure,
    profile_path,
    rows,
)
from kvcomm_p2p.evaluation.cases import LENGTH_MIN, Scenario
from kvcomm_p2p.evaluation.methods import Outcome
from kvcomm_p2p.evaluation.metrics import Divergence
from kvcomm_p2p.model.profiles import load_profile
from kvcomm_p2p.planning.divergence import Symptoms
from kvcomm_p2p.planning.plan import KL_MAX, KL_TARGET
from kvcomm_p2p.planning.types import Mode, Provenance, Repair
from kvcomm_p2p.reuse.rules import profile_rules

WRONG = [Symptoms(head=1.2, body=1.1, entropy=2.0)] * 3
SHARE = 0.8

Measured = tuple[list[Sample], list[Symptoms]]


def sample(scenario: Scenario, repair: Repair, kl: float, entropy: float = 2.0) -> Sample:
    """A prompt whose deviations fit its divergence: kl is the square of the body's."""
    seen = Symptoms(head=2 * kl**0.5, body=kl**0.5, entropy=entropy)
    tokens = 400 * repair.probe_share + repair.head_tokens
    shares = {KINDS.get(scenario, (Provenance.ROLE,))[-1]: SHARE}
    return Sample(scenario, repair, Outcome(Divergence((kl,), 1.0, 1, None), 0.1, seen), shares, tokens)


def measured(kl: dict[Scenario, float], prompts: int = 4) -> list[Sample]:
    """`kl` with the smallest head; half of that with twice the head, and so on, a little different for each prompt."""
    return [
        sample(scenario, repair, SHARE * first * (1 + 0.01 * number) / (repair.head_tokens / 8), entropy=2.0 + number)
        for scenario, first in kl.items()
        for number in range(prompts)
        for repair in OPTIONS
    ]


def test_repairs_are_kept_from_cheap_to_good_with_what_they_leave_of_a_wholly_reused_prompt() -> None:
    profile = judge(measured({Scenario.NEAR: 0.004, Scenario.ROLE: 0.02}, prompts=9), WRONG, "tiny")
    assert set(profile.repairs) == {Provenance.SAME, Provenance.NEAR, Provenance.ROLE}
    assert profile.repairs[Provenance.SAME] == profile.repairs[Provenance.NEAR]
    role = profile.repairs[Provenance.ROLE]
    # The probes of the others cost more than a head of 96 and, here, leave more.
    assert [replace(repair, kl=0.0) for repair in role] == [Repair(head) for head in (8, 32, 64, 96)]
    for repair in role:
        assert repair.kl == pytest.approx(0.02 * 1.04 / (repair.head_tokens / 8), rel=1e-3)
    assert profile.run_tokens_min == LENGTH_MIN
    assert "18 prompts" in profile.measured and "role 0.0017" in profile.measured


def test_what_leaves_too_much_is_not_kept() -> None:
    kl = {Scenario.ROLE: 0.004, Scenario.BARE: 1.5 * KL_USEFUL, Scenario.OTHER: 20 * KL_USEFUL}
    profile = judge(measured(kl), WRONG, "tiny")
    assert set(profile.repairs) == {Provenance.ROLE, Provenance.BARE}
    assert [repair.head_tokens for repair in profile.repairs[Provenance.BARE]] == [32, 64, 96]
    assert all(repair.kl <= KL_USEFUL for options in profile.repairs.values() for repair in options)


def test_prompts_of_several_kinds_of_copies_tell_what_each_brings() -> None:
    brings = {Provenance.ROLE: 0.004, Provenance.BARE: 0.03, Provenance.OTHER: 0.0}
    mixed = [
        {Provenance.ROLE: 0.9},
        {Provenance.BARE: 0.8},
        {Provenance.ROLE: 0.2, Provenance.BARE: 0.6},
        {Provenance.BARE: 0.3, Provenance.OTHER: 0.5},
    ]
    samples = [
        replace(
            sample(Scenario.REORDERED, OPTIONS[0], sum(brings[p] * share for p, share in shares.items())), shares=shares
        )
        for shares in mixed * 3
    ]
    found = {provenance: repair.kl for provenance, [repair] in _useful(samples).items()}
    assert found == pytest.approx(brings, abs=2e-6)


def test_what_edits_bring_is_not_put_down_to_the_context() -> None:
    samples = measured({Scenario.ROLE: 0.004}, prompts=9)
    edited = [
        replace(each, scenario=Scenario.EDITED, outcome=sample(Scenario.ROLE, each.repair, 0.04).outcome)
        for each in samples
    ]
    assert judge([*samples, *edited], WRONG, "tiny").repairs == judge(samples, WRONG, "tiny").repairs


def test_the_fit_predicts_what_was_measured() -> None:
    samples = measured({Scenario.ROLE: 0.02, Scenario.BARE: 0.04})
    profile = judge(samples, WRONG, "tiny")
    for each in samples:
        assert each.outcome.symptoms is not None
        assert profile.divergence.kl(each.outcome.symptoms) == pytest.approx(each.kl, rel=1e-3)
    assert profile.divergence.kl(WRONG[0]) > KL_MAX[Mode.FAST]


@pytest.mark.parametrize(
    ("samples", "wrong", "reason"),
    [
        (
            measured({Scenario.ROLE: 50 * KL_USEFUL, Scenario.BARE: 0.01}),
            WRONG,
            "no repair keeps 0.05 nats/token on tiny",
        ),
        (measured({Scenario.ROLE: 0.02}, PROMPTS_MIN - 1), WRONG, "7 prompts were compared, 8 are needed"),
        (measured({Scenario.ROLE: 0.02}, 9), [], "measure more of them"),
        (measured({Scenario.ROLE: 0.02}, 9), [*WRONG, Symptoms(0.1, 0.1, 2.0)], "cannot tell wrong blocks from good"),
        (measured({Scenario.ROLE: 0.02}, 9), [Symptoms(math.nan, 1.0, 2.0)], "cannot tell wrong blocks from good"),
    ],
)
def test_no_profile_without_enough_quality(samples: list[Sample], wrong: list[Symptoms], reason: str) -> None:
    with pytest.raises(KVCommError, match=reason):
        judge(samples, wrong, "tiny")


def test_rows_tell_every_repair_of_every_kind_and_how_well_is_predicted() -> None:
    samples = measured({Scenario.ROLE: 0.02, Scenario.BARE: 0.04}, 6)
    table = rows(samples, WRONG, judge(samples, WRONG, "tiny"))
    kl = {row.case: row for row in table if row.metric == "KL from full prefill, mean"}
    assert list(kl) == [f"{s.value}: {describe(r)}" for s in (Scenario.ROLE, Scenario.BARE) for r in OPTIONS]
    first = kl[f"{Scenario.ROLE.value}: head 8"]
    assert (first.n, first.value) == (6, pytest.approx(SHARE * 0.02 * 1.025))
    assert first.ci95 is not None and first.ci95[0] < first.value < first.ci95[1]
    guard = {row.metric: row.value for row in table if row.case == "guard"}
    assert guard["predicted within a factor of 3"] == 100
    assert guard["least prediction for wrong blocks"] > KL_MAX[Mode.FAST]


def test_repairs_are_described_in_a_few_words() -> None:
    assert describe(Repair(8)) == "head 8"
    assert describe(Repair(16, 0.1)) == "head 16, probes 10%"
    assert describe(Repair(32, 0.2, True, 0.004)) == "head 32, probes 20% and shift"


def test_what_the_engine_may_do_follows_from_profile_and_mode() -> None:
    profile = judge(measured({Scenario.ROLE: 0.02}, 9), WRONG, "tiny")
    assert profile_rules(None, Mode.FAST) is None
    for mode in (Mode.BALANCED, Mode.FAST):
        rules = profile_rules(profile, mode)
        assert rules is not None and rules.approximate and rules.guard_probes > 0
        assert (rules.kl_target, rules.kl_max) == (KL_TARGET[mode], KL_MAX[mode])
        assert (rules.repairs, rules.run_tokens_min) == (profile.repairs, profile.run_tokens_min)


@pytest.fixture(scope="module")
def two_each(word_runner: Any) -> Measured:
    """Two prompts of each kind, really measured on random weights."""
    return measure(word_runner, prompts=2, tokens=2)


def test_every_repair_is_measured_on_the_same_prompts(two_each: Measured) -> None:
    samples, wrong = two_each
    by_repair = [[each for each in samples if each.repair == repair] for repair in OPTIONS]
    prompts = 2 * len(KINDS) + sum(max(1, 2 // rarer) for rarer in SEVERAL.values())
    assert {len(each) for each in by_repair} == {prompts}
    for each in by_repair:
        assert [(s.scenario, s.shares) for s in each] == [(s.scenario, s.shares) for s in by_repair[0]]
    assert len(wrong) == 2
    for each in samples:
        assert each.outcome.symptoms is not None and 0 < each.outcome.cost < 0.7
        assert math.isfinite(each.kl) and math.isfinite(each.outcome.symptoms.body)


def test_longer_heads_cost_more_and_leave_less(two_each: Measured) -> None:
    samples, _ = two_each
    heads = [[each for each in samples if each.repair == Repair(head)] for head in (8, 32, 96)]
    costs, kl = ([sum(getattr(s, what) for s in each) for each in heads] for what in ("tokens", "kl"))
    assert costs == sorted(costs)
    assert kl[2] < kl[0]


def test_a_profile_is_written_where_nodes_find_it(
    word_runner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCOMM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(calibrate, "measure", fake(measured({Scenario.ROLE: 0.02}, 9)))
    result = calibrate.run(model=word_runner, prompts=3, tokens=5)
    model_id = word_runner.spec.model_id
    found = load_profile(model_id, [tmp_path / "profiles"])
    assert found is not None and found.int8 is not None and 0 < found.int8 < 0.01
    assert replace(found, int8=None) == judge(measured({Scenario.ROLE: 0.02}, 9), WRONG, word_runner.spec.name)
    assert profile_path(word_runner, tmp_path).is_file()
    assert json.loads(result.to_json())["command"] == "calibrate"
    calibrate.run(model=word_runner, save_to=tmp_path / "new" / "mine.json", prompts=3, tokens=5)
    assert load_profile(model_id, [tmp_path / "new"]) == found


def test_nothing_is_written_when_it_is_not_good_enough(
    word_runner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCOMM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(calibrate, "measure", fake(measured({Scenario.ROLE: 50 * KL_USEFUL}, 9)))
    with pytest.raises(KVCommError, match="no repair keeps"):
        calibrate.run(model=word_runner, prompts=3, tokens=5)
    assert not list(tmp_path.rglob("*"))


def fake(samples: Sequence[Sample]) -> Any:
    def measured_before(runner: Any, console: Any = None, *, prompts: int, tokens: int) -> Measured:
        assert (prompts, tokens) == (3, 5)
        return list(samples), WRONG

    return measured_before


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_measured(
    word_runner: Any, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "profile.json"):
        with pytest.raises(KVCommError, match="cannot be written"):
            calibrate.run(model=word_runner, save_to=path)


def test_models_whose_keys_cannot_be_moved_are_refused(word_runner: Any) -> None:
    spec = replace(word_runner.spec, name="odd", rotary=None, exact_only_reason="learned positions")
    runner: Any = SimpleNamespace(spec=spec)
    with pytest.raises(UsageError, match="odd allows exact reuse only: learned positions"):
        measure(runner)
    unmovable = copy.copy(word_runner)
    unmovable.spec = spec
    with pytest.raises(UsageError, match="learned positions"):
        calibrate.run(model=unmovable)
