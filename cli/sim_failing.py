"""When a simulation breaks an invariant: a smaller scenario that breaks the same, and what led there."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from kvcomm_p2p.cli.outcome import ExitCode, fail
from kvcomm_p2p.cli.output import stderr
from kvcomm_p2p.cli.sim_inputs import rules_of

if TYPE_CHECKING:
    from kvcomm_p2p.planning.types import ReuseRules
    from kvcomm_p2p.sim.failing import Failure
    from kvcomm_p2p.sim.scenario import Scenario

SHRINK_S = 120.0
"""After so long the smallest scenario so far is good enough."""


@contextmanager
def telling_failures(scenario: Scenario, *, shrink: bool, every: int) -> Iterator[None]:
    """What breaks an invariant in here is told as `tell_failure` does."""
    from kvcomm_p2p.sim.broken import InvariantBroken

    try:
        yield
    except InvariantBroken as broken:
        say(f"{broken.rule}: {broken}")
        tell_failure(scenario, rules_of(scenario), shrink=shrink, every=every)


def tell_failure(
    scenario: Scenario, rules: ReuseRules, *, shrink: bool, every: int, into: Path | None = None
) -> NoReturn:
    """Find out how small a scenario can be that breaks what this one does, write it down, say how to see it again and what led
    there; ends the command with the exit code of a bug of ours. Without `shrink` only what has a folder is written down."""
    from kvcomm_p2p.sim.failing import check, retell

    failure = check(scenario, rules, every=every)
    if failure is None:
        fail(
            f"{scenario.name}: broke an invariant, and did not when it was run again: please report it",
            ExitCode.INTERNAL,
        )
    smallest, failure = reduced(scenario, rules, failure, every) if shrink else (scenario, failure)
    say(f"rule: {failure.broken.rule}")
    if shrink or into is not None:
        path = shlex.quote(str(written(smallest, failure, into or Path())))
        say(f"see it again: kvcomm sim run {path} --every {every} --no-shrink")
    again = retell(smallest, rules, every=every)
    if again is not None:
        _, story = again
        left_out = f", {story.left_out} earlier ones left out" if story.left_out else ""
        say(f"what led there, as seen from {', '.join(story.concerned)} ({story.past:,} events before it{left_out}):")
        for line in story.lines:
            say(line)
    fail(str(failure.broken), ExitCode.INTERNAL)


def reduced(scenario: Scenario, rules: ReuseRules, failure: Failure, every: int) -> tuple[Scenario, Failure]:
    """The smallest scenario found within SHRINK_S; interrupted, the smallest so far."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from kvcomm_p2p.sim.failing import GivenUp, check
    from kvcomm_p2p.sim.reducing import reductions, told_size

    end = time.monotonic() + SHRINK_S

    def breaks(candidate: Scenario) -> Failure | None:
        return check(candidate, rules, every=every, go_on=lambda: time.monotonic() < end)

    best, runs = (scenario, failure), 0
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=stderr(), transient=True) as bar:
        task = bar.add_task(f"making it smaller: {told_size(scenario)}", total=None)
        try:
            for reduction in reductions(scenario, failure, breaks):
                best, runs = (reduction.scenario, reduction.failure), reduction.runs
                bar.update(task, description=f"making it smaller, run {runs}: {told_size(reduction.scenario)}")
        except (KeyboardInterrupt, GivenUp):
            pass
    say(f"{told_size(scenario)} became, in {runs} runs: {told_size(best[0])}")
    return best


def written(scenario: Scenario, failure: Failure, into: Path) -> Path:
    """The scenario as a file that `kvcomm sim run` reads. Returns its path, with a number if there is one of that name."""
    from kvcomm_p2p.sim.scenario_text import scenario_toml

    into.mkdir(parents=True, exist_ok=True)
    path, number = into / f"{scenario.name}-broken.toml", 1
    while path.exists():
        path, number = into / f"{scenario.name}-broken-{number}.toml", number + 1
    path.write_text(scenario_toml(scenario, f"{failure.broken.rule}: {failure.broken}"))
    return path


def say(text: str) -> None:
    """On stderr, as it is."""
    stderr().print(text, markup=False, highlight=False, soft_wrap=True)
