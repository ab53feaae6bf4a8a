"""kvcomm doctor on real encrypted nodes: what two people do wrong with keys, and what the doctor tells each of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Kvcomm, Process, eventually

from kvcomm_p2p.net.identity import allow, load_allowed, load_identity, make_identity
from kvcomm_p2p.net.keys import load_cluster_keys, rotate_cluster_key

pytestmark = pytest.mark.timeout(300)


class Machine:
    """A state directory, a runtime directory and an address: as good as another computer."""

    def __init__(self, folder: Path, runtime_dir: Path, host: str, model: Path) -> None:
        self.state = folder
        self.kvcomm = Kvcomm(runtime_dir, fakes=False)
        self.kvcomm.environment |= {
            "KVCOMM_STATE_DIR": str(folder),
            "KVCOMM_ENCRYPT": "always",
            "KVCOMM_BIND_HOST": host,
        }
        self._model = model

    def node(self, name: str, *arguments: str) -> Process:
        return self.kvcomm.node(name, "--model", str(self._model), *arguments)

    def problems(self, check: str) -> list[tuple[str, str]]:
        """What the doctor finds here, with what to do."""
        done = self.kvcomm.run("doctor", "--json")
        found = [each for node in json.loads(done.stdout)["nodes"] for each in node["findings"]]
        return [(each["text"], each["fix"]) for each in found if each["check"] == check and each["level"] == "problem"]


@pytest.fixture
def machines(tmp_path: Path, runtime_dir: Path, tiny_model: Path) -> Iterator[tuple[Machine, Machine, Machine]]:
    """Alice's, bob's, and the one that bob's will be copied to."""
    runtime_dir.mkdir(mode=0o700)
    made = [
        Machine(tmp_path / name, runtime_dir / name, f"127.0.0.{2 + number}", tiny_model)
        for number, name in enumerate(("alice", "bob", "copy"))
    ]
    yield made[0], made[1], made[2]
    for machine in made:
        machine.kvcomm.close()


def test_from_nobody_let_in_to_two_with_one_identity(machines: tuple[Machine, Machine, Machine]) -> None:
    alice, bob, copy = machines
    bob.state.mkdir(mode=0o700)
    [(text, fix)] = bob.problems("keys on disk")
    assert "needs keys" in text and "kvcomm keys new" in fix

    for machine in (alice, bob):
        make_identity(machine.state)
    allow(bob.state, load_identity(alice.state).public.line("alice"))  # type: ignore[union-attr]
    load_cluster_keys(alice.state)
    shutil.copy(alice.state / "cluster.key", bob.state / "cluster.key")
    seed = alice.node("ann").ready["address"]
    bob.node("ben", "--join", f"{seed}#alice")
    assert eventually(lambda: any("does not let this one in" in text for text, _ in bob.problems("connections")))
    [(text, fix), *_] = bob.problems("connections")
    line = load_identity(bob.state).public.line()  # type: ignore[union-attr]
    assert seed in text and f"kvcomm keys allow '{line}'" in fix
    [(text, fix)] = alice.problems("connections")
    assert "from 127.0.0.1 was not let in" in text and "kvcomm keys allow" in fix

    allow(alice.state, line, "bob")
    assert load_allowed(alice.state)
    assert eventually(lambda: not alice.problems("peers")), "they have met"
    assert not alice.problems("connections")

    shutil.copytree(bob.state, copy.state)
    copy.node("ben", "--join", f"{seed}#alice")
    for machine in (bob, copy):
        assert eventually(lambda machine=machine: bool(machine.problems("identity")))
        [(text, fix)] = machine.problems("identity")
        assert "same identity and name" in text and "KVCOMM_STATE_DIR" in fix

    rotate_cluster_key(alice.state)
    (alice.state / "allowed.peers").chmod(0o644)
    found = alice.problems("keys on disk")
    assert any("chmod 600" in fix for _, fix in found) and any("restart this node" in fix for _, fix in found)
