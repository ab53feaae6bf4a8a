"""Raw sockets that speak the CURVE handshake wrongly in every field: nobody gets in, nobody else waits, nothing is left."""

from __future__ import annotations

import os
import random
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from keyed_nodes import KeyedNode, allowed
from net_nodes import make_anchor, wait_until, wants_of

from kvcomm_p2p.net.identity import Identity

ALICE, BOB = Identity.new(), Identity.new()
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(15) + b"\0" + bytes(31)


def command(body: bytes, *, size: int | None = None, long: bool = False) -> bytes:
    """A ZMTP command frame whose stated size may lie."""
    stated = len(body) if size is None else size
    return (b"\x06" + struct.pack(">Q", stated) if long else b"\x04" + bytes([stated & 0xFF])) + body


def hello(
    *, version: bytes = b"\1\0", key: bytes = bytes(32), nonce: bytes = bytes(8), box: bytes = bytes(80)
) -> bytes:
    return b"\5HELLO" + version + bytes(72) + key + nonce + box


LOW_ORDER = bytes(31) + b"\x80"

HANDSHAKES: dict[str, bytes] = {
    "greeting with another mechanism": b"\xff" + bytes(8) + b"\x7f\x03\x01PLAIN" + bytes(47),
    "greeting of version 1": b"\x01\0",
    "greeting of version 255": b"\xff" + bytes(8) + b"\x7f\xff\x01CURVE" + bytes(47),
    "client that says it is a server": GREETING[:32] + b"\1" + bytes(31),
    "empty command": GREETING + command(b""),
    "no HELLO but READY": GREETING + command(b"\5READY"),
    "no HELLO but INITIATE": GREETING + command(b"\10INITIATE" + bytes(400)),
    "no HELLO but MESSAGE": GREETING + command(b"\7MESSAGE" + bytes(40)),
    "no HELLO but ERROR": GREETING + command(b"\5ERROR\x03bad"),
    "HELLO with a key of zeros": GREETING + command(hello()),
    "HELLO with a key of low order": GREETING + command(hello(key=LOW_ORDER)),
    "HELLO with a wrong box": GREETING + command(hello(key=os.urandom(32), nonce=os.urandom(8), box=os.urandom(80))),
    "HELLO of another version": GREETING + command(hello(version=b"\2\0")),
    "short HELLO": GREETING + command(hello()[:-1]),
    "long HELLO": GREETING + command(hello() + b"\0"),
    "short HELLO that says it is long": GREETING + command(hello()[:50], size=200),
    "HELLO of no bytes that says 2**63": GREETING + command(b"", size=2**63, long=True),
    "HELLO that says 2**64 - 1": GREETING + command(hello(), size=2**64 - 1, long=True),
    "HELLO that says 16 MiB and sends 1": GREETING + command(bytes(1 << 20), size=1 << 24, long=True),
    "a message instead of a command": GREETING + b"\0\x05hello",
    "HELLO twice": GREETING + command(hello()) * 2,
    "a name that is longer than its command": GREETING + command(b"\xffHELLO"),
    "reserved flags": GREETING + b"\xf8" + bytes([200]) + hello(),
}


@pytest.fixture
def alice() -> Iterator[KeyedNode]:
    with KeyedNode("alice", ALICE, [allowed(BOB, "bob")]) as node:
        yield node


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGESIZE")


def test_every_wrong_field_ends_the_connection_and_nothing_else(alice: KeyedNode) -> None:
    """On both ports, whole and cut at random places; meanwhile a peer gets its blocks."""
    rng = random.Random(4)
    before = resident_bytes()
    streams: list[tuple[str, socket.socket]] = []
    with KeyedNode("bob", BOB, [allowed(ALICE, "alice")]) as bob:
        for address in (alice.driver.addresses.control, alice.driver.addresses.bulk):
            place = ("127.0.0.1", int(address.rpartition(":")[2]))
            for name, content in HANDSHAKES.items():
                for part in (content, content[: rng.randrange(len(content))]):
                    stream = socket.create_connection(place, 2)
                    with suppress(OSError):
                        stream.sendall(part)
                    streams.append((name, stream))
        started = time.monotonic()
        assert bob.join(alice.driver.addresses.control + "#alice").result == 1
        assert time.monotonic() - started < 2.0
        anchor = make_anchor(alice.store, 1)
        alice.hold(anchor)
        got = bob.driver.run(bob.driver.fetch(alice.driver.node_id, wants_of(anchor), 5.0)).result(10)
        assert len(got.found) == 4
        for name, stream in streams:
            assert ended(stream), name
            stream.close()
        assert alice.alive() == ["bob"]
        stats = alice.ask(lambda driver: driver.stats())
        assert stats.wire.failures == 0 and stats.node.peers_known == 1
        assert not +stats.wire.dropped, "nothing of it came as far as a frame"
    assert resident_bytes() - before < 64 << 20


def ended(stream: socket.socket) -> bool:
    """Closed by the node, within the time that a handshake has (3 s) and a little."""
    stream.settimeout(8)
    try:
        while stream.recv(4096):
            pass
    except (ConnectionResetError, BrokenPipeError):
        return True
    except TimeoutError:
        return False
    return True


def test_a_thousand_wrong_handshakes_leave_no_descriptor(alice: KeyedNode) -> None:
    def descriptors() -> int:
        return sum(1 for _ in Path("/proc/self/fd").iterdir())

    before = descriptors()
    wrong = [content for name, content in HANDSHAKES.items() if "HELLO" in name]
    place = ("127.0.0.1", int(alice.driver.addresses.control.rpartition(":")[2]))
    for number in range(1000):
        with socket.create_connection(place, 2) as stream, suppress(OSError):
            stream.sendall(wrong[number % len(wrong)])
    assert wait_until(lambda: descriptors() <= before + 2, 10.0), descriptors() - before
    with KeyedNode("bob", BOB, [allowed(ALICE, "alice")]) as bob:
        assert bob.join(alice.driver.addresses.control + "#alice").result == 1
