"""What goes wrong with keys is remembered for the doctor, at both ends; and what a restart and a copied identity make of it."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from keyed_nodes import KeyedNode, allowed
from net_nodes import TestNode, wait_until

from kvcomm_p2p.doctor_keys import connections, identity
from kvcomm_p2p.errors import ConfigError
from kvcomm_p2p.net.durable import NodeLife, open_life
from kvcomm_p2p.net.gate import Gate
from kvcomm_p2p.net.identity import Identity, allow, make_identity
from kvcomm_p2p.net.invitations import invite, open_invitation
from kvcomm_p2p.net.key_files import look
from kvcomm_p2p.net.keys import ClusterKeys, load_cluster_keys, rotate_cluster_key
from kvcomm_p2p.net.troubles import OTHER_KEY, REFUSED, REMEMBERED_MAX, Troubles
from kvcomm_p2p.net.zmq_transport import ZmqTransport

ALICE, BOB, CAROL = Identity.new(), Identity.new(), Identity.new()


@pytest.fixture
def alice() -> Iterator[KeyedNode]:
    with KeyedNode("alice", ALICE, [allowed(BOB, "bob")]) as node:
        yield node


def problems(node: KeyedNode) -> list[tuple[str, str]]:
    """What the doctor says about connections: text and fix."""

    def facts() -> dict[str, Any]:
        stats = node.ask(lambda driver: driver.stats())
        return {"security": node.ask(lambda driver: driver.security()), "dropped": stats.wire.dropped}

    now = facts()
    before = {**now, "dropped": {}}
    return [(text, fix) for level, text, fix, _ in connections(before, now) if level == "problem"]


def knows(node: KeyedNode, kind: str) -> bool:
    return bool(node.ask(lambda driver: driver.security())[kind])


def test_who_is_not_let_in_is_told_at_both_ends(alice: KeyedNode) -> None:
    with KeyedNode("carol", CAROL, [allowed(ALICE, "alice")]) as carol:
        carol.join(alice.driver.addresses.control + "#alice", timeout_s=0.5)
        assert wait_until(lambda: knows(carol, "failed") and knows(alice, "turned_away"))
        [(text, fix), *_] = problems(carol)
        assert "(alice) does not let this one in" in text and CAROL.public.line() in fix
        [(text, fix), *_] = problems(alice)
        assert "from 127.0.0.1 was not let in" in text and CAROL.public.curve.hex()[:16] in text
        assert "kvcomm keys allow" in fix
    alice.gate.set_allowed([allowed(BOB, "bob"), allowed(CAROL, "carol")])
    assert not knows(alice, "turned_away"), "it is let in by now"


def test_whoever_is_not_who_was_expected_is_told(alice: KeyedNode) -> None:
    with (
        KeyedNode("bob", BOB, [allowed(ALICE, "alice"), allowed(CAROL, "carol")]) as bob,
        TestNode("plain", ZmqTransport()) as plain,
    ):
        for address in (alice.driver.addresses.control, plain.driver.addresses.control):
            bob.join(address + "#carol", timeout_s=0.3)
            seen = lambda address=address: [  # noqa: E731
                row["why"] for row in bob.ask(lambda driver: driver.security())["failed"] if row["address"] == address
            ]
            assert wait_until(lambda seen=seen: seen() == [OTHER_KEY], 8.0), seen()
        assert all("does not have the key of carol" in text for text, _ in problems(bob))
        assert bob.join(alice.driver.addresses.control + "#alice").result == 1


def test_a_secret_that_was_exchanged_on_one_side_is_told_with_the_name(tmp_path: Path, alice: KeyedNode) -> None:
    """As it is after an invitation that was made before the last rotation was accepted."""
    old, new = ClusterKeys.derive(b"o" * 32), ClusterKeys.derive(b"n" * 32)
    with (
        KeyedNode("bob", BOB, [allowed(CAROL, "carol")], keys=old) as bob,
        KeyedNode("carol", CAROL, [allowed(BOB, "robert")], keys=new) as carol,
    ):
        bob.join(carol.driver.addresses.control + "#carol", timeout_s=0.5)
        assert wait_until(lambda: knows(carol, "other_secret"))
        [(text, fix)] = problems(carol)
        assert "robert seals with another secret" in text and "kvcomm keys invite" in fix


def test_an_invitation_from_before_a_rotation_hands_over_the_old_secret(tmp_path: Path) -> None:
    """There is no clock in it; it is found out by the frames, see above."""
    host, guest = tmp_path / "host", tmp_path / "guest"
    for folder in (host, guest):
        make_identity(folder)
    word = invite(host, make_identity(tmp_path / "third").public)
    with pytest.raises(ConfigError, match="made for another line"):
        open_invitation(guest, word)
    before = load_cluster_keys(host)
    rotate_cluster_key(host)
    assert ClusterKeys.derive(open_invitation(tmp_path / "third", word).secret) == before != load_cluster_keys(host)


def test_what_is_remembered_is_bounded() -> None:
    now = [0.0]
    troubles = Troubles(lambda: now[0])
    for number in range(1000):
        now[0] += 1.0
        troubles.turned_away.add(("192.0.2.1", number.to_bytes(32, "big")))
        troubles.failed.add(("192.0.2.1:1", REFUSED))
    assert len(troubles.turned_away.rows()) == REMEMBERED_MAX
    assert troubles.failed.rows() == [(("192.0.2.1:1", REFUSED), {"count": 1000, "age_s": 0.0})]
    (_, newest), oldest = troubles.turned_away.rows()[-1][0], troubles.turned_away.rows()[0][1]
    assert newest == (999).to_bytes(32, "big") and oldest["age_s"] == REMEMBERED_MAX - 1


def test_of_the_revoked_it_is_logged_once_that_they_are_turned_away(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvcomm_p2p.net")
    gate = Gate(ALICE, [allowed(BOB, "bob")], required=True)
    for allow_list in ([], [allowed(BOB, "robert")], []):
        for _ in range(3):
            gate.turn_away("192.0.2.2", CAROL.public.curve)
            gate.turn_away("192.0.2.2", BOB.public.curve)
        gate.set_allowed(allow_list)
    gate.turn_away("192.0.2.2", BOB.public.curve)
    told = [entry.getMessage() for entry in caplog.records]
    assert [line.partition(",")[0] for line in told] == [
        "turned away bob at 192.0.2.2",
        "turned away robert at 192.0.2.2",
    ]
    assert [row["count"] for row in gate.view()["turned_away"]] == [9, 10]


# --------------------------------------------------------------------------------------------------- files of keys


def test_files_are_looked_at_without_making_any(tmp_path: Path) -> None:
    assert look(tmp_path / "none", "127.0.0.1", encrypted=False) == {"problems": [], "cluster_mark": ""}
    [(text, fix)] = look(tmp_path / "none", "192.0.2.1", encrypted=True)["problems"]
    assert "192.0.2.1 needs keys" in text and "kvcomm keys new" in fix
    assert not (tmp_path / "none").exists()
    make_identity(tmp_path)
    [(text, fix)] = look(tmp_path, "192.0.2.1", encrypted=True)["problems"]
    assert "nobody may connect" in text and "kvcomm keys allow" in fix
    allow(tmp_path, BOB.public.line("bob"))
    load_cluster_keys(tmp_path)
    good = look(tmp_path, "192.0.2.1", encrypted=True)
    assert good["problems"] == [] and good["cluster_mark"]
    for name, what in (
        ("identity.key", "identity key"),
        ("cluster.key", "cluster key"),
        ("allowed.peers", "allow-list"),
    ):
        (tmp_path / name).chmod(0o640)
        found = look(tmp_path, "192.0.2.1", encrypted=True)["problems"]
        assert [(what in text, "chmod 600" in fix) for text, fix in found] == [(True, True)]
        (tmp_path / name).chmod(0o600)
    (tmp_path / "allowed.peers").write_text("nonsense\n")
    assert "line 1" in look(tmp_path, "192.0.2.1", encrypted=True)["problems"][0][0]
    rotate_cluster_key(tmp_path)
    assert look(tmp_path, "192.0.2.1", encrypted=True)["cluster_mark"] not in ("", good["cluster_mark"])


# ------------------------------------------------------------------------------------------------- saved addresses


def life_of(state_dir: Path, identity: Identity, name: str) -> NodeLife:
    return open_life(state_dir, "default", name, identity.public.node_id(name))


def saved(state_dir: Path) -> dict[str, Any]:
    (path,) = (state_dir / "nodes").glob("*.json")
    state: dict[str, Any] = json.loads(path.read_text())
    return state


def test_a_killed_node_finds_its_peers_again_whoever_of_several_they_are(tmp_path: Path, alice: KeyedNode) -> None:
    """On addresses that are not of this machine's own host names, so that nothing but what was saved says whose they are."""
    peers = [allowed(ALICE, "alice"), allowed(CAROL, "carol")]
    with KeyedNode("alice", ALICE, [allowed(BOB, "bob")], host="127.0.0.2") as far:
        life = life_of(tmp_path, BOB, "bob")
        with KeyedNode("bob", BOB, peers, life=life) as bob:
            bob.join(far.driver.addresses.control + "#alice")
            assert wait_until(lambda: saved(tmp_path)["addresses"] == [far.driver.addresses.control], 10.0)
            assert saved(tmp_path)["keys"] == [ALICE.public.curve.hex()]
            state = next((tmp_path / "nodes").glob("*.json")).read_bytes()
        next((tmp_path / "nodes").glob("*.json")).write_bytes(state)  # it was killed: no goodbye
        with KeyedNode("bob", BOB, peers, life=life_of(tmp_path, BOB, "bob")) as again:
            assert again.gate.dial(None, far.driver.addresses.control) == (
                f"{far.driver.addresses.control}#{ALICE.public.curve.hex()}"
            )
            assert wait_until(lambda: again.alive() == ["alice"], 10.0)


