"""Where things are, for the tests of the house."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE_FOLDERS = {
    "kvcomm_p2p": "kvcomm_p2p",
    "protocol": "kvcomm_p2p.protocol",
    "kernels": "kvcomm_p2p.kernels",
    "sim": "kvcomm_p2p.sim",
    "cli": "kvcomm_p2p.cli",
}
"""Top-level folder -> the package it is installed as."""


def sources(*folders: str) -> list[Path]:
    """All Python files below these folders of the repository, sorted."""
    return sorted(
        path for folder in folders for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts
    )


def documents() -> list[Path]:
    """README and everything under docs/, as far as git knows or does not ignore it."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return sorted({ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()})
