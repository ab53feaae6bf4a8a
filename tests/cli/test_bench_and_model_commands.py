from __future__ import annotations

import json
from pathlib import Path

from harness import Kvcomm

from kvcomm_p2p.cli.app import Mode
from kvcomm_p2p.cli.node import DEFAULT_MODEL


def test_a_measurement_is_a_table_for_people(kvcomm: Kvcomm) -> None:
    done = kvcomm.run("bench", "ttft", "--model", "tiny")
    assert done.returncode == 0
    assert "ttft_median" in done.stdout
    assert "10 ×" in done.stdout
    assert done.stderr == "measuring\n"


def test_a_measurement_is_one_object_for_machines(kvcomm: Kvcomm, tmp_path: Path) -> None:
    done = kvcomm.run("bench", "ttft", "--json", "--save", str(tmp_path / "new" / "ttft.json"))
    assert json.loads(done.stdout)["rows"][0]["case"] == "smollm2-135m"
    assert json.loads((tmp_path / "new" / "ttft.json").read_text()) == json.loads(done.stdout)


def test_a_missing_model_is_one_sentence(kvcomm: Kvcomm) -> None:
    done = kvcomm.run("bench", "ttft", "--model", "missing")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: the model missing is not here yet: run `kvcomm model pull missing`\n"


def test_models_that_are_here_and_not(kvcomm: Kvcomm, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    done = kvcomm.run("model", "ls", KVCOMM_CACHE_DIR=str(tmp_path))
    assert str(folder) in done.stdout
    assert "not here yet: kvcomm model pull smollm2-135m" in done.stdout
    models = json.loads(kvcomm.run("model", "ls", "--json", KVCOMM_CACHE_DIR=str(tmp_path)).stdout)["models"]
    assert {model["ref"]: model["folder"] for model in models} == {"smollm2-135m": None, "tiny": str(folder)}


def test_a_model_that_cannot_be_pulled(kvcomm: Kvcomm, tmp_path: Path) -> None:
    done = kvcomm.run("model", "pull", "not a model", KVCOMM_CACHE_DIR=str(tmp_path))
    assert done.returncode == 1
    assert "'not a model' is neither a folder, nor smollm2-135m, nor a hub id" in done.stderr
    assert "Traceback" not in done.stderr


def test_wrong_settings_are_all_named(kvcomm: Kvcomm) -> None:
    done = kvcomm.run("status", KVCOMM_POOL_BYTES_MAX="much", KVCOMM_GOSIP_INTERVAL_S="1")
    assert done.returncode == 1
    assert "KVCOMM_POOL_BYTES_MAX: 'much' is not a size" in done.stderr
    assert "did you mean KVCOMM_GOSSIP_INTERVAL_S?" in done.stderr


def test_constants_that_are_repeated_to_stay_light() -> None:
    from kvcomm_p2p.model import registry
    from kvcomm_p2p.planning import types

    assert DEFAULT_MODEL == registry.DEFAULT_MODEL
    assert [mode.value for mode in Mode] == [mode.value for mode in types.Mode]


def test_version_and_usage(kvcomm: Kvcomm) -> None:
    from kvcomm_p2p import __version__

    assert kvcomm.run("--version").stdout == f"kvcomm {__version__}\n"
    assert kvcomm.run("no-such-command").returncode == 2
    assert kvcomm.run("node").returncode == 2
    assert "Traceback" not in kvcomm.run("node", "--port", "70000", "--name", "a").stderr
