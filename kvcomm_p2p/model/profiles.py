"""Measured profiles, one JSON file per model: `{"schema": 1, "model_id": "<32 hex digits>", "head_tokens": …, …}`.

A profile counts only for the exact model (`ModelId`) it was measured on. Without one, reuse is exact only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvcomm_p2p.errors import ModelError
from kvcomm_p2p.model.spec import Profile
from kvcomm_p2p.protocol.ids import ModelId

SCHEMA = 1
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


def save_profile(model_id: ModelId, profile: Profile, path: Path) -> None:
    """Writes a profile as JSON, replacing the file atomically."""
    document = {
        "schema": SCHEMA,
        "model_id": model_id.hex(),
        "head_tokens": profile.head_tokens,
        "run_tokens_min": profile.run_tokens_min,
        "residual_max": profile.residual_max,
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
    fields = {"head_tokens": int, "run_tokens_min": int, "residual_max": float, "measured": str}
    if document.get("schema") != SCHEMA:
        raise ModelError(f"the profile {path} has schema {document.get('schema')!r}, not {SCHEMA}: measure again")
    for name, kind in fields.items():
        value = document.get(name)
        valid = isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool)
        if not valid or (kind is not str and value <= 0):  # type: ignore[operator]
            raise ModelError(f"the profile {path} has {name} = {value!r}: measure again")
    return Profile(**{name: kind(document[name]) for name, kind in fields.items()})
