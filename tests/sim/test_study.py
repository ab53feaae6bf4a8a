"""Studies, sweeps that go on where they were, figures, pictures and the page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import pytest

from kvcomm_p2p.errors import ConfigError
from kvcomm_p2p.planning.types import ReuseRules
from kvcomm_p2p.sim import study
from kvcomm_p2p.sim.cost_table import load_table
from kvcomm_p2p.sim.report import page
from kvcomm_p2p.sim.scenario import check_scenario

RULES = ReuseRules(approximate=True, reason="", kl_target=1.0, kl_max=2.0)
WRITTEN: dict[str, Any] = {
    "name": "tiny",
    "agents": 2,
    "duration_s": 5.0,
    "costs": "llama-3.1-8b-h100",
    "updates": 2,
    "fabrics": ["none", "peers"],
    "workload": {"kind": "rag", "tasks_per_s": 1.0, "documents": 4},
    "network": {"inside": "fast"},
}


@pytest.fixture(scope="module")
def done() -> study.Study:
    return study.run_study(check_scenario(WRITTEN), RULES)


def test_figures_compare_with_no_sharing(done: study.Study) -> None:
    rows = {(row.case.partition(": ")[2], row.metric): row for row in study.figures(done)}
    ours = rows["peers (this protocol)", "first token, p50"]
    plain = rows["no sharing", "first token, p50"]
    assert ours.baseline == plain.value and ours.ratio == pytest.approx(plain.value / ours.value)
    assert plain.baseline is None
    assert rows["peers (this protocol)", "an update known to all, median"].n == 2


def test_a_sweep_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = study.points(WRITTEN, {"agents": [2, 3]})
    rules = replace(RULES, repairs=MappingProxyType(dict(RULES.repairs)))
    (first,) = study.sweep(points[:1], rules, tmp_path)
    assert first["changes"]["agents"] == 2
    (tmp_path / f"{points[1].key}.json").write_text("{half a fi")
    ran: list[study.Point] = []
    real = study.run_point
    monkeypatch.setattr(study, "run_point", lambda point, rules: ran.append(point) or real(point, rules))
    runs = list(study.sweep(points, rules, tmp_path, executor=_Here()))
    assert [point.scenario.agents for point in ran] == [3]
    assert {run["changes"]["agents"] for run in runs} == {2, 3}
    assert runs == list(study.sweep(points, rules, tmp_path, executor=_Here())) and len(ran) == 1


class _Here:
    """An executor that is this process: what an engine of somebody else's offers."""

    def submit(self, call: Any, *arguments: Any) -> Any:
        from concurrent.futures import Future

        future: Future[Any] = Future()
        future.set_result(call(*arguments))
        return future


def test_points_are_all_combinations_and_checked() -> None:
    made = study.points(WRITTEN, {"agents": [2, 4], "network.loss": [0.0, 0.1]}, repeats=2)
    assert len(made) == 8 and len({point.key for point in made}) == 8
    with pytest.raises(ConfigError, match="nothing to sweep"):
        study.points(WRITTEN, {})
    with pytest.raises(ConfigError, match="agents"):
        study.points(WRITTEN, {"agents": [-2]})


def test_the_page_holds_everything_and_escapes_it(done: study.Study, tmp_path: Path) -> None:
    picture = tmp_path / "p.png"
    picture.write_bytes(b"\x89PNG")
    scenario = msgspec.structs.replace(done.scenario, about="<script>alert(1)</script>")
    text = page(
        scenario,
        load_table(scenario.costs),
        study.figures(done),
        [picture],
        command="kvcomm sim run tiny",
        scenario_text="agents = 2",
    )
    assert "<script>" not in text and "data:image/png;base64," in text and "http" not in text.replace("https://", "")
    assert "peers (this protocol)" in text


def test_pictures_are_drawn(done: study.Study, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from kvcomm_p2p.sim.plots import draw_study, draw_sweep

    curves = json.loads(json.dumps(study.series(done)))
    files = draw_study("tiny", curves, tmp_path)
    assert [path.name for path in files] == ["tiny-first-token.png", "tiny-protocol.png"]
    runs = [study.run_point(point, RULES) for point in study.points(WRITTEN, {"agents": [2, 3]})]
    path = draw_sweep("tiny", "agents", runs, "ttft_p99_s", "seconds", tmp_path)
    assert all(each.stat().st_size > 5000 for each in [*files, path])
