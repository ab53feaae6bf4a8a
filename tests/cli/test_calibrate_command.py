"""`kvcomm calibrate` on tiny models in folders: what it writes and says, and what it refuses; measurements are faked."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcomm_p2p.cli.app import app
from kvcomm_p2p.evaluation import calibrate
from kvcomm_p2p.evaluation.calibrate import KL_USEFUL, OPTIONS, PROMPTS_MIN, Sample, profile_path
from kvcomm_p2p.evaluation.cases import Scenario
from kvcomm_p2p.evaluation.methods import Outcome
from kvcomm_p2p.evaluation.metrics import Divergence
from kvcomm_p2p.model.profiles import load_profile
from kvcomm_p2p.model.runner import ModelRunner
from kvcomm_p2p.planning.divergence import Symptoms
from kvcomm_p2p.planning.types import Provenance

CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def model(tiny_llama: Callable[..., Any], tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights in a folder."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_llama(vocab_size=259, max_position_embeddings=8192, num_hidden_layers=2).save_pretrained(folder)
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVCOMM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What was to be measured. "kl": what a repair leaves on a role's copy (default: little)."""
    options: dict[str, Any] = {"kl": 0.01}

    def measure(runner: Any, console: Any = None, **given: Any) -> tuple[list[Sample], list[Symptoms]]:
        options.update(given, console=console)
        kl = options["kl"]
        samples = [
            Sample(
                Scenario.ROLE,
                repair,
                Outcome(Divergence((kl,), 1.0, 1, None), 0.1, Symptoms(0.2, 0.1 * (1 + n / 9), 2.0 + n % 3)),
                {Provenance.ROLE: 0.9},
                float(repair.head_tokens),
            )
            for n in range(PROMPTS_MIN)
            for repair in OPTIONS
        ]
        bad = Outcome(Divergence((1.0,), 1.0, 1, None), 0.1, Symptoms(2.0, 1.0, 2.0))
        samples += [Sample(Scenario.OTHER, s.repair, bad, {Provenance.OTHER: 0.9}, s.tokens) for s in samples]
        return samples, [Symptoms(3.0, 2.0, 2.0)]

    monkeypatch.setattr(calibrate, "measure", measure)
    return options


def kvcomm(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["calibrate", *arguments], catch_exceptions=False)


def profiles(cache_dir: Path) -> list[Path]:
    return sorted((cache_dir / "profiles").rglob("*"))


def test_a_table_and_where_the_profile_is(asked: dict[str, Any], model: Path, cache_dir: Path) -> None:
    done = kvcomm(str(model))
    assert done.exit_code == 0
    runner = ModelRunner.load(model, cache_dir=cache_dir)
    path = profile_path(runner, cache_dir)
    assert profiles(cache_dir) == [path]
    assert runner.spec.profile == load_profile(runner.spec.model_id, [path.parent])
    assert set(runner.spec.profile.repairs) == {Provenance.ROLE}
    for text in ("kvcomm calibrate", "head 8", "predicted within a factor of 3", "nats/token"):
        assert text in done.stdout
    assert f"was written to {path}.\nNodes that are running use it after a restart.\n" in done.stdout
    assert "copy it" not in done.stdout


def test_json_on_stdout_and_the_rest_on_stderr(
    asked: dict[str, Any], model: Path, cache_dir: Path, tmp_path: Path
) -> None:
    path = tmp_path / "new" / "mine.json"
    done = kvcomm(str(model), "--json", "--save-to", str(path))
    result = json.loads(done.stdout)
    assert result["command"] == "calibrate" and result["rows"]
    assert f"was written to {path}." in done.stderr and "after a restart" in done.stderr
    assert f"Nodes look for it in {cache_dir / 'profiles'}: copy it there" in done.stderr
    assert list(path.parent.iterdir()) == [path] and not profiles(cache_dir)


def test_options_are_handed_over(asked: dict[str, Any], model: Path, cache_dir: Path) -> None:
    kvcomm(str(model), "--prompts", "3", "--tokens", "5")
    assert (asked["prompts"], asked["tokens"]) == (3, 5)
    assert asked["console"] is not None
    kvcomm(str(model))
    assert (asked["prompts"], asked["tokens"]) == (calibrate.PROMPTS, 24)
    assert kvcomm(str(model), "--prompts", "1").exit_code == 2


def refused(model: Path | str, *arguments: str) -> str:
    """The sentence with which it ends."""
    done = kvcomm(str(model), *arguments)
    assert (done.exit_code, done.stdout) == (1, "")
    told = str(done.stderr).strip()
    assert told.startswith("error: ") and "\n" not in told
    return told


def test_reuse_that_is_not_good_enough_leaves_nothing(asked: dict[str, Any], model: Path, cache_dir: Path) -> None:
    asked["kl"] = 2 * KL_USEFUL
    assert "no repair keeps 0.05 nats/token on" in refused(model)
    assert not profiles(cache_dir)


def test_random_weights_are_measured_and_refused(model: Path, cache_dir: Path) -> None:
    told = refused(model, "--prompts", "2", "--tokens", "1")
    assert "no repair keeps" in told or "cannot tell wrong blocks" in told
    assert not profiles(cache_dir)


def test_a_model_whose_keys_cannot_be_moved(tiny_tokenizer: Any, cache_dir: Path, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path / "learned"
    config = GPT2Config(vocab_size=259, n_positions=64, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2)
    GPT2LMHeadModel(config).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    assert "allows exact reuse only: " in refused(folder)
    assert not profiles(cache_dir)


def test_a_broken_profile_of_the_model_is_named_with_what_to_do(model: Path, cache_dir: Path) -> None:
    path = profile_path(ModelRunner.load(model, cache_dir=cache_dir), cache_dir)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"schema": 1, "model_id": path.stem}))
    told = refused(model)
    assert f"the profile {path} has schema 1" in told and "delete it and run kvcomm calibrate" in told
    path.write_text("{")
    told = refused(model)
    assert str(path) in told and "delete it and measure again" in told


def test_a_place_that_cannot_be_written_is_told_at_once(model: Path, cache_dir: Path, tmp_path: Path) -> None:
    assert f"the profile {tmp_path} cannot be written" in refused(model, "--save-to", str(tmp_path))


def test_a_model_that_is_not_here(cache_dir: Path) -> None:
    assert "run `kvcomm model pull smollm2-135m`" in refused("smollm2-135m")
