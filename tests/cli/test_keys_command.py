"""`kvcomm keys`: two people on two machines find each other, and no secret ever shows."""

from __future__ import annotations

import base64
import json
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvcomm_p2p.cli.app import app
from kvcomm_p2p.net.keys import ClusterKeys


class Machine:
    """A state directory with its command line. `seen` is everything that it ever printed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen = ""

    def run(self, *arguments: str, code: int = 0) -> Result:
        environment = {"KVCOMM_STATE_DIR": str(self.folder), "XDG_CONFIG_HOME": str(self.folder / "none")}
        result = CliRunner().invoke(app, ["keys", *arguments], env=environment)
        assert result.exit_code == code, result.output
        self.seen += result.output
        return result

    def secrets(self) -> list[bytes]:
        secrets = []
        for name in ("identity.key", "cluster.key", "cluster.key.old"):
            if (self.folder / name).exists():
                content = (self.folder / name).read_bytes()
                secrets += [content[at : at + 32] for at in range(0, len(content) - 31, 32)]
        derived = [ClusterKeys.derive(secret) for secret in secrets]
        return [*secrets, *(keys.seal for keys in derived), *(keys.content for keys in derived)]


@pytest.fixture
def alice(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "alice")


@pytest.fixture
def bob(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "bob")


def last(result: Result) -> str:
    return result.stdout.strip().splitlines()[-1]


def test_two_machines_become_one_cluster_and_no_secret_is_printed(alice: Machine, bob: Machine) -> None:
    line = last(bob.run("new", "--label", "bob"))
    alice.run("new")
    invitation = last(alice.run("invite", line))
    bob.run("accept", invitation, "--name", "alice")
    assert (alice.folder / "cluster.key").read_bytes() == (bob.folder / "cluster.key").read_bytes()
    assert "bob" in alice.run("list").stdout and "alice" in bob.run("list").stdout
    for machine in (alice, bob):
        machine.run("show", "--json")
        machine.run("rotate")
        machine.run("list", "--json")
        assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in machine.folder.iterdir())
        for secret in (*alice.secrets(), *bob.secrets()):
            for spelled in (secret.hex(), base64.b64encode(secret).decode(), base64.urlsafe_b64encode(secret).decode()):
                assert spelled.rstrip("=") not in machine.seen


def test_an_invitation_is_for_one(alice: Machine, bob: Machine, tmp_path: Path) -> None:
    line = last(bob.run("new"))
    alice.run("new")
    invitation = last(alice.run("invite", line))
    carol = Machine(tmp_path / "carol")
    carol.run("new")
    assert "made for another line" in carol.run("accept", invitation, code=1).output
    assert "copy the whole word" in bob.run("accept", invitation[:-9], code=1).output
    changed = invitation[:150] + ("A" if invitation[150] != "A" else "B") + invitation[151:]
    assert "damaged" in bob.run("accept", changed, code=1).output
    assert not (bob.folder / "cluster.key").exists()


def test_allow_rename_and_revoke(alice: Machine, bob: Machine) -> None:
    line = last(bob.run("new"))
    alice.run("allow", line, "--name", "bob")
    alice.run("allow", line, "--name", "robert")
    [peer] = json.loads(alice.run("list", "--json").stdout)["allowed"]
    assert peer["name"] == "robert" and peer["line"] == line + "#robert"
    assert "allowed: robert" in alice.run("revoke", "bob", code=1).output
    alice.run("revoke", peer["fingerprint"])
    assert json.loads(alice.run("list", "--json").stdout) == {"allowed": []}


def test_a_peer_keeps_its_name_unless_another_is_given(alice: Machine, bob: Machine) -> None:
    line = last(bob.run("new", "--label", "bob"))
    alice.run("new", "--label", "al")
    for name in ("robert", "bobby"):
        invitation = last(alice.run("invite", line, "--name", name))
        assert f"{name} (" in alice.run("invite", line).stderr
        assert f"{name} (" in alice.run("allow", line).stdout
    bob.run("accept", invitation, "--name", "alice")
    assert bob.run("accept", invitation).stdout.startswith("alice (")
    assert len(bob.run("list").stdout.splitlines()) == len(alice.run("list").stdout.splitlines()) == 1


def test_what_can_go_wrong(alice: Machine, bob: Machine) -> None:
    assert "run `kvcomm keys new`" in alice.run("show", code=1).output
    line = last(alice.run("new"))
    assert "has an identity" in alice.run("new", code=1).output
    assert "itself" in alice.run("allow", line, code=1).output
    assert "copy the whole line" in bob.run("allow", line[:-4], code=1).output
    assert "copy the whole line" in bob.run("allow", "ssh-ed25519 AAAA", code=1).output
    assert "cannot be a peer's name" in bob.run("allow", line, "--name", "a b", code=1).output
    (alice.folder / "identity.key").chmod(0o644)
    assert "chmod 600" in alice.run("show", code=1).output
