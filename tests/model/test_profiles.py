"""Profiles load for exactly the model they were measured on, or complain by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvcomm_p2p.errors import ModelError
from kvcomm_p2p.model.profiles import SHIPPED_DIR, load_profile, save_profile
from kvcomm_p2p.model.spec import Profile
from kvcomm_p2p.planning.divergence import DivergenceFit
from kvcomm_p2p.planning.types import Provenance, Repair
from kvcomm_p2p.protocol.ids import ModelId

ME, OTHER = ModelId(b"m" * 16), ModelId(b"o" * 16)
FIT = DivergenceFit(intercept=0.5, body=2.0, head=0.0, entropy=0.25, spread=0.5, prompts=30)
PROFILE = Profile(16, {Provenance.BARE: (Repair(8), Repair(16, 0.1, True, 0.01))}, FIT, measured="by this test")


def test_only_the_same_model_gets_the_profile(tmp_path: Path) -> None:
    save_profile(ME, PROFILE, tmp_path / "a.json")
    save_profile(OTHER, Profile(1, {}, FIT, "other"), tmp_path / "b.json")
    assert load_profile(ME, [tmp_path]) == PROFILE
    assert load_profile(ModelId(b"x" * 16), [tmp_path, tmp_path / "missing"]) is None


def test_short_runs_are_optional(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    save_profile(ME, replace(PROFILE, short={Provenance.ROLE: 0.006}), path)
    loaded = load_profile(ME, [tmp_path])
    assert loaded is not None and loaded.short == {Provenance.ROLE: 0.006}
    document = json.loads(path.read_text())
    del document["short"]
    path.write_text(json.dumps(document))
    assert load_profile(ME, [tmp_path]) == PROFILE


def test_the_first_tokens_are_recomputed_unless_a_profile_says_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    save_profile(ME, replace(PROFILE, selection="predictor"), path)
    loaded = load_profile(ME, [tmp_path])
    assert loaded is not None and loaded.selection == "predictor"
    document = json.loads(path.read_text())
    del document["selection"]
    path.write_text(json.dumps(document))
    loaded = load_profile(ME, [tmp_path])
    assert loaded is not None and loaded.selection == "head"


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 1},
        {"run_tokens_min": 0},
        {"run_tokens_min": True},
        {"repairs": {"nowhere": [{"head_tokens": 1, "probe_share": 0.0, "shift": False, "kl": 0.0}]}},
        {"repairs": {"bare": [{"head_tokens": 1}]}},
        {"repairs": {"bare": [{"head_tokens": 1, "probe_share": 0.9, "shift": False, "kl": 0.0}]}},
        {"short": {"nowhere": 0.01}},
        {"short": {"role": -0.01}},
        {"divergence": {"intercept": "1"}},
        {"measured": None},
        {"selection": "oracle"},
    ],
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
