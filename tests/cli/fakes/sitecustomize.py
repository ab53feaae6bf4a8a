"""On PYTHONPATH, this replaces `kvcomm_p2p.agent` by the fake beside it, in a `kvcomm` process and its children."""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

FAKES = {
    "kvcomm_p2p.agent": "fake_agent.py",
    "kvcomm_p2p.model.decoding": "fake_decoding.py",
    "kvcomm_p2p.evaluation.ttft": "fake_ttft.py",
}


class _FakeFinder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname not in FAKES:
            return None
        return importlib.util.spec_from_file_location(fullname, Path(__file__).parent / FAKES[fullname])


sys.meta_path.insert(0, _FakeFinder())
