"""What is in the wheel: one package, all of it, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from house import PACKAGE_FOLDERS, ROOT, sources

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def installed_name(path: Path) -> str:
    """Path in the wheel of a file of the repository."""
    folder, _, rest = path.relative_to(ROOT).as_posix().partition("/")
    return f"{PACKAGE_FOLDERS[folder].replace('.', '/')}/{rest}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    # From a copy: a build leaves files beside its sources.
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for folder in PACKAGE_FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "tests").mkdir()
    (copy / "tests" / "test_nothing.py").touch()
    out = tmp_path_factory.mktemp("wheel")
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        out,
        copy,
    ]
    done = subprocess.run(build, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [path] = out.glob("*.whl")
    return zipfile.ZipFile(path)


def test_every_package_folder_is_declared() -> None:
    declared = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    )
    found = {
        installed_name(path.parent / "x").removesuffix("/x").replace("/", ".") for path in sources(*PACKAGE_FOLDERS)
    }
    assert declared == found


def test_the_wheel_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    expected = {installed_name(path) for path in sources(*PACKAGE_FOLDERS)}
    expected |= {installed_name(path) for path in (ROOT / "kvcomm_p2p").rglob("profiles/*.json")}
    expected.add("kvcomm_p2p/py.typed")
    assert names == expected


def test_the_wheel_has_the_command_and_the_licence(wheel: zipfile.ZipFile) -> None:
    [entry_points] = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert "kvcomm = kvcomm_p2p.cli:main" in wheel.read(entry_points).decode()
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())
