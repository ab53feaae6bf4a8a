"""A scenario as the TOML that it can be read from again."""

from __future__ import annotations

from typing import Any

import msgspec

from kvcomm_p2p.sim.scenario import Scenario


def scenario_toml(scenario: Scenario, comment: str = "") -> str:
    """Only keys that differ from their defaults, and the name, which is part of the seed. `comment`: lines put in front."""
    told = _differing(scenario)
    text = msgspec.toml.encode({"name": scenario.name, **told}).decode()
    return "".join(f"# {line}\n" for line in comment.splitlines()) + text


def _differing(value: Any) -> dict[str, Any]:
    """Fields of a Struct in plain types, without those that are as declared; TOML has no null, which is always a default."""
    told: dict[str, Any] = {}
    for field in msgspec.structs.fields(value):
        given = getattr(value, field.name)
        default = field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default
        if given == default:
            continue
        if isinstance(given, msgspec.Struct):
            told[field.encode_name] = _differing(given)
        elif isinstance(given, tuple) and given and isinstance(given[0], msgspec.Struct):
            told[field.encode_name] = [_differing(each) for each in given]
        else:
            told[field.encode_name] = msgspec.to_builtins(given)
    return told
