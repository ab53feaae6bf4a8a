"""The prefix predictor at work: what it is told of runs, what it refuses and chooses, when it learns, and what stays private."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reuse_cases import LAYOUT, RULES, donor, meta, plan_of, plans
from safetensors.torch import load_file

from kvcomm_p2p.model.cache import KVCache
from kvcomm_p2p.model.spec import ModelSpec, Profile
from kvcomm_p2p.planning.candidates import HEAD_WHY, Candidate
from kvcomm_p2p.planning.divergence import DivergenceFit
from kvcomm_p2p.planning.provenance import Context
from kvcomm_p2p.planning.replan import widened
from kvcomm_p2p.planning.segments import VisibilityMark
from kvcomm_p2p.planning.spans import recompute_positions
from kvcomm_p2p.planning.types import Plan, Provenance, Repair, Run, RunChoice, Span, SpanKind
from kvcomm_p2p.protocol.anchors import MissReason, Visibility
from kvcomm_p2p.protocol.ids import ModelId
from kvcomm_p2p.reuse import foresight as module
from kvcomm_p2p.reuse.foresight import Deviations, Foresight, predictor_path, token_features
from kvcomm_p2p.reuse.guard import watched
from kvcomm_p2p.reuse.predictor import Predictor
from kvcomm_p2p.reuse.predictor_features import RunFeatures, features
from kvcomm_p2p.reuse.selection import CHOSEN_WHY, kept_rows, respent, run_positions, run_spans

MODEL = ModelId(b"m" * 16)
FIT = DivergenceFit(intercept=0.0, body=2.0, head=0.0, entropy=0.0, spread=0.5, prompts=30)
"""The divergence is the mean squared deviation."""
PROFILE = Profile(64, {each: (Repair(16),) for each in Provenance}, FIT, "by this test")
STRICT = replace(RULES, kl_max=0.02)
LOOSE = replace(RULES, kl_max=10.0)
CONTEXT = Context(False, False, 0.25, 0.5, 0.75, 30, False, False, 64)


def spec_with(profile: Profile | None) -> ModelSpec:
    return ModelSpec("tiny", MODEL, LAYOUT, 4096, None, "", "", profile)


def cache_of(tokens: int, seed: int = 0) -> KVCache:
    """Random layer 0: every token is another one."""
    cache = KVCache(LAYOUT, tokens)
    generator = torch.Generator().manual_seed(seed)
    cache.keys.normal_(generator=generator)
    cache.values.normal_(generator=generator)
    return cache


def plan_with(*repairs: Repair, tokens: int = 96, number: int = 1, hidden: int = 0, **anchor: Any) -> Plan:
    """One run of `tokens` tokens per repair, 20 recomputed ones before each; the donor of run `hidden` has the attributes
    given."""
    spans: list[Span] = []
    runs: list[RunChoice] = []
    at = 0
    for index, repair in enumerate(repairs, start=1):
        source = donor([meta(100 * number + index, 0, 32 + tokens, **(anchor if index == hidden else {}))])
        candidate = Candidate(source, (Run(24, at + 20, tokens),))
        spans += [Span(at, at + 20, SpanKind.RECOMPUTE), *candidate.spans(repair, RULES, index)]
        at += 20 + tokens
        runs.append(
            RunChoice(at - tokens, at, source, Provenance.OTHER, 0.5, repair, kl=0.001, saved_s=0.1, context=CONTEXT)
        )
    spans.append(Span(at, at + 1, SpanKind.RECOMPUTE, why="last"))
    return replace(plan_of(spans), runs=tuple(runs))


def shown(plan: Plan, deviation: float = 0.1) -> Deviations:
    """What a guard could have seen of the plan: falling with the position."""
    return [(rows, (deviation / (1 + np.arange(len(rows.positions)) / 8)).astype(np.float32)) for rows in watched(plan)]


class Predicting(Predictor):
    """Predicts `level` everywhere, ten times that at rows `peak`, and claims the skill it is given."""

    def __init__(self, level: float, peak: slice = slice(0, 0), claims: tuple[int, float | None] = (64, 0.6)) -> None:
        super().__init__()
        self._level, self._peak, self._claims = level, peak, claims

    observations = property(lambda self: self._claims[0])
    skill = property(lambda self: self._claims[1])
    shape_skill = property(lambda self: self._claims[1])

    def predict(self, features: torch.Tensor) -> torch.Tensor:
        deviations = torch.full((len(features),), self._level)
        deviations[self._peak] *= 10
        return deviations


@pytest.fixture
def make(tmp_path: Path) -> Any:
    """`make(profile, predictor)`: a Foresight that is closed in the end."""
    made: list[Foresight] = []

    def build(profile: Profile | None = PROFILE, predictor: Predictor | None = None) -> Foresight:
        foresight = Foresight(spec_with(profile), predictor_path(tmp_path, MODEL))
        if predictor is not None:
            foresight._predictor = predictor
            foresight._saved = predictor.observations
        made.append(foresight)
        return foresight

    yield build
    for foresight in made:
        foresight.close()


def learned(foresight: Foresight) -> int:
    """Observations, when all that waits is learned."""
    foresight.close()
    return foresight.predictor.observations


# ------------------------------------------------------------------------------------------------- what is told of a run


def test_features_are_those_of_the_runs_tokens_and_its_place() -> None:
    plan, cache = plan_with(Repair(16), Repair(16)), cache_of(300)
    spans = run_spans(plan, 2)
    rows = slice(136, 232)
    told = RunFeatures(136 - 24, 136, 24, 0.25, 0.5, 0.75, False, 96)
    expected = features(told, cache.keys[0, 0][:, rows], cache.values[0, 0][:, rows])
    assert torch.equal(token_features(CONTEXT, 24, run_positions(spans), cache), expected)


def test_holes_are_left_out_of_the_features() -> None:
    cache = cache_of(60)
    positions = np.r_[10:20, 25:50]
    x = token_features(CONTEXT, 10, positions, cache)
    kept = torch.from_numpy(positions)
    told = RunFeatures(0, 10, 10, 0.25, 0.5, 0.75, False, 35)
    assert torch.equal(x, features(told, cache.keys[0, 0][:, kept], cache.values[0, 0][:, kept]))


def test_what_nobody_compared_counts_as_unlike() -> None:
    cache = cache_of(40)
    positions = np.arange(20, 40)
    for donor_start, bare, lengths in ((0, True, 0.0), (10, False, 0.5), (20, False, 1.0)):
        told = RunFeatures(20 - donor_start, 20, donor_start, 0.0, 0.0, lengths, bare, 20)
        expected = features(told, cache.keys[0, 0][:, 20:], cache.values[0, 0][:, 20:])
        assert torch.equal(token_features(None, donor_start, positions, cache), expected)


def test_looking_changes_nothing(make: Any) -> None:
    plan, cache = plan_with(Repair(16)), cache_of(200)
    keys, values = cache.keys.clone(), cache.values.clone()
    outlook = make().before(plan, cache, STRICT)
    assert outlook.plan == plan
    assert torch.equal(cache.keys, keys) and torch.equal(cache.values, values)


def test_runs_that_are_corrected_from_memory_are_neither_predicted_nor_learned(make: Any) -> None:
    """The guard compares them after the correction."""
    plan = plan_with(Repair(0, memory=True), Repair(16))
    foresight = make(predictor=Predicting(0.1))
    outlook = foresight.before(plan, cache_of(300), LOOSE)
    assert list(outlook.runs) == [plan.runs[1].start] == list(outlook.expected)
    foresight._predictor = Predictor()
    foresight.after(outlook, shown(plan), ())
    assert learned(foresight) == 1


def test_nothing_is_said_before_there_is_any_skill(make: Any) -> None:
    plan, cache = plan_with(Repair(16)), cache_of(200)
    assert make(predictor=Predicting(0.1, claims=(7, None))).before(plan, cache, LOOSE).expected == {}
    [expected] = make(predictor=Predicting(0.1, slice(0, 16))).before(plan, cache, LOOSE).expected.values()
    assert expected == pytest.approx(0.1)  # the head is ten times worse, and recomputed


# --------------------------------------------------------------------------------------------------- refusing in advance


def test_what_would_be_rejected_by_far_is_not_repaired(make: Any) -> None:
    plan = plan_with(Repair(16), Repair(16))
    outlook = make(predictor=Predicting(0.6)).before(plan, cache_of(300), STRICT)
    assert outlook.plan.runs == () and {span.kind for span in outlook.plan.spans} == {SpanKind.RECOMPUTE}
    assert [(item.start, item.end, item.miss.reason) for item in outlook.plan.rejected] == [
        (run.start, run.end, MissReason.DIVERGENCE) for run in plan.runs
    ]
    assert all("predicted before its repair, 0.02 allowed" in item.miss.detail for item in outlook.plan.rejected)
    assert outlook.expected == {}


def test_only_as_many_runs_are_refused_as_it_takes(make: Any) -> None:
    """Of a long and a short one, equally wrong, the long one brings more: 0.36 * 304 / 517 and 0.36 * 80 / 517."""
    short, long = plan_with(Repair(16), tokens=96), plan_with(Repair(16), tokens=320, number=2)
    shift = short.tokens - 1
    spans = [*short.spans[:-1], *(moved(span, shift, 1) for span in long.spans)]
    [run] = long.runs
    runs = (*short.runs, replace(run, start=run.start + shift, end=run.end + shift))
    plan = replace(plan_of(spans), runs=runs)
    outlook = make(predictor=Predicting(0.6)).before(plan, cache_of(600), STRICT)
    assert [run.start for run in outlook.plan.runs] == [short.runs[0].start]
    assert [span for span in outlook.plan.spans if span.run] == [span for span in short.spans if span.run]


def moved(span: Span, tokens: int, runs: int) -> Span:
    return replace(span, start=span.start + tokens, end=span.end + tokens, run=span.run + runs if span.run else 0)


@pytest.mark.parametrize(
    ("claims", "level"),
    [((64, 0.6), 0.3), ((63, 0.6), 0.6), ((64, 0.5), 0.6), ((64, None), 0.6)],
    ids=["not so wrong", "too few observations", "too little skill", "unknown skill"],
)
def test_otherwise_nothing_is_refused(make: Any, claims: tuple[int, float | None], level: float) -> None:
    """0.3 ** 2 * 0.7 is less than five times 0.02."""
    plan = plan_with(Repair(16), Repair(16))
    outlook = make(predictor=Predicting(level, claims=claims)).before(plan, cache_of(300), STRICT)
    assert outlook.plan == plan


def test_runs_whose_rest_is_corrected_are_left_to_the_guard(make: Any) -> None:
    plan = plan_with(Repair(16, 0.1, shift=True))
    assert make(predictor=Predicting(5.0)).before(plan, cache_of(200), STRICT).plan == plan


def test_without_a_profile_nothing_is_refused(make: Any) -> None:
    plan = plan_with(Repair(16))
    assert make(None, Predicting(5.0)).before(plan, cache_of(200), STRICT).plan == plan


def test_now_and_then_a_refused_run_is_tried_all_the_same(make: Any) -> None:
    """What is never repaired is never compared."""
    plan, cache = plan_with(Repair(16)), cache_of(200)
    foresight = make(predictor=Predicting(0.9))
    repaired = [bool(foresight.before(plan, cache, STRICT).plan.runs) for _ in range(2 * module.TRIED_EVERY)]
    assert [index for index, was in enumerate(repaired, start=1) if was] == [8, 16]


# ---------------------------------------------------------------------------------------------------- choosing the tokens


def by_position(plan: Plan) -> dict[int, tuple[Any, ...]]:
    """Position -> (number of the run, donor's position) of what comes from a donor."""
    return {
        at: (span.run, id(span.donor), span.donor_start + at - span.start)
        for span in plan.spans
        if span.donor is not None
        for at in range(span.start, span.end)
    }


@settings(max_examples=150, deadline=None)
@given(plans(), st.integers(0, 2**16))
def test_respending_keeps_runs_costs_and_everything_else(plan: Plan, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    deviations = {
        number: torch.rand(len(run_positions(run_spans(plan, number))), generator=generator)
        for number in range(1, len(plan.runs) + 1)
    }
    other = respent(plan, deviations, RULES)
    assert [span.start for span in other.spans] == [0, *(span.end for span in other.spans[:-1])]
    assert other.spans[-1] == plan.spans[-1]
    assert by_position(other) == by_position(plan)
    assert [span for span in other.spans if not span.run] == [span for span in plan.spans if not span.run]
    for number in deviations:
        before, after = run_spans(plan, number), run_spans(other, number)
        heads = [sum(s.tokens for s in spans if s.kind is SpanKind.RECOMPUTE) for spans in (before, after)]
        probes = [sum(s.probes for s in spans) for spans in (before, after)]
        # A chosen span may lie over tokens behind a hole, which are recomputed anyway.
        assert heads[0] - 4 * (len(before) - 1) <= heads[1] <= heads[0]
        assert probes[1] <= probes[0] and (probes[1] == probes[0] or len(after) > 2)
        assert all(2 * s.probes <= s.tokens for s in after)
        assert any(s.shift for s in after) == any(s.shift for s in before)
        assert not any(s.shift for s in after if s.kind is SpanKind.RECOMPUTE)
    assert len(set(recompute_positions(other).tolist())) == len(recompute_positions(other))


@settings(max_examples=100, deadline=None)
@given(plans())
def test_where_the_first_tokens_are_worst_nothing_changes_but_behind_holes(plan: Plan) -> None:
    """The plan's own choice, from deviations that fall."""
    deviations = {
        number: 1 / (1 + torch.arange(float(len(run_positions(run_spans(plan, number))))))
        for number, run in enumerate(plan.runs, start=1)
        if len(joined(run_spans(plan, number))) == 1
    }
    assert respent(plan, deviations, RULES) == plan


def joined(spans: Sequence[Span]) -> list[Span]:
    """Those that do not follow the one before."""
    return [
        span
        for before, span in zip([None, *spans[:-1]], spans, strict=True)
        if before is None or (before.end, before.donor_start + before.tokens) != (span.start, span.donor_start)
    ]


def test_a_profile_lets_the_predictor_choose_and_the_guard_still_watches(make: Any) -> None:
    plan, cache = plan_with(Repair(16)), cache_of(200)
    predictor = Predicting(0.01, slice(40, 56))
    assert make(predictor=predictor).before(plan, cache, LOOSE).plan == plan
    outlook = make(replace(PROFILE, selection="predictor"), predictor).before(plan, cache, LOOSE)
    told = [(s.start, s.end, s.kind.value, s.probes, s.why) for s in run_spans(outlook.plan, 1)]
    assert told == [
        (20, 60, "reuse", 2, ""),
        (60, 76, "recompute", 0, CHOSEN_WHY),
        (76, 116, "reuse", 2, ""),
    ]
    [rows] = watched(outlook.plan)
    assert rows.positions[rows.is_head].tolist() == list(range(60, 76)) and len(rows.positions) == 20
    [expected] = outlook.expected.values()
    assert expected == pytest.approx(0.01)


def test_a_wider_repair_is_chosen_as_well(make: Any) -> None:
    plan, cache = plan_with(Repair(4)), cache_of(200)
    predictor = Predicting(0.01, slice(40, 64))
    outlook = make(replace(PROFILE, selection="predictor"), predictor).before(plan, cache, LOOSE)
    wider = outlook.chosen(widened(outlook.plan, 4, LOOSE), LOOSE)
    heads = [set(range(s.start, s.end)) for s in run_spans(wider, 1) if s.kind is SpanKind.RECOMPUTE]
    assert sum(map(len, heads)) == 16 and set.union(*heads) <= set(range(60, 84))


@pytest.mark.parametrize(("shape", "chooses"), [(None, True), (0.1, True), (-0.1, False)])
def test_a_predictor_that_knows_less_than_the_position_does_not_choose(make: Any, shape: Any, chooses: bool) -> None:
    plan, cache = plan_with(Repair(16)), cache_of(200)
    predictor = Predicting(0.01, slice(40, 56), (64, shape))
    outlook = make(replace(PROFILE, selection="predictor"), predictor).before(plan, cache, LOOSE)
    assert (outlook.plan != plan) == chooses


def test_a_fresh_predictor_chooses_the_head(make: Any) -> None:
    plan = plan_with(Repair(16), Repair(32))
    outlook = make(replace(PROFILE, selection="predictor")).before(plan, cache_of(300), STRICT)
    assert outlook.chooses and outlook.plan == plan
    assert {s.why for s in outlook.plan.spans if s.kind is SpanKind.RECOMPUTE and s.run} == {HEAD_WHY}


# -------------------------------------------------------------------------------------------------------------- learning


def test_it_learns_what_was_seen_at_the_runs_own_positions(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, cache = plan_with(Repair(16), Repair(16)), cache_of(300)
    foresight = make()
    told: list[tuple[Any, ...]] = []
    monkeypatch.setattr(foresight.predictor, "observe", lambda *given, **limits: told.append((*given, limits)))
    outlook = foresight.before(plan, cache, STRICT)
    seen = shown(plan)
    foresight.after(outlook, seen, ())
    foresight.close()
    assert len(told) == 2
    for (x, rows, deviations, limits), (rows_seen, deviations_seen), start in zip(told, seen, (20, 136), strict=True):
        assert torch.equal(x, outlook.runs[start].features)
        assert rows.tolist() == (rows_seen.positions - start).tolist()
        assert rows.tolist()[:16] == list(range(16)) and len(rows) > 16
        assert deviations.tolist() == deviations_seen.tolist()
        assert limits == {"seconds": float("inf"), "steps_max": module.GRADIENT_STEPS}


def test_the_same_requests_teach_the_same(tmp_path: Path) -> None:
    taught = []
    for folder in ("a", "b"):
        foresight = Foresight(spec_with(PROFILE), tmp_path / folder / "weights")
        for seed in range(6):  # fewer than may wait: nothing is dropped
            plan, cache = plan_with(Repair(16), Repair(8), number=seed + 1), cache_of(300, seed)
            foresight.after(foresight.before(plan, cache, STRICT), shown(plan, 0.05 * seed), ())
        assert learned(foresight) == 12
        taught.append(load_file(tmp_path / folder / "weights"))
    assert taught[0].keys() == taught[1].keys()
    assert all(torch.equal(value, taught[1][name]) for name, value in taught[0].items())


@pytest.mark.parametrize("visibility", [Visibility.GROUP, Visibility.PRIVATE])
@pytest.mark.parametrize(("mark", "lessons"), [(0, 0), (21, 0), (115, 0), (116, 1), (300, 2)])
def test_what_not_everybody_may_see_is_not_learned(make: Any, visibility: Visibility, mark: int, lessons: int) -> None:
    """Runs are [20, 116) and [136, 232): those that the mark stands in or before are left out."""
    plan = plan_with(Repair(16), Repair(16))
    foresight = make()
    outlook = foresight.before(plan, cache_of(300), STRICT)
    foresight.after(outlook, shown(plan), (VisibilityMark(mark, visibility, b""),))
    assert learned(foresight) == lessons


@pytest.mark.parametrize(("hidden", "lessons"), [(0, 2), (1, 0), (2, 1)])
def test_donors_that_not_everybody_may_see_hide_what_follows(make: Any, hidden: int, lessons: int) -> None:
    plan = plan_with(Repair(16), Repair(16), hidden=hidden, visibility=Visibility.PRIVATE)
    foresight = make()
    foresight.after(foresight.before(plan, cache_of(300), STRICT), shown(plan), ())
    assert learned(foresight) == lessons


def test_what_waits_is_bounded_and_nobody_waits_for_it(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, cache = plan_with(Repair(16)), cache_of(200)
    foresight = make()
    begun, go_on = threading.Event(), threading.Event()
    observe = foresight.predictor.observe
    threads: set[str] = set()

    def slow(*given: Any, **limits: Any) -> bool:
        threads.add(threading.current_thread().name)
        begun.set()
        assert go_on.wait(30)
        return bool(observe(*given, **limits))

    monkeypatch.setattr(foresight.predictor, "observe", slow)
    outlook = foresight.before(plan, cache, STRICT)
    for _ in range(3 * module.QUEUED_PROMPTS_MAX):  # returns while the first is still being learned from
        foresight.after(outlook, shown(plan), ())
    assert begun.wait(30) and foresight.predictor.observations == 0
    go_on.set()
    assert learned(foresight) == module.QUEUED_PROMPTS_MAX
    assert len(threads) == 1 and "kvcomm-learn" in threads.pop()


def test_long_prompts_are_learned_from_in_part(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEARNED_TOKENS_MAX", 200)
    plan = plan_with(*[Repair(16)] * 4)
    foresight = make()
    foresight.after(foresight.before(plan, cache_of(500), STRICT), shown(plan), ())
    assert learned(foresight) == 2


def test_a_failure_to_learn_is_told_and_does_not_block(
    make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plan = plan_with(Repair(16))
    foresight = make()

    def fails(*given: Any, **limits: Any) -> bool:
        raise RuntimeError("a bug")

    monkeypatch.setattr(foresight.predictor, "observe", fails)
    outlook = foresight.before(plan, cache_of(200), STRICT)
    for _ in range(2 * module.QUEUED_PROMPTS_MAX):
        foresight.after(outlook, shown(plan), ())
    foresight.close()
    assert "a bug" in caplog.text
    assert all(foresight._room.acquire(blocking=False) for _ in range(module.QUEUED_PROMPTS_MAX))


def test_nothing_is_learned_after_close(make: Any) -> None:
    plan = plan_with(Repair(16))
    foresight = make()
    outlook = foresight.before(plan, cache_of(200), STRICT)
    foresight.close()
    foresight.after(outlook, shown(plan), ())
    assert learned(foresight) == 0


# ---------------------------------------------------------------------------------------------------------------- keeping


def teach(foresight: Foresight, prompts: int) -> None:
    plan = plan_with(Repair(16))
    outlook = foresight.before(plan, cache_of(200), STRICT)
    for _ in range(prompts):
        foresight.after(outlook, shown(plan), ())


def test_what_was_learned_is_there_after_a_restart(make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = make()
    teach(first, 5)
    first.close()
    second = make()
    x = torch.zeros(40, module.features(RunFeatures(0, 0, 0, 0, 0, 0, True, 1), *[torch.ones(1, 1, 1)] * 2).shape[1])
    assert second.predictor.observations == 5
    assert torch.equal(second.predictor.predict(x), first.predictor.predict(x))
    assert not torch.equal(second.predictor.predict(x), Predictor().predict(x))
    assert [path.name for path in (tmp_path / "predictors").iterdir()] == [f"{MODEL.hex()}.safetensors"]
    assert caplog.records == []


def test_it_saves_every_so_many_observations_and_not_without_any(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "OBSERVATIONS_PER_SAVE", 3)
    saves: list[int] = []
    save = Predictor.save

    def counted(self: Predictor, path: Path, model_id: ModelId) -> None:
        saves.append(self.observations)
        save(self, path, model_id)

    monkeypatch.setattr(Predictor, "save", counted)
    foresight = make()
    foresight.close()
    assert saves == [] and not (tmp_path / "predictors").exists()
    foresight = make()
    teach(foresight, 8)
    foresight.close()
    foresight.close()
    assert saves == [3, 6, 8]


def test_a_file_that_cannot_be_used_is_told_once_and_replaced(
    make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = predictor_path(tmp_path, MODEL)
    path.parent.mkdir()
    path.write_bytes(b"not a predictor")
    foresight = make()
    teach(foresight, 2)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert path.name in caplog.text and "begins anew" in caplog.text
    assert learned(foresight) == 2
    assert Predictor.load(path, MODEL)[1] == ""
    assert len(caplog.records) == 1


def test_a_folder_that_cannot_be_written_costs_only_what_was_learned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    foresight = Foresight(spec_with(PROFILE), tmp_path / "file" / "weights")
    teach(foresight, 1)
    foresight.close()
    assert "was not saved" in caplog.text


def test_agents_of_one_model_share_a_file_that_is_always_whole(make: Any, tmp_path: Path) -> None:
    agents = [make() for _ in range(4)]
    for count, agent in enumerate(agents, start=1):
        teach(agent, count)
    closing = [threading.Thread(target=agent.close) for agent in agents]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join()
    loaded, reason = Predictor.load(predictor_path(tmp_path, MODEL), MODEL)
    assert reason == "" and loaded.observations in {1, 2, 3, 4}
    assert len(list((tmp_path / "predictors").iterdir())) == 1


def test_no_content_is_on_disk(make: Any, tmp_path: Path) -> None:
    """A file has the same size whatever was learned, and holds nothing but weights and running means."""
    sizes = set()
    for prompts in (1, 8):
        foresight = make()
        teach(foresight, prompts)
        foresight.close()
        sizes.add(predictor_path(tmp_path, MODEL).stat().st_size)
    assert len(sizes) == 1 and sizes.pop() < 32_768


def test_kept_rows_are_those_that_stay_aligned() -> None:
    plan = plan_with(Repair(16))
    assert kept_rows(run_spans(plan, 1)).tolist() == [False] * 16 + [True] * 80
