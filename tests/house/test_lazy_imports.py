"""What stays unloaded until it is needed: seconds of start-up for every command."""

from __future__ import annotations

import subprocess
import sys

import pytest
from house import ROOT

HEAVY = ("torch", "transformers", "zmq", "accelerate", "triton")


def loaded(source: str, *names: str) -> set[str]:
    """Which of the modules `names` a fresh interpreter has after running `source`."""
    tail = f"\nimport sys\nsys.stderr.write(' '.join(name for name in {names!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", source + tail], capture_output=True, text=True, timeout=60, check=True)
    return set(done.stderr.split())


@pytest.mark.parametrize(
    "source",
    [
        "import kvcomm_p2p",
        "import kvcomm_p2p; dir(kvcomm_p2p); kvcomm_p2p.KVCommError",
        "import kvcomm_p2p.cli",
        "import kvcomm_p2p.evaluation.results",
    ],
)
def test_nothing_heavy_and_no_numpy_or_typer(source: str) -> None:
    assert loaded(source, *HEAVY, "numpy", "typer", "rich") == set()


@pytest.mark.parametrize(
    "source",
    [
        "from kvcomm_p2p.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit: pass",
        "from kvcomm_p2p.cli import main\ntry:\n    main(['status', '--help'])\nexcept SystemExit: pass",
        "from kvcomm_p2p.cli import main\ntry:\n    main(['--version'])\nexcept SystemExit: pass",
    ],
)
def test_help_needs_neither_models_nor_arrays(source: str) -> None:
    assert loaded(source, *HEAVY, "numpy") == set()


@pytest.mark.parametrize(
    "module", ["protocol", "planning", "sim", "local_api", "settings", "cli.node", "cli.up", "cli.ask"]
)
def test_light_rooms(module: str) -> None:
    assert loaded(f"import kvcomm_p2p.{module}", *HEAVY) == set()


def test_the_example_shares_cores_before_torch_is_there() -> None:
    example = str(ROOT / "examples" / "two_agents.py")
    assert loaded(f"import runpy; runpy.run_path({example!r}, run_name='example')", *HEAVY) == set()


def test_the_test_sees_what_is_loaded() -> None:
    assert loaded("import numpy", "numpy", "zmq") == {"numpy"}


def test_every_public_name_resolves() -> None:
    source = "import kvcomm_p2p\nfor name in kvcomm_p2p.__all__: assert getattr(kvcomm_p2p, name), name"
    assert "torch" in loaded(source, "torch")


def test_an_unknown_name_is_an_attribute_error() -> None:
    import kvcomm_p2p

    with pytest.raises(AttributeError, match="Agnet"):
        _ = kvcomm_p2p.Agnet
