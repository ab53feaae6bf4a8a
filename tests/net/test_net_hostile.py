"""Whatever arrives on a node's two ports, it stays alive and goes on serving."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import zmq
from net_nodes import KEYS, MODEL, TestNode, block_bytes, make_anchor, wait_until, wants_of

from kvcomm_p2p.net.seal import Sealer
from kvcomm_p2p.net.transport import FRAME_BYTES_MAX
from kvcomm_p2p.net.zmq_transport import ZmqTransport
from kvcomm_p2p.protocol.anchors import HeldAnchor, MissReason
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.messages import PROTOCOL_VERSION, Chunk, Hello, MemberRecord, Message, Pull, Tokens, Welcome
from kvcomm_p2p.protocol.wire import HEADER_BYTES, WireError, decode, encode

BLOCK_BYTES = 1 << 16


class Pair:
    """A holder with an anchor, and a puller that joined it."""

    def __init__(self, holder: TestNode, puller: TestNode, anchor: HeldAnchor) -> None:
        self.holder, self.puller, self.anchor = holder, puller, anchor
        addresses = holder.driver.addresses
        self.addresses = [addresses.control, addresses.bulk]

    def still_serves(self) -> None:
        result = self.puller.driver.run(
            self.puller.driver.fetch(self.holder.driver.node_id, wants_of(self.anchor), 5.0)
        ).result(10)
        assert len(result.found) == self.anchor.meta.blocks, result.missed
        for key, handle in result.found.items():
            assert self.puller.store.view(handle) == block_bytes(BLOCK_BYTES, 1, key.index)
            self.puller.store.drop(handle)
        stats = self.holder.ask(lambda driver: driver.stats())
        assert stats.wire.failures == 0


@pytest.fixture
def pair() -> Iterator[Pair]:
    with TestNode("holder", ZmqTransport()) as holder, TestNode("puller", ZmqTransport()) as puller:
        puller.join(holder.driver.addresses.control)
        anchor = make_anchor(holder.store, 1, blocks=4, block_kv_bytes=BLOCK_BYTES)
        holder.hold(anchor)
        yield Pair(holder, puller, anchor)


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def dropped(node: TestNode, reason: str) -> int:
    return node.ask(lambda driver: driver.stats().wire.dropped[reason])


@pytest.fixture
def dealer() -> Iterator[Callable[[str], zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    peers: list[zmq.Socket[bytes]] = []

    def connect(address: str) -> zmq.Socket[bytes]:
        peer = context.socket(zmq.DEALER)
        peer.setsockopt(zmq.LINGER, 1000)
        peer.connect(f"tcp://{address}")
        peers.append(peer)
        return peer

    yield connect
    for peer in peers:
        peer.close(1000)
    context.term()


def test_raw_bytes_on_both_ports(pair: Pair) -> None:
    rng = random.Random(1)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48)
    for address in pair.addresses:
        streams = []
        for content in (
            b"",
            b"GET / HTTP/1.1\r\n\r\n",
            greeting,
            greeting + rng.randbytes(500),
            *map(rng.randbytes, (1, 64, 99_999)),
        ):
            stream = socket.create_connection(("127.0.0.1", port_of(address)), 2)
            with suppress(OSError):  # it may hang up on us
                stream.sendall(content)
            streams.append(stream)
        for stream in streams:
            stream.close()
    pair.still_serves()


def test_random_frames_over_valid_connections(pair: Pair, dealer: Callable[[str], zmq.Socket[bytes]]) -> None:
    rng = random.Random(2)
    for address in pair.addresses:
        peer = dealer(address)
        for size in (0, 1, 15, 16, 17, 100, 10_000):
            peer.send(rng.randbytes(size))
        peer.send_multipart([b"a", b"b", b"c"])
        peer.send_multipart([rng.randbytes(10)] * 50)
    assert wait_until(lambda: dropped(pair.holder, "bad_seal") == 14)
    assert wait_until(lambda: dropped(pair.holder, "malformed") == 4)
    pair.still_serves()


def test_oversize_frames(pair: Pair, dealer: Callable[[str], zmq.Socket[bytes]]) -> None:
    before = pair.holder.ask(lambda driver: driver.stats().wire)
    for address in pair.addresses:
        peer = dealer(address)
        peer.send(bytes(FRAME_BYTES_MAX + 1))
        peer.send(bytes(64 << 20))
        peer.close(100)
    pair.still_serves()
    after = pair.holder.ask(lambda driver: driver.stats().wire)
    assert after.dropped == before.dropped  # never even got in


def test_sealed_nonsense(pair: Pair, dealer: Callable[[str], zmq.Socket[bytes]]) -> None:
    """A peer with the right key that talks rubbish: mutated frames of real messages."""
    rng = random.Random(3)
    sealer = Sealer(KEYS.seal)
    frame = encode(
        NodeId(b"n" * 16),
        Hello(PROTOCOL_VERSION, PROTOCOL_VERSION, bytes(16), member(b"n" * 16, "127.0.0.1:1", "127.0.0.1:1")),
    )
    undecodable = 0
    for address in pair.addresses:
        peer = dealer(address)
        for _ in range(300):
            mutated = bytearray(frame)
            for _ in range(rng.randint(1, 8)):
                mutated[rng.randrange(len(mutated))] = rng.randrange(256)
            mutated = mutated[: rng.randint(0, len(mutated))]
            try:
                decode(bytes(mutated))
            except WireError:
                undecodable += 1
                peer.send(sealer.seal(bytes(mutated)))
    assert undecodable > 400 and len(frame) > HEADER_BYTES
    assert wait_until(lambda: dropped(pair.holder, "undecodable") == undecodable)
    pair.still_serves()


def member(node_id: bytes, control: str, bulk: str) -> MemberRecord:
    return MemberRecord(NodeId(node_id), 1, "liar", MODEL, control, bulk)


class Liar:
    """A hand-driven peer with the cluster's key: joins, then answers a pull with what the test wants."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.answers = self.context.socket(zmq.DEALER)
        self.control, self.bulk = (self.context.socket(zmq.ROUTER) for _ in range(2))
        ports = [router.bind_to_random_port("tcp://127.0.0.1") for router in (self.control, self.bulk)]
        self.addresses = [f"127.0.0.1:{port}" for port in ports]
        self.node_id = NodeId(b"L" * 16)
        self.record = member(self.node_id, *self.addresses)
        self.sealer = Sealer(KEYS.seal)
        for router in (self.control, self.bulk):
            router.setsockopt(zmq.RCVTIMEO, 5000)

    def seal(self, message: Message) -> bytes:
        return self.sealer.seal(encode(self.node_id, message))

    def expect(self, router: zmq.Socket[bytes], kind: type) -> tuple[bytes, Message]:
        while True:
            connection, sealed = router.recv_multipart()
            frame = self.sealer.open(sealed)
            assert frame is not None
            message = decode(frame)[1]
            if isinstance(message, kind):
                return connection, message

    def welcome(self, victim: TestNode) -> None:
        hello = self.expect(self.control, Hello)[1]
        assert isinstance(hello, Hello)
        self.answers.connect(f"tcp://{hello.member.control}")
        self.answers.send(self.seal(Welcome(self.record, ())))
        assert wait_until(lambda: len(victim.ask(lambda driver: driver.peers())) == 1)

    def close(self) -> None:
        for router in (self.control, self.bulk, self.answers):
            router.close(0)
        self.context.term()