def test_of_several_that_claimed_an_address_each_is_tried_and_the_revoked_are_not() -> None:
    node = KeyedNode("bob", BOB, [allowed(ALICE, "alice"), allowed(CAROL, "carol")])
    node.gate.remember(["192.0.2.1:1", "192.0.2.1:1", "192.0.2.2:1"], [ALICE.public.curve, CAROL.public.curve, b""])
    dialled = {node.gate.dial(None, "192.0.2.1:1") for _ in range(4)}
    assert dialled == {f"192.0.2.1:1#{each.public.curve.hex()}" for each in (ALICE, CAROL)}
    assert node.gate.dial(None, "192.0.2.2:1") is None
    node.gate.set_allowed([allowed(ALICE, "alice"), allowed(Identity.new(), "dave")])
    assert {node.gate.dial(None, "192.0.2.1:1") for _ in range(4)} == {f"192.0.2.1:1#{ALICE.public.curve.hex()}"}
    node.driver.stop()


# ------------------------------------------------------------------------------------------------ copied identities


def test_two_machines_with_one_state_directory_tell_both_users(
    tmp_path: Path, alice: KeyedNode, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    life_of(tmp_path / "one", BOB, "bob").close()
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    peers = [allowed(ALICE, "alice")]
    seed = alice.driver.addresses.control + "#alice"
    with (
        KeyedNode("bob", BOB, peers, host="127.0.0.3", life=life_of(tmp_path / "one", BOB, "bob")) as one,
        KeyedNode("bob", BOB, peers, host="127.0.0.4", life=life_of(tmp_path / "two", BOB, "bob")) as two,
    ):
        assert one.driver.node_id == two.driver.node_id
        one.join(seed)
        two.join(seed)

        def twin(node: KeyedNode) -> tuple[str, bool]:
            return node.ask(lambda driver: driver.stats().node.twin)

        assert wait_until(lambda: sorted((twin(one)[1], twin(two)[1])) == [False, True], 10.0)
        assert twin(one)[0] == two.driver.addresses.control and twin(two)[0] == one.driver.addresses.control
        for node in (one, two):
            [(level, text, fix, _)] = identity({"stats": {"twin": twin(node)}})
            assert level == "problem" and "same identity and name" in text and "kvcomm keys new" in fix
        [follows] = [node for node in (one, two) if not twin(node)[1]]
        at = lambda: [peer.control for peer in alice.ask(lambda driver: driver.peers())]  # noqa: E731
        assert wait_until(lambda: at() == [follows.driver.addresses.control])
    told = [entry.getMessage() for entry in caplog.records if "twin" in entry.getMessage()]
    assert any("peers follow this one" in text for text in told) and any("and not this" in text for text in told)
    assert all(entry.levelno == logging.ERROR for entry in caplog.records if entry.getMessage() in told)
