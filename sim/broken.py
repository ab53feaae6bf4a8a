"""What is raised when something that must always hold does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvcomm_p2p.errors import InternalError


class InvariantBroken(InternalError):
    """An invariant broke: a bug of the protocol or of the simulator, never of the scenario.

    `rule`: which (a name of docs/simulator.md); `number`, `name`: the machine where it showed; `at_s`: seconds since the world
    began; `about`: ids of nodes, anchors and sequences that it is about.
    """

    def __init__(
        self, rule: str, what: str, *, number: int, name: str, at_s: float, about: tuple[bytes, ...] = ()
    ) -> None:
        super().__init__(f"at {at_s:.6f} s {name} {what}")
        self.rule, self.what, self.number, self.name, self.at_s, self.about = rule, what, number, name, at_s, about

    def __reduce__(self) -> tuple[Callable[..., InvariantBroken], tuple[Any, ...]]:
        # Runs of a sweep are other processes': exceptions travel by their positional arguments alone.
        return _again, (self.rule, self.what, self.number, self.name, self.at_s, self.about)


def _again(rule: str, what: str, number: int, name: str, at_s: float, about: tuple[bytes, ...]) -> InvariantBroken:
    return InvariantBroken(rule, what, number=number, name=name, at_s=at_s, about=about)
