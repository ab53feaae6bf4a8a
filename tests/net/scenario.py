"""Scenarios as data, and what they must come to, whoever plays them: real drivers on some transport, or a simulator.

A player carries out single steps (`Player`); `play` tells it what to do and collects what everybody knows in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Union


@dataclass(frozen=True, slots=True)
class Join:
    name: str
    seed: str


@dataclass(frozen=True, slots=True)
class Publish:
    name: str
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Forget:
    name: str
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fetch:
    """`name` pulls anchor `number` of `holder`, and holds it if it came."""

    name: str
    holder: str
    number: int


@dataclass(frozen=True, slots=True)
class Leave:
    """With a goodbye."""

    name: str


@dataclass(frozen=True, slots=True)
class Die:
    """Without one: from now on nothing is heard of it, and nothing reaches it."""

    name: str


@dataclass(frozen=True, slots=True)
class Settle:
    """Until everybody who is left knows what there is to know; `Outcome.settled` says if that happened in time."""


Step = Union[Join, Publish, Forget, Fetch, Leave, Die, Settle]


@dataclass(frozen=True, slots=True)
class Outcome:
    """`fetches`: for each Fetch "found" or the reason of its miss. `states`: for each node that is left the states of all
    others. `holders`: for each node that is left and each anchor that ever was, the names of those whom a lookup names."""

    settled: bool
    fetches: tuple[str, ...]
    states: Mapping[str, Mapping[str, str]]
    holders: Mapping[str, Mapping[int, tuple[str, ...]]]


class Player(Protocol):
    """Carries out the steps. Nodes are made by their first step. `settle` lets time pass until `done()`, or gives up."""

    def join(self, name: str, seed: str) -> None: ...
    def publish(self, name: str, numbers: Sequence[int]) -> None: ...
    def forget(self, name: str, numbers: Sequence[int]) -> None: ...
    def fetch(self, name: str, holder: str, number: int) -> str: ...
    def leave(self, name: str) -> None: ...
    def die(self, name: str) -> None: ...
    def states(self, name: str) -> dict[str, str]: ...
    def holders(self, name: str, numbers: Sequence[int]) -> dict[int, tuple[str, ...]]: ...
    def settle(self, done: Callable[[], bool]) -> bool: ...


@dataclass(slots=True)
class Truth:
    """What is so, known from the steps alone."""

    held: dict[str, set[int]] = field(default_factory=dict)
    gone: dict[str, str] = field(default_factory=dict)
    numbers: set[int] = field(default_factory=set)

    @property
    def here(self) -> list[str]:
        return sorted(set(self.held) - set(self.gone))

    def states(self, name: str) -> dict[str, str]:
        """As `name` should see the others."""
        return {other: self.gone.get(other, "alive") for other in sorted(self.held) if other != name}

    def holders(self) -> dict[int, tuple[str, ...]]:
        """As everybody should find them."""
        return {
            number: tuple(name for name in self.here if number in self.held[name]) for number in sorted(self.numbers)
        }


def play(steps: Sequence[Step], player: Player) -> tuple[Outcome, Truth]:
    """Let `player` do the steps; returns what came out and what should have."""
    truth = Truth()
    fetches: list[str] = []
    settled = True
    for step in steps:
        if isinstance(step, Settle):
            settled &= player.settle(lambda: _all_known(player, truth))
        elif isinstance(step, Fetch):
            result = player.fetch(step.name, step.holder, step.number)
            fetches.append(result)
            if result == "found":
                truth.held[step.name].add(step.number)
        else:
            _step(step, player, truth)
    numbers = sorted(truth.numbers)
    outcome = Outcome(
        settled,
        tuple(fetches),
        {name: dict(sorted(player.states(name).items())) for name in truth.here},
        {name: player.holders(name, numbers) for name in truth.here},
    )
    return outcome, truth


def _step(step: Join | Publish | Forget | Leave | Die, player: Player, truth: Truth) -> None:
    if isinstance(step, Join):
        for name in (step.seed, step.name):
            truth.held.setdefault(name, set())
        player.join(step.name, step.seed)
    elif isinstance(step, Publish):
        truth.held[step.name].update(step.numbers)
        truth.numbers.update(step.numbers)
        player.publish(step.name, step.numbers)
    elif isinstance(step, Forget):
        truth.held[step.name].difference_update(step.numbers)
        player.forget(step.name, step.numbers)
    elif isinstance(step, Leave):
        truth.gone[step.name] = "left"
        player.leave(step.name)
    else:
        truth.gone[step.name] = "dead"
        player.die(step.name)


def _all_known(player: Player, truth: Truth) -> bool:
    holders = truth.holders()
    return all(
        player.states(name) == truth.states(name) and player.holders(name, sorted(holders)) == holders
        for name in truth.here
    )
