"""Measured profiles, one JSON file per model: `{"schema": 2, "model_id": "<32 hex digits>", "repairs": …, …}`.

A profile counts only for the exact model (`ModelId`) it was measured on. Without one, reuse is exact only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec

from kvcomm_p2p.errors import ModelError
from kvcomm_p2p.model.spec import Profile
from kvcomm_p2p.planning.divergence import DivergenceFit
from kvcomm_p2p.planning.types import Provenance, Repair
from kvcomm_p2p.protocol.ids import ModelId

SCHEMA = 2
SHIPPED_DIR = Path(__file__).parent / "profiles"


def load_profile(model_id: ModelId, extra_dirs: Iterable[Path] = ()) -> Profile | None:
    """The profile measured on exactly this model, or None. `extra_dirs` (a user's own measurements) win over shipped
    ones.

    Raises `ModelError` naming the file if a profile of this model cannot be used.
    """
    for folder in (*extra_dirs, SHIPPED_DIR):
        for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
            document = _read(path)
            if document.get("model_id") == model_id.hex():
                return _profile(document, path)
    return None


def shipped_profile(name: str) -> Profile | None:
    """The profile that comes with us under this name, whatever model is here; None if there is none. Raises ModelError."""
    path = SHIPPED_DIR / f"{name}.json"
    return _profile(_read(path), path) if path.is_file() else None


def save_profile(model_id: ModelId, profile: Profile, path: Path) -> None:
    """Writes a profile as JSON, replacing the file atomically."""
    document = {
        "schema": SCHEMA,
        "model_id": model_id.hex(),
        "run_tokens_min": profile.run_tokens_min,
        "repairs": {
            provenance.name.lower(): [
                {name: getattr(repair, name) for name in _Repair.__struct_fields__} for repair in repairs
            ]
            for provenance, repairs in sorted(profile.repairs.items())
        },
        "short": {provenance.name.lower(): kl for provenance, kl in sorted(profile.short.items())},
        "divergence": asdict(profile.divergence),
        "selection": profile.selection,
        "int8": profile.int8,
        "measured": profile.measured,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"the profile {path} cannot be read ({error}): delete it and measure again") from error
    if not isinstance(document, dict):
        raise ModelError(f"the profile {path} is not a JSON object: delete it and measure again")
    return document


def _profile(document: dict[str, Any], path: Path) -> Profile:
    if document.get("schema") != SCHEMA:
        raise ModelError(
            f"the profile {path} has schema {document.get('schema')!r}, not {SCHEMA}: delete it and run kvcomm calibrate"
        )
    try:
        return msgspec.convert(document, _Document).profile()
    except (msgspec.ValidationError, KeyError) as error:
        raise ModelError(f"the profile {path} cannot be used ({error}): delete it and run kvcomm calibrate") from error


class _Repair(msgspec.Struct, forbid_unknown_fields=True):
    head_tokens: Annotated[int, msgspec.Meta(ge=0)]
    probe_share: Annotated[float, msgspec.Meta(ge=0, le=0.5)]
    shift: bool
    kl: Annotated[float, msgspec.Meta(ge=0)]


class _Divergence(msgspec.Struct, forbid_unknown_fields=True):
    intercept: float
    body: Annotated[float, msgspec.Meta(ge=0)]
    head: Annotated[float, msgspec.Meta(ge=0)]
    entropy: float
    spread: Annotated[float, msgspec.Meta(ge=0)]
    prompts: Annotated[int, msgspec.Meta(ge=1)]
    shifted: float = 0.0


class _Document(msgspec.Struct):
    """What the JSON holds."""

    run_tokens_min: Annotated[int, msgspec.Meta(ge=1)]
    repairs: dict[str, list[_Repair]]
    divergence: _Divergence
    measured: str
    short: dict[str, Annotated[float, msgspec.Meta(ge=0)]] = {}
    selection: Literal["head", "predictor"] = "head"
    int8: Annotated[float, msgspec.Meta(ge=0)] | None = None

    def profile(self) -> Profile:
        """Raises KeyError for a provenance that does not exist."""
        repairs = {
            Provenance[name.upper()]: tuple(Repair(**msgspec.structs.asdict(each)) for each in options)
            for name, options in self.repairs.items()
            if options
        }
        divergence = DivergenceFit(**msgspec.structs.asdict(self.divergence))
        short = {Provenance[name.upper()]: kl for name, kl in self.short.items()}
        return Profile(
            run_tokens_min=self.run_tokens_min,
            repairs=MappingProxyType(repairs),
            divergence=divergence,
            measured=self.measured,
            short=MappingProxyType(short),
            selection=self.selection,
            int8=self.int8,
        )
