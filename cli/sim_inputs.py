"""What `kvcomm sim` is told to simulate: names, files and changes on the command line, checked."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcomm_p2p.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from kvcomm_p2p.planning.types import ReuseRules
    from kvcomm_p2p.sim.scenario import Scenario


def chosen_scenario(
    name: str, changes: list[str] | None, fabric: list[str] | None = None, seed: int | None = None
) -> Scenario:
    """A preset or TOML file with what the command line changes. Raises ConfigError, UsageError."""
    from kvcomm_p2p.sim.scenario import load_scenario
    from kvcomm_p2p.sim.simulation import check_fits

    chosen = load_scenario(name, _changes(changes, fabric, seed))
    check_fits(chosen, free_bytes())
    return chosen


def written(scenario: Scenario) -> dict[str, Any]:
    """The scenario in full, as plain types."""
    import msgspec

    plain: dict[str, Any] = msgspec.to_builtins(scenario)
    return plain


def _changes(changes: list[str] | None, fabric: list[str] | None, seed: int | None) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for change in changes or ():
        key, equals, value = change.partition("=")
        if not equals or not key:
            raise UsageError(f"--set {change!r} is not KEY=VALUE, as network.loss=0.1")
        made[key] = _value(value)
    if fabric:
        made["fabrics"] = list(fabric)
    if seed is not None:
        made["seed"] = seed
    return made


def _value(text: str) -> Any:
    """Numbers, true and false, lists as TOML writes them; everything else is text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def parsed_values(over: list[str]) -> dict[str, list[Any]]:
    """Keys and values of --over. Raises UsageError."""
    values: dict[str, list[Any]] = {}
    for text in over:
        key, equals, listed = text.partition("=")
        if not equals or not key or not all(listed.split(",")):
            raise UsageError(f"--over {text!r} is not KEY=A,B,C, as agents=4,8,16")
        if key in values:
            raise UsageError(f"--over {key} is there twice: write all its values in one, as {key}={listed},...")
        if key == "seed":
            raise UsageError("--over seed=... is --repeats COUNT")
        values[key] = [_value(value) for value in listed.split(",")]
    return values


def rules_of(scenario: Scenario) -> ReuseRules:
    """What the named model's shipped profile allows in this mode. Raises ConfigError."""
    from kvcomm_p2p.model.profiles import shipped_profile
    from kvcomm_p2p.planning.types import Mode, ReuseRules
    from kvcomm_p2p.reuse.rules import profile_rules

    mode = Mode(scenario.mode)
    if mode in (Mode.EXACT, Mode.DENSE):
        return ReuseRules(approximate=False, reason=f"mode {mode.value}")
    profile = shipped_profile(scenario.profile)
    rules = profile_rules(profile, mode)
    if rules is None:
        raise ConfigError(f"no profile is shipped for {scenario.profile!r}: use smollm2-135m, or mode exact")
    return rules


def runs_at_once(scenarios: Sequence[Scenario], jobs: int) -> int:
    """How many of these may run at the same time: `jobs`, or fewer where memory does not hold the largest ones. Raises
    ConfigError if it does not hold one of them."""
    from kvcomm_p2p.sim.simulation import check_fits

    free = free_bytes()
    largest = max(scenarios, key=lambda scenario: scenario.memory_bytes())
    check_fits(largest, free)
    return max(1, min(jobs, free // max(1, largest.memory_bytes())))


def free_bytes() -> int:
    """Memory that can be had now; where the system does not say, all of it counts as free."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    except OSError:
        pass
    return 1 << 62


def told(command: str, name: str, options: dict[str, list[str] | None]) -> str:
    """The command line that does this again: "kvcomm sim run NAME --set a=b". `options`: their values; None is not said."""
    words = [f"kvcomm sim {command} {name}"]
    words += [f"--{option} {shlex.quote(value)}" for option, values in options.items() for value in values or ()]
    return " ".join(words)
