"""Encrypted connections: who gets in, who is cut off, and that nobody can pass for somebody else."""

from __future__ import annotations

import random
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import zmq
from keyed_nodes import KeyedNode, allow_all, allowed
from net_nodes import KEYS, MODEL, TestNode, make_anchor, wait_until, wants_of

from kvcomm_p2p.errors import ConfigError
from kvcomm_p2p.net.curve import CurveKeys
from kvcomm_p2p.net.gate import open_gate
from kvcomm_p2p.net.identity import Identity, allow, make_identity, revoke
from kvcomm_p2p.net.keys import load_cluster_keys
from kvcomm_p2p.net.seal import Sealer
from kvcomm_p2p.net.signatures import signed_record
from kvcomm_p2p.net.zmq_transport import ZmqTransport
from kvcomm_p2p.protocol.messages import PROTOCOL_VERSION, Bye, Hello, MemberRecord
from kvcomm_p2p.protocol.wire import encode
from kvcomm_p2p.settings import Settings

ALICE, BOB, MALLORY = Identity.new(), Identity.new(), Identity.new()


@pytest.fixture
def alice() -> Iterator[KeyedNode]:
    """Lets bob in, and mallory, who is a member that lies."""
    with KeyedNode("alice", ALICE, [allowed(BOB, "bob"), allowed(MALLORY, "mallory")]) as node:
        yield node


@pytest.fixture
def bob(alice: KeyedNode) -> Iterator[KeyedNode]:
    with KeyedNode("bob", BOB, [allowed(ALICE, "alice")], host="127.0.0.2") as node:
        assert node.join(alice.driver.addresses.control + "#alice").result == 1
        yield node


def test_allowed_nodes_on_two_addresses_exchange_blocks(alice: KeyedNode, bob: KeyedNode) -> None:
    assert bob.driver.addresses.control.startswith("127.0.0.2:")
    anchor = make_anchor(alice.store, 1)
    alice.hold(anchor)
    got = bob.driver.run(bob.driver.fetch(alice.driver.node_id, wants_of(anchor), 5.0)).result(10)
    assert len(got.found) == 4 and not got.missed
    assert alice.alive() == ["bob"]
    assert sum(alice.ask(lambda driver: driver.stats().wire.dropped).values()) == 0


def test_two_nodes_of_one_identity_need_no_permission(alice: KeyedNode) -> None:
    with KeyedNode("second", ALICE, [allowed(BOB, "bob")]) as second:
        assert second.join(alice.driver.addresses.control).result == 1
        assert wait_until(lambda: alice.alive() == ["second"])


def test_a_stranger_with_the_secret_of_the_cluster_is_not_let_in(alice: KeyedNode) -> None:
    with KeyedNode("stranger", Identity.new(), [allowed(ALICE, "alice")]) as stranger:
        joined = stranger.join(alice.driver.addresses.control + "#alice", timeout_s=0.5)
        assert not isinstance(joined.result, int)
    assert alice.alive() == []
    assert alice.ask(lambda driver: driver.stats().wire.received) == {}


def test_a_plain_client_is_not_let_in_and_nobody_is_talked_down_to_plain(alice: KeyedNode) -> None:
    """Neither a plain node that dials an encrypted one, nor the other way round."""
    with TestNode("plain", ZmqTransport()) as plain:
        assert not isinstance(plain.join(alice.driver.addresses.control, timeout_s=0.5).result, int)
        plain_address = plain.driver.addresses.control
        assert not isinstance(alice.join(plain_address + "#bob", timeout_s=0.5).result, int)
        assert plain.ask(lambda driver: driver.stats().wire.received) == {}
    assert alice.ask(lambda driver: driver.stats().wire.received) == {}


def test_a_server_without_the_expected_key_learns_nothing(alice: KeyedNode) -> None:
    with KeyedNode("bob", BOB, [allowed(ALICE, "alice"), allowed(MALLORY, "mallory")]) as bob:
        joined = bob.join(alice.driver.addresses.control + "#mallory", timeout_s=0.5)
        assert not isinstance(joined.result, int)
        assert bob.ask(lambda driver: driver.stats().wire.unreachable) >= 1
    assert alice.ask(lambda driver: driver.stats().wire.received) == {}


