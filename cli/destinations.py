"""Files and folders that a long command writes at its end: whether it can, before it begins."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from kvcomm_p2p.errors import ConfigError


def check_can_write(files: Iterable[Path | None], folders: Iterable[Path | None] = ()) -> None:
    """Makes the folders. Raises ConfigError. None: nothing is to be written."""
    for folder in folders:
        if folder is not None and not os.access(made(folder), os.W_OK):
            raise ConfigError(f"nothing can be written into {folder}: choose another folder")
    for path in files:
        if path is None:
            continue
        if not os.access(made(path.parent), os.W_OK) or path.is_dir():
            raise ConfigError(f"{path} cannot be written: choose another file")


def made(folder: Path) -> Path:
    """The folder, which is there then. Raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror or error}") from error
    return folder
