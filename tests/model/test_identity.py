"""ModelId changes with everything that changes KV, and with nothing else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcomm_p2p.model import identity
from kvcomm_p2p.model.runner import ModelRunner


def model_id(model: Any, tokenizer: Any = None) -> bytes:
    return ModelRunner.from_model(model, tokenizer, "any name").spec.model_id


def test_same_weights_are_the_same_model(tiny_llama: Callable[..., Any]) -> None:
    assert model_id(tiny_llama()) == model_id(tiny_llama())
    assert len(model_id(tiny_llama())) == 16


def test_one_weight_makes_another_model(tiny_llama: Callable[..., Any]) -> None:
    changed = tiny_llama()
    with torch.no_grad():
        changed.model.layers[1].mlp.down_proj.weight[3, 5] += 1e-6
    assert model_id(changed) != model_id(tiny_llama())


def test_dtype_makes_another_model(tiny_llama: Callable[..., Any]) -> None:
    ids = {model_id(tiny_llama().to(dtype)) for dtype in (torch.float32, torch.bfloat16, torch.float16)}
    assert len(ids) == 3


def test_tokenizer_makes_another_model(tiny_llama: Callable[..., Any], tiny_tokenizer: Any) -> None:
    model = tiny_llama(vocab_size=259)
    other = copy.deepcopy(tiny_tokenizer)
    other.add_tokens(["<extra>"])
    assert len({model_id(model), model_id(model, tiny_tokenizer), model_id(model, other)}) == 3


def test_per_call_tokenizer_settings_do_not_count(tiny_tokenizer: Any) -> None:
    other = copy.deepcopy(tiny_tokenizer)
    other.backend_tokenizer.enable_truncation(max_length=7)
    other.chat_template = "{{ messages }}"
    assert identity.tokenizer_digest(other) == identity.tokenizer_digest(tiny_tokenizer)


@pytest.mark.parametrize(
    "change", [{"rms_norm_eps": 1e-3}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}], ids=str
)
def test_config_that_shapes_kv_makes_another_model(tiny_llama: Callable[..., Any], change: dict[str, Any]) -> None:
    assert model_id(tiny_llama(**change)) != model_id(tiny_llama())


def test_an_adapter_makes_another_model(tiny_llama: Callable[..., Any]) -> None:
    model = tiny_llama()
    plain = model_id(model)
    model.peft_config = {"default": {"r": 4}}
    model.active_adapters = lambda: ["default"]
    assert model_id(model) != plain


def test_the_digest_is_remembered_until_a_file_changes(
    tiny_llama: Callable[..., Any], tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, cache = tmp_path / "model", tmp_path / "cache"
    tiny_llama(vocab_size=259).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    first = ModelRunner.load(folder, cache_dir=cache).spec.model_id
    computed: list[int] = []
    original = identity.weights_digest
    monkeypatch.setattr(identity, "weights_digest", lambda model: computed.append(1) or original(model))
    assert ModelRunner.load(folder, cache_dir=cache).spec.model_id == first
    assert computed == []
    tiny_llama(seed=1, vocab_size=259).save_pretrained(folder)
    assert ModelRunner.load(folder, cache_dir=cache).spec.model_id != first
    assert computed == [1]


def test_in_memory_and_loaded_are_the_same_model(
    tiny_llama: Callable[..., Any], tiny_tokenizer: Any, tmp_path: Path
) -> None:
    model = tiny_llama(vocab_size=259)
    model.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    loaded = ModelRunner.load(tmp_path, cache_dir=tmp_path / "cache")
    assert loaded.spec.model_id == model_id(model, loaded.tokenizer)


def test_parts_say_what_differs(tiny_llama: Callable[..., Any]) -> None:
    def parts(model: Any) -> dict[str, str]:
        return dict(ModelRunner.from_model(model, None, "any name").spec.identity_parts)

    plain = parts(tiny_llama())
    assert parts(tiny_llama()) == plain
    assert set(plain) == {"version", "kv_dtype", "kv_shape", "weights", "tokenizer", "adapter", "rotary", "config"}
    weights = tiny_llama()
    with torch.no_grad():
        weights.model.layers[1].mlp.down_proj.weight[3, 5] += 1e-6
    changed = {
        "weights": parts(weights),
        "rotary": parts(tiny_llama(rope_parameters={"rope_type": "default", "rope_theta": 5e5})),
        "config": parts(tiny_llama(rms_norm_eps=1e-3)),
    }
    for name, found in changed.items():
        assert {part for part in plain if plain[part] != found[part]} == {name}
