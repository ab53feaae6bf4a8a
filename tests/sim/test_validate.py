"""Real processes with a tiny model, recorded, simulated again, compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from kvcomm_p2p.errors import ConfigError, UsageError
from kvcomm_p2p.evaluation.documents import ROLES, library, topic_text
from kvcomm_p2p.evaluation.recorded_run import RecordedRun, read_run
from kvcomm_p2p.evaluation.validate import make_prompts, record_run
from kvcomm_p2p.model.runner import ModelRunner
from kvcomm_p2p.planning.types import ReuseRules
from kvcomm_p2p.sim.agreement import agreement
from kvcomm_p2p.sim.cost_table import load_table, save_table
from kvcomm_p2p.sim.recorded import read_real_run
from kvcomm_p2p.sim.scenario import check_scenario
from kvcomm_p2p.sim.study import run_study
from kvcomm_p2p.sim.workloads import Part, Step, Verdict, answer_of, prompt_of

pytestmark = pytest.mark.timeout(300)  # processes that load torch, on machines that do other things meanwhile

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def model_folder(tiny_llama: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model on disk whose tokens are words, since roles and documents are counted in them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([*ROLES.values(), topic_text("execmodel", 30_000)], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = TEMPLATE
    folder = tmp_path_factory.mktemp("model")
    tiny_llama(vocab_size=len(tokenizer), max_position_embeddings=4096).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def recording(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RecordedRun, Path]:
    """Three agents, one question each after their greetings; without a profile, so that reuse is exact."""
    run = record_run(model=str(model_folder), agents=3, requests=1, pause_s=1.0)
    path = tmp_path_factory.mktemp("recording") / "real.jsonl"
    run.write(path)
    return run, path


def test_a_simulation_repeats_what_real_processes_did(recording: tuple[RecordedRun, Path], tmp_path: Path) -> None:
    run, path = recording
    layout = ModelRunner.load(run.head.model).spec.layout
    table = replace(
        load_table("smollm2-135m-2-cores"),
        layers=layout.layers,
        kv_heads=layout.kv_heads,
        key_dim=layout.key_dim,
        value_dim=layout.value_dim,
        dtype=layout.dtype,
    )
    save_table(table, tmp_path / "tiny.json")
    real = read_real_run(path)
    scenario = check_scenario(real.scenario(path, str(tmp_path / "tiny.json")))
    (observed,) = run_study(scenario, ReuseRules(approximate=False, reason="no profile")).observed
    told = {each.name: each for each in agreement(real, observed)}
    assert observed.unanswered == 0 and len(observed.outcomes) == len(run.requests)
    # What is covered does not depend on what things cost; whether reusing so little pays, where a forward takes 10 ms, does.
    assert told["covered by donors"].real > 0
    assert 0 <= told["not recomputed"].simulated <= told["covered by donors"].simulated
    assert told["metadata per node"].real > 0 and abs(told["metadata per node"].differs) < 0.5
    assert told["first token, p50"].n == 3


def test_recordings_read_back_and_others_are_refused(recording: tuple[RecordedRun, Path], tmp_path: Path) -> None:
    run, path = recording
    assert read_run(path) == run
    real = read_real_run(path)
    for request, task in zip(run.requests, real.tasks(), strict=True):
        (step,) = task.steps
        assert prompt_of(step, {}).tolist() == request.prompt and answer_of(step, "").tolist() == request.answer
        assert (task.at_s, step.agent, step.contents) == (request.at_s, request.agent, tuple(request.marks))
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(b"\n".join(path.read_bytes().splitlines()[:-1]))
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"record": "nothing"}))
    for bad in (cut, other, tmp_path / "missing.jsonl"):
        with pytest.raises(UsageError, match="recording"):
            read_run(bad)
        with pytest.raises(ConfigError, match="recording"):
            read_real_run(bad)
    with pytest.raises(ConfigError, match="set agents to that"):
        check_scenario({**real.scenario(path, "smollm2-135m-2-cores"), "agents": 4, "up_s": []})


def test_everybody_is_asked_in_every_round_and_documents_come_again(model_folder: Path) -> None:
    from transformers import AutoTokenizer

    prompts = make_prompts(AutoTokenizer.from_pretrained(model_folder), 4, 3, seed=1, topics=library())
    assert [sorted(prompt.agent for prompt in prompts[at : at + 4]) for at in (0, 4, 8)] == [[0, 1, 2, 3]] * 3
    texts = [text for prompt in prompts for text in prompt.slots.values()]
    assert len(texts) == 24 and len(set(texts)) < 24
    assert all(prompt.slots["first"] != prompt.slots["second"] for prompt in prompts)
    assert prompts == make_prompts(AutoTokenizer.from_pretrained(model_folder), 4, 3, seed=1, topics=library())


def test_parts_can_be_token_ids() -> None:
    ids = np.array([5, 70000, 9], "<u4")
    step = Step(0, (Part("x", 2), Part("", 3, ids=ids.tobytes())), 3, answer_ids=ids.tobytes())
    assert prompt_of(step, {})[-3:].tolist() == [5, 70000, 9] and answer_of(step, "other").tolist() == [5, 70000, 9]
    assert step.prompt_tokens == 5 and step.verdict is Verdict.KEPT
