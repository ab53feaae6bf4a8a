"""What one peer may use of a node, and what happens to the rest."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest
import zmq
from net_nodes import KEYS, TestNode, make_anchor, wait_until, wants_of

from kvcomm_p2p.errors import ConfigError
from kvcomm_p2p.net import admission, limits
from kvcomm_p2p.net.limits import PEERS_COUNTED_MAX, PeerLimits, require_descriptors
from kvcomm_p2p.net.seal import Sealer
from kvcomm_p2p.net.zmq_transport import ZmqTransport
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.messages import Bye
from kvcomm_p2p.protocol.wire import encode

ONE, OTHER = NodeId(b"1" * 16), NodeId(b"2" * 16)


def test_frames_are_limited_per_sender_and_refill() -> None:
    bucket = PeerLimits(frames_per_s=10, bytes_per_s=1e9, burst_s=2)
    assert sum(bucket.take(ONE, 1, 0.0) for _ in range(50)) == 20
    assert bucket.take(OTHER, 1, 0.0)
    assert sum(bucket.take(ONE, 1, 1.0) for _ in range(50)) == 10
    assert not bucket.take(ONE, 1, 0.5)  # a clock that runs backwards gives nothing


def test_bytes_are_limited_and_the_longest_frame_still_passes() -> None:
    bucket = PeerLimits(frames_per_s=1e9, bytes_per_s=100, burst_s=1)
    assert bucket.take(ONE, 250, 0.0)
    assert not bucket.take(ONE, 1, 1.0)
    assert bucket.take(ONE, 1, 2.0)


def test_the_table_of_senders_is_bounded() -> None:
    bucket = PeerLimits()
    for number in range(PEERS_COUNTED_MAX + 100):
        bucket.take(NodeId(number.to_bytes(16, "big")), 1, 0.0)
    assert len(bucket) == PEERS_COUNTED_MAX


@pytest.fixture
def flood() -> Iterator[zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    yield socket
    socket.close(0)
    context.term()


def test_a_flood_is_dropped_and_starves_nobody(flood: zmq.Socket[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "PeerLimits", lambda: PeerLimits(frames_per_s=300, burst_s=1))
    with TestNode("holder", ZmqTransport()) as holder, TestNode("puller", ZmqTransport()) as puller:
        puller.join(holder.driver.addresses.control)
        anchor = make_anchor(holder.store, 1)
        holder.hold(anchor)
        flood.connect(f"tcp://{holder.driver.addresses.control}")
        frame = Sealer(KEYS.seal).seal(encode(ONE, Bye(1)))
        for _ in range(20_000):
            flood.send(frame)
        found = puller.driver.run(puller.driver.fetch(holder.driver.node_id, wants_of(anchor), 5.0)).result(10)
        assert len(found.found) == 4 and found.wait_lost_s == 0
        assert wait_until(lambda: holder.ask(lambda driver: driver.stats().wire.dropped["over_limit"]) > 0)
        assert holder.ask(lambda driver: [peer.state for peer in driver.peers()]) == ["alive"]


def test_descriptors_are_made_room_for_or_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = [(1024, 4096)]
    monkeypatch.setattr(limits.resource, "getrlimit", lambda kind: limit[0])
    monkeypatch.setattr(limits.resource, "setrlimit", lambda kind, values: limit.__setitem__(0, values))
    assert require_descriptors(500) == 500
    assert limit[0] == (4 * 500 + 256, 4096)
    assert require_descriptors(2000) == (4096 - 256) // 4
    limit[0] = (400, 400)
    with pytest.raises(ConfigError, match=r"ulimit -n 4352"):
        require_descriptors(1024)
    limit[0] = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert require_descriptors(1024) == 1024