def test_the_revoked_are_cut_off_within_seconds(tmp_path: Path) -> None:
    folder = allow_all(tmp_path / "alice", allowed(BOB, "bob"))
    with (
        KeyedNode("alice", ALICE, state_dir=folder, keys=load_cluster_keys(folder)) as alice,
        KeyedNode("bob", BOB, [allowed(ALICE, "alice")], keys=load_cluster_keys(folder)) as bob,
    ):
        bob.join(alice.driver.addresses.control + "#alice")
        anchors = [make_anchor(alice.store, number) for number in (1, 2)]
        for anchor in anchors:
            alice.hold(anchor)
        assert wait_until(lambda: alice.alive() == ["bob"])
        found = bob.driver.run(bob.driver.fetch(alice.driver.node_id, wants_of(anchors[0]), 5.0)).result(10)
        assert len(found.found) == 4
        revoke(folder, "bob")
        assert wait_until(lambda: alice.alive() == [])
        missed = bob.driver.run(bob.driver.fetch(alice.driver.node_id, wants_of(anchors[1]), 1.0)).result(5)
        assert not missed.found
        assert wait_until(lambda: alice.dropped("wrong_key") > 0)  # on connections that it still had
        assert alice.alive() == []


def test_the_allowed_are_let_in_without_a_restart(tmp_path: Path) -> None:
    folder = allow_all(tmp_path / "alice", allowed(MALLORY, "mallory"))
    with (
        KeyedNode("alice", ALICE, state_dir=folder, keys=load_cluster_keys(folder)) as alice,
        KeyedNode("bob", BOB, [allowed(ALICE, "alice")], keys=load_cluster_keys(folder)) as bob,
    ):
        assert not isinstance(bob.join(alice.driver.addresses.control + "#alice", timeout_s=0.3).result, int)
        allow(folder, BOB.public.line("bob"))
        assert wait_until(lambda: alice.alive() == ["bob"], 10)


class Client:
    """A hand-driven member: the right secret, an allowed CURVE key, and frames of its own making."""

    def __init__(self, node: KeyedNode, identity: Identity) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        keys = CurveKeys(identity.public.curve, identity.curve_secret, lambda key: True)
        keys.dial(self._socket, node.identity.public.curve)
        self._socket.connect(f"tcp://{node.driver.addresses.control}")

    def send(self, frame: bytes) -> None:
        self._socket.send(Sealer(KEYS.seal).seal(frame))

    def close(self) -> None:
        self._socket.close()
        self._context.term()


@pytest.fixture
def mallory(alice: KeyedNode) -> Iterator[Client]:
    client = Client(alice, MALLORY)
    yield client
    client.close()


def test_a_member_cannot_speak_for_another(alice: KeyedNode, bob: KeyedNode, mallory: Client) -> None:
    """The connection is mallory's, whatever the frame says: also where the frame is one that bob made (a replay)."""
    mallory.send(encode(bob.driver.node_id, Bye(1)))
    assert wait_until(lambda: alice.dropped("wrong_key") == 1)
    assert alice.alive() == ["bob"]


def test_a_member_cannot_make_records_for_another(alice: KeyedNode, bob: KeyedNode, mallory: Client) -> None:
    """Neither with bob's public keys, nor with a node id of bob's, nor behind a genuine record of its own."""
    own = MemberRecord(MALLORY.public.node_id("m"), 1, "m", MODEL, "127.0.0.9:1", "127.0.0.9:2")
    signed = signed_record(MALLORY, own)
    for forged in (
        MemberRecord(
            *(getattr(signed, f) for f in signed.__struct_fields__[:10]), BOB.public.signing, MALLORY.public.curve
        ),
        signed_record(BOB, MemberRecord(BOB.public.node_id("m"), 9, "m", MODEL, "127.0.0.9:1", "127.0.0.9:2")),
    ):
        mallory.send(encode(forged.node_id, Hello(PROTOCOL_VERSION, PROTOCOL_VERSION, bytes(16), forged)))
    assert wait_until(lambda: alice.dropped("wrong_key") + alice.dropped("not_believed") == 2)
    assert alice.alive() == ["bob"]


def test_frames_replayed_on_a_connection_of_the_sender_change_nothing(alice: KeyedNode) -> None:
    """Encryption stops others from replaying; what a member repeats itself is old news."""
    client = Client(alice, BOB)
    record = signed_record(BOB, MemberRecord(BOB.public.node_id("b"), 5, "b", MODEL, "127.0.0.9:1", "127.0.0.9:2"))
    old = signed_record(BOB, MemberRecord(BOB.public.node_id("b"), 4, "b", MODEL, "127.0.0.8:1", "127.0.0.8:2"))
    for member in (record, old, record):
        client.send(encode(member.node_id, Hello(PROTOCOL_VERSION, PROTOCOL_VERSION, bytes(16), member)))
    assert wait_until(lambda: alice.ask(lambda driver: driver.stats().wire.received["Hello"]) == 3)
    time.sleep(0.1)
    [peer] = alice.ask(lambda driver: driver.peers())
    assert peer.control == "127.0.0.9:1"
    client.close()


