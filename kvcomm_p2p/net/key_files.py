"""A look at the files of a state directory that have to do with keys: whether a node could start with them."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvcomm_p2p.errors import ConfigError
from kvcomm_p2p.net.gate import open_gate
from kvcomm_p2p.net.identity import load_allowed, load_identity
from kvcomm_p2p.net.keys import KEY_FILE, ClusterKeys, cluster_mark, load_old_seal, read_secret


def look(state_dir: Path, bind_host: str, *, encrypted: bool) -> dict[str, Any]:
    """`problems`: (what, fix) of files that cannot be used, and of what a node that listens on `bind_host` lacks;
    `cluster_mark`: of the secret that is there now, "" if there is none. Makes and changes nothing."""
    problems: list[tuple[str, str]] = []
    mark = ""
    if state_dir.exists():
        status = state_dir.stat()
        if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) & 0o022:
            problems.append((f"other users can change files in {state_dir}", f"chmod 700 {state_dir}"))
        for check in (load_identity, load_allowed, _old_secret):
            _try(lambda check=check: check(state_dir), problems)  # type: ignore[misc]
        if (state_dir / KEY_FILE).exists():
            _try(lambda: read_secret(state_dir), problems)
            if not any(KEY_FILE in what for what, _ in problems):
                mark = cluster_mark(ClusterKeys.derive(read_secret(state_dir)).content)
    if not problems:
        _try(lambda: open_gate(state_dir, bind_host, encrypted=encrypted), problems)
    return {"problems": problems, "cluster_mark": mark}


def _old_secret(state_dir: Path) -> object:
    return load_old_seal(state_dir, 0.0)


def _try(load: Callable[[], object], problems: list[tuple[str, str]]) -> None:
    """The errors of our own say what to do behind a semicolon or a colon."""
    try:
        load()
    except ConfigError as error:
        text = str(error)
        for mark in ("; ", ": "):
            what, found, fix = text.rpartition(mark)
            if found:
                problems.append((what, fix))
                return
        problems.append((text, ""))
