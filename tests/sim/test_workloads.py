"""Tokens of workloads, graphs, and how tasks hang together."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from pathlib import Path

import networkx as nx
import numpy as np
import pytest

from kvcomm_p2p.errors import ConfigError
from kvcomm_p2p.sim import workloads as w
from kvcomm_p2p.sim.graphs import KINDS, make_graph, reading_order


def some(workload: w.Workload, count: int = 20, seed: int = 1) -> list[w.Task]:
    return list(itertools.islice(workload.tasks(random.Random(seed)), count))


def test_a_text_is_the_same_everywhere_and_a_beginning_of_itself() -> None:
    whole = w.tokens_of("document 3", 900)
    assert np.array_equal(whole[:500], w.tokens_of("document 3", 900)[:500])
    assert not np.array_equal(whole[:60], w.tokens_of("document 4", 60))
    told = subprocess.run(
        [
            sys.executable,
            "-c",
            "from kvcomm_p2p.sim.workloads import tokens_of; print(int(tokens_of('document 3', 900).sum()))",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(told.stdout) == int(whole.sum())


@pytest.mark.parametrize("kind", sorted(w.KINDS))
def test_steps_only_wait_for_earlier_ones_and_every_agent_exists(kind: str) -> None:
    for task in some(w.KINDS[kind](agents=8, tasks_per_s=2.0)):
        for number, step in enumerate(task.steps):
            assert 0 <= step.agent < 8
            assert all(earlier < number for earlier in step.after)
            assert all(part.output_of is None or part.output_of in range(number) for part in step.parts)


def test_arrivals_have_the_rate_that_was_asked_for() -> None:
    tasks = some(w.Creative(agents=4, tasks_per_s=5.0), 2000)
    assert tasks[-1].at_s == pytest.approx(400, rel=0.1)
    assert [task.at_s for task in tasks] == sorted(task.at_s for task in tasks)


def test_questions_share_documents_and_nothing_else() -> None:
    keys = [part.key for task in some(w.Rag(agents=5, tasks_per_s=1.0), 60) for part in task.steps[0].parts]
    documents = [key for key in keys if key.startswith("document")]
    questions = [key for key in keys if key.startswith("question")]
    assert len(set(documents)) < len(documents) and len(set(questions)) == len(questions)


def test_what_is_handed_on_is_read_by_the_others_when_the_first_has_answered() -> None:
    for task in some(w.Rag(agents=5, tasks_per_s=1.0, readers=4, handed_on=True), 10):
        assert [step.after for step in task.steps] == [(), (0,), (0,), (0,)]
        assert len({step.agent for step in task.steps}) == 4
    assert all(not step.after for task in some(w.Rag(agents=5, tasks_per_s=1.0, readers=4), 10) for step in task.steps)


def test_in_a_debate_everybody_reads_everybody_from_the_second_round_on() -> None:
    (task,) = some(w.Mathematics(agents=4, tasks_per_s=1.0), 1)
    first, second = task.steps[:4], task.steps[4:]
    assert all(not step.after for step in first)
    assert all(step.after == (0, 1, 2, 3) for step in second)


def test_a_prompt_holds_the_answers_that_were_given() -> None:
    (task,) = some(w.Code(agents=4, tasks_per_s=1.0), 1)
    outputs = dict(enumerate(["x", "y", "z", "u"]))
    prompt = w.prompt_of(task.steps[2], outputs)
    assert np.array_equal(prompt[-200:], w.tokens_of("y", 200))
    assert len(prompt) == task.steps[2].prompt_tokens


def test_a_workload_without_tasks_is_refused() -> None:
    with pytest.raises(ConfigError, match="tasks_per_s"):
        w.until(w.Creative(agents=2, tasks_per_s=1e-6), random.Random(0), 1.0)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_graphs_have_their_agents(kind: str) -> None:
    graph = make_graph(kind, 12, 3)
    assert sorted(graph.nodes) == list(range(12)) and graph.is_directed()
    for task in some(w.Graph(graph, 1.0), 3):
        assert {step.agent for step in task.steps} == set(range(12))


def test_graphs_without_circles_are_read_in_order() -> None:
    assert reading_order(make_graph("chain", 3, 0)) == [[0], [1], [2]]
    assert reading_order(make_graph("ring", 3, 0)) is None


def test_graphs_are_read_from_files(tmp_path: Path) -> None:
    edges = tmp_path / "edges.txt"
    edges.write_text("a b\nb c\n")
    assert sorted(make_graph(str(edges), 3, 0).edges) == [(0, 1), (1, 2)]
    graphml = tmp_path / "g.graphml"
    nx.write_graphml(nx.path_graph(3, create_using=nx.DiGraph), graphml)
    assert make_graph(str(graphml), 3, 0).number_of_edges() == 2
    with pytest.raises(ConfigError, match="set agents to"):
        make_graph(str(edges), 5, 0)
    broken = tmp_path / "broken.graphml"
    broken.write_text("<no graph")
    with pytest.raises(ConfigError, match="is not a graph"):
        make_graph(str(broken), 3, 0)
    with pytest.raises(ConfigError, match="neither a kind"):
        make_graph("nowhere", 3, 0)
