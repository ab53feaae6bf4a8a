"""Profiles load for exactly the model they were measured on, or complain by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcomm_p2p.errors import ModelError
from kvcomm_p2p.model.profiles import SHIPPED_DIR, load_profile, save_profile
from kvcomm_p2p.model.spec import Profile
from kvcomm_p2p.protocol.ids import ModelId

ME, OTHER = ModelId(b"m" * 16), ModelId(b"o" * 16)
PROFILE = Profile(head_tokens=8, run_tokens_min=16, residual_max=0.5, measured="by this test")


def test_only_the_same_model_gets_the_profile(tmp_path: Path) -> None:
    save_profile(ME, PROFILE, tmp_path / "a.json")
    save_profile(OTHER, Profile(1, 2, 3.0, "other"), tmp_path / "b.json")
    assert load_profile(ME, [tmp_path]) == PROFILE
    assert load_profile(ModelId(b"x" * 16), [tmp_path, tmp_path / "missing"]) is None


@pytest.mark.parametrize(
    "change", [{"schema": 2}, {"head_tokens": 0}, {"head_tokens": True}, {"residual_max": "1"}, {"measured": None}]
)
def test_unusable_profiles_are_named(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "bad.json"
    save_profile(ME, PROFILE, path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError, match=r"bad\.json"):
        load_profile(ME, [tmp_path])


@pytest.mark.parametrize("text", ["{", "[]"])
def test_broken_files_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "broken.json").write_text(text)
    with pytest.raises(ModelError, match=r"broken\.json"):
        load_profile(ME, [tmp_path])


def test_shipped_profiles_are_valid() -> None:
    for path in SHIPPED_DIR.glob("*.json"):
        model_id = ModelId(bytes.fromhex(json.loads(path.read_text())["model_id"]))
        assert load_profile(model_id) is not None
    assert SHIPPED_DIR.is_dir()