@pytest.fixture
def liar() -> Iterator[Liar]:
    peer = Liar()
    yield peer
    peer.close()


@pytest.mark.parametrize(
    ("case", "length", "payload", "reason"),
    [
        ("short", BLOCK_BYTES - 1, BLOCK_BYTES - 1, MissReason.STALLED),
        ("long", BLOCK_BYTES + 1, BLOCK_BYTES + 1, MissReason.LENGTH_MISMATCH),
        ("header lies", BLOCK_BYTES, BLOCK_BYTES + 5, MissReason.LENGTH_MISMATCH),
        ("no payload", BLOCK_BYTES, None, MissReason.LENGTH_MISMATCH),
        ("empty payload", BLOCK_BYTES, 0, MissReason.LENGTH_MISMATCH),
        ("wrong bytes", BLOCK_BYTES, BLOCK_BYTES, MissReason.DIGEST_MISMATCH),
    ],
)
def test_lying_holder(liar: Liar, case: str, length: int, payload: int | None, reason: MissReason) -> None:
    with TestNode("victim", ZmqTransport()) as victim:
        joining = victim.driver.run(victim.driver.join([liar.addresses[0]], 5.0))
        liar.welcome(victim)
        assert joining.result(5).result == 1
        anchor = make_anchor(TestNode("elsewhere", ZmqTransport()).store, 1, blocks=1, block_kv_bytes=BLOCK_BYTES)
        pulling = victim.driver.run(victim.driver.fetch(liar.node_id, wants_of(anchor), 5.0))
        connection, pull = liar.expect(liar.bulk, Pull)
        assert isinstance(pull, Pull)
        header = liar.seal(Chunk(pull.pull_id, 0, 0, length))
        parts = [connection, header] if payload is None else [connection, header, bytes(payload)]
        liar.bulk.send_multipart(parts)
        result = pulling.result(10)
        assert {miss.reason for miss in result.missed.values()} == {reason}
        assert result.wait_lost_s <= 0.25
        assert wait_until(lambda: len(victim.store) == 0)
        assert victim.ask(lambda driver: driver.stats().wire.failures) == 0


def test_unasked_chunks_and_answers_are_dropped(liar: Liar) -> None:
    with TestNode("victim", ZmqTransport()) as victim:
        victim.driver.run(victim.driver.join([liar.addresses[0]], 5.0))
        liar.welcome(victim)
        anchor = make_anchor(TestNode("elsewhere", ZmqTransport()).store, 1, blocks=1, block_kv_bytes=BLOCK_BYTES)
        pulling = victim.driver.run(victim.driver.fetch(liar.node_id, wants_of(anchor), 5.0))
        connection, pull = liar.expect(liar.bulk, Pull)
        assert isinstance(pull, Pull)
        for message in (Chunk(pull.pull_id + 99, 0, 0, 8), Tokens(99, bytes(4), (bytes(32),))):
            liar.bulk.send_multipart([connection, liar.seal(message), bytes(8)])
        liar.bulk.send_multipart(
            [connection, liar.seal(Chunk(pull.pull_id, 0, 0, BLOCK_BYTES)), block_bytes(BLOCK_BYTES, 1, 0)]
        )
        assert len(pulling.result(10).found) == 1
        assert dropped(victim, "unasked_payload") == 1
        assert dropped(victim, "malformed") == 1
