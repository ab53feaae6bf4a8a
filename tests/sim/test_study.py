"""Studies: figures, curves, pictures and the page."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from sim_cases import RULES, TINY

from kvcomm_p2p.sim import study
from kvcomm_p2p.sim.cost_table import load_table
from kvcomm_p2p.sim.curves import quantiles, series
from kvcomm_p2p.sim.report import page
from kvcomm_p2p.sim.scenario import check_scenario


@pytest.fixture(scope="module")
def done() -> study.Study:
    return study.run_study(check_scenario(TINY), RULES)


def test_figures_compare_with_no_sharing(done: study.Study) -> None:
    rows = {(row.case.partition(": ")[2], row.metric): row for row in study.figures(done)}
    ours = rows["peers (this protocol)", "first token, p50"]
    plain = rows["no sharing", "first token, p50"]
    assert ours.baseline == plain.value and ours.ratio == pytest.approx(plain.value / ours.value)
    assert plain.baseline is None
    assert rows["peers (this protocol)", "an update known to all, median"].n == 2


def test_the_page_holds_everything_and_escapes_it(done: study.Study, tmp_path: Path) -> None:
    picture = tmp_path / "p.png"
    picture.write_bytes(b"\x89PNG")
    scenario = msgspec.structs.replace(done.scenario, about="<script>alert(1)</script>")
    text = page(
        scenario,
        load_table(scenario.costs),
        study.figures(done),
        [picture],
        summaries=done.summaries(),
        command="kvcomm sim run tiny",
        scenario_text="agents = 2",
    )
    assert "<script>" not in text and "data:image/png;base64," in text and "http" not in text.replace("https://", "")
    assert "peers (this protocol)" in text


def test_pictures_are_drawn_of_what_was_kept(done: study.Study, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from kvcomm_p2p.sim.plots import draw_study

    curves = json.loads(json.dumps(series(done)))
    files = draw_study("tiny", curves, tmp_path)
    assert [path.name for path in files] == ["tiny-first-token.png", "tiny-holders.png", "tiny-protocol.png"]
    assert all(each.stat().st_size > 5000 for each in files)


def test_curves_have_few_points_and_keep_the_ends() -> None:
    assert quantiles([3.0, 1.0, 2.0]) == [1.0, 2.0, 3.0]
    thinned = quantiles([float(value) for value in range(10_001)])
    assert len(thinned) == 101 and thinned[0] == 0 and thinned[50] == 5000 and thinned[-1] == 10_000


def test_who_is_down_answers_nothing_on_any_fabric_and_comes_back_with_nothing() -> None:
    """Agent 0 is down for a third of the run: its prompts of that time are failures, and what it reused before is gone."""
    written = {
        **TINY,
        "duration_s": 60.0,
        "fabrics": ["none", "own", "central", "peers"],
        "workload": {"kind": "rag", "tasks_per_s": 1.0, "documents": 4},
        "faults": [{"kind": "restart", "at_s": 20.0, "for_s": 20.0, "nodes": [0]}],
    }
    done = study.run_study(check_scenario(written), RULES)
    for observed in done.observed:
        (outage,) = observed.outages
        assert (outage.agent, outage.from_s, outage.until_s) == (0, pytest.approx(20.0), pytest.approx(40.0))
        assert observed.unanswered > 0
        asked_while_down = [each for each in observed.outcomes if each.agent == 0 and 20 < each.started_at < 40]
        assert asked_while_down == []
        assert any(each.agent == 0 and each.started_at > 40 for each in observed.outcomes)
    assert len({observed.unanswered for observed in done.observed}) == 1
    own = series(done)["own"]
    assert own["since_return_n"][0] > 0 and own["since_return"][0] < max(filter(None, own["reused_others"]))
