"""Where models come from: the default model by its short name, a local folder, or a hub id."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvcomm_p2p.errors import ModelError

DEFAULT_MODEL = "smollm2-135m"

_DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory and where it came from."""

    model: Any
    tokenizer: Any
    name: str
    files: tuple[Path, ...]
    cache_dir: Path


def default_cache_dir() -> Path:
    """The user's cache directory for kvcomm."""
    return Path(platformdirs.user_cache_dir("kvcomm"))


def load_model(
    ref: str | Path, *, dtype: str = "float32", device: str = "cpu", cache_dir: Path | None = None
) -> LoadedModel:
    """Loads a model and its tokenizer from disk; never downloads. Raises `ModelError` saying what to do instead."""
    if dtype not in _DTYPES:
        raise ModelError(f"dtype must be one of {', '.join(_DTYPES)}, not {dtype!r}")
    cache = cache_dir or default_cache_dir()
    folder = find_folder(ref, cache)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True)
        model = model.to(device)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise ModelError(f"the model in {folder} cannot be loaded: {error}") from error
    files = tuple(sorted((*folder.glob("*.safetensors"), *folder.glob("*.bin"))))
    return LoadedModel(model.eval(), tokenizer, str(ref), files, cache)


def find_folder(ref: str | Path, cache_dir: Path) -> Path:
    """The local folder of a model reference. Raises `ModelError` naming the command that gets it."""
    folder = Path(ref).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"{folder} has no config.json: it is not a model folder of transformers")
        return folder
    if str(ref) == DEFAULT_MODEL:
        pulled = model_dir(cache_dir)
        if not (pulled / "config.json").is_file():
            raise ModelError(f"the model {ref} is not here yet: run `kvcomm model pull {ref}`")
        return pulled
    return _find_hub_folder(str(ref))


def model_dir(cache_dir: Path) -> Path:
    """Where the default model lies once pulled."""
    return cache_dir / "models" / DEFAULT_MODEL


def _find_hub_folder(ref: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(ref, local_files_only=True))
    except HFValidationError as error:
        raise ModelError(f"{ref!r} is neither a folder, nor {DEFAULT_MODEL}, nor a hub id like owner/name") from error
    except LocalEntryNotFoundError as error:
        raise ModelError(f"the model {ref} is not here yet: run `kvcomm model pull {ref}`") from error