def test_half_open_and_slow_connections_keep_nobody_out(alice: KeyedNode) -> None:
    """200 connections that never finish the handshake: silent ones, and ones that send it a byte at a time."""
    port = int(alice.driver.addresses.control.rpartition(":")[2])
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(47)
    streams = [socket.create_connection(("127.0.0.1", port), 2) for _ in range(200)]
    try:
        for index, stream in enumerate(streams):
            stream.sendall(b"" if index % 2 else greeting[: index % len(greeting)])
        with KeyedNode("bob", BOB, [allowed(ALICE, "alice")]) as bob:
            started = time.monotonic()
            assert bob.join(alice.driver.addresses.control + "#alice").result == 1
            assert time.monotonic() - started < 1.5
            for stream in streams[:20]:
                with suppress(OSError):
                    stream.sendall(b"\0")
            assert wait_until(lambda: alice.alive() == ["bob"])
        for stream in streams[1:5]:
            stream.settimeout(5)
            assert _hung_up(stream)  # after HANDSHAKE_IVL
    finally:
        for stream in streams:
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            stream.close()


def _hung_up(stream: socket.socket) -> bool:
    try:
        while stream.recv(4096):
            pass
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return True


def test_garbage_in_the_handshake(alice: KeyedNode, bob: KeyedNode) -> None:
    rng = random.Random(1)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(47)
    hello = b"\x04\xc8\x05HELLO" + bytes(194)
    for address in (alice.driver.addresses.control, alice.driver.addresses.bulk):
        for content in (rng.randbytes(500), greeting + rng.randbytes(500), greeting + hello, greeting + hello * 9):
            with (
                socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), 2) as stream,
                suppress(OSError),
            ):
                stream.sendall(content)
    anchor = make_anchor(alice.store, 1)
    alice.hold(anchor)
    got = bob.driver.run(bob.driver.fetch(alice.driver.node_id, wants_of(anchor), 5.0)).result(10)
    assert len(got.found) == 4
    assert alice.ask(lambda driver: driver.stats().wire.failures) == 0


def test_an_address_beyond_loopback_needs_keys_and_an_allow_list(tmp_path: Path) -> None:
    settings = Settings(bind_host="192.0.2.7", state_dir=tmp_path)
    assert settings.encrypted
    with pytest.raises(ConfigError, match=r"`kvcomm keys new`, then `kvcomm keys allow"):
        open_gate(tmp_path, settings.bind_host, encrypted=settings.encrypted)
    make_identity(tmp_path)
    with pytest.raises(ConfigError, match=r"nobody may connect.*`kvcomm keys allow"):
        open_gate(tmp_path, settings.bind_host, encrypted=settings.encrypted)
    allow(tmp_path, BOB.public.line("bob"))
    assert open_gate(tmp_path, settings.bind_host, encrypted=settings.encrypted).required
    assert not open_gate(tmp_path, "127.0.0.1", encrypted=Settings(state_dir=tmp_path).encrypted).required
    always = Settings(state_dir=tmp_path, encrypt="always")
    assert open_gate(tmp_path, "127.0.0.1", encrypted=always.encrypted).required
    with pytest.raises(ConfigError, match="kvcomm keys new"):
        ZmqTransport(bind_host="0.0.0.0")


def test_seeds_say_whose_node_is_expected(alice: KeyedNode) -> None:
    gate = alice.gate
    assert gate.seed("192.0.2.7:5701#bob") == "192.0.2.7:5701"
    assert gate.dial(None, "192.0.2.7:5701") == f"192.0.2.7:5701#{BOB.public.curve.hex()}"
    assert gate.dial(None, "192.0.2.8:5701") is None
    with pytest.raises(ConfigError, match="allowed are bob, mallory and me"):
        gate.seed("192.0.2.7:5701")
    with pytest.raises(ConfigError, match="#NAME"):
        gate.seed("192.0.2.7:5701#nobody")
    for bad in ("host.example:5701#bob", "0.0.0.0:5701", "192.0.2.7", "192.0.2.7:0"):
        with pytest.raises(ConfigError):
            gate.seed(bad)
